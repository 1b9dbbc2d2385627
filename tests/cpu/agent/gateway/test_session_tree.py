"""What agents do to their history, one test for each row of the table in docs/gateway.md.

In all of them nothing that the model saw or sampled is rewritten, and what stands is not encoded
again.
"""

import asyncio
from dataclasses import replace

import pytest
from gateway_sessions import (
    LOOK,
    RENDERER,
    Agent,
    look,
    play,
    reasons,
    said,
    seen,
    system,
    text,
    turns,
    user,
)
from playing import steps_of

from lockstep.agent.gateway.exchange import Refusal, TurnRequest
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.testing.engines import FakeEngine
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import SamplingParams

LONG = "The papers of the north say that the bridge was closed in May."


def num_encoded() -> int:
    return RENDERER.tokenizer.num_encoded


def test_a_dialogue_that_goes_on_is_one_path_and_encodes_only_what_is_new():
    answers = [RENDERER.render_reply(said(word)) for word in ("one", "two", "three")]
    engine = FakeEngine(turns(*answers))
    before = num_encoded()

    async def script(agent):
        first = await agent.ask(system("s"), user("a"))
        assert first.num_reused_tokens == 0 and first.reason == ""
        second = await agent.ask(user("b"))
        assert second.num_reused_tokens == len(first.prompt_ids) + len(first.token_ids)
        third = await agent.ask(user("c"))
        assert third.message.content == "three"

    trajectory = play(engine, script)
    assert len(trajectory.leaves()) == 1 and reasons(trajectory) == []
    new = [id_ for s in trajectory.segments if not s.is_sampled for id_ in s.token_ids]
    assert trajectory.metrics["tokens/encoded"] == len(new)
    control = RENDERER.tokenizer.control_ids
    assert num_encoded() - before == sum(id_ not in control for id_ in new)
    assert len(list(trajectory.rows())) == 1


def test_a_retry_is_a_sibling_and_what_it_replaced_is_not_rewarded():
    async def script(agent):
        await agent.ask(user("a"))
        agent.messages.pop()
        second = await agent.ask()
        assert second.reason == "retry" and second.num_reused_tokens == len(second.prompt_ids)
        await agent.ask(user("go on"))

    trajectory = play(FakeEngine(turns(said("no"), said("yes"), said("done"))), script)
    assert reasons(trajectory) == ["retry"]
    assert [text(trajectory.path_ids(leaf)).count("yes") for leaf in trajectory.rewards] == [1]
    assert trajectory.metrics["gateway/abandoned_turns"] == 1
    assert len(trajectory.leaves()) == 2


def test_the_siblings_of_a_retry_are_rewarded_whichever_is_done_first():
    drawn = iter([0.0, 0.05, 0.0])

    class Uneven(FakeEngine):
        async def generate(self, request):
            await asyncio.sleep(next(drawn))
            async for delta in super().generate(request):
                yield delta

    async def script(agent):
        await agent.ask(user("a"))
        same = TurnRequest(messages=(user("a"),))
        both = await asyncio.gather(agent.session.reply(same), agent.session.reply(same))
        assert [reply.reason for reply in both] == ["retry", "concurrent"]
        assert both[1].leaf < both[0].leaf
        assert set(agent.session.rewarded_ends()) == {reply.leaf for reply in both}

    play(Uneven(turns(said("no"), said("yes"), said("so"))), script)


