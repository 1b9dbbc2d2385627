"""A session's budgets, rewards and end; what it costs; and the registry of all sessions."""

import asyncio
import math
import time
import tracemalloc
from dataclasses import replace

import pytest
from gateway_sessions import RENDERER, Agent, look, make_session, play, said, seen, turns, user
from playing import steps_of

from lockstep.agent.gateway.exchange import Refusal, TurnRequest
from lockstep.agent.gateway.registry import SessionRegistry
from lockstep.agent.gateway.session import GatewaySession
from lockstep.testing.engines import FakeEngine
from lockstep.types import Message, SamplingParams


async def refused(awaitable) -> tuple[int, str]:
    with pytest.raises(Refusal) as refusal:
        await awaitable
    return refusal.value.status, refusal.value.code


# -- figures ----------------------------------------------------------------------------------


def converse(num_turns: int) -> tuple[FakeEngine, GatewaySession]:
    engine = FakeEngine(turns(RENDERER.render_reply(said("", look(at="the river"), thinking="hm"))))
    session = make_session(engine, max_turns=1 << 20, max_tokens=1 << 19)

    async def main() -> None:
        agent = Agent(session)
        reply = await agent.ask(user("begin"))
        for turn in range(num_turns - 1):
            reply = await agent.ask(seen(f"word {turn:5d}", reply.message.tool_calls[0]))

    asyncio.run(main())
    return engine, session


def test_the_tokens_encoded_over_128_turns_are_the_new_tokens():
    before = RENDERER.tokenizer.num_encoded
    engine, session = converse(128)
    encoded = RENDERER.tokenizer.num_encoded - before
    trajectory = session.trajectory
    observed = [id_ for s in trajectory.segments if not s.is_sampled for id_ in s.token_ids]
    of_reply = sum(
        id_ not in RENDERER.tokenizer.control_ids for id_ in trajectory.segments[1].token_ids
    )
    control = RENDERER.tokenizer.control_ids
    assert encoded == sum(id_ not in control for id_ in observed) + of_reply  # the script's own
    assert trajectory.metrics["tokens/encoded"] == len(observed)
    assert len(trajectory.leaves()) == 1 and trajectory.num_turns == len(engine.requests) == 128


def test_memory_is_linear_in_the_tokens_stored():
    per_token: dict[int, float] = {}
    for num_turns in (24, 96):
        tracemalloc.start()
        engine, session = converse(num_turns)
        engine.requests.clear()
        engine._finished.clear()  # what the fake keeps of its requests is not the session's
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        per_token[num_turns] = size / sum(map(len, session.trajectory.segments))
    assert per_token[96] < 1.1 * per_token[24]


# -- budgets ----------------------------------------------------------------------------------


def test_budgets_refuse_with_a_status_and_leave_the_trajectory_truncated():
    async def script(agent):
        await agent.ask(user("a"))
        assert await refused(agent.ask(user("b"))) == (403, "max_turns")

    trajectory = play(FakeEngine(turns(said("x"))), script, max_turns=1)
    assert trajectory.status == "truncated" and trajectory.error == "max_turns: 1 turns are over"
    assert list(trajectory.rewards.values()) == [1.0]


def test_an_overflow_is_refused_and_a_session_that_goes_on_is_not_truncated():
    async def script(agent):
        await agent.ask(user("a"))
        request = TurnRequest(messages=(user("b" * 400),))
        assert await refused(agent.session.reply(request)) == (400, "context_overflow")
        await agent.ask(user("short"))

    trajectory = play(FakeEngine(turns(said("x"))), script, max_tokens=256)
    assert trajectory.status == "finished" and trajectory.num_turns == 2


def test_a_session_whose_time_is_over_refuses_and_a_late_turn_is_cut():
    engine = FakeEngine(turns(said("a" * 400)), tokens_per_step=1, step_seconds=0.002)

    async def script(agent):
        reply = await agent.ask(user("a"))
        assert reply.finish_reason == "abort" and 0 < len(reply.token_ids) < 400
        assert await refused(agent.ask(user("b"))) == (403, "max_seconds")

    trajectory = play(engine, script, deadline=time.monotonic() + 0.1)
    assert trajectory.status == "truncated"


