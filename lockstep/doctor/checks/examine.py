"""Runs checks over rows in stages, and divides the gap among the causes that were found.

A defect of the rows makes every later figure wrong, so that what is obvious is repaired before what
is subtle is judged: each stage sees the rows without the causes of the stages before it. What the
gap loses by each repair is that cause's share; what is left at the end is unexplained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

from lockstep.doctor.checks.attribution import Gap, Split, gap_of_all
from lockstep.doctor.checks.base import Check, Setting, Share
from lockstep.doctor.checks.findings import Finding
from lockstep.doctor.checks.rows import Rows

Chunks = Callable[[], Iterable[Rows]]
"""Gives the rows from the beginning, as often as it is called."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Checks that look at the same rows, in the order in which their repairs are made."""

    checks: Sequence[type[Check]]
    chunks: Chunks | None = None
    """Rows of its own (a sample that was scored by a model); None: all of them."""
    has: frozenset[str] = frozenset()
    """Columns that these have, and the others do not."""


@dataclass(kw_only=True)
class Examination:
    """What was found, and how much of the gap each cause explains."""

    findings: list[Finding] = field(default_factory=list[Finding])
    before: Split = field(default_factory=Split)
    """The gap of the rows as they are, and where it is."""
    after: Split = field(default_factory=Split)
    """The same with the causes repaired: what is left of it is unexplained. Of the sample that was
    scored by a model, where a cause was found in that."""
    shares: list[Share] = field(default_factory=list[Share])
    """Of each cause that was found, in the order of the repairs."""
    repairs: list[Check] = field(default_factory=list[Check])
    """The checks that found them, in the same order: of those that looked at all rows."""
    num_rows: int = 0
    num_tokens: int = 0

    @property
    def gap(self) -> Gap:
        """Of the rows as they are."""
        return self.before.total

    def repaired(self, rows: Rows) -> Rows:
        """The rows as they would be without the causes that were found."""
        for check in self.repairs:
            rows = check.repair(rows)
        return rows

    @property
    def unexplained_k2(self) -> float:
        """Share of k2 that no cause accounts for; 1 where none was found."""
        return 1.0 - sum(share.k2 for share in self.shares)


def examine(
    chunks: Chunks,
    stages: Sequence[Stage],
    setting: Setting,
    *,
    has: frozenset[str],
    has_ids: bool = True,
    only: Collection[str] = (),
    on_rows: Callable[[Rows], None] = lambda _: None,
) -> Examination:
    """Runs every check that can be made. has: columns that the rows have, somewhere. has_ids: False
    of a dump of texts: no check of it can be made.

    only: names of the checks that are asked for; empty: all. Those of their stage and the stages
    before are made too, for their repairs, and not reported: a check says the same by itself as
    among all.
    on_rows: given every chunk, as it is, once.

    Reads the rows once for each stage that has checks to make, once more for each stage that found
    a cause (twice, if several), and once at the end if any did. Memory: one chunk, and what the
    checks keep.
    """
    out = Examination(before=Split(tokenizer=setting.tokenizer))
    known = has | {
        f.name
        for f in fields(setting)
        if getattr(setting, f.name) not in (None, "", frozenset(), ())
    }
    found: list[Check] = []
    rows_left = chunks  # which are left without their causes at the end
    left = {"k2": 1.0, "k3": 1.0}
    last = max(
        (i for i, s in enumerate(stages) if any(k.name in only for k in s.checks)), default=0
    )
    for number, stage in enumerate(stages[: last + 1] if only else stages):
        made: list[Check] = []
        for kind in stage.checks:
            lacks = tuple(name for name in kind.needs if name not in known | stage.has)
            if lacks := lacks if has_ids else ("token_ids",):
                out.findings.append(kind.not_checkable(lacks))
            else:
                made.append(kind(setting))
        if not made and number:
            continue
        # Rows that lack one side's log-probs have no gap; a later stage's, scored again, have one.
        is_without_gap = not out.before.total.tokens
        for rows in (stage.chunks or chunks)():
            if not number:
                out.num_rows += len(rows)
                out.num_tokens += rows.num_tokens
                on_rows(rows)
            if not number or is_without_gap:
                out.before.add(rows)
            for cause in found:
                rows = _repaired(cause, rows)
            for check in made:
                check.look(rows)
        concluded = [(check, check.conclude()) for check in made]
        concluded = _without_symptoms(stage.chunks or chunks, found, concluded)
        out.findings += [finding for _, finding in concluded]
        new = [check for check, finding in concluded if finding.verdict == "differs"]
        if new:
            _divide(stage.chunks or chunks, found, new, left, out)
        found += new
        if stage.chunks is None:
            out.repairs += new
        elif new:
            rows_left = stage.chunks
    if only:
        out.findings = [finding for finding in out.findings if finding.check in only]
    out.after = out.before
    if found:
        out.after = Split(tokenizer=setting.tokenizer)
        for rows in rows_left():
            for cause in found:
                rows = _repaired(cause, rows)
            out.after.add(rows)
    return out


