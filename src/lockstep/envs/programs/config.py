"""Tasks for finished agents: one program per episode, or agents that connect on their own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, ClassVar

from lockstep.agent.config import AgentConfig
from lockstep.agent.harness import Harness
from lockstep.agent.scoring import ScorerConfig
from lockstep.agent.tasks import read_tasks
from lockstep.config import ABOVE_0
from lockstep.envs.data_files import FileTasks
from lockstep.envs.programs.program import ConnectedHarness, ProgramHarness, words_of
from lockstep.errors import ConfigError
from lockstep.types import Task


@dataclass(frozen=True, kw_only=True)
class _AgentTasks(FileTasks):
    """Base of tasks for finished agents."""

    path: str = ""
    """JSONL file with one task per line: any object; without an "id" it is named by its content.
    Empty: endless tasks with nothing but a `seed`, for agents that make their own."""

    def _read(self, path: str) -> list[Task]:
        return read_tasks(path, has_prompts=False)

    def _make(self, seed: int, index: int) -> Task:
        return Task(id=f"{seed:016x}", payload={"seed": seed})


@dataclass(frozen=True, kw_only=True)
class AgentProgramConfig(_AgentTasks):
    """Your finished agent: a program that is started for each episode and asks for its turns over
    HTTP. Its reward is the number that it prints or posts, or a scorer's."""

    TAG: ClassVar[str] = "agent"

    command: str = ""
    """Program and arguments, as on a command line: `python my_agent.py`. No shell reads it;
    `python` means Lockstep's own Python. Its environment has OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, LOCKSTEP_MODEL, LOCKSTEP_SESSION_URL and LOCKSTEP_TASK
    (JSON; also on stdin)."""
    pass_variables: tuple[str, ...] = ()
    """Environment variables that the program gets in addition to PATH, HOME, PYTHONPATH and other
    basic ones. It sees no others: your keys and tokens stay yours unless you name them."""
    scorer: ScorerConfig | None = None
    """Scores the output of the program; a reward that the program posts is then ignored. none: the
    last line of the output is the reward, a number or {"reward": ..., "parts": {...}}; if it is
    neither, the program must have posted a reward to its session."""

    def check(self) -> None:
        words_of(self.command)
        for name in self.pass_variables:
            if name not in os.environ:
                raise ConfigError(f"task.pass_variables: {name} is not set in the environment.")
        super().check()
        if self.scorer is not None:
            self.scorer.check()
            for task in [*self.splits["train"], *self.splits["eval"]] if self.path else ():
                self.scorer.check_task(task)

    def environment(self, task: Task, agent: AgentConfig) -> Harness:
        return ProgramHarness(self.command, self.scorer, pass_variables=self.pass_variables)


@dataclass(frozen=True, kw_only=True)
class ConnectConfig(_AgentTasks):
    """Agents that run somewhere else and connect: each claims a task (POST /claim), plays it over
    HTTP, posts its reward, finishes its session, and claims the next one."""

    wait_seconds: Annotated[float, ABOVE_0] = 3600.0
    """Seconds that an episode waits for an agent to claim it, and then fails. agent.max_seconds
    counts from the claim."""

    def environment(self, task: Task, agent: AgentConfig) -> Harness:
        return ConnectedHarness(self.wait_seconds)