def test_a_dialogue_must_end_with_something_to_answer():
    async def script(agent):
        await agent.ask(user("a"))
        assert await refused(agent.ask()) == (400, "nothing_to_answer")
        empty = TurnRequest(messages=())
        assert await refused(agent.session.reply(empty)) == (400, "nothing_to_answer")

    play(FakeEngine(turns(said("x"))), script)


# -- sampling ---------------------------------------------------------------------------------


def test_the_runs_sampling_rules_and_what_a_client_asked_for_is_counted():
    engine = FakeEngine(turns(said("x")))

    async def script(agent):
        await agent.ask(user("a"), temperature=0.2, top_p=1.0, seed=3, max_tokens=7)

    trajectory = play(engine, script)
    used = engine.requests[0].sampling
    assert used.temperature == 1.0 and used.max_tokens == 7
    ignored = {name for name in trajectory.metrics if name.startswith("gateway/ignored/")}
    assert ignored == {"gateway/ignored/temperature", "gateway/ignored/seed"}


def test_a_clients_sampling_rules_where_nothing_is_trained():
    engine = FakeEngine(turns(said("x")))

    async def script(agent):
        await agent.ask(user("a"), temperature=0.2, top_p=0.5, seed=3)
        assert await refused(agent.ask(user("b"), top_p=2.0)) == (400, "invalid_value")

    play(engine, script, rule="client")
    used = engine.requests[0].sampling
    assert (used.temperature, used.top_p, used.distribution) == (0.2, 0.5, "sampled")


def test_a_stop_string_needs_an_engine_that_can():
    async def script(agent):
        request = TurnRequest(messages=(user("a"),), stop_strings=("\nObs",))
        assert await refused(agent.session.reply(request)) == (400, "unsupported_value")
        await agent.ask(user("a"))

    play(FakeEngine(turns(said("x"))), script)


class StopsAtText(FakeEngine):
    """Says of every reply that the first stop string ended it, as real engines do."""

    def __init__(self, *scripted, **options):
        super().__init__(*scripted, **options)
        self.capabilities = replace(self.capabilities, has_stop_strings=True)

    async def generate(self, request):
        async for delta in super().generate(request):
            ends = delta.finish_reason and request.sampling.stop_strings
            yield replace(delta, finish_reason="stop", stop=ends[0]) if ends else delta


def test_a_client_is_not_told_the_stop_string_and_its_path_goes_on():
    tokenizer = RENDERER.tokenizer
    engine = StopsAtText(turns(tokenizer.encode("act\nObs:"), said("done")))

    async def script(agent):
        reply = await agent.ask(user("a"), stop_strings=("\nObs:",))
        assert agent.messages[-1].content == "act"  # what `told` leaves of it
        assert tokenizer.decode(reply.token_ids.tolist()) == "act\nObs:"  # nothing is trimmed
        assert (await agent.ask(user("seen"))).reason == ""

    trajectory = play(engine, script)
    assert len(trajectory.leaves()) == 1


# -- rewards and the end ------------------------------------------------------------------------


def test_rewards_are_finite_and_for_turns_of_the_session():
    async def script(agent):
        session = agent.session
        first = await agent.ask(user("a"))
        last = await agent.ask(user("b"))
        for bad in (math.nan, math.inf):
            assert await refused(session.set_reward(bad, parts={})) == (400, "invalid_reward")
        assert await refused(session.set_reward(1, parts={"p": math.nan})) == (
            400,
            "invalid_reward",
        )
        assert await refused(session.set_reward(1, parts={}, leaf=0)) == (400, "unknown_leaf")
        assert await refused(session.set_reward(1, parts={}, leaf=99)) == (400, "unknown_leaf")
        await session.set_reward(0.25, parts={}, leaf=first.leaf)
        await session.set_reward(1.0, parts={"right": 1.0})
        await session.set_reward(0.5, parts={"right": 0.5})  # replaces
        assert last.leaf != first.leaf

    trajectory = play(FakeEngine(turns(said("x"))), script, reward=None)
    assert list(trajectory.rewards.values()) == [0.5] and trajectory.reward_parts == {"right": 0.5}
    assert [s.reward for s in trajectory.segments if s.reward is not None] == [0.25]


