"""From two log-probs per token to its weight, what is left out, and the figures of both.

`correct` does all of it for a batch that is at hand as a whole. A batch that comes in micro-batches
is weighed piece by piece, and finished with the merged report of all of them:

    parts = [weigh(new, old, correction, layout=...) for ... in micro_batches]
    total = merged(part.report for part in parts).all_reduced()
    corrected = [part.finish(total) for part in parts]

One pass over the tokens, in chunks, does all that a token's fate depends on by itself; sums over
rows are all-reduced after it, where sequences are split over ranks. A second one follows where
sequences have weights or are rejected. Cost is linear in tokens; beside the result one bool per
token is held at most.

# N tokens, flattened  n tokens of a chunk  u runs of these  R rows  C cells of a report  F fields
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from lockstep.correction import kl
from lockstep.correction.chunks import (
    Batch,
    Columns,
    TokenFacts,
    Tokens,
    exp,
    unforced,
)
from lockstep.correction.config import Correction, Rule
from lockstep.correction.layout import Chunk, Layout
from lockstep.correction.metrics import (
    FIELDS,
    NUM_CELLS,
    NUM_CODES,
    OUTLIER_DIFF,
    MismatchReport,
    codes_of,
    histogram_of,
)
from lockstep.errors import AlignmentError
from lockstep.types import MAX_LOGPROB

Tensor = torch.Tensor

MEASURE_ONLY = Correction()


@dataclass(frozen=True, slots=True, eq=False)
class Corrected:
    """What the loss needs."""

    weights: Tensor
    """float32, without gradient: multiply each token's policy loss by it. 0.0 where a token is not
    trained on, above 0 elsewhere."""
    keep: Tensor
    """bool: the tokens that are trained on."""
    penalty: Tensor | None
    """float32: to be added to the advantages; None without `kl_penalty_coef`."""
    denominator_tokens: Tensor
    """[] float64: what a mean over tokens divides by, over the whole batch."""
    denominator_rows: Tensor
    """[] float64: what a mean over sequences divides by, over the whole batch."""
    report: MismatchReport
    """Of the whole batch."""

    def to_metrics(self, prefix: str = "mismatch") -> dict[str, float]:
        """Every figure by name; one copy to the host."""
        return self.report.to_metrics(prefix)


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """One piece of a batch, weighed as far as it can be without the others."""

    weights: Tensor
    """float32: bounded, not yet normalised; 0.0 where a token is not trained on."""
    keep: Tensor
    report: MismatchReport
    correction: Correction
    logprobs: Tensor = field(repr=False)
    rollout_logprobs: Tensor = field(repr=False)
    layout: Layout = field(repr=False)

    def finish(self, total: MismatchReport) -> Corrected:
        """Normalised and centred by the report of the whole batch, which must be merged from all
        of its pieces (and all-reduced over all ranks)."""
        correction = self.correction
        weights = self.weights
        if correction.is_normalized:
            mean = total.total("normalize_weight") / total.total("normalize_count").clamp(min=1)
            # Nothing kept: no weight to divide.
            weights = (weights / torch.where(mean > 0, mean, 1.0)).to(weights.dtype)
        penalty = None
        if correction.kl_penalty_coef > 0:
            penalty = kl.penalty(
                self.logprobs,
                self.rollout_logprobs,
                mask=self.layout.mask,
                coef=correction.kl_penalty_coef,
                clip=correction.kl_penalty_clip,
                mean=total.total("penalty") / total.total("compared").clamp(min=1),
            )
        is_kept = correction.denominator == "kept"
        return Corrected(
            weights,
            self.keep,
            penalty,
            total.total("kept" if is_kept else "active"),
            total.total("kept_sequences" if is_kept else "active_sequences"),
            total,
        )


def correct(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    correction: Correction,
    *,
    layout: Layout | Tensor | None = None,
    facts: TokenFacts | None = None,
    group: dist.ProcessGroup | None = None,
) -> Corrected:
    """Weights, kept tokens and figures of a whole batch.

    logprobs: of the trainer's policy before the update; rollout_logprobs: of the policy that
    sampled; both [N] packed or [B, T] padded, float32 nats, of the same token at the same index,
    without gradient. layout: how they fall into rows; a [B, T] mask is a padded layout, None one
    row per line of the tensor. group: the ranks over which the batch is spread (None: all, where
    torch.distributed is initialised); each must call this, with its own part.

    Padding may hold anything. Tokens that count and are not finite are rejected and counted. With
    no token at all everything is empty or 0; nothing is raised. Raises AlignmentError for shapes
    that differ, log-probs above 0 and log-probs that carry gradient.

    >>> new, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -3.0]])
    >>> correct(new, old, Correction.tis()).weights.tolist()
    [[1.0, 2.0]]
    """
    weighed = weigh(logprobs, rollout_logprobs, correction, layout=layout, facts=facts)
    return weighed.finish(weighed.report.all_reduced(group))


def measure(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    layout: Layout | Tensor | None = None,
    facts: TokenFacts | None = None,
) -> MismatchReport:
    """The gap alone, nothing corrected. Arguments as for `correct`."""
    return weigh(
        logprobs.detach(), rollout_logprobs.detach(), MEASURE_ONLY, layout=layout, facts=facts
    ).report


def merged(reports: Iterable[MismatchReport]) -> MismatchReport:
    """One report of several, at least one."""
    total, *others = reports
    for other in others:
        total = total.merge(other)
    return total


def weigh(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    correction: Correction,
    *,
    layout: Layout | Tensor | None = None,
    facts: TokenFacts | None = None,
) -> Weighed:
    """`correct` for one piece of a batch, made of whole rows (or of the same pieces of the same
    rows on every rank of `layout.group`). Arguments as for `correct`."""
    layout = as_layout(layout, logprobs)
    facts = facts or TokenFacts()
    _check(logprobs, rollout_logprobs, correction, layout, facts)
    host = torch.device("cpu")
    on_host = Layout(
        layout.shape,
        layout.offsets,
        None if layout.mask is None else layout.mask.to(host),
        layout.group,
    )
    given = {n: getattr(facts, n) for n in ("advantages", "ages", "turns", "positions", "kinds")}
    facts = TokenFacts(**{n: None if x is None else x.to(host) for n, x in given.items()})
    batch = Batch(
        logprobs.to(host).reshape(-1), rollout_logprobs.to(host).reshape(-1), on_host, facts
    )
    with _one_thread(batch.device):
        weights_N, keep_N, report = _weigh(batch, correction)
    weights_N, keep_N = weights_N.to(logprobs.device), keep_N.to(logprobs.device)
    return Weighed(
        weights_N.view(layout.shape), keep_N.view(layout.shape), report, correction,
        logprobs, rollout_logprobs, layout,
    )  # fmt: skip


def _weigh(batch: Batch, correction: Correction) -> tuple[Tensor, Tensor, MismatchReport]:
    """([N] float32 weights, [N] bool kept, figures): each token by itself, and then by its row."""
    verdict, tally = _Verdict(correction, batch), _Tally(correction, batch)
    weights_N = torch.zeros(batch.layout.num_tokens, dtype=torch.float32, device=batch.device)
    keep_N = torch.zeros(batch.layout.num_tokens, dtype=torch.bool, device=batch.device)
    compared_N = torch.zeros_like(keep_N) if verdict.weighs_rows else None
    for piece in batch.pieces():
        tokens = batch.tokens(piece)
        keep = verdict.judge(tokens)
        weights = verdict.weigh(tokens, keep)
        tokens.put(keep, keep_N)
        tokens.put(weights, weights_N)
        if compared_N is not None:
            tokens.put(tokens.compared, compared_N)
        columns = Columns(tokens.runs, tokens.is_unforced)
        sum_gap(tokens, columns)
        verdict.sum_weights(tokens, keep, weights, columns)
        verdict.sum_others(tokens, keep, columns)
        verdict.add(columns, tokens)
        tally.add(columns)
        tally.look_at(tokens)
    verdict.settle()
    if verdict.changes_rows:
        tally.forget_weights()
        for piece in batch.pieces():
            at = piece.tokens
            keep = verdict.keep_rows(piece, keep_N[at], batch.negative(piece))
            weights = verdict.weigh_rows(piece, weights_N[at]).masked_fill(~keep, 0.0)
            keep_N[at], weights_N[at] = keep, weights
            compared = None if compared_N is None else compared_N[at]
            columns = Columns(batch.runs(piece), unforced(batch.old_N[at]))
            verdict.sum_row_weights(piece, keep, weights, compared, columns)
            tally.add(columns)
    return weights_N, keep_N, tally.report(verdict)


@contextmanager
def _one_thread(device: torch.device) -> Generator[None]:
    """On a CPU, torch computes with one thread meanwhile: to wake a second one for each small
    operation costs more than its half of the work (measured: 0.11 against 0.24 s)."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def as_layout(layout: Layout | Tensor | None, like: Tensor) -> Layout:
    """A layout from what a caller has: one, a [B, T] mask, or nothing but the tensors."""
    if isinstance(layout, Layout):
        return layout
    if layout is not None:
        return Layout.padded(layout)
    if like.ndim == 1:
        return Layout.one_row(len(like))
    return Layout.padded(torch.ones(like.shape, dtype=torch.bool, device=like.device))


