"""Weights, rejection and figures against verl's and slime's; and where they, and others, are wrong.

verl's own code runs, from its wheel. slime's formulas, and the one line of others that a mistake
is in, are stated here again. Equal to 1e-6: weights are float32, figures are of float64 log-probs.
"""

import math

import pytest
import torch
from verl_modules import load_verl

from lockstep.correction import Correction, Rule, correct, weigh
from lockstep.correction.kl import k3
from lockstep.correction.weighing import merged
from lockstep.objectives.losses import reference_kl

TOLERANCE = 1e-6
ROWS, TOKENS = 7, 40

pytestmark = pytest.mark.filterwarnings("ignore:correction.level=:UserWarning")


def batch(seed=0, spread=0.3, dtype=torch.float64):
    """Rows of 40 tokens at most; some with holes, as after tool calls, and none empty."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([40, 33, 21, 9, 2, 1, 40])
    mask = torch.arange(TOKENS) < lengths[:, None]
    holes = torch.arange(TOKENS) % 11 >= 7
    mask[:3] &= ~holes | (torch.arange(TOKENS) == 0)
    old = -6 * torch.rand(ROWS, TOKENS, generator=g, dtype=dtype) - 0.01
    scale = spread * torch.tensor([1.0, 0.3, 2.0, 1.0, 0.1, 1.0, 3.0], dtype=dtype)[:, None]
    new = (old + scale * torch.randn(ROWS, TOKENS, generator=g, dtype=dtype)).clamp(max=0)
    return new, old, mask


def ours(new, old, mask, **settings):
    return correct(new, old, Correction(anchor="recomputed", **settings), layout=mask)


@pytest.fixture(scope="module")
def verl():
    return load_verl().rollout_corr_helper


def run_verl(verl, new, old, mask, **settings):
    """(weights or None, kept tokens, metrics without their prefix)."""
    proto, kept, metrics = verl.compute_rollout_correction_and_rejection_mask(
        new, old, mask.to(new.dtype), **settings
    )
    weights = None if proto is None else proto.batch["rollout_is_weights"]
    return weights, kept > 0, {k.removeprefix("rollout_corr/"): v for k, v in metrics.items()}


def assert_close(found, expected):
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=TOLERANCE, atol=TOLERANCE)


# -- equal to verl --------------------------------------------------------------------------------

WEIGHTS = {
    "token": (
        {"level": "token", "limits": (0.0, 2.0)},
        {"rollout_is": "token", "rollout_is_threshold": 2.0},
    ),
    "token, normalised": (
        {"level": "token", "limits": (0.0, 2.0), "normalize": True},
        {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True},
    ),
    "sequence": (
        {"level": "sequence", "limits": (0.0, 1.5), "normalize": False},
        {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
    ),
    "sequence, normalised": (
        {"level": "sequence", "limits": (0.0, 1.5), "normalize": True},
        {"rollout_is": "sequence", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
    ),
    "IcePop": (
        {"level": "token", "bound": "mask", "limits": (0.5, 2.0)},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
    ),
    "IcePop of sequences": (
        {"level": "sequence", "bound": "mask", "limits": (0.5, 2.0), "normalize": False},
        {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_equal_verls(verl, name, spread, dtype):
    settings, theirs = WEIGHTS[name]
    for seed in range(3):
        new, old, mask = batch(seed, spread, dtype)
        expected, _, metrics = run_verl(verl, new, old, mask, **theirs)
        found = ours(new, old, mask, **settings)
        # The product over a row of 40 float32 ratios: 40 roundings of 6e-8 of log-probs up to 6.
        rtol = 2e-5 if dtype == torch.float32 and "equence" in name else TOLERANCE
        torch.testing.assert_close(
            found.weights, expected.float(), rtol=rtol, atol=TOLERANCE, msg=f"seed {seed}"
        )
        if "normalised" in name:
            figures = found.to_metrics()
            factor = metrics["rollout_is_batch_norm_factor"]
            assert figures["correction/normalizer"] == pytest.approx(factor, rel=rtol)


def rule_of(option, spec):
    """verl's option as ours. Its k1 is -log r, so its bounds are of 1 / r: they turn round."""
    scope, *aggregation, stat = option.split("_")
    aggregation = aggregation[0] if aggregation else "token"
    assert (scope == "token") == (aggregation == "token")
    if stat != "k1":
        return Rule(stat=stat, aggregation=aggregation, high=float(spec))
    low, high = map(float, spec.split("_"))
    return Rule(stat="ratio", aggregation=aggregation, low=1 / high, high=1 / low)


