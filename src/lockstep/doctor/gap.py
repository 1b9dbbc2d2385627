"""Where the gap is: its sums by position, turn, kind of token, age, routes and step.

# N tokens  n compared tokens
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.doctor.rows import Float64Array, Rows, given
from lockstep.observe.metrics import PARTS
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import FORCED_LOGPROB, Int64Array

RATIO_LIMIT = 20.0
"""Bound of log ratios before exp, as in correction/kl.py."""
HISTOGRAM_EDGES = np.array([10.0**e for e in np.arange(-8.0, 2.01, 0.5)])
"""Edges of |d|: two bins per decade, from 1e-8 (far below float noise) to 100 nats."""


@dataclass(slots=True)
class Gap:
    """Sums over compared tokens: d = trainer - rollout, k2 = d^2 / 2, k3 = exp(d) - 1 - d."""

    tokens: int = 0
    d: float = 0.0
    k2: float = 0.0
    k3: float = 0.0
    max_abs: float = 0.0

    def add(self, other: Gap) -> None:
        for name in ("tokens", "d", "k2", "k3"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_abs = max(self.max_abs, other.max_abs)

    def means(self) -> dict[str, float]:
        """k1 = mean(rollout - trainer), k2 and k3, as docs/correction.md defines them."""
        n = max(self.tokens, 1)
        return {
            "k1": -self.d / n,
            "k2": self.k2 / n,
            "k3": self.k3 / n,
            "max_abs_diff": self.max_abs,
            "compared_tokens": float(self.tokens),
        }


def gap_of(gap: Float64Array) -> Gap:
    """The sums of `gap`, [N] float64: trainer - rollout, NaN where there is nothing to compare."""
    d = gap[~np.isnan(gap)]
    if not len(d):
        return Gap()
    bounded = np.minimum(d, RATIO_LIMIT)
    return Gap(
        tokens=len(d),
        d=float(d.sum()),
        k2=float(0.5 * (d @ d)),
        k3=float((np.expm1(bounded) - bounded).sum()),  # 4e-8 of it is rounding at d = 1e-8
        max_abs=float(np.abs(d).max()),
    )


def add_by(gaps: dict[int, Gap], label: npt.NDArray[Any], d: Float64Array) -> None:
    """Adds the differences `d` [n] to the sums of their labels [n].

    >>> gaps = defaultdict[int, Gap](Gap)
    >>> add_by(gaps, np.array([3, 7, 3]), np.array([0.5, 0.0, -0.5]))
    >>> {label: gap.tokens for label, gap in gaps.items()}
    {3: 2, 7: 1}
    """
    for number in np.unique(label).tolist():
        gaps[number].add(gap_of(d[label == number]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One label of a part, and the gap of its tokens."""

    part: str
    label: str
    gap: Gap
    share_k2: float
    """Share of the whole sum of d^2 / 2."""
    share_tokens: float
    """Share of the compared tokens."""


