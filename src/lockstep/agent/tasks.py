"""Streams of tasks: seeded, finite or endless, and exactly resumable.

The order is a pure function of (seed, position), so a state is a few integers. A stream that is
resumed anywhere goes on as if it had never stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from lockstep.dialogues import read_prompt
from lockstep.errors import CheckpointError, ConfigError, DataError, LockstepError, named, shortened
from lockstep.store.files import read_jsonl
from lockstep.types import Group, Task

T = TypeVar("T")
MAX_LEFT_OUT = 10_000
"""Tasks in a row that a source may leave out: generated ones never end."""


def derive_seed(*parts: int | str) -> int:
    """Returns a number in [0, 2^63) that depends on all parts and on nothing else.

    Unlike `hash`, it is the same on every machine. ("a", 1) and ("a1",) differ.
    """
    text = json.dumps(parts, separators=(",", ":")).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_globals(*parts: int | str) -> None:
    """Seeds the global generators of Python and numpy, which Lockstep never draws from, and torch's
    if it is loaded, for foreign code that draws."""
    seed = derive_seed(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(seed)


def is_held_out(share: float, *key: str) -> bool:
    """True if the task with this key belongs to the share that is held out for evaluation. Only the
    key decides, so a task keeps its side when others are added or removed."""
    return derive_seed("held out", *key) < share * 2**63


class TaskSource(Iterator[Task]):
    """An iterator of tasks that can be stopped and resumed.

    Subclasses define `__next__`, `state_dict` and `load_state_dict`. A finite source ends with
    `StopIteration`.
    """

    def take(self, count: int) -> list[Task]:
        """Returns the next `count` tasks; fewer at the end of a finite source. Any other value
        becomes a task that cannot be played. Raises DataError if the source raises."""
        try:
            return [_as_task(found) for _, found in zip(range(count), self, strict=False)]
        except (LockstepError, KeyboardInterrupt):
            raise
        except BaseException as error:
            where = f"the source of tasks, {type(self).__name__},"
            raise DataError(f"{where} raised {named(error)} in place of a task.") from error

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state; an equal source that loads it goes on with the next task."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the state is from another source: tasks would be lost."""
        raise NotImplementedError

    def listed(self) -> list[Task]:
        """All tasks of a finite source; [] where they are made on demand."""
        return []


class FilteredSource(TaskSource):
    """The tasks of a source that `keeps` takes. Its state is the source's own."""

    def __init__(self, source: TaskSource, keeps: Callable[[Task], bool]) -> None:
        self._source, self._keeps = source, keeps
        self.state_dict, self.load_state_dict = source.state_dict, source.load_state_dict

    def __next__(self) -> Task:
        for number, task in enumerate(self._source):
            if self._keeps(task):
                return task
            if number == MAX_LEFT_OUT:
                raise DataError(f"{number:,} tasks in a row were left out, the last {task.id}.")
        raise StopIteration


def made_anew(found: Any, kind: Any) -> Any:
    """A checked value of a dataclass: a subclass, or a field that was set by force, is not."""
    return kind(**{each.name: getattr(found, each.name) for each in fields(kind)})


def _as_task(found: Any) -> Task:
    if isinstance(found, Task):
        return made_anew(found, Task)
    shown = shortened(found)
    return Task(id=shown, problem=f"the source of tasks gave {shown}; expected a Task")