REJECTIONS = {
    "token_k1": "0.6_1.4", "token_k2": "0.05", "token_k3": "0.05",
    "seq_sum_k1": "0.2_3.0", "seq_sum_k2": "1.3", "seq_sum_k3": "1.3",
    "seq_mean_k1": "0.95_1.03", "seq_mean_k2": "0.05", "seq_mean_k3": "0.05",
    "seq_max_k2": "0.4", "seq_max_k3": "0.4",
}  # fmt: skip


@pytest.mark.parametrize("option", REJECTIONS)
def test_rejected_tokens_equal_verls(verl, option):
    num_rejected = num_kept = 0
    for seed in range(5):
        new, old, mask = batch(seed)
        spec = REJECTIONS[option]
        _, kept, metrics = run_verl(
            verl, new, old, mask, rollout_rs=option, rollout_rs_threshold=spec
        )
        rule = rule_of(option, spec)
        found = ours(new, old, mask, reject=(rule,))
        assert torch.equal(found.keep, kept)
        figures = found.to_metrics()
        share = metrics[f"rollout_rs_{option}_masked_fraction"]
        assert figures[f"correction/rejected_by/{rule.name}"] == pytest.approx(share, abs=TOLERANCE)
        num_rejected += int((mask & ~kept).sum())
        num_kept += int(kept.sum())
    assert num_rejected and num_kept  # the bound decides something


def test_rules_together_reject_what_verls_chain_does(verl):
    options = ["token_k1", "seq_mean_k3", "seq_max_k2"]
    specs = ["0.6_1.4", "0.08", "0.6"]
    rules = tuple(rule_of(o, s) for o, s in zip(options, specs, strict=True))
    for seed in range(5):
        new, old, mask = batch(seed)
        weights, kept, metrics = run_verl(
            verl, new, old, mask, rollout_is="token", rollout_is_threshold=2.0,
            rollout_rs=",".join(options), rollout_rs_threshold=",".join(specs),
        )  # fmt: skip
        found = ours(new, old, mask, level="token", limits=(0.0, 2.0), reject=rules)
        assert torch.equal(found.keep, kept)
        assert_close(found.weights, weights * kept)
        share = found.to_metrics()["correction/rejected_share"]
        assert share == pytest.approx(metrics["rollout_rs_masked_fraction"], abs=TOLERANCE)


FIGURES = {
    "kl": "mismatch/k1", "k3_kl": "mismatch/k3", "chi2_token": "mismatch/chi2",
    "chi2_seq": "mismatch/chi2_sequence", "log_ppl_diff": "mismatch/log_ppl_diff_mean",
    "log_ppl_abs_diff": "mismatch/log_ppl_abs_diff_mean",
    "log_ppl_diff_max": "mismatch/log_ppl_diff_max",
    "log_ppl_diff_min": "mismatch/log_ppl_diff_min",
    "rollout_is_mean": "correction/weight_mean", "rollout_is_std": "correction/weight_std",
    "rollout_is_eff_sample_size": "correction/ess",
    "rollout_is_ratio_fraction_high": "correction/above_share",
}  # fmt: skip


@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_figures_equal_verls(verl, spread):
    for seed in range(5):
        new, old, mask = batch(seed, spread)
        settings, theirs = WEIGHTS["token"]
        _, _, expected = run_verl(verl, new, old, mask, **theirs)
        found = ours(new, old, mask, **settings).to_metrics()
        for name, own in FIGURES.items():
            assert found[own] == pytest.approx(expected[name], rel=TOLERANCE, abs=1e-9), name
        difference = expected["training_log_ppl"] - expected["rollout_log_ppl"]
        assert found["mismatch/log_ppl_diff_mean"] == pytest.approx(difference, rel=1e-6, abs=1e-9)