# -- what a token and its sequence deserve --------------------------------------------------------


class _Verdict:
    """Which tokens are trained on, and with what weight: first what each token says by itself, and
    then, from sums over each row, what its sequence says."""

    def __init__(self, correction: Correction, batch: Batch) -> None:
        self.correction, self.layout, self.batch = correction, batch.layout, batch
        self.level, self.bound = correction.level, correction.bound
        self.low, self.high = correction.limits
        self.weighs_rows = self.level in ("sequence", "geometric")
        self.token_rules = [r for r in correction.reject if not r.is_sequence]
        self.sequence_rules = [r for r in correction.reject if r.is_sequence]
        self.columns = ["active", "compared", "d", "kept"]
        if any(r.only_negative_advantage for r in self.sequence_rules):
            self.columns += ["negative", "kept_negative"]
        named = [_column(rule) for rule in self.sequence_rules]
        self.columns += [name for name in dict.fromkeys(named) if name not in self.columns]
        self.sums_FR = torch.zeros(
            len(self.columns), batch.layout.num_rows, dtype=torch.float64, device=batch.device
        )
        self.by_rule = torch.zeros(len(correction.reject), dtype=torch.float64, device=batch.device)

    # -- each token by itself ---------------------------------------------------------------------

    def judge(self, tokens: Tokens) -> Tensor:
        """[n] bool: the tokens that pass by themselves."""
        keep = tokens.compared
        for rule in self.token_rules:
            out = tokens.only_compared(outside(rule, token_stat(rule, tokens)))
            if rule.only_negative_advantage and tokens.negative is not None:
                out &= tokens.negative
            self.by_rule[self.correction.reject.index(rule)] += out.count_nonzero()
            keep = keep & ~out
        if self.level == "token" and self.bound == "mask":
            keep = keep & ~self._is_outside(tokens.ratio)
        return keep

    def weigh(self, tokens: Tokens, keep: Tensor) -> Tensor:
        """[n] float32: the bounded weights, as far as tokens have their own; 0.0 where rejected."""
        if self.level != "token":
            return keep.float()
        weights = self.bounded(tokens.ratio).float()
        if tokens.valid is None and keep is tokens.compared:
            return weights
        return weights.masked_fill(~keep, 0.0)

    def sum_weights(self, tokens: Tokens, keep: Tensor, weights: Tensor, columns: Columns) -> None:
        """The report's fields of the weights, as far as tokens have their own."""
        columns.add("kept", keep)
        if self.level != "token":
            return
        columns.add_with_square("weight", weights)
        columns.add_above("above", tokens.ratio, self.high)
        if self.low > 0:  # no ratio is below 0
            is_below = tokens.ratio < self.low
            columns.add("below", tokens.only_compared(is_below))

    # -- over rows --------------------------------------------------------------------------------

    def sum_others(self, tokens: Tokens, keep: Tensor, columns: Columns) -> None:
        """What is summed over rows and is no field of the report."""
        if "negative" in self.columns:
            assert tokens.negative is not None, "checked with the settings"
            columns.add("negative", tokens.only_compared(tokens.negative))
            columns.add("kept_negative", keep & tokens.negative)
        for rule in self.sequence_rules:
            if rule.needs_worst_token:
                is_outside = outside(rule, token_stat(rule, tokens))
                columns.add(_column(rule), tokens.only_compared(is_outside))
            elif rule.stat not in SUMMED_ANYHOW:
                columns.add(_column(rule), tokens.cleaned(token_stat(rule, tokens)))

    def add(self, columns: Columns, tokens: Tokens) -> None:
        """Adds what is summed over rows."""
        columns.runs.add_to_rows(columns.sums(self.columns[1:]), self.sums_FR[1:])
        rows = columns.runs.piece.rows
        self.sums_FR[0, rows] += tokens.active_rows
        if tokens.impossible_rows is not None:
            for rule in self.sequence_rules:
                if rule.rejects_impossible:
                    at = self.columns.index(_column(rule))
                    self.sums_FR[at, rows] += tokens.impossible_rows

    def settle(self) -> None:
        """From the sums of whole rows to each row's weight and rejection."""
        self.num_active = self.sums_FR[0].sum()  # of this rank, as every field of the report
        self.layout.all_reduce_rows(self.sums_FR)
        sums = dict(zip(self.columns, self.sums_FR, strict=True))
        self.active_R, self.valid_R, self.d_R = sums["active"], sums["compared"], sums["d"]
        count = self.valid_R.clamp(min=1)
        self.mean_R = self.d_R / count
        self.rejected_R = torch.zeros_like(self.d_R, dtype=torch.bool)
        self.rejected_negative_R = torch.zeros_like(self.rejected_R)
        for rule in self.sequence_rules:
            out = self._sequence_outside(rule, sums, count) & (self.valid_R > 0)
            hit = sums["negative"] if rule.only_negative_advantage else self.valid_R
            tokens = torch.where(out, hit, 0.0).sum() if self.layout.counts_rows else 0.0
            self.by_rule[self.correction.reject.index(rule)] += tokens
            if rule.only_negative_advantage:
                self.rejected_negative_R |= out
            else:
                self.rejected_R |= out
        if self.weighs_rows:
            log_ratio = self.d_R if self.level == "sequence" else self.mean_R
            self.log_weight_R, self.raw_R = log_ratio, exp(log_ratio)
            if self.bound == "mask":
                self.rejected_R |= self._is_outside(self.raw_R) & (self.valid_R > 0)
        self.kept_R = torch.where(self.rejected_R, 0.0, sums["kept"])
        if "negative" in sums:
            self.kept_R -= torch.where(
                self.rejected_negative_R & ~self.rejected_R, sums["kept_negative"], 0.0
            )

    @property
    def changes_rows(self) -> bool:
        """Whether the tokens must be gone through again, for what their sequences say."""
        if self.weighs_rows or not self.sequence_rules:
            return self.weighs_rows
        if self.batch.device.type != "cpu":
            return True  # to look would be to wait for the device
        return bool((self.rejected_R | self.rejected_negative_R).any())

    def _sequence_outside(self, rule: Rule, sums: dict[str, Tensor], count: Tensor) -> Tensor:
        value = sums[_column(rule)]
        if rule.needs_worst_token:
            return value > 0
        value = value * {"k1": -1.0, "k2": 0.5}.get(rule.stat, 1.0)
        return outside(rule, value / count if rule.aggregation == "mean" else value)

    def keep_rows(self, piece: Chunk, keep: Tensor, negative: Tensor | None) -> Tensor:
        """[n] bool: the tokens that passed by themselves and whose sequence passes."""
        keep = keep & ~piece.expand(self.rejected_R)
        if negative is not None:
            keep &= ~(negative & piece.expand(self.rejected_negative_R))
        return keep

    def weigh_rows(self, piece: Chunk, weights: Tensor) -> Tensor:
        """[n] float32: the bounded weights; `weights` are those of tokens by themselves."""
        if not self.weighs_rows:
            return weights
        return piece.expand(self.bounded(self.raw_R).float())

    def sum_row_weights(
        self, piece: Chunk, keep: Tensor, weights: Tensor, compared: Tensor | None, columns: Columns
    ) -> None:
        """The report's fields of the weights, but those that stand from each token by itself."""
        columns.add("kept", keep)
        if self.level != "none":
            columns.add_with_square("weight", weights)
        if compared is not None:
            columns.add("above", compared & piece.expand(self.raw_R > self.high))
            columns.add("below", compared & piece.expand(self.raw_R < self.low))

    def bounded(self, raw: Tensor) -> Tensor:
        if self.level == "none" or self.bound == "mask":
            return raw
        return raw.clamp(self.low, self.high)

    def _is_outside(self, ratio: Tensor) -> Tensor:
        return (ratio < self.low) | (ratio > self.high)