def test_a_leaf_can_have_a_reward_of_its_own():
    async def script(agent):
        first = await agent.ask(user("a"))
        agent.messages = []
        await agent.ask(user("b"))
        await agent.session.set_reward(1.0, parts={})
        await agent.session.set_reward(-1.0, parts={}, leaf=first.leaf)

    trajectory = play(FakeEngine(turns(said("x"))), script, reward=None)
    assert list(trajectory.rewards.values()) == [-1.0, 1.0]


async def test_a_finished_session_takes_nothing_more():
    session = make_session(FakeEngine(turns(said("x"))))
    await Agent(session).ask(user("a"))
    await session.finish()
    await session.finish()  # nothing differs
    request = TurnRequest(messages=(user("a"),))
    assert await refused(session.reply(request)) == (410, "session_finished")
    assert await refused(session.set_reward(1, parts={})) == (410, "session_finished")
    assert await refused(session.finish(error="late")) == (410, "session_finished")


async def test_a_session_without_a_turn_fails_and_one_that_ends_gives_up_what_runs():
    empty = make_session(FakeEngine(turns(said("x"))))
    await empty.finish()
    assert (empty.trajectory.status, empty.trajectory.error) == (
        "failed",
        "the agent asked for no turn",
    )
    engine = FakeEngine(turns(said("a" * 400)), tokens_per_step=1)
    session = make_session(engine)
    waiting = asyncio.create_task(session.reply(TurnRequest(messages=(user("a"),))))
    await steps_of(engine)
    await session.finish(error="the harness fell over")
    assert await refused(waiting) == (410, "session_finished")
    assert session.trajectory.segments == []


def test_what_cannot_be_written_is_refused_and_the_session_goes_on():
    async def script(agent):
        await agent.ask(user("a"))
        odd = (*agent.messages, user("x"), Message(role="assistant", content="y", thinking="t"))
        reply = await agent.session.reply(TurnRequest(messages=(*odd, user("z"))))
        assert reply.reason == "edited_history"

    play(FakeEngine(turns(said("x"))), script)


# -- all sessions -----------------------------------------------------------------------------


def registry(**options) -> SessionRegistry:
    engine = FakeEngine(turns(said("x")))
    return SessionRegistry(lambda task: make_session(engine), **options)


async def test_sessions_are_found_by_id_and_key_and_only_finished_ones_make_room():
    ended: list[str] = []
    sessions = registry(max_sessions=2, on_finished=lambda s: ended.append(s.id))
    first, second = sessions.create(), sessions.create()
    assert sessions.get(first.id) is first and sessions.of_key(second.key) is second
    assert sessions.of_key("sk-other") is None
    with pytest.raises(Refusal, match="2 sessions") as full:
        sessions.create()
    assert (full.value.status, full.value.code) == (429, "too_many_sessions")
    await Agent(first).ask(user("a"))
    await first.finish()
    third = sessions.create()
    assert ended == [first.id] and list(sessions.all()) == [second, third]
    with pytest.raises(Refusal, match="no session"):
        sessions.get(first.id)
    await sessions.remove(second.id)
    assert second.trajectory.error == "removed before it was finished"
    await sessions.close()
    assert ended == [first.id, second.id, third.id]


async def test_an_idle_session_fails():
    sessions = registry(idle_seconds=0.02)
    session = sessions.create()
    await Agent(session).ask(user("a"))
    await asyncio.wait_for(session.ended.wait(), 60)
    assert session.is_finished and session.trajectory.error.startswith("idle: no request")
    assert session.trajectory.error == "idle: no request for 0.02 s"
    await sessions.close()


async def test_a_runs_sessions_are_claimed_and_not_made():
    sessions = SessionRegistry()
    with pytest.raises(Refusal, match="/claim"):
        sessions.create()
    assert await refused(registry().claim()) == (409, "nothing_to_claim")


def test_counting_tokens_changes_nothing():
    engine = FakeEngine(turns(said("x")))

    async def script(agent):
        first = await agent.ask(user("a"))
        size = await agent.session.count_tokens(TurnRequest(messages=(*agent.messages, user("b"))))
        second = await agent.ask(user("b"))
        assert size == len(second.prompt_ids) > len(first.prompt_ids)
        again = TurnRequest(messages=(user("a"),))
        assert await agent.session.count_tokens(again) == len(first.prompt_ids)

    trajectory = play(engine, script, sampling=SamplingParams(max_tokens=64))
    assert len(trajectory.leaves()) == 1


