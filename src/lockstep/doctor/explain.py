"""The one criterion: which prediction explains the gap, on rows that it was not fitted on.

A hypothesis predicts one side's column without its defect. A token adds log(d^2 / scale^2) to the
gap, and nothing below the scale of numeric noise, with d = trainer - sampler: a token is explained
when its difference falls to numeric noise. Under squares a prediction that
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
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.doctor.causes import CAUSES
from lockstep.doctor.findings import MIN_TOKENS, Basis, Evidence, Setting, claim_of
from lockstep.doctor.rows import SIDES, BoolArray, Float64Array, Rows, given
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.doctor.scoring.model import Model

Z = 3.5
"""Standard errors that a share must exceed: Bonferroni over some 60 predictions at 1 %."""
MIN_SHARE = 0.1
"""Share of the remaining gap that is named: less would not change what a user does."""
TIE = 0.02
"""Share that makes no difference: two hypotheses explain equally well, or a bound holds. The error
of a share in a sample of 32,768 tokens is about 1 %."""
MIN_FAR = 8
"""Tokens beyond numeric noise that a cause needs where noise can make the whole gap: any cut that
fits the furthest token explains all of it."""
MAX_CAUSES = 3
"""Rounds: two causes, and one round more to check that nothing is left."""
CHUNK = 4
"""Neighbouring tokens that fall into the same half: errors of neighbours are correlated."""
NUM_BLOCKS = 8
"""Least number of rows. Of fewer, parts of eight tokens count as rows: a standard error needs
several."""
SECONDS, ALL_SECONDS = 15.0, 60.0
"""Deadlines of one hypothesis in a round, and of all, in seconds of processor time: a diagnosis
takes at most a minute on two cores, and finds the same on a busy machine. Each cause that is found
leaves at least SECONDS for the next."""


def size(d: Float64Array) -> float:
    """Mean square of the known differences."""
    known = d[np.isfinite(d)]
    return float(np.square(known).mean()) if len(known) else 0.0


@dataclass(frozen=True, kw_only=True)
class View:
    """A sample of the rows, as the earlier causes leave it: the input of a hypothesis."""

    rows: Rows
    """Each has a compared token, also after a repair."""
    setting: Setting
    deadline: float = float("inf")
    scale: float = 0.045
    """Nats that numerics make: sqrt(2 k2) at the limit of k2 (`examine.limit_of`)."""
    step: float = 0.0
    """Distance of neighbouring numbers of a side that was rounded; 0 if neither was."""
    above: Float64Array | float = 0.0
    """[N] log-probs of the input that the sampler had, minus the row's: of the causes so far."""

    def loss(self, d: Float64Array) -> Float64Array:
        """Each difference's part of the gap."""
        return 2 * np.log(np.maximum(np.abs(d) / self.scale, 1.0))

    @property
    def model(self) -> Model:
        """The model of a hypothesis that needs one."""
        return given(self.setting.model)

    @property
    def plain(self) -> Float64Array:
        """[N] log-probs that both sides should have, by the model and the causes so far."""
        return self.model.plain(self.rows) + self.above

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
    def suspects(self) -> Sequence[str]:
        """Sides that are further from the model than numerics; both where no model can tell."""
        model = self.setting.model
        if model is None or not model.has_own(self.rows):
            return (*SIDES,)
        far = [side for side in SIDES if size(getattr(self, side) - self.plain) > self.scale**2]
        return far or (*SIDES,)

    @property
    def is_late(self) -> bool:
        return time.process_time() > self.deadline


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One side's column without the defect; None leaves a side as it is recorded."""

    text: str
    """The defect in words, with its numbers: "moved by +1"."""
    sampler: Float64Array | None = None
    """[N] NaN where nothing is predicted: these tokens keep their gap."""
    trainer: Float64Array | None = None
    above: Float64Array | None = None
    """[N] the sampler's log-probs minus the trainer's, if a model gives both: a further cause is
    then sought in the sampler's numbers as they are recorded."""
    cause: str = ""
    """Set if it differs from the cause of the hypothesis."""
    is_of_rows: bool = True
    """True if it may hit some rows and spare others."""
    chance: float = 0.0
    """Share that the same search explains where there is nothing to find (other rows)."""

    @classmethod
    def of_side(cls, side: str, values: Float64Array, text: str, **options: Any) -> Prediction:
        """A prediction of the column of one side: "sampler" or "trainer"."""
        return cls(text=text, **{side: values}, **options)


