"""Causes that rows show without a model: routes, places of advantages, versions, who drew."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rows import bfloat16, noisy, nucleus, policy_rows, tempered

from lockstep.doctor.checks.base import Finding, Setting
from lockstep.doctor.checks.examine import Examination, Stage, all_stages, examine
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.tokenization import find_tokenization
from lockstep.models.locate import locate_model

EXACT = policy_rows(groups=8, size=4, length=40, sampler=noisy(1e-6))
R, N = len(EXACT), EXACT.num_tokens
NEW = {
    "zero_routes", "late_advantages", "late_version", "mixed_versions", "draft_logprobs",
    "after_resume", "grows_without_learning", "generation_defaults",
}  # fmt: skip


def examined(rows: Rows, **setting) -> Examination:
    stages = [Stage(checks=checks) for checks in all_stages().values()]
    return examine(lambda: [rows], stages, Setting(**setting), has=rows.has)


def causes(rows: Rows, **setting) -> list[str]:
    return [f.cause for f in examined(rows, **setting).findings if f.verdict == "differs"]


def finding(rows: Rows, check: str, **setting) -> Finding:
    return next(f for f in examined(rows, **setting).findings if f.check == check)


# -- routes ----------------------------------------------------------------------------------------


def routes(seed=0, layers=3, active=2, experts=8) -> np.ndarray:
    order = np.random.default_rng(seed).random((N, layers, experts)).argsort(2)
    return order[:, :, :active].astype(np.int16)


def moved(rows: Rows, by) -> Rows:
    """`rows` with the trainer's log-probs moved by [N], and below 0."""
    return rows.with_(
        trainer_logprobs=np.minimum(rows.trainer_logprobs + by, -1e-6).astype(np.float32)
    )


@pytest.mark.parametrize("part", ["row", "prefix", "layer"])
def test_zeros_in_place_of_routes_are_named_and_become_unknown(part):
    of = routes()
    hit = np.isin(EXACT.row_of, np.arange(0, R, 3))
    if part == "layer":
        of[hit, 1] = 0
    else:
        of[hit & ((EXACT.position < 20) | (part == "row"))] = 0
    rows = EXACT.with_(routed_experts=of)
    out = examined(rows)
    told = next(f for f in out.findings if f.check == "values/routes")
    assert causes(rows) == ["zero_routes"]
    assert "[0, 0]" in told.evidence[0].note
    repaired = out.repaired(rows).routed_experts
    zeroed = (of == 0).all(2).any(1)
    assert (repaired[zeroed] == -1).all() and np.array_equal(repaired[~zeroed], of[~zeroed])


def test_the_gap_after_fillers_is_theirs_if_it_is_larger():
    of, late = routes(), EXACT.position > 20
    of[(EXACT.row_of % 2 == 0) & (EXACT.position == 20)] = 0
    noise = np.random.default_rng(0).normal(0, 0.1, N) * late * (EXACT.row_of % 2 == 0)
    out = examined(moved(EXACT, noise).with_(routed_experts=of), trainer="x", is_moe=True)
    assert out.shares[0].cause == "zero_routes" and out.shares[0].k2 > 0.99


def test_one_list_of_experts_in_all_layers_and_tokens_is_a_filler():
    of = routes()
    of[EXACT.row_of == 3] = [0, 1]
    assert causes(EXACT.with_(routed_experts=of)) == ["zero_routes"]


def test_a_layer_without_a_router_and_a_last_token_without_routes_are_information():
    of = routes()
    of[:, 0] = 0
    told = finding(EXACT.with_(routed_experts=of), "values/routes")
    assert told.verdict == "information" and told.figures["layers_without_routes"] == 1
    of = routes()
    of[EXACT.offsets[1:] - 1] = 0
    assert finding(EXACT.with_(routed_experts=of), "values/routes").verdict == "information"


@pytest.mark.parametrize("active", [1, 2, 4])
def test_routes_that_were_not_recorded_and_those_of_a_router_are_healthy(active):
    of = routes(active=active)
    of[:20] = -1
    assert finding(EXACT.with_(routed_experts=of), "values/routes").verdict == "consistent"


# -- advantages ------------------------------------------------------------------------------------


