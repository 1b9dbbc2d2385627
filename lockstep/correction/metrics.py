"""How far sampler and trainer are apart, measured on every step.

A report is two vectors: what adds up and what is a maximum. Two reports merge by a sum and a
maximum, so micro-batches and ranks can be put together in any way, with one all-reduce of each and
one copy to the host.

# T tokens  S sequences
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.correction import kl
from lockstep.errors import AlignmentError
from lockstep.types import FORCED_LOGPROB

Tensor = torch.Tensor

OUTLIER_DIFF = 1e-4
"""In float32 two sides that compute the same differ by some 5e-6; a token above this differs for a
reason: another expert was chosen, or the tokens are not the same. Named for what is measured."""

LOG_RATIO_LIMIT = 300.0  # exp(2 * 300) = 1e260: squares and their sums stay finite in float64

_SUMS = (
    "compared", "nonfinite", "forced", "unequal", "outlier",
    "d", "d2", "k3", "unforced_d", "unforced_d2", "unforced_k3",
    "ratio", "ratio2", "sequences", "sequence_d",
)  # fmt: skip
_MAXIMA = ("abs", "d", "minus_d", "sequence_d")

# Signed-log histogram of the log ratio: bins of 1/20 decade from 1e-9 to 1e3 on either side of one
# bin for what is smaller. A quantile is a bin's middle, right within a factor of 10^(1/40) = 1.06.
_PER_DECADE, _LOWEST, _HIGHEST = 20, -9, 3
_SIDE = _PER_DECADE * (_HIGHEST - _LOWEST)
_BINS = 2 * _SIDE + 1

CHUNK_TOKENS = 1 << 18  # float64 temporaries are made for this many tokens at a time

QUANTILES = (0.5, 0.99, 0.999)


@dataclass(frozen=True, slots=True, eq=False)
class MismatchReport:
    """The gap between rollout and trainer log-probs of the same tokens.

    >>> import torch
    >>> trainer, rollout = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5])
    >>> report = MismatchReport.of(trainer, rollout)
    >>> metrics = report.to_metrics()
    >>> metrics["mismatch/k1"], metrics["mismatch/unequal_tokens"]
    (-0.25, 1.0)
    """

    sums: Tensor
    """[len(_SUMS) + bins] float64: merged by addition."""
    maxima: Tensor
    """[len(_MAXIMA)] float64: merged by maximum; -inf where nothing was compared."""

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> MismatchReport:
        """Of no tokens: the neutral element of `merge`."""
        sums = torch.zeros(len(_SUMS) + _BINS, dtype=torch.float64, device=device)
        return cls(sums, torch.full_like(sums[: len(_MAXIMA)], float("-inf")))

    @classmethod
    def of(
        cls,
        logprobs: Tensor,
        rollout_logprobs: Tensor,
        *,
        mask: Tensor | None = None,
        row: Tensor | None = None,
        num_rows: int = 1,
    ) -> MismatchReport:
        """Compares two [T] float32 of the same tokens, in float64.

        mask: [T] bool, False at padding and at tokens that are not compared: what stands there
        cannot change the result. row: [T] int64 in [0, num_rows), the sequence of each token; a
        sequence must not be spread over two reports. None is one sequence. Tokens that are not
        finite on one side are left out and counted. Raises AlignmentError if lengths differ.
        """
        if row is not None and row.shape != logprobs.shape:
            raise AlignmentError(
                f"row has the shape {list(row.shape)}, logprobs {list(logprobs.shape)}: it names "
                "the sequence of each token."
            )
        device = logprobs.device
        report = cls.empty(device)
        of_sequence = torch.zeros(2, num_rows, dtype=torch.float64, device=device)
        for at in range(0, len(logprobs), CHUNK_TOKENS):
            part = slice(at, at + CHUNK_TOKENS)
            d, is_valid = kl.log_ratio(
                logprobs[part], rollout_logprobs[part], None if mask is None else mask[part]
            )
            is_active = None if mask is None else mask[part].bool()
            report = report.merge(_of_tokens(d, is_valid, is_active, rollout_logprobs[part]))
            pair = torch.stack([d, is_valid.double()])
            if row is None:
                of_sequence[:, 0] += pair.sum(1)
            else:
                of_sequence.index_add_(1, row[part], pair)
        return report.merge(_of_sequences(of_sequence[0], of_sequence[1]))

    def merge(self, other: MismatchReport) -> MismatchReport:
        """The report of both sets of tokens."""
        return MismatchReport(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def to_metrics(self, prefix: str = "mismatch") -> dict[str, float]:
        """Numbers by name; one copy to the host.

        With nothing compared, everything is 0 and `ess` is 1; `compared_tokens` says so.
        k1 is mean(rollout - trainer), k2 half the mean square, k3 mean(exp(d) - 1 - d) with
        d = trainer - rollout; `*_unforced` are over tokens that were not as good as forced.
        `ess` is (sum w)^2 / (n sum w^2) of w = exp(d), in (0, 1]. `log_ratio_max` and `_min` are of
        d. Quantiles of d come from a histogram: 6 % off at most, and 0 below 1e-9.
        """
        values: list[float] = torch.cat([self.sums, self.maxima]).cpu().numpy().tolist()
        return self.metrics_of(values, prefix)

    @staticmethod
    def metrics_of(values: list[float], prefix: str = "mismatch") -> dict[str, float]:
        """The metrics of a report that is on the host already: its sums, then its maxima."""
        s = dict(zip(_SUMS, values, strict=False))
        histogram = values[len(_SUMS) : len(_SUMS) + _BINS]
        m = dict(zip(_MAXIMA, values[-len(_MAXIMA) :], strict=True))
        count = s["compared"]
        unforced = count - s["forced"]
        n, u, sequences = max(count, 1.0), max(unforced, 1.0), max(s["sequences"], 1.0)
        out = {
            "k1": -s["d"] / n,
            "k2": 0.5 * s["d2"] / n,
            "k3": s["k3"] / n,
            "k1_unforced": -s["unforced_d"] / u,
            "k2_unforced": 0.5 * s["unforced_d2"] / u,
            "k3_unforced": s["unforced_k3"] / u,
            "max_abs_diff": m["abs"],
            "log_ratio_max": m["d"],
            "log_ratio_min": -m["minus_d"],
            "unequal_tokens": s["unequal"],
            "outlier_tokens": s["outlier"],
            "compared_tokens": count,
            "forced_share": s["forced"] / n,
            "nonfinite_tokens": s["nonfinite"],
            "ess": s["ratio"] ** 2 / (n * s["ratio2"]) if count else 1.0,
            "log_ppl_abs_diff_mean": s["sequence_d"] / sequences,
            "log_ppl_abs_diff_max": m["sequence_d"],
        }
        for q in QUANTILES:
            name = f"{100 * q:g}".replace(".", "_")
            out[f"log_ratio_p{name}"] = _quantile(histogram, count, q)
            if q != 0.5:
                low = f"{100 * (1 - q):g}".replace(".", "_")
                out[f"log_ratio_p{low}"] = _quantile(histogram, count, 1 - q)
        if not count:
            out = dict.fromkeys(out, 0.0) | {"ess": 1.0, "nonfinite_tokens": s["nonfinite"]}
        return {f"{prefix}/{k}": v + 0.0 for k, v in out.items()}  # + 0.0: -0.0 is shown as 0.0


def _of_tokens(
    d: Tensor, is_valid: Tensor, is_active: Tensor | None, rollout_logprobs: Tensor
) -> MismatchReport:
    """Everything but the per-sequence part. `d` is 0.0 where a token is not valid."""
    valid = is_valid.double()
    is_forced = is_valid & (rollout_logprobs.detach() > FORCED_LOGPROB)
    unforced = valid - is_forced.double()
    size = d.abs()
    bounded = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    of_k3 = kl.k3(bounded)
    ratio = bounded.exp() * valid
    square = d.square()
    active = valid.new_tensor(float(len(d))) if is_active is None else is_active.sum()
    per_token = torch.stack(
        [
            valid, is_forced.double(), (d != 0).double(), (size > OUTLIER_DIFF).double(),
            d, square, of_k3, d * unforced, square * unforced, of_k3 * unforced,
            ratio, ratio.square(),
        ]
    ).sum(1)  # fmt: skip
    histogram = torch.zeros(_BINS, dtype=torch.float64, device=d.device)
    histogram.index_add_(0, _bin_of(d), valid)
    none = d.new_full((1,), float("-inf"))
    seen = torch.where(is_valid, d, none)
    unseen = torch.where(is_valid, -d, none)
    top = torch.stack([torch.cat([x, none]).amax() for x in (seen, unseen)])
    return MismatchReport(
        torch.cat(
            [
                per_token[:1], (active - per_token[0])[None], per_token[1:],
                per_token.new_zeros(2), histogram,
            ]
        ),
        torch.cat([top.amax()[None], top, none]),
    )  # fmt: skip


def _of_sequences(sum_S: Tensor, count_S: Tensor) -> MismatchReport:
    """sum_S: of the log ratio over a sequence's compared tokens; count_S: how many those are. Each
    sequence weighs the same; one without compared tokens is no sequence."""
    out = MismatchReport.empty(sum_S.device)
    is_seen = count_S > 0
    mean_S = torch.where(is_seen, (sum_S / count_S.clamp(min=1)).abs(), 0.0)
    out.sums[_SUMS.index("sequences")] = is_seen.sum()
    out.sums[_SUMS.index("sequence_d")] = mean_S.sum()
    seen = torch.where(is_seen, mean_S, float("-inf"))
    out.maxima[_MAXIMA.index("sequence_d")] = torch.cat([seen, out.maxima[:1]]).amax()
    return out


def _bin_of(d: Tensor) -> Tensor:
    size = d.abs()
    place = ((torch.log10(size.clamp(min=1e-300)) - _LOWEST) * _PER_DECADE).floor()
    side = place.clamp(-1, _SIDE - 1).long() + 1  # 0: below the first edge
    return torch.where(d < 0, _SIDE - side, _SIDE + side)


def _quantile(histogram: list[float], count: float, q: float) -> float:
    """The middle of the bin in which the fraction q of the tokens is reached."""
    reached, below = q * count, 0.0
    for index, inside in enumerate(histogram):
        below += inside
        if inside and below >= reached:
            side = abs(index - _SIDE)
            if side == 0:
                return 0.0
            middle = 10 ** (_LOWEST + (side - 0.5) / _PER_DECADE)
            return middle if index > _SIDE else -middle
    return 0.0