# -- where verl is wrong --------------------------------------------------------------------------


def test_verl_divides_by_zero_where_icepop_leaves_nothing(verl):
    new, old = torch.full((2, 3), -5.0), torch.full((2, 3), -1.0)
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ZeroDivisionError):
        run_verl(verl, new, old, mask, rollout_is="token", rollout_is_threshold="0.5_2.0")
    found = correct(new, old, Correction.icepop(0.5, 2.0), layout=mask)
    assert not found.weights.any() and found.to_metrics()["correction/rejected_share"] == 1.0


def test_verl_raises_for_a_batch_without_a_token(verl):
    new = torch.full((2, 3), -1.0)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="at least one valid token"):
        run_verl(verl, new, new, mask, rollout_is="token")
    found = correct(new, new, Correction.tis(), layout=mask)
    assert not found.keep.any() and found.to_metrics()["mismatch/compared_tokens"] == 0


def test_verls_k1_bounds_are_of_the_inverse_ratio(verl):
    """Its documentation calls them ratio thresholds, beside importance weights' bounds of r."""
    ratio = torch.tensor([[3.32, 0.30, 1.0]])
    old = torch.full_like(ratio, -3.0)
    new, mask = old + ratio.log(), torch.ones(1, 3, dtype=torch.bool)
    _, kept, _ = run_verl(
        verl, new, old, mask, rollout_rs="token_k1", rollout_rs_threshold="0.5_5.0"
    )
    assert kept.tolist() == [[False, True, True]]
    found = ours(new, old, mask, reject=(Rule(stat="ratio", low=0.5, high=5.0),))
    assert found.keep.tolist() == [[True, False, True]]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_verl_spreads_a_nan_and_leaves_out_the_normalisation(verl, level):
    new, old, mask = batch()
    new[0, 1] = math.nan
    weights, _, metrics = run_verl(
        verl, new, old, mask, rollout_is=level, rollout_is_batch_normalize=True
    )
    spoilt = weights.isnan()
    assert spoilt[0].all() if level == "sequence" else spoilt[0, 1]
    assert metrics["rollout_is_batch_norm_factor"] == 1.0 and math.isnan(metrics["kl"])
    found = ours(new, old, mask, level=level, normalize=True)
    figures = found.to_metrics()
    assert found.weights.isfinite().all() and not found.keep[0, 1] and found.keep[0, 0]
    assert figures["mismatch/nonfinite_tokens"] == 1
    assert all(map(math.isfinite, figures.values()))


def test_verl_lets_padding_into_the_weights(verl):
    new, old, mask = batch()
    new[~mask] = old[~mask] = -math.inf
    weights, _, _ = run_verl(verl, new, old, mask, rollout_is="token")
    assert weights[~mask].isnan().all()
    assert not ours(new, old, mask, level="token").weights[~mask].any()


def test_verl_counts_rows_without_a_token_as_sequences_that_agree(verl):
    new, old = torch.full((4, 2), -6.0), torch.full((4, 2), -1.0)
    mask = torch.tensor([[True, True], [True, True], [False, False], [False, False]])
    settings = {"rollout_is": "sequence", "rollout_rs": "seq_mean_k2", "rollout_rs_threshold": 1.0}
    _, _, theirs = run_verl(verl, new, old, mask, **settings)
    assert theirs["rollout_is_max"] == 1.0  # of two sequences with exp(-10)
    assert theirs["rollout_is_ratio_fraction_low"] == 0.5
    assert theirs["training_log_ppl"] == 3.0 and theirs["log_ppl_diff"] == 2.5
    assert theirs["rollout_rs_seq_masked_fraction"] == 0.5  # and by the option's own figure:
    assert theirs["rollout_rs_seq_mean_k2_seq_masked_fraction"] == 1.0
    rule = Rule(stat="k2", aggregation="mean", high=1.0)
    found = ours(new, old, mask, level="sequence").to_metrics()
    assert found["correction/sequence_log_ratio_max"] == -10.0
    assert found["mismatch/log_ppl_diff_mean"] == 5.0
    found = ours(new, old, mask, reject=(rule,)).to_metrics()
    assert found["correction/rejected_sequences_share"] == 1.0


