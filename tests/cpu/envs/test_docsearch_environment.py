"""Document search over generated worlds: the episode, its reward, and its demonstrator."""

import asyncio
import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playing import play_turns
from tiny_models import CLEAN_SEARCH, NOISY_SEARCH, demonstrate_search

from lockstep.agent.config import AgentConfig
from lockstep.config import from_dict, tag, to_dict
from lockstep.envs.docsearch.config import INVALID_CALL, TOOL_NAME, DocSearchConfig
from lockstep.envs.docsearch.worlds import (
    ENTITY_WORDS,
    LINKS,
    NAMES,
    NO_RESULTS,
    VALUES,
    World,
    WorldFact,
)
from lockstep.renderers.config import HarmonyConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, ToolCall

CONFIG = DocSearchConfig()
AGENT = AgentConfig()

FACTS = tuple(
    WorldFact(name, relation, value)
    for name, relation, value in (
        ("Bela", "friend", "Otto"),
        ("Otto", "city", "Oslo"),
        ("Bela", "city", "Rome"),
        ("Otto", "friend", "Bela"),
        ("Bela", "boss", "Otto"),
    )
)
TWO_HOPS = World(
    facts=FACTS, question="What is the city of the friend of Bela?", path=(FACTS[0], FACTS[1])
)


def world_of(task) -> World:
    return World.generate(
        random.Random(task.payload["world_seed"]), two_hop_share=CONFIG.two_hop_share
    )


def play(environment, turns):
    """(observations, score) of an episode with these assistant turns."""
    found = play_turns(environment, turns, ends=True)
    return found.observations, found.score


def environment_of(world: World, config: DocSearchConfig = CONFIG):
    from lockstep.envs.docsearch.config import DocSearchEnvironment, world_problem

    return DocSearchEnvironment(world_problem(world, config), config)


def search(*keywords: str) -> Message:
    return raw(json.dumps({"keywords": keywords}))


def raw(arguments: str, name: str = TOOL_NAME) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(name=name, arguments=arguments),))


def answer(text: str) -> Message:
    return Message(role="assistant", content=text)


def oracle(world: World) -> list[Message]:
    """The turns without a mistake: one call per hop, then the answer."""
    return [*(search(fact.name, fact.relation) for fact in world.path), answer(world.answer)]


def garbled(text: str) -> Message:
    return Message(role="assistant", content=text, parse_error="no <|message|>")


# -- worlds -----------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**63 - 1))
def test_a_world_has_thirty_facts_and_a_question_that_they_answer(seed):
    world = World.generate(random.Random(seed))
    people = {fact.name for fact in world.facts}
    assert len(world.facts) == 30 and len(people) == 6 and people <= set(NAMES)
    for fact in world.facts:
        if fact.relation in LINKS:
            assert fact.value in people - {fact.name}
        else:
            assert fact.value in VALUES[fact.relation]
    assert all(fact in world.facts for fact in world.path)
    if world.hops == 2:
        first, second = world.path
        assert first.relation in LINKS and second.name == first.value
        question = f"What is the {second.relation} of the {first.relation} of {first.name}?"
    else:
        (second,) = world.path
        question = f"What is the {second.relation} of {second.name}?"
    assert world.question == question and world.answer == second.value in ENTITY_WORDS
    assert world == World.generate(random.Random(seed))


@pytest.mark.parametrize(
    ("share", "low", "high"), [(0.0, 0, 0), (0.5, 420, 580), (1.0, 1000, 1000)]
)
def test_the_share_of_two_hop_questions_is_a_setting(share, low, high):
    rng = random.Random(0)
    hops = [World.generate(rng, two_hop_share=share).hops for _ in range(1000)]
    assert low <= hops.count(2) <= high


def test_a_search_returns_the_first_facts_with_most_keywords():
    def texts(*keywords, **options):
        return [fact.text for fact in TWO_HOPS.search(keywords, **options)]

    assert texts("Otto", "city") == ["The city of Otto is Oslo."]
    assert texts("Bela") == ["The friend of Bela is Otto.", "The city of Bela is Rome."]
    assert texts("Bela", num_results=9)[2] == "The friend of Otto is Bela."
    assert texts("Bela", "friend") == ["The friend of Bela is Otto.", "The friend of Otto is Bela."]
    assert texts("bela") == texts() == []


