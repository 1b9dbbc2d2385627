"""The task kind `custom`: the user's functions as tools and reward, the user's rows as tasks."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Annotated, Any

import numpy as np

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.guard import checked_number, described, guarded, result_of
from lockstep.agent.references import LIVE, find, is_reference
from lockstep.agent.task_config import IN_PROCESS, AskedTasks, Split
from lockstep.agent.tasks import content_id
from lockstep.agent.tools import (
    Tool,
    ToolEnvironment,
    ToolFailure,
    ToolLimits,
    ToolOutput,
    as_output,
    in_daemon_thread,
    tool,
)
from lockstep.children import Child, serve
from lockstep.config import at_least
from lockstep.dialogues import read_prompt
from lockstep.envs.data_files import FileTasks, split_tasks
from lockstep.errors import (
    ChildRefusal,
    ChildTimeoutError,
    ConfigError,
    DataError,
    RolloutError,
    located,
    shortened,
)
from lockstep.launch.event_loop import run_to_end
from lockstep.store.tables import NotJson, data_files, read_rows
from lockstep.types import Message, Task

MAX_TASKS = 1_000_000
"""More would be an iterable without an end."""
_IS_DIALOGUE = re.compile(r"\s*\[\s*\{\s*['\"](role|content|from|value)['\"]\s*:")
"""Text of a list of messages: CSV has them so."""
MAX_CHARS = 1_000_000
"""Characters of a tool's output that a worker sends; the model reads far fewer."""
TRIAL_SECONDS = 120.0
"""Seconds that the reward may take when it is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """One call of a tool in an episode."""

    name: str
    arguments: Any
    """The object of arguments; the model's text if that is not JSON."""
    output: str
    """The text that the model read; empty if the episode ended before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A finished episode, as a reward function gets it.

    >>> def reward(episode: Episode) -> float:
    ...     return float(episode.answer == episode.task["answer"])
    """

    task: Mapping[str, Any]
    """The task's row: all of its columns, and `id`."""
    messages: Sequence[Message]
    """The whole dialogue, from the first prompt to the last reply."""
    answer: str = ""
    """The text of the reply that called no tool; empty if a budget ended the episode before it."""
    calls: Sequence[ToolUse] = ()
    """Calls of tools, in order, failed calls included."""


Reward = Callable[[Episode], Any]