def with_advantages(mask, *, by=0, outside=0.0, rows=EXACT) -> Rows:
    """Rows with this mask and one advantage per row, moved by so many tokens."""
    of_row = np.random.default_rng(0).normal(0, 1, len(rows))
    values = np.where(mask, np.repeat(of_row, rows.sizes), outside)
    at = np.arange(rows.num_tokens) - by
    kept = np.clip(at, 0, rows.num_tokens - 1)
    inside = (rows.row_of[kept] == rows.row_of) & (kept == at)
    values = np.where(inside, values[kept], outside)
    return rows.with_(loss_mask=mask, is_sampled=mask, advantages=values.astype(np.float32))


TURNS = EXACT.loss_mask & ~((EXACT.position > 15) & (EXACT.position < 22))
INNER = TURNS & (EXACT.position < 38)


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("mask", [TURNS, INNER, EXACT.loss_mask & (EXACT.position < 30)])
def test_advantages_a_token_away_are_named_and_moved_back(mask, by):
    rows = with_advantages(mask, by=by)
    assert "late_advantages" in causes(rows)
    told = finding(rows, "training/advantages")
    assert ("late" if by > 0 else "early") in told.measured
    right = with_advantages(mask).advantages
    fixed = examined(rows).repaired(rows).advantages
    known = mask & ~np.isnan(fixed)
    assert known.sum() >= mask.sum() - R and np.array_equal(fixed[known], right[known])


