"""From two log-probs per token to its weight, the rejected tokens, and the figures of both.

`correct` does all of it for a batch that is at hand as a whole. A batch that comes in micro-batches
is weighed piece by piece, and finished by the merged report of all pieces:

    parts = [weigh(new, old, correction, layout=...) for ... in micro_batches]
    total = merged(part.report for part in parts).all_reduced()
    corrected = [part.finish(total) for part in parts]

One pass over the tokens, in chunks, decides all that a token decides by itself; sums over rows
follow, all-reduced where sequences are split over ranks. A second pass is made only where sequences
have weights or are rejected. Everything is computed on the host; the cost is linear in tokens.

# N tokens, flattened  n tokens of a chunk  R rows  C cells of a report  F fields
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
import torch.distributed as dist

from lockstep.correction import kl
from lockstep.correction.config import Correction, Rule
from lockstep.correction.layout import Layout
from lockstep.correction.metrics import (
    FIELDS,
    NUM_CELLS,
    NUM_CODES,
    OUTLIER_DIFF,
    MismatchReport,
    codes_of,
    histogram_of,
)
from lockstep.correction.tokens import Batch, Chunk, Sums, TokenFacts, Tokens, exp
from lockstep.errors import AlignmentError
from lockstep.types import MAX_LOGPROB

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Corrected:
    """The weights of a batch, or of one piece of it until `finish`.

    >>> new, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -3.0]])
    >>> found = correct(new, old, Correction.tis(2.0))
    >>> found.weights.tolist(), found.keep.tolist(), float(found.denominator_tokens)
    ([[1.0, 2.0]], [[True, True]], 2.0)
    """

    weights: Tensor
    """float32, without gradient: multiply each token's policy loss by it. 0.0 where a token is not
    trained on, above 0 elsewhere. A piece's weights are bounded, not yet normalised."""
    keep: Tensor
    """bool: the tokens that are trained on."""
    report: MismatchReport
    """Report of these tokens; after `finish`, of the whole batch."""
    correction: Correction
    penalty: Tensor | None = None
    """float32: to be added to the advantages; None without `kl_penalty_coef`, and in a piece."""
    logprobs: Tensor = field(repr=False, kw_only=True)
    rollout_logprobs: Tensor = field(repr=False, kw_only=True)
    layout: Layout = field(repr=False, kw_only=True)

    @property
    def denominator_tokens(self) -> Tensor:
        """[] float64: divisor of a mean over tokens, for the whole batch."""
        return self.report.total("kept" if self.correction.denominator == "kept" else "active")

    @property
    def denominator_rows(self) -> Tensor:
        """[] float64: divisor of a mean over sequences, for the whole batch."""
        is_kept = self.correction.denominator == "kept"
        return self.report.total("kept_sequences" if is_kept else "active_sequences")

    def finish(self, total: MismatchReport) -> Corrected:
        """Normalises and centres by the report of the whole batch: all pieces' merged (and
        all-reduced over all ranks)."""
        correction, weights, penalty = self.correction, self.weights, None
        if correction.is_normalized:
            mean = total.total("normalize_weight") / total.total("normalize_count").clamp(min=1)
            # Nothing kept: no weight to divide.
            divisor = torch.where(mean > 0, mean, 1.0).to(weights.device)
            weights = (weights / divisor).to(weights.dtype)
        if correction.kl_penalty_coef > 0:
            mean = total.total("penalty") / total.total("compared").clamp(min=1)
            penalty = kl.penalty(
                self.logprobs,
                self.rollout_logprobs,
                mask=self.layout.mask,
                coef=correction.kl_penalty_coef,
                clip=correction.kl_penalty_clip,
                mean=mean.to(weights.device),
            )
        alone = replace(self.layout, group=None)  # a group cannot be sent to another process
        return replace(self, weights=weights, penalty=penalty, report=total, layout=alone)

    def to_metrics(self, prefix: str = "mismatch") -> dict[str, float]:
        """Every figure by name."""
        return self.report.to_metrics(prefix)


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
        logprobs.detach(), rollout_logprobs.detach(), Correction(), layout=layout, facts=facts
    ).report


def merged(reports: Iterable[MismatchReport]) -> MismatchReport:
    """One report of several, at least one."""
    return reduce(MismatchReport.merge, reports)