def _without_symptoms(
    chunks: Chunks, before: Sequence[Check], concluded: Sequence[tuple[Check, Finding]]
) -> list[tuple[Check, Finding]]:
    """Of several causes in one stage, each is looked for again in rows without those before it in
    the order: what is gone then was their mark (log-probs behind a token that was spelt anew stand
    at an offset, and nothing shifted them)."""
    new = [check for check, finding in concluded if finding.verdict == "differs"]
    if len(new) < 2:
        return list(concluded)
    again = {check.name: type(check)(check.setting) for check in new}
    for rows in chunks():
        for check in before:
            rows = _repaired(check, rows)
        for check in new:
            again[check.name].look(rows)
            rows = check.repair(rows)
    out: list[tuple[Check, Finding]] = []
    for check, finding in concluded:
        fresh = again.get(check.name)
        out.append((check, finding) if fresh is None else (fresh, fresh.conclude()))
    return out


def _repaired(check: Check, rows: Rows) -> Rows:
    """The rows without the check's cause; as they are if they lack what it was found by, which only
    a sample that was scored again has."""
    lacks = any(getattr(rows, name, True) is None for name in check.needs)
    return rows if lacks else check.repair(rows)


def _divide(
    chunks: Chunks,
    before: Sequence[Check],
    new: Sequence[Check],
    left: dict[str, float],
    out: Examination,
) -> None:
    """Adds the shares of `new`, and takes them from what is `left`.

    A token that two causes have hit loses its gap to whichever is repaired first. It is both's: the
    repairs are made in their order and from the last to the first, and a share is the mean of what
    goes away in either.
    """
    gaps = [Gap() for _ in range(len(new) + 1)]
    """In their order: before the first, and behind each."""
    back = [Gap() for _ in range(len(new) + 1)] if len(new) > 1 else gaps
    """From the last to the first: with all repaired from so many on."""
    for rows in chunks():
        for check in before:
            rows = _repaired(check, rows)
        gaps[0].add(gap_of_all(rows))
        one = rows
        for check, gap in zip(new, gaps[1:], strict=True):
            one = check.repair(one)
            gap.add(gap_of_all(one))
        if len(new) < 2:
            continue
        back[-1].add(gap_of_all(rows))
        for check, gap in zip(reversed(new), reversed(back[:-1]), strict=True):
            rows = check.repair(rows)
            gap.add(gap_of_all(rows))
    whole = gaps[0]
    # What is left at the end is that of their order: it is what later stages go on with.
    shares: dict[str, list[float]] = {}
    for name in left:
        total = getattr(whole, name)
        lost = [getattr(a, name) - getattr(b, name) for a, b in pairwise(gaps)]
        other = [getattr(b, name) - getattr(a, name) for a, b in pairwise(back)]
        if len(new) > 1 and sum(other) > 0:
            scale = sum(lost) / sum(other)
            lost = [(one + scale * two) / 2 for one, two in zip(lost, other, strict=True)]
        shares[name] = [left[name] * value / total if total else 0.0 for value in lost]
    for number, check in enumerate(new):
        share = Share(
            cause=check.cause,
            k2=shares["k2"][number],
            k3=shares["k3"][number],
            before=gaps[number],
            after=gaps[number + 1],
        )
        out.shares.append(share)
    for name in left:
        left[name] -= sum(shares[name])
