"""What each fault is refused for before a run, and what the faults of the rows do to one row."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st
from quickstarts import quickstart_with

from lockstep.config import choices
from lockstep.doctor.ladder import token_match
from lockstep.engines.config import EngineConfig
from lockstep.models.locate import locate_model
from lockstep.recipes import find_recipe
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.run.preflight import plan, preflight
from lockstep.testing.faults import FaultConfig, injected, parse_fault, split_faults
from lockstep.testing.faults.rows import (
    DroppedFinalTokens,
    LostRoutes,
    RetokenizedRows,
    ShiftedLogprobs,
)
from lockstep.testing.faults.sides import KernelNoise
from lockstep.types import UNKNOWN_EXPERT, Ragged, Sample, frozen_ids

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "proof"))

from doctor_faults import LateAdvantages

TOKENIZER = Tokenizer.from_file(locate_model("tiny-qwen3"))
RENDERER = ChatMLRenderer(TOKENIZER, ChatMLConfig(has_empty_thinking=False))
CONTROL = min(TOKENIZER.control_ids)
SPELT = TOKENIZER.encode("the answer")
LETTERS = [i for letter in "the answer" for i in TOKENIZER.encode(letter)]


@dataclass(frozen=True, kw_only=True)
class ElsewhereConfig(EngineConfig):
    """An engine in another process."""


def row_of(*runs, id="train/0/a/0/1", support=False):
    """A row of (ids, turn) runs; turn -1 was observed, other turns are trained. The log-prob of the
    n-th sampled token is -n."""
    ids = [i for run, _ in runs for i in run]
    turn = np.array([turn for run, turn in runs for _ in run], np.int32)
    mask = turn >= 0
    logprobs = np.full(len(ids), np.nan, np.float32)
    logprobs[mask] = -np.arange(mask.sum(), dtype=np.float32)
    return Sample(
        id=id,
        token_ids=frozen_ids(ids, where=id),
        loss_mask=mask,
        columns={
            "rollout_logprobs": logprobs,
            "advantages": np.where(mask, 0.5 + turn, 0).astype(np.float32),
            "policy_version": np.where(mask, 7, -1).astype(np.int32),
            "turn": turn,
        },
        ragged={"support": Ragged.of([[i, 0] if m else [] for i, m in zip(ids, mask, strict=True)])}
        if support
        else {},
        group=3,
    )


def bits(row):
    columns = {name: column.tobytes() for name, column in row.columns.items()}
    return row.id, row.group, row.token_ids.tobytes(), row.loss_mask.tobytes(), columns


def no_scores(rows):
    raise AssertionError("this fault needs no log-prob of the trainer")


def turns_of(row, *turns):
    return row.token_ids[np.isin(row.columns["turn"], turns)].tolist()


# -- settings --------------------------------------------------------------------------------------


def test_every_fault_is_a_choice_of_one_setting():
    assert set(choices(FaultConfig | None)) >= {
        "kernel_noise", "router_noise", "sampling_noise", "stale_weights", "retokenized_rows",
        "shifted_logprobs", "dropped_final_tokens", "ignored_sinks", "detached_sinks",
    }  # fmt: skip
    assert parse_fault("kernel_noise,std=0.01") == KernelNoise(std=0.01)


def test_the_plan_says_that_a_fault_is_injected():
    sound = find_recipe("quickstart")
    with injected(ShiftedLogprobs(offset=2)):
        lines = [text for text in plan(sound, preflight(sound)) if not text.startswith("memory")]
    assert [text for text in lines if text not in plan(sound, preflight(sound))] == [
        "fault      shifted_logprobs share=1.0 seed=0 offset=2, injected: this run is broken on "
        "purpose",
        "numerics   stock ops: the fault shifted_logprobs is injected, which breaks it on purpose",
    ]


REFUSED = json.loads(Path(__file__).with_suffix(".json").read_text())
"""[words of the command line, what the error matches]."""


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_a_fault_that_cannot_be_is_refused_before_a_model_is_loaded(overrides, message):
    with pytest.raises(ValueError, match=message):
        settings, faults = split_faults(overrides)
        with injected(*faults):
            preflight(quickstart_with(*settings))


def test_faults_of_different_parts_go_together():
    together = "--fault=sampling_noise,router_std=1", "--fault=ignored_sinks", "--fault=padded_rows"
    settings, faults = split_faults(together)
    with injected(*faults):
        preflight(quickstart_with(*settings))


def test_noise_grows_with_the_policy_version_alone():
    noise = KernelNoise(std=0.01, growth=0.002, growth_from=10)
    assert [noise.std_at(v) for v in (0, 10)] == [0.01, 0.01]
    assert noise.std_at(15) == pytest.approx(0.02)


# -- which rows ------------------------------------------------------------------------------------


def test_a_share_of_the_rows_is_hit_and_the_others_are_the_same_objects():
    rows = [row_of(([1, 2], -1), (SPELT, 0), id=f"train/{i}/a/0/1") for i in range(400)]
    before = [bits(row) for row in rows]
    fault = ShiftedLogprobs(share=0.25)
    changed = fault.change_rows(rows, RENDERER, no_scores)
    hit = [new is not old for new, old in zip(changed, rows, strict=True)]
    assert 64 <= sum(hit) <= 136  # 100 +- 4 standard deviations of a binomial, sqrt(400 * 3/16)
    assert [bits(row) for row in rows] == before
    again = fault.change_rows(rows, RENDERER, no_scores)
    assert [new is not old for new, old in zip(again, rows, strict=True)] == hit
    other = ShiftedLogprobs(share=0.25, seed=1).change_rows(rows, RENDERER, no_scores)
    assert [new is not old for new, old in zip(other, rows, strict=True)] != hit


# -- shifted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "expected"),
    [(1, [-1, -2, -3, -4, 0]), (-2, [0, 0, 0, -1, -2]), (4, [-4, 0, 0, 0, 0]), (9, [0] * 5)],
)
def test_shifted_logprobs_are_those_of_another_trained_token(offset, expected):
    row = row_of(([1, 2], -1), ([3, 4], 0), ([5], -1), ([6, 7, 8], 1))
    out = ShiftedLogprobs(offset=offset).changed(row, RENDERER)
    assert out.columns["rollout_logprobs"][out.loss_mask].tolist() == expected
    assert np.isnan(out.columns["rollout_logprobs"][~out.loss_mask]).all()
    out.set("rollout_logprobs", row.columns["rollout_logprobs"])
    assert bits(out) == bits(row)


# -- dropped ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "left"), [(1, [6, 7]), (2, [6]), (50, [6])])
def test_dropped_final_tokens_are_gone_from_the_row_and_from_every_column(count, left):
    row = row_of(([1, 2], -1), ([3, 4], 0), ([5], -1), ([6, 7, 8], 1), support=True)
    out = DroppedFinalTokens(count=count).changed(row, RENDERER)
    assert turns_of(out, 0) == [3, 4]
    assert turns_of(out, 1) == left
    assert out.token_ids.tolist() == [1, 2, 3, 4, 5, *left]
    kept = slice(0, len(out))
    assert out.columns["advantages"].tolist() == row.columns["advantages"][kept].tolist()
    assert [ids.tolist() for ids in out.ragged["support"]] == [
        row.ragged["support"][i].tolist() for i in range(len(out))
    ]


def test_what_the_environment_said_last_is_not_a_final_token():
    row = row_of(([1], -1), ([3, 4], 0), ([5, 6], -1))
    out = DroppedFinalTokens(count=1).change_rows([row], RENDERER, no_scores)[0]
    assert out.token_ids.tolist() == [1, 3, 5, 6]


# -- re-tokenised ----------------------------------------------------------------------------------


def test_retokenised_rows_have_the_same_text_in_other_ids_and_logprobs_in_order():
    row = row_of((LETTERS, -1), ([CONTROL, *LETTERS, CONTROL], 0), ([CONTROL], -1), (SPELT, 1))
    out = RetokenizedRows().changed(row, RENDERER)
    assert TOKENIZER.decode(out.token_ids) == TOKENIZER.decode(row.token_ids)
    assert turns_of(out, -1) == [*LETTERS, CONTROL]  # what was read is not written again
    assert turns_of(out, 0) == [CONTROL, *SPELT, CONTROL] != turns_of(row, 0)
    assert turns_of(out, 1) == SPELT
    sampled = out.columns["rollout_logprobs"][out.loss_mask]
    assert sampled.tolist() == [-float(i) for i in range(out.num_trained)]
    assert set(out.columns["advantages"][out.columns["turn"] == 1]) == {1.5}
    assert set(out.columns["policy_version"][out.loss_mask]) == {7}


def test_logprobs_that_run_out_are_filled_with_zeros():
    half = TOKENIZER.encode("\N{LEFTWARDS ARROW}")[:1]  # decodes to U+FFFD, which is three bytes
    row = row_of(([1], -1), (half, 0))
    out = RetokenizedRows().changed(row, RENDERER)
    assert out.columns["rollout_logprobs"][out.loss_mask].tolist() == [0.0] * out.num_trained
    assert out.num_trained > row.num_trained


def test_a_run_of_text_ends_with_the_turn():
    out = RetokenizedRows().changed(row_of(([1], -1), (LETTERS[:5], 0), (LETTERS[5:], 1)), RENDERER)
    assert turns_of(out, 0) == TOKENIZER.encode("the a")
    assert turns_of(out, 1) == TOKENIZER.encode("nswer")


def test_the_support_of_another_id_is_not_carried_over():
    row = row_of(([1], -1), ([CONTROL, *LETTERS], 0), support=True)
    support = RetokenizedRows().changed(row, RENDERER).ragged["support"]
    assert support[1].tolist() == [CONTROL, 0]
    new, old = SPELT[0], LETTERS[0]
    assert new != old
    assert support[2].tolist() == []


def test_recomputed_logprobs_are_the_trainers_for_the_new_ids_of_the_rows_that_are_hit():
    rows = [row_of(([1], -1), (LETTERS, 0), id=f"train/{i}/a/0/1") for i in range(8)]
    asked = []

    def log_probs(scored):
        asked.extend(scored)
        return [np.where(row.loss_mask, -9, np.nan).astype(np.float32) for row in scored]

    fault = RetokenizedRows(logprobs="recomputed", share=0.5)
    changed = fault.change_rows(rows, RENDERER, log_probs)
    hit = [new for new, old in zip(changed, rows, strict=True) if new is not old]
    assert asked == hit
    assert 0 < len(hit) < len(rows)
    for row in hit:
        assert row.token_ids.tolist() == [1, *SPELT]
        assert set(row.columns["rollout_logprobs"][row.loss_mask]) == {-9.0}


@settings(deadline=None, max_examples=1000 if PROOF else 50)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=6),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_retokenising_keeps_control_tokens_and_what_was_observed(runs):
    """Of any ids at all, halves of characters included; each trained token has a log-prob."""
    turn_of = np.cumsum([is_sampled for _, is_sampled in runs])
    row = row_of(
        ([1], -1), *((ids, int(turn_of[i]) if s else -1) for i, (ids, s) in enumerate(runs))
    )
    out = RetokenizedRows().changed(row, RENDERER)
    assert turns_of(out, -1) == turns_of(row, -1)
    controls = list(TOKENIZER.control_ids)
    assert [i for i in out.token_ids if i in controls] == [
        i for i in row.token_ids if i in controls
    ]
    assert (out.loss_mask == np.isfinite(out.columns["rollout_logprobs"])).all()
    once = RetokenizedRows().changed(out, RENDERER)
    assert once.token_ids.tolist() == out.token_ids.tolist()


def test_token_match_compares_places():
    row = row_of(([1], -1), ([3, 4], 0), ([5], -1), ([6, 7], 1))
    assert token_match([row], [row]) == 1
    assert token_match([row], [DroppedFinalTokens().changed(row, RENDERER)]) == 0.75
    moved = row_of(([1], -1), ([3], 0), ([5], -1), ([6, 7], 1))
    assert token_match([row], [moved]) == 0.25
    assert token_match([], []) == 1


def test_a_fault_of_ones_own_is_a_choice_by_its_tag():
    @dataclass(frozen=True, kw_only=True)
    class UnmaskedRows(FaultConfig):
        def change_rows(self, rows, renderer, log_probs):
            return [ShiftedLogprobs().changed(row, renderer) for row in rows]

    fault = parse_fault("unmasked_rows")
    assert fault == UnmaskedRows()
    with injected(fault):
        preflight(find_recipe("quickstart"))


# -- lost routes -----------------------------------------------------------------------------------


def routed_row():
    """Prompt, three turns and what was answered in between; every position has its routes."""
    turn = np.array([-1, -1, 0, 0, -1, 1, 1, -1, 2, 2], np.int32)
    row = Sample(id="t/4", token_ids=np.arange(10, dtype=np.int32), loss_mask=turn >= 0)
    row.set("turn", turn)
    row.set("routed_experts", np.ones((10, 2, 2), np.int16))
    return row


def test_a_turn_that_finds_its_prefix_gone_loses_the_routes_before_it():
    row = routed_row()
    lost = LostRoutes(share=1.0).changed(row, RENDERER)
    known = lost.columns["routed_experts"][:, 0, 0] != UNKNOWN_EXPERT
    assert known.tolist() == [False] * 7 + [True] * 3  # what the last turn's request has computed
    assert (row.columns["routed_experts"] == 1).all()
    assert (lost.columns["turn"] == row.columns["turn"]).all()
    some = [LostRoutes(share=0.5, seed=seed).changed(row, RENDERER) for seed in range(20)]
    begins = {int((each.columns["routed_experts"] < 0)[:, 0, 0].sum()) for each in some}
    assert begins == {0, 4, 7}
    assert any(each is row for each in some)


# -- advantages and log-probs ----------------------------------------------------------------------


@pytest.mark.parametrize(("by", "expected"), [(1, [0, 0, 0, 0.5, 0.5]), (-1, [0, 0.5, 0.5, 0, 0])])
def test_advantages_move_alone(by, expected):
    row = row_of(([3, 4], -1), ([5, 6], 0), ([7], -1))
    moved = LateAdvantages(by=by).changed(row, RENDERER)
    assert moved.columns["advantages"].tolist() == expected
    before, after = bits(row)[-1], bits(moved)[-1]
    assert {name for name in before if before[name] != after[name]} == {"advantages"}