def test_an_edited_message_is_a_branch_at_the_turn_before_it_and_both_ends_are_rewarded():
    async def script(agent):
        await agent.ask(user("a"))
        await agent.ask(user("b"))
        await agent.ask(user("c"))
        agent.messages[2] = user("B")
        reply = await agent.ask(user("d"))
        assert reply.reason == "edited_history"
        last = await agent.ask(user("e"))  # goes on from there
        assert last.reason == "" and last.num_reused_tokens > len(reply.prompt_ids)

    trajectory = play(FakeEngine(turns(said("one"), said("two"), said("three"))), script)
    assert reasons(trajectory) == ["edited_history"] and len(trajectory.rewards) == 2
    branch = next(s for s in trajectory.segments if s.reason)
    assert branch.parent is not None and trajectory.segments[branch.parent].turn == 0
    copies = [s for s in trajectory.segments if not s.is_sampled and s.messages[0].content == "two"]
    assert len(copies) == 1  # the turn's own ids, observed: they are trained on the first path
    sampled = next(s for s in trajectory.segments if s.is_sampled and s.turn == 1)
    assert copies[0].token_ids.tolist() == sampled.token_ids.tolist()


def test_an_edit_of_the_last_message_is_a_branch_without_copies():
    async def script(agent):
        await agent.ask(user("a"))
        await agent.ask(user("b"))
        del agent.messages[2:]
        assert (await agent.ask(user("c"))).reason == "edited_history"

    trajectory = play(FakeEngine(turns(said("one"))), script)
    assert reasons(trajectory) == ["edited_history"] and len(trajectory.leaves()) == 2


def test_dropped_thinking_forks_where_the_first_thought_was_and_both_paths_are_rewarded():
    renderer = ChatMLRenderer(byte_tokenizer(), ChatMLConfig(thinking="drop"))
    engine = FakeEngine(
        turns(said("", look(at="a"), thinking="I look"), said("one", thinking="so"), said("two"))
    )

    async def script(agent):
        first = await agent.ask(user("a"))
        tool = seen("it is", first.message.tool_calls[0])
        second = await agent.ask(tool)  # no user spoke: the thinking stays
        assert second.reason == ""
        third = await agent.ask(user("b"))
        assert third.reason == "dropped_thinking"
        assert "I look" not in text(third.prompt_ids) and "it is" in text(third.prompt_ids)

    trajectory = play(engine, script, renderer=renderer)
    assert reasons(trajectory) == ["dropped_thinking"] and len(trajectory.rewards) == 2
    last = trajectory.leaves()[-1]
    messages = trajectory.messages(last)
    assert [m.thinking for m in messages] == ["", "", "", "", "", ""]
    rendered = renderer.render([replace(m) for m in messages[:-1]])
    assert trajectory.path_ids(trajectory.segments[last].parent).tolist() == rendered


def test_a_compaction_is_a_new_root_with_its_reason():
    async def script(agent):
        await agent.ask(system("s"), user("a"))
        await agent.ask(user("b"))
        summary = await agent.ask(user("sum up"))
        agent.messages[:] = [system("s"), user(f"So far: {summary.message.content}")]
        reply = await agent.ask()
        assert reply.reason == "compaction"
        assert (await agent.ask(user("on"))).reason == ""

    trajectory = play(FakeEngine(turns(said("one"), said("two"), said(LONG))), script)
    assert reasons(trajectory) == ["compaction"] and len(trajectory.rewards) == 2
    assert sum(s.parent is None for s in trajectory.segments) == 2


def test_a_compaction_that_keeps_the_last_turns_reuses_their_ids():
    async def script(agent):
        for word in "abcd":
            await agent.ask(user(word))
        agent.messages[:] = [user("a"), user("the middle was left out"), *agent.messages[5:]]
        reply = await agent.ask(user("e"))
        assert reply.reason == "compaction"

    trajectory = play(FakeEngine(turns(*(said(w) for w in ("1", "2", "3", "4", "5")))), script)
    copies = [s for s in trajectory.segments if not s.is_sampled and s.messages[0].content == "4"]
    assert len(copies) == 1 and reasons(trajectory) == ["compaction"]


