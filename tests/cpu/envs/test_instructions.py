"""Instruction following: checkers, prompts that are made, published files, the episode."""

import csv
import json
import random
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playing import play_turns
from tiny_models import InstructionDemonstrationsConfig, reply

from lockstep.agent.config import AgentConfig
from lockstep.config import from_dict, tag, to_dict
from lockstep.envs.instructions.checkers import (
    KINDS,
    Verdict,
    count_capital_words,
    count_words,
    instruction,
    sentences,
)
from lockstep.envs.instructions.config import (
    InstructionsConfig,
    PromptWorld,
    are_compatible,
    read_published,
)
from lockstep.errors import ConfigError, DataError, MissingExtraError
from lockstep.recipes import find_recipe, find_supervised_recipe
from lockstep.types import Message, ToolCall

AGENT = AgentConfig()

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
CASES = TABLES["cases"]
"""[id, arguments, a reply that follows, one that does not]."""


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{i:02d}-{case[0].split(':')[1]}" for i, case in enumerate(CASES)]
)
def test_an_instruction_tells_a_reply_that_follows_from_one_that_does_not(case):
    kind, arguments, right, wrong = case
    made = instruction(kind, arguments)
    assert made.follows(right) and not made.follows(wrong)
    assert not made.follows("") and not made.follows(" \n")
    assert made.description


def test_every_kind_of_the_published_data_has_a_case():
    assert {case[0] for case in CASES} == set(KINDS) and len(KINDS) == 25


def test_loosely_a_reply_may_have_a_line_too_many_and_asterisks():
    quoted = instruction("startend:quotation", {})
    assert not quoted.follows('Sure!\n"a"') and quoted.follows_loosely('Sure!\n"a"')
    assert quoted.follows_loosely('Sure!\n*"a"*\nDone.') and not quoted.follows_loosely("Sure! a")
    verdict = Verdict.of([quoted, instruction("punctuation:no_comma", {})], 'Yes, so:\n"a"')
    assert verdict.strict == (False, False) and verdict.loose == (True, True)
    assert verdict.scores() == {
        "prompt_strict": 0.0, "instruction_strict": 0.0,
        "prompt_loose": 1.0, "instruction_loose": 1.0,
    }  # fmt: skip


def test_sentences_end_neither_at_abbreviations_nor_in_numbers():
    text = 'Mr. Lee paid $3.50, e.g. at the U.S. office. "Why?" he asked. Wait... what? At 5 p.m.'
    assert sentences(text) == [
        "Mr. Lee paid $3.50, e.g. at the U.S. office.", '"Why?"', "he asked.", "Wait... what?",
        "At 5 p.m.",
    ]  # fmt: skip
    assert count_words("don't well-known a_b 3.5") == 7
    assert count_capital_words("DON'T stop. A WELL-KNOWN plan (NASA's).") == 5


BAD_ARGUMENTS = TABLES["bad_arguments"]
"""[id, arguments, what the error says]."""


@pytest.mark.parametrize(
    ("kind", "arguments", "text"), BAD_ARGUMENTS, ids=range(len(BAD_ARGUMENTS))
)
def test_arguments_are_checked(kind, arguments, text):
    with pytest.raises(DataError) as error:
        instruction(kind, arguments)
    assert text in str(error.value)


def test_arguments_of_published_files_may_be_none_or_floats():
    made = instruction("detectable_format:number_bullet_lists",
                       {"num_bullets": 2.0, "keywords": None})  # fmt: skip
    assert made.arguments == {"num_bullets": 2}


# -- what a model may write ------------------------------------------------------------------------

EVERY_KIND = [instruction(kind, arguments) for kind, arguments, _, _ in CASES]


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters() | st.sampled_from("*<>[]\"'.\n -P#{}`"), max_size=200))
def test_no_reply_makes_a_checker_raise(text):
    for each in EVERY_KIND:
        each.follows(text)
        each.follows_loosely(text)


