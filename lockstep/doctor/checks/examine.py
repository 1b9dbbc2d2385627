"""Runs checks over rows in stages, and divides the gap among the causes that they find.

A defect of the rows makes every later figure wrong, so obvious causes are repaired before subtle
ones are judged: each stage sees the rows without the causes of the stages before it. The gap that a
repair removes is the share of its cause; what is left at the end is unexplained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

import numpy as np

from lockstep.doctor.checks.attribution import Gap, Split, gap_of_all
from lockstep.doctor.checks.base import Check, Finding, Setting
from lockstep.doctor.checks.rows import Float64Array, Rows
from lockstep.doctor.checks.tokens.alignment import Shifted
from lockstep.doctor.checks.tokens.context import DroppedSeparator, DuplicatedPrompt, Padding
from lockstep.doctor.checks.tokens.fillers import Fillers
from lockstep.doctor.checks.tokens.injected_control import InjectedControl
from lockstep.doctor.checks.tokens.masks import (
    AfterStop,
    Boundary,
    MissingFinal,
    ObservationTrained,
)
from lockstep.doctor.checks.tokens.post_processed import PostProcessed
from lockstep.doctor.checks.tokens.reencoded import Reencoded
from lockstep.doctor.checks.tokens.rerendered import Rerendered
from lockstep.doctor.checks.tokens.template import ThinkingDropped
from lockstep.doctor.checks.tokens.wrong_template import UnlikeTemplate, WrongTemplate
from lockstep.doctor.checks.training.advantages import LateAdvantages
from lockstep.doctor.checks.training.by_step import AfterResume, GrowingGap, IdleGrowth
from lockstep.doctor.checks.training.staleness import AfterUpdate, Stale
from lockstep.doctor.checks.training.unphysical import Unphysical
from lockstep.doctor.checks.training.versions import LateVersion, MixedVersions
from lockstep.doctor.checks.values.drawn_by import DraftLogprobs
from lockstep.doctor.checks.values.finite import NonFinite, Positive
from lockstep.doctor.checks.values.noise import NoisySampler, NoisyTrainer
from lockstep.doctor.checks.values.precision import Precision
from lockstep.doctor.checks.values.processed import GenerationDefaults, Processed
from lockstep.doctor.checks.values.rounding import Clamped, Quantised
from lockstep.doctor.checks.values.routes import ZeroRoutes
from lockstep.errors import LockstepError

Chunks = Callable[[], Iterable[Rows]]
"""Yields the rows from the beginning, each time that it is called."""


class Making:
    """A check that is being made. An error of it becomes its finding: the other checks go on.

    A template may refuse what a check asks of it, a plugin's check may be wrong; neither may cost
    the user the rest of the diagnosis.
    """

    def __init__(self, kind: type[Check], setting: Setting) -> None:
        self.kind, self.setting = kind, setting
        self.error = ""
        """Why the check could not be made; empty if it was."""
        self.repair_error = ""
        """Why its repair could not be made; its share is then unknown."""
        self._check: Check | None = None
        with self._noting_errors():
            self._check = kind(setting)

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = _told(error)

    def again(self) -> Making:
        """The same check, before it has seen any row."""
        return Making(self.kind, self.setting)

    def look(self, rows: Rows) -> None:
        if self._check is not None and not self.error:
            with self._noting_errors():
                self._check.look(rows)

    def conclude(self) -> Finding:
        if self._check is not None and not self.error:
            with self._noting_errors():
                return self._check.conclude()
        return self.kind.not_checkable(measured=self.error)

    def repair(self, rows: Rows) -> Rows:
        """The rows without the cause; as they are for rows that lack what the check needs (only a
        sample that was scored again has it), and if the repair fails."""
        lacks = any(getattr(rows, name, True) is None for name in self.kind.needs)
        if self._check is None or self.repair_error or lacks:
            return rows
        try:
            return self._check.repair(rows)
        except Exception as error:
            self.repair_error = _told(error)
            return rows


def _told(error: Exception) -> str:
    """An error of a check in words: a refusal as it is, a bug by its type."""
    if isinstance(error, LockstepError):
        return str(error)
    return f"the check failed with {type(error).__name__}" + (f": {error}" if str(error) else "")


@dataclass(slots=True)
class Share:
    """Share of the gap that a cause explains."""

    cause: str
    k2: float
    """Share of the whole dump's sum of d^2 / 2, in [0, 1]."""
    k3: float
    least: float = 0.0
    """Share of k2 if the other causes of its stage are repaired first: what only it explains."""
    most: float = 0.0
    """The same if it is repaired first: what they may explain too."""
    before: Gap = field(default_factory=Gap)
    """Gap before the repair."""
    after: Gap = field(default_factory=Gap)
    """Gap after it."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Checks that read the same rows, in the order of their repairs."""

    checks: Sequence[type[Check]]
    chunks: Chunks | None = None
    """Rows of this stage alone (a sample that a model scored); None for all rows."""
    has: frozenset[str] = frozenset()
    """Columns that only these rows have."""


