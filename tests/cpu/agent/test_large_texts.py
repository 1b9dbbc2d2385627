"""A large text is refused by its length if it cannot fit; if it can, it delays nobody else."""

import asyncio
import sys
import threading
from pathlib import Path

import pytest
from playing import all_groups

from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.gateway.exchange import Refusal, TurnRequest
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig
from lockstep.renderers.large_texts import LOOP_CHARS
from lockstep.testing.engines import FakeEngine
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, Task, ToolCall

sys.path.append(str(Path(__file__).parent / "gateway"))
from gateway_sessions import check, make_session, said, user

LARGE = "x" * (4 * LOOP_CHARS)
CALL = said("", ToolCall(name="look", arguments="{}"))


class Reads(Environment):
    """Begins with one text, and answers the first reply with another."""

    def __init__(self, prompt: str, seen: str) -> None:
        self.prompt, self.seen = prompt, seen

    async def reset(self):
        return [Message(role="user", content=self.prompt)]

    async def step(self, message):
        if not message.tool_calls:
            return Observation(done=True)
        return Observation(messages=[Message(role="tool", name="look", content=self.seen)])

    async def score(self):
        return Score(reward=1.0)


@pytest.fixture
def renderer():
    return ChatMLRenderer(byte_tokenizer(), ChatMLConfig())


def calls_once(renderer):
    call, answer = (renderer.render_reply(message) for message in (CALL, said("done")))
    needle = bytes(str(call), "ascii")[1:-1]
    return lambda r: answer if needle in bytes(str(r.prompt_ids.tolist()), "ascii") else call


def play(renderer, environments, *, max_tokens):
    """The trajectories of one group, an episode per environment."""
    left = iter(environments)
    groups = asyncio.run(
        all_groups(
            FakeEngine(calls_once(renderer)), renderer, lambda task: next(left), [Task(id="task")],
            group_size=len(environments), max_tokens=max_tokens,
        )
    )  # fmt: skip
    return groups[0].trajectories


@pytest.fixture
def slow(renderer, monkeypatch):
    """Makes the encoding of large texts last until `ended` is set; keeps the threads of it."""
    tokenizer, threads = renderer.tokenizer, []
    encode, ended = tokenizer._encode, threading.Event()

    def slowly(text):
        if len(text) > LOOP_CHARS:
            threads.append(threading.current_thread())
            assert ended.wait(60), "the others wait for the large text"
        return encode(text)

    monkeypatch.setattr(tokenizer, "_encode", slowly)
    return ended, threads


def test_a_prompt_that_cannot_fit_is_never_encoded(renderer):
    before = renderer.tokenizer.num_encoded
    huge, small = play(renderer, [Reads("x" * 5_000_000, ""), Reads("go", "ok")], max_tokens=2000)
    assert huge.status == "failed" and small.status == "finished"
    assert "the prompt has at least 5000" in huge.error and "may have 2000" in huge.error
    assert renderer.tokenizer.num_encoded - before < 2000


def test_a_tool_result_that_cannot_fit_ends_the_episode_as_truncated(renderer):
    (huge,) = play(renderer, [Reads("go", "x" * 5_000_000)], max_tokens=2000)
    assert (huge.status, huge.num_turns) == ("truncated", 1)
    assert huge.error.startswith("max_tokens: the next turn would begin at token 500")
    assert huge.error.endswith("or later of 2000")
    assert len(list(huge.rows())) == 1, "what was sampled before is trained"


def test_other_episodes_go_on_while_a_large_text_is_encoded(renderer, slow):
    ended, threads = slow

    class Ends(Reads):
        async def score(self):
            ended.set()
            return Score(reward=1.0)

    large, small = play(renderer, [Reads("go", LARGE), Ends("go", "ok")], max_tokens=1 << 20)
    assert large.status == small.status == "finished"
    assert all(thread is not threading.main_thread() for thread in threads)
    (result,) = (s for s in large.segments if s.messages and s.messages[0].content == LARGE)
    wanted = renderer.extend(renderer.render_reply(CALL), result.messages)
    assert result.token_ids.tolist() == wanted
    assert large.metrics["tokens/encoded"] == len(large.segments[0].token_ids) + len(wanted)


def test_one_request_of_a_session_does_not_delay_another(renderer, slow):
    ended, threads = slow
    engine = FakeEngine(lambda request: renderer.render_reply(said("done")))

    async def run():
        session = make_session(engine, renderer=renderer, max_tokens=1 << 20)
        first = [user(LARGE)]
        large = asyncio.create_task(session.reply(TurnRequest(messages=tuple(first))))
        await asyncio.sleep(0)
        dialogue = [user("hello")]
        for _ in range(3):  # turns that change the tree while the large text is encoded
            reply = await session.reply(TurnRequest(messages=tuple(dialogue)))
            dialogue += [reply.message, user("and then?")]
        ended.set()
        reply = await large
        again = TurnRequest(messages=(*first, reply.message, user("and then?")))
        await session.reply(again)
        await session.set_reward(1.0, parts={})
        await session.finish()
        return session.trajectory

    trajectory = asyncio.run(run())
    check(trajectory, engine)
    assert trajectory.num_turns == 5
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
    (root,) = (s for s in trajectory.segments if s.messages and s.messages[0].content == LARGE)
    assert root.token_ids.tolist() == renderer.render([user(LARGE)], [])


def test_a_session_refuses_a_dialogue_by_its_length(renderer):
    async def run():
        engine = FakeEngine(lambda request: renderer.render_reply(said("done")))
        session = make_session(engine, renderer=renderer, max_tokens=2000)
        request = TurnRequest(messages=(user("x" * 5_000_000),))
        for ask in (session.reply, session.count_tokens):
            with pytest.raises(Refusal, match=r"token 5000\d*.*2000") as refused:
                await ask(request)
            assert refused.value.code == "context_overflow"
        await session.finish()

    before = renderer.tokenizer.num_encoded
    asyncio.run(run())
    assert renderer.tokenizer.num_encoded == before
