"""Tasks for finished agents: one program per episode, or agents that connect on their own."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

from lockstep.agent.config import AgentConfig
from lockstep.agent.harness import Harness
from lockstep.agent.scoring import ScorerConfig
from lockstep.agent.task_config import Split, TaskConfig
from lockstep.agent.tasks import GeneratedSource, ListSource, TaskSource, read_tasks
from lockstep.envs.data_files import split_files
from lockstep.errors import ConfigError
from lockstep.types import Task


@dataclass(frozen=True, kw_only=True)
class _AgentTasks(TaskConfig):
    """Settings of tasks for finished agents."""

    path: str = ""
    """JSONL file with one task per line: any object; without an "id" the line number is taken.
    Empty: endless tasks with nothing but a `seed`, for agents that make their own."""
    eval_path: str = ""
    """JSONL file of the same form for evaluation. Empty: eval_share of `path` is held out."""
    eval_share: float = 0.1
    """Share of `path` that is held out for evaluation, chosen by the ids."""

    def __post_init__(self) -> None:
        if not 0 < self.eval_share < 1:
            raise ConfigError(f"eval_share={self.eval_share} must lie in (0, 1).")
        if self.eval_path and not self.path:
            raise ConfigError(f"eval_path={self.eval_path!r} needs path.")

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        """Endless and shuffled for training; one pass in the file's order for evaluation."""
        if not self.path:
            return GeneratedSource(_seed_task, seed=seed, split=split)
        return ListSource.of_split(
            self._tasks[split],
            split=split,
            seed=seed,
            name=self.path,
        )

    def label(self, task: Task) -> str:
        """The `label` of the task's line."""
        return str(task.payload.get("label", ""))

    @cached_property
    def _tasks(self) -> Mapping[str, list[Task]]:
        return split_files(
            self.path, self.eval_path, self.eval_share, read=partial(read_tasks, has_prompts=False)
        )


@dataclass(frozen=True, kw_only=True)
class AgentProgramConfig(_AgentTasks):
    """Your finished agent: a program that is started for each episode and asks for its turns over
    HTTP. Its reward is what it prints or posts, or what a scorer says."""

    TAG: ClassVar[str] = "agent"

    command: str = ""
    """Program and arguments, as on a command line: `python my_agent.py`. No shell reads it;
    `python` is the one that runs Lockstep. Its environment has OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, LOCKSTEP_MODEL, LOCKSTEP_SESSION_URL and LOCKSTEP_TASK
    (JSON; also on stdin)."""
    pass_variables: tuple[str, ...] = ()
    """Environment variables that the program gets beside PATH, HOME, PYTHONPATH and the like. It
    sees no others: your keys and tokens stay yours unless you name them."""
    scorer: ScorerConfig | None = None
    """Scores the output of the program; a reward that the program posts is then ignored. none: the
    last line of the output is the reward, a number or {"reward": ..., "parts": {...}}; if it is
    neither, the program must have posted a reward to its session."""

    def check(self) -> None:
        from lockstep.envs.programs.program import words_of

        words_of(self.command)
        for name in self.pass_variables:
            if name not in os.environ:
                raise ConfigError(f"task.pass_variables: {name} is not set in the environment.")
        if self.path:
            _ = self._tasks
        if self.scorer is not None:
            self.scorer.check()
            for task in [*self._tasks["train"], *self._tasks["eval"]] if self.path else ():
                self.scorer.check_task(task)

    def environment(self, task: Task, agent: AgentConfig) -> Harness:
        from lockstep.envs.programs.program import ProgramHarness, words_of

        return ProgramHarness(
            words_of(self.command), self.scorer, pass_variables=self.pass_variables
        )


@dataclass(frozen=True, kw_only=True)
class ConnectConfig(_AgentTasks):
    """Agents that run somewhere else and connect: each claims a task (POST /claim), plays it over
    HTTP, posts its reward, finishes its session, and claims the next one."""

    TAG: ClassVar[str] = "connect"

    wait_seconds: float = 3600.0
    """Seconds that an episode waits for an agent to claim it, and then fails. agent.max_seconds
    counts from the claim."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.wait_seconds < math.inf:
            raise ConfigError(f"wait_seconds={self.wait_seconds} must be a finite number above 0.")

    def check(self) -> None:
        if self.path:
            _ = self._tasks

    def environment(self, task: Task, agent: AgentConfig) -> Harness:
        from lockstep.envs.programs.program import ConnectedHarness

        return ConnectedHarness(self.wait_seconds)


def _seed_task(seed: int, index: int) -> Task:
    return Task(id=f"{seed:016x}", payload={"seed": seed})
