"""Facts, and their counts over the chunks of a dump.

A fact is a function of a chunk of whole rows. It yields contradictions; it sees the rows as they
are recorded. Tokens that contradict something lose their gap: that is the share of the cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from lockstep.doctor.findings import MAX_EVIDENCE, Basis, Evidence, Finding, Setting, claim_of
from lockstep.doctor.gap import gap_of
from lockstep.doctor.rows import Rows
from lockstep.errors import LockstepError
from lockstep.types import Int64Array

Repair = Callable[[Rows], Rows]
MIN_EQUAL = 4
"""Equal ids or numbers that are no accident: text seldom has one id four times in a row, and two
logits agree in 24 bits once in 2^20. The limit doubles if no program names the id, and for a prompt
that is repeated: a template's header alone has some five."""
MAX_SHIFT = 3
"""Places that log-probs are moved by: an index into the predictor in place of the token makes one;
twice, or across a border, it is two or three."""
FAR = 1.0
"""Least difference in nats of two log-probs that are of different things: engines differ by less
(DENSE_BAND)."""


@dataclass
class Contradiction:
    """Places of a chunk where two records disagree, by one cause. Lists of places become arrays."""

    cause: str
    note: str
    """The two records that contradict each other, in words."""
    begin: Int64Array
    """[X] index of the first token of each place."""
    end: Int64Array
    """[X] index after the last."""
    _: KW_ONLY
    expected: Sequence[Sequence[int]] = ()
    """[X] ids that should be there, where they are known."""
    reaches_on: bool = False
    """True if the defect changes everything after it in its row: other ids, other log-probs."""
    basis: Basis = "shown"
    """"fit" where one of the records was learnt from the rows."""
    moves: bool = True
    """True if the defect moves log-probs."""
    repair: Repair | None = None
    """The rows without the defect; by default the places are not compared."""

    def __post_init__(self) -> None:
        self.begin, self.end = np.asarray(self.begin, np.int64), np.asarray(self.end, np.int64)

    def repaired(self, rows: Rows) -> Rows:
        if self.repair is not None:
            return self.repair(rows)
        if rows.rollout_logprobs is None or not self.moves:
            return rows
        end = self.end
        if self.reaches_on:
            row = rows.row_of[np.minimum(self.begin, rows.num_tokens - 1)]
            end = rows.offsets[row + 1]
        where = rows.within(self.begin, np.maximum(end, self.begin))
        values = np.where(where, np.float32(np.nan), rows.rollout_logprobs)
        return rows.with_(rollout_logprobs=values)


def agree(rows: Rows, chosen: Sequence[int] | Int64Array, setting: Setting) -> bool:
    """True if numerics can make the gap of these rows: then both sides read the same ids."""
    gap = gap_of(rows.gap[np.isin(rows.row_of, chosen)])
    return gap.tokens > 0 and gap.k2 <= setting.band * gap.tokens


Look = Callable[[Rows, Setting], Iterator[Contradiction]]


@dataclass(frozen=True, kw_only=True)
class Fact:
    name: str
    claim: str
    needs: tuple[str, ...]
    look: Look


FACTS: dict[str, Fact] = {}
"""Every fact by name, a plugin's too."""


def fact(name: str = "", *, claim: str = "", needs: tuple[str, ...] = ()) -> Callable[[Look], Look]:
    """Registers a function as a fact. By default it has the function's name, and claims the first
    sentence of its docstring. needs: fields of `Rows` and `Setting`."""

    def register(look: Look) -> Look:
        full = f"facts/{name or look.__name__}"
        FACTS[full] = Fact(name=full, claim=claim or claim_of(look), needs=needs, look=look)
        return look

    return register


class Places:
    """Places of a chunk, collected one by one into one contradiction per cause and note."""

    def __init__(self, **options: Any) -> None:
        """options: fields of each `Contradiction`, unless `add` says otherwise."""
        self._options = options
        self._found = defaultdict[Any, list[tuple[int, int, list[int]]]](list)
        """(cause, note, options of `Contradiction`) -> (begin, end, expected ids)."""

    def add(
        self, cause: str, note: str, begin: int, end: int, ids: Iterable[Any] = (), **options: Any
    ) -> None:
        """ids: what should be there."""
        key = cause, note, tuple((self._options | options).items())
        self._found[key].append((begin, max(end, begin + 1), [int(i) for i in ids]))

    def all(self) -> Iterator[Contradiction]:
        for (cause, note, options), found in self._found.items():
            begin, end, ids = zip(*found, strict=True)
            expected = ids if any(ids) else ()
            places = np.array(begin), np.array(end)
            yield Contradiction(cause, note, *places, expected=expected, **dict(options))