SUMMED_ANYHOW = {"ratio": "d", "k1": "d", "k2": "d2", "k3": "k3"}
"""Statistics whose sums over a sequence are those of a field of the report, but for a factor."""


def _column(rule: Rule) -> str:
    if not rule.needs_worst_token and rule.stat in SUMMED_ANYHOW:
        return SUMMED_ANYHOW[rule.stat]
    return f"rule {rule.name}"  # a label may be anything, "compared" too


def token_stat(rule: Rule, tokens: Tokens) -> Tensor:
    """[n]: the rule's statistic of each token; of a ratio and of a probability, its log."""
    if rule.stat == "ratio":
        return tokens.d
    if rule.stat == "k1":
        return kl.k1(tokens.d)
    if rule.stat == "k2":
        return kl.k2(tokens.d)
    if rule.stat == "k3":
        return tokens.k3
    if rule.stat == "prob_diff":
        return (tokens.new.exp() - tokens.old.exp()).abs()
    return tokens.new.to(tokens.d.dtype)


def outside(rule: Rule, value: Tensor) -> Tensor:
    """Whether a value of the rule's statistic lies outside its bounds. Of a ratio and of a
    probability the value is the log, as the bounds' logs are taken here."""
    is_log = rule.stat in ("ratio", "old_prob")
    low, high = (b if b is None or not is_log else _log(b) for b in (rule.low, rule.high))
    return value.clamp(low, high) != value  # one comparison: into bools, it is the dear part


