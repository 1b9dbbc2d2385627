"""What the checks of log-probs say of healthy rows, and of each thing that is done to numbers."""

import numpy as np
import pytest
from made_rows import bfloat16, noisy, policy_rows

from lockstep.doctor.checks.base import Setting
from lockstep.doctor.checks.examine import Examination, Stage, all_stages, examine
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.values.noise import Noise, noise_of
from lockstep.doctor.checks.values.precision import contexts_of


def examined(rows: Rows, setting: Setting | None = None) -> Examination:
    has = frozenset(
        name
        for name in ("rollout_logprobs", "trainer_logprobs", "policy_version", "advantages")
        if getattr(rows, name) is not None
    )
    stages = [Stage(checks=checks) for checks in all_stages().values()]
    return examine(lambda: [rows], stages, setting or Setting(trainer="lockstep"), has=has)


def causes(rows: Rows) -> list[str]:
    return [f.cause for f in examined(rows).findings if f.verdict == "differs"]


def share_of(rows: Rows, cause: str) -> float:
    return sum(share.k2 for share in examined(rows).shares if share.cause == cause)


HEALTHY = policy_rows(sampler=noisy(1e-6))


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_are_equal_to_float32_have_no_cause(seed):
    assert causes(policy_rows(seed=seed, sampler=noisy(1e-6))) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_pair_of_precisions_is_information(seed):
    found = examined(policy_rows(seed=seed, sampler=bfloat16)).findings
    assert [f.cause for f in found if f.verdict == "differs"] == []
    told = {f.check: f for f in found}["values/precision"]
    assert told.verdict == "information" and told.cause == "precision"
    assert "sampler's logits are in bfloat16" in told.measured


def test_one_precision_on_both_sides_is_consistent():
    found = {f.check: f for f in examined(policy_rows(sampler=bfloat16, trainer=bfloat16)).findings}
    assert found["values/precision"].verdict == "consistent"
    assert found["values/precision"].figures["rollout_on_bfloat16"] > 10


@pytest.mark.parametrize("std", [0.005, 0.02, 0.1])
def test_noise_of_the_sampler_is_told_by_tokens_that_stand_more_than_once(std):
    rows = policy_rows(sampler=noisy(std))
    assert causes(rows) == ["kernel_noise"]
    assert share_of(rows, "kernel_noise") > 0.8


def test_a_few_wild_tokens_over_little_noise_are_not_noise_that_makes_the_gap():
    rows = policy_rows(sampler=noisy(1e-3))
    contexts = contexts_of(rows)
    wild = rows.rollout_logprobs.copy()
    wild[contexts.repeated[:1]] -= 1.5
    noise = noise_of(rows.with_(rollout_logprobs=wild), "sampler")
    assert noise.variance > 0.01 > 1e-4 > noise.typical_variance
    told = {f.check: f for f in examined(rows.with_(rollout_logprobs=wild)).findings}
    assert told["noise/sampler"].verdict == "information"
    assert "the gap is not made by noise" in told["noise/sampler"].measured


def test_noise_of_the_trainer_is_not_the_samplers():
    assert causes(policy_rows(trainer=noisy(0.05))) == ["dropout"]


def test_noise_in_sixteen_bits_is_information():
    def sixteen_bits(logits, rng):
        return bfloat16(logits + (rng.random() < 0.6) * rng.normal(0, 0.02, len(logits)), rng)

    rows = policy_rows(sampler=sixteen_bits, trainer=bfloat16)
    told = {f.check: f for f in examined(rows).findings}["noise/sampler"]
    assert told.verdict == "information" and "bfloat16" in told.measured


def test_noise_between_the_engines_of_another_framework_is_information_unless_it_is_large():
    for std, verdict in ((0.02, "information"), (0.3, "differs")):
        found = examined(policy_rows(sampler=noisy(std)), Setting(trainer="verl")).findings
        assert {f.check: f.verdict for f in found}["noise/sampler"] == verdict


def test_a_bias_is_no_noise():
    offset = np.random.default_rng(5).normal(0, 0.1, 40)
    rows = policy_rows(sampler=lambda z, _: z + offset)
    biased, trainer = (noise_of(rows, who) for who in ("sampler", "trainer"))
    assert biased.variance < 1e-12 and trainer.variance < 1e-12 < biased.mean_square_gap


def test_noise_of_chunks_adds_up():
    whole, sum_of_parts = noise_of(HEALTHY, "sampler"), Noise()
    for part in (range(32), range(32, 64)):  # whole groups
        rows = HEALTHY.take(list(part))
        sum_of_parts.add(noise_of(rows, "sampler"))
    assert sum_of_parts.tokens == whole.tokens
    assert sum_of_parts.variance == pytest.approx(whole.variance)


def test_rows_of_one_prompt_each_say_that_noise_cannot_be_checked():
    found = {f.check: f for f in examined(policy_rows(groups=16, size=1)).findings}
    assert found["noise/sampler"].verdict == "not_checkable"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_log_prob_that_is_not_finite_is_found_and_shown(value):
    column = HEALTHY.rollout_logprobs.copy()
    column[28 * 3 + 10] = value
    found = examined(HEALTHY.with_(rollout_logprobs=column)).findings
    told = next(f for f in found if f.check == "values/nonfinite")
    assert told.verdict == "differs" and told.figures["rollout_nonfinite"] == 1
    assert (told.evidence[0].row, told.evidence[0].begin) == ("r3", 10)