HOSTILE = [
    "\n", " ", "*", "-", "[", "]", "<<", ">>", "<", "p.", "p. ", "P.S", "***", "*\n", "* \n", "\"",
    "'", ". ", "...", "a. ", "A.B.", "Section ", "Section 1", "1", "9", "{", "[[", "{\"a\":",
    "\x00", "\u202e", "\ud7ff", "a", "A", "\u0130", "n't ", "'s ", ", ", "-- ", "![", "\t\n",
]  # fmt: skip


def test_hostile_text_is_checked_in_time_linear_in_it():
    """No time is asserted: a checker that is quadratic takes minutes for one of these."""
    for piece in HOSTILE:
        text = piece * (20_000 // len(piece))
        for each in EVERY_KIND:
            each.follows(text)


# -- prompts that are made -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", "full"])
def test_instructions_of_one_prompt_do_not_contradict_each_other(name):
    world, rng = PromptWorld.named(name), random.Random(7)
    seen = set()
    for index in range(700):
        turns = world.turns(rng, num_instructions=(1, 3), num_turns=1 + index % 3)
        given_last = turns[-1]["instructions"]
        made = [instruction(each["id"], each["arguments"]) for each in given_last]
        seen |= {each.id for each in made}
        assert are_compatible([each.id for each in made])
        if name == "small":
            text = reply(made, rng, world.words)  # ValueError if it finds none
            assert all(Verdict.of(made, text).strict)
        for earlier, later in pairwise(turns):
            assert later["instructions"][: len(earlier["instructions"])] == earlier["instructions"]
        assert all(each.description in turns[0]["prompt"] for each in made[: len(made) - index % 3])
    assert seen == set(world.kinds)


def test_contradictions_are_known():
    assert not are_compatible(["change_case:english_lowercase", "change_case:english_capital"])
    assert not are_compatible(["detectable_format:constrained_response", "punctuation:no_comma"])
    assert not are_compatible(["punctuation:no_comma", "punctuation:no_comma"])
    contradiction = [
        instruction("length_constraints:number_words", {"num_words": n, "relation": relation})
        for n, relation in ((5, "less than"), (9, "at least"))
    ]
    with pytest.raises(ValueError, match="no reply follows all"):
        reply(contradiction, random.Random(0), ["sea"])


def test_prompts_are_seeded_and_a_stream_goes_on_where_it_stopped():
    config = InstructionsConfig(num_turns=2)
    whole = config.tasks(split="train", seed=3).take(6)
    source = config.tasks(split="train", seed=3)
    source.take(4)
    again = config.tasks(split="train", seed=3)
    again.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert again.take(2) == whole[4:]
    held_out = config.tasks(split="eval", seed=3).take(6)
    assert not {task.id for task in whole} & {task.id for task in held_out}
    assert json.loads(json.dumps(whole[0].payload)) == whole[0].payload


# -- published files -------------------------------------------------------------------------------

IFEVAL = {
    "key": 1000,
    "prompt": "Write without commas. End with: The end.",
    "instruction_id_list": ["punctuation:no_comma", "startend:end_checker"],
    "kwargs": [{"num_words": None}, {"end_phrase": "The end."}],
}
MULTI_IF = {
    "turns": "[]",
    "turn_1_prompt": json.dumps({"role": "user", "content": "Write without commas."}),
    "turn_1_instruction_id_list": json.dumps(["punctuation:no_comma"]),
    "turn_1_kwargs": json.dumps([json.dumps({})]),
    "turn_2_prompt": json.dumps({"role": "user", "content": "Now end with: The end."}),
    "turn_2_instruction_id_list": json.dumps(["punctuation:no_comma", "startend:end_checker"]),
    "turn_2_kwargs": json.dumps(["{}", json.dumps({"end_phrase": "The end."})]),
    "turn_3_prompt": "None",
    "turn_3_instruction_id_list": "None",
    "turn_3_kwargs": "None",
    "key": "7:1:en",
    "language": "English",
}


def written(path, records):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        with path.open("w", newline="") as file:
            rows = csv.DictWriter(file, list(records[0]))
            rows.writeheader()
            rows.writerows(records)
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_ifeval_is_read_as_published(tmp_path, suffix):
    path = written(tmp_path / f"ifeval{suffix}", [IFEVAL, {**IFEVAL, "key": 1001}])
    tasks = read_published(path)
    assert [task.id for task in tasks] == ["1000", "1001"]
    (turn,) = tasks[0].payload["turns"]
    assert turn["prompt"] == IFEVAL["prompt"]
    assert turn["instructions"] == [
        {"id": "punctuation:no_comma", "arguments": {}},
        {"id": "startend:end_checker", "arguments": {"end_phrase": "The end."}},
    ]


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_multi_if_is_read_as_published(tmp_path, suffix):
    (task,) = read_published(written(tmp_path / f"multi{suffix}", [MULTI_IF]))
    assert [turn["prompt"] for turn in task.payload["turns"]] == [
        "Write without commas.", "Now end with: The end.",
    ]  # fmt: skip
    assert [len(turn["instructions"]) for turn in task.payload["turns"]] == [1, 2]
    assert InstructionsConfig().label(task) == "English"


BAD_RECORDS = [
    ({**IFEVAL, "prompt": ""}, "prompt must be text"),
    ({**IFEVAL, "kwargs": [{}]}, "lists of the same length"),
    ({**IFEVAL, "kwargs": [{}, "{"]}, "not JSON"),
    ({**IFEVAL, "kwargs": [{}, {"end_phrase": 3}]}, "end_phrase=3"),
    ({**IFEVAL, "instruction_id_list": [], "kwargs": []}, "has no instruction"),
    ({"question": "?"}, "expected the fields prompt"),
]


@pytest.mark.parametrize(("record", "text"), BAD_RECORDS, ids=range(len(BAD_RECORDS)))
def test_a_malformed_record_is_an_error_with_its_line(tmp_path, record, text):
    path = written(tmp_path / "bad.jsonl", [IFEVAL, record])
    with pytest.raises(DataError, match=text) as error:
        InstructionsConfig(path=path).check()
    assert str(error.value).startswith(f"{path}:2: ")
    assert "task.bad_rows=drop" in str(error.value)
    assert [task.id for task in read_published(path, bad_rows="drop")] == ["1000"]


def test_files_that_cannot_be_tasks_are_refused(tmp_path):
    twice = written(tmp_path / "twice.jsonl", [IFEVAL, IFEVAL])
    with pytest.raises(DataError, match=r"twice\.jsonl:1"):
        read_published(twice)
    for name, content, text in (
        ("a.txt", "", r"a\.txt"),
        ("b.parquet", "no", "cannot be read as parquet"),
        ("c.csv", "key,prompt\n1,a,b\n", r"c\.csv:2"),
        ("d.jsonl", "\n", "none of its 0 records"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=text):
            read_published(str(tmp_path / name))
    assert [task.id for task in read_published(twice, bad_rows="drop")] == ["1000"]
    with pytest.raises(DataError, match="no such file"):
        read_published("nowhere.jsonl")


def test_a_name_of_the_hub_is_its_one_data_file(tmp_path, monkeypatch):
    written(tmp_path / "ifeval_input_data.jsonl", [IFEVAL])
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    assert [task.id for task in read_published("google/IFEval")] == ["1000"]
    written(tmp_path / "more.jsonl", [IFEVAL])
    with pytest.raises(DataError, match=r"more\.jsonl"):
        read_published("google/IFEval")

    def offline(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(DataError, match="google/IFEval"):
        read_published("google/IFEval")


def test_a_language_that_no_script_tells_is_refused_or_left_out(tmp_path):
    french = {
        **IFEVAL,
        "key": 5,
        "instruction_id_list": ["language:response_language"],
        "kwargs": [{"language": "fr"}],
    }
    path = written(tmp_path / "f.jsonl", [IFEVAL, french])
    with pytest.raises(DataError, match=r"f\.jsonl:2.*bad_rows=drop"):
        read_published(path)
    assert [task.id for task in read_published(path, bad_rows="drop")] == ["1000"]


def test_the_detector_that_is_not_installed_is_named():
    try:
        import langdetect  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match=r"lockstep-rl\[instructions\]"):
            InstructionsConfig(detector="langdetect").check()


def test_splits_of_a_file_share_no_task(tmp_path):
    path = written(tmp_path / "many.jsonl", [{**IFEVAL, "key": n} for n in range(60)])
    config = InstructionsConfig(path=path, eval_share=0.3)
    train = {task.id for task in config.tasks(split="train", seed=0).take(200)}
    held_out = {task.id for task in config.tasks(split="eval", seed=0).take(200)}
    assert len(train) + len(held_out) == 60 and not train & held_out and len(held_out) > 5
    whole = InstructionsConfig(path=path, eval_share=1.0)
    assert len(whole.tasks(split="eval", seed=0).take(200)) == 60
    with pytest.raises(DataError, match="cannot be evaluated on"):
        InstructionsConfig(path=path, eval_path=path).check()


# -- the episode -----------------------------------------------------------------------------------


def play(config, task, replies):
    turns = [r if isinstance(r, Message) else Message(role="assistant", content=r) for r in replies]
    found = play_turns(config.environment(task, AGENT), turns)
    return found.messages, found.observations[-1].done, found.score


def test_the_user_goes_on_and_every_turn_counts(tmp_path):
    path = written(tmp_path / "multi.csv", [MULTI_IF])
    config = InstructionsConfig(path=path, turn_rewards=True)
    (task,) = read_published(path)
    said, done, score = play(config, task, ["No comma.", "So, it is. The end."])
    assert [m.content for m in said] == ["Write without commas.", "Now end with: The end."]
    assert done
    # First turn: all. Second: one of two.
    assert score.reward == pytest.approx((1.0 + 0.25) / 2)
    assert score.turn_rewards == pytest.approx({0: 0.5, 1: 0.125})
    assert score.parts["instruction_strict"] == 0.75 and score.parts["prompt_strict"] == 0.5


def test_a_turn_that_was_never_answered_counts_nothing(tmp_path):
    path = written(tmp_path / "multi.csv", [MULTI_IF])
    (task,) = read_published(path)
    _, done, score = play(InstructionsConfig(path=path), task, ["No comma."])
    assert not done and score.reward == 0.5 and score.turn_rewards == {}


@pytest.mark.parametrize(
    "message",
    [
        Message(role="assistant", content="No comma.", parse_error="cut"),
        Message(role="assistant", content="No comma.",
                tool_calls=(ToolCall(name="f", arguments="{}"),)),
    ],
    ids=["unreadable", "a call"],
)  # fmt: skip
def test_what_is_no_reply_follows_nothing(tmp_path, message):
    path = written(tmp_path / "multi.csv", [MULTI_IF])
    (task,) = read_published(path)
    _, _, score = play(InstructionsConfig(path=path), task, [message])
    assert score.reward == 0.0


def test_the_loose_mode_pays_for_the_loose_verdict(tmp_path):
    path = written(tmp_path / "one.jsonl", [IFEVAL])
    (task,) = read_published(path)
    text = "Sure, here:\nIt was. The end."
    assert play(InstructionsConfig(path=path), task, [text])[2].reward == 0.25
    assert play(InstructionsConfig(path=path, mode="loose"), task, [text])[2].reward == 1.0


def test_too_few_turns_are_an_error_and_no_low_score():
    config = InstructionsConfig(num_turns=3)
    (task,) = config.tasks(split="eval", seed=0).take(1)
    with pytest.raises(ConfigError, match=r"agent\.max_turns=2"):
        config.environment(task, AgentConfig(max_turns=2))


def test_the_recipe_and_its_demonstrations():
    config = find_recipe("instructions")
    assert from_dict(type(config), to_dict(config)) == config
    assert tag(type(config.task)) == "instructions"
    data = find_supervised_recipe("tiny-instructions").data
    assert isinstance(data, InstructionDemonstrationsConfig)
    small = InstructionDemonstrationsConfig(num_dialogues=40)
    clean, noisy = small.stages(0)
    assert small.stages(0) == (clean, noisy) and len(clean.dialogues) == 30
    assert [m.role for m in clean.dialogues[0]] == ["user", "assistant"]
