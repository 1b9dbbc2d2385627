"""The task kind `mcp`: the user's tasks from a file, with the tools of an MCP server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment
from lockstep.agent.mcp import ServerAddress, ToolServer
from lockstep.agent.tools import Tool, ToolLimits
from lockstep.config import check_numbers
from lockstep.envs.questions import QuestionEnvironment, _ScoredTasks
from lockstep.errors import ConfigError
from lockstep.types import Message, Task


@dataclass(frozen=True, kw_only=True)
class MCPConfig(_ScoredTasks):
    """Tasks from a file, answered with the tools of an MCP server. Needs the extra `mcp`."""

    TAG: ClassVar[str] = "mcp"

    command: str = ""
    """Command that starts a server on its standard input and output, without a shell. `python` is
    the interpreter that runs Lockstep."""
    url: str = ""
    """Address of a running server (streamable HTTP), instead of command."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the model gets. Empty: all."""
    server: Literal["shared", "episode"] = "shared"
    """shared: one server for all episodes. episode: a process for each, started by command, for
    tools that change something."""
    start_seconds: float = 30.0
    """Seconds for a server to start, or to be connected, and to list its tools."""
    pass_variables: tuple[str, ...] = ()
    """Environment variables for the command, in addition to PATH, HOME and the like."""
    token_variable: str = ""
    """Environment variable with the bearer token for the URL."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._address
        if self.server == "episode" and self.url:
            raise ConfigError(
                "server=episode starts a process for each episode, and a url names a running "
                "server. Give command, or server=shared."
            )
        check_numbers(self, "", "start_seconds")

    def check(self) -> None:
        """Also starts the server, and lists its tools."""
        super().check()
        self._address.variables()
        _ = self._offered

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        is_own = self.server == "episode"
        server = self._new_server(expected=self._offered) if is_own else self._shared
        return MCPEnvironment(self, task, server, ToolLimits.of(agent))

    async def close(self) -> None:
        """Ends the shared server, if it was started."""
        await super().close()
        if "_shared" in self.__dict__:
            await self._shared.close()

    @property
    def _address(self) -> ServerAddress:
        return ServerAddress(
            command=self.command,
            url=self.url,
            pass_variables=self.pass_variables,
            token_variable=self.token_variable,
        )

    def _new_server(self, expected: Sequence[Tool] | None = None) -> ToolServer:
        return ToolServer(
            self._address, only=self.tools, start_seconds=self.start_seconds, expected=expected
        )

    @cached_property
    def _shared(self) -> ToolServer:
        return self._new_server()

    @cached_property
    def _offered(self) -> tuple[Tool, ...]:
        """Tools of the first start, which every later start must offer too."""
        if self.server == "shared":
            return self._shared.tools_now()
        server = self._new_server()
        try:
            return server.tools_now()
        finally:
            server.close_now()


class MCPEnvironment(QuestionEnvironment):
    """One task, with the tools of a server."""

    def __init__(
        self, config: MCPConfig, task: Task, server: ToolServer, limits: ToolLimits
    ) -> None:
        super().__init__(config, task, limits)
        self._server, self._is_own = server, config.server == "episode"
        self.tools = config._offered  # until `reset` binds them to a running server

    async def reset(self) -> Sequence[Message]:
        self.tools = await self._server.tools(call_seconds=self.limits.timeout_seconds)
        return await super().reset()

    async def close(self) -> None:
        if self._is_own:
            await self._server.close()