@dataclass(frozen=True, kw_only=True)
class CustomConfig(AskedTasks, FileTasks):
    """Your tools, your reward, your tasks. Functions are named by where they are: mytools.py:search
    or package.module:search."""

    tools: tuple[str, ...] = ()
    """Functions that the model may call. It reads their types and docstring."""
    reward: str = ""
    """Function of the finished episode (lockstep.envs.custom.Episode: task, messages, answer,
    calls), plain or async. It returns a number, {name: number} whose sum is the reward, or a Score.
    It is called once before the run, with an empty answer."""
    path: str = ""
    """Tasks: a .jsonl, .json, .csv, .tsv, .parquet or .arrow file, plain or with .gz or .zst; a
    folder of them; ORGANISATION/NAME of the Hugging Face hub; or a list or function of a file, such
    as mytasks.py:tasks. A row without an "id" is named by a hash of its content; equal rows are one
    task. A column that is no JSON in some row (times, bytes, NaN) is left out of all."""
    question: str = "question"
    """Column of the first user message: text, or a list of messages that the model is to answer.
    Without it, `messages`. A list that ends with an assistant's message is refused."""
    workers: Annotated[int, at_least(0)] = 0
    """Processes that run the tools and the reward, one call at a time each. A call that holds
    Python's lock, such as a regular expression that explodes, is ended there at its limit; they
    share no variables with each other. 0: threads of this process, where such a call stops the
    whole run, past its limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers and (live := [r for r in (*self.tools, self.reward) if r.startswith(LIVE)]):
            raise ConfigError(f"task.workers: {live[0]} must be a function of a file.")

    def check(self) -> None:
        _ = self.functions
        reward, (task, *_) = self._reward, self.splits["train"]
        environment = CustomEnvironment(self, copy.deepcopy(task), ToolLimits())
        try:
            run_to_end(guarded(partial(environment.score_by, reward), seconds=TRIAL_SECONDS))
        except (ConfigError, DataError):
            raise
        except Exception as error:
            raise ConfigError(
                f"task.reward={self.reward} raised {described(error)} for task {task.id}, "
                f"tried with the answer ''. The task has the columns "
                f"{', '.join(task.payload)}, and an answer may be empty."
            ) from error

    def first_tasks(self, *, split: Split, seed: int) -> list[Task]:
        """The longest task: if its prompt fits, all do."""
        everything = [*self.splits["train"], *self.splits["eval"]]
        return [max(everything, key=lambda task: len(str(task.payload.get(self.question, task))))]

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        return CustomEnvironment(self, task, ToolLimits.of(agent), seconds=agent.max_seconds)

    async def close(self) -> None:
        if "_children" in vars(self):
            vars(self).pop("_children").close()

    @property
    def limits_notice(self) -> str:
        return "" if self.workers else f"{IN_PROCESS} (in processes: task.workers=N)"

    def opening(self, task: Task) -> list[Message]:
        """The messages before the first reply. Raises DataError for a row that gives none."""
        name = self.question if self.question in task.payload else "messages"
        asked = task.payload.get(name)
        said: str | list[Message] = ""
        if isinstance(asked, str) and asked.strip() and not _IS_DIALOGUE.match(asked):
            said = asked
        elif asked and isinstance(asked, str | list):
            said = read_prompt(asked, where=name)
        elif name not in task.payload:
            columns = ", ".join(task.payload) or "none"
            raise DataError(
                f"no column {self.question!r}, and no `messages`; the columns are {columns}. "
                "task.question=COLUMN names the one to ask."
            )
        else:
            raise DataError(f"{name} must be text or a list of messages, found {shortened(asked)}.")
        return self.asked(said)

    def notes(self) -> list[str]:
        found = [f"the column {name!r} is left out: {why}" for name, why in self.left_out.items()]
        if isinstance(self.splits["train"][0].payload.get("system"), str):
            found.append(
                "the column 'system' is not shown to the model: put it into messages, or into "
                "task.instructions."
            )
        return found

    # `cached_property` keeps its value beside the fields: it is neither compared nor written.

    @cached_property
    def functions(self) -> tuple[Tool, ...]:
        """The tools."""
        found = [_function_at(each, setting="task.tools") for each in self.tools]
        return tuple(each if isinstance(each, Tool) else tool(each) for each in found)

    @cached_property
    def _children(self) -> FunctionWorkers:
        return FunctionWorkers(self.workers)

    @cached_property
    def _reward(self) -> Reward:
        if not self.reward:
            raise ConfigError(
                "task.reward is empty. Give a function of the finished episode: "
                "task.reward=mytools.py:reward."
            )
        return _function_at(self.reward, setting="task.reward")

    @cached_property
    def splits(self) -> dict[str, list[Task]]:
        if not self.path:
            raise ConfigError("task.path is empty: give the tasks, task.path=tasks.jsonl.")
        rows = self._rows_of(self.path, "train")
        held_out = self._rows_of(self.eval_path or self.path, "train" if self.eval_path else "eval")
        if needed := sorted({self.question, "id", "label"} & self.left_out.keys()):
            raise DataError(f"{self.left_out[needed[0]]} The column {needed[0]!r} is needed.")
        if not rows:
            raise DataError(f"task.path={self.path}: there is no task.")
        tasks, evaluated = self._tasks(rows), self._tasks(held_out) or None
        return split_tasks(tasks, evaluated, self.eval_share, name=self.path, holds_out_one=True)

    @cached_property
    def left_out(self) -> dict[str, str]:
        """Columns that are no JSON in some row, and why. No task has them."""
        return {}

    def _rows_of(self, path: str, split: Split) -> list[tuple[str, dict[str, Any]]]:
        rows: list[tuple[str, dict[str, Any]]] = []
        for where, row in _rows(path, split):
            if len(rows) == MAX_TASKS:
                raise DataError(f"{path}: more than {MAX_TASKS:,} tasks. An iterable without end?")
            rows.append((where, self._columns(row, where)))
        return rows

    def _columns(self, row: Any, where: str) -> dict[str, Any]:
        if isinstance(row, str):
            row = {self.question: row}
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: a task is an object or text, found {shortened(row)}.")
        payload: dict[str, Any] = {}
        for key, value in row.items():
            try:
                payload[str(key)] = _as_json(value)
            except (TypeError, ValueError, RecursionError) as error:
                why = f"{where}: {key!r} is {shortened(value)}, which JSON has not ({error})."
                self.left_out.setdefault(str(key), why)
        return payload

    def _tasks(self, rows: Sequence[tuple[str, dict[str, Any]]]) -> list[Task]:
        tasks: dict[str, Task] = {}
        for where, columns in rows:
            payload = {key: value for key, value in columns.items() if key not in self.left_out}
            with located(where, DataError):
                task_id = payload.get("id")
                has_id = task_id is not None
                task_id = task_id if has_id else content_id(payload)
                if type(task_id) not in (str, int) or task_id == "":
                    raise DataError(f"id must be text or a whole number, found {task_id!r:.60}.")
                payload.pop("id", None)
                task = Task(id=str(task_id), payload=payload)
                if has_id and task.id in tasks:
                    raise DataError(f"the id {task.id!r} is given twice.")
                self.opening(task)
            tasks[task.id] = task
        return list(tasks.values())


class FunctionWorkers:
    """Processes that run functions of the user, each one call at a time. A call that holds Python's
    lock stops its process alone, which is killed at the limit of the call."""

    def __init__(self, num_workers: int) -> None:
        self._children = [
            Child.of_module(__name__, name="a worker of task.workers") for _ in range(num_workers)
        ]
        self._free = SimpleQueue[Child]()
        for child in self._children:
            self._free.put(child)

    async def call(self, reference: str, seconds: float, **request: Any) -> dict[str, Any]:
        """One call, in the first process that is free. Its limit begins then. Raises ToolFailure
        for what the function raised, and when the limit is over."""

        def ask() -> dict[str, Any]:
            child = self._free.get()
            try:
                return child.ask({"reference": reference, **request}, seconds=seconds)
            except ChildTimeoutError:
                text = f"{reference} took longer than {seconds:g} s"
                raise ToolFailure(text, outcome="timeouts") from None
            except ChildRefusal as error:
                raise ToolFailure(f"{error.kind}: {error}".removesuffix(": ")) from None
            finally:
                self._free.put(child)

        return result_of(await in_daemon_thread(ask))

    def tool(self, entry: Tool, reference: str, limits: ToolLimits) -> Tool:
        """The tool, run by a worker."""

        async def call(**arguments: Any) -> ToolOutput:
            found = await self.call(reference, limits.timeout_seconds, arguments=arguments)
            return ToolOutput(**found)

        return replace(entry, function=call, bounds_itself=True, is_instant=False)

    def close(self) -> None:
        for child in self._children:
            child.close()


def main() -> None:
    """Runs in a worker."""
    serve(_answer)


def _answer(
    reference: str,
    arguments: Mapping[str, Any] | None = None,
    episode: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The result of a tool, or the score of a reward if there is an episode."""
    try:
        found = find(reference, setting="task.tools or task.reward")
        function = getattr(found, "function", found)
        if episode is None:
            output = as_output(_result(function(**arguments or {})))
            return {"text": output.text[:MAX_CHARS], "metrics": output.metrics}
        return asdict(score_of(_result(function(_episode(**episode))), reference))
    except Exception:
        raise
    except BaseException as error:  # it ends the call, and not the process
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _result(found: Any) -> Any:
    async def awaited() -> Any:
        return await found

    return asyncio.run(awaited()) if inspect.isawaitable(found) else found


