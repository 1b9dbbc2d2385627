"""Variants that are searched for: each is named where a side has its numbers, and nowhere else."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampled_rows import ArrayDump, noisy, sampled_rows, scored, weights_of
from test_numerics import causes, diagnosed, finding

from lockstep.doctor.diagnose import diagnose
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.numerics.compare import Distribution
from lockstep.doctor.numerics.layouts import Lines, arrangements, laid_out, turn_positions
from lockstep.doctor.numerics.scorer import Scorer
from lockstep.models.changes import changes
from lockstep.models.locate import locate_model

MOE, DENSE = "tiny-gpt-oss", "tiny-qwen3"
PLAIN = Distribution()


def scored_by(model, text):
    """[N] float32 of the sampled rows by the model with this change."""
    scorer, rows = Scorer(device="cpu"), sampled_rows(model)
    decoder = scorer.load(weights_of(model))
    [change] = [c for c in changes(decoder) if c.text == text]
    with change.made():
        return scorer.score(decoder, rows, np.arange(len(rows))).logprobs[PLAIN]


def lines_of(model):
    rows = sampled_rows(model)
    ids = np.split(rows.token_ids, rows.offsets[1:-1])
    return Lines(
        prompts=np.argmax(rows.loss_mask.reshape(len(rows), -1), 1),
        longest_prompt=40,
        longest=130,
        preceding=[tuple(ids[max(i - 3, 0) : i][::-1]) for i in range(len(ids))],
        turns=turn_positions(rows),
        pad_id=3,
        max_positions=512,
    )


def scored_in(model, text, *, is_hit=lambda row: True):
    """[N] float32 under the arrangement of rows that has this text."""
    scorer, rows, lines = Scorer(device="cpu"), sampled_rows(model), lines_of(model)
    decoder, out = scorer.load(weights_of(model)), scored(model).copy()
    [one] = [a for a in arrangements(lines) if a.text == text]
    layout = laid_out(one, rows, [r for r in range(len(rows)) if is_hit(r)], lines)
    every = np.arange(len(layout.rows))
    values = scorer.score(decoder, layout.rows, every, positions=layout.positions)
    is_own = layout.place >= 0
    out[layout.place[is_own]] = values.logprobs[PLAIN][is_own]
    return out


@pytest.mark.parametrize(
    ("model", "text", "cause"),
    [
        (MOE, "without its sinks", "ignored_sinks"),
        (MOE, "without the sinks of layer 1", "ignored_sinks"),
        (MOE, "with windows one token longer", "ignored_window"),
        (MOE, "with a sliding window in every layer", "ignored_window"),
        (DENSE, "with weights in fp8 per channel", "quantised_rollout"),
        (MOE, "with weights in int4 in groups of 32", "quantised_rollout"),
    ],
)
def test_a_change_is_named_on_the_side_that_has_it(model, text, cause):
    found = diagnosed(model, scored_by(model, text), noisy(model, 0.004))
    assert causes(found) == [cause]
    [(_, named)] = found.causes
    assert f"{text} the model gives what the sampler has" in named.measured


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("with positions of the reply one too high", "wrong_positions"),
        ("with every token at position 0", "wrong_positions"),
        ("after the row before it, with positions that begin again,", "packing_leak"),
        ("after the row before it, with positions that go on,", "packing_leak"),
    ],
)
def test_an_arrangement_of_rows_is_named(text, cause):
    values = scored_in(DENSE, text, is_hit=lambda row: row % 2 == 1)
    assert causes(diagnosed(DENSE, noisy(DENSE, 0.004), values)) == [cause]


def test_a_leak_over_several_rows_is_one_cause():
    values = scored(DENSE)
    for before in (1, 2, 3):
        rows = "the row" if before == 1 else f"the {before} rows"
        text = f"after {rows} before it, with positions that begin again,"
        hit = scored_in(DENSE, text, is_hit=lambda row, before=before: row % 4 == before)
        values = np.where(sampled_rows(DENSE).row_of % 4 == before, hit, values)
    assert causes(diagnosed(DENSE, scored(DENSE), values)) == ["packing_leak"]


def test_padding_that_is_seen_is_named():
    rows, scorer = sampled_rows(DENSE), Scorer(device="cpu")
    kept = rows.position < np.where(np.arange(len(rows)) % 2, 104, 84)[rows.row_of]
    sizes = np.bincount(rows.row_of, kept)
    short = type(rows)(
        row_ids=rows.row_ids,
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        token_ids=rows.token_ids[kept],
        loss_mask=rows.loss_mask[kept],
        rollout_logprobs=scored(DENSE)[kept],
    )
    lines = replace(lines_of(DENSE), longest=104)
    [one] = [a for a in arrangements(lines) if "longest row that attention" in a.text]
    layout = laid_out(one, short, range(len(short)), lines)
    every, values = np.arange(len(layout.rows)), scored(DENSE)[kept].copy()
    assert len(every) == len(rows) // 2
    found = scorer.score(
        scorer.load(weights_of(DENSE)), layout.rows, every, positions=layout.positions
    )
    values[layout.place[layout.place >= 0]] = found.logprobs[PLAIN][layout.place >= 0]
    dump = ArrayDump(short.with_(trainer_logprobs=values), Facts(pad_id=3))
    # Rows that were cut have no last token either.
    assert causes(diagnose(dump, model=DENSE))[0] == "padding_attended"


def test_a_constant_shift_of_positions_changes_nothing_and_is_not_named():
    shifted = scored_in(DENSE, "with positions from 2")
    assert np.nanmax(np.abs(shifted - scored(DENSE))) < 1e-3
    assert causes(diagnosed(DENSE, scored(DENSE), shifted)) == []


def test_defaults_beside_the_model_are_tried_with_their_penalty(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(locate_model(DENSE), model)
    settings = {"do_sample": True, "temperature": 0.8, "repetition_penalty": 1.2}
    (model / "generation_config.json").write_text(json.dumps(settings))
    scorer, rows = Scorer(device="cpu"), sampled_rows(DENSE)
    asked = Distribution(temperature=0.8, repetition_penalty=1.2)
    every = np.arange(len(rows))
    decoder = scorer.load(weights_of(DENSE))
    values = scorer.score(decoder, rows, every, distributions=[asked]).logprobs[asked]
    dump = ArrayDump(rows.with_(rollout_logprobs=values, trainer_logprobs=scored(DENSE)))
    from lockstep.doctor.checks.causes import is_same_class

    named = causes(diagnose(dump, model=model))
    assert named
    assert all(is_same_class(name, "generation_defaults") for name in named)


def test_a_penalty_divides_the_logits_of_ids_that_were_seen():
    from lockstep.doctor.numerics.scorer import _penalised

    rows = sampled_rows(DENSE).take([0])
    logits = torch.tensor([[2.0, -2.0, 1.0] + [0.5] * 500])
    place = np.array([2])
    seen = rows.token_ids[:2].tolist()
    new = _penalised(logits, Distribution(repetition_penalty=2.0), rows, place)
    expected = logits.clone()
    for one in set(seen):
        expected[0, one] = logits[0, one] / 2 if logits[0, one] > 0 else logits[0, one] * 2
    assert torch.equal(new, expected)


def test_a_head_in_another_precision_is_information_and_is_told_from_bfloat16():
    scorer, rows = Scorer(device="cpu"), sampled_rows(DENSE)
    decoder = scorer.load(weights_of(DENSE))
    every = np.arange(len(rows))
    values = scorer.score(decoder, rows, every, head=torch.bfloat16).logprobs[PLAIN]
    found = diagnosed(DENSE, values, scored(DENSE))
    assert causes(found) == []
    assert finding(found, "numerics/half_head").verdict == "information"
    whole = diagnosed(DENSE, scored(DENSE, "bfloat16"), scored(DENSE))
    assert finding(whole, "numerics/half_head").verdict == "consistent"


def test_a_change_is_taken_back_after_its_block():
    for model in (MOE, DENSE):
        scorer, rows = Scorer(device="cpu"), sampled_rows(model)
        decoder = scorer.load(weights_of(model))
        for change in changes(decoder):
            with change.made():
                pass
        after = scorer.score(decoder, rows, np.arange(len(rows))).logprobs[PLAIN]
        np.testing.assert_array_equal(after, scored(model))


def test_nothing_is_tried_where_both_sides_have_the_models_numbers():
    found = diagnosed(MOE, scored(MOE), scored(MOE))
    assert "no row deviates" in finding(found, "numerics/quantised_rollout").measured