def _log(bound: float) -> float:
    return float(torch.tensor(bound, dtype=torch.float64).log())


# -- the figures ----------------------------------------------------------------------------------


def sum_gap(tokens: Tokens, columns: Columns) -> None:
    """The report's fields of the gap itself, in their order."""
    columns.add("compared", tokens.compared)
    columns.add_above("unequal", tokens.size, 0.0)
    columns.add_above("outlier", tokens.size, OUTLIER_DIFF)
    # In float64: the square of d overflows float32 where a log-prob is a stand-in for -inf.
    columns.add_with_square("d", tokens.d)
    columns.add("k3", tokens.k3)
    columns.add_with_square("ratio", tokens.ratio)


class _Tally:
    """Sums and maxima over the tokens, told apart by the parts of the report."""

    def __init__(self, correction: Correction, batch: Batch) -> None:
        self.correction, self.layout, device = correction, batch.layout, batch.device
        self.fields_FC = torch.zeros(len(FIELDS), NUM_CELLS, dtype=torch.float64, device=device)
        self.unforced_F = self.fields_FC.new_zeros(len(FIELDS))
        self.abs_d_C = self.fields_FC.new_full((NUM_CELLS,), float("-inf"))
        self.histogram = self.fields_FC.new_zeros(NUM_CODES)
        self.tops = self.fields_FC.new_full((2,), float("-inf"))
        self.penalty = self.fields_FC.new_zeros(())

    def add(self, columns: Columns) -> None:
        """Adds those columns that are fields; they follow one another as in FIELDS."""
        names = [name for name in columns.names if name in FIELDS]
        first, size = FIELDS.index(names[0]), len(names)
        assert tuple(names) == FIELDS[first : first + size], f"not as in FIELDS: {names}"
        columns.runs.add_to_cells(columns.sums(names), self.fields_FC[first : first + size])
        self.unforced_F[first : first + size] += columns.unforced(names)

    def forget_weights(self) -> None:
        """Before they are added for good: what was kept, and the weights."""
        first = FIELDS.index("kept")
        self.fields_FC[first : first + 3] = 0.0
        self.unforced_F[first : first + 3] = 0.0

    def look_at(self, tokens: Tokens) -> None:
        """Maxima, quantiles, and the sum that the penalty is centred by."""
        d, size, ends = tokens.d, tokens.size, [tokens.d, -tokens.d]
        if tokens.valid is not None:
            size, *ends = (x.where(tokens.valid, float("-inf")) for x in (size, *ends))
        tokens.runs.raise_cells(size, self.abs_d_C)
        if len(d):
            tops = torch.stack([x.amax().double() for x in ends])
            self.tops = torch.maximum(self.tops, tops)
        if tokens.valid is None:
            self.histogram += torch.bincount(codes_of(d), minlength=NUM_CODES)
        else:
            self.histogram.index_add_(0, codes_of(d), tokens.valid.double())
        if self.correction.kl_penalty_coef > 0:
            clip = self.correction.kl_penalty_clip or float("inf")
            self.penalty += (-d).clamp(-clip, clip).sum(dtype=torch.float64)

    def report(self, verdict: _Verdict) -> MismatchReport:
        correction = self.correction
        scalars: dict[str, Tensor | float] = {"penalty": self.penalty}
        maxima = {"d": self.tops[0], "minus_d": self.tops[1], "abs_d": self.abs_d_C.amax()}
        if correction.level == "none":  # every kept token weighs 1
            kept = FIELDS.index("kept")
            self.fields_FC[kept + 1 : kept + 3] = self.fields_FC[kept]
            self.unforced_F[kept + 1 : kept + 3] = self.unforced_F[kept]
        scalars["active"] = verdict.num_active
        if self.layout.counts_rows and self.layout.num_rows:
            of_rows, row_maxima = _sequence_figures(verdict)
            scalars |= of_rows
            maxima |= row_maxima
        if correction.is_normalized and correction.level == "token":
            scalars["normalize_weight"] = self.fields_FC[FIELDS.index("weight")].sum()
            scalars["normalize_count"] = self.fields_FC[FIELDS.index("kept")].sum()
        return MismatchReport.of_cells(
            self.fields_FC,
            self.abs_d_C,
            self.unforced_F,
            scalars,
            maxima,
            histogram_of(self.histogram),
            verdict.by_rule,
            rules=tuple(rule.name for rule in correction.reject),
            is_weighed=correction.changes_tokens,
        )


