"""Task kinds that read a file of tasks, and the split of tasks into training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import ClassVar, TypeVar

from lockstep.agent.task_config import Split, TaskConfig
from lockstep.agent.tasks import (
    GeneratedSource,
    ListSource,
    TaskSource,
    derive_seed,
    is_held_out,
    read_tasks,
)
from lockstep.config import require
from lockstep.errors import ConfigError, DataError
from lockstep.types import Task

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class HeldOutTasks(TaskConfig):
    """Base of task kinds that hold out a share of their tasks."""

    IS_BASE: ClassVar[bool] = True
    may_hold_out_all: ClassVar[bool] = False

    eval_share: float = 0.1
    """Share of the tasks that is held out where nothing else is given to evaluate on, chosen by
    their ids or content."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_share = 0 < self.eval_share < 1 or (self.may_hold_out_all and self.eval_share == 1)
        require(self, eval_share=(is_share, "in (0, 1)"))


@dataclass(frozen=True, kw_only=True)
class FileTasks(HeldOutTasks):
    """Base of task kinds that read a file of tasks."""

    IS_BASE: ClassVar[bool] = True
    _make: ClassVar[Callable[..., Task] | None] = None
    """(seed, index) -> a task, for kinds that generate tasks where no path is given."""

    path: str = ""
    """JSONL with a task per line: any object. Without an "id" its content names it."""
    eval_path: str = ""
    """File of the same form for evaluation. Empty: eval_share of `path` is held out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_given = bool(self.path) or not self.eval_path
        require(self, eval_path=(is_given, "given with path"))

    def check(self) -> None:
        if self.path or not self._make:
            _ = self.splits

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        """Training: the file's tasks, reshuffled in each epoch. Evaluation: once, in its order.
        Generated tasks: endless, one stream per split and seed."""
        if not self.path and self._make:
            return GeneratedSource(self._make, seed=seed, split=split)
        return ListSource.of_split(self.splits[split], split=split, seed=seed, name=self.path)

    def label(self, task: Task) -> str:
        """The key `label` of the task's line."""
        return str(task.payload.get("label", ""))

    def _read(self, path: str) -> list[Task]:
        return read_tasks(path)

    @cached_property
    def splits(self) -> dict[str, list[Task]]:
        if not self.path:
            raise ConfigError("path is empty: give the tasks, task.path=FILE.jsonl.")
        tasks = self._read(self.path)
        if self.eval_share == 1 and not self.eval_path:
            return {"train": [], "eval": tasks}
        held_out = self._read(self.eval_path) if self.eval_path else None
        return split_tasks(tasks, held_out, self.eval_share, name=self.path)


def split_tasks(
    tasks: Sequence[T],
    held_out: Sequence[T] | None,
    eval_share: float,
    *,
    name: str,
    key: Callable[[T], str] = attrgetter("id"),
    holds_out_one: bool = False,
) -> dict[str, list[T]]:
    """Tasks by split, "train" and "eval".

    held_out: tasks to evaluate on; None holds out `eval_share` of `tasks`, chosen by `key`;
    holds_out_one: at least one of several. name: where `tasks` come from, for errors. Raises
    DataError if a split is empty, or if a key is in both.
    """
    if held_out is None:
        ranked = sorted(tasks, key=lambda task: derive_seed("held out", key(task)))
        num_held_out = sum(is_held_out(eval_share, key(task)) for task in tasks)
        if holds_out_one:
            num_held_out = min(max(num_held_out, 1), len(tasks) - 1)
        chosen = set(map(key, ranked[:num_held_out]))
        train = [task for task in tasks if key(task) not in chosen]
        evaluated = [task for task in tasks if key(task) in chosen]
    else:
        train, evaluated = list(tasks), list(held_out)
        if both := set(map(key, train)) & set(map(key, evaluated)):
            raise DataError(
                f"{name}: {min(both)!r} is among the tasks to evaluate on too; a task that is "
                "trained on cannot be evaluated on."
            )
    if not train or not evaluated:
        raise DataError(
            f"{name}: {len(tasks)} tasks with eval_share={eval_share} leave {len(train)} to train "
            f"on and {len(evaluated)} to evaluate on. Give more, change the share, or give a file "
            "to evaluate on."
        )
    return {"train": train, "eval": evaluated}
