"""Computes token weights, rejected tokens and their figures from two log-probs per token.

`correct` does all of it for a whole batch. A batch in micro-batches is weighed piece by piece, and
finished by the merged report of all pieces:

    parts = [weigh(new, old, correction, layout=...) for ... in micro_batches]
    total = merged(part.report for part in parts).all_reduced()
    corrected = [part.finish(total) for part in parts]

Whole rows are weighed in chunks. First come the rules per token, then sums over rows, then the
rules per row. The sums are all-reduced if sequences are split over ranks. Everything is computed
where the log-probs are, and waits for no device; the cost is linear in tokens.

# N tokens of a chunk, flattened  n tokens worked on  R rows  C cells of a report  F fields
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
import torch.distributed as dist

from lockstep.correction import kl
from lockstep.correction.arrays import Values, takes_arrays
from lockstep.correction.config import Correction, Rule
from lockstep.correction.layout import Layout
from lockstep.correction.metrics import OUTLIER_DIFF, MismatchReport, histogram_of
from lockstep.correction.tokens import TokenFacts, Tokens, chunks_of, exp, widened
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
    """float32, to add to the advantages. None in a piece, without a penalty, and if the penalty is
    in the loss (`kl.pull`)."""
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
        if correction.changes_advantages:
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


@takes_arrays
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
    row per line of the tensor. group: the ranks that hold the batch (None: all, if
    torch.distributed is initialised); each must call this, with its own part.

    Padding may hold anything. Tokens that count and are not finite are rejected and counted. With
    no token at all everything is empty or 0; nothing is raised. Raises AlignmentError for shapes
    that differ, log-probs above 0 and log-probs that carry gradient. On a GPU the host waits for
    nothing: there `to_metrics`, whose figures are one copy, raises for a log-prob above 0.
    Arrays give arrays.

    >>> new, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -3.0]])
    >>> correct(new, old, Correction.tis()).weights.tolist()
    [[1.0, 2.0]]
    """
    weighed = weigh(logprobs, rollout_logprobs, correction, layout=layout, facts=facts)
    return weighed.finish(weighed.report.all_reduced(group))


def measure(
    logprobs: Values,
    rollout_logprobs: Values,
    *,
    layout: Layout | Tensor | None = None,
    facts: TokenFacts | None = None,
) -> MismatchReport:
    """The gap alone, nothing corrected. Arguments as for `correct`."""
    trainer, rollout = torch.as_tensor(logprobs).detach(), torch.as_tensor(rollout_logprobs)
    return weigh(trainer, rollout.detach(), Correction(), layout=layout, facts=facts).report


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
    logprobs, rollout_logprobs = torch.as_tensor(logprobs), torch.as_tensor(rollout_logprobs)
    facts = facts or TokenFacts()
    layout = Layout.of(layout, logprobs=logprobs, rollout_logprobs=rollout_logprobs, **vars(facts))
    _check(logprobs, rollout_logprobs, correction, layout, facts)
    columns = {"new": logprobs, "old": rollout_logprobs, "mask": layout.mask, **vars(facts)}
    device = logprobs.device
    flat = {
        name: None if x is None else torch.as_tensor(x, device=device).reshape(-1)
        for name, x in columns.items()
    }
    parts = [_Weighing(correction, flat, layout, rows).run() for rows in chunks_of(layout, device)]
    weights, keep, reports = zip(*parts, strict=True)
    return Corrected(
        torch.cat(weights).view(layout.shape),
        torch.cat(keep).view(layout.shape),
        merged(reports),
        correction,
        logprobs=logprobs,
        rollout_logprobs=rollout_logprobs,
        layout=layout,
    )


