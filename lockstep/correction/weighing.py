"""From two log-probs per token to its weight, what is left out, and the figures of both.

`correct` does all of it for a batch that is at hand as a whole. A batch that comes in micro-batches
is weighed piece by piece, and finished with the merged report of all of them:

    parts = [weigh(new, old, correction, layout=...) for ... in micro_batches]
    total = merged(part.report for part in parts).all_reduced()
    corrected = [part.finish(total) for part in parts]

Two passes over the tokens, in chunks: what a sequence's fate depends on is summed first (and
all-reduced, where sequences are split over ranks), then every token gets its weight. Cost is linear
in tokens; beside the result, one float32 and two bools per token are held.

# N tokens, flattened  n tokens of a chunk  R rows  C cells of a report  F fields
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from lockstep.correction import kl
from lockstep.correction.config import Correction, Rule
from lockstep.correction.layout import Chunk, Layout
from lockstep.correction.metrics import (
    BINS,
    CELLS,
    FIELDS,
    NUM_CELLS,
    OUTLIER_DIFF,
    PARTS,
    MismatchReport,
    bins_of,
)
from lockstep.errors import AlignmentError
from lockstep.types import FORCED_LOGPROB, MAX_LOGPROB

Tensor = torch.Tensor

MEASURE_ONLY = Correction()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenFacts:
    """What else is known of each token; the report tells tokens apart by it. All optional."""

    advantages: Tensor | None = None
    """float32; rules with `only_negative_advantage` read it."""
    ages: Tensor | None = None
    """int: updates between the policy that sampled and the one in training."""
    turns: Tensor | None = None
    """int: the episode's turn."""
    positions: Tensor | None = None
    """int: the token's place in its row; None counts from the row's first token in the layout."""
    kinds: Tensor | None = None
    """int: index into TOKEN_KINDS."""


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
    device = logprobs.device
    flat_new, flat_old = logprobs.reshape(-1), rollout_logprobs.reshape(-1)
    mask = layout.flat_mask()
    is_negative = None if facts.advantages is None else facts.advantages.reshape(-1) < 0
    verdict = _Verdict(correction, layout, device)
    is_both_double = logprobs.dtype == rollout_logprobs.dtype == torch.float64
    d_N = torch.empty(
        layout.num_tokens, dtype=torch.float64 if is_both_double else torch.float32, device=device
    )
    valid_N = torch.empty(layout.num_tokens, dtype=torch.bool, device=device)
    keep_N = torch.empty_like(valid_N)
    for piece in layout.chunks(device):
        at = piece.tokens
        new, old = flat_new[at], flat_old[at]
        active = None if mask is None else mask[at]
        d, valid = kl.log_ratio(new, old, active)
        d_N[at], valid_N[at] = d, valid
        negative = None if is_negative is None else is_negative[at]
        keep_N[at] = verdict.see(piece, new, old, d, valid, active, negative)
    verdict.settle()
    weights_N = torch.empty(layout.num_tokens, dtype=torch.float32, device=device)
    tally = _Tally(layout, facts, correction, device)
    for piece in layout.chunks(device):
        at = piece.tokens
        d, valid = d_N[at], valid_N[at]
        negative = None if is_negative is None else is_negative[at]
        raw = verdict.ratio(piece, d)
        keep = verdict.keep(piece, keep_N[at], raw, negative)
        weights = verdict.bounded(raw).float()
        weights.masked_fill_(~keep, 0.0)
        weights_N[at], keep_N[at] = weights, keep
        tally.add(piece, flat_new[at], flat_old[at], d, valid, keep, weights, raw)
    report = tally.report(verdict)
    return Weighed(
        weights_N.view(layout.shape), keep_N.view(layout.shape), report, correction,
        logprobs, rollout_logprobs, layout,
    )  # fmt: skip


def as_layout(layout: Layout | Tensor | None, like: Tensor) -> Layout:
    """A layout from what a caller has: one, a [B, T] mask, or nothing but the tensors."""
    if isinstance(layout, Layout):
        return layout
    if layout is not None:
        return Layout.padded(layout)
    if like.ndim == 1:
        return Layout.one_row(len(like))
    return Layout.padded(torch.ones(like.shape, dtype=torch.bool, device=like.device))


# -- what a sequence's fate depends on ------------------------------------------------------------