def test_train_and_eval_are_different_streams_that_repeat():
    train = CONFIG.tasks(split="train", seed=0).take(300)
    held_out = CONFIG.tasks(split="eval", seed=0).take(300)
    assert train == CONFIG.tasks(split="train", seed=0).take(300)
    worlds = {task.payload["world_seed"] for task in train + held_out}
    assert len(worlds) == 600
    assert {CONFIG.label(task) for task in train} == {"1-hop", "2-hop"}
    json.dumps([dict(task.payload) for task in train])


# -- the episode ------------------------------------------------------------------------------


def test_the_dialogue_opens_with_the_instruction_and_the_question():
    environment = environment_of(TWO_HOPS)
    messages = asyncio.run(environment.reset())
    assert messages == [
        Message(role="developer", content="Search, then answer."),
        Message(role="user", content="What is the city of the friend of Bela?"),
    ]
    assert [entry.name for entry in environment.tools] == ["get_document_chunks"]


def test_finding_everything_and_answering_right_earns_one():
    turns = [search("Bela", "friend"), search("Otto", "city"), answer("Oslo")]
    observations, score = play(environment_of(TWO_HOPS), turns)
    assert observations[1].messages == [
        Message(role="tool", name=TOOL_NAME, content="The city of Otto is Oslo.")
    ]
    assert observations[2].done
    assert score.reward == pytest.approx(1.0)
    assert score.parts == {"retrieval": 1.0, "correctness": 1.0, "format_penalty": 0.0}


@pytest.mark.parametrize(
    ("turns", "parts"),
    [
        ([answer("Oslo")], (0, 1, 0)),
        ([answer(" Oslo\n")], (0, 1, 0)),
        ([answer("oslo")], (0, 0, 0)),
        ([answer("Oslo.")], (0, 0, 0)),
        ([answer("")], (0, 0, 1)),
        ([search("Bela", "friend"), answer("Rome")], (0.5, 0, 0)),
        ([search("nothing"), answer("Oslo")], (0, 1, 0)),
        ([raw('{"keywords": ["Bela"'), answer("Oslo")], (0, 1, 0.5)),
        ([raw('{"keywords": "Bela"}'), answer("Oslo")], (0, 1, 0.5)),
        ([raw('{"words": ["Bela"]}'), answer("Oslo")], (0, 1, 0.5)),
        ([raw('{"keywords": []}', "grep"), answer("Oslo")], (0, 1, 0.5)),
        ([garbled("junk"), answer("Oslo")], (0, 1, 0.5)),
        ([garbled("junk"), garbled("junk"), garbled("junk"), answer("Oslo")], (0, 1, 1)),
        ([garbled("junk")] * 5, (0, 0, 1)),
        ([search("Otto", "city")] * 5, (0.5, 0, 1)),
        ([], (0, 0, 1)),
    ],
)
def test_the_reward_is_the_weighted_sum_of_its_parts(turns, parts):
    _, score = play(environment_of(TWO_HOPS), turns)
    retrieval, correctness, penalty = parts
    assert tuple(score.parts.values()) == parts
    assert score.reward == pytest.approx(0.3 * retrieval + 0.7 * correctness - 0.3 * penalty)


def test_the_weights_are_settings():
    config = DocSearchConfig(
        retrieval_weight=1.0, correctness_weight=10.0, format_penalty_weight=100.0
    )
    turns = [search("Otto", "city"), garbled("x"), answer("Oslo")]
    _, score = play(environment_of(TWO_HOPS, config), turns)
    assert score.reward == pytest.approx(0.5 * 1 + 1 * 10 - 0.5 * 100)


def test_a_turn_that_finds_a_gold_passage_first_may_have_a_reward_of_its_own():
    turns = [search("none"), search("Bela", "friend"), search("Bela", "friend"), answer("Rome")]
    _, plain = play(environment_of(TWO_HOPS), turns)
    _, score = play(environment_of(TWO_HOPS, DocSearchConfig(turn_rewards=True)), turns)
    assert score.turn_rewards == {0: 0.0, 1: 0.15, 2: 0.0} and plain.turn_rewards == {}
    assert score.reward == plain.reward


def test_the_episode_is_over_with_the_last_call():
    observations, score = play(environment_of(TWO_HOPS), [search("Otto", "city")] * 9)
    assert [o.done for o in observations] == [False, False, False, True]
    assert score.parts["retrieval"] == 0.5


def test_a_bad_call_is_told_so_and_counted():
    observations, _ = play(environment_of(TWO_HOPS), [raw("{"), raw("{}", "other"), search("none")])
    assert [o.messages[0].content for o in observations] == [INVALID_CALL] * 2 + [NO_RESULTS]
    assert observations[0].metrics == {"tool/calls": 1, "tool/invalid_arguments": 1}
    assert observations[1].metrics == {"tool/calls": 1, "tool/unknown": 1}


