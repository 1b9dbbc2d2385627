"""Are recorded routes those of a router, or fillers?

A top-k chooses k different experts, so an expert that stands twice at one token of one layer was
never routed to: it is a buffer of zeros, or the part of it that an engine did not write (the prefix
that its cache held, the last token of a reply). Not recorded is -1, and healthy.

# N tokens  L layers  K active experts
"""

from __future__ import annotations

import numpy as np

from lockstep.doctor.checks.attribution import Gap, gap_of
from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import BoolArray, Rows, once_per_chunk
from lockstep.types import UNKNOWN_EXPERT

MIN_TOKENS = 4
"""Tokens that a cause needs: fewer are a broken file rather than a habit of the program."""
MIN_CONSTANT = 16
"""Tokens in a row whose routes must all be one list of experts, the same in every layer, to be a
filler. Two layers of four experts, two active, have one list at one token once in 12."""
MIN_IDS = 8
"""Different ids among them: a model that repeats itself repeats its routes."""
MIN_RATIO = 2.0
"""Ratio of the gap after a filler to the gap elsewhere from which on the fillers make it, as for
other ids that should not be in a row."""


class ZeroRoutes(Check):
    """Looks for experts that occur twice at a token, and for one list at all tokens and layers."""

    name = "values/routes"
    basis = "shown"
    claim = "the routes of each token name as many different experts as a router chooses"
    cause = "zero_routes"
    needs = ("routed_experts",)

    def begin(self) -> None:
        self._known = self._twice = np.zeros(0, np.int64)
        """[L] tokens with routes, and those of them where an expert occurs twice."""
        self._after, self._elsewhere = Gap(), Gap()

    def look(self, rows: Rows) -> None:
        known, twice = _known_and_twice(rows)
        if len(self._known) != known.shape[1]:
            self._known = self._twice = np.zeros(known.shape[1], np.int64)
        self._known = self._known + known.sum(0)
        self._twice = self._twice + twice.sum(0)
        # Layers without a router are known at the end; until then their tokens count, one by one.
        filler = self._fillers(rows)
        after = self._after_fillers(rows, filler)
        gap = rows.gap
        self._after.add(gap_of(gap[after]))
        self._elsewhere.add(gap_of(gap[~after]))
        is_last = rows.position == np.repeat(rows.sizes - 1, rows.sizes)
        self.count(
            routed_tokens=known.any(1),
            filler_tokens=filler & ~is_last,
            last_tokens=filler & is_last,
            rows=len(rows),
            rows_hit=rows.row_sums(np.flatnonzero(filler & ~is_last)) > 0,
        )
        assert rows.routed_experts is not None, "the check's needs"
        experts = rows.routed_experts

        def note(b: int, e: int) -> str:
            layer = int(np.argmax(twice[b])) if twice[b].any() else 0
            return f"{e - b} tokens, the first with the experts {experts[b, layer].tolist()}"

        self.show_runs(rows, *rows.runs(filler & ~is_last), note)

    def _fillers(self, rows: Rows) -> BoolArray:
        """[N] True where the routes of some layer are no router's."""
        known, twice = _known_and_twice(rows)
        return (twice & ~self._unrouted).any(1) | self._constant(rows, known)

    @property
    def _unrouted(self) -> BoolArray:
        """[L] layers without a router: no token has routes there, while other layers have. Engines
        leave zeros in their place."""
        is_empty = (self._known > 0) & (self._twice == self._known)
        return is_empty & ~is_empty.all()

    def _constant(self, rows: Rows, known: BoolArray) -> BoolArray:
        """[N] True in runs of tokens that have one list of experts in all layers."""
        experts = rows.routed_experts
        assert experts is not None, "the check's needs"
        kept = ~self._unrouted
        if kept.sum() < 2:
            return np.zeros(rows.num_tokens, np.bool_)
        experts, known = experts[:, kept], known[:, kept]
        same = known.all(1) & (experts == experts[:, :1]).all((1, 2))
        out = np.zeros(rows.num_tokens, np.bool_)
        for begin, end in zip(*rows.runs(same), strict=True):
            lists = experts[begin:end, 0]
            changes = np.flatnonzero((lists[1:] != lists[:-1]).any(1)) + 1
            for piece in np.split(np.arange(begin, end), changes):
                ids = np.unique(rows.token_ids[piece])
                if len(piece) >= MIN_CONSTANT and len(ids) >= MIN_IDS:
                    out[piece] = True
        return out

    @staticmethod
    def _after_fillers(rows: Rows, filler: BoolArray) -> BoolArray:
        """[N] tokens behind the first filler of their row: it changes what they attend to."""
        first = rows.firsts(np.flatnonzero(filler))
        return np.arange(rows.num_tokens) > np.repeat(first, rows.sizes)

    @property
    def _makes_gap(self) -> bool:
        after, elsewhere = (gap.means()["k2"] for gap in (self._after, self._elsewhere))
        return bool(self._elsewhere.tokens) and after > MIN_RATIO * elsewhere

    def conclude(self) -> Finding:
        c = self.counts
        found, rows_hit = c["filler_tokens"], c["rows_hit"]
        unrouted = int(self._unrouted.sum())
        figures = {
            "k2_after": self._after.means()["k2"],
            "k2_elsewhere": self._elsewhere.means()["k2"],
            "layers_without_routes": float(unrouted),
        }
        if found < MIN_TOKENS:
            if unrouted or c["last_tokens"]:
                told = f"{unrouted} layers have no routes at any token (no router there)"
                told += f"; {c['last_tokens']} rows have a filler at their last token, which no "
                told += "prediction uses"
                return self.information(told, **figures)
            told = f"the routes of {c['routed_tokens']} tokens are different experts"
            return self.consistent(told, **figures)
        told = (
            f"{found} of {c['routed_tokens']} tokens, in {rows_hit} of {c['rows']} rows, have one "
            "expert twice, or one list of experts everywhere: fillers where -1 says not recorded"
        )
        if self._makes_gap:
            told += (
                f"; k2 is {figures['k2_after']:.1e} after them and "
                f"{figures['k2_elsewhere']:.1e} elsewhere"
            )
        elif self._after.tokens:
            told += "; the rows do not show that a gap comes of them"
        return self.differs(told, **figures)

    def repair(self, rows: Rows) -> Rows:
        """-1 in place of the fillers. The gap after them is theirs if it is the larger one."""
        experts = rows.routed_experts
        if experts is None:
            return rows
        filler = self._fillers(rows)
        if not filler.any():
            return rows
        if self._makes_gap and rows.rollout_logprobs is not None:
            rows = rows.agreeing(self._after_fillers(rows, filler))
        unknown = np.asarray(UNKNOWN_EXPERT, experts.dtype)
        return rows.with_(routed_experts=np.where(filler[:, None, None], unknown, experts))


@once_per_chunk
def _known_and_twice(rows: Rows) -> tuple[BoolArray, BoolArray]:
    """([N, L] the token has routes there, [N, L] and an expert occurs twice among them)."""
    assert rows.routed_experts is not None, "the check's needs"
    experts = np.sort(rows.routed_experts.astype(np.int32), axis=2)
    known = np.asarray((experts > UNKNOWN_EXPERT).all(2))
    return known, known & np.asarray((np.diff(experts, axis=2) == 0).any(2))