def test_two_sub_agents_in_parallel_are_roots_of_one_session():
    engine = FakeEngine(turns(said("x")), tokens_per_step=1)

    async def script(agent):
        await agent.ask(system("main"), user("plan"))
        subs = [Agent(agent.session, tools=[LOOK]) for _ in range(2)]
        await asyncio.gather(
            *(sub.ask(system(f"sub {n}"), user("do")) for n, sub in enumerate(subs))
        )
        await asyncio.gather(*(sub.ask(user("more")) for sub in subs))
        await agent.ask(user("result"))

    trajectory = play(engine, script)
    assert engine.max_running == 2
    assert reasons(trajectory) == ["sub_agent", "sub_agent"]
    assert len(trajectory.leaves()) == len(trajectory.rewards) == 3
    assert sum(s.parent is None for s in trajectory.segments) == 3


def test_a_client_that_drops_fields_respells_arguments_and_renames_calls_stays_on_its_path():
    call = look(at="a", b=1000.0)

    async def script(agent):
        first = await agent.ask(user("a"))
        given = first.message.tool_calls[0]
        assert given.id and given.arguments == call.arguments
        renamed = replace(given, id="toolu_7", arguments='{"b":1000,"at" : "a"}')
        agent.messages[-1] = said("", renamed)  # without the thinking
        second = await agent.ask(seen("it is", renamed))
        assert second.reason == ""
        agent.messages[1] = said("", replace(renamed, id=""))
        agent.messages[2] = seen("it is", replace(renamed, id=""))
        assert (await agent.ask(user("b"))).reason == ""

    trajectory = play(FakeEngine(turns(said("", call, thinking="hm"), said("one"))), script)
    assert len(trajectory.leaves()) == 1 and reasons(trajectory) == []


def test_a_truncated_turn_is_closed_by_observed_ids():
    async def script(agent):
        reply = await agent.ask(user("a"), max_tokens=5)
        assert reply.finish_reason == "length" and len(reply.token_ids) == 5
        assert (await agent.ask(user("go on"))).reason == ""

    trajectory = play(FakeEngine(turns(said("a long answer"), said("end"))), script)
    leaf = trajectory.leaves()[0]
    path = [trajectory.segments[i] for i in trajectory.path(leaf)]
    assert [s.is_sampled for s in path] == [False, True, False, True]
    assert path[2].token_ids[0] == RENDERER.stop_ids[0]  # the close, which nobody sampled


@pytest.mark.parametrize(
    ("made_of_it", "reason"),
    [
        ("The answer is 5.", "altered_reply:trimmed"),
        ("Agent: The answer is 5. ", "altered_reply:prefixed"),
        ("The answer is 5. I am sure.", "altered_reply:completed"),
    ],
)
def test_an_altered_reply_is_observed_counted_and_named(made_of_it, reason):
    async def script(agent):
        await agent.ask(user("a"))
        agent.messages[-1] = said(made_of_it)
        assert (await agent.ask(user("b"))).reason == reason
        assert (await agent.ask(user("c"))).reason == ""  # on the same branch

    answers = (said("The answer is 5. ", thinking="2 + 3"), said("yes"), said("ok"))
    trajectory = play(FakeEngine(turns(*answers)), script)
    assert reasons(trajectory) == [reason]
    assert trajectory.metrics[f"branches/{reason}"] == 1
    assert 0 < trajectory.metrics["gateway/altered_tokens"] <= len("Agent: ") + 16
    copy = next(s for s in trajectory.segments if s.reason)
    assert not copy.is_sampled and copy.messages[0].content == made_of_it
    assert copy.messages[0].thinking == "2 + 3"  # which the client did not tell
    assert len(trajectory.rewards) == 2  # what was sampled is trained where it was sampled
    assert len(trajectory.leaves()) == 2


def spelled_turn(renderer, *parts):
    """Ids as no tokenizer writes them: each part is encoded on its own."""
    names = renderer.tokenizer.control_id
    return [
        id_
        for part in parts
        for id_ in ([names(part)] if part[:1] == "<" else renderer.tokenizer.encode(part))
    ]