def test_a_row_that_was_never_scored_is_no_defect_of_numbers():
    column = HEALTHY.trainer_logprobs.copy()
    column[28 * 3 : 28 * 4] = np.nan
    assert causes(HEALTHY.with_(trainer_logprobs=column)) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (np.exp, "probabilities"),
        (np.negative, "negated"),
        (lambda x: x / np.log(2), "log2"),
        (lambda x: x / np.log(10), "log10"),
    ],
)
@pytest.mark.parametrize("rows_hit", [8, 64])
def test_numbers_that_are_no_natural_logs_are_named_and_moved_back(change, told, rows_hit):
    hit = HEALTHY.row_of < rows_hit
    rows = HEALTHY.with_(
        rollout_logprobs=np.where(hit, change(HEALTHY.rollout_logprobs), HEALTHY.rollout_logprobs)
    )
    out = examined(rows)
    found = [f for f in out.findings if f.verdict == "differs"]
    assert [f.cause for f in found] == ["positive"]
    assert told in found[0].measured
    assert out.shares[0].k2 > 0.999 and out.shares[0].after.means()["k2"] < 1e-9


@pytest.mark.parametrize("rows_hit", [16, 64])
@pytest.mark.parametrize("bound", [-2.0, -1.0])
def test_a_bound_is_found_with_its_value(bound, rows_hit):
    hit = (HEALTHY.row_of < rows_hit) & (HEALTHY.rollout_logprobs < bound)
    rows = HEALTHY.with_(
        rollout_logprobs=np.where(hit, np.float32(bound), HEALTHY.rollout_logprobs)
    )
    out = examined(rows)
    assert [f.cause for f in out.findings if f.verdict == "differs"] == ["clamped"]
    told = next(f for f in out.findings if f.check == "values/clamped")
    assert told.figures["bound"] == bound
    assert out.shares[0].k2 > 0.99


def clamped(rows: Rows, bound: float) -> Rows:
    assert rows.rollout_logprobs is not None
    return rows.with_(rollout_logprobs=np.fmax(rows.rollout_logprobs, np.float32(bound)))


def test_a_bound_is_found_beside_noise_on_both_of_its_sides():
    rows = clamped(policy_rows(trainer=noisy(0.7)), -2.0)
    found = {f.check: f for f in examined(rows).findings}["values/clamped"]
    assert found.cause == "clamped" and found.figures["bound"] == -2.0
    assert "clamped" not in causes(policy_rows(trainer=noisy(0.7)))


def test_a_bound_beside_shifted_log_probs_is_no_filler():
    rows = policy_rows()
    moved = rows.rollout_logprobs.copy()
    for row in range(24):
        at = np.flatnonzero(rows.loss_mask & (rows.row_of == row))
        moved[at] = np.append(moved[at[1:]], np.float32(0.0))
    assert set(causes(clamped(rows.with_(rollout_logprobs=moved), -2.0))) == {"shifted", "clamped"}


def test_zeros_of_rows_with_nothing_else_to_compare_are_no_bound():
    zeros = HEALTHY.loss_mask & (HEALTHY.row_of < 8)
    rows = HEALTHY.with_(
        rollout_logprobs=np.where(zeros, np.float32(0.0), HEALTHY.rollout_logprobs),
        trainer_logprobs=np.where(zeros, HEALTHY.trainer_logprobs, np.float32(np.nan)),
    )
    assert "clamped" not in causes(rows)


def bits(n):
    """To the nearest number whose lowest n bits are 0."""
    mask, half = np.uint32((0xFFFFFFFF << n) & 0xFFFFFFFF), np.uint32(1 << (n - 1))
    return lambda x: ((x.view(np.uint32) + half) & mask).view(np.float32)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda x: np.round(x, 1), "1 decimal"),
        (lambda x: np.round(x, 3), "3 decimals"),
        (lambda x: x.astype(np.float16).astype(np.float32), "float16"),
        (bits(16), "bfloat16"),
        (bits(20), "float8 (e4m3)"),
    ],
)
@pytest.mark.parametrize("rows_hit", [8, 64])
def test_rounding_is_found_by_the_grid_that_it_leaves(change, name, rows_hit):
    hit = HEALTHY.row_of < rows_hit
    rows = HEALTHY.with_(
        rollout_logprobs=np.where(hit, change(HEALTHY.rollout_logprobs), HEALTHY.rollout_logprobs)
    )
    out = examined(rows)
    told = next(f for f in out.findings if f.check == "values/quantised")
    assert told.verdict == "differs" and f"numbers of {name}" in told.measured
    assert [f.cause for f in out.findings if f.verdict == "differs"] == ["quantised"]


def test_contexts_are_those_that_a_search_over_all_pairs_of_tokens_finds():
    rows = policy_rows(groups=3, size=6, length=8)
    prefixes: dict[tuple[int, ...], list[int]] = {}
    for at in np.flatnonzero(rows.loss_mask).tolist():
        begin = int(rows.offsets[rows.row_of[at]])
        prefixes.setdefault(tuple(rows.token_ids[begin : at + 1].tolist()), []).append(at)
    contexts = contexts_of(rows)
    found = np.split(contexts.repeated, np.cumsum(contexts.size)[:-1])
    expected = sorted(places for places in prefixes.values() if len(places) > 1)
    assert sorted(sorted(group.tolist()) for group in found) == expected
    num_branches = len(prefixes) - len({p[:-1] for p in prefixes})
    assert len(contexts.one) == num_branches > 0
    for one, other in zip(contexts.one.tolist(), contexts.other.tolist(), strict=True):
        assert rows.prefix_keys[one - 1] == rows.prefix_keys[other - 1]
        assert rows.token_ids[one] != rows.token_ids[other]
