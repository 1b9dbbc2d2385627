# torch leaves from_numpy and all_reduce partly untyped.
# pyright: reportUnknownMemberType=false
"""How far sampler and trainer are apart, and what was done about it: figures of every step.

A report is two vectors: what adds up and what is a maximum. Two reports merge by a sum and a
maximum, so micro-batches and ranks are put together in any way, with one all-reduce of each and one
copy to the host.

# F fields  G parts that tokens are told apart by  C cells of all parts crossed
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep.observe.parts import PARTS

Tensor = torch.Tensor

OUTLIER_DIFF = 1e-4
"""In float32 two sides that compute the same differ by some 5e-6; a token above this differs for a
reason: another expert was chosen, or the tokens are not the same. Named for what is measured."""

# -- what adds up, token by token -----------------------------------------------------------------

FIELDS: tuple[str, ...] = (
    "compared", "unequal", "outlier", "d", "d2", "k3", "ratio", "ratio2",
    "kept", "weight", "weight2", "above", "below",
)  # fmt: skip
"""Of one token: 1 if both log-probs are finite; if they differ; if by more than OUTLIER_DIFF; the
log ratio d = trainer - rollout, its square and k3; exp(d), cut at 20, and its square; 1 if it is
trained on; its weight after bounding and the weight's square, 0 if it is not; 1 if its weight was
over or under the limits."""


CELLS = tuple(len(part.labels) for part in PARTS[:-1])
NUM_CELLS = math.prod(CELLS)
"""All parts crossed but `forced`, of which tokens change often and which is summed by itself."""
_TOTAL = 0  # the first group is of all tokens
_TOPS = 1 + sum(CELLS)  # groups with a maximum
_GROUPS = _TOPS + len(PARTS[-1].labels)

# -- what adds up otherwise -----------------------------------------------------------------------

SCALARS: tuple[str, ...] = (
    "active", "active_sequences", "sequences", "sequence_d", "sequence_abs_d", "sequence_ratio2",
    "kept_sequences", "weight_sequences", "sequence_weight", "sequence_weight2",
    "normalize_weight", "normalize_count", "penalty",
)  # fmt: skip
"""Tokens that count, finite or not, and sequences that have one. Of sequences with a compared
token, each weighing the same: their number; the mean log ratio and its size; the square of the
product of ratios (cut at exp(20)); those with a token left; those that the weights are of, those
weights and their squares. What the weights sum to, and what they are made to sum to. The sum of
rollout - trainer, clipped, that the KL penalty is centred with."""

MAXIMA: tuple[str, ...] = (
    "abs_d", "d", "minus_d", "sequence_abs_d", "sequence_d", "minus_sequence_d",
    "sequence_log_ratio", "minus_sequence_log_ratio",
)  # fmt: skip

# Signed-log histogram of the log ratio: eight bins per octave from 2^-30 to 2^10, read off the bits
# of a float32, on either side of one bin for what is smaller. A quantile is a bin's geometric
# middle, right within a factor of sqrt(9 / 8) = 1.061.
_SUB_BITS, _OCTAVES, _LOWEST = 3, 40, -30
_SIDE = _OCTAVES << _SUB_BITS
_FIRST_BIN = (127 + _LOWEST) << _SUB_BITS  # 127: the exponent's offset in a float32
BINS = 2 * _SIDE + 1
NUM_CODES = 1 << (9 + _SUB_BITS)  # sign and exponent are 9 bits

QUANTILES = (0.5, 0.99, 0.999)


@dataclass(frozen=True, slots=True, eq=False)
class MismatchReport:
    """The gap between rollout and trainer log-probs of the same tokens, and its correction.

    Made by `lockstep.correction.measure`, and by `weigh` beside the weights.

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
    """float64, merged by maximum: |d| of each group but `forced`, then MAXIMA; -inf where nothing
    was seen."""
    rules: tuple[str, ...] = ()
    """Names of the rejection rules."""
    is_weighed: bool = False
    """Whether a correction was applied, so that its figures mean something."""

    @classmethod
    def empty(
        cls,
        device: torch.device | str = "cpu",
        *,
        rules: tuple[str, ...] = (),
        is_weighed: bool = False,
    ) -> MismatchReport:
        """Of no tokens: the neutral element of `merge`."""
        size = _GROUPS * len(FIELDS) + len(SCALARS) + BINS + len(rules)
        sums = torch.zeros(size, dtype=torch.float64, device=device)
        maxima = torch.full(
            (_TOPS + len(MAXIMA),), float("-inf"), dtype=torch.float64, device=device
        )
        return cls(sums, maxima, rules, is_weighed)

    @classmethod
    def of_cells(
        cls,
        fields_FC: Tensor,
        abs_d_C: Tensor,
        unforced_F: Tensor,
        scalars: Mapping[str, Tensor | float],
        maxima: Mapping[str, Tensor],
        histogram: Tensor,
        by_rule: Tensor,
        *,
        rules: tuple[str, ...],
        is_weighed: bool,
    ) -> MismatchReport:
        """From sums over the crossed cells (float64) to those of each part. unforced_F: of the
        tokens that were not forced."""
        device = fields_FC.device
        crossed, largest = fields_FC.view(-1, *CELLS), abs_d_C.view(*CELLS)
        axes = range(len(CELLS))
        groups = [fields_FC.sum(1, keepdim=True)]
        tops = [abs_d_C.amax()[None]]
        for axis in axes:
            others = [a for a in axes if a != axis]
            groups.append(crossed.sum([a + 1 for a in others]))
            tops.append(largest.amax(others))
        forced_F = groups[0][:, 0] - unforced_F
        groups.append(torch.stack([unforced_F, forced_F], 1))
        found = {name: torch.as_tensor(scalars.get(name, 0.0), device=device) for name in SCALARS}
        none = torch.tensor(float("-inf"), dtype=torch.float64, device=device)
        return cls(
            torch.cat(
                [
                    torch.cat(groups, 1).t().reshape(-1),
                    torch.stack([found[name].double() for name in SCALARS]),
                    histogram,
                    by_rule,
                ]
            ),
            torch.cat([*tops, torch.stack([maxima.get(name, none).double() for name in MAXIMA])]),
            rules,
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
        sums, maxima = self.sums.clone(), self.maxima.clone()
        dist.all_reduce(sums, group=group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        return MismatchReport(sums, maxima, self.rules, self.is_weighed)

    def total(self, name: str) -> Tensor:
        """[] float64 on the device: the sum of a field over all tokens, or a scalar."""
        if name in FIELDS:
            return self.sums[_TOTAL * len(FIELDS) + FIELDS.index(name)]
        return self.sums[_GROUPS * len(FIELDS) + SCALARS.index(name)]

    def to_metrics(self, prefix: str = "mismatch", *, by_part: bool = True) -> dict[str, float]:
        """Numbers by name; one copy to the host. See `metrics_of`."""
        values = torch.cat([self.sums, self.maxima]).cpu().numpy().tolist()
        return self.metrics_of(values, prefix, by_part=by_part)

    def metrics_of(
        self, values: list[float], prefix: str = "mismatch", *, by_part: bool = True
    ) -> dict[str, float]:
        """The metrics of this report, whose sums and then maxima are on the host already.

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
        sums, maxima = values[: len(self.sums)], values[len(self.sums) :]
        width = len(FIELDS)
        groups = [
            dict(zip(FIELDS, sums[g * width : (g + 1) * width], strict=True))
            for g in range(_GROUPS)
        ]
        at = _GROUPS * width
        scalars = dict(zip(SCALARS, sums[at : at + len(SCALARS)], strict=True))
        at += len(SCALARS)
        histogram, by_rule = sums[at : at + BINS], sums[at + BINS :]
        tops = dict(zip(MAXIMA, maxima[_TOPS:], strict=True))
        total = groups[_TOTAL]
        nonfinite = scalars["active"] - total["compared"]
        unforced, forced = groups[-2], groups[-1]
        out = _figures(total, maxima[_TOTAL])
        out |= {f"{k}_unforced": v for k, v in _estimates(unforced).items()}
        sequences = max(scalars["sequences"], 1.0)
        out |= {
            "log_ratio_max": tops["d"],
            "log_ratio_min": -tops["minus_d"],
            "forced_share": forced["compared"] / max(total["compared"], 1.0),
            "chi2": total["ratio2"] / max(total["compared"], 1.0) - 1.0,
            "chi2_sequence": scalars["sequence_ratio2"] / sequences - 1.0,
            "log_ppl_abs_diff_mean": scalars["sequence_abs_d"] / sequences,
            "log_ppl_abs_diff_max": tops["sequence_abs_d"],
            "log_ppl_diff_mean": -scalars["sequence_d"] / sequences,
            "log_ppl_diff_max": tops["minus_sequence_d"],
            "log_ppl_diff_min": -tops["sequence_d"],
        }
        for q in (q for high in QUANTILES for q in sorted({high, 1 - high})):
            out[f"log_ratio_p{_percent(q)}"] = _quantile(histogram, total["compared"], q)
        if not total["compared"]:
            out = dict.fromkeys(out, 0.0) | {"ess": 1.0}
        out["nonfinite_tokens"] = nonfinite
        parts = _parts_seen(groups) if by_part else {}
        for name, g in parts.items():
            out |= {f"{name}/{k}": v for k, v in _figures(groups[g], maxima[g]).items()}
        named = {f"{prefix}/{k}": v for k, v in out.items()}
        if self.is_weighed:
            weighed = _corrections(total, scalars, tops, by_rule, self.rules)
            for name, g in parts.items():
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


def codes_of(d: Tensor) -> Tensor:
    """[N] int32 in [0, NUM_CODES): sign, exponent and highest bits of each float32, finite."""
    return (d.float().view(torch.int32) >> (23 - _SUB_BITS)) + NUM_CODES // 2


def histogram_of(counts: Tensor) -> Tensor:
    """[NUM_CODES] float64 tokens of each code -> [BINS] of each of the histogram's bins."""
    code = torch.arange(NUM_CODES, device=counts.device) - NUM_CODES // 2
    size = code & (NUM_CODES // 2 - 1)
    side = (size - (_FIRST_BIN - 1)).clamp(0, _SIDE)  # 0: below the first edge
    bins = torch.where(code < 0, _SIDE - side, _SIDE + side)
    return counts.new_zeros(BINS).index_add_(0, bins, counts)


def _quantile(histogram: Sequence[float], count: float, q: float) -> float:
    """The middle of the bin in which the fraction q of the tokens is reached."""
    reached, below = q * count, 0.0
    for index, inside in enumerate(histogram):
        below += inside
        if inside and below >= reached:
            side = abs(index - _SIDE) - 1
            if side < 0:
                return 0.0
            octave, sub = divmod(side, 1 << _SUB_BITS)
            unit = 1 << _SUB_BITS
            middle = math.sqrt((1 + sub / unit) * (1 + (sub + 1) / unit)) * 2.0 ** (
                _LOWEST + octave
            )
            return middle if index > _SIDE else -middle
    return 0.0


def _percent(q: float) -> str:
    return f"{100 * q:g}".replace(".", "_")


def _estimates(s: Mapping[str, float]) -> dict[str, float]:
    n = max(s["compared"], 1.0)
    return {"k1": -s["d"] / n, "k2": 0.5 * s["d2"] / n, "k3": s["k3"] / n}


def _figures(s: Mapping[str, float], abs_d: float) -> dict[str, float]:
    """What is told of all tokens and of each part of them."""
    count = s["compared"]
    return _estimates(s) | {
        "max_abs_diff": abs_d,
        "compared_tokens": count,
        "unequal_tokens": s["unequal"],
        "outlier_tokens": s["outlier"],
        "ess": s["ratio"] ** 2 / (count * s["ratio2"]) if count else 1.0,
    }


def _parts_seen(groups: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """name -> index of the groups that say something: two or more of a part were seen."""
    out: dict[str, int] = {}
    at = 1
    for part in PARTS:
        seen = [i for i in range(len(part.labels)) if groups[at + i]["compared"]]
        if part.name != "forced" and len(seen) > 1:
            out |= {f"by_{part.name}/{part.labels[i]}": at + i for i in seen}
        at += len(part.labels)
    return out


def _weights_of(s: Mapping[str, float]) -> dict[str, float]:
    """What is told of the weights of all tokens and of each part of them."""
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
    s: Mapping[str, float],
    scalars: Mapping[str, float],
    tops: Mapping[str, float],
    by_rule: Sequence[float],
    rules: Sequence[str],
) -> dict[str, float]:
    active, sequences = max(scalars["active"], 1.0), max(scalars["active_sequences"], 1.0)
    out = _weights_of(s) | {
        "kept_tokens": s["kept"],
        "rejected_share": 1.0 - s["kept"] / active,
        "rejected_sequences_share": 1.0 - scalars["kept_sequences"] / sequences,
    }
    if not scalars["active"]:
        out |= {"rejected_share": 0.0, "rejected_sequences_share": 0.0}
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
    return out | {
        f"rejected_by/{name}": count / active for name, count in zip(rules, by_rule, strict=True)
    }
