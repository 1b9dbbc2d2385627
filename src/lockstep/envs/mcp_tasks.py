"""The task kind `mcp`: the user's tasks from a file, with the tools of an MCP server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment
from lockstep.agent.mcp import Offered, ServerAddress, ToolServer
from lockstep.agent.tools import ToolLimits
from lockstep.envs.questions import QuestionEnvironment, _ScoredTasks
from lockstep.errors import ConfigError
from lockstep.launch.event_loop import run_to_end
from lockstep.types import Message, Task


@dataclass(frozen=True, kw_only=True)
class MCPConfig(ServerAddress, _ScoredTasks):
    """Tasks from a file, answered with the tools of an MCP server. Needs the extra `mcp`."""

    TAG: ClassVar[str] = "mcp"

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
