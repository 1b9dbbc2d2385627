"""Batches of episodes, sampled up to `max_staleness` steps ahead of the trainer.

Batch b is the episodes that step b trains: the same tasks, ids and draws whenever it is sampled.
It may begin as soon as step b - max_staleness does, so that later batches fill the engine while an
earlier one waits for its longest episodes, and while the trainer trains. Batches are trained whole
and in order: short episodes get no head start over long ones.

    take(0)            take(1)            take(2)            max_staleness=1
    batch 0 =====|     :                  :
    batch 1 ===========:======|           :
                 train 0 sync batch 2 ====:========|
                              :     train 1 sync batch 3 ========

Over several ranks, each plays whole groups with its own engine, and all have them after.

Groups without a signal may be replaced: `take` plays more tasks until enough groups teach. It does
that once the batch is complete on all ranks, so the tasks of a batch depend neither on time nor on
the number of ranks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from lockstep.agent.tasks import DifficultySource, TaskSource, plain_state
from lockstep.launch.background import Background
from lockstep.launch.ranks import Ranks
from lockstep.launch.threads import in_thread
from lockstep.types import Group, Task


def deal_tasks(tasks: Sequence[Task], num_ranks: int) -> list[list[int]]:
    """Returns the indices of the tasks for each rank. A task that occurs twice stays on one rank,
    which numbers its samples through.

    >>> deal_tasks([Task(id=name) for name in "abac"], 2)
    [[0, 2], [1, 3]]
    """
    owner: dict[str, int] = {}
    out: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, task in enumerate(tasks):
        rank = owner.setdefault(task.id, len(owner) % num_ranks)
        out[rank].append(index)
    return out


def own_tasks(ranks: Ranks | None, tasks: Sequence[Task]) -> list[Task]:
    """Returns the tasks that this rank plays."""
    if ranks is None:
        return list(tasks)
    return [tasks[i] for i in deal_tasks(tasks, ranks.world)[ranks.rank]]


def gather_groups(ranks: Ranks | None, tasks: Sequence[Task], own: Sequence[Group]) -> list[Group]:
    """The groups of all tasks, in their order, on every rank. own: the groups that this rank
    played.

    An episode depends on its task, its sample and the weights alone, so under the contract these
    are the groups that one process would have played. Collective.
    """
    if ranks is None:
        return list(own)
    shares = deal_tasks(tasks, ranks.world)
    played = ranks.gather(own)
    at = {
        i: group
        for share, groups in zip(shares, played, strict=True)
        for i, group in zip(share, groups, strict=True)
    }
    return [at[i] for i in range(len(tasks))]


T = TypeVar("T")

Play = Callable[[int, Sequence[Task], Callable[[], None]], Awaitable[list[Group]]]
"""(step, tasks, called after each episode) -> their groups, in the order of the tasks."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The episodes of one step, complete."""

    groups: list[Group]
    """Groups of all ranks, in the order of the tasks; empty when the tasks have ended."""
    replaced: list[Group]
    """Groups without a signal that other groups replaced."""
    sample_seconds: float
    """Seconds from the begin of sampling to its end, on this rank."""
    wait_seconds: float
    """Seconds that `take` waited for the batch, on this rank and the others."""


@dataclass(slots=True)
class _Sampling:
    """A batch that is being sampled."""

    tasks: list[Task]
    """Tasks of all ranks."""
    own: list[Task]
    """Tasks that this rank plays."""
    before: Mapping[str, Any]
    """The state of the task stream that `tasks` come next in."""
    began: float
    seconds: float = 0.0
    num_played: int = 0
    job: asyncio.Task[list[Group]] | None = None
    """None: there are no more tasks."""