def _check_state(state: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    for key, value in expected.items():
        if state.get(key) != value:
            raise CheckpointError(
                f"{what}: the saved state has {key}={state.get(key)!r}, this source has {value!r}. "
                "The data or the seed changed since the checkpoint; restore them, or start a run "
                "with `from=` instead of resuming."
            )


class ListSource(TaskSource):
    """Tasks in memory, walked through epoch by epoch.

    epochs: passes over the tasks; None is endless. shuffle: draws a new permutation from
    (seed, epoch) for each epoch.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        name: str = "tasks",
    ) -> None:
        if epochs is not None and epochs < 1:
            raise ConfigError(f"{name}: epochs={epochs} must be at least 1, or None for no end.")
        self.tasks = list(map(_as_task, tasks))
        if not self.tasks:
            raise DataError(f"{name}: there is no task.")
        self.name = name
        self._seed, self._shuffle, self._epochs = seed, shuffle, epochs
        self._epoch, self._index = 0, 0
        self._order = self._order_of(0)
        ids = "\n".join(task.id for task in self.tasks)
        self._digest = hashlib.blake2b(ids.encode(), digest_size=8).hexdigest()

    @classmethod
    def of_split(
        cls, tasks: Sequence[Task], *, split: Literal["train", "eval"], seed: int, name: str
    ) -> ListSource:
        """Endless and shuffled for training; one pass in order for evaluation."""
        is_train, name = split == "train", f"{name} ({split})"
        return cls(tasks, seed=seed, shuffle=is_train, epochs=None if is_train else 1, name=name)

    def __len__(self) -> int:
        """Number of tasks in one epoch."""
        return len(self.tasks)

    def listed(self) -> list[Task]:
        return self.tasks

    def __next__(self) -> Task:
        if self._index == len(self.tasks):
            if self._epochs is not None and self._epoch + 1 >= self._epochs:
                raise StopIteration
            self._epoch, self._index = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        task = self.tasks[self._order[self._index]]
        self._index += 1
        return task

    def state_dict(self) -> dict[str, Any]:
        return {**self._identity(), "epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_state(state, self._identity(), self.name)
        self._epoch, self._index = int(state["epoch"]), int(state["index"])
        self._order = self._order_of(self._epoch)

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed, "shuffle": self._shuffle, "digest": self._digest}

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.tasks)))
        if self._shuffle:
            random.Random(derive_seed("epoch", self._seed, epoch)).shuffle(order)
        return order


class GeneratedSource(TaskSource):
    """Tasks made on demand by the pure function `make(task seed, index in the stream)`.

    The splits "train" and "eval" of one seed never share a task seed.
    """

    def __init__(
        self, make: Callable[[int, int], Task], *, seed: int = 0, split: str = "train"
    ) -> None:
        self._make, self._seed, self._split = make, seed, split
        self._index = 0

    def __next__(self) -> Task:
        task = self._make(derive_seed("task", self._split, self._seed, self._index), self._index)
        self._index += 1
        return task

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "split": self._split, "index": self._index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_state(state, {"seed": self._seed, "split": self._split}, "generated tasks")
        self._index = int(state["index"])


class MixtureSource(TaskSource):
    """Draws from several sources by weight. Each task's `source` names its component.

    When a component ends, the others keep their proportions; the mixture ends with the last one.
    `MixtureConfig` checks the weights.
    """

    def __init__(
        self, sources: Mapping[str, TaskSource], *, weights: Mapping[str, float], seed: int = 0
    ) -> None:
        self._sources, self._weights, self._seed = dict(sources), dict(weights), seed
        self._drawn = 0
        self._ended: set[str] = set()

    def __next__(self) -> Task:
        while len(self._ended) < len(self._sources):
            names = [name for name in self._sources if name not in self._ended]
            draw = random.Random(derive_seed("mixture", self._seed, self._drawn))
            name = draw.choices(names, [self._weights[n] for n in names])[0]
            try:
                task = _as_task(next(self._sources[name]))
            except StopIteration:
                self._ended.add(name)
                continue
            self._drawn += 1
            return replace(task, source=name)
        raise StopIteration

    def listed(self) -> list[Task]:
        return [replace(t, source=n) for n, s in self._sources.items() for t in s.listed()]

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "weights": self._weights,
            "drawn": self._drawn,
            "ended": sorted(self._ended),
            "sources": {name: source.state_dict() for name, source in self._sources.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_state(state, {"seed": self._seed, "weights": self._weights}, "mixture")
        for name, source in self._sources.items():
            source.load_state_dict(state["sources"][name])
        self._drawn, self._ended = int(state["drawn"]), set(state["ended"])


# ---------------------------------------------------------------------------------------------
# The user's own tasks
# ---------------------------------------------------------------------------------------------


def content_id(payload: Mapping[str, Any]) -> str:
    """The id of a task that gives none: equal tasks have equal ids, on any line of any file."""
    return f"{derive_seed(json.dumps(payload, sort_keys=True)):016x}"


def read_entries(path: str | Path, make: Callable[[str, dict[str, Any]], T]) -> list[T]:
    """Reads one entry per line of a JSONL file. Equal lines without an id are one entry.

    make: (id, the line's object without it) -> the entry. Raises DataError that begins with
    `path:line`.
    """
    entries: list[T] = []
    lines: dict[str, int] = {}
    for number, record in read_jsonl(path):
        try:
            has_id = "id" in record
            given = record.pop("id") if has_id else content_id(record)
            if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
                raise DataError(f"id must be text or a whole number, found {given!r}.")
            entry = make(str(given), record)
            first = lines.setdefault(str(given), number)
            if first == number:
                entries.append(entry)
            elif has_id:
                raise DataError(f"the id {str(given)!r} is already on line {first}.")
        except DataError as error:
            raise DataError(f"{path}:{number}: {error}") from error
    if not entries:
        raise DataError(f"{path}: has no task: expected one JSON object per line.")
    return entries


def read_tasks(path: str | Path, *, has_prompts: bool = True) -> list[Task]:
    """Reads the user's tasks, one JSON object per line.

    `id` may be left out: `content_id`. has_prompts: each line must have `messages` (a list) or
    `question` (text). All other keys belong to the environment, which finds them in
    `Task.payload`. Raises DataError that begins with `path:line`.
    """

    def make(task_id: str, record: dict[str, Any]) -> Task:
        if has_prompts:
            _check_prompt(record)
        return Task(id=task_id, payload=record)

    return read_entries(path, make)


def _check_prompt(record: Mapping[str, Any]) -> None:
    if "messages" not in record:
        question = record.get("question")
        if not isinstance(question, str) or not question.strip():
            found = f"found the keys {sorted(record)}"
            raise DataError(f"expected `messages` (a list) or `question` (text); {found}.")
        return
    read_prompt(record["messages"])


# -- tasks by what they teach ----------------------------------------------------------------------


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
        self, source: TaskSource, *, candidates: int = 4, label: Callable[[Task], str], seed: int
    ) -> None:
        self._source, self._candidates, self._label, self._seed = source, candidates, label, seed
        self._drawn = 0
        self.figures: dict[str, list[float]] = {}
        """Per task id, and per label behind a "#": groups (MEMORY at most), mean reward, share of
        groups with a signal."""

    def __next__(self) -> Task:
        if not (found := self.take(1)):
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
