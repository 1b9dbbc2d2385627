"""Sessions under random clients: whatever an agent does to its history, every path is what the
engine saw, and no sampled token is trained twice."""

import asyncio
from dataclasses import dataclass, replace

import pytest
from gateway_sessions import Agent, check, look, make_session, said, seen, system, user
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.agent.gateway.exchange import Refusal, TurnRequest
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig
from lockstep.testing.engines import FakeEngine
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message

TOKENIZER = byte_tokenizer()
RENDERERS = {
    policy: ChatMLRenderer(TOKENIZER, ChatMLConfig(thinking=policy)) for policy in ("keep", "drop")
}
ANSWERS = (
    said("short"),
    said("a longer answer than that one", thinking="let me think"),
    said("", look(at="a"), thinking="I look"),
    said("both: ", look(at="b"), look(at="c")),
)


@dataclass(frozen=True)
class Step:
    """One thing that a client does before it asks."""

    kind: str
    at: int
    text: str
    max_tokens: int | None
    is_repeated: bool


KINDS = (
    "user", "user", "user", "retry", "edit", "cut", "trim", "complete", "compact", "new", "insert",
    "rename", "drop thinking", "twice",
)  # fmt: skip
STEPS = st.builds(
    Step,
    kind=st.sampled_from(KINDS),
    at=st.integers(0, 9),
    text=st.sampled_from(["a", "bc", "<|im_end|>", "\n", "what now"]),
    max_tokens=st.sampled_from([None, None, None, 1, 4, 12]),
    is_repeated=st.booleans(),
)


def change(messages: list[Message], step: Step) -> list[Message]:
    """The client's history after `step`; it ends with something to answer."""
    out = list(messages)
    replies = [at for at, message in enumerate(out) if message.role == "assistant"]
    last = replies[step.at % len(replies)] if replies else None
    match step.kind:
        case "retry" if replies:
            del out[replies[-1] :]
        case "edit":
            others = [at for at, message in enumerate(out) if message.role == "user"]
            at = others[step.at % len(others)]
            out[at] = user(step.text)
        case "cut" if last is not None:
            del out[last + 1 :]
        case "trim" if last is not None:
            out[last] = replace(out[last], content=out[last].content[: step.at])
        case "complete" if last is not None:
            out[last] = replace(out[last], content=out[last].content + step.text)
        case "compact" if last is not None:
            out = [*out[:1], user(f"so far: {out[last].content}"), *out[replies[-1] :]]
        case "new":
            out = [system(step.text), user(step.text)]
        case "insert" if last is not None:
            out.insert(last, said("told by the client"))
        case "rename":
            out = [renamed(message, step.text) for message in out]
        case "drop thinking":
            out = [replace(message, thinking="") for message in out]
    end = out[-1]
    if end.role == "assistant":
        out += [seen(step.text, call) for call in end.tool_calls] or [user(step.text)]
    elif step.kind == "user":
        out.append(user(step.text))
    return out


def renamed(message: Message, suffix: str) -> Message:
    calls = tuple(replace(call, id=f"{call.id}{suffix}") for call in message.tool_calls)
    return replace(message, tool_calls=calls, tool_call_id=message.tool_call_id and
                   f"{message.tool_call_id}{suffix}")  # fmt: skip


def assert_told_in_order(prompt: str, messages: list[Message]) -> None:
    """Whatever was reused or encoded: the model reads the dialogue that the client told."""
    at = 0
    for message in messages:
        found = prompt.find(message.content.strip(), at)
        assert found >= 0, f"{message.content!r} is not in {prompt[at:]!r}"
        at = found + len(message.content.strip())


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=12),
    policy=st.sampled_from(["keep", "drop"]),
    answers=st.lists(st.integers(0, len(ANSWERS) - 1), min_size=1, max_size=6),
)
def test_every_path_is_what_the_engine_saw_and_no_token_is_trained_twice(steps, policy, answers):
    renderer = RENDERERS[policy]
    num_given = 0

    def reply(request):
        nonlocal num_given
        num_given += 1
        return renderer.render_reply(ANSWERS[answers[num_given % len(answers)]])

    engine = FakeEngine(reply, tokens_per_step=7)
    session = make_session(engine, renderer=renderer)

    async def main():
        agent = Agent(session)
        agent.messages = [system("s"), user("begin")]
        for number, step in enumerate(steps):
            agent.messages = change(agent.messages, step) if number else agent.messages
            request = TurnRequest(
                messages=tuple(agent.messages), max_tokens=step.max_tokens, key=f"k{number}"
            )
            times = 2 if step.kind == "twice" else 1
            keys = [request.key if step.is_repeated else f"k{number}/{n}" for n in range(times)]
            replies = await asyncio.gather(
                *(session.reply(replace(request, key=key)) for key in keys)
            )
            for each in replies:
                path = session.trajectory.path_ids(each.leaf).tolist()
                assert path == [*each.prompt_ids.tolist(), *each.token_ids.tolist()]
                assert each.num_reused_tokens <= len(each.prompt_ids)
                assert_told_in_order(TOKENIZER.decode(each.prompt_ids.tolist()), agent.messages)
            assert len({each.leaf for each in replies}) == len(set(keys))
            agent.messages.append(replies[-1].message)
        await session.set_reward(1.0, parts={})
        await session.finish()

    asyncio.run(main())
    check(session.trajectory, engine)
    assert session.trajectory.num_turns == len(engine.requests)


async def test_an_agent_that_goes_on_as_it_was_told_never_branches():
    renderer = RENDERERS["keep"]
    given = iter(range(1 << 20))
    engine = FakeEngine(lambda request: renderer.render_reply(ANSWERS[next(given) % len(ANSWERS)]))
    session = make_session(engine, renderer=renderer)
    agent = Agent(session)
    reply = await agent.ask(user("begin"))
    for turn in range(20):
        calls = reply.message.tool_calls
        new = [seen(f"word {turn}", call) for call in calls] or [user("go on")]
        reply = await agent.ask(*new)
        assert reply.reason == ""
    with pytest.raises(Refusal):
        await agent.ask()
    assert len(session.trajectory.leaves()) == 1
