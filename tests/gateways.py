"""A gateway for tests: scripted replies, a server in a thread of its own, any client against it."""

from __future__ import annotations

import asyncio
import http.client
import json
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from lockstep.agent.gateway.config import GatewayConfig
from lockstep.agent.gateway.registry import SessionRegistry
from lockstep.agent.gateway.server import GatewayServer
from lockstep.agent.gateway.session import GatewaySession
from lockstep.agent.turns import Budget, TurnSampler
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig
from lockstep.testing.engines import FakeEngine, fake_logprob
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Delta, Message, Request, SamplingParams, Task, ToolCall, Trajectory

MODEL = "tiny-test"
Script = Callable[[str], Message]
"""The reply to a prompt, in words. May raise what an engine raises."""


def says(content: str = "", *, thinking: str = "", **calls: str) -> Message:
    """An assistant's message; calls: function=arguments."""
    made = tuple(ToolCall(name=name, arguments=text) for name, text in calls.items())
    return Message(role="assistant", content=content, thinking=thinking, tool_calls=made)


def renderer() -> ChatMLRenderer:
    return ChatMLRenderer(byte_tokenizer(), ChatMLConfig(has_empty_thinking=False))


class SlowEngine(FakeEngine):
    """`delay`: seconds before each reply."""

    delay = 0.0

    async def _sample(self, request: Request) -> AsyncIterator[Delta]:
        await asyncio.sleep(self.delay)
        async for delta in super()._sample(request):
            yield delta


class Gateway:
    """A server over scripted replies, from `with` to its end."""

    def __init__(
        self,
        script: Script,
        *,
        config: GatewayConfig | None = None,
        key: str = "",
        max_tokens: int = 20_000,
    ) -> None:
        self.renderer = renderer()
        self.engine = SlowEngine(self._reply)
        self.finished: list[GatewaySession] = []
        self.sessions = SessionRegistry(self._make, on_finished=self.finished.append)
        self.server = GatewayServer(
            self.sessions, renderer=self.renderer, model=MODEL, config=config, key=key
        )
        self._script, self._max_tokens = script, max_tokens
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Gateway:
        self._thread.start()
        self.call(self.server.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, work: Any) -> Any:
        """Runs a coroutine where the server runs."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def _reply(self, request: Request) -> list[int]:
        said = self._script(self.renderer.tokenizer.decode(request.prompt_ids.tolist()))
        return self.renderer.render_reply(said)

    def _make(self, task: Task | None) -> GatewaySession:
        sampler = TurnSampler(
            self.engine,
            self.renderer,
            Trajectory(id=secrets.token_hex(4), task_id=task.id if task else ""),
            sampling=SamplingParams(max_tokens=1024),
            budget=Budget(max_tokens=self._max_tokens, max_turns=1000),
        )
        return GatewaySession(sampler, seed=1, rule="client")

    def check_exact(self, session_id: str, *, num_turns: int) -> None:
        """The session is one path of so many turns, and what the engine was sent and sampled
        stands in it, id by id."""
        trajectory = self.sessions.get(session_id).trajectory
        assert len(trajectory.leaves()) == 1, trajectory.segments
        assert trajectory.num_turns == num_turns
        [leaf] = trajectory.leaves()
        row = trajectory.row(leaf)
        sent = [r for r in self.engine.requests if r.affinity == trajectory.id]
        assert len(sent) == num_turns
        for request in sent:
            prompt = request.prompt_ids.tolist()
            assert row.token_ids[: len(prompt)].tolist() == prompt
            sampled = self._reply(request)
            end = len(prompt) + len(sampled)
            assert row.token_ids[len(prompt) : end].tolist() == sampled
            assert row.loss_mask[len(prompt) : end].all()
            expected = [fake_logprob(id_, len(prompt) + at) for at, id_ in enumerate(sampled)]
            found = row.columns["rollout_logprobs"][len(prompt) : end]
            assert found.tolist() == np.array(expected, np.float32).tolist()
        assert int(row.loss_mask.sum()) == trajectory.num_sampled_tokens
        encoded = trajectory.metrics["tokens/encoded"]
        assert encoded + trajectory.num_sampled_tokens == len(row.token_ids)

    @property
    def url(self) -> str:
        return self.server.url

    def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        """(status, JSON). body: JSON-able, or bytes that are sent as they are. headers: with _ for
        each hyphen."""
        status, raw, _ = self.ask_raw(method, path, body, **headers)
        return status, json.loads(raw) if raw else {}

    def ask_raw(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, bytes, Mapping[str, str]]:
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=30)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return response.status, response.read(), response.headers
        finally:
            connection.close()

    def chat(self, *messages: dict[str, Any], path: str = "", **more: Any) -> dict[str, Any]:
        """A turn that is answered, by chat completions. path: before /v1."""
        body = {"model": MODEL, "messages": list(messages), **more}
        status, found = self.ask("POST", f"{path}/v1/chat/completions", body)
        assert status == 200, found
        return found
