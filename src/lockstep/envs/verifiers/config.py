"""The task kind `verifiers`: its settings, its child process and its episodes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Score
from lockstep.agent.harness import Endpoint, Harness
from lockstep.agent.task_config import Split
from lockstep.agent.tasks import ListSource, TaskSource
from lockstep.children import Child
from lockstep.config import at_least
from lockstep.envs.data_files import HeldOutTasks, split_tasks
from lockstep.errors import ChildError, ChildRefusal, ConfigError, ToolServerError
from lockstep.types import Task

STOP_SECONDS = 10.0
"""Seconds for the child process to end its environment by itself."""


@dataclass(frozen=True, kw_only=True)
class VerifiersConfig(HeldOutTasks):
    """An environment of verifiers 0.4: its taskset, agent and rewards. The agent calls its model
    through the gateway, and the gateway's sessions are trained.

    verifiers is installed beside Lockstep (extra `verifiers`), or for the Python that `python`
    names.
    """

    taskset: str = ""
    """Id of an installed taskset: gsm8k-v1, OWNER/NAME, or a module name."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the taskset, e.g. task.settings.split=train."""
    env: str = ""
    """Id of the environment. Empty: the taskset's own, or a single agent."""
    harness: str = ""
    """Id of the agent's program. Empty: the taskset's own, or bash."""
    agent: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the agent, as in verifiers' [env.agent]: task.agent.max_turns=8. Its
    program runs in docker, or where task.agent.runtime.type says: subprocess (this machine), prime,
    modal, ..."""
    allow_code_here: bool = False
    """Allow an agent's program to run the model's code on this machine (runtime subprocess)."""
    limit: Annotated[int, at_least(0)] = 0
    """Number of tasks to take. 0: all. Required for an endless taskset."""
    python: str = ""
    """Python that has verifiers installed. Empty: Lockstep's own Python."""
    start_seconds: ClassVar[float] = 600.0
    """Seconds to load the taskset, which may download a dataset."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, own, is_twice in (
            ("settings.id", "taskset", "id" in self.settings),
            ("agent.harness", "harness", self.harness and "harness" in self.agent),
        ):
            if is_twice:
                raise ConfigError(f"{name}: give it once, as task.{own}=...")

    def check(self) -> None:
        """Loads the taskset in the child process that will run it."""
        if not self.taskset:
            raise ConfigError("taskset is empty: give the taskset's id, task.taskset=ID.")
        opened = self._open()
        if opened["runs_code_here"] and not self.allow_code_here:
            raise ConfigError(
                f"verifiers: the program of {', '.join(opened['runs_code_here'])} runs the model's "
                "code, and agent.runtime.type=subprocess is this machine. Use docker, harness=null "
                "(a chat with tools), or allow_code_here=true on a disposable machine."
            )
        _ = self._tasks

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        """Training: reshuffled in each epoch. Evaluation: once, in the taskset's order."""
        return ListSource.of_split(self._tasks[split], split=split, seed=seed, name=self.taskset)

    def environment(self, task: Task, agent: AgentConfig) -> Harness:
        return VerifiersHarness(self._child)

    async def close(self) -> None:
        """Ends the child process."""
        if "_child" in vars(self):
            await asyncio.to_thread(self._child.close, seconds=STOP_SECONDS)

    @cached_property
    def _child(self) -> Child:
        agent = dict(self.agent)
        agent["runtime"] = {"type": "docker", **agent.get("runtime", {})}
        if self.harness:
            agent["harness"] = {"id": self.harness}
        taskset = {"id": self.taskset, **self.settings}
        environment = {"id": self.env, "taskset": taskset, "agent": agent}
        return Child(
            [self.python or sys.executable, str(Path(__file__).with_name("child.py"))],
            name="verifiers",
            opening={"environment": environment, "limit": self.limit},
            start_seconds=self.start_seconds,
            has_variables=True,  # its tools and judges have keys of the user's
        )

    def _open(self) -> dict[str, Any]:
        """Starts the child process unless it runs. Returns `tasks` and `runs_code_here`."""
        with _own_errors():
            return self._child.open()

    @cached_property
    def _tasks(self) -> dict[str, list[Task]]:
        opened = self._open()["tasks"]
        tasks = [
            Task(
                id=f"{each['name'] or self.taskset}-{index}".replace("/", "-"),
                payload={"index": index, "question": each["question"]},
            )
            for index, each in enumerate(opened)
        ]
        keys = {task.id: each["key"] for task, each in zip(tasks, opened, strict=True)}
        name = f"taskset={self.taskset}"
        return split_tasks(tasks, None, self.eval_share, name=name, key=lambda task: keys[task.id])


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raises ConfigError for what verifiers refuse, ToolServerError for other failures."""
    try:
        yield
    except ChildRefusal as refusal:
        error = ConfigError if refusal.kind == "Refused" else ToolServerError
        raise error(f"verifiers: {refusal}") from None
    except ChildError as error:
        if isinstance(error.__cause__, OSError):
            raise ConfigError(f"task.python: {error}") from None
        raise ToolServerError(str(error)) from None


class VerifiersHarness(Harness):
    """One episode, played by the child process against a session of the gateway."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def run(self, task: Task, endpoint: Endpoint) -> Score:
        """Returns the mean reward of the trainable agents. Raises ToolServerError for an episode
        that verifiers report as failed."""
        with _own_errors():
            served = {"api_key": endpoint.api_key, "model": endpoint.model}
            asked = {"index": task.payload["index"], "url": f"{endpoint.base_url}/v1", **served}
            reply = await self._child.ask_concurrently(asked)
        if not reply["ok"]:
            raise ToolServerError("verifiers: " + ("; ".join(reply["errors"]) or "it failed"))
        rewards, parts = reply["rewards"], reply["parts"]
        if not rewards:
            raise ToolServerError("verifiers: no trainable agent took part in the episode.")
        names = dict.fromkeys(name for each in parts for name in each)
        means = {n: sum(p.get(n, 0.0) for p in parts) / len(parts) for n in names}
        return Score(reward=sum(rewards) / len(rewards), parts=means)