Predict = Callable[[View], Iterable[Prediction]]


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A cause, and a function that predicts its log-probs."""

    name: str
    cause: str
    claim: str
    predict: Predict
    needs: tuple[str, ...] = ()
    """Fields of `Rows` and `Setting` that it cannot do without, besides both log-probs."""
    fitted: int = 0
    """Numbers that it fits. If two explain equally well, the one with fewer fitted numbers wins."""
    basis: Basis = "fit"
    is_of_other_ids: bool = False
    """True if the sampler read other ids in the rows that it hits."""
    least: float = 0.3
    """Share of the gap that it must explain in the rows that it hits: 0.6 where the right one gives
    the very numbers (0.8 where any text before the row explains a half of them), 0.3 where it is an
    approximation, or a second cause may hide half of it."""


HYPOTHESES: dict[str, Hypothesis] = {}
"""Every hypothesis by name, a plugin's too."""


def hypothesis(
    name: str = "", *, cause: str, claim: str = "", **options: Any
) -> Callable[[Predict], Predict]:
    """Registers a function as a hypothesis. By default it has the function's name, and claims the
    first sentence of its docstring. options: fields of `Hypothesis`."""

    def register(predict: Predict) -> Predict:
        short = name or predict.__name__
        if cause not in CAUSES:
            raise ConfigError(
                f"the hypothesis {short} names the cause {cause!r}, which is not known. Add it "
                "first: lockstep.doctor.causes.add_cause(Cause(...))."
            )
        full, said = f"hypotheses/{short}", claim or claim_of(predict)
        HYPOTHESES[full] = Hypothesis(
            name=full, cause=cause, claim=said, predict=predict, **options
        )
        return predict

    return register


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """A hypothesis on some rows, in blocks: rows, or parts of rows where there are few."""

    hypothesis: Hypothesis
    prediction: Prediction
    gains: Float64Array
    """[B] gain of each block on tokens that the prediction was not fitted on."""
    lucky: Float64Array
    """[B] gain by chance."""
    whole: Float64Array
    """[B] its gap."""
    row: Any
    """[B] its row."""
    hit: BoolArray
    """[R] rows that the prediction explains better."""
    after: Float64Array
    """[N] the gap after the repair of these rows."""
    num_tested: int
    """Tokens that the prediction moves beyond numeric noise."""
    has_lost: bool
    """True if each prediction moves enough tokens away from the other side."""

    @property
    def cause(self) -> str:
        return self.prediction.cause or self.hypothesis.cause

    @property
    def total(self) -> float:
        """The whole gap; 1 where there is none to share."""
        return float(self.whole.sum()) or 1.0

    @cached_property
    def share(self) -> float:
        """Share of the gap, beyond chance, on rows that it was not fitted on."""
        return float((self.gains - self.lucky).sum() / self.total)

    @cached_property
    def error(self) -> float:
        """Standard error of the share, which is a ratio: the error of its numerator."""
        return _norm(self.gains - self.gains.sum() / self.total * self.whole) / self.total

    @property
    def hit_share(self) -> float:
        """Share of the gap of the blocks that it hits."""
        is_hit = (self.gains > 0) | (not self.prediction.is_of_rows)
        gained = (self.gains - self.lucky)[is_hit].sum()
        return float(gained / max(self.whole[is_hit].sum(), 1e-12))

    @property
    def certain_share(self) -> float:
        """Share of the gap that it must explain within numeric noise: a repair that the model
        scores leaves the noise of the rows that it does not hit."""
        return self.hit_share if self.hypothesis.basis == "repair" else self.share

    @property
    def chance(self) -> float:
        """Largest share that chance explains where nothing is wrong."""
        null = min(self.error, _norm(self.gains - self.lucky) / self.total)
        return Z * null * (1 + 4 / len(self.whole))  # of few blocks the error is unsure

    @property
    def is_beyond_chance(self) -> bool:
        is_fit = self.hit_share >= self.hypothesis.least
        return self.share > max(self.chance, MIN_SHARE) and is_fit

    def within(self, rows: BoolArray, view: View) -> Judged:
        """The same for a cause that hits these rows alone."""
        is_in = rows[self.row]
        return replace(
            self,
            gains=np.where(is_in, self.gains, 0.0),
            lucky=np.where(is_in, self.lucky, 0.0),
            hit=self.hit & rows,
            after=np.where(rows[view.rows.row_of], self.after, view.rows.gap),
        )


