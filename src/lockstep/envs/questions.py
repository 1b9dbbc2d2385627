"""The task kinds `questions` and `mcp`: the user's tasks from a file, scored by the setting
`scorer`. `mcp` has the tools of an MCP server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.mcp import Offered, ServerAddress, ToolServer
from lockstep.agent.scoring import ExactScorer, ScorerConfig
from lockstep.agent.task_config import AskedTasks
from lockstep.agent.tools import ToolEnvironment, ToolLimits
from lockstep.dialogues import read_prompt
from lockstep.envs.data_files import FileTasks
from lockstep.errors import ConfigError
from lockstep.launch.event_loop import run_to_end
from lockstep.types import Message, Task


@dataclass(frozen=True, kw_only=True)
class _ScoredTasks(AskedTasks, FileTasks):
    """Base of task kinds that read the user's file and score with the setting `scorer`."""

    path: str = ""
    """JSONL with a task per line: {"id", "question"} or {"id", "messages"}, and the keys that the
    scorer reads (`answer`, ...)."""
    scorer: ScorerConfig = field(default_factory=ExactScorer)
    """Scorer of an episode."""

    def dialogue_of(self, task: Task) -> list[Message]:
        """The messages before the first reply."""
        asked = task.payload.get("messages")
        said = task.payload["question"] if asked is None else read_prompt(asked)
        return self.asked(said)

    def check(self) -> None:
        self.scorer.check()
        for task in [*self.splits["train"], *self.splits["eval"]]:
            self.scorer.check_task(task)

    async def close(self) -> None:
        await self.scorer.close()


@dataclass(frozen=True, kw_only=True)
class QuestionsConfig(_ScoredTasks):
    """Questions from a file, answered in one reply without tools."""

    def opening(self, task: Task) -> Sequence[Message]:
        return self.dialogue_of(task)

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        return QuestionEnvironment(self, task, ToolLimits.of(agent))


class QuestionEnvironment(ToolEnvironment):
    """One task of a file. Subclasses may set `tools`."""

    def __init__(self, config: _ScoredTasks, task: Task, limits: ToolLimits) -> None:
        self.task, self.scorer, self.limits, self._config = task, config.scorer, limits, config
        self.dialogue: list[Message] = []
        self._score: Score | None = None

    async def reset(self) -> Sequence[Message]:
        self.dialogue = self._config.dialogue_of(self.task)
        return tuple(self.dialogue)

    async def step(self, message: Message) -> Observation:
        observation = await super().step(message)
        self.dialogue += [message, *observation.messages]
        if not observation.done:
            return observation
        self._score, counters = await self.scorer.score(self.task, self.answer, self.dialogue)
        return Observation(done=True, metrics={**observation.metrics, **counters})

    async def score(self) -> Score:
        if self._score is None:  # a budget ended the episode early
            self._score, _ = await self.scorer.score(self.task, None, self.dialogue)
        return self._score


@dataclass(frozen=True, kw_only=True)
class MCPConfig(ServerAddress, _ScoredTasks):
    """Tasks from a file, answered with the tools of an MCP server. Needs the extra `mcp`."""

    tools: tuple[str, ...] = ()
    """Names of the tools that the model gets. Empty: all."""
    server: Literal["shared", "episode"] = "shared"
    """shared: one server for all episodes. episode: a process for each, started by command, for
    tools that change something."""
    start_seconds: ClassVar[float] = 120.0
    """Seconds for a server to start, or to be connected, and to list its tools."""

    def __post_init__(self) -> None:
        ServerAddress.__post_init__(self)
        _ScoredTasks.__post_init__(self)
        if self.server == "episode" and self.url:
            raise ConfigError(
                "server=episode starts a process for each episode, and a url names a running "
                "server. Give command, or server=shared."
            )

    def check(self) -> None:
        """Also starts the server, and lists its tools."""
        super().check()
        run_to_end(self._start_once())

    async def _start_once(self) -> None:
        server = self._server_for_episode()
        await server.tools()
        if server is not self._shared:
            await server.close()

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        return MCPEnvironment(self, task, self._server_for_episode(), ToolLimits.of(agent))

    async def close(self) -> None:
        """Ends the shared server, if it was started."""
        await super().close()
        await self._shared.close()

    def _server_for_episode(self) -> ToolServer:
        return self._shared if self.server == "shared" else self._new_server()

    def _new_server(self) -> ToolServer:
        return ToolServer(
            self, only=self.tools, start_seconds=self.start_seconds, offered=self._offered
        )

    @cached_property
    def _shared(self) -> ToolServer:
        return self._new_server()

    @cached_property
    def _offered(self) -> Offered:
        """Tools of the first start, which every later start must offer too."""
        return {}


class MCPEnvironment(QuestionEnvironment):
    """One task, with the tools of a server."""

    def __init__(
        self, config: MCPConfig, task: Task, server: ToolServer, limits: ToolLimits
    ) -> None:
        super().__init__(config, task, limits)
        self._server, self._is_own = server, config.server == "episode"
        self.tools = server.known_tools()

    async def reset(self) -> Sequence[Message]:
        self.tools = await self._server.tools(call_seconds=self.limits.timeout_seconds)
        return await super().reset()

    async def close(self) -> None:
        if self._is_own:
            await self._server.close()
