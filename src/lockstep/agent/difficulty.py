"""Tasks by how often their groups teach: a memory of the groups that a run played, and a stream
that prefers tasks whose episodes differ."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.agent.tasks import TaskSource, derive_seed
from lockstep.types import Group, Task

MEMORY = 8
"""Groups of a task that its figures average: the policy changes, and the figures follow."""

MOST_TASKS = 100_000
"""Tasks whose figures are kept; those played longest ago go. Generated tasks never end."""


class DifficultySource(TaskSource):
    """Another source's tasks, those first whose groups are expected to have a signal.

    It draws `candidates` tasks for each task asked for and takes some by chance, a task with
    probability in proportion to its expected signal, without replacement, in the stream's order.
    The others come again in the next epoch. Deterministic: a state has the figures of all tasks.

    A task's expected signal is the share of its groups whose rewards differ, with one group that
    has a signal added: so a new task is tried. A task that was never played has the figures of its
    label, if the label has some ("2-hop").

    Source: weighted draws without replacement, Efraimidis and Spirakis 2006.
    """

    def __init__(
        self,
        source: TaskSource,
        *,
        candidates: int = 4,
        label: Callable[[Task], str],
        seed: int,
    ) -> None:
        self._source, self._candidates, self._label, self._seed = source, candidates, label, seed
        self._drawn = 0
        self.figures: dict[str, list[float]] = {}
        """Per task id, and per label behind a "#": groups (MEMORY at most), mean reward, share of
        groups with a signal."""

    def __next__(self) -> Task:
        found = self.take(1)
        if not found:
            raise StopIteration
        return found[0]

    def take(self, count: int) -> list[Task]:
        offered = self._source.take(count * self._candidates)
        keys: list[tuple[float, int]] = []
        for place, task in enumerate(offered):
            draw = random.Random(derive_seed("difficulty", self._seed, self._drawn)).random()
            self._drawn += 1
            keys.append((math.log(1 - draw) / self.expected_signal(task), place))
        chosen = sorted(place for _, place in sorted(keys, reverse=True)[:count])
        return [offered[place] for place in chosen]

    def expected_signal(self, task: Task) -> float:
        """In (0, 1]."""
        found = self.figures.get(task.id) or self.figures.get(f"#{self._label(task)}")
        if found is None:
            return 1.0
        num_groups, _, share = found
        return (num_groups * share + 1) / (num_groups + 1)

    def observe(self, groups: Sequence[Group]) -> dict[str, float]:
        """Takes note of groups that were played. Returns metrics."""
        for group in groups:
            if not (rewards := group.rewards):
                continue
            seen = sum(rewards) / len(rewards), float(group.has_signal)
            label = self._label(group.task)
            for key in (group.task.id, f"#{label}") if label else (group.task.id,):
                figures = self.figures.pop(key, None) or [0.0, 0.0, 0.0]
                self.figures[key] = figures  # at the end: the others were played before
                figures[0] = min(figures[0] + 1, MEMORY)
                for at, value in enumerate(seen, start=1):
                    figures[at] += (value - figures[at]) / figures[0]
        while len(self.figures) > MOST_TASKS:
            del self.figures[next(iter(self.figures))]
        known = [figures for key, figures in self.figures.items() if not key.startswith("#")]
        return {
            "signal/known_tasks": float(len(known)),
            "signal/known_share": sum(share for _, _, share in known) / max(len(known), 1),
        }

    def state_dict(self) -> dict[str, Any]:
        figures = {key: list(values) for key, values in self.figures.items()}
        return {"stream": self._source.state_dict(), "drawn": self._drawn, "figures": figures}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # A checkpoint of a run that drew tasks in the stream's order has no figures yet.
        self._source.load_state_dict(plain_state(state))
        self._drawn = int(state.get("drawn", 0))
        self.figures = {key: list(values) for key, values in state.get("figures", {}).items()}


def plain_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of the stream alone, of a state with or without figures."""
    return state.get("stream", state)