def _sequence_figures(verdict: _Verdict) -> tuple[dict[str, Tensor | float], dict[str, Tensor]]:
    """(scalars, maxima) of whole rows; each weighs the same, and one without tokens is none."""
    seen = verdict.valid_R > 0
    zero, none = verdict.d_R.new_zeros(()), verdict.d_R.new_tensor(float("-inf"))
    mean = verdict.mean_R
    kept = verdict.kept_R > 0
    product = exp(verdict.d_R)
    scalars: dict[str, Tensor | float] = {
        "active_sequences": (verdict.active_R > 0).sum(),
        "sequences": seen.sum(),
        "sequence_d": torch.where(seen, mean, zero).sum(),
        "sequence_abs_d": torch.where(seen, mean.abs(), zero).sum(),
        "sequence_ratio2": torch.where(seen, product.square(), zero).sum(),
        "kept_sequences": kept.sum(),
    }
    maxima = {
        "sequence_abs_d": torch.where(seen, mean.abs(), none).amax(),
        "sequence_d": torch.where(seen, mean, none).amax(),
        "minus_sequence_d": torch.where(seen, -mean, none).amax(),
    }
    correction = verdict.correction
    if correction.level in ("sequence", "geometric"):
        weight = torch.where(kept, verdict.bounded(verdict.raw_R), zero)
        log_weight = verdict.log_weight_R
        scalars |= {
            "weight_sequences": kept.sum(),
            "sequence_weight": weight.sum(),
            "sequence_weight2": weight.square().sum(),
        }
        maxima |= {
            "sequence_log_ratio": torch.where(seen, log_weight, none).amax(),
            "minus_sequence_log_ratio": torch.where(seen, -log_weight, none).amax(),
        }
        if correction.is_normalized:
            scalars |= {"normalize_weight": weight.sum(), "normalize_count": kept.sum()}
    return scalars, maxima