class _Weighing:
    """Whole rows: the results of the rules per token and per row, and all sums for the report."""

    def __init__(
        self,
        correction: Correction,
        columns: Mapping[str, Tensor | None],
        layout: Layout,
        rows: slice,
    ) -> None:
        """columns: of all rows of `layout`, flattened, on one device. rows: those to weigh."""
        offsets = layout.offsets[rows.start : rows.stop + 1]
        here = slice(int(offsets[0]), int(offsets[-1]))
        parts = {name: None if x is None else x[here] for name, x in columns.items()}
        self.tokens = Tokens(parts, offsets - offsets[0])
        self.correction, self.layout = correction, layout
        self.fields: dict[str, Tensor] = {}
        """Field of the report -> [C], its sums."""
        self.low, self.high = correction.limits
        self.is_by_row = correction.level in ("sequence", "geometric")
        self.is_masking = correction.level != "none" and correction.bound == "mask"
        zeros = self.tokens.active_R.new_zeros(len(correction.rules))
        self.by_rule = dict(zip((r.name for r in correction.rules), zeros, strict=True))

    def run(self) -> tuple[Tensor, Tensor, MismatchReport]:
        """([N] float32 weights, [N] bool kept, figures)."""
        self._sum_gap()
        keep = self._judge_tokens()
        keep = self._judge_rows(keep)
        weights = self._weigh(keep)
        return self.tokens.among_all(weights), self.tokens.among_all(keep), self._report(weights)

    def _add(self, name: str, values: Tensor) -> Tensor:
        """Adds a field of the report. Returns the values in float64."""
        wide = widened(values)
        self.fields[name] = self.tokens.by_cell(wide)
        return wide

    def _add_with_square(self, name: str, values: Tensor) -> None:
        """Adds two fields: NAME, NAME2."""
        wide = self._add(name, values)
        self._add(f"{name}2", wide * wide)

    def _sum_gap(self) -> None:
        """The report's figures of the gap itself."""
        tokens = self.tokens
        is_compared = self._add("compared", tokens.is_compared)
        self._add("unequal", tokens.size > 0.0)
        self._add("outlier", tokens.size > OUTLIER_DIFF)
        # float64: the square of d overflows float32 if a log-prob is a substitute for -inf.
        self._add_with_square("d", tokens.d)
        self._add("k3", tokens.k3)
        self._add_with_square("ratio", tokens.ratio * is_compared)
        self.histogram = histogram_of(tokens.d, is_compared)

    def _judge_tokens(self) -> Tensor:
        """[n] bool: the tokens that pass by themselves."""
        tokens, keep = self.tokens, self.tokens.is_compared
        for rule in self.correction.rules:
            if rule.is_sequence:
                continue
            out = _outside(rule, _token_stat(rule, tokens)) & tokens.is_compared
            if rule.only_negative_advantage and tokens.negative is not None:
                out &= tokens.negative
            self.by_rule[rule.name] += out.count_nonzero()
            keep = keep & ~out
        if self.correction.level == "token" and self.is_masking:
            keep = keep & ~self._is_beyond(tokens.ratio)
        return keep

    def _judge_rows(self, keep: Tensor) -> Tensor:
        """`keep` without the tokens that their rows reject."""
        rules = [rule for rule in self.correction.rules if rule.is_sequence]
        sums = self._sum_rows(rules, keep)
        kept_R, none_R = sums["kept"], torch.zeros_like(sums["kept"])
        self.active_R, self.valid_R, self.d_R = sums["active"], sums["compared"], sums["d"]
        count = self.valid_R.clamp(min=1)
        self.mean_R = self.d_R / count
        self.log_weight_R = self.d_R if self.correction.level == "sequence" else self.mean_R
        self.raw_R = exp(self.log_weight_R)
        if self.is_by_row and self.is_masking:
            is_beyond = self._is_beyond(self.raw_R)
            keep = keep & ~self.tokens.spread(is_beyond)
            kept_R = torch.where(is_beyond, none_R, kept_R)
        for rule in rules:
            value = sums[f"rule {rule.name}"]
            if rule.needs_worst_token:
                out = value > 0
            else:
                out = _outside(rule, value / count if rule.aggregation == "mean" else value)
            out &= self.valid_R > 0
            rejected, hit, left_R = self.tokens.spread(out), self.valid_R, none_R
            if rule.only_negative_advantage and self.tokens.negative is not None:
                rejected &= self.tokens.negative
                hit, left_R = sums["negative"], sums["spared"]
            keep = keep & ~rejected
            kept_R = torch.where(out, kept_R.minimum(left_R), kept_R)
            if self.layout.counts_rows:
                self.by_rule[rule.name] += torch.where(out, hit, 0.0).sum()
        self.is_kept_R = kept_R > 0
        return keep

    def _sum_rows(self, rules: Sequence[Rule], keep: Tensor) -> dict[str, Tensor]:
        """Column -> [R]: the sums that rows are judged by, over all ranks that share them."""
        tokens = self.tokens
        columns = {"compared": tokens.is_compared, "d": tokens.d, "kept": keep}
        if tokens.negative is not None and any(r.only_negative_advantage for r in rules):
            columns["negative"] = tokens.negative & tokens.is_compared
            columns["spared"] = keep & ~tokens.negative
        for rule in rules:
            stat = _token_stat(rule, tokens)
            if rule.needs_worst_token:
                stat = _outside(rule, stat) & tokens.is_compared
                if rule.rejects_impossible:
                    is_impossible = tokens.new == float("-inf")
                    stat |= is_impossible if tokens.mask is None else is_impossible & tokens.mask
            columns[f"rule {rule.name}"] = stat  # a label may be anything, "compared" too
        sums = {"active": tokens.active_R}
        sums |= {name: tokens.by_row(values) for name, values in columns.items()}
        whole_FR = self.layout.all_reduce_rows(torch.stack(list(sums.values())))
        return dict(zip(sums, whole_FR, strict=True))

    def _weigh(self, keep: Tensor) -> Tensor:
        """[n] float32: the weights, 0.0 where a token is rejected."""
        tokens = self.tokens
        self._add("kept", keep)
        if self.correction.level == "none":  # every kept token weighs 1
            self.fields["weight"] = self.fields["weight2"] = self.fields["kept"]
            return keep.float()
        ratio = tokens.spread(self.raw_R) if self.is_by_row else tokens.ratio
        weights = self._bounded(ratio).float().masked_fill(~keep, 0.0)
        self._add_with_square("weight", weights)
        self._add("above", (ratio > self.high) & tokens.is_compared)
        if self.low > 0:  # no ratio is below 0
            self._add("below", (ratio < self.low) & tokens.is_compared)
        return weights

    def _bounded(self, raw: Tensor) -> Tensor:
        return raw if self.is_masking else raw.clamp(self.low, self.high)

    def _is_beyond(self, ratio: Tensor) -> Tensor:
        return (ratio < self.low) | (ratio > self.high)

    # -- the figures ------------------------------------------------------------------------------

    def _report(self, weights: Tensor) -> MismatchReport:
        correction, tokens = self.correction, self.tokens
        abs_d_C = tokens.largest_by_cell(tokens.size)
        scalars, maxima = {"active": tokens.active_R.sum()}, {"abs_d": abs_d_C.amax()}
        if not kl.is_readable(tokens.new):
            is_positive = (tokens.new > MAX_LOGPROB) | (tokens.old > MAX_LOGPROB)
            scalars["positive"] = (is_positive & tokens.is_compared).sum()
        if len(tokens.d):
            for name, values in (("d", tokens.d), ("minus_d", -tokens.d)):
                maxima[name] = torch.where(tokens.is_compared, values, float("-inf")).amax()
        if correction.changes_advantages:
            clip = correction.kl_penalty_clip or float("inf")
            scalars["penalty"] = (-tokens.d).clamp(-clip, clip).sum(dtype=torch.float64)
        if correction.is_normalized and not self.is_by_row:
            # Summed in one order on every run: cells of a GPU are not, and this decides weights.
            scalars["normalize_weight"] = weights.sum(dtype=torch.float64)
            scalars["normalize_count"] = self.fields["kept"].sum()
        if self.layout.counts_rows and len(self.d_R):
            self._add_row_figures(scalars, maxima)
        return MismatchReport.of_cells(
            self.fields,
            abs_d_C,
            scalars,
            maxima,
            self.histogram,
            self.by_rule,
            is_weighed=correction.changes_tokens,
        )

    def _add_row_figures(self, scalars: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
        """Figures of whole rows; each weighs the same, and rows without compared tokens are left
        out."""
        is_seen, is_kept, mean = self.valid_R > 0, self.is_kept_R, self.mean_R

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


def _token_stat(rule: Rule, tokens: Tokens) -> Tensor:
    """[n]: the rule's statistic of each token, for a ratio or a probability its log; finite also
    where a token is not compared."""
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
            difference = (tokens.new.exp() - tokens.old.exp()).abs()
            return torch.where(tokens.is_compared, difference, 0.0)
        case "old_prob":
            return tokens.new


def _outside(rule: Rule, value: Tensor) -> Tensor:
    """True where values of the rule's statistic lie outside its bounds. A ratio or a probability is
    compared by its log."""
    bounds = (rule.low, rule.high)
    if rule.stat in ("ratio", "old_prob"):
        bounds = (
            b if b is None else float(torch.tensor(b, dtype=torch.float64).log()) for b in bounds
        )
    return value.clamp(*bounds) != value  # one comparison: comparing into bools is slow


# -- refused inputs -------------------------------------------------------------------------------


def _check(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    correction: Correction,
    layout: Layout,
    facts: TokenFacts,
) -> None:
    for name, values in (("logprobs", logprobs), ("rollout_logprobs", rollout_logprobs)):
        if values.requires_grad:
            raise AlignmentError(
                f"{name} carry gradient, so the weight would be a live anchor: a weight is a "
                f"constant of the loss. Pass {name}.detach()."
            )
        _check_not_positive(name, values, layout)
    if facts.advantages is None and any(r.only_negative_advantage for r in correction.rules):
        named = [r.name for r in correction.rules if r.only_negative_advantage]
        raise AlignmentError(
            f"the rules {named} reject tokens of negative advantage, and no advantages were given: "
            "facts=TokenFacts(advantages=...)."
        )


def _check_not_positive(name: str, values: Tensor, layout: Layout) -> None:
    # On a GPU the report counts such tokens, and `to_metrics` raises.
    if not kl.is_readable(values) or not values.numel() or bool(values.amax() <= MAX_LOGPROB):
        return  # NaN is not <=; padding may hold NaN, which is checked below
    is_wrong = (values > MAX_LOGPROB) & (values < float("inf"))
    if layout.mask is not None:
        is_wrong &= layout.mask
    if bool(is_wrong.any()):
        at = int(is_wrong.reshape(-1).nonzero()[0])
        raise AlignmentError(
            f"{name} at {layout.locate(at)} is {float(values.reshape(-1)[at]):g}; expected a "
            f"log-prob, at most {MAX_LOGPROB:g}. Probabilities, or a shifted row?"
        )