class _Verdict:
    """Sums over each row in a first pass, and what follows from them for its tokens."""

    def __init__(self, correction: Correction, layout: Layout, device: torch.device) -> None:
        self.correction, self.layout = correction, layout
        self.level, self.bound = correction.level, correction.bound
        self.low, self.high = correction.limits
        self.token_rules = [r for r in correction.reject if not r.is_sequence]
        self.sequence_rules = [r for r in correction.reject if r.is_sequence]
        self.columns = ["active", "valid", "d", "kept", "kept_negative", "negative"]
        for rule in self.sequence_rules:
            if rule.needs_worst_token or rule.stat not in ("ratio", "k1"):
                self.columns.append(_column(rule))
        self.sums_FR = torch.zeros(
            len(self.columns), layout.num_rows, dtype=torch.float64, device=device
        )
        self.by_rule = torch.zeros(len(correction.reject), dtype=torch.float64, device=device)

    def see(
        self,
        piece: Chunk,
        new: Tensor,
        old: Tensor,
        d: Tensor,
        valid: Tensor,
        active: Tensor | None,
        negative: Tensor | None,
    ) -> Tensor:
        """Adds a chunk to its rows' sums. Returns which of its tokens pass by themselves."""
        keep = valid.clone()
        for rule in self.token_rules:
            out = outside(rule, token_stat(rule, new, old, d)) & valid
            if rule.only_negative_advantage and negative is not None:
                out &= negative
            self.by_rule[self.correction.reject.index(rule)] += out.sum()
            keep &= ~out
        if self.level == "token" and self.bound == "mask":
            keep &= ~self._is_outside(_exp(d))
        nothing = torch.zeros_like(valid)
        values: list[Tensor] = [
            torch.ones_like(valid) if active is None else active, valid, d, keep,
            nothing if negative is None else keep & negative,
            nothing if negative is None else valid & negative,
        ]  # fmt: skip
        for rule in self.sequence_rules:
            if rule.needs_worst_token:
                values.append(outside(rule, token_stat(rule, new, old, d)) & valid)
            elif _column(rule) in self.columns:
                values.append(torch.where(valid, token_stat(rule, new, old, d), 0.0))
        piece.add_row_sums(torch.stack([v.double() for v in values]), self.sums_FR)
        return keep

    def settle(self) -> None:
        """From the sums of whole rows to each row's weight and rejection."""
        self.layout.all_reduce_rows(self.sums_FR)
        sums = dict(zip(self.columns, self.sums_FR, strict=True))
        self.active_R, self.valid_R, self.d_R = sums["active"], sums["valid"], sums["d"]
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
        if self.level in ("sequence", "geometric"):
            log_ratio = self.d_R if self.level == "sequence" else self.mean_R
            self.log_weight_R, self.raw_R = log_ratio, _exp(log_ratio)
            if self.bound == "mask":
                self.rejected_R |= self._is_outside(self.raw_R) & (self.valid_R > 0)
        left = sums["kept"] - torch.where(self.rejected_negative_R, sums["kept_negative"], 0.0)
        self.kept_R = torch.where(self.rejected_R, 0.0, left)
        self.rejects_rows = bool(self.sequence_rules) or (
            self.level in ("sequence", "geometric") and self.bound == "mask"
        )

    def _sequence_outside(self, rule: Rule, sums: dict[str, Tensor], count: Tensor) -> Tensor:
        if rule.needs_worst_token:
            return sums[_column(rule)] > 0
        if rule.stat == "ratio":
            value = sums["d"]
        elif rule.stat == "k1":
            value = -sums["d"]
        else:
            value = sums[_column(rule)]
        return outside(rule, value / count if rule.aggregation == "mean" else value)

    def ratio(self, piece: Chunk, d: Tensor) -> Tensor:
        """[n]: the weight before any bound."""
        if self.level == "none":
            return torch.ones_like(d)
        return _exp(d) if self.level == "token" else piece.expand(self.raw_R)

    def keep(self, piece: Chunk, keep: Tensor, raw: Tensor, negative: Tensor | None) -> Tensor:
        if not self.rejects_rows:
            return keep
        keep = keep & ~piece.expand(self.rejected_R)
        if negative is not None:
            keep &= ~(negative & piece.expand(self.rejected_negative_R))
        return keep

    def bounded(self, raw: Tensor) -> Tensor:
        if self.level == "none" or self.bound == "mask":
            return raw
        return raw.clamp(self.low, self.high)

    def _is_outside(self, ratio: Tensor) -> Tensor:
        return (ratio < self.low) | (ratio > self.high)


def _column(rule: Rule) -> str:
    return f"rule {rule.name}"  # a label may be anything, "valid" too


def _exp(d: Tensor) -> Tensor:
    return d.clamp(-kl.RATIO_LIMIT, kl.RATIO_LIMIT).exp()


def token_stat(rule: Rule, new: Tensor, old: Tensor, d: Tensor) -> Tensor:
    """[n]: the rule's statistic of each token; of a ratio, its log. `new`, `old`: log-probs of
    trainer and rollout, `d` their difference, 0.0 where it is not valid."""
    if rule.stat == "ratio":
        return d
    if rule.stat == "k1":
        return kl.k1(d)
    if rule.stat == "k2":
        return kl.k2(d)
    if rule.stat == "k3":
        return kl.k3(d)
    if rule.stat == "prob_diff":
        return (new.exp() - old.exp()).abs()
    return new.to(d.dtype)  # old_prob: its log