def _norm(values: Float64Array) -> float:
    return float(np.sqrt(np.square(values).sum()))


def residual(view: View, prediction: Prediction) -> Float64Array:
    """[N] trainer - sampler after the repair; the recorded gap where nothing is predicted."""
    trainer = view.trainer if prediction.trainer is None else prediction.trainer
    sampler = view.sampler if prediction.sampler is None else prediction.sampler
    with np.errstate(invalid="ignore"):
        left = trainer - sampler
    return np.where(np.isfinite(left), left, view.rows.gap)


def judge(view: View, hypothesis: Hypothesis, predictions: Sequence[Prediction]) -> Judged:
    """The best of some predictions, and its share on rows that it was not fitted on."""
    rows, at = view.rows, view.rows.compared
    recorded = view.loss(rows.gap[at])
    block = _blocks(rows)[at]
    num = int(block.max()) + 1
    half = (_order(rows)[at] // CHUNK) % 2
    whole: Any = np.bincount(block, recorded, num)
    parts = np.empty((len(predictions), 2, num))  # gain of each half of the tokens of a block
    tested = np.empty(len(predictions), np.int64)
    for p, prediction in enumerate(predictions):
        left = residual(view, prediction)[at]
        gain = recorded - view.loss(left)
        tested[p] = np.count_nonzero(view.loss(left - rows.gap[at]))
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
    prediction = predictions[best]
    lost = [-gain.sum() > Z * gain.std() * np.sqrt(num) for gain in parts.sum(1)]
    left = residual(view, prediction)
    hit = np.ones(len(rows), np.bool_)
    if prediction.is_of_rows:
        hit = rows.row_sums(at, recorded - view.loss(left[at])) > 0
    row = np.zeros(num, np.int64)
    row[block] = rows.row_of[at]
    return Judged(
        hypothesis=hypothesis,
        prediction=prediction,
        gains=gains,
        lucky=prediction.chance * whole * ((gains > 0) | (not prediction.is_of_rows)),
        whole=whole,
        row=row,
        hit=hit,
        after=np.where(hit[rows.row_of], left, rows.gap),
        num_tested=int(tested[best]),
        has_lost=bool((tested >= MIN_TOKENS).all() and np.all(lost)),
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
    _, number = np.unique(rows.row_of * (1 << 32) + _order(rows) // NUM_BLOCKS, return_inverse=True)
    return number


@dataclass(kw_only=True)
class Explanation:
    """The causes found in the sample."""

    causes: list[tuple[Judged, float, float]] = field(default_factory=list[Any])
    """(the cause, its share of the whole gap, half the width of its interval), in order."""
    tried: dict[str, Judged] = field(default_factory=dict[str, Judged])
    """Hypothesis -> its result in the first round."""
    lost: set[str] = field(default_factory=set[str])
    """Hypotheses whose every prediction was tested in the last round, and lost."""
    late: list[str] = field(default_factory=list[str])
    """Hypotheses that did not end in time."""
    errors: dict[str, str] = field(default_factory=dict[str, str])
    lacks: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Hypothesis -> records that would decide it, if these rows do not."""
    rivals: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Cause -> causes that explain the same within their errors."""


def explain(
    view: View, hypotheses: Sequence[Hypothesis], *, is_enough: Callable[[View], bool]
) -> Explanation:
    """Names the causes of the gap, the best first. is_enough: True if the rest is noise."""
    view = replace(view, deadline=time.process_time() + ALL_SECONDS)
    out, whole = Explanation(), _k2(view) or 1.0
    for _ in range(MAX_CAUSES):
        before = _k2(view)
        # Numeric noise hides a defect only if it is exact, and float32 none.
        if is_enough(view) and (out.causes or size(view.rows.gap) <= 1e-9):
            break
        found = _round(view, hypotheses, out)
        is_few = np.count_nonzero(view.loss(view.rows.gap[view.rows.compared])) < MIN_FAR
        least = np.inf if is_enough(view) and is_few else 0.8 * is_enough(view)
        named = [j for j in found if j.is_beyond_chance and j.certain_share >= least]
        named = [j for j in named if j.cause not in {c.cause for c, *_ in out.causes}]
        if not named:
            break
        first, rivals = _simplest(view, named)
        out.rivals[first.cause] = sorted({j.cause for j in rivals} - {first.cause})
        view = repaired(view, first)
        view = replace(view, deadline=max(view.deadline, time.process_time() + SECONDS))
        share = max(before - _k2(view), 0.0) / whole
        out.causes.append((first, share, 2 * first.error * share))
    return out


def _simplest(view: View, named: Sequence[Judged]) -> tuple[Judged, list[Judged]]:
    """(the first cause, all causes that explain the same). A hypothesis that fits fewer numbers
    goes before the best in the rows that it explains as well: a search over offsets explains every
    row that is moved by one."""
    best = max(named, key=lambda j: j.share)
    rows, at = view.rows, view.rows.compared
    slack = TIE * rows.row_sums(at, view.loss(rows.gap[at]))

    def left(judged: Judged) -> Float64Array:
        return rows.row_sums(at, view.loss(judged.after[at]))

    allowed = left(best) * (1 + 5 * TIE) + slack
    rivals, first = [best], best
    for other in sorted(named, key=lambda j: (j.hypothesis.fitted, -j.share)):
        is_as_good = left(other) <= allowed
        if not other.prediction.is_of_rows:
            is_as_good[:] = left(other).sum() <= allowed.sum()
        part = other.within(is_as_good, view)
        if not part.is_beyond_chance:
            continue
        if part.share >= best.share - 5 * TIE:
            rivals.append(part := other)  # in all of its rows
        if first is best and other.hypothesis.fitted < best.hypothesis.fitted:
            first = part
    return first, rivals


def _k2(view: View) -> float:
    return float(np.square(view.rows.gap[view.rows.compared]).sum())


def _round(view: View, hypotheses: Sequence[Hypothesis], out: Explanation) -> list[Judged]:
    found: list[Judged] = []
    known, suspects = view.setting.has | view.rows.has, view.suspects
    # The cheap ones first, and last those that took too long before.
    for one in sorted(hypotheses, key=lambda h: ("model" in h.needs, h.name in out.late)):
        if any(name not in known for name in one.needs):
            continue
        timed = replace(view, deadline=min(view.deadline, time.process_time() + SECONDS))
        predictions: list[Prediction] = []
        try:
            for prediction in one.predict(timed):
                if any(getattr(prediction, side) is not None for side in suspects):
                    predictions.append(prediction)
                if timed.is_late:
                    break
        except Exception as error:  # a plugin's bug, a template that refuses: the others go on
            out.errors[one.name] = f"failed with {type(error).__name__}: {error}"
            continue
        if timed.is_late:
            out.late.append(one.name)
        judged = [
            judge(timed, one, [p for p in predictions if p.cause == cause])
            for cause in dict.fromkeys(p.cause for p in predictions)
        ]
        if not judged:
            continue
        best = max(judged, key=lambda j: j.share)
        out.tried.setdefault(one.name, best)
        has_lost = best.share + best.chance < MIN_SHARE and all(j.has_lost for j in judged)
        (out.lost.add if has_lost and not timed.is_late else out.lost.discard)(one.name)
        found += judged
        if best.is_beyond_chance and best.share > 1 - TIE:
            break  # nothing can explain more
    return found


def repaired(view: View, judged: Judged) -> View:
    """The view without a cause, in the rows that it hits."""
    rows, prediction = view.rows, judged.prediction
    is_hit = judged.hit[rows.row_of]
    if prediction.above is not None:
        above = np.where(is_hit & np.isfinite(prediction.above), prediction.above, 0.0)
        trainer = (view.trainer + above).astype(np.float32)
        return replace(view, rows=rows.with_(trainer_logprobs=trainer), above=view.above + above)
    changed: dict[str, Any] = {}
    for side, name in SIDES.items():
        if (new := getattr(prediction, side)) is not None:
            old = getattr(rows, name)
            changed[name] = np.where(is_hit & np.isfinite(new), new, old).astype(np.float32)
    return replace(view, rows=rows.with_(**changed))


def evidence_of(view: View, judged: Judged, limit: int) -> tuple[Evidence, ...]:
    """The rows that lose the most by the repair."""
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
        out.append(Evidence.at(rows, begin, end, note))
    return tuple(out)