@pytest.mark.parametrize("format", ["chatml", "harmony"])
@pytest.mark.parametrize(
    ("before", "behind"),
    [("", ""), ("Agent: ", "."), ("", ". I am sure.")],
    ids=["trimmed", "prefixed", "completed"],
)
def test_the_unaltered_part_of_a_reply_keeps_the_ids_that_were_sampled(format, before, behind):
    tokenizer = byte_tokenizer(merges=[("t", "h"), ("th", "e"), ("a", "n"), ("i", "s")])
    words = list("the answer is 5")  # a token for each letter, which no encoding writes
    if format == "chatml":
        renderer = ChatMLRenderer(tokenizer, ChatMLConfig())
        # Without line breaks around the thinking, as `render_reply` never writes it.
        thought, end = ["<think>", "s", "o", "</think>"], "<|im_end|>"
    else:
        renderer = HarmonyRenderer(tokenizer)
        thought = ["<|channel|>", "analysis", "<|message|>", "s", "o", "<|end|>", "<|start|>"]
        thought += ["assistant", "<|channel|>", "final", "<|message|>"]
        end = "<|return|>"
    head = spelled_turn(renderer, *thought)
    body = spelled_turn(renderer, *words)
    turn = [*head, *body, *spelled_turn(renderer, ".", end)]
    assert len(body) > len(tokenizer.encode("the answer is 5"))
    answers = iter([turn, renderer.render_reply(said("ok"))])

    async def script(agent):
        first = await agent.ask(user("a"))
        assert (first.message.content, first.message.thinking) == ("the answer is 5.", "so")
        agent.messages[-1] = said(f"{before}the answer is 5{behind}")
        await agent.ask(user("b"))

    trajectory = play(FakeEngine(lambda request: next(answers)), script, renderer=renderer)
    ids = next(s for s in trajectory.segments if s.reason).token_ids.tolist()
    assert renderer.parse(ids).content == f"{before}the answer is 5{behind}"
    assert ids[: len(head)] == head  # the thinking, which the client did not send back
    start = len(ids) - len(body) - len(spelled_turn(renderer, ".", end)) if before else len(head)
    assert ids[start : start + len(body)] == body
    assert ids[-1:] == spelled_turn(renderer, end)
    changed = 1 if not (before or behind) else len(tokenizer.encode(before or " I am sure."))
    assert trajectory.metrics["gateway/altered_tokens"] <= changed + 2
    assert trajectory.metrics["gateway/altered_replies"] == 1


def test_a_reply_trimmed_to_its_call_keeps_the_ids_of_the_call():
    async def script(agent):
        reply = await agent.ask(user("a"))
        agent.messages[-1] = replace(reply.message, content="", thinking="")
        second = await agent.ask(seen("it is", reply.message.tool_calls[0]))
        assert second.reason == "altered_reply:trimmed"

    spaced = said("words", replace(look(at="a"), arguments='{"at":  "a"}'), thinking="so")
    trajectory = play(FakeEngine(turns(spaced, said("ok"))), script)
    read = RENDERER.parse(next(s for s in trajectory.segments if s.reason).token_ids.tolist())
    assert (read.content, read.thinking) == ("", "so")
    assert read.tool_calls[0].arguments == '{"at":  "a"}'
    assert trajectory.metrics["gateway/altered_tokens"] == len("words\n")


def test_an_altered_call_is_named_too():
    first = said("", look(at="a"), look(at="b"))

    async def script(agent):
        reply = await agent.ask(user("a"))
        kept = reply.message.tool_calls[:1]
        agent.messages[-1] = said("", *kept)
        assert (await agent.ask(seen("it is", kept[0]))).reason == "altered_reply:trimmed"

    play(FakeEngine(turns(first, said("ok"))), script)