def _episode(task: Mapping[str, Any], left_out: Mapping[str, str], **fields: Any) -> Episode:
    fields["messages"] = tuple(map(Message.from_dict, fields["messages"]))
    fields["calls"] = tuple(ToolUse(**each) for each in fields["calls"])
    return Episode(task=Columns(task, left_out), **fields)


class CustomEnvironment(ToolEnvironment):
    """One task, played with the user's tools and scored by the user's reward."""

    def __init__(
        self,
        config: CustomConfig,
        task: Task,
        limits: ToolLimits,
        *,
        seconds: float = TRIAL_SECONDS,
    ) -> None:
        """seconds: limit of a reward that a worker runs."""
        self.tools, self.limits, self._seconds = config.functions, limits, seconds
        if config.workers:
            named = zip(config.functions, config.tools, strict=True)
            self.tools = [config._children.tool(*each, limits) for each in named]
        self._config, self._task = config, task
        self._dialogue: list[Message] = []

    async def reset(self) -> Sequence[Message]:
        self._dialogue = self._config.opening(self._task)
        return tuple(self._dialogue)

    async def step(self, message: Message) -> Observation:
        observation = await super().step(message)
        self._dialogue += [message, *observation.messages]
        return observation

    async def score(self) -> Score:
        return await self.score_by(self._config._reward)

    async def score_by(self, reward: Reward) -> Score:
        """The score that a reward function gives to the episode so far."""
        episode = Episode(
            task=Columns({"id": self._task.id, **self._task.payload}, self._config.left_out),
            messages=tuple(self._dialogue or self._config.opening(self._task)),
            answer=self.answer or "",
            calls=_uses(self._dialogue),
        )
        if self._config.workers:
            said = [message.to_dict() for message in episode.messages]
            plain = asdict(replace(episode, task=dict(episode.task)))
            plain |= {"messages": said, "left_out": self._config.left_out}
            ask = self._config._children.call(self._config.reward, self._seconds, episode=plain)
            try:
                found = await ask
            except ToolFailure as error:
                raise RolloutError(str(error)) from None
            found["turn_rewards"] = {int(t): r for t, r in found["turn_rewards"].items()}
            return Score(**found)
        if inspect.iscoroutinefunction(reward):
            found = await reward(episode)
        else:
            found = result_of(await in_daemon_thread(partial(reward, episode)))
            found = await found if inspect.isawaitable(found) else found
        return score_of(found, f"task.reward={self._config.reward} for task {self._task.id}")


