"""The task kind `bfcl`: its settings and its episodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.task_config import Split, TaskConfig
from lockstep.agent.tasks import ListSource, TaskSource
from lockstep.config import did_you_mean
from lockstep.envs.bfcl.package import (
    CATEGORIES,
    MULTI_TURN,
    Entry,
    Simulation,
    entries,
    later_functions_text,
    max_steps_per_turn,
    require_package,
    single_turn_problem,
    tool_name,
    tool_schema,
    turn_problem,
)
from lockstep.errors import ConfigError
from lockstep.types import Message, Role, Task, ToolCall, ToolSchema


@dataclass(frozen=True, kw_only=True)
class BFCLConfig(TaskConfig):
    """The Berkeley function-calling leaderboard (BFCL v4), with the entries, simulated APIs and
    checkers of its package. For evaluation only.

    reward = 1 if the package's checkers accept the entry, else 0
    """

    TAG: ClassVar[str] = "bfcl"

    category: str = "multi_turn_base"
    """multi_turn_base, multi_turn_miss_func, multi_turn_miss_param, multi_turn_long_context: calls
    over several user turns, checked by state and responses. simple_python, multiple, parallel,
    parallel_multiple and the same with live_ (live_simple): one reply, checked by the AST of its
    calls. irrelevance, live_irrelevance, live_relevance: whether a call is made at all."""
    skip: int = 0
    """Number of entries at the beginning to leave out."""

    def __post_init__(self) -> None:
        if self.category not in CATEGORIES:
            raise ConfigError(
                f"bfcl: category={self.category!r} is not supported."
                f"{did_you_mean(self.category, CATEGORIES)}"
            )
        if self.skip < 0:
            raise ConfigError(f"bfcl: skip={self.skip} must be at least 0.")

    def check(self) -> None:
        require_package()
        _ = self._chosen

    @property
    def _chosen(self) -> tuple[Entry, ...]:
        found = entries(self.category)
        if self.skip >= len(found):
            raise ConfigError(
                f"bfcl: skip={self.skip} leaves none of the {len(found)} entries of "
                f"{self.category}."
            )
        return found[self.skip :]

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        """The entries, once and in the package's order. There is no training split."""
        if split == "train":
            raise ConfigError(
                "task=bfcl is an evaluation, and training on it would make its figures worthless: "
                "`lockstep eval RUN task=bfcl`."
            )
        tasks = [Task(id=entry.id, payload={"category": entry.category}) for entry in self._chosen]
        return ListSource(tasks, shuffle=False, epochs=1, name=f"bfcl ({self.category})")

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        entry = next(entry for entry in entries(self.category) if entry.id == task.id)
        if self.category in MULTI_TURN:
            return MultiTurnEnvironment(entry, output_chars=agent.tool_output_chars)
        return SingleTurnEnvironment(entry)

    def label(self, task: Task) -> str:
        """The category."""
        return str(task.payload["category"])