def test_requests_at_the_same_time_are_siblings_that_encode_once():
    engine = FakeEngine(turns(*(said(w) for w in "abcd")), tokens_per_step=1)

    async def script(agent):
        request = TurnRequest(messages=(user("pick"),))
        replies = await asyncio.gather(*(agent.session.reply(request) for _ in range(4)))
        assert len({r.leaf for r in replies}) == 4
        assert sorted(r.reason for r in replies) == ["", *["concurrent"] * 3]
        chosen = replies[2]
        agent.messages = [user("pick"), chosen.message]
        on = await agent.ask(user("why"))
        assert on.reason == ""
        assert on.prompt_ids[: len(chosen.prompt_ids) + len(chosen.token_ids)].tolist() == [
            *chosen.prompt_ids.tolist(),
            *chosen.token_ids.tolist(),
        ]

    trajectory = play(engine, script)
    assert engine.max_running == 4 and len(trajectory.rewards) == 4
    assert len({request.seed for request in engine.requests}) == 5
    observed = [s for s in trajectory.segments if not s.is_sampled]
    assert len(observed) == 2  # one first prompt for all four


def test_the_same_key_is_the_same_turn_also_while_it_is_sampled():
    engine = FakeEngine(turns(said("a"), said("b")), tokens_per_step=1)

    async def script(agent):
        request = TurnRequest(messages=(user("q"),), key="k1")
        first, second = await asyncio.gather(*(agent.session.reply(request) for _ in range(2)))
        third = await agent.session.reply(request)
        assert [r.is_repeated for r in (first, second, third)] == [False, True, True]
        for again in (second, third):
            assert again.leaf == first.leaf and again.message == first.message
            assert again.token_ids.tolist() == first.token_ids.tolist()
            assert again.logprobs.tolist() == first.logprobs.tolist()
            assert again.prompt_ids.tolist() == first.prompt_ids.tolist()

    trajectory = play(engine, script)
    assert len(engine.requests) == 1 and trajectory.metrics["gateway/repeated_requests"] == 2


def test_a_client_that_goes_away_and_comes_back_gets_the_turn_that_was_under_way():
    engine = FakeEngine(turns(said("a long answer")), tokens_per_step=1)

    async def script(agent):
        request = TurnRequest(messages=(user("q"),), key="k1")
        gone = asyncio.create_task(agent.session.reply(request))
        await steps_of(engine)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert (await agent.session.reply(request)).is_repeated

    trajectory = play(engine, script)
    assert len(engine.requests) == 1 and trajectory.num_turns == 1


def test_a_client_that_goes_away_for_good_leaves_nothing():
    engine = FakeEngine(turns(said("a long answer"), said("b")), tokens_per_step=1)

    async def script(agent):
        gone = asyncio.create_task(agent.session.reply(TurnRequest(messages=(user("q"),))))
        await steps_of(engine)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert (await agent.ask(user("q"))).reason == ""

    trajectory = play(engine, script)
    assert trajectory.num_turns == 1 and len(trajectory.segments) == 2


def test_a_history_from_elsewhere_is_the_first_prompt():
    async def script(agent):
        agent.messages = [system("s"), user("a"), said("from elsewhere"), user("b")]
        first = await agent.ask()
        assert first.reason == "" and "from elsewhere" in text(first.prompt_ids)
        assert first.prompt_ids.tolist() == RENDERER.render(agent.messages[:-1])
        second = await agent.ask(user("c"))
        assert second.reason == "" and second.num_reused_tokens > len(first.prompt_ids)

    trajectory = play(FakeEngine(turns(said("one"))), script)
    assert [s.is_sampled for s in trajectory.segments] == [False, True, False, True]


def test_one_more_question_under_the_same_instructions_is_a_dialogue_of_its_own():
    async def script(agent):
        await agent.ask(system("s"), user("a"))
        agent.messages = []
        assert (await agent.ask(system("s"), user("b"))).reason == "new_dialogue"

    trajectory = play(FakeEngine(turns(said("one"))), script)
    assert len(trajectory.rewards) == 2


