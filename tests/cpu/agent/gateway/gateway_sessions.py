"""Sessions of the gateway for tests: an agent's side in words, and what must hold of every one."""

import asyncio
import json
from collections.abc import Sequence

import numpy as np

from lockstep.agent.gateway.exchange import TurnReply, TurnRequest
from lockstep.agent.gateway.session import GatewaySession
from lockstep.agent.turns import Budget, TurnSampler
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig
from lockstep.testing.engines import FakeEngine
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, SamplingParams, ToolCall, ToolSchema, Trajectory

RENDERER = ChatMLRenderer(byte_tokenizer(), ChatMLConfig())
LOOK = ToolSchema(name="look", description="Looks.", parameters={"type": "object"})


def system(text: str) -> Message:
    return Message(role="system", content=text)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(text: str, *calls: ToolCall, thinking: str = "") -> Message:
    return Message(role="assistant", content=text, tool_calls=calls, thinking=thinking)


def seen(text: str, call: ToolCall) -> Message:
    return Message(role="tool", name=call.name, tool_call_id=call.id, content=text)


def look(**arguments) -> ToolCall:
    return ToolCall(name="look", arguments=json.dumps(arguments))


def turns(*messages: Message | list[int], renderer=RENDERER):
    """A policy that says these one after the other, and the last one for ever."""
    given: list[int] = []

    def reply(request) -> Sequence[int]:
        message = messages[min(len(given), len(messages) - 1)]
        given.append(1)
        return message if isinstance(message, list) else renderer.render_reply(message)

    return reply


def make_session(engine, *, renderer=RENDERER, max_tokens=1 << 18, max_turns=256, **options):
    sampler = TurnSampler(
        engine,
        renderer,
        Trajectory(id="s"),
        sampling=options.pop("sampling", SamplingParams(max_tokens=4096)),
        budget=Budget(max_tokens=max_tokens, max_turns=max_turns, max_turn_tokens=4096),
    )
    return GatewaySession(sampler, seed=1, **options)


class Agent:
    """What a client does: it keeps messages, and sends them all again for each turn."""

    def __init__(self, session: GatewaySession, *, tools: Sequence[ToolSchema] = ()) -> None:
        self.session, self.tools = session, tuple(tools)
        self.messages: list[Message] = []

    async def ask(self, *new: Message, **fields) -> TurnReply:
        self.messages += new
        request = TurnRequest(messages=tuple(self.messages), tools=self.tools, **fields)
        reply = await self.session.reply(request)
        self.messages.append(reply.message)
        return reply


def play(engine, script, *, reward: float | None = 1.0, **options) -> Trajectory:
    """Runs `script(agent)` on a session, finishes it, and checks what holds of every session."""

    async def main() -> GatewaySession:
        session = make_session(engine, **options)
        await script(Agent(session))
        if reward is not None:
            await session.set_reward(reward, parts={})
        await session.finish()
        return session

    session = asyncio.run(main())
    check(session.trajectory, engine)
    return session.trajectory


def check(trajectory: Trajectory, engine: FakeEngine) -> None:
    """Every path is what the engine saw, and every sampled token of rewarded leaves is trained
    once."""
    asked = {}
    for request in engine.requests:
        asked.setdefault(request.prompt_ids.tobytes(), []).append(request)
    for index, segment in enumerate(trajectory.segments):
        if segment.is_sampled:
            before = trajectory.segments[segment.parent]
            if before.finish_reason == "weight_update":  # it goes on in the same request
                continue
            prompt = trajectory.path_ids(segment.parent)
            assert prompt.tobytes() in asked, f"segment {index} was never asked for"
    trained: list[int] = []
    for row in trajectory.rows():
        trained += row.segments
        assert row.num_trained == sum(len(trajectory.segments[i]) for i in row.segments)
    assert len(trained) == len(set(trained))
    above = {i for leaf in trajectory.rewards for i in trajectory.path(leaf)}
    sampled = {i for i in above if trajectory.segments[i].is_sampled}
    assert sampled == set(trained)


def reasons(trajectory: Trajectory) -> list[str]:
    return [s.reason for s in trajectory.segments if s.reason]


def text(ids) -> str:
    return RENDERER.tokenizer.decode(np.asarray(ids).tolist())
