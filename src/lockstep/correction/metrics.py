# torch leaves from_numpy and all_reduce partly untyped.
# pyright: reportUnknownMemberType=false
"""The gap between sampler and trainer, and its correction, in figures of every step.

A report is two vectors: one of sums, one of maxima. Reports of micro-batches and ranks merge by
adding the first and taking the larger of the second, so a run needs one all-reduce of each.

A report stays on the device of its log-probs until `to_metrics` reads it, in one copy.

# F fields  C cells of all parts crossed
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
import torch.distributed as dist

from lockstep.errors import AlignmentError
from lockstep.observe.metrics import PARTS
from lockstep.ops.transfer import to_device
from lockstep.types import MAX_LOGPROB

Tensor = torch.Tensor

OUTLIER_DIFF = 1e-4
"""Difference of log-probs above which a token counts as an outlier. Two float32 sides that compute
the same differ by some 5e-6; more has a cause: another expert was chosen, or the tokens differ."""

FIELDS: tuple[str, ...] = (
    *("compared", "unequal", "outlier", "d", "d2", "k3", "ratio", "ratio2"),
    *("kept", "weight", "weight2", "above", "below"),
)
"""Sums over tokens. compared: 1 if both log-probs are finite; unequal: if they differ; outlier: by
more than OUTLIER_DIFF. d: log ratio trainer - rollout; d2: its square; k3. ratio: exp(d), cut at
20; ratio2: its square. kept: 1 if it is trained on; weight: its weight after bounding, 0 if it is
not; weight2: the square. above, below: 1 if its weight was outside the limits."""

CELLS = tuple(len(part.labels) for part in PARTS)
NUM_CELLS = math.prod(CELLS)
_TOTAL = 0  # the first group is of all tokens
_GROUPS = 1 + sum(CELLS)

SCALARS: tuple[str, ...] = (
    *("active", "active_sequences", "sequences", "sequence_d", "sequence_abs_d"),
    *("sequence_ratio2", "kept_sequences", "weight_sequences", "sequence_weight"),
    *("sequence_weight2", "normalize_weight", "normalize_count", "penalty", "positive"),
)
"""Other sums. active, active_sequences: tokens that count, finite or not, and sequences with one.
Over sequences with a compared token, each weighing the same: their number; the mean log ratio and
its size; the square of the product of ratios (cut at exp(20)); the number with a kept token; the
number with a weight, the weights and their squares. normalize_*: sum and number of the weights that
are normalised. penalty: sum of the clipped rollout - trainer, which centres the KL penalty.
positive: log-probs above MAX_LOGPROB, which no probability has."""

MAXIMA: tuple[str, ...] = (
    *("abs_d", "d", "minus_d", "sequence_abs_d", "sequence_d", "minus_sequence_d"),
    *("sequence_log_ratio", "minus_sequence_log_ratio"),
)

# Signed-log histogram of the log ratio: eight bins per octave from 2^-30 to 2^10, read off the bits
# of a float32, on either side of one bin for smaller values. A quantile is a bin's geometric
# middle, right within a factor of sqrt(9 / 8) = 1.061.
_SUB_BITS, _OCTAVES, _LOWEST = 3, 40, -30
_SIDE = _OCTAVES << _SUB_BITS
_FIRST_BIN = (127 + _LOWEST) << _SUB_BITS  # 127: the exponent's offset in a float32
BINS = 2 * _SIDE + 1
_NUM_CODES = 1 << (9 + _SUB_BITS)  # sign and exponent are 9 bits

QUANTILES = (0.5, 1 - 0.99, 0.99, 1 - 0.999, 0.999)


@dataclass(frozen=True, slots=True, eq=False)
class MismatchReport:
    """The gap between rollout and trainer log-probs of the same tokens, and its correction.

    Made by `lockstep.correction.measure`, and by `weigh` beside the weights. Held where the
    log-probs are.

    >>> import torch
    >>> from lockstep.correction import measure
    >>> trainer, rollout = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5])
    >>> metrics = measure(trainer, rollout).to_metrics()
    >>> metrics["mismatch/k1"], metrics["mismatch/unequal_tokens"]
    (-0.25, 1.0)
    """

    sums: Tensor
    """float64, merged by addition: fields of each group, scalars, histogram, tokens per rule."""
    maxima: Tensor
    """float64, merged by maximum: |d| of each group, then MAXIMA; -inf where nothing was seen."""
    rules: tuple[str, ...] = ()
    """Names of the rejection rules."""
    is_weighed: bool = False
    """True if a correction was applied, so that its figures mean something."""

    @classmethod
    def empty(cls, *, rules: tuple[str, ...] = (), is_weighed: bool = False) -> MismatchReport:
        """The report of no tokens: the neutral element of `merge`."""
        size = _GROUPS * len(FIELDS) + len(SCALARS) + BINS + len(rules)
        maxima = torch.full((_GROUPS + len(MAXIMA),), float("-inf"), dtype=torch.float64)
        return cls(torch.zeros(size, dtype=torch.float64), maxima, rules, is_weighed)

    @classmethod
    def of_cells(
        cls,
        fields: Mapping[str, Tensor],
        abs_d_C: Tensor,
        scalars: Mapping[str, Tensor],
        maxima: Mapping[str, Tensor],
        histogram: Tensor,
        by_rule: Mapping[str, Tensor],
        *,
        is_weighed: bool,
    ) -> MismatchReport:
        """Adds up sums over crossed cells ([C] float64) for each part; fields that are not given
        are 0."""
        none_C = torch.zeros_like(abs_d_C)
        fields_FC = torch.stack([fields.get(name, none_C) for name in FIELDS])
        crossed, largest = fields_FC.view(-1, *CELLS), abs_d_C.view(*CELLS)
        axes = range(len(CELLS))
        groups, tops = [fields_FC.sum(1, keepdim=True)], [abs_d_C.amax()[None]]
        for axis in axes:
            others = [a for a in axes if a != axis]
            groups.append(crossed.sum([a + 1 for a in others]))
            tops.append(largest.amax(others))
        zero, none = histogram.new_zeros(()), histogram.new_full((), float("-inf"))
        sums = [scalars.get(name, zero).double() for name in SCALARS]
        maxima_found = [maxima.get(name, none).double() for name in MAXIMA]
        parts = [torch.cat(groups, 1).t().reshape(-1), torch.stack(sums), histogram]
        if by_rule:
            parts.append(torch.stack(list(by_rule.values())))
        return cls(
            torch.cat(parts),
            torch.cat([*tops, torch.stack(maxima_found)]),
            tuple(by_rule),
            is_weighed,
        )

    def merge(self, other: MismatchReport) -> MismatchReport:
        """The report of both sets of tokens."""
        return MismatchReport(
            self.sums + other.sums,
            torch.maximum(self.maxima, other.maxima),
            self.rules,
            self.is_weighed or other.is_weighed,
        )

    def all_reduced(self, group: dist.ProcessGroup | None = None) -> MismatchReport:
        """The report of all ranks: one sum and one maximum. Unchanged where nothing is
        distributed."""
        if not (dist.is_available() and dist.is_initialized()):
            return self
        home = self.sums.device
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        sums, maxima = self.sums.to(device, copy=True), self.maxima.to(device, copy=True)
        dist.all_reduce(sums, group=group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        return replace(self, sums=sums.to(home), maxima=maxima.to(home))

    def total(self, name: str) -> Tensor:
        """[] float64: the sum of a field over all tokens, or a scalar."""
        if name in FIELDS:
            return self.sums[_TOTAL * len(FIELDS) + FIELDS.index(name)]
        return self.sums[_GROUPS * len(FIELDS) + SCALARS.index(name)]

    def to_metrics(self, prefix: str = "mismatch", *, by_part: bool = True) -> dict[str, float]:
        """Every figure by name. Raises AlignmentError if a log-prob was above 0.

        With nothing compared, everything is 0 and `ess` is 1; `compared_tokens` says so.
        k1 is mean(rollout - trainer), k2 half the mean square, k3 mean(exp(d) - 1 - d) with
        d = trainer - rollout; `*_unforced` are over tokens that were not as good as forced.
        `ess` is (sum w)^2 / (n sum w^2) of w = exp(d), in (0, 1]; `chi2` is mean(w^2) - 1.
        `log_ratio_max` and `_min` are of d, before any bound. Quantiles of d come from a histogram:
        6 % off at most, and 0 below 1e-9. `by_PART/LABEL/...` are of the tokens of one age, turn,
        position or kind, where there is more than one; not with by_part=False. `correction/...`, on
        a weighed report only, are of the weights, after bounding and before normalising; there a
        sequence weighs as much as another, whatever its length.
        """
        sizes = [*[len(FIELDS)] * _GROUPS, len(SCALARS), BINS, len(self.rules), len(self.maxima)]
        found = torch.cat([self.sums, self.maxima]).cpu()  # the only wait for the device
        parts: list[list[float]] = [part.tolist() for part in torch.split(found, sizes)]
        *fields, others, histogram, by_rule, maxima = parts
        groups = [dict(zip(FIELDS, of_group, strict=True)) for of_group in fields]
        scalars = dict(zip(SCALARS, others, strict=True))
        if scalars["positive"]:
            raise AlignmentError(
                f"{scalars['positive']:.0f} log-probs are above {MAX_LOGPROB:g}; expected natural "
                "logs of probabilities. Probabilities, or a shifted row?"
            )
        tops = dict(zip(MAXIMA, maxima[_GROUPS:], strict=True))
        total, unforced, forced = groups[_TOTAL], groups[-2], groups[-1]
        compared, sequences = max(total["compared"], 1.0), max(scalars["sequences"], 1.0)
        out = _figures(total, maxima[_TOTAL])
        out |= {f"{k}_unforced": v for k, v in _estimates(unforced).items()}
        out |= {
            "log_ratio_max": tops["d"],
            "log_ratio_min": -tops["minus_d"],
            "forced_share": forced["compared"] / compared,
            "chi2": total["ratio2"] / compared - 1.0,
            "chi2_sequence": scalars["sequence_ratio2"] / sequences - 1.0,
            "log_ppl_abs_diff_mean": scalars["sequence_abs_d"] / sequences,
            "log_ppl_abs_diff_max": tops["sequence_abs_d"],
            "log_ppl_diff_mean": -scalars["sequence_d"] / sequences,
            "log_ppl_diff_max": tops["minus_sequence_d"],
            "log_ppl_diff_min": -tops["sequence_d"],
        }
        for q in QUANTILES:
            percent = f"{100 * q:g}".replace(".", "_")
            out[f"log_ratio_p{percent}"] = _quantile(histogram, total["compared"], q)
        if not total["compared"]:
            out = dict.fromkeys(out, 0.0) | {"ess": 1.0}
        out["nonfinite_tokens"] = scalars["active"] - total["compared"]
        seen = _parts_seen(groups) if by_part else {}
        for name, g in seen.items():
            out |= {f"{name}/{k}": v for k, v in _figures(groups[g], maxima[g]).items()}
        named = {f"{prefix}/{k}": v for k, v in out.items()}
        if self.is_weighed:
            weighed = _corrections(total, scalars, tops)
            active = max(scalars["active"], 1.0)
            for rule, count in zip(self.rules, by_rule, strict=True):
                weighed[f"rejected_by/{rule}"] = count / active
            for name, g in seen.items():
                weighed |= {f"{name}/{k}": v for k, v in _weights_of(groups[g]).items()}
            named |= {f"correction/{k}": v for k, v in weighed.items()}
        return {k: v + 0.0 for k, v in named.items()}  # + 0.0: -0.0 is shown as 0.0


def merge_reports(
    left: Mapping[str, MismatchReport], right: Mapping[str, MismatchReport]
) -> dict[str, MismatchReport]:
    """Name -> the report of both."""
    out = dict(left)
    for name, report in right.items():
        out[name] = out[name].merge(report) if name in out else report
    return out


def split_by_age(metrics: Mapping[str, float], *, is_exact: bool) -> dict[str, float]:
    """`mismatch/k3_numerics` and `mismatch/k3_staleness`, which add up to `mismatch/k3`.

    Numerics is the mean over tokens of age 0, staleness the rest. is_exact: a contract holds, so
    numerics is 0 at every age. Empty if no token is older than 0, and if no token of age 0 shows
    numerics.

    >>> split_by_age({"mismatch/k3": 0.5, "mismatch/by_age/0/k3": 0.125, "mismatch/by_age/1/k3": 2},
    ...              is_exact=False)
    {'mismatch/k3_numerics': 0.125, 'mismatch/k3_staleness': 0.375}
    """
    of_age = "mismatch/by_age/"
    numerics = 0.0 if is_exact else metrics.get(f"{of_age}0/k3")
    is_older = any(
        name.startswith(of_age) and not name.startswith(f"{of_age}0/") for name in metrics
    )
    if numerics is None or not is_older:
        return {}
    staleness = metrics["mismatch/k3"] - numerics
    return {"mismatch/k3_numerics": numerics, "mismatch/k3_staleness": staleness}


def histogram_of(d: Tensor, is_counted: Tensor) -> Tensor:
    """[BINS] float64: the tokens of each bin. d: [N], finite. is_counted: [N] float64, 1 or 0."""
    # Counted by sign, exponent and highest bits of each float32, as one number.
    codes = (d.float().view(torch.int32) >> (23 - _SUB_BITS)) + _NUM_CODES // 2
    counts = is_counted.new_zeros(_NUM_CODES).scatter_add_(0, codes.long(), is_counted)
    return counts.new_zeros(BINS).index_add_(0, _bins_of_codes(d.device), counts)


@cache
def _bins_of_codes(device: torch.device) -> Tensor:
    """[_NUM_CODES] int64: each code's bin."""
    code = np.arange(_NUM_CODES) - _NUM_CODES // 2
    size = code & (_NUM_CODES // 2 - 1)
    side = (size - (_FIRST_BIN - 1)).clip(0, _SIDE)  # 0: below the first edge
    with torch.inference_mode(False):  # kept for whoever comes next
        return to_device(np.where(code < 0, _SIDE - side, _SIDE + side), device)


def _quantile(histogram: Sequence[float], count: float, q: float) -> float:
    """The middle of the bin that reaches the fraction q of the tokens."""
    reached, below = q * count, 0.0
    for index, inside in enumerate(histogram):
        below += inside
        if inside and below >= reached:
            side = abs(index - _SIDE) - 1
            if side < 0:
                return 0.0
            octave, sub = divmod(side, 1 << _SUB_BITS)
            unit = 1 << _SUB_BITS
            middle = math.sqrt((1 + sub / unit) * (1 + (sub + 1) / unit))
            return math.copysign(middle * 2.0 ** (_LOWEST + octave), index - _SIDE)
    return 0.0


def _estimates(s: Mapping[str, float]) -> dict[str, float]:
    n = max(s["compared"], 1.0)
    return {"k1": -s["d"] / n, "k2": 0.5 * s["d2"] / n, "k3": s["k3"] / n}


def _figures(s: Mapping[str, float], abs_d: float) -> dict[str, float]:
    """Figures of the gap, for all tokens or one part of them."""
    count = s["compared"]
    return _estimates(s) | {
        "max_abs_diff": abs_d,
        "compared_tokens": count,
        "unequal_tokens": s["unequal"],
        "outlier_tokens": s["outlier"],
        "ess": s["ratio"] ** 2 / (count * s["ratio2"]) if count else 1.0,
    }


def _parts_seen(groups: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """name -> index of the groups to report: groups of a part that has two or more, and ages above
    0."""
    out: dict[str, int] = {}
    at = 1
    for part in PARTS:
        seen = [i for i in range(len(part.labels)) if groups[at + i]["compared"]]
        is_told = len(seen) > 1 or (part.name == "age" and seen != [0])
        if part.name != "forced" and is_told:
            out |= {f"by_{part.name}/{part.labels[i]}": at + i for i in seen}
        at += len(part.labels)
    return out


def _weights_of(s: Mapping[str, float]) -> dict[str, float]:
    """Figures of the weights, for all tokens or one part of them."""
    kept, compared = max(s["kept"], 1.0), max(s["compared"], 1.0)
    mean = s["weight"] / kept
    return {
        "weight_mean": mean,
        "weight_std": math.sqrt(max(s["weight2"] / kept - mean**2, 0.0)),
        "ess": s["weight"] ** 2 / (kept * s["weight2"]) if s["weight2"] else 1.0,
        "above_share": s["above"] / compared,
        "below_share": s["below"] / compared,
    }


def _corrections(
    s: Mapping[str, float], scalars: Mapping[str, float], tops: Mapping[str, float]
) -> dict[str, float]:
    active, sequences = scalars["active"], scalars["active_sequences"]
    out = _weights_of(s) | {
        "kept_tokens": s["kept"],
        "rejected_share": 1.0 - s["kept"] / active if active else 0.0,
        "rejected_sequences_share": (
            1.0 - scalars["kept_sequences"] / max(sequences, 1.0) if active else 0.0
        ),
    }
    if scalars["normalize_count"]:
        out["normalizer"] = scalars["normalize_weight"] / scalars["normalize_count"]
    if count := scalars["weight_sequences"]:
        mean, square = scalars["sequence_weight"], scalars["sequence_weight2"]
        out |= {
            "sequence_weight_mean": mean / count,
            "sequence_ess": mean**2 / (count * square) if square else 1.0,
        }
    if math.isfinite(tops["sequence_log_ratio"]):  # weights are of sequences, and one was seen
        out |= {
            "sequence_log_ratio_max": tops["sequence_log_ratio"],
            "sequence_log_ratio_min": -tops["minus_sequence_log_ratio"],
        }
    return out