def test_rows_that_end_with_their_reply_show_late_advantages_at_its_beginning():
    assert "late_advantages" in causes(with_advantages(EXACT.loss_mask, by=1))


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    outside=st.sampled_from([0.0, np.nan]),
    style=st.sampled_from(["masked", "filled", "by turn", "by token"]),
)
def test_advantages_beside_their_tokens_are_healthy(seed, outside, style):
    rng = np.random.default_rng(seed)
    mask = EXACT.loss_mask & (rng.random(N) < 0.9 if seed % 3 == 0 else EXACT.position % 17 > 3)
    rows = with_advantages(mask, outside=outside)
    values = rows.advantages
    if style == "filled":  # one weight for the whole response, observations included
        first = EXACT.position >= 4
        values = np.where(first, np.repeat(rng.normal(0, 1, R), EXACT.sizes), outside)
    elif style == "by turn":
        values = np.where(mask, rng.integers(-1, 2, N // 4 + 1)[np.arange(N) // 4], outside)
    elif style == "by token":
        values = np.where(mask, rng.normal(0, 1, N), outside)
    rows = rows.with_(advantages=values.astype(np.float32))
    assert finding(rows, "training/advantages").verdict == "consistent"


# -- versions --------------------------------------------------------------------------------------


def switched(std, *, known=False, noise=0.0, share=1.0, seed=0) -> Rows:
    """Rows whose first part older weights sampled. known: each token has its own version."""
    rng = np.random.default_rng(seed)
    at = np.repeat(rng.integers(14, 30, R), EXACT.sizes)
    old = EXACT.loss_mask & (EXACT.position < at) & np.repeat(rng.random(R) < share, EXACT.sizes)
    unsure = -np.expm1(np.minimum(EXACT.trainer_logprobs, 0))
    by = np.nan_to_num(unsure) * (std * old * rng.normal(0, 1, N) + noise * rng.normal(0, 1, N))
    version = np.where(EXACT.loss_mask, 7 - (old & known), -1).astype(np.int32)
    return moved(EXACT, by).with_(policy_version=version)


@pytest.mark.parametrize("noise", [0.0, 0.005])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_rows_that_claim_one_version_and_break_have_a_late_version(noise, share):
    rows = switched(0.3, noise=noise, share=share)
    out = examined(rows, trainer="x")
    assert [f.cause for f in out.findings if f.verdict == "differs"] == ["late_version"]
    assert out.shares[0].k2 > 0.9


@pytest.mark.parametrize("std", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_noise_that_does_not_end_in_a_row_is_no_late_version(std, seed):
    told = finding(switched(0.0, noise=std, seed=seed), "training/late_version")
    assert told.verdict == "consistent"


def test_a_gap_that_begins_inside_of_rows_is_no_late_version():
    rows = switched(0.3)
    late = EXACT.loss_mask & (EXACT.position > 20)
    rows = moved(EXACT, 0.3 * late * np.random.default_rng(0).normal(0, 1, N)).with_(
        policy_version=rows.policy_version
    )
    assert finding(rows, "training/late_version").verdict == "consistent"


def test_versions_that_change_inside_of_a_turn_explain_the_gap_before_the_change():
    rows = switched(0.3, known=True)
    out = examined(rows)
    assert [f.cause for f in out.findings if f.verdict == "differs"] == ["mixed_versions"]
    assert out.shares[0].k2 > 0.99
    told = finding(rows, "training/mixed_versions", max_staleness=1)
    assert told.verdict == "information" and "allow that age" in told.measured
    assert finding(switched(0.0, known=True), "training/mixed_versions").verdict == "information"


def test_with_the_trainers_version_a_change_inside_of_a_turn_is_staleness():
    rows = switched(0.3, known=True).with_(trainer_version=np.full(R, 7))
    assert causes(rows) == ["stale"]


# -- who drew --------------------------------------------------------------------------------------


def drawn_by_another(std, *, seed=0, noise=0.0, size=4) -> Rows:
    """Rows that a policy drew and a draft of it recorded, which hangs on the ids alone."""
    offsets = np.random.default_rng(seed).normal(0, std, (97, 40))

    def draft(logits, _):
        return logits + offsets[int(abs(logits[0] * 1e6)) % 97]

    rows = policy_rows(groups=64 // size, size=size, length=40, seed=seed, trainer=draft)
    swapped = {
        "rollout_logprobs": rows.trainer_logprobs,
        "trainer_logprobs": rows.rollout_logprobs,
    }
    by = np.random.default_rng(seed).normal(0, noise, rows.num_tokens)
    return moved(rows.with_(**swapped), by)


@pytest.mark.parametrize("std", [0.5, 1.0])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_log_probs_of_what_did_not_draw_the_tokens_are_named(std, noise):
    rows = drawn_by_another(std, noise=noise)
    out = examined(rows)
    assert [f.cause for f in out.findings if f.verdict == "differs"] == ["draft_logprobs"]
    assert out.shares[0].k2 > 0.99


@pytest.mark.parametrize("advantages", ["none", "of rows"])
@pytest.mark.parametrize("seed", range(4))
def test_other_weights_that_did_draw_the_tokens_are_not(seed, advantages):
    rows = drawn_by_another(0.7, seed=seed)
    rows = rows.with_(
        rollout_logprobs=rows.trainer_logprobs, trainer_logprobs=rows.rollout_logprobs
    )
    if advantages == "of rows":
        sign = np.random.default_rng(seed).choice([-1.0, 1.0], len(rows))
        rows = rows.with_(advantages=np.repeat(sign, rows.sizes).astype(np.float32))
    assert "draft_logprobs" not in causes(rows)


@pytest.mark.parametrize("std", [0.1, 0.3, 1.0])
def test_errors_of_the_recorded_numbers_are_not(std):
    """Symmetric errors on either side have both means above 1."""
    assert "draft_logprobs" not in causes(
        moved(policy_rows(length=40), np.random.default_rng(0).normal(0, std, 64 * 44))
    )


def test_an_update_on_rewarded_rows_is_not():
    rng = np.random.default_rng(0)
    rows = policy_rows(length=40)
    sign = np.repeat(rng.choice([-1.0, 1.0, 1.0], 64), 44)
    rows = moved(rows, 0.3 * sign * rng.exponential(1, len(sign)))
    rows = rows.with_(advantages=sign.astype(np.float32))
    assert "draft_logprobs" not in causes(rows)


def test_raw_log_probs_of_a_sampler_with_a_temperature_are_information_where_it_is_known():
    told = finding(drawn_by_another(1.0), "values/drawn_by", temperature=0.7)
    assert told.verdict == "information" and "temperature" in told.measured


# -- the model's own defaults ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "defaults", "facts", "cause"),
    [
        (tempered(0.6), {"temperature": 0.6, "top_p": 0.95}, {}, "generation_defaults"),
        (tempered(0.6), {"temperature": 0.6}, {"temperature": 1.0}, "generation_defaults"),
        (tempered(0.6), {"temperature": 0.6}, {"temperature": 0.6}, "processed"),
        (tempered(0.6), {"temperature": 0.8}, {}, "processed"),
        (tempered(0.6), {"top_p": 0.9}, {}, "processed"),
        (nucleus(0.9), {"top_p": 0.9}, {}, "generation_defaults"),
        (nucleus(0.5), {"top_k": 3}, {"top_k": 0}, "generation_defaults"),
        (nucleus(0.9), {"top_p": 0.9}, {"top_p": 0.9}, "processed"),
        (nucleus(0.5), {"top_p": 0.9}, {}, "processed"),
        (nucleus(0.9), None, {}, "processed"),
    ],
)
def test_processing_that_the_models_file_asks_for_is_its(sampler, defaults, facts, cause):
    rows = policy_rows(sampler=sampler)
    assert causes(rows, generation_defaults=defaults, **facts) == [cause]
    if cause == "generation_defaults":
        told = finding(rows, "values/generation_defaults", generation_defaults=defaults, **facts)
        assert "generation_config.json has" in told.measured


def penalised(penalty: float, seed=0) -> Rows:
    """Rows whose sampler, and its log-probs, are of logits with a repetition penalty."""
    rng = np.random.default_rng(seed)
    table = rng.normal(0, 2, (40, 40))
    ids, rollout, trainer = [], [], []
    for _ in range(32):
        row = [0, 1]
        for _ in range(30):
            logits = table[row[-1]]
            seen = np.isin(np.arange(40), row)
            drawn = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
            both = [z - np.log(np.exp(z).sum()) for z in (drawn, logits)]
            token = int(rng.choice(40, p=np.exp(both[0])))
            for values, of in zip((rollout, trainer), both, strict=True):
                values.append(of[token])
            row.append(token)
        ids.append(row)
    mask = np.tile(np.arange(32) >= 2, 32)
    columns = [np.full(len(mask), np.nan, np.float32) for _ in range(2)]
    for column, values in zip(columns, (rollout, trainer), strict=True):
        column[mask] = values
    return Rows(
        row_ids=tuple(map(str, range(32))),
        offsets=np.arange(33) * 32,
        token_ids=np.array(ids, np.int32).ravel(),
        loss_mask=mask,
        rollout_logprobs=columns[0],
        trainer_logprobs=columns[1],
    )


def test_a_repetition_penalty_of_the_models_file_is_told_by_its_signs():
    rows = penalised(1.2)
    out = examined(rows, generation_defaults={"repetition_penalty": 1.2})
    assert [f.cause for f in out.findings if f.verdict == "differs"] == ["generation_defaults"]
    assert out.shares[0].k2 > 0.99
    assert "generation_defaults" not in causes(rows, generation_defaults={"temperature": 1.0})


def test_the_models_file_alone_is_no_cause():
    assert causes(EXACT, generation_defaults={"temperature": 0.6, "top_k": 20}) == []


def test_the_defaults_are_read_from_the_models_directory(tmp_path):
    model = locate_model("tiny-gpt-oss")
    for file in model.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    facts = Facts(model=str(tmp_path))
    assert find_tokenization(facts).generation_defaults is None
    given = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert find_tokenization(facts).generation_defaults == {"temperature": 0.6, "top_k": 20}
    there = replace(facts, tokenizer=str(model))
    assert find_tokenization(there).generation_defaults == {"temperature": 0.6, "top_k": 20}


# -- nothing wrong ---------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1, 4, 8]),
    length=st.integers(8, 48),
    std=st.floats(-3, 0),
    side=st.sampled_from(["sampler", "trainer", "both", "bfloat16"]),
)
def test_healthy_rows_have_none_of_these_causes(seed, size, length, std, side):
    made = {name: noisy(10**std) for name in ("sampler", "trainer") if side in (name, "both")}
    if side == "bfloat16":
        made["sampler"] = bfloat16
    rows = policy_rows(groups=32 // size, size=size, length=length, seed=seed, **made)
    rng = np.random.default_rng(seed)
    version = np.repeat(rng.integers(3, 6, len(rows)), rows.sizes)
    experts = rng.random((rows.num_tokens, 2, 6)).argsort(2)[:, :, :2].astype(np.int16)
    rows = rows.with_(
        policy_version=np.where(rows.loss_mask, version, -1).astype(np.int32),
        routed_experts=experts,
        advantages=np.where(rows.loss_mask, rng.normal(0, 1), 0.0).astype(np.float32),
        steps=np.arange(len(rows)) // 4,
    )
    assert not NEW & set(causes(rows, trainer="x"))