def outside(rule: Rule, value: Tensor) -> Tensor:
    """Whether a value of the rule's statistic lies outside its bounds. Of a ratio and of a
    probability the value is the log, as the bounds' logs are taken here."""
    is_log = rule.stat in ("ratio", "old_prob")
    out = torch.zeros_like(value, dtype=torch.bool)
    if rule.low is not None:
        out |= value < (_log(rule.low) if is_log else rule.low)
    if rule.high is not None:
        out |= value > (_log(rule.high) if is_log else rule.high)
    return out


def _log(bound: float) -> float:
    return float(torch.tensor(bound, dtype=torch.float64).log())


# -- the figures ----------------------------------------------------------------------------------


class _Tally:
    """Sums and maxima over the tokens, told apart by every part of the report at once."""

    def __init__(
        self, layout: Layout, facts: TokenFacts, correction: Correction, device: torch.device
    ) -> None:
        self.layout, self.correction = layout, correction
        self.fields_FC = torch.zeros(len(FIELDS), NUM_CELLS, dtype=torch.float64, device=device)
        self.abs_d_C = torch.full((NUM_CELLS,), float("-inf"), device=device)
        self.histogram = torch.zeros(BINS, dtype=torch.float64, device=device)
        self.tops = torch.full((4,), float("-inf"), dtype=torch.float64, device=device)
        self.penalty = torch.zeros((), dtype=torch.float64, device=device)
        self.sources: list[tuple[Tensor | None, Tensor]] = []
        given = (facts.ages, facts.turns, facts.positions, facts.kinds)
        stride = NUM_CELLS
        for part, size, values in zip(PARTS[:-1], CELLS[:-1], given, strict=True):
            stride //= size
            if values is None and part.name != "position":
                continue
            table = torch.tensor(part.table(), device=device) * stride
            self.sources.append((None if values is None else values.reshape(-1), table))

    def add(
        self,
        piece: Chunk,
        new: Tensor,
        old: Tensor,
        d: Tensor,
        valid: Tensor,
        keep: Tensor,
        weights: Tensor,
        raw: Tensor,
    ) -> None:
        cell = (old > FORCED_LOGPROB).long()
        for values, table in self.sources:
            number = piece.places(self.layout) if values is None else values[piece.tokens]
            cell += table[number.clamp(0, len(table) - 1)]
        size = d.abs()
        ratio = _exp(d).masked_fill_(~valid, 0.0)
        (low, high), has_weights = self.correction.limits, self.correction.level != "none"
        nothing = torch.zeros_like(valid)
        wide = d.double()  # its square overflows float32 where a log-prob is a stand-in for -inf
        fields = [
            valid, size > 0, size > OUTLIER_DIFF, wide, wide * wide, kl.k3(d), ratio, ratio * ratio,
            keep, weights, weights * weights,
            (raw > high) & valid if has_weights else nothing,
            (raw < low) & valid if has_weights else nothing,
        ]  # fmt: skip
        self.fields_FC.index_add_(1, cell, torch.stack([f.double() for f in fields]))
        self.abs_d_C.scatter_reduce_(0, cell, size.float().where(valid, float("-inf")), "amax")
        self.histogram.index_add_(0, bins_of(d), valid.double())
        if self.correction.kl_penalty_coef > 0:
            clip = self.correction.kl_penalty_clip or float("inf")
            self.penalty += (-d).clamp(-clip, clip).sum(dtype=torch.float64)
        none = float("-inf")
        tops = [d.where(valid, none), (-d).where(valid, none), new.where(valid, none)]
        tops.append(old.where(valid, none))
        self.tops = torch.maximum(self.tops, torch.stack([t.amax().double() for t in tops]))

    def report(self, verdict: _Verdict) -> MismatchReport:
        correction = self.correction
        scalars: dict[str, Tensor | float] = {"penalty": self.penalty}
        named: tuple[str, ...] = ("d", "minus_d", "logprob", "rollout_logprob")
        maxima: dict[str, Tensor] = dict(zip(named, self.tops, strict=True))
        maxima["abs_d"] = self.abs_d_C.amax()
        mask = self.layout.flat_mask()
        scalars["active"] = float(self.layout.num_tokens) if mask is None else mask.sum()
        if self.layout.counts_rows and self.layout.num_rows:
            of_rows, row_maxima = _sequence_figures(verdict)
            scalars |= of_rows
            maxima |= row_maxima
        if correction.is_normalized and correction.level == "token":
            scalars["normalize_weight"] = self.fields_FC[FIELDS.index("weight")].sum()
            scalars["normalize_count"] = self.fields_FC[FIELDS.index("kept")].sum()
        return MismatchReport.of_cells(
            self.fields_FC,
            self.abs_d_C.double(),
            scalars,
            maxima,
            self.histogram,
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
    product = _exp(verdict.d_R)
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