def test_routes_of_a_session_have_no_gap_on_any_branch():
    def experts(id_: int, position: int) -> list[list[int]]:
        return [[(id_ + position) % 7, 7]]

    engine = FakeEngine(
        turns(said("one", thinking="t"), said("two"), said("three")),
        tokens_per_step=3,
        routes=experts,
    )

    async def script(agent):
        await agent.ask(user("a"))
        both = TurnRequest(messages=(*agent.messages, user("b")))
        await asyncio.gather(agent.session.reply(both), agent.session.reply(both))
        agent.messages[-1] = said("one, altered")
        await agent.ask(user("c"))
        agent.messages[0] = user("A")
        await agent.ask(user("d"))

    trajectory = play(engine, script, sampling=SamplingParams(max_tokens=64, record_routes=True))
    for leaf in trajectory.leaves():
        row = trajectory.row(leaf)
        expected = [experts(int(id_), at) for at, id_ in enumerate(row.token_ids[:-1])]
        assert row.columns["routed_experts"][:-1].tolist() == expected


def test_a_turn_that_crosses_a_weight_update_is_one_turn_of_the_session():
    engine = FakeEngine(turns(said("a long answer"), said("end")), tokens_per_step=1)

    async def script(agent):
        asking = asyncio.create_task(agent.ask(user("a")))
        await steps_of(engine)
        await engine.load_weights(None, version=1)
        reply = await asking
        assert reply.policy_version == 1 and len(reply.logprobs) == len(reply.token_ids)
        assert (await agent.ask(user("b"))).reason == ""

    trajectory = play(engine, script)
    assert trajectory.num_turns == 2
    sampled = [s for s in trajectory.segments if s.is_sampled]
    assert [s.policy_version for s in sampled] == [0, 1, 1]


# -- the end, and turns that nobody received ------------------------------------------------------


async def test_a_finish_that_is_cut_off_still_ends_the_session():
    engine = FakeEngine(turns(said("x")), tokens_per_step=1)
    session = make_session(engine)
    await Agent(session).ask(user("a"))
    asked = engine.num_steps
    turn = asyncio.create_task(Agent(session).ask(user("b" * 50)))
    await steps_of(engine, asked + 1)
    finishing = asyncio.create_task(session.finish())
    await asyncio.sleep(0)
    finishing.cancel()
    await asyncio.gather(finishing, return_exceptions=True)
    await asyncio.wait_for(session.ended.wait(), 5)
    await session.finish()  # once more, and it waits for the same end
    await asyncio.gather(turn, return_exceptions=True)
    assert session.is_finished and session.trajectory.status == "finished"


def test_a_turn_that_no_client_received_is_not_rewarded_unless_the_agent_goes_on_from_it():
    async def main(*, goes_on):
        session = make_session(FakeEngine(turns(said("one"), said("two"), said("three"))))
        agent, other = Agent(session), Agent(session)
        await agent.ask(user("a"))
        lost = await other.ask(user("b"))
        session.lost(lost.leaf)
        if goes_on:
            await other.ask(user("c"))
        await session.set_reward(1.0, parts={})
        await session.finish()
        return session.trajectory

    left = asyncio.run(main(goes_on=False))
    assert list(left.rewards) == [1] and left.metrics["gateway/abandoned_turns"] == 1
    kept = asyncio.run(main(goes_on=True))
    assert len(kept.rewards) == 2 and kept.metrics["gateway/abandoned_turns"] == 0


async def test_a_path_whose_last_turn_nobody_received_is_rewarded_up_to_the_turn_before():
    session = make_session(FakeEngine(turns(said("one"), said("two"))))
    agent = Agent(session)
    first = await agent.ask(user("a"))
    lost = await agent.ask(user("b"))
    session.lost(lost.leaf)
    await session.set_reward(1.0, parts={})
    await session.finish()
    trajectory, leaf = session.trajectory, first.leaf
    assert trajectory.rewards == {leaf: 1.0}
    (row,) = trajectory.rows()
    assert row.num_trained == len(trajectory.segments[leaf])