class Columns(dict[str, Any]):
    """The columns of a task. One that was left out raises DataError where it is read."""

    def __init__(self, columns: Mapping[str, Any], left_out: Mapping[str, str]) -> None:
        super().__init__(columns)
        self._left_out = left_out

    def __missing__(self, key: str) -> Any:
        if key in self._left_out:
            raise DataError(f"{self._left_out[key]} So no task has the column {key!r}.")
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self or key in self._left_out else default


def _function_at(reference: str, *, setting: str) -> Any:
    """The function that a setting names; for a tool also a `Tool`."""
    found = find(reference, setting=setting)
    if not callable(found) and (setting == "task.reward" or not isinstance(found, Tool)):
        raise ConfigError(f"{setting}={reference}: expected a function, found {found!r:.60}.")
    return found


def _as_json(value: Any) -> Any:
    """`value` as JSON has it. Raises ValueError or TypeError if it has not."""
    if isinstance(value, NotJson):
        raise TypeError(f"a column of {value.kind} is not read")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain_numbers)
    text.encode()  # half a surrogate pair has no UTF-8
    return value if type(value) in (str, int, bool) else json.loads(text)


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, np.datetime64):
        return value.tolist()
    raise TypeError(type(value).__name__)


def score_of(found: Any, where: str) -> Score:
    """The score that a reward function returned. where: its name in errors."""
    is_score = isinstance(found, Score)
    parts: Mapping[Any, Any] = found if isinstance(found, Mapping) else {}
    try:
        values = {str(n): checked_number(v, f"{where}, {n!r}") for n, v in parts.items()}
        number = found.reward if is_score else found
        reward = sum(values.values()) if parts else checked_number(number, where)
    except TypeError as error:
        missing = found is None or None in parts.values()
        hint = " Is a `return` missing?" if missing else ""
        raise DataError(f"{error}, {{name: number}} or a Score.{hint}") from None
    return found if is_score else Score(reward=reward, parts=values)


def _uses(dialogue: Sequence[Message]) -> tuple[ToolUse, ...]:
    uses: list[ToolUse] = []
    for index, message in enumerate(dialogue):
        replies = itertools.takewhile(lambda m: m.role == "tool", dialogue[index + 1 :])
        for call, reply in itertools.zip_longest(message.tool_calls, replies):
            if call is None:
                break
            try:
                arguments = json.loads(call.arguments)
            except ValueError:
                arguments = call.arguments
            output = reply.content if reply is not None else ""
            uses.append(ToolUse(name=call.name, arguments=arguments, output=output))
    return tuple(uses)


def _rows(path: str, split: Split) -> Iterator[tuple[str, Any]]:
    """(place, row) of each task of a split; none for a split that the data do not have."""
    if not is_reference(path):
        for file in data_files(path, is_eval=split == "eval"):
            yield from read_rows(file)
    elif split == "train":
        found = find(path, setting="task.path")
        found = found() if callable(found) else found
        if isinstance(found, str | bytes) or not isinstance(found, Iterable):
            raise DataError(f"task.path={path}: expected a list of tasks, found {found!r:.60}.")
        for number, row in enumerate(found, start=1):
            yield f"{path}, task {number}", row