@dataclass(kw_only=True)
class Examination:
    """Findings, and the share of the gap that each cause explains."""

    findings: list[Finding] = field(default_factory=list[Finding])
    before: Split = field(default_factory=Split)
    """Gap of the rows as they are, by place."""
    after: Split = field(default_factory=Split)
    """The same after all repairs: the unexplained gap. Of the sample that a model scored, if a
    cause was found there."""
    shares: list[Share] = field(default_factory=list[Share])
    """Shares of the causes, in the order of their repairs."""
    repairs: list[Making] = field(default_factory=list["Making"])
    """Checks that found a cause in all rows, in the same order."""
    num_rows: int = 0
    num_tokens: int = 0

    @property
    def gap(self) -> Gap:
        """Gap of the rows as they are."""
        return self.before.total

    def repaired(self, rows: Rows) -> Rows:
        """`rows` without the causes that were found."""
        for check in self.repairs:
            rows = check.repair(rows)
        return rows

    @property
    def unexplained_k2(self) -> float:
        """Share of k2 that no cause explains; 1 without causes."""
        return 1.0 - sum(share.k2 for share in self.shares)


def examine(
    chunks: Chunks,
    stages: Sequence[Stage],
    setting: Setting,
    *,
    has: frozenset[str],
    only: Collection[str] = (),
    on_rows: Callable[[Rows], None] = lambda _: None,
) -> Examination:
    """Makes every check that can be made, stage by stage.

    has: columns that some rows have. only: names of the checks to report; empty reports all. The
    others of their stage and of earlier stages are made too, for their repairs, so that a check
    finds the same alone as among all. on_rows: called once with every chunk as it is.

    Reads the rows once for each stage with checks to make, once more (twice for several causes) for
    each stage that finds a cause, and once at the end if any did. Holds one chunk in memory.
    """
    out = Examination(before=Split(tokenizer=setting.tokenizer))
    known = has | {
        f.name
        for f in fields(setting)
        if getattr(setting, f.name) not in (None, "", frozenset(), ())
    }
    found: list[Making] = []
    rows_left = chunks  # what is read at the end, without the causes
    left = np.ones(2)
    last = max(
        (i for i, s in enumerate(stages) if any(k.name in only for k in s.checks)), default=0
    )
    for number, stage in enumerate(stages[: last + 1] if only else stages):
        made: list[Making] = []
        for kind in stage.checks:
            lacks = tuple(name for name in kind.needs if name not in known | stage.has)
            if lacks:
                out.findings.append(kind.not_checkable(*lacks))
            else:
                made.append(Making(kind, setting))
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
            rows = _without(found, rows)
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
    failed = {check.kind.name: check.repair_error for check in found if check.repair_error}
    out.findings = [
        replace(f, measured=f"{f.measured}; its share is unknown: {failed[f.check]}")
        if f.check in failed
        else f
        for f in out.findings
    ]
    if only:
        out.findings = [finding for finding in out.findings if finding.check in only]
    out.after = out.before
    if found:
        out.after = Split(tokenizer=setting.tokenizer)
        for rows in rows_left():
            out.after.add(_without(found, rows))
    return out


def _without_symptoms(
    chunks: Chunks, before: Sequence[Making], concluded: Sequence[tuple[Making, Finding]]
) -> list[tuple[Making, Finding]]:
    """The findings of a stage, each cause tested again in rows without the causes before it: one
    that is gone then was their mark. (Log-probs after a token with another spelling are at an
    offset, though nothing shifted them.)"""
    new = [check for check, finding in concluded if finding.verdict == "differs"]
    if len(new) < 2:
        return list(concluded)
    again = {check.kind: check.again() for check in new}
    for rows in chunks():
        rows = _without(before, rows)
        for check in new:
            again[check.kind].look(rows)
            rows = check.repair(rows)
    out: list[tuple[Making, Finding]] = []
    for check, finding in concluded:
        fresh = again.get(check.kind)
        out.append((check, finding) if fresh is None else (fresh, fresh.conclude()))
    return out


