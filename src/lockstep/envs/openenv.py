"""The task kind `openenv`: environments of OpenEnv, served over a WebSocket.

The protocol is implemented here, so that neither OpenEnv nor the code of an environment need be
installed with the trainer. Source: openenv 0.10.0, core/env_server/http_server.py (`/ws`,
`/schema`) and types.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.json_schema import schema_problem
from lockstep.agent.task_config import AskedTasks, Split
from lockstep.agent.tasks import GeneratedSource, TaskSource
from lockstep.agent.tools import Tool, ToolLimits, ToolOutput, ToolRunner, unreadable
from lockstep.config import ABOVE_0, did_you_mean
from lockstep.engines.http import HttpClient
from lockstep.errors import ConfigError, ToolServerError, require_package
from lockstep.types import Message, Task

MAX_MESSAGE_BYTES = 64 << 20
FULL_PAUSE_SECONDS = 0.2
"""Seconds between two attempts at a server without a free session."""
HIDDEN = ("metadata",)
"""Fields of actions and observations that the model does not see."""


@dataclass(frozen=True, kw_only=True)
class OpenEnvConfig(AskedTasks):
    """An environment of OpenEnv on a running server. Each episode has its own session, and its
    reward comes from the steps. Needs the extra `http`."""

    TAG: ClassVar[str] = "openenv"

    url: str = ""
    """Address of the server: http://HOST:PORT."""
    action_field: str = ""
    """Field of the server's action that a reply becomes. Empty: the model has the tool `act`, whose
    arguments are the fields."""
    observation_field: str = ""
    """Field of an observation that the model reads. Empty: the whole observation, as JSON."""
    reset: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of each reset, in addition to the seed: task.reset.level=3."""
    reward: Literal["sum", "last"] = "sum"
    """Reward of an episode: the sum of its steps' rewards, or the last one."""
    step_seconds: Annotated[float, ABOVE_0] = 60.0
    """Seconds for a reset or a step; a slower server fails the episode."""
    queue_seconds: ClassVar[float] = 600.0
    """Seconds that an episode waits for a free session."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "seed" in self.reset:
            raise ConfigError("reset.seed: it is the task's. Leave it out (seed=N is above).")

    def check(self) -> None:
        """Requests the schema of actions from the server."""
        if not self.url:
            raise ConfigError("url is empty: give the server, task.url=http://HOST:PORT.")
        fields = self._schema["properties"]
        if (name := self.action_field) and name not in fields:
            hint = did_you_mean(name, fields)
            raise ConfigError(f"action_field={name}: no such field of its actions.{hint}")
        required = self._schema.get("required", ())
        others = [each for each in fields if each in required and each != name]
        if name and others:
            raise ConfigError(
                f"action_field={name}: an action must have {', '.join(others)} too, and a reply is "
                "one field. Leave action_field out: a call of the tool has all of them."
            )

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        """Endless. A task is a seed for the server's reset. The splits draw different seeds;
        whether these are different tasks depends on the environment."""

        def make(task_seed: int, index: int) -> Task:
            own = task_seed % 2**30 * 2 + (split == "eval")  # odd seeds are held out
            return Task(id=f"openenv-{own:08x}", payload={"seed": own})

        return GeneratedSource(make, seed=seed, split=split)

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        return OpenEnvEnvironment(self, task, ToolLimits.of(agent))

    @cached_property
    def _schema(self) -> dict[str, Any]:
        """Schema of an action, without the hidden fields."""
        client = HttpClient(self.url.rstrip("/"), name="openenv", request_seconds=self.step_seconds)
        answer = client.call_now("/schema")
        action = answer.get("action") if isinstance(answer, Mapping) else None
        if not isinstance(action, Mapping):
            raise ToolServerError(
                f"{self.url}/schema has no schema of actions: {json.dumps(answer)[:200]}. Is it a "
                "server of OpenEnv in simulation mode?"
            )
        if problem := schema_problem(action):
            raise ToolServerError(f"{self.url}: the schema of its actions is invalid: {problem}.")
        fields = {k: v for k, v in action.get("properties", {}).items() if k not in HIDDEN}
        # `title` is the name of a Python class.
        return {k: v for k, v in action.items() if k != "title"} | {"properties": fields}


class OpenEnvEnvironment(Environment):
    """One session on the server."""

    def __init__(self, config: OpenEnvConfig, task: Task, limits: ToolLimits) -> None:
        self.config, self.task, self.limits = config, task, limits
        self.tools: Sequence[Tool] = ()
        self.rewards: list[float] = []
        self._is_over = False
        if not config.action_field:
            schema = config._schema
            act = Tool(
                name="act",
                description=schema.get("description", "").strip() or "Acts in the environment.",
                parameters={k: v for k, v in schema.items() if k != "description"},
                function=self._act,
                bounds_itself=True,
            )
            self.tools = (act,)
        self._runner = ToolRunner(self.tools, limits)
        self._http: Any = None
        self._socket: Any = None

    async def reset(self) -> Sequence[Message]:
        sent = {**self.config.reset, "seed": self.task.payload["seed"]}
        first = await self._opened(sent)
        if first.get("done"):
            raise ToolServerError(f"{self.config.url}: the episode is over before its first step.")
        return self.config.asked(self._text(first))

    async def step(self, message: Message) -> Observation:
        if message.parse_error:
            return Observation(messages=(unreadable(message),))
        if self.config.action_field:
            output = await self._act(**{self.config.action_field: message.content})
            reply = Message(role="user", content=output.text)
            return Observation(messages=(reply,), done=self._is_over, metrics=output.metrics)
        if not message.tool_calls:
            return Observation(done=True, metrics={"openenv/gave_up": 1.0})
        replies: list[Message] = []
        totals: Counter[str] = Counter()
        for call in message.tool_calls:
            (reply,), counters = await self._runner.run((call,))
            totals.update(counters)
            if self._is_over:
                return Observation(done=True, metrics=totals)
            replies.append(reply)
        return Observation(messages=replies, metrics=totals)

    async def score(self) -> Score:
        rewards = self.rewards or [0.0]
        reward = sum(rewards) if self.config.reward == "sum" else rewards[-1]
        return Score(reward=reward, parts={"environment": reward})

    async def close(self) -> None:
        for each in (self._socket, self._http):
            if each is not None:
                await each.close()

    async def _act(self, /, **action: Any) -> ToolOutput:
        """One step of the server."""
        kind, data = await self._ask("step", action)
        if kind == "error":
            return ToolOutput(text=f"error: {_words_of(data)}", metrics={"openenv/refused": 1.0})
        reward = data.get("reward")
        if reward is not None:
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise ToolServerError(f"{self.config.url}: the reward {reward!r} is not a number.")
            self.rewards.append(float(reward))
        self._is_over = bool(data.get("done"))
        return ToolOutput(text=self._text(data))

    def _text(self, data: Mapping[str, Any]) -> str:
        """Text of an observation for the model."""
        observation = data["observation"]
        name = self.config.observation_field
        if name and name not in observation:
            raise ToolServerError(
                f"{self.config.url}: an observation has no field {name!r} "
                f"(observation_field).{did_you_mean(name, observation)}"
            )
        visible = {k: v for k, v in observation.items() if k not in HIDDEN}
        shown = observation[name] if name else visible
        text = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
        return self.limits.shown(text)

    async def _opened(self, sent: Mapping[str, Any]) -> Mapping[str, Any]:
        """Opens a session and returns its first observation. Waits for a free session."""
        require_package("aiohttp", extra="http", needed_for="task=openenv")
        import aiohttp

        self._http = aiohttp.ClientSession()
        url = self.config.url.rstrip("/") + "/ws"
        deadline = asyncio.get_running_loop().time() + self.config.queue_seconds
        while True:
            try:
                async with asyncio.timeout(self.config.step_seconds):
                    self._socket = await self._http.ws_connect(url, max_msg_size=MAX_MESSAGE_BYTES)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise ToolServerError(f"{url}: no connection: {error}.") from error
            kind, data = await self._ask("reset", sent)
            if kind != "error":
                return data
            await self._socket.close()
            if data.get("code") != "CAPACITY_REACHED":
                raise ToolServerError(f"{url}: reset failed: {_words_of(data)}.")
            if asyncio.get_running_loop().time() >= deadline:
                raise ToolServerError(
                    f"{url}: no session was free for {self.config.queue_seconds:g} s: "
                    f"{_words_of(data)}. Let the server have more (max_concurrent_envs), or set "
                    "agent.max_in_flight."
                )
            await asyncio.sleep(FULL_PAUSE_SECONDS)

    async def _ask(self, kind: str, sent: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """("observation" or "error", its data). Raises ToolServerError for any other answer."""
        where, seconds = self.config.url, self.config.step_seconds
        try:
            async with asyncio.timeout(seconds):
                # A server that refuses the session sends the reason and closes before it reads.
                with contextlib.suppress(ConnectionError):
                    await self._socket.send_json({"type": kind, "data": dict(sent)})
                answer = await self._socket.receive()
        except TimeoutError:
            raise ToolServerError(f"{where}: no answer to {kind} within {seconds:g} s.") from None
        if not isinstance(answer.data, str):
            raise ToolServerError(f"{where}: the connection ended at {kind}. See the server's log.")
        with contextlib.suppress(ValueError):
            match json.loads(answer.data):
                case {"type": "error", "data": dict() as data}:
                    return "error", data
                case {"type": "observation", "data": {"observation": dict()} as data}:
                    return "observation", data
        raise ToolServerError(f"{where}: answered {kind} with {answer.data[:200]!r}.")


def _words_of(data: Mapping[str, Any]) -> str:
    """The message of an error, with the places that it names."""
    text, errors = str(data.get("message", "refused")), data.get("errors")
    places = [e for e in errors if isinstance(e, Mapping)] if isinstance(errors, list) else []
    shown = [f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg', '')}" for e in places]
    return f"{text} ({'; '.join(shown)})" if shown else text