def test_verls_largest_token_weight_is_the_bound_it_was_cut_at(verl):
    old = torch.full((1, 3), -11.0)
    new, mask = torch.tensor([[-1.0, -11.0, -11.0]]), torch.ones(1, 3, dtype=torch.bool)
    _, _, theirs = run_verl(verl, new, old, mask, rollout_is="token")
    assert theirs["rollout_is_max"] == 2.0  # it was exp(10) = 22026
    assert ours(new, old, mask, level="token").to_metrics()["mismatch/log_ratio_max"] == 10.0


def test_verls_k3_is_infinite_with_one_misaligned_token(verl):
    old, new = torch.tensor([[-100.0, -1.0]]), torch.tensor([[0.0, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    _, _, theirs = run_verl(verl, new, old, mask)
    assert theirs["k3_kl"] == math.inf
    assert math.isfinite(ours(new, old, mask).to_metrics()["mismatch/k3"])


def test_verls_k3_loses_all_its_digits_where_both_sides_agree(verl):
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(8, 4096, generator=g)
    new = (old + 1e-4 * torch.randn(8, 4096, generator=g)).clamp(max=0)
    mask = torch.ones(8, 4096, dtype=torch.bool)
    exact = float(k3(new.double() - old.double()).mean())
    _, _, theirs = run_verl(verl, new, old, mask)
    assert abs(theirs["k3_kl"] / exact - 1) > 0.5
    found = ours(new, old, mask).to_metrics()["mismatch/k3"]
    assert found == pytest.approx(exact, rel=1e-6)


def test_verl_without_a_threshold_leaves_out_the_weights_without_a_word(verl):
    new, old, mask = batch()
    weights, _, _ = run_verl(verl, new, old, mask, rollout_is="token", rollout_is_threshold=None)
    assert weights is None
    found = ours(new, old, mask, level="token", limits=(0.0, math.inf))
    assert_close(found.weights[mask], (new - old).exp()[mask])


def test_verl_takes_no_single_k1_threshold_below_one(verl):
    new, old, mask = batch()
    with pytest.raises(ValueError, match="lower <= upper"):
        run_verl(verl, new, old, mask, rollout_rs="token_k1", rollout_rs_threshold="0.5")
    found = ours(new, old, mask, reject=(Rule(stat="ratio", low=0.5),))
    assert torch.equal(found.keep, mask & (new - old >= math.log(0.5)))


def test_verl_rejects_a_nan_and_reports_that_nothing_was_outside(verl):
    new, old = torch.tensor([[-1.0, math.nan]]), torch.tensor([[-1.0, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    _, kept, theirs = run_verl(
        verl, new, old, mask, rollout_rs="token_k2", rollout_rs_threshold=1.0
    )
    assert kept.tolist() == [[True, False]] and theirs["rollout_rs_token_k2_fraction_high"] == 0.0
    found = ours(new, old, mask, reject=(Rule(stat="k2", high=1.0),))
    figures = found.to_metrics()
    assert found.keep.tolist() == [[True, False]]
    assert figures["mismatch/nonfinite_tokens"] == 1
    assert figures["correction/rejected_share"] == 0.5


def test_verls_mean_over_sequences_weighs_them_by_their_length(verl):
    old, mask = torch.full((2, 9), -3.0), torch.zeros(2, 9, dtype=torch.bool)
    mask[0], mask[1, 0] = True, True
    new = old.clone()
    new[0, 0] += math.log(0.5)  # one sequence weighs 0.5, and has nine tokens; the other 1
    _, _, theirs = run_verl(verl, new, old, mask, rollout_is="sequence")
    assert theirs["rollout_is_mean"] == pytest.approx((9 * 0.5 + 1) / 10)
    found = ours(new, old, mask, level="sequence").to_metrics()
    assert found["correction/sequence_weight_mean"] == pytest.approx(0.75)


# -- slime ----------------------------------------------------------------------------------------


def slime(
    new, old, mask, *, level="token", mode="truncate", low=None, high=2.0, use_tis=True,
    use_rs=False, rs=(None, None), veto=None, normalize=False,
):  # fmt: skip
    """(weights, mask) of rows, by slime's formulas (`--use-tis`, `--tis-mode`, `--use-rs`, ...).

    The rows are those of one micro-batch: the normalisation is over them. Masks are products.
    """
    mask = mask.to(new.dtype)
    d, low = new - old, 1 / high if low is None else low
    if level == "sequence":
        d_level = (d * mask).sum(1, keepdim=True).expand_as(d)
    elif level == "geometric":
        mean = (d * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        d_level = mean.expand_as(d)
    else:
        d_level = d
    if not use_tis:
        return torch.ones_like(d), mask
    ratio = d_level.clamp(-20, 20).exp()
    kept = mask.clone()
    bounded = {"truncate": ratio.clamp(0, high), "clip": ratio.clamp(low, high), "mask": ratio}
    weights = bounded[mode] * mask
    if mode == "mask":
        kept = kept * ((ratio >= low) & (ratio <= high))
    if use_rs:
        rs_low, rs_high = (a if a is not None else b for a, b in zip(rs, (low, high), strict=True))
        kept = kept * ((ratio >= rs_low) & (ratio <= rs_high))
    if veto is not None:
        kept = kept * ~((d < math.log(veto)) & (mask > 0)).any(1, keepdim=True)
    if normalize and level == "geometric":
        raise ValueError("no normalisation is written for this level")
    if normalize and level == "token":
        weights = weights / (weights.sum() / mask.sum())
    elif normalize:
        of_rows = (weights * mask).sum(1) / mask.sum(1).clamp(min=1)
        weights = weights / of_rows.mean()
    return weights, kept


SLIME = {
    "truncate": ({"level": "token"}, {}),
    "clip": (
        {"level": "token", "bound": "clip", "limits": (0.8, 1.2)},
        {"mode": "clip", "low": 0.8, "high": 1.2},
    ),
    "mask": (
        {"level": "token", "bound": "mask", "limits": (0.5, 2.0)}, {"mode": "mask", "low": 0.5},
    ),
    "sequence": ({"level": "sequence", "normalize": False}, {"level": "sequence"}),
    "geometric": ({"level": "geometric", "normalize": False}, {"level": "geometric"}),
    "normalised": ({"level": "token", "normalize": True}, {"normalize": True}),
    "sequence, normalised": (
        {"level": "sequence", "normalize": True}, {"level": "sequence", "normalize": True},
    ),
    "rejection and veto": (
        {
            "level": "token",
            "reject": (Rule(stat="ratio", low=0.6, high=1.6), Rule.veto_ratio(0.3)),
        },
        {"use_rs": True, "rs": (0.6, 1.6), "veto": 0.3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SLIME)
def test_weights_and_masks_equal_slimes_formulas(name):
    settings, theirs = SLIME[name]
    for seed in range(5):
        new, old, mask = batch(seed)
        weights, kept = slime(new, old, mask, **theirs)
        found = ours(new, old, mask, **settings)
        assert torch.equal(found.keep, kept > 0)
        assert_close(found.weights, weights * kept)
        assert found.denominator_tokens == mask.sum()  # as in slime, of all sampled tokens


def test_slime_normalises_by_weights_of_tokens_that_it_rejected():
    """One outlier of a thousand: what is kept is divided by 4.9e5, and training stands still."""
    new, old = torch.full((1, 1000), -1.0), torch.full((1, 1000), -1.0)
    old[0, 0] = -25.0
    mask = torch.ones(1, 1000, dtype=torch.bool)
    weights, kept = slime(new, old, mask, mode="mask", normalize=True)
    assert float(weights[kept > 0].max()) < 1e-5
    found = ours(new, old, mask, level="token", bound="mask", limits=(0.5, 2.0), normalize=True)
    assert_close(found.weights[found.keep], torch.ones(999))


def test_slime_cannot_normalise_a_geometric_mean():
    new, old, mask = batch()
    with pytest.raises(ValueError):
        slime(new, old, mask, level="geometric", normalize=True)
    found = ours(new, old, mask, level="geometric", limits=(0.0, 2.0))
    of_rows = found.weights.max(1).values
    assert float(of_rows.mean()) == pytest.approx(1.0, rel=TOLERANCE)


def test_slime_rejects_nothing_without_weights():
    new, old, mask = batch()
    _, kept = slime(new, old, mask, use_tis=False, use_rs=True, rs=(0.9, 1.1))
    assert torch.equal(kept > 0, mask)
    found = ours(new, old, mask, reject=(Rule(stat="ratio", low=0.9, high=1.1),))
    assert 0 < found.keep.sum() < mask.sum()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_slime_lets_one_padding_token_spoil_a_row(level):
    new, old, mask = batch()
    new[2, -1] = old[2, -1] = -math.inf
    assert not mask[2, -1]
    weights, _ = slime(new, old, mask, level=level)
    assert weights[2].isnan().all() if level == "sequence" else weights[2, -1].isnan()
    assert ours(new, old, mask, level=level).weights.isfinite().all()


def test_slime_multiplies_a_nan_by_zero_and_does_not_veto_it():
    new, old, mask = batch()
    new[0, 0] = math.nan
    weights, kept = slime(new, old, mask, mode="mask", veto=1e-4)
    assert kept[0, 0] == 0 and kept[0, 1] == 1 and (weights * kept)[0, 0].isnan()
    found = ours(new, old, mask, level="token", reject=(Rule.veto_ratio(1e-4),))
    assert found.weights[0, 0] == 0.0
    assert found.to_metrics()["mismatch/nonfinite_tokens"] == 1


def test_slime_counts_rows_without_a_token_in_the_mean_of_sequences():
    new = torch.full((2, 3), -1.0)
    mask = torch.tensor([[True] * 3, [False] * 3])
    weights, _ = slime(new, new, mask, level="sequence", normalize=True)
    assert weights[0].tolist() == [2.0] * 3  # on policy
    found = ours(new, new, mask, level="sequence", normalize=True)
    assert found.weights[0].tolist() == [1.0] * 3


def test_slime_weighs_a_token_by_its_micro_batch():
    new, old, mask = batch(spread=1.0)
    parts = [slice(0, 3), slice(3, None)]
    whole, _ = slime(new, old, mask, normalize=True)
    cut = torch.cat([slime(new[p], old[p], mask[p], normalize=True)[0] for p in parts])
    assert float((whole / cut)[mask].max()) > 1.05
    correction = Correction(anchor="recomputed", level="token", normalize=True)
    weighed = [weigh(new[p], old[p], correction, layout=mask[p]) for p in parts]
    total = merged(piece.report for piece in weighed)
    found = torch.cat([piece.finish(total).weights for piece in weighed])
    assert_close(found, whole)


def test_slimes_largest_ratio_is_a_mean_of_the_rows_largest():
    new, old, mask = batch()
    ratio = (new - old).exp() * mask
    theirs = float(ratio.max(1).values.mean())
    exact = float(ratio.max())
    assert theirs < 0.8 * exact
    found = ours(new, old, mask, level="token").to_metrics()["mismatch/log_ratio_max"]
    assert math.exp(found) == pytest.approx(exact, rel=TOLERANCE)


def test_slimes_k3_is_infinite_with_one_misaligned_token():
    d = torch.tensor([100.0, 0.0])
    assert (d.exp() - 1 - d).mean() == math.inf
    assert k3(d).isfinite().all()


# -- one line of others ---------------------------------------------------------------------------


def test_skyrls_smallest_ratio_is_padding():
    """`(ratio * mask).min()` and `.std()`: padding counts as a ratio of 0."""
    new, old, mask = batch(spread=0.01)
    masked = (new - old).exp() * mask
    assert masked.min() == 0.0 and masked.std() > 0.3
    found = ours(new, old, mask, level="token").to_metrics()
    assert found["mismatch/log_ratio_min"] > -0.2 and found["correction/weight_std"] < 0.05


def test_skyrls_outlier_mask_keeps_a_nan():
    """`~((ratio < low) | (ratio > high)).any()`: a comparison with NaN is False."""
    new, old = torch.tensor([[-1.0, math.nan]]), torch.tensor([[-1.0, -1.0]])
    ratio = (new - old).exp()
    assert (~((ratio < 0.5) | (ratio > 2.0)).any(1)).all()
    found = ours(new, old, torch.ones(1, 2, dtype=torch.bool), level="token")
    assert found.keep.tolist() == [[True, False]]


def test_skyrls_product_depends_on_what_was_masked_before():
    d = torch.tensor([[math.log(4.0), math.log(1.25)]])
    old, mask = torch.full_like(d, -5.0), torch.ones(1, 2, dtype=torch.bool)
    token_mask = d.exp() < 2.0
    assert (d * token_mask).sum().exp() == pytest.approx(1.25)
    found = ours(
        old + d, old, mask, level="sequence", limits=(0.0, 100.0), normalize=False,
        reject=(Rule(stat="ratio", high=2.0),),
    )  # fmt: skip
    assert found.keep.tolist() == [[False, True]]
    assert found.weights[0].tolist() == pytest.approx([0.0, 5.0])


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_areal_gives_a_broken_token_the_weight_one(broken):
    """`nan_to_num(log_ratio, 0, 0, 0)`: what was not computed looks as if both sides agreed."""
    new, old = torch.tensor([[-1.0, broken]]), torch.tensor([[-1.0, -1.0]])
    assert (new - old).nan_to_num(0.0, 0.0, 0.0).exp().tolist() == [[1.0, 1.0]]
    found = ours(new, old, torch.ones(1, 2, dtype=torch.bool), level="token")
    assert found.weights.tolist() == [[1.0, 0.0]]
    assert found.to_metrics()["mismatch/nonfinite_tokens"] == 1


def test_areal_cuts_the_geometric_mean_where_the_product_was_asked_for():
    """Sixty tokens of d = 0.05: the product is exp(3) = 20, far above the bound of 2."""
    old, mask = torch.full((1, 60), -1.0), torch.ones(1, 60, dtype=torch.bool)
    new = old + 0.05
    assert (new - old).mean(1).exp().clamp(max=2.0) == pytest.approx(1.05, abs=2e-3)
    found = ours(new, old, mask, level="sequence", normalize=False)
    assert found.weights.unique().tolist() == [2.0]


def test_areals_gradient_is_nan_where_padding_overflows():
    """`where(mask, exp(d), 0)`: the gradient of exp is infinite before it is multiplied by 0."""
    mask = torch.tensor([True, False])
    d = torch.tensor([0.1, 1000.0], requires_grad=True)
    torch.where(mask, d.exp(), 0.0).sum().backward()
    assert d.grad is not None and d.grad[1].isnan()
    policy = torch.tensor([-1.0, 1000.0], requires_grad=True)
    constant = torch.full((2,), -1.0)
    reference_kl(policy, constant, old_logprobs=constant, mask=mask).sum().backward()
    assert policy.grad is not None and policy.grad.isfinite().all()


def test_trls_weight_of_a_masked_nan_is_nan():
    """`exp(diff * mask)`: NaN times 0 is NaN, and every comparison that would cut it is False."""
    new, old = torch.tensor([[-1.0, math.nan]]), torch.tensor([[-1.0, -1.0]])
    mask = torch.tensor([[True, False]])
    weights = ((new - old) * mask).exp()
    assert torch.where(weights > 3.0, 0.0, weights)[0, 1].isnan()
    assert ours(new, old, mask, level="token").weights.tolist() == [[1.0, 0.0]]


def test_prime_rls_loss_is_nan_with_one_masked_nan():
    """`keep * advantage * ratio`, summed."""
    new, old = torch.tensor([[-1.0, math.nan]]), torch.tensor([[-1.0, -1.0]])
    keep = torch.tensor([[True, False]])
    assert (keep * 1.0 * (new - old).exp()).sum().isnan()
    found = ours(new, old, keep, level="token")
    assert found.weights.sum() == 1.0
