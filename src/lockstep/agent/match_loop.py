"""Plays matches: each seat's conversation is an episode of the agent loop, token in, token out.

A match and its conversations run side by side. `ask` hands messages to a conversation, as if its
environment had answered; the reply goes back to whoever asked. Each conversation has its own path,
budget, draws and reward, and is a `Trajectory` of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.guard import CLOSE_SECONDS, checked_messages, described, guarded
from lockstep.agent.loop import RolloutOptions, play_episode
from lockstep.agent.match import Match, OutOfBudget
from lockstep.agent.tasks import derive_seed
from lockstep.agent.turns import Budget, Policy
from lockstep.errors import DataError, RolloutError, shortened
from lockstep.launch.event_loop import own_context
from lockstep.types import Group, Message, Task, Trajectory


async def collect_matches(
    seats: Mapping[str, Policy],
    make_match: Callable[[Task], Match],
    tasks: Sequence[Task],
    *,
    group_size: int,
    budget: Budget,
    run_seed: int,
    options: RolloutOptions | None = None,
) -> list[Group]:
    """Plays `group_size` matches of every task. Returns the trajectories of all seats of a task as
    one group, in task order; `Group.by_seat` takes it apart.

    Ids are `split/step/task/match/seat`, with `-N` behind the seat for its players after the first.
    A player that was never asked has no trajectory. budget: of each conversation.
    """
    options = options or RolloutOptions()

    async def work(task: Task, name: str, seed: int) -> list[Trajectory]:
        table = _RunningMatch(seats, task, budget, options, id=name, seed=seed)
        async with options.slots:
            played = await table.play(make_match)
        options.on_progress(played[0])
        return played

    def groups() -> list[Group]:
        played = [(task, [t for job in of_task for t in job.result()]) for task, of_task in jobs]
        return [Group(task=task, trajectories=trajectories) for task, trajectories in played]

    async with options.workers(lambda: [t for g in groups() for t in g.trajectories]) as workers:
        jobs = [
            (task, [workers.create_task(work(task, *match)) for match in matches])
            for task, matches in options.numbered(tasks, group_size, run_seed=run_seed)
        ]
    return groups()


class _Player(Environment):
    """One conversation, as the agent loop sees it: its observations are the questions of the
    match."""

    def __init__(self, table: _RunningMatch, seat: str, player: int) -> None:
        self._table, self._seat, self._player = table, seat, player
        self._heard: asyncio.Queue[Sequence[Message] | None] = asyncio.Queue()
        self._reply: asyncio.Future[Message] | None = None
        self._ended: Exception | None = None
        """Raised for whoever asks from here on."""

    @property
    def name(self) -> str:
        return f"{self._seat}-{self._player}" if self._player else self._seat

    async def ask(self, messages: Sequence[Message]) -> Message:
        if self._ended is not None:
            raise self._ended
        if self._reply is not None:
            raise RolloutError(f"{self.name} was asked again before it had replied")
        self._reply = asyncio.get_running_loop().create_future()
        self._heard.put_nowait(messages)
        try:
            return await self._reply
        finally:
            self._reply = None

    def end(self, reason: Exception | None) -> None:
        """The conversation is over. reason: why it cannot reply; None if the match is over."""
        self._ended = self._ended or reason
        if self._reply is not None and not self._reply.done():
            if reason is None:
                self._reply.cancel()  # of an `ask` that the match no longer waits for
            else:
                self._reply.set_exception(reason)
        self._heard.put_nowait(None)

    # -- the agent loop's side --------------------------------------------------------------------

    async def reset(self) -> Sequence[Message]:
        self.tools = self._table.match.tools.get(self._seat, ())
        messages = await self._heard.get()
        assert messages is not None, "a player is there because it was asked"
        return messages

    async def step(self, message: Message) -> Observation:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(message)
        messages = await self._heard.get()
        return Observation(done=True) if messages is None else Observation(messages=messages)

    async def score(self) -> Score:
        self.end(OutOfBudget(f"the budget of {self.name} is used up"))
        await self._table.is_over.wait()
        return self._table.score_of(self._seat, self._player)

    async def close(self) -> None:
        self.end(RolloutError(f"the episode of {self.name} failed"))


@dataclass(slots=True, eq=False)
class _RunningMatch:
    """One match in the making."""

    seats: Mapping[str, Policy]
    task: Task
    budget: Budget
    options: RolloutOptions
    _: KW_ONLY
    id: str
    seed: int
    match: Match = field(init=False)
    conversations: asyncio.TaskGroup = field(init=False)
    players: dict[tuple[str, int], _Player] = field(default_factory=dict[tuple[str, int], _Player])
    """(seat, number) -> the player, in order of the first question."""
    jobs: list[asyncio.Task[Trajectory]] = field(default_factory=list[asyncio.Task[Trajectory]])
    scores: Any = None
    failure: str = ""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def play(self, make_match: Callable[[Task], Match]) -> list[Trajectory]:
        """Trajectories of all players, in order of the first question; a failed one for each seat
        if nobody was asked."""
        async with asyncio.TaskGroup() as conversations:
            self.conversations = conversations
            await self._to_its_end(make_match)
            for player in self.players.values():
                player.end(None)
            self.is_over.set()
        if not self.players:
            reason = self.failure or "match.play: it ended before a seat was asked"
            failed = partial(Trajectory, task_id=self.task.id, status="failed", error=reason)
            return [
                failed(id=f"{self.id}/{seat}", seat=seat, policy=policy.name)
                for seat, policy in self.seats.items()
            ]
        return [job.result() for job in self.jobs]

    async def _to_its_end(self, make_match: Callable[[Task], Match]) -> None:
        seconds, hooks = self.budget.max_seconds, count()

        async def call(hook: Callable[[], Any], seconds: float) -> Any:
            seed = derive_seed(self.seed, "hook", next(hooks))
            return await guarded(hook, seconds=seconds, setting="agent.max_seconds", seed=seed)

        async def played() -> None:
            with suppress(OutOfBudget):  # what there is of the match is scored
                await self.match.play(self._ask)

        stage = "the match could not be made"
        try:
            if self.task.problem:
                raise DataError(f"task {self.task.id}: {self.task.problem}")
            self.match = await call(partial(make_match, replace(self.task)), seconds)
            try:
                stage = "match.play"
                # Each conversation has its own clock, which ends before this one.
                await call(played, 2 * seconds)
                stage = "match.score"
                self.scores = await call(lambda: self.match.score(), seconds)
            finally:
                with suppress(Exception):  # the match is over
                    await guarded(lambda: self.match.close(), seconds=CLOSE_SECONDS)
        except Exception as error:
            self.failure = f"{stage}: {described(error)}"

    async def _ask(self, seat: str, messages: Sequence[Message], *, player: int = 0) -> Message:
        messages = checked_messages(messages)
        if not isinstance(player, int):
            raise RolloutError(f"player={shortened(player)} of seat {seat}: expected a number")
        if (found := self.players.get((seat, player))) is None:
            if seat not in self.seats:
                raise RolloutError(f"no seat {seat!r}; the seats are {', '.join(self.seats)}")
            found = self.players[seat, player] = _Player(self, seat, player)
            job = self.conversations.create_task(self._converse(found, seat), context=own_context())
            self.jobs.append(job)
        return await found.ask(messages)

    async def _converse(self, player: _Player, seat: str) -> Trajectory:
        of_seat = self.seats[seat]
        trajectory = Trajectory(id=f"{self.id}/{player.name}", task_id=self.task.id)
        await play_episode(
            of_seat.sampler(trajectory, self.budget, priority=self.options.order),
            player,
            self.task,
            seed=derive_seed(self.seed, player.name),
            rescorer=None if of_seat.name else self.options.rescorer,
        )
        trajectory.seat, trajectory.policy = seat, of_seat.name
        return trajectory

    def score_of(self, seat: str, player: int) -> Score:
        """Raises RolloutError where the match gave this player none."""
        if self.failure:
            raise RolloutError(self.failure)
        of_seat = self.scores.get(seat) if isinstance(self.scores, Mapping) else None
        if isinstance(of_seat, Score):
            return of_seat
        asked = sorted(number for name, number in self.players if name == seat)
        if not isinstance(of_seat, Sequence) or len(of_seat) != len(asked):
            raise RolloutError(
                f"match.score returned {shortened(self.scores)}; expected a Score for {seat}, or "
                f"one for each of its {len(asked)} players"
            )
        return of_seat[asked.index(player)]