# -- what is refused ------------------------------------------------------------------------------


def _check(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    correction: Correction,
    layout: Layout,
    facts: TokenFacts,
) -> None:
    layout.check(
        logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=facts.advantages,
        ages=facts.ages, turns=facts.turns, positions=facts.positions, kinds=facts.kinds,
    )  # fmt: skip
    for name, values in (("logprobs", logprobs), ("rollout_logprobs", rollout_logprobs)):
        if values.requires_grad:
            normalized = (
                " Divided by a mean over the batch, it would carry the gradient of every other "
                "token too."
                if correction.is_normalized
                else ""
            )
            raise AlignmentError(
                f"{name} carry gradient, so the weight would be a live anchor: a weight is a "
                f"constant of the loss.{normalized} Pass {name}.detach(); a ratio that carries "
                "gradient belongs into the objective."
            )
        if values.device.type == "cpu":
            _check_not_positive(name, values.reshape(-1), layout)
    if facts.advantages is None and any(r.only_negative_advantage for r in correction.reject):
        named = [r.name for r in correction.reject if r.only_negative_advantage]
        raise AlignmentError(
            f"the rules {named} reject tokens of negative advantage, and no advantages were given: "
            "facts=TokenFacts(advantages=...)."
        )


def _check_not_positive(name: str, flat: Tensor, layout: Layout) -> None:
    if not len(flat) or bool(flat.amax() <= MAX_LOGPROB):
        return  # NaN is not <=: what stands in padding may be anything, and is looked at below
    mask = layout.flat_mask()
    for piece in layout.chunks(flat.device):
        values = flat[piece.tokens]
        is_wrong = (values > MAX_LOGPROB) & (values < float("inf"))
        if mask is not None:
            is_wrong &= mask[piece.tokens]
        if bool(is_wrong.any()):
            at = int(is_wrong.nonzero()[0])
            raise AlignmentError(
                f"{name} at {layout.locate(piece.tokens.start + at)} is {float(values[at]):g}; "
                f"expected a log-prob, at most {MAX_LOGPROB:g}. Probabilities, or a shifted row?"
            )
