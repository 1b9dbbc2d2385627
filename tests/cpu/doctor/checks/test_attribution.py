"""The gap is split as a training step splits it, and what a repair leaves is split again."""

import numpy as np
import pytest
import torch

from lockstep.correction import TokenFacts, measure
from lockstep.doctor.checks.attribution import SPLIT_BY, Split, gap_of, is_touched
from lockstep.doctor.checks.base import Setting
from lockstep.doctor.checks.examine import Stage, examine
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.tokens.alignment import Shifted
from lockstep.testing.tokenizers import byte_tokenizer


def make_rows(num_rows=12, num_tokens=300, *, seed=0, shifted=(), **more):
    """Two sampled turns a row; the log-probs of the rows `shifted` stand one place too late."""
    rng = np.random.default_rng(seed)
    turn = np.full(num_tokens, -1, np.int32)
    turn[10:120], turn[150:290] = 0, 1
    sampled = np.tile(turn >= 0, num_rows)
    trainer = -rng.exponential(1.0, num_rows * num_tokens)
    rollout = np.minimum(trainer + rng.normal(0, 1e-3, len(trainer)), 0.0)
    for row in shifted:
        for a, b in ((10, 120), (150, 290)):
            turn_of_row = slice(row * num_tokens + a, row * num_tokens + b)
            rollout[turn_of_row] = np.roll(rollout[turn_of_row], 1)
    return Rows(
        row_ids=tuple(f"row-{i}" for i in range(num_rows)),
        offsets=np.arange(num_rows + 1) * num_tokens,
        token_ids=rng.integers(0, 256, num_rows * num_tokens).astype(np.int32),
        loss_mask=sampled,
        rollout_logprobs=np.where(sampled, rollout, np.nan).astype(np.float32),
        trainer_logprobs=np.where(sampled, trainer, np.nan).astype(np.float32),
        turn=np.tile(turn, num_rows),
        **more,
    )


def split_of(*rows, **facts):
    split = Split(**facts)
    for chunk in rows:
        split.add(chunk)
    return split


def test_the_figures_are_those_of_a_training_step_by_the_same_names():
    rows = make_rows()
    split = split_of(rows)
    found = {
        f"by_{part.name}/{place.label}/{name}": value
        for part in SPLIT_BY
        for place in split.places(part.name)
        for name, value in place.gap.means().items()
    }
    trainer, rollout, mask, turns, positions = (
        torch.from_numpy(column).view(len(rows), -1)
        for column in (
            rows.trainer_logprobs, rows.rollout_logprobs, rows.loss_mask, rows.turn, rows.position
        )
    )  # fmt: skip
    facts = TokenFacts(turns=turns, positions=positions)
    report = measure(trainer, rollout, layout=mask, facts=facts).to_metrics()
    shared = {k for k in found if f"mismatch/{k}" in report}
    assert {k.split("/")[0] for k in shared} == {"by_turn", "by_position"}
    for name in shared:
        expected = report[f"mismatch/{name}"]
        assert found[name] == pytest.approx(expected, rel=1e-5, abs=1e-12), name


def test_each_part_sums_to_the_whole_and_chunks_do_not_matter():
    tokenizer = byte_tokenizer()
    more = {
        "policy_version": np.repeat(np.arange(12) % 3, 300).astype(np.int32),
        "trainer_version": np.full(12, 5),
        "steps": np.repeat([3, 4], 6),
    }
    rows = make_rows(**more)
    whole = split_of(rows, tokenizer=tokenizer)
    parts = split_of(rows.take(range(5)), rows.take(range(5, 12)), tokenizer=tokenizer)
    for part in SPLIT_BY:
        places = whole.places(part.name)
        assert sum(p.gap.tokens for p in places) == whole.total.tokens, part.name
        assert sum(p.share_k2 for p in places) == pytest.approx(1.0)
        assert [p.label for p in places] == [p.label for p in parts.places(part.name)]
    assert parts.total.k2 == pytest.approx(whole.total.k2, rel=1e-12)
    assert whole.total.k3 == pytest.approx(gap_of(rows.gap).k3, rel=1e-12)
    assert [p.label for p in whole.places("age")] == ["2-3", "4+"]
    counts = [{k: g.tokens for k, g in split.steps.items()} for split in (whole, parts)]
    assert sorted(whole.steps) == [3, 4] and counts[0] == counts[1]
    bars = whole.histogram()
    assert sum(bars["below"]) + sum(bars["above"]) + bars["equal"] == whole.total.tokens


def test_what_is_not_known_is_not_told_apart():
    split = split_of(make_rows())
    assert split.places("age") == split.places("kind") == split.places("spelling") == []
    assert not split.steps


def test_ids_that_the_tokenizer_does_not_have_are_told_apart_from_text():
    rows = make_rows()
    ids = rows.token_ids.copy()
    ids[20:40], ids[40:60] = 2**31 - 1, -5
    split = split_of(rows.with_(token_ids=ids), tokenizer=byte_tokenizer())
    assert sum(p.gap.tokens for p in split.places("spelling") if p.label == "bytes") >= 40


def test_tokens_are_split_by_whether_both_sides_routed_the_position_that_predicts_them_alike():
    rows = make_rows()
    routes = np.zeros((rows.num_tokens, 2, 1), np.int16)
    wide = np.flatnonzero(rows.loss_mask & (rows.position % 10 == 0))
    rollout = rows.rollout_logprobs.copy()
    rollout[wide] -= 1.0
    trainer_routes = routes.copy()
    trainer_routes[wide - 1, 1, 0] = 2
    split = split_of(
        rows.with_(
            rollout_logprobs=rollout, routed_experts=routes, trainer_routed_experts=trainer_routes
        )
    )
    same, differ = split.routes
    assert differ.tokens == len(wide) and differ.k2 > 100 * same.k2


def test_the_gap_is_split_again_without_its_cause_and_what_is_left_is_said():
    rows = make_rows(shifted=range(4))
    has = frozenset({"rollout_logprobs", "trainer_logprobs"})
    found = examine(
        lambda: [rows.take(range(6)), rows.take(range(6, 12))],
        [Stage(checks=(Shifted,))], Setting(), has=has,
    )  # fmt: skip
    assert found.gap.means()["k2"] > 0.1
    assert found.after.total.means()["k2"] == pytest.approx(5e-7, rel=0.2)
    assert found.unexplained_k2 < 1e-4
    repaired = found.repaired(rows)
    touched = [is_touched(rows.take([r]), repaired.take([r])) for r in range(12)]
    assert touched == [True] * 4 + [False] * 8


def test_a_gap_on_few_tokens_is_said_to_be_there():
    rows = make_rows()
    assert split_of(rows).concentrations() == []
    rollout = rows.rollout_logprobs.copy()
    rollout[(rows.position >= 10) & (rows.position < 16)] -= 3.0
    (place, *_) = split_of(rows.with_(rollout_logprobs=rollout)).concentrations()
    assert (place.part, place.label) == ("position", "0-15") and place.share_k2 > 0.99