def test_a_retry_after_an_engine_failed_is_no_branch():
    calls = []

    def reply(request):
        calls.append(request)
        if len(calls) == 1:
            raise RuntimeError("the engine fell over")
        return RENDERER.render_reply(said("ok"))

    async def script(agent):
        request = TurnRequest(messages=(user("a"),), key="k")
        with pytest.raises(Refusal, match="fell over") as refused:
            await agent.session.reply(request)
        assert refused.value.status == 500
        again = await agent.session.reply(request)
        assert again.reason == "" and not again.is_repeated

    trajectory = play(FakeEngine(reply), script)
    assert len(trajectory.segments) == 2
    assert trajectory.metrics["gateway/engine_errors"] == 1


def test_random_draws_depend_on_what_is_asked_and_not_on_when():
    def seeds(order):
        engine = FakeEngine(turns(said("x")))

        async def script(agent):
            for name in order:
                await Agent(agent.session).ask(system(name), user("q"))

        play(engine, script, sampling=SamplingParams(max_tokens=64))
        return {text(r.prompt_ids): r.seed for r in engine.requests}

    assert seeds(["a", "b"]) == seeds(["b", "a"])


WRAPPERS = [
    "<think>\n{}\n</think>\n\n{}",
    "<think>{}</think>{}",
    "<think>\n{}\n</think>\n{}  \n",
    "{}\n</think>\n\n{}",  # the prompt opened the thinking
    "<thinking>{}</thinking>\n{}",
    "<reasoning>\n{}\n</reasoning>\n\n{}",
    "[THINK]{}[/THINK]{}",
    "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}",
    "analysis{}assistantfinal{}".replace("assistantfinal", "\nassistant final: "),
    "{}\n\n{}",
    "{}{}",
    "**Reasoning:** {}\n\n**Answer:** {}",
    "> {}\n\n{}",
    "<details><summary>Thoughts</summary>\n\n{}\n\n</details>\n\n{}",
    "```thinking\n{}\n```\n{}",
]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("has_call", [False, True])
@pytest.mark.parametrize("has_both", [False, True])
def test_thinking_that_a_client_puts_into_the_content_is_the_models_own(
    wrapper, has_call, has_both
):
    thought = "The river is west.\nThe well is not."
    first = said("I go west.", *(look(at="the river"),) if has_call else (), thinking=thought)
    engine = FakeEngine(turns(first, said("Done.", thinking="So.")))

    async def script(agent):
        for number in range(3):
            reply = (await agent.ask(user("Where?") if number == 0 else user(f"{number}"))).message
            merged = wrapper.format(reply.thinking, reply.content)
            thinking = reply.thinking if has_both else ""
            agent.messages[-1] = replace(reply, content=merged, thinking=thinking)

    trajectory = play(engine, script)
    (leaf,) = trajectory.leaves()
    shown = RENDERER.tokenizer.decode(trajectory.path_ids(leaf))
    assert shown.count(thought) == 1 and shown.count("I go west.") == 1
    assert not trajectory.metrics.get("gateway/altered_replies")
    assert sum(segment.is_sampled for segment in trajectory.segments) == 3


@pytest.mark.parametrize(
    "content",
    [
        "I thought: The river is west. So: I go west.",  # words of the agent's own
        "<think>The river is east.</think>I go west.",
        "<think>The river is west.</think>I go east.",
        "I go west.\n<think>The river is west.</think>",
    ],
)
def test_a_reply_that_only_resembles_a_turn_stays_as_the_agent_wrote_it(content):
    engine = FakeEngine(turns(said("I go west.", thinking="The river is west.")))

    async def script(agent):
        reply = (await agent.ask(user("Where?"))).message
        agent.messages[-1] = replace(reply, content=content, thinking="")
        await agent.ask(user("Why?"))

    trajectory = play(engine, script)
    assert content in RENDERER.tokenizer.decode(engine.requests[-1].prompt_ids)
    assert trajectory.num_turns == 2