def _without(causes: Iterable[Making], rows: Rows) -> Rows:
    """The rows without these causes."""
    for check in causes:
        rows = check.repair(rows)
    return rows


def _divide(
    chunks: Chunks,
    before: Sequence[Making],
    new: Sequence[Making],
    left: Float64Array,
    out: Examination,
) -> None:
    """Adds the shares of `new`, and subtracts them from `left`: [2] shares of k2 and k3.

    A token that two causes hit loses its gap to the one that is repaired first. To be fair, repairs
    are made in order and in reverse order; a share is the mean of both, and they are its range.
    """
    both = [new, new[::-1]] if len(new) > 1 else [new]
    sums = [[Gap() for _ in range(len(new) + 1)] for _ in both]
    """For each order, the gap before the first repair, and after each."""
    for rows in chunks():
        rows = _without(before, rows)
        for checks, gaps in zip(both, sums, strict=True):
            repaired = rows
            gaps[0].add(gap_of_all(repaired))
            for check, gap in zip(checks, gaps[1:], strict=True):
                repaired = check.repair(repaired)
                gap.add(gap_of_all(repaired))
    # [causes, 2]: the k2 and k3 that each repair removes, in the order of `new`
    lost, *others = (
        np.array([(a.k2 - b.k2, a.k3 - b.k3) for a, b in pairwise(gaps)]) for gaps in sums
    )
    orders = [lost]
    for reverse in others:
        # Later stages continue with what the repairs in order leave, so shares sum to that.
        scale = lost.sum(0) / np.where(reverse.sum(0) > 0, reverse.sum(0), np.inf)
        orders.append(np.where(reverse.sum(0) > 0, scale * reverse[::-1], lost))
    whole = np.array([sums[0][0].k2, sums[0][0].k3])
    of_orders = np.stack(orders) * left / np.where(whole, whole, np.inf)
    shares, least, most = of_orders.mean(0), of_orders.min(0), of_orders.max(0)
    for i, (check, (gap, after)) in enumerate(zip(new, pairwise(sums[0]), strict=True)):
        k2, k3 = shares[i].tolist()
        low, high = float(least[i, 0]), float(most[i, 0])
        cause = check.kind.cause
        out.shares.append(
            Share(cause=cause, k2=k2, k3=k3, least=low, most=high, before=gap, after=after)
        )
    left -= shares.sum(0)


_OWN: dict[str, tuple[type[Check], ...]] = {
    # Which tokens are the model's: first whose ids they are, for what follows another id bears the
    # marks of what comes later; then which of them are trained. A token that should not be trained
    # has no right log-prob either.
    "masks": (
        WrongTemplate,
        Boundary,
        InjectedControl,
        ThinkingDropped,
        Rerendered,
        PostProcessed,
        ObservationTrained,
        AfterStop,
        MissingFinal,
        LateAdvantages,
    ),
    # What is obvious: the ids, and which number is beside which token.
    "structure": (
        Reencoded,
        Shifted,
        Fillers,
        Padding,
        DuplicatedPrompt,
        DroppedSeparator,
        NonFinite,
        Positive,
        ZeroRoutes,
    ),
    # How log-probs were stored.
    "values": (Clamped, Quantised),
    # Which distribution they are of, of which weights, and after which prompt.
    "processed": (GenerationDefaults, Processed, LateVersion, UnlikeTemplate),
    # What repeats and what does not, in rows that are otherwise explained. Noise in the recorded
    # numbers may look as if another distribution had drawn the tokens.
    "noise": (Precision, NoisySampler, NoisyTrainer, DraftLogprobs),
    # What training does with the rows.
    "training": (
        Stale,
        MixedVersions,
        AfterUpdate,
        AfterResume,
        IdleGrowth,
        GrowingGap,
        Unphysical,
    ),
}


def all_stages() -> dict[str, tuple[type[Check], ...]]:
    """Stage -> its checks, in the order of their repairs; a plugin's come after the built-in ones.

    Each stage sees the rows as the repairs of the stages before it leave them. Of several causes in
    one stage, one that is gone after the repairs of those before it was their mark, and is not
    named.
    """
    out = {stage: list(checks) for stage, checks in _OWN.items()}
    for kind in _subclasses(Check):
        if kind.stage and kind not in out[kind.stage]:
            out[kind.stage].append(kind)
    return {stage: tuple(checks) for stage, checks in out.items()}


def _subclasses(kind: type[Check]) -> list[type[Check]]:
    return [one for sub in kind.__subclasses__() for one in (sub, *_subclasses(sub))]