@dataclass(kw_only=True)
class _Count:
    """The contradictions of one fact by one cause so far."""

    note: str
    basis: Basis
    places: int = 0
    rows: int = 0
    k2: float = 0.0
    """Sum of d^2 / 2 that the repair removes."""
    evidence: list[Evidence] = field(default_factory=list[Evidence])
    """The longest places."""

    def add(self, rows: Rows, one: Contradiction) -> None:
        self.places += len(one.begin)
        for i in np.argsort(one.begin - one.end, kind="stable")[:MAX_EVIDENCE].tolist():
            place = int(one.begin[i]), int(one.end[i])
            ids = one.expected[i] if one.expected else ()
            self.evidence.append(Evidence.at(rows, *place, one.note, ids))
        self.evidence.sort(key=lambda piece: piece.begin - piece.end)
        del self.evidence[MAX_EVIDENCE:]


@dataclass(kw_only=True)
class Tally:
    """The contradictions of one fact so far, by cause."""

    fact: Fact
    num_rows: int = 0
    counts: dict[str, _Count] = field(default_factory=dict[str, _Count])
    error: str = ""

    def take(self, rows: Rows, setting: Setting, left: Rows) -> Rows:
        """Looks at a chunk. left: the chunk after the facts before; returns it after this one."""
        self.num_rows += len(rows)
        try:
            found = [c for c in self.fact.look(rows, setting) if len(c.begin)]
        except Exception as error:  # a plugin's bug: the other facts go on
            is_ours = isinstance(error, LockstepError)
            self.error = str(error) if is_ours else f"failed with {type(error).__name__}: {error}"
            return left
        hit: dict[str, set[int]] = defaultdict(set)
        for one in (_news(rows, left, c) for c in found):
            if not len(one.begin):
                continue
            at = np.minimum(one.begin, max(rows.num_tokens - 1, 0))
            hit[one.cause].update(rows.row_of[at].tolist())
            count = self.counts.setdefault(one.cause, _Count(note=one.note, basis=one.basis))
            count.add(rows, one)
            before = gap_of(left.gap).k2
            left = one.repaired(left)
            count.k2 += before - gap_of(left.gap).k2
        for cause, numbers in hit.items():
            self.counts[cause].rows += len(numbers)
        return left

    def findings(self, lacks: tuple[str, ...]) -> list[Finding]:
        """One finding for each cause, or that nothing contradicts."""
        finding = partial(Finding, check=self.fact.name, claim=self.fact.claim)
        if lacks or self.error:
            told = self.error or f"needs {', '.join(lacks)}"
            return [finding(verdict="not_checkable", lacks=lacks, measured=told)]
        if not self.counts:
            told = f"no contradiction in {self.num_rows:,} rows"
            return [finding(verdict="consistent", measured=told)]
        return [
            finding(
                verdict="differs",
                measured=f"{one.places} places in {one.rows} of {self.num_rows} rows: {one.note}",
                cause=cause,
                basis=one.basis,
                figures={"places": one.places, "rows": one.rows},
                evidence=tuple(one.evidence),
            )
            for cause, one in self.counts.items()
        ]


def _news(rows: Rows, left: Rows, one: Contradiction) -> Contradiction:
    """Without the places that an earlier contradiction of other ids explains."""
    old, new = rows.rollout_logprobs, left.rollout_logprobs
    if old is None or new is None or not rows.num_tokens:
        return one
    last = np.minimum(np.maximum(one.end - 1, one.begin), rows.num_tokens - 1)
    is_new = ~(np.isfinite(old) & np.isnan(new))[last]
    expected = [ids for ids, is_kept in zip(one.expected, is_new, strict=False) if is_kept]
    return replace(one, begin=one.begin[is_new], end=one.end[is_new], expected=expected)