def weigh(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    correction: Correction,
    *,
    layout: Layout | Tensor | None = None,
    facts: TokenFacts | None = None,
) -> Corrected:
    """`correct` for one piece of a batch, made of whole rows (or of the same pieces of the same
    rows on every rank of `layout.group`). Arguments as for `correct`."""
    layout, facts = Layout.of(layout, logprobs), facts or TokenFacts()
    _check(logprobs, rollout_logprobs, correction, layout, facts)
    with _one_thread():
        batch = Batch.of(logprobs, rollout_logprobs, layout, facts)
        weights_N, keep_N, report = _Weighing(correction, batch).run()
    return Corrected(
        weights_N.view(layout.shape).to(logprobs.device),
        keep_N.view(layout.shape).to(logprobs.device),
        report,
        correction,
        logprobs=logprobs,
        rollout_logprobs=rollout_logprobs,
        layout=layout,
    )


@contextmanager
def _one_thread() -> Generator[None]:
    """Computes with one thread: waking a second one for each small operation costs more than its
    half of the work (measured: 0.11 against 0.24 s)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


SUMMED_ANYHOW = {"ratio": "d", "k1": "d", "k2": "d2", "k3": "k3"}
"""Statistics whose sum over a sequence is that of a field of the report, but for a factor."""


class _Weighing:
    """One pass over the tokens, one over the rows, and where rows decide, one more over the tokens;
    with all sums that the report needs."""

    def __init__(self, correction: Correction, batch: Batch) -> None:
        self.correction, self.batch, self.layout = correction, batch, batch.layout
        self.low, self.high = correction.limits
        self.is_by_token = correction.level == "token"
        self.is_by_row = correction.level in ("sequence", "geometric")
        self.is_masking = correction.level != "none" and correction.bound == "mask"
        self.row_rules = [r for r in correction.reject if r.is_sequence]
        columns = ["active", "compared", "d", "kept"]
        if any(r.only_negative_advantage for r in self.row_rules):
            columns += ["negative", "kept_negative"]
        self.row_columns = list(dict.fromkeys([*columns, *map(_column, self.row_rules)]))
        zeros = torch.zeros(len(FIELDS), NUM_CELLS, dtype=torch.float64)
        self.sums_FR = zeros.new_zeros(len(self.row_columns), self.layout.num_rows)
        self.by_rule = {rule.name: zeros.new_zeros(()) for rule in correction.reject}
        self.fields_FC, self.unforced_F = zeros, zeros.new_zeros(len(FIELDS))
        self.abs_d_C = zeros.new_full((NUM_CELLS,), float("-inf"))
        self.tops = zeros.new_full((2,), float("-inf"))
        self.histogram = zeros.new_zeros(NUM_CODES)
        self.penalty = zeros.new_zeros(())

    def run(self) -> tuple[Tensor, Tensor, MismatchReport]:
        """([N] float32 weights, [N] bool kept, figures)."""
        weights_N = torch.zeros(self.layout.num_tokens)
        keep_N = torch.zeros(self.layout.num_tokens, dtype=torch.bool)
        compared_N = torch.zeros_like(keep_N) if self.is_by_row else None
        for chunk in self.batch.chunks():
            tokens = self.batch.tokens(chunk)
            keep = self._judge_tokens(tokens)
            weights = keep.float()
            if self.is_by_token:
                weights = self._bounded(tokens.ratio).float().masked_fill(~keep, 0.0)
            tokens.put(keep, keep_N)
            tokens.put(weights, weights_N)
            if compared_N is not None:
                tokens.put(torch.ones_like(keep), compared_N)
            self._sum_gap(tokens)
            self._sum_weights(tokens, keep, weights)
            self._sum_rows(tokens, keep)
            self._add_fields(tokens.sums)
        self._judge_rows()
        if self.is_by_row or bool((self.rejected_R | self.rejected_negative_R).any()):
            self._forget_weights()
            for chunk in self.batch.chunks():
                self._apply_rows(chunk, keep_N, weights_N, compared_N)
        return weights_N, keep_N, self._report()

    # -- each token by itself ---------------------------------------------------------------------

    def _judge_tokens(self, tokens: Tokens) -> Tensor:
        """[n] bool: the tokens that pass by themselves."""
        keep = torch.ones(tokens.d.shape, dtype=torch.bool)
        for rule in self.correction.reject:
            if rule.is_sequence:
                continue
            out = _outside(rule, _token_stat(rule, tokens))
            if rule.only_negative_advantage and tokens.negative is not None:
                out &= tokens.negative
            self.by_rule[rule.name] += out.count_nonzero()
            keep = keep & ~out
        if self.is_by_token and self.is_masking:
            keep = keep & ~self._is_beyond(tokens.ratio)
        return keep

    def _sum_gap(self, tokens: Tokens) -> None:
        """Adds the report's figures of the gap itself; its fields are in the order of FIELDS."""
        sums, d = tokens.sums, tokens.d
        sums.add("compared", torch.ones(d.shape, dtype=torch.bool))
        sums.add_above("unequal", tokens.size, 0.0)
        sums.add_above("outlier", tokens.size, OUTLIER_DIFF)
        # In float64: the square of d overflows float32 where a log-prob is a stand-in for -inf.
        sums.add_with_square("d", d)
        sums.add("k3", tokens.k3)
        sums.add_with_square("ratio", tokens.ratio)
        sums.raise_cells(tokens.size, self.abs_d_C)
        if len(d):
            self.tops = torch.maximum(self.tops, torch.stack([d.amax(), (-d).amax()]).double())
        self.histogram += torch.bincount(codes_of(d), minlength=NUM_CODES)
        if self.correction.kl_penalty_coef > 0:
            clip = self.correction.kl_penalty_clip or float("inf")
            self.penalty += (-d).clamp(-clip, clip).sum(dtype=torch.float64)

    def _sum_weights(self, tokens: Tokens, keep: Tensor, weights: Tensor) -> None:
        """Adds the report's fields of the weights, where tokens have their own."""
        tokens.sums.add("kept", keep)
        if not self.is_by_token:
            return
        tokens.sums.add_with_square("weight", weights)
        tokens.sums.add_above("above", tokens.ratio, self.high)
        if self.low > 0:  # no ratio is below 0
            tokens.sums.add("below", tokens.ratio < self.low)

    def _sum_rows(self, tokens: Tokens, keep: Tensor) -> None:
        """Adds what rows are judged by."""
        sums = tokens.sums
        if "negative" in self.row_columns:
            assert tokens.negative is not None, "checked with the settings"
            sums.add("negative", tokens.negative)
            sums.add("kept_negative", keep & tokens.negative)
        for rule in self.row_rules:
            if rule.needs_worst_token:
                sums.add(_column(rule), _outside(rule, _token_stat(rule, tokens)))
            elif rule.stat not in SUMMED_ANYHOW:
                sums.add(_column(rule), _token_stat(rule, tokens))
        sums.add_to_rows(self.row_columns[1:], self.sums_FR[1:])
        rows = tokens.chunk.rows
        self.sums_FR[0, rows] += tokens.active_rows
        if tokens.impossible_rows is not None:
            for rule in self.row_rules:
                if rule.rejects_impossible:
                    at = self.row_columns.index(_column(rule))
                    self.sums_FR[at, rows] += tokens.impossible_rows

    # -- each row ---------------------------------------------------------------------------------

    def _judge_rows(self) -> None:
        """From the sums of whole rows to each row's weight and rejection."""
        self.num_active = self.sums_FR[0].sum()  # of this rank, as every field of the report
        self.layout.all_reduce_rows(self.sums_FR)
        sums = dict(zip(self.row_columns, self.sums_FR, strict=True))
        self.active_R, self.valid_R, self.d_R = sums["active"], sums["compared"], sums["d"]
        count = self.valid_R.clamp(min=1)
        self.mean_R = self.d_R / count
        self.rejected_R = torch.zeros_like(self.d_R, dtype=torch.bool)
        self.rejected_negative_R = torch.zeros_like(self.rejected_R)
        for rule in self.row_rules:
            value = sums[_column(rule)]
            if rule.needs_worst_token:
                out = value > 0
            else:
                value = value * {"k1": -1.0, "k2": 0.5}.get(rule.stat, 1.0)
                out = _outside(rule, value / count if rule.aggregation == "mean" else value)
            out &= self.valid_R > 0
            hit = sums["negative"] if rule.only_negative_advantage else self.valid_R
            if self.layout.counts_rows:
                self.by_rule[rule.name] += torch.where(out, hit, 0.0).sum()
            if rule.only_negative_advantage:
                self.rejected_negative_R |= out
            else:
                self.rejected_R |= out
        self.log_weight_R = self.d_R if self.correction.level == "sequence" else self.mean_R
        self.raw_R = exp(self.log_weight_R)
        if self.is_by_row and self.is_masking:
            self.rejected_R |= self._is_beyond(self.raw_R) & (self.valid_R > 0)
        self.kept_R = torch.where(self.rejected_R, 0.0, sums["kept"])
        if "negative" in sums:
            is_partly = self.rejected_negative_R & ~self.rejected_R
            self.kept_R -= torch.where(is_partly, sums["kept_negative"], 0.0)

    def _apply_rows(
        self, chunk: Chunk, keep_N: Tensor, weights_N: Tensor, compared_N: Tensor | None
    ) -> None:
        """Gives a chunk's tokens what their rows decide, and sums the weights again."""
        keep, weights = keep_N[chunk.at], weights_N[chunk.at]
        keep = keep & ~chunk.expand(self.rejected_R)
        negative = self.batch.negative(chunk)
        if negative is not None:
            keep &= ~(negative & chunk.expand(self.rejected_negative_R))
        if self.is_by_row:
            weights = chunk.expand(self._bounded(self.raw_R).float())
        weights = weights.masked_fill(~keep, 0.0)
        keep_N[chunk.at], weights_N[chunk.at] = keep, weights
        sums = self.batch.sums(chunk, self.batch.old_N[chunk.at])
        sums.add("kept", keep)
        if self.correction.level != "none":
            sums.add_with_square("weight", weights)
        if compared_N is not None:
            compared = compared_N[chunk.at]
            sums.add("above", compared & chunk.expand(self.raw_R > self.high))
            sums.add("below", compared & chunk.expand(self.raw_R < self.low))
        self._add_fields(sums)

    def _bounded(self, raw: Tensor) -> Tensor:
        return raw if self.is_masking else raw.clamp(self.low, self.high)

    def _is_beyond(self, ratio: Tensor) -> Tensor:
        return (ratio < self.low) | (ratio > self.high)

    # -- the figures ------------------------------------------------------------------------------

    def _add_fields(self, sums: Sums) -> None:
        names = [name for name in sums.names if name in FIELDS]
        at = slice(FIELDS.index(names[0]), FIELDS.index(names[0]) + len(names))
        assert tuple(names) == FIELDS[at], f"not as in FIELDS: {names}"
        sums.add_to_cells(names, self.fields_FC[at], self.unforced_F[at])

    def _forget_weights(self) -> None:
        """Clears kept, weight and weight2, before a second pass adds them."""
        first = FIELDS.index("kept")
        self.fields_FC[first : first + 3] = 0.0
        self.unforced_F[first : first + 3] = 0.0

    def _report(self) -> MismatchReport:
        correction = self.correction
        scalars = {"penalty": self.penalty, "active": self.num_active}
        maxima = {"d": self.tops[0], "minus_d": self.tops[1], "abs_d": self.abs_d_C.amax()}
        if correction.level == "none":  # every kept token weighs 1
            kept = FIELDS.index("kept")
            self.fields_FC[kept + 1 : kept + 3] = self.fields_FC[kept]
            self.unforced_F[kept + 1 : kept + 3] = self.unforced_F[kept]
        if correction.is_normalized and self.is_by_token:
            scalars["normalize_weight"] = self.fields_FC[FIELDS.index("weight")].sum()
            scalars["normalize_count"] = self.fields_FC[FIELDS.index("kept")].sum()
        if self.layout.counts_rows and self.layout.num_rows:
            self._add_row_figures(scalars, maxima)
        return MismatchReport.of_cells(
            self.fields_FC,
            self.abs_d_C,
            self.unforced_F,
            scalars,
            maxima,
            histogram_of(self.histogram),
            self.by_rule,
            is_weighed=correction.changes_tokens,
        )

    def _add_row_figures(self, scalars: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
        """Figures of whole rows; each weighs the same, and rows without compared tokens are left
        out."""
        is_seen, is_kept, mean = self.valid_R > 0, self.kept_R > 0, self.mean_R

        def total(values_R: Tensor) -> Tensor:
            return torch.where(is_seen, values_R, 0.0).sum()

        def top(values_R: Tensor) -> Tensor:
            return torch.where(is_seen, values_R, float("-inf")).amax()

        scalars |= {
            "active_sequences": (self.active_R > 0).sum(),
            "sequences": is_seen.sum(),
            "sequence_d": total(mean),
            "sequence_abs_d": total(mean.abs()),
            "sequence_ratio2": total(exp(self.d_R).square()),
            "kept_sequences": is_kept.sum(),
        }
        maxima |= {
            "sequence_abs_d": top(mean.abs()),
            "sequence_d": top(mean),
            "minus_sequence_d": top(-mean),
        }
        if not self.is_by_row:
            return
        weight = torch.where(is_kept, self._bounded(self.raw_R), 0.0)
        scalars |= {
            "weight_sequences": is_kept.sum(),
            "sequence_weight": weight.sum(),
            "sequence_weight2": weight.square().sum(),
        }
        maxima |= {
            "sequence_log_ratio": top(self.log_weight_R),
            "minus_sequence_log_ratio": top(-self.log_weight_R),
        }
        if self.correction.is_normalized:
            scalars |= {"normalize_weight": weight.sum(), "normalize_count": is_kept.sum()}


def _column(rule: Rule) -> str:
    if not rule.needs_worst_token and rule.stat in SUMMED_ANYHOW:
        return SUMMED_ANYHOW[rule.stat]
    return f"rule {rule.name}"  # a label may be anything, "compared" too


def _token_stat(rule: Rule, tokens: Tokens) -> Tensor:
    """[n]: the rule's statistic of each token; for a ratio or a probability, its log."""
    match rule.stat:
        case "ratio":
            return tokens.d
        case "k1":
            return kl.k1(tokens.d)
        case "k2":
            return kl.k2(tokens.d)
        case "k3":
            return tokens.k3
        case "prob_diff":
            return (tokens.new.exp() - tokens.old.exp()).abs()
        case "old_prob":
            return tokens.new.to(tokens.d.dtype)


def _outside(rule: Rule, value: Tensor) -> Tensor:
    """Whether values of the rule's statistic lie outside its bounds; for a ratio or a probability,
    both are compared as logs."""
    bounds = (rule.low, rule.high)
    if rule.stat in ("ratio", "old_prob"):
        bounds = (
            b if b is None else float(torch.tensor(b, dtype=torch.float64).log()) for b in bounds
        )
    return value.clamp(*bounds) != value  # one comparison: comparing into bools is slow


# -- what is refused ------------------------------------------------------------------------------


def _check(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    correction: Correction,
    layout: Layout,
    facts: TokenFacts,
) -> None:
    layout.check(logprobs=logprobs, rollout_logprobs=rollout_logprobs, **facts.columns())
    for name, values in (("logprobs", logprobs), ("rollout_logprobs", rollout_logprobs)):
        if values.requires_grad:
            raise AlignmentError(
                f"{name} carry gradient, so the weight would be a live anchor: a weight is a "
                f"constant of the loss. Pass {name}.detach()."
            )
        _check_not_positive(name, values, layout)
    if facts.advantages is None and any(r.only_negative_advantage for r in correction.reject):
        named = [r.name for r in correction.reject if r.only_negative_advantage]
        raise AlignmentError(
            f"the rules {named} reject tokens of negative advantage, and no advantages were given: "
            "facts=TokenFacts(advantages=...)."
        )


def _check_not_positive(name: str, values: Tensor, layout: Layout) -> None:
    if not values.numel() or bool(values.amax() <= MAX_LOGPROB):
        return  # NaN is not <=: padding may hold it, and is told apart below
    is_wrong = (values > MAX_LOGPROB) & (values < float("inf"))
    if layout.mask is not None:
        is_wrong &= layout.mask
    if bool(is_wrong.any()):
        at = int(is_wrong.reshape(-1).nonzero()[0])
        raise AlignmentError(
            f"{name} at {layout.locate(at)} is {float(values.reshape(-1)[at]):g}; expected a "
            f"log-prob, at most {MAX_LOGPROB:g}. Probabilities, or a shifted row?"
        )