def test_several_calls_in_one_turn_count_one_by_one():
    many = Message(role="assistant", tool_calls=tuple(search("Otto", "city").tool_calls * 3))
    observations, _ = play(environment_of(TWO_HOPS), [many, many])
    assert [len(o.messages) for o in observations] == [3, 1]
    assert [o.done for o in observations] == [False, True]


def test_the_oracle_is_right_and_misses_only_what_a_search_cannot_tell_apart():
    rewards = []
    for task in CONFIG.tasks(split="train", seed=0).take(300):
        _, score = play(CONFIG.environment(task, AGENT), oracle(world_of(task)))
        assert score.parts["correctness"] == 1.0 and score.parts["format_penalty"] == 0.0
        rewards.append(score.reward)
    assert sum(rewards) / len(rewards) > 0.98  # "friend of X is Bela" may crowd out Bela's friend


# -- the demonstrator -------------------------------------------------------------------------


def demonstrations(count: int, **options):
    rng = random.Random(5)
    for _ in range(count):
        world = World.generate(rng)
        yield world, demonstrate_search(world, rng, **options)


@pytest.mark.parametrize("noise", [NOISY_SEARCH, CLEAN_SEARCH], ids=["noisy", "clean"])
def test_demonstrations_show_what_the_environment_would_have_said(noise):
    for world, dialogue in demonstrations(300, noise=noise):
        environment = environment_of(world)
        opening = tuple(asyncio.run(environment.reset()))
        assert tuple(dialogue[:2]) == opening
        turns = [m for m in dialogue if m.role == "assistant"]
        observations, _ = play(environment, turns)
        told = [m for o in observations if not o.done for m in o.messages]
        assert told == [m for m in dialogue if m.role == "tool"]
        assert observations[-1].done and len(observations) == len(turns)


def test_the_noisy_demonstrator_errs_as_often_as_it_should():
    count, seen = 3000, Counter()
    for world, dialogue in demonstrations(count):
        calls = [m.tool_calls[0].arguments for m in dialogue if m.tool_calls]
        seen["broken"] += not calls[0].endswith("]}")
        seen["correct"] += dialogue[-1].content == world.answer
        seen["two hops"] += world.hops == 2
        proper = [json.loads(c)["keywords"] for c in calls if c.endswith("]}")]
        fact = world.path[0]
        seen["right"] += proper[0] == [fact.name, fact.relation]
        seen["no relation"] += proper[0] == [fact.name]
    assert seen["broken"] / count == pytest.approx(NOISY_SEARCH.broken_json, abs=0.03)
    assert seen["no relation"] / count == pytest.approx(NOISY_SEARCH.missing_relation, abs=0.03)
    # A wrong name is drawn from all 20, so one time in 20 it is the right one.
    assert seen["right"] / count == pytest.approx(0.55 + 0.25 / 20, abs=0.03)
    assert 0.25 < seen["correct"] / count < 0.45


def test_the_clean_demonstrator_makes_no_mistake_and_repeats():
    for world, dialogue in demonstrations(200, noise=CLEAN_SEARCH):
        assert [m for m in dialogue if m.role == "assistant"] == oracle(world)
        assert dialogue == demonstrate_search(world, random.Random(0), noise=CLEAN_SEARCH)
    first, second = ([d for _, d in demonstrations(50)] for _ in range(2))
    assert first == second


def test_demonstrations_become_ids_and_are_read_back_equal():
    plain = HarmonyConfig(system_message=False, developer_heading=False, tools_in_prompt=False)
    renderer = HarmonyRenderer(byte_tokenizer(), plain)
    for _, dialogue in demonstrations(50):
        ids = renderer.render(dialogue[:2])
        sampled: list[int] = []
        for message in dialogue[2:]:
            if message.role == "assistant":
                sampled = renderer.render_reply(message)
                assert renderer.parse(sampled) == message
                ids += sampled
            else:
                ids += renderer.extend(sampled, [message])
        text = renderer.tokenizer.decode(ids)
        assert text.startswith("<|start|>developer<|message|>Search, then answer.<|end|>")
        assert text.endswith(("<|return|>", "<|call|>"))


# -- settings ---------------------------------------------------------------------------------


def test_the_settings_survive_a_file_and_have_a_tag():
    config = DocSearchConfig(two_hop_share=0.25, chunk_chars=(100, 300))
    assert from_dict(DocSearchConfig, json.loads(json.dumps(to_dict(config)))) == config
    assert tag(DocSearchConfig) == "docsearch"