@dataclass(kw_only=True)
class Split:
    """The gap of all added rows, split by PARTS, routes and steps.

    Memory does not grow with the rows.

    >>> split = Split()
    >>> split.add(
    ...     Rows(
    ...         row_ids=("a",),
    ...         offsets=np.array([0, 3]),
    ...         token_ids=np.array([7, 8, 9], np.int32),
    ...         loss_mask=np.array([False, True, True]),
    ...         rollout_logprobs=np.array([np.nan, -1.0, -0.001], np.float32),
    ...         trainer_logprobs=np.array([np.nan, -1.0, -2.001], np.float32),
    ...     )
    ... )
    >>> [(p.label, round(p.gap.k2, 3)) for p in split.places("forced")]
    [('no', 0.0), ('yes', 2.0)]
    """

    tokenizer: Tokenizer | None = None
    """Needed to split by control tokens; None leaves them out."""
    total: Gap = field(default_factory=Gap)
    steps: dict[int, Gap] = field(default_factory=lambda: defaultdict[int, Gap](Gap))
    routes: tuple[Gap, Gap] = field(default_factory=lambda: (Gap(), Gap()))
    """Gaps of the tokens that both sides predicted with the same experts, and of the others; empty
    unless both sides' routes are recorded."""

    def __post_init__(self) -> None:
        self._parts = {part.name: defaultdict[int, Gap](Gap) for part in PARTS}
        """Part -> index of its label -> sums."""
        self._histogram = np.zeros((2, len(HISTOGRAM_EDGES) + 1), np.int64)
        self._num_equal = 0

    # -- taking in ----------------------------------------------------------------------------

    def add(self, rows: Rows) -> None:
        """Adds the compared tokens of a chunk."""
        at = rows.compared
        if not len(at):
            return
        d = rows.gap[at]
        self.total.add(gap_of(d))
        for part in PARTS:
            numbers = self._numbers(part.name, rows, at)
            if numbers is not None:
                label = np.searchsorted(part.starts, numbers, side="right").clip(1) - 1
                add_by(self._parts[part.name], label.astype(np.int8), d)
        self._num_equal += int(np.count_nonzero(d == 0))
        bins = np.searchsorted(HISTOGRAM_EDGES, np.abs(d), side="right")
        for out, is_side in zip(self._histogram, (d < 0, d > 0), strict=True):
            out += np.bincount(bins[is_side], minlength=len(out))
        if rows.steps is not None:
            add_by(self.steps, rows.steps[rows.row_of[at]], d)
        self._add_routes(rows, at, d)

    def _numbers(self, part: str, rows: Rows, at: Int64Array) -> npt.NDArray[Any] | None:
        """[n] the number that the part splits by; None if unknown."""
        if part == "age":
            if rows.policy_version is None or rows.trainer_version is None:
                return None
            return rows.trainer_version[rows.row_of[at]] - rows.policy_version[at]
        if part == "turn":
            return rows.turns[at]
        if part == "position":
            return rows.position[at]
        if part == "forced":
            return given(rows.rollout_logprobs)[at] > FORCED_LOGPROB
        if self.tokenizer is None:
            return None
        return np.isin(rows.token_ids[at], list(self.tokenizer.control_ids))

    def _add_routes(self, rows: Rows, at: Int64Array, d: Float64Array) -> None:
        """Sums by agreement. A token is predicted by the routes of the position before it."""
        if rows.routed_experts is None or rows.trainer_routed_experts is None:
            return
        inside = rows.position[at] > 0
        before, d = at[inside] - 1, d[inside]
        routes = (rows.routed_experts, rows.trainer_routed_experts)
        one, other = (np.sort(experts[before]) for experts in routes)
        differs = (one != other).any((1, 2))
        for total, where in zip(self.routes, (~differs, differs), strict=True):
            total.add(gap_of(d[where]))

    # -- reading ------------------------------------------------------------------------------

    def places(self, part: str) -> list[Place]:
        """The labels of a part that have compared tokens, in order."""
        labels = next(p.labels for p in PARTS if p.name == part)
        return [
            Place(
                part=part,
                label=labels[number],
                gap=gap,
                share_k2=gap.k2 / self.total.k2 if self.total.k2 else 0.0,
                share_tokens=gap.tokens / self.total.tokens,
            )
            for number, gap in sorted(self._parts[part].items())
        ]

    def histogram(self) -> dict[str, Any]:
        """Tokens by |d|: the `edges`, counts of each of len(edges) + 1 bins `below` 0 (trainer less
        likely) and `above`, and the tokens that are bitwise `equal`."""
        return {
            "edges": HISTOGRAM_EDGES.tolist(),
            "below": self._histogram[0].tolist(),
            "above": self._histogram[1].tolist(),
            "equal": self._num_equal,
        }

    def concentrations(self) -> list[Place]:
        """At most three labels with more than half of k2, on at most half as large a share of the
        tokens; the most concentrated first."""
        found = [
            place
            for part in PARTS
            for place in self.places(part.name)
            if place.share_k2 > 0.5 and place.share_k2 >= 2 * place.share_tokens
        ]
        return sorted(found, key=lambda p: p.share_tokens / p.share_k2)[:3]
