"""A sample of docs/proof/doctor_wild.py: one player, taught in seconds, and a few mistakes.

vLLM samples where LOCKSTEP_VLLM names the Python of an environment that has it: `make test-vllm`.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "proof"))

pytest.importorskip("transformers", reason="the players are models of transformers")

import doctor_wild
import numpy as np
import wild_players as wild
from wild_vllm import Engine

PLAYER = "llama-plain"


@pytest.fixture(scope="module")
def player(tmp_path_factory):
    """A player whose model has had a few lessons: it knows the vocabulary, not the task."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wild, "CACHE", tmp_path_factory.mktemp("wild"))
        patch.setitem(wild.PLAYERS, PLAYER, replace(wild.PLAYERS[PLAYER], steps=25))
        wild.program_of.cache_clear()
        yield wild.program_of(PLAYER)
        wild.program_of.cache_clear()


SMALL = {
    "options": {"num_tasks": 3, "group_size": 4, "max_replies": 2},
    "sampling": {"max_tokens": 24},
}


def named(player, *mistakes):
    """What the doctor names first in a small dump with these mistakes, and its gap."""
    work, lines = doctor_wild.dump_lines(player, 0, mistakes, SMALL)
    found = doctor_wild.judged(
        doctor_wild.asked(work, lines, "rows"), [one.cause for one in mistakes]
    )
    assert "raised" not in found, found
    return found, doctor_wild.k2_of(lines)


def test_nothing_is_named_where_a_foreign_program_makes_no_mistake(player):
    found, k2 = named(player)
    assert found["named"] == {}
    assert 0 < k2 < 1e-4


@pytest.mark.parametrize("cause", ["shifted", "fillers", "clamped", "observation_trained"])
def test_the_mistake_of_a_foreign_program_is_named_first(player, cause):
    found, k2 = named(player, doctor_wild.fault(cause))
    assert found["first"], found
    assert k2 > 3 * named(player)[1] or cause in doctor_wild.SILENT


def test_two_engines_without_noise_agree_to_float32(player):
    _, lines = doctor_wild.dump_lines(
        player, 0, [], {**SMALL, "sampling": {"max_tokens": 24, "noise_std": 0.0}}
    )
    assert doctor_wild.k2_of(lines) < 1e-9


needs_vllm = pytest.mark.skipif(
    not os.environ.get("LOCKSTEP_VLLM"),
    reason="LOCKSTEP_VLLM names no Python with vLLM (make test-vllm)",
)


@needs_vllm
def test_vllm_samples_and_scores_a_player_as_transformers_scores_it(player):
    program = wild.program_of(f"{PLAYER}@vllm")
    _, lines = doctor_wild.dump_lines(program, 0, [], SMALL)
    assert max(line.turn.max() for line in lines) == 1, "nobody had a second turn"
    assert 0 < doctor_wild.k2_of(lines) < 1e-9
    row = lines[0].ids.tolist()
    found = wild.sampler_of(program, wild.Sampling()).score(row)
    [trainer] = wild.score(program.model, [row], pad=program.tokenizer.pad_token_id)
    assert np.allclose(found[1:], trainer[1:], atol=1e-4)  # float32 on some hundred terms


@needs_vllm
def test_the_same_seed_gets_the_same_replies_of_vllm_and_other_weights_get_others(player):
    program = wild.program_of(f"{PLAYER}@vllm")
    prompts = [program.encode("Anna is"), program.encode("I need the city of")]
    first, again = (
        wild.sampler_of(program, wild.Sampling(seed=3)).draw(prompts, program.end_ids)
        for _ in range(2)
    )
    assert [ids for ids, _ in first] == [ids for ids, _ in again]
    changed = replace(program, model=doctor_wild.another_part(program, 0))
    ids, logprobs = wild.sampler_of(changed, wild.Sampling(seed=3)).draw(prompts, program.end_ids)[
        0
    ]
    row = prompts[0] + ids
    for model, is_close in ((changed.model, True), (program.model, False)):
        [trainer] = wild.score(model, [row], pad=program.tokenizer.pad_token_id)
        assert np.allclose(trainer[-len(ids) :], logprobs, atol=1e-4) == is_close


def test_a_player_of_vllm_says_what_is_missing_where_there_is_no_vllm(player, monkeypatch):
    program = wild.program_of(f"{PLAYER}@vllm")
    monkeypatch.setenv("LOCKSTEP_VLLM", "/nowhere/python")
    with pytest.raises(FileNotFoundError, match="no Python with vLLM at /nowhere/python: run"):
        wild.sampler_of(program, wild.Sampling(seed=1, is_raw=True))
    with pytest.raises(ValueError, match="no noise is put on vLLM's logits"):
        wild.sampler_of(program, wild.Sampling(noise_std=0.4))


def test_a_vllm_that_ends_is_an_error_with_its_last_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_VLLM", sys.executable)
    with pytest.raises(RuntimeError, match=r"(?s)ended with exit code 1:.*Error"):
        Engine(tmp_path, dtype="float32", is_raw=False)


def test_every_player_has_parts_that_exist_and_held_players_have_a_held_part():
    for name, parts in wild.PLAYERS.items():
        assert parts.model in wild.ARCHITECTURES, name
        assert parts.tokenizer in wild.TOKENIZER_MAKERS, name
        assert parts.template in wild.TEMPLATES, name
        assert parts.format in wild.WRITERS, name
    assert sum(parts.is_held for parts in wild.PLAYERS.values()) >= 5
    assert sum(not parts.is_held for parts in wild.PLAYERS.values()) >= 8


def test_every_mistake_is_of_a_cause_that_the_doctor_knows_or_of_the_wrong_template():
    from lockstep.doctor.checks.causes import CAUSES

    assert {one.cause for one in doctor_wild.FAULTS} <= {*CAUSES, "wrong_template"}


def test_a_reply_that_a_template_writes_is_read_back_as_the_same_message():
    for name in ("chatml", "harmony", "glm4", "mistral", "command-r"):
        parts = wild.Parts(
            name=name, model="llama", tokenizer="own-bytelevel", template=name, format="trl"
        )
        template = wild.TEMPLATES[name]
        tokenizer = wild.make_tokenizer(parts.tokenizer, template)
        program = wild.Program(parts, template, tokenizer, model=None)
        before = program.first_messages(wild.make_task(0, 0))
        call = wild.call_message("", "", "lookup", {"name": "Anna", "field": "city"})
        text, end = program.reply_text(before, call)
        ids = [*program.encode(text), tokenizer.convert_tokens_to_ids(end)]
        assert program.parse(ids) == call, name
