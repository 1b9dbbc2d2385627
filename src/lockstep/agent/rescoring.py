"""Scores finished turns again, several times, with the engine that sampled them.

The engine does it at a low priority in its idle time, while other episodes are sampled. A turn is
scored on top of its prefix, whose keys and values are still in the engine's cache.

Two scorings of a turn differ by their company: the other tokens in the engine's step, which change
the order of summation in kernels. So a turn is never scored twice at the same time, turns with the
fewest scorings go first in a random order, and the number of turns per step is random. An engine
whose numbers do not depend on the company returns the same log-probs each time.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lockstep.engines.base import Engine, Scores
from lockstep.errors import EngineError
from lockstep.launch.background import Background
from lockstep.types import Distribution, Int32Array, Rescorings, Trajectory

RESCORING_PRIORITY = 1 << 20  # after whatever is sampled, of later batches too


class Rescorer:
    """Sends finished turns to an engine again, a bounded number at a time, and stores the log-probs
    with their trajectories (`Trajectory.rescorings`).

    >>> rescorer = Rescorer(engine, num_scorings=8, temperature=1.0)            # doctest: +SKIP
    >>> rescorer.add(trajectory, leaf)      # when a turn has ended             # doctest: +SKIP
    >>> await rescorer.wait([trajectory])   # when the batch has                # doctest: +SKIP
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_scorings: int,
        temperature: float,
        max_in_flight: int = 64,
        seed: int = 0,
    ) -> None:
        """temperature: of the draw. seed: of the order."""
        self._engine, self._num_scorings = engine, num_scorings
        self._temperature, self._max_in_flight = temperature, max_in_flight
        # At temperature 1 they are one, and some engines score the first alone.
        self._distribution: Distribution = "model" if temperature == 1 else "tempered"
        self._draw = np.random.default_rng(seed)
        self._waiting: list[tuple[int, float, _Turn]] = []
        """A heap: the fewest scorings first, then as drawn."""
        self._running = Background()
        self._is_dispatching = False
        self._num_left: Counter[str] = Counter()
        """Trajectory -> its turns that are not done."""
        self._has_changed = asyncio.Event()

    def add(self, trajectory: Trajectory, leaf: int) -> None:
        """Scores the turn that ends with the segment `leaf`, from here on."""
        if trajectory.rescorings is None:
            trajectory.rescorings = Rescorings()
        self._num_left[trajectory.id] += 1
        segments, path = trajectory.segments, trajectory.path(leaf)
        ends = np.cumsum([len(segments[i]) for i in path]).tolist()
        spans = [
            (i, end - len(segments[i]), end)
            for i, end in zip(path, ends, strict=True)
            if segments[i].is_sampled and segments[i].turn == segments[leaf].turn
        ]
        self._put_back(_Turn(trajectory, trajectory.rescorings, trajectory.path_ids(leaf), spans))

    def drop(self, trajectory: Trajectory) -> None:
        """Drops the turns of a failed episode: waiting ones are not scored, and results of running
        ones go with the object that held them."""
        trajectory.rescorings = None

    async def wait(self, trajectories: Iterable[Trajectory]) -> None:
        """Returns when all that was added of them is scored. Their episodes have ended."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        left = list(trajectories)
        kept = [t.rescorings for t in left if t.rescorings is not None]
        for rescorings in kept:
            rescorings.num_overlapped = rescorings.num_scored
        while left := [t for t in left if self._num_left[t.id]]:
            self._has_changed.clear()
            await self._has_changed.wait()
        for rescorings in kept:
            rescorings.waited_seconds = loop.time() - began

    async def close(self) -> None:
        """Gives up whatever is not done."""
        self._waiting.clear()
        await self._running.cancel()

    # -- one scoring --------------------------------------------------------------------------

    def _put_back(self, turn: _Turn) -> None:
        heapq.heappush(self._waiting, (turn.num_tried, self._draw.random(), turn))
        self._dispatch_soon()

    def _dispatch_soon(self) -> None:
        if not self._is_dispatching:  # once for all that end in the same step of the engine
            self._is_dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._is_dispatching = False
        most = min(self._max_in_flight, len(self._waiting) + len(self._running))
        least = max(1, most // 2) if most == self._max_in_flight else 1
        width = int(self._draw.integers(least, most + 1)) if most else 0
        while self._waiting and len(self._running) < width:
            self._running.start(self._score(heapq.heappop(self._waiting)[2]))

    async def _score(self, turn: _Turn) -> None:
        if turn.is_dropped or not turn.is_by(self._engine.version):
            turn.rescorings.num_stale += self._num_scorings - turn.num_tried
            turn.num_tried = self._num_scorings
        else:
            turn.num_tried += 1
            try:
                turn.keep(
                    await self._engine.score(
                        turn.ids,
                        distribution=self._distribution,
                        temperature=self._temperature,
                        priority=RESCORING_PRIORITY,
                        first=turn.first,
                        affinity=turn.trajectory.id,
                    )
                )
            except Exception as error:  # as in an episode: noted and counted, it ends no run
                turn.rescorings.num_failed += 1
                turn.rescorings.error = turn.rescorings.error or f"{type(error).__name__}: {error}"
        self._running.discard(asyncio.current_task())  # pyright: ignore[reportArgumentType]
        if turn.num_tried < self._num_scorings and not turn.is_dropped:
            self._put_back(turn)
            return
        self._num_left[turn.trajectory.id] -= 1
        self._has_changed.set()
        self._dispatch_soon()


@dataclass(slots=True, eq=False)
class _Turn:
    """One turn to score, and how often that was tried."""

    trajectory: Trajectory
    rescorings: Rescorings
    ids: Int32Array
    """Ids from the root of the path to the turn's last id."""
    spans: list[tuple[int, int, int]]
    """(segment, first id, last id + 1) on the path: more than one if weights changed within it."""
    num_tried: int = 0

    def __lt__(self, other: _Turn) -> bool:  # ties of the heap
        return self.spans < other.spans

    @property
    def first(self) -> int:
        return self.spans[0][1]

    @property
    def is_dropped(self) -> bool:
        return self.trajectory.rescorings is not self.rescorings

    def is_by(self, version: int) -> bool:
        """True if these weights sampled any part of the turn."""
        return any(self.trajectory.segments[i].policy_version == version for i, _, _ in self.spans)

    def keep(self, scores: Scores) -> None:
        """Keeps scores by the weights that sampled the turn, and counts the others."""
        if len(scores.logprobs) != len(self.ids):
            raise EngineError(
                f"trajectory {self.trajectory.id}: the engine scored {len(scores.logprobs)} ids of "
                f"the {len(self.ids)} that it was given."
            )
        segments, rescorings = self.trajectory.segments, self.rescorings
        own = [s for s in self.spans if segments[s[0]].policy_version == scores.policy_version]
        for index, start, stop in own:
            rescorings.logprobs.setdefault(index, []).append(scores.logprobs[start:stop].copy())
        rescorings.num_scored += bool(own)
        rescorings.num_stale += len(own) < len(self.spans)
        rescorings.num_prefix_tokens += self.first - 1
        rescorings.num_cached_tokens += min(scores.num_cached_tokens, self.first - 1)
