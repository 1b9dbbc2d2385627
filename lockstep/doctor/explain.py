"""The one criterion: which prediction explains the gap, on rows that it was not fitted on.

A hypothesis predicts one side's column without its defect. What a token adds to the gap is
log(d^2 / scale^2), and nothing below the scale of numeric noise, with d = trainer - sampler: a
token is explained when its difference falls to what numerics make. Under squares a prediction that
is merely nearer to the mean would explain half of any gap. The *gain* of a prediction is the gap as
recorded minus the gap after the repair. Nothing is judged on what it was fitted on:

- whether a row is hit is decided by one half of its tokens, and counted on the other half;
- of several predictions (a temperature, an offset), the best one of half of the rows is counted on
  the other half of them.

The share of a hypothesis is its gain over the whole gap. It is named if the share exceeds chance:
zero by Z standard errors over rows. The best one is the first cause; the rest is explained again.

# N tokens  n compared tokens  R rows  P predictions
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.doctor.causes import CAUSES
from lockstep.doctor.findings import Basis, Evidence, Setting, evidence_at
from lockstep.doctor.rows import BoolArray, Float64Array, Rows
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.doctor.scoring.model import Model

Z = 3.5
"""Standard errors that a share must exceed: Bonferroni over some 60 predictions at 1 %."""
MIN_SHARE = 0.1
"""Share of the remaining gap that is named: less would not change what a user does."""
TIE = 0.02
"""Share within which two hypotheses explain equally well: the one with fewer fitted numbers wins.
The error of a share in a sample of 32,768 tokens is about 1 %."""
MAX_CAUSES = 3
"""Rounds: two causes, and one more to see that nothing is left."""
CHUNK = 4
"""Neighbouring tokens that fall into the same half: errors of neighbours are correlated."""
NUM_BLOCKS = 8
"""Rows below which parts of rows count as rows: a standard error needs several."""
BLOCK_TOKENS = 8
SECONDS, ALL_SECONDS = 20.0, 90.0
"""Deadlines of one hypothesis in a round, and of all, in seconds of processor time: a diagnosis
takes at most a minute on two cores, and finds the same on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A sample of the rows, as the earlier causes leave it: the input of a hypothesis."""

    rows: Rows
    setting: Setting
    cache: dict[Any, Any] = field(default_factory=dict[Any, Any])
    """Results that rounds share."""
    deadline: float = float("inf")
    scale: float = 0.045
    """Nats that numerics make: sqrt(2 k2) at the limit of k2 (`examine.limit_of`)."""

    def loss(self, d: Float64Array) -> Float64Array:
        """Each difference's part of the gap."""
        return 2 * np.log(np.maximum(np.abs(d) / self.scale, 1.0))

    @property
    def model(self) -> Model:
        """The model of a hypothesis that needs one: it runs only if a model was given."""
        assert self.setting.model is not None, "hypotheses name it in `needs`"
        return self.setting.model

    @property
    def sampler(self) -> Float64Array:
        """[N] natural log-probs of the sampler; NaN where nothing is compared."""
        return self._side(self.rows.rollout_logprobs)

    @property
    def trainer(self) -> Float64Array:
        return self._side(self.rows.trainer_logprobs)

    def _side(self, values: Any) -> Float64Array:
        out = np.full(self.rows.num_tokens, np.nan)
        at = self.rows.compared
        out[at] = values[at]
        return out

    @property
    def is_late(self) -> bool:
        return time.process_time() > self.deadline

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make`, computed once for this sample."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One side's column without the defect; None leaves a side as it is recorded."""

    text: str
    """The defect in words, with its numbers: "moved by +1"."""
    sampler: Float64Array | None = None
    """[N] NaN where nothing is predicted: these tokens keep their gap."""
    trainer: Float64Array | None = None
    cause: str = ""
    """If it is not that of the hypothesis."""
    is_of_rows: bool = True
    """Whether it may hit some rows and not others."""
    chance: float = 0.0
    """Share that the same search explains where there is nothing to find (other rows)."""
    expected: dict[int, tuple[int, int, Sequence[int]]] = field(default_factory=dict[Any, Any])
    """Row -> (begin, end, ids that should be there), to show."""
    basis: Basis | None = None

    @classmethod
    def of_side(
        cls,
        side: str,
        values: Float64Array,
        text: str,
        *,
        cause: str = "",
        basis: Basis | None = None,
        is_of_rows: bool = True,
    ) -> Prediction:
        """A prediction of the column of one side: "sampler" or "trainer"."""
        return cls(
            text=text,
            sampler=values if side == "sampler" else None,
            trainer=values if side == "trainer" else None,
            cause=cause,
            basis=basis,
            is_of_rows=is_of_rows,
        )


Predict = Callable[[View], Iterable[Prediction]]


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One cause, and what it predicts."""

    name: str
    cause: str
    claim: str
    predict: Predict
    needs: tuple[str, ...] = ()
    """Fields of `Rows` and `Setting` that it cannot do without, besides both log-probs."""
    fitted: int = 0
    """Numbers that it fits: of two that explain equally well, the one that fits fewer wins."""
    basis: Basis = "fit"
    least: float = 0.3
    """Share of the gap that it must explain in the rows that it hits: 0.6 where the right one gives
    the very numbers, 0.3 where it is an approximation, or a second cause may hide half of it."""


HYPOTHESES: dict[str, Hypothesis] = {}
"""Every hypothesis by name, a plugin's too."""


def hypothesis(
    name: str, *, cause: str, claim: str, **options: Any
) -> Callable[[Predict], Predict]:
    """Registers a function as a hypothesis. options: fields of `Hypothesis`."""

    def register(predict: Predict) -> Predict:
        if cause not in CAUSES:
            raise ConfigError(
                f"the hypothesis {name} names the cause {cause!r}, which is not known. Add it "
                "first: lockstep.doctor.causes.add_cause(Cause(...))."
            )
        full = f"hypotheses/{name}"
        HYPOTHESES[full] = Hypothesis(
            name=full, cause=cause, claim=claim, predict=predict, **options
        )
        return predict

    return register


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A hypothesis on some rows."""

    hypothesis: Hypothesis
    prediction: Prediction
    share: float
    """Share of the gap, beyond chance, on rows that it was not fitted on."""
    error: float
    """Standard error of the share."""
    null_error: float
    """The same if there were nothing to explain."""
    hit_share: float
    """Share of the gap of the rows that it hits."""
    num_blocks: int
    """Rows, or parts of rows, that the error is of."""
    hit: BoolArray
    """[R] rows that the prediction explains better."""
    after: Float64Array
    """[N] the gap after the repair of these rows."""

    @property
    def cause(self) -> str:
        return self.prediction.cause or self.hypothesis.cause

    @property
    def is_beyond_chance(self) -> bool:
        error = Z * self.null_error * (1 + 4 / self.num_blocks)  # of few blocks the error is unsure
        is_fit = self.hit_share >= self.hypothesis.least
        return self.share > error and self.share >= MIN_SHARE and is_fit


def residual(view: View, prediction: Prediction) -> Float64Array:
    """[N] trainer - sampler after the repair; the recorded gap where nothing is predicted."""
    trainer = view.trainer if prediction.trainer is None else prediction.trainer
    sampler = view.sampler if prediction.sampler is None else prediction.sampler
    with np.errstate(invalid="ignore"):
        left = trainer - sampler
    return np.where(np.isfinite(left), left, view.rows.gap)


def judge(view: View, hypothesis: Hypothesis, predictions: Sequence[Prediction]) -> Judged | None:
    """The best of the predictions, and its share on rows that it was not fitted on."""
    rows, at = view.rows, view.rows.compared
    if not predictions or not len(at):
        return None
    recorded = view.loss(rows.gap[at])
    block = _blocks(rows)[at]
    num = int(block.max()) + 1
    half = (_order(rows)[at] // CHUNK) % 2
    whole = np.bincount(block, recorded, num)
    parts = np.empty((len(predictions), 2, num))  # gain of each half of the tokens of a block
    for p, prediction in enumerate(predictions):
        gain = recorded - view.loss(residual(view, prediction)[at])
        for h in (0, 1):
            parts[p, h] = np.bincount(block[half == h], gain[half == h], num)
    is_of_rows = np.array([p.is_of_rows for p in predictions])[:, None]
    is_hit = (parts[:, ::-1] > 0) | ~is_of_rows[:, None]  # by the other half
    counted = np.where(is_hit, parts, 0.0)
    fitted = np.where(is_of_rows, np.maximum(parts, 0).sum(1), parts.sum(1))
    gains = np.zeros(num)
    for f in (0, 1):
        if num > 1:
            mine = np.arange(num) % 2 == f
            chosen = int(fitted[:, ~mine].sum(1).argmax())
            gains[mine] = counted[chosen][:, mine].sum(0)
        else:
            gains += counted[int(parts[:, 1 - f].sum(1).argmax()), f]
    best = int(fitted.sum(1).argmax())
    prediction, total = predictions[best], float(whole.sum())
    if not total:
        return None
    share = float(gains.sum() / total)
    # A ratio over blocks: the error of its numerator, given the denominator.
    error = float(np.sqrt(np.square(gains - share * whole).sum()) / total)
    is_hit_block = (gains > 0) | (not prediction.is_of_rows)
    lucky = prediction.chance * whole * is_hit_block
    null = float(np.sqrt(np.square(gains - lucky).sum()) / total)
    share -= float(lucky.sum()) / total
    hit_share = float((gains - lucky)[is_hit_block].sum() / max(whole[is_hit_block].sum(), 1e-12))
    left = residual(view, prediction)
    hit = np.ones(len(rows), np.bool_)
    if prediction.is_of_rows:
        gain = np.bincount(rows.row_of[at], recorded - view.loss(left[at]), len(rows))
        hit = gain > 0
    after = np.where(hit[rows.row_of], left, rows.gap)
    return Judged(
        hypothesis=hypothesis,
        prediction=prediction,
        share=share,
        error=error,
        null_error=min(error, null),
        hit_share=hit_share,
        num_blocks=num,
        hit=hit,
        after=after,
    )


def _order(rows: Rows) -> Any:
    """[N] number of each compared token in its row."""
    is_compared = np.zeros(rows.num_tokens + 1, np.int64)
    is_compared[rows.compared + 1] = 1
    total = np.cumsum(is_compared)
    return total[:-1] - np.repeat(total[rows.offsets[:-1]], rows.sizes)


def _blocks(rows: Rows) -> Any:
    """[N] number of the row, or of the part of a row where there are few rows."""
    if len(rows) >= NUM_BLOCKS:
        return rows.row_of
    _, number = np.unique(
        rows.row_of * (1 << 32) + _order(rows) // BLOCK_TOKENS, return_inverse=True
    )
    return number


@dataclass(kw_only=True)
class Explanation:
    """The causes found in the sample."""

    causes: list[tuple[Judged, float, float]] = field(default_factory=list[Any])
    """(the cause, its share of the whole gap, half the width of its interval), in order."""
    tried: dict[str, Judged] = field(default_factory=dict[str, Judged])
    """Hypothesis -> its result in the first round."""
    late: list[str] = field(default_factory=list[str])
    """Hypotheses that did not end in time."""
    errors: dict[str, str] = field(default_factory=dict[str, str])
    rivals: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Cause -> causes that explain the same within their errors."""
    view: View | None = None
    """The view after all repairs."""


def explain(
    view: View,
    hypotheses: Sequence[Hypothesis],
    *,
    is_enough: Callable[[View], bool],
    whole: float | None = None,
) -> Explanation:
    """Names the causes of the gap, the best first.

    is_enough: whether what is left is numeric noise. whole: sum of d^2 that shares are of, where a
    part of the gap has been explained by facts.
    """
    view = replace(view, deadline=time.process_time() + ALL_SECONDS)
    out = Explanation(view=view)
    whole = whole or _k2(view) or 1.0
    for _ in range(MAX_CAUSES):
        before = _k2(view)
        if is_enough(view) and (out.causes or not _may_be_exact(view)):
            break
        found = _round(view, hypotheses, out)
        least = 0.8 if is_enough(view) else 0.0  # numeric noise hides a defect only if it is exact
        named = [j for j in found if j.is_beyond_chance and j.share >= least]
        named = [j for j in named if j.cause not in {c.cause for c, *_ in out.causes}]
        if not named:
            break
        best = max(named, key=lambda j: j.share)
        tied = [j for j in named if best.share - j.share <= max(TIE, (1 - best.share) * TIE * 5)]
        first = min(tied, key=lambda j: (j.hypothesis.fitted, -j.share))
        out.rivals[first.cause] = sorted({j.cause for j in tied} - {first.cause})
        view = replace(view, rows=repaired(view, first))
        after = _k2(view)
        share = max(before - after, 0.0) / whole
        out.causes.append((first, share, 2 * first.error * share))
        out.view = view
    return out


def _k2(view: View) -> float:
    d = view.rows.gap[view.rows.compared]
    return float(np.square(d).sum())


def _may_be_exact(view: View) -> bool:
    """Whether there is any gap beyond float32 to explain."""
    at = view.rows.compared
    return bool(len(at)) and float(np.square(view.rows.gap[at]).mean()) > 1e-9


def _round(view: View, hypotheses: Sequence[Hypothesis], out: Explanation) -> list[Judged]:
    found: list[Judged] = []
    known = view.setting.has | view.rows.has
    for one in sorted(hypotheses, key=lambda h: "model" in h.needs):  # the cheap ones first
        if any(name not in known for name in one.needs):
            continue
        timed = replace(view, deadline=min(view.deadline, time.process_time() + SECONDS))
        predictions: list[Prediction] = []
        try:
            for prediction in one.predict(timed):
                predictions.append(prediction)
                if timed.is_late:
                    break
        except Exception as error:  # a plugin's bug, a template that refuses: the others go on
            out.errors[one.name] = f"failed with {type(error).__name__}: {error}"
            continue
        if timed.is_late:
            out.late.append(one.name)
        judged = [
            j
            for cause in {p.cause for p in predictions}
            if (j := judge(timed, one, [p for p in predictions if p.cause == cause])) is not None
        ]
        if not judged:
            continue
        best = max(judged, key=lambda j: j.share)
        out.tried.setdefault(one.name, best)
        found += judged
        if best.is_beyond_chance and best.share > 1 - TIE:
            break  # nothing can explain more
    return found


def repaired(view: View, judged: Judged) -> Rows:
    """The rows without a cause, in the rows that it hits."""
    rows, prediction = view.rows, judged.prediction
    is_hit = judged.hit[rows.row_of]
    changed: dict[str, Any] = {}
    for name, new in (
        ("rollout_logprobs", prediction.sampler),
        ("trainer_logprobs", prediction.trainer),
    ):
        if new is not None:
            old = getattr(rows, name)
            changed[name] = np.where(is_hit & np.isfinite(new), new, old).astype(np.float32)
    return rows.with_(**changed)


def evidence_of(view: View, judged: Judged, limit: int) -> tuple[Evidence, ...]:
    """The rows that lose the most by the repair, with the ids that are expected there."""
    rows, at = view.rows, view.rows.compared
    gain = view.loss(rows.gap[at]) - view.loss(judged.after[at])
    by_row = np.bincount(rows.row_of[at], gain, len(rows))
    by_row[~judged.hit] = 0
    out: list[Evidence] = []
    for row in np.argsort(-by_row, kind="stable")[:limit].tolist():
        if by_row[row] <= 0:
            break
        mine = at[rows.row_of[at] == row]
        begin, end = int(mine[0]), int(mine[-1]) + 1
        before = float(np.abs(rows.gap[mine]).mean())
        after = float(np.abs(judged.after[mine]).mean())
        note = f"mean |d| {before:.2g} becomes {after:.2g}: {judged.prediction.text}"
        ids: Sequence[int] = ()
        if row in judged.prediction.expected:
            first, last, ids = judged.prediction.expected[row]
            begin, end = int(rows.offsets[row]) + first, int(rows.offsets[row]) + last
        out.append(evidence_at(rows, begin, end, note, ids))
    return tuple(out)