class MultiTurnEnvironment(Environment):
    """Several user turns over simulated APIs. A user turn ends with a reply that has no call, or
    one that cannot be read.

    The reward is 1 if every user turn passed the package's checks of state and responses, else 0.
    Score parts: `valid`; `turns_passed`, the share of user turns before the first failure;
    `forced_quit`, 1 if a user turn took more replies with calls than the package allows.
    """

    def __init__(self, entry: Entry, *, output_chars: int) -> None:
        self._entry, self._output_chars = entry, output_chars
        self.tools: Sequence[ToolSchema] = tuple(map(tool_schema, entry.functions))
        self._simulation, self._truth = Simulation(entry), Simulation(entry)
        self._max_steps = max_steps_per_turn()
        self._turn = 0
        self._num_steps = 0
        """Replies with calls in this user turn."""
        self._results: list[str] = []
        """Results of all calls so far."""
        self._is_forced = False
        self.problem = ""
        """Verdict of the checkers on the first user turn that failed."""
        self.num_passed = 0

    async def reset(self) -> Sequence[Message]:
        return self._user_messages()

    async def step(self, message: Message) -> Observation:
        calls = () if message.parse_error else message.tool_calls
        read = [(call, _arguments(call)) for call in calls]
        if not calls or any(arguments is None for _, arguments in read):
            error = "error: the arguments must be one JSON object"
            replies = [_reply(call, error) for call in calls]
            self._end_turn()
            if self._turn == len(self._entry.turns):
                return Observation(done=True)
            return Observation(messages=(*replies, *self._user_messages()))
        self._num_steps += 1
        if self._num_steps > self._max_steps:
            self._is_forced = True
            self.problem = self.problem or "multi_turn:force_terminated"
            return Observation(done=True)
        replies = []
        for call, arguments in read:
            result = self._simulation.call(call.name, (), arguments or {})
            self._results.append(result)
            replies.append(_reply(call, _cut(result, self._output_chars)))
        errors = sum(reply.content.startswith("Error") for reply in replies)
        counters = {"tool/calls": len(calls), **({"tool/errors": errors} if errors else {})}
        return Observation(messages=replies, metrics=counters)

    def _user_messages(self) -> list[Message]:
        if (withheld := self._entry.later_functions.get(self._turn)) is not None:
            return [Message(role="user", content=later_functions_text(withheld))]
        return [_message(each) for each in self._entry.turns[self._turn]]

    def _end_turn(self) -> None:
        """Plays the ground truth of the user turn, and compares."""
        sources = self._entry.answer[self._turn]
        expected = [self._truth.call_source(source) for source in sources]
        problem = ""
        if sources and not self._num_steps:
            problem = "multi_turn:empty_turn_model_response"
        elif sources:  # like the package: a turn without calls in its ground truth is not checked
            problem = turn_problem(
                self._simulation,
                self._truth,
                results=self._results,
                expected=expected,
                turn=self._turn,
            )
        self.problem = self.problem or problem
        self.num_passed += not self.problem
        self._turn, self._num_steps = self._turn + 1, 0

    async def score(self) -> Score:
        num_turns = len(self._entry.turns)
        valid = float(self._turn == num_turns and not self.problem)
        parts = {
            "valid": valid,
            "turns_passed": self.num_passed / num_turns,
            "forced_quit": float(self._is_forced),
        }
        return Score(reward=valid, parts=parts)


class SingleTurnEnvironment(Environment):
    """One request and one reply, whose calls are compared and not run. The reward is 1 if the
    package's AST checker accepts them, else 0; in the relevance categories, if a call was made
    exactly if one was needed."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.tools: Sequence[ToolSchema] = tuple(map(tool_schema, entry.functions))
        self.problem = "no reply"

    async def reset(self) -> Sequence[Message]:
        return [_message(each) for turn in self._entry.turns for each in turn]

    async def step(self, message: Message) -> Observation:
        calls = () if message.parse_error else message.tool_calls
        read = [(tool_name(call.name), _arguments(call)) for call in calls]
        made = [(name, arguments) for name, arguments in read if arguments is not None]
        # An unreadable call makes the whole reply one without calls.
        self.problem = single_turn_problem(self._entry, made if len(made) == len(read) else [])
        return Observation(done=True)

    async def score(self) -> Score:
        valid = float(not self.problem)
        return Score(reward=valid, parts={"valid": valid})


def _message(said: Mapping[str, str]) -> Message:
    roles: dict[str, Role] = {"system": "system", "assistant": "assistant"}
    return Message(role=roles.get(said["role"], "user"), content=said["content"])


def _arguments(call: ToolCall) -> dict[str, Any] | None:
    """Arguments of a call; None if they are not a JSON object."""
    try:
        found = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _reply(call: ToolCall, text: str) -> Message:
    name = tool_name(call.name)[:64] or "unknown"
    return Message(role="tool", name=name, content=text, tool_call_id=call.id)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    notice = f"\n[cut: {len(text)} characters in all]"
    return text[: max(0, limit - len(notice))] + notice