@dataclass(slots=True, kw_only=True)
class Buffer:
    """Holds the batches between the sampler and the trainer: one at a time with max_staleness=0.

    The trainer calls `take(step)` for one step after the other. Each rank has its own buffer and
    begins batch b in its `take(b - max_staleness)`, so all ranks begin it between the same two
    updates. Ranks communicate in `take` alone, never in a batch under way.
    """

    tasks: TaskSource
    num_tasks: int
    """Tasks per batch."""
    num_steps: int
    """Steps of the run; later batches are not begun."""
    max_staleness: int
    max_extra_tasks: int = 0
    """Tasks that a batch may draw to replace groups without a signal."""
    device: torch.device
    """The trainer's."""
    ranks: Ranks | None = None
    turn: Callable[[], AbstractAsyncContextManager[None]] | None = None
    """Entered while this trainer works, of several that share an engine."""
    on_progress: Callable[[int, int], None] = lambda done, total: None
    """Told how many episodes of how many tasks the batch has that is waited for."""
    _begun: dict[int, _Sampling] = field(default_factory=dict, init=False)
    """Step -> batch: complete for the step in training, in progress for later steps."""
    _jobs: Background = field(default_factory=Background, init=False)
    _saved: dict[int, Mapping[str, Any]] = field(default_factory=dict, init=False)
    """Step -> state of the task stream, for batches that had begun when a checkpoint was saved."""
    _next: Mapping[str, Any] | None = field(default=None, init=False)
    """The state of the task stream for the batches after them."""
    _taken: tuple[int, Mapping[str, Any]] = field(default=(-1, {}), init=False)
    """(the last batch taken, the state of the task stream before it replaced groups)."""
    _awaited: int = field(default=-1, init=False)
    _num_sampling: int = field(default=0, init=False)
    _idle_since: float | None = field(default=None, init=False)
    """None before the first batch, and during sampling."""
    _idle_seconds: float = field(default=0.0, init=False)

    async def take(self, step: int, play: Play) -> Batch:
        """Returns batch `step` when all its episodes have ended. Begins the batches that may begin.

        An error in a later batch is raised when that batch is taken. After an interrupt,
        `state_before` is the state that gives the same batch. Groups without a signal are replaced,
        the first ones first, as long as tasks may be drawn; after that they stay, so a batch never
        has fewer groups than asked for. A task that is in the batch already is skipped.
        """
        asked = time.perf_counter()
        for ahead in range(step, min(step + 1 + self.max_staleness, self.num_steps)):
            if ahead not in self._begun:
                self._begin(ahead, play)
        if not self._saved:
            self._go_on()
        for done in [s for s in self._begun if s < step]:
            del self._begun[done]
        batch, self._awaited = self._begun[step], step
        self._tell(batch)
        own = [] if batch.job is None else await batch.job
        groups = await self.in_thread(partial(gather_groups, self.ranks, batch.tasks, own))
        self._taken, replaced = (step, self._state()), list[Group]()
        if self.max_extra_tasks:
            groups, replaced = await self._replace(step, groups, play)
        self._awaited = -1
        return Batch(groups, replaced, batch.seconds, time.perf_counter() - asked)

    async def _replace(
        self, step: int, groups: list[Group], play: Play
    ) -> tuple[list[Group], list[Group]]:
        """(groups of the batch, groups without a signal that were replaced)."""
        kept = [group for group in groups if group.has_signal]
        silent = [group for group in groups if not group.has_signal]
        num_left, seen = self.max_extra_tasks, {group.task.id for group in groups}
        while (num_missing := len(groups) - len(kept)) and num_left:
            drawn = self.tasks.take(min(num_missing, num_left))
            num_left -= len(drawn)
            if not drawn:
                break
            tasks = [task for task in drawn if task.id not in seen]
            seen.update(task.id for task in tasks)
            extra = _Sampling(tasks, own_tasks(self.ranks, tasks), {}, time.perf_counter())
            own = await self._sample(step, extra, play)
            self._begun[step].seconds += extra.seconds
            played = await self.in_thread(partial(gather_groups, self.ranks, tasks, own))
            kept += [group for group in played if group.has_signal]
            silent += [group for group in played if not group.has_signal]
        num_silent = len(groups) - len(kept)
        return kept + silent[:num_silent], silent[num_silent:]

    async def in_thread(self, work: Callable[[], T]) -> T:
        """`work()`, while later batches are sampled, or episodes of others call tools: in a thread
        if there may be any."""
        if self.turn is None:
            return await in_thread(work, device=self.device) if self.max_staleness else work()
        async with self.turn():
            return await in_thread(work, device=self.device)

    def state_before(self, step: int) -> dict[str, Any]:
        """The state that gives batch `step` and all later batches again, from the same places in
        the task stream."""
        states = self._saved | {at: batch.before for at, batch in self._begun.items()}
        begun = [states[at] for at in sorted(states) if at >= step]
        taken, before_extra = self._taken
        return {"begun": begun, "next": before_extra if step == taken else self._state()}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Goes on before batch `step` with what `state_before` gave; a stream without figures
        ignores the figures of a state. Raises CheckpointError if it is of another task stream."""
        begun, after = state["begun"], state["next"]
        if not isinstance(self.tasks, DifficultySource):
            begun, after = [plain_state(each) for each in begun], plain_state(after)
        self._saved, self._next = dict(enumerate(begun, start=step)), after
        self.tasks.load_state_dict(after)

    def take_idle_seconds(self) -> float:
        """Returns the seconds without sampling since the last call."""
        self._end_idle()
        found, self._idle_seconds = self._idle_seconds, 0.0
        if not self._num_sampling:
            self._idle_since = time.perf_counter()
        return found

    async def close(self) -> None:
        """Cancels all batches in progress and closes their environments."""
        await self._jobs.cancel()

    def _begin(self, step: int, play: Play) -> None:
        if step in self._saved:
            self.tasks.load_state_dict(self._saved.pop(step))
        else:
            self._go_on()
        before = self.tasks.state_dict()
        tasks = self.tasks.take(self.num_tasks)
        own = own_tasks(self.ranks, tasks)
        batch = self._begun[step] = _Sampling(tasks, own, before, time.perf_counter())
        if tasks:
            batch.job = self._jobs.start(self._sample(step, batch, play))

    def _go_on(self) -> None:
        """Continues with the batches that had not begun when the state was saved."""
        if self._next is not None:
            self.tasks.load_state_dict(self._next)
            self._next = None

    def _state(self) -> Mapping[str, Any]:
        """The state of the task stream for the next new batch."""
        return self.tasks.state_dict() if self._next is None else self._next

    async def _sample(self, step: int, batch: _Sampling, play: Play) -> list[Group]:
        def count() -> None:
            batch.num_played += 1
            if step == self._awaited:
                self._tell(batch)

        self._end_idle()
        self._num_sampling += 1
        try:
            return await play(step, batch.own, count)
        finally:
            ended = time.perf_counter()
            batch.seconds = ended - batch.began
            self._num_sampling -= 1
            if not self._num_sampling:
                self._idle_since = ended

    def _end_idle(self) -> None:
        if self._idle_since is not None:
            self._idle_seconds += time.perf_counter() - self._idle_since
            self._idle_since = None

    def _tell(self, batch: _Sampling) -> None:
        self.on_progress(batch.num_played, len(batch.own))
