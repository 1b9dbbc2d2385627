"""The report of every step: what it says, and that no arrangement of the tokens changes it."""

import math

import numpy as np
import pytest
import torch
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.correction import Correction, Layout, MismatchReport, TokenFacts, correct, measure
from lockstep.correction.tokens import CHUNK_TOKENS
from lockstep.errors import AlignmentError
from lockstep.types import FORCED_LOGPROB

EXAMPLES = settings(max_examples=1000 if PROOF else 25, deadline=None)
values = st.floats(-30, 0, width=32)
anything = st.one_of(values, st.just(math.nan), st.just(-math.inf), st.just(math.inf))


@st.composite
def tokens(draw, max_rows=5):
    """(logprobs, rollout, lengths) of rows with 0..6 tokens, some of them not finite."""
    rows = draw(st.lists(st.lists(st.tuples(anything, anything), max_size=6), max_size=max_rows))
    flat = [pair for row in rows for pair in row]
    return (
        torch.tensor([a for a, _ in flat], dtype=torch.float32),
        torch.tensor([b for _, b in flat], dtype=torch.float32),
        [len(row) for row in rows],
    )


def same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert math.isfinite(value)
        assert value == pytest.approx(right[name], rel=1e-9, abs=1e-12), name


def report(logprobs, rollout, lengths, mask=None, facts=None):
    return measure(logprobs, rollout, layout=Layout.packed(lengths, mask), facts=facts)


# -- the figures ----------------------------------------------------------------------------------


def test_every_number_is_what_the_formula_says():
    trainer = np.array([-1.0, -2.0, -0.5, -3.0, -0.001, -4.0], np.float32)
    rollout = np.array([-1.0, -2.5, -0.6, -2.0, -0.002, -4.00005], np.float32)
    found = report(torch.from_numpy(trainer), torch.from_numpy(rollout), [3, 3]).to_metrics()
    d = (trainer - rollout).astype(np.float64)
    k3 = np.exp(d) - 1 - d
    unforced = rollout <= FORCED_LOGPROB
    ratio = np.exp(d)
    per_row = np.array([d[:3].mean(), d[3:].mean()])
    expected = {
        "k1": -d.mean(), "k2": 0.5 * (d**2).mean(), "k3": k3.mean(),
        "k1_unforced": -d[unforced].mean(), "k2_unforced": 0.5 * (d[unforced] ** 2).mean(),
        "k3_unforced": k3[unforced].mean(), "max_abs_diff": np.abs(d).max(),
        "log_ratio_max": d.max(), "log_ratio_min": d.min(), "unequal_tokens": 5,
        "outlier_tokens": 4, "compared_tokens": 6, "forced_share": 1 / 6, "nonfinite_tokens": 0,
        "ess": ratio.sum() ** 2 / (6 * (ratio**2).sum()), "chi2": (ratio**2).mean() - 1,
        "chi2_sequence": (np.exp([d[:3].sum(), d[3:].sum()])**2).mean() - 1,
        "log_ppl_abs_diff_max": np.abs(per_row).max(),
        "log_ppl_abs_diff_mean": np.abs(per_row).mean(),
        "log_ppl_diff_mean": -per_row.mean(), "log_ppl_diff_max": (-per_row).max(),
        "log_ppl_diff_min": (-per_row).min(),
    }  # fmt: skip
    for name, value in expected.items():
        # float32 ratios and k3: six digits each
        assert found[f"mismatch/{name}"] == pytest.approx(float(value), rel=2e-6), name


def test_sequences_weigh_the_same_whatever_their_length():
    d = torch.tensor([1.0, 0.1, 0.1, 0.1])
    found = report(d - 2, torch.full((4,), -2.0), [1, 3]).to_metrics()
    assert found["mismatch/log_ppl_abs_diff_mean"] == pytest.approx(0.55, rel=1e-6)
    assert found["mismatch/k1"] == pytest.approx(-1.3 / 4, rel=1e-6), "tokens do"


def test_rows_without_a_compared_token_are_no_sequence():
    trainer, rollout = torch.tensor([-1.0, -1.0, math.nan]), torch.tensor([-3.0, -3.0, -1.0])
    found = report(trainer, rollout, [0, 2, 1, 0]).to_metrics()
    assert found["mismatch/log_ppl_diff_mean"] == found["mismatch/log_ppl_diff_min"] == -2.0
    assert found["mismatch/log_ppl_abs_diff_max"] == 2.0
    assert found["mismatch/chi2_sequence"] == pytest.approx(math.exp(8) - 1, rel=1e-9)


def test_nothing_compared_is_zero_and_says_so():
    nothing = torch.zeros(0)
    for found in (MismatchReport.empty(), measure(nothing, nothing), report(nothing, nothing, [])):
        metrics = found.to_metrics("mismatch_after")
        assert metrics.pop("mismatch_after/ess") == 1.0
        assert set(metrics.values()) == {0.0}
    nan = torch.full((3,), float("nan"))
    assert measure(nan, nan).to_metrics()["mismatch/nonfinite_tokens"] == 3.0


def test_equal_sides_have_no_mismatch_at_all():
    logprobs = -torch.rand(100, generator=torch.Generator().manual_seed(0))
    found = measure(logprobs, logprobs.clone()).to_metrics()
    nonzero = {name for name, value in found.items() if value and not name.startswith("by_")}
    ones = {n for n in nonzero if n.endswith(("/ess", "/compared_tokens", "/forced_share"))}
    assert nonzero == ones
    assert found["mismatch/ess"] == 1.0


def test_a_shift_by_one_token_shows_in_k2_and_k3_though_k1_cancels():
    logprobs = -5 * torch.rand(4000, generator=torch.Generator().manual_seed(0))
    shifted = measure(logprobs, logprobs.roll(1)).to_metrics()
    # a telescope: the sum is 0 but for the rounding of 4000 float32 differences of values below 5
    assert abs(shifted["mismatch/k1"]) < 1e-6
    assert shifted["mismatch/k2"] > 1 and shifted["mismatch/k3"] > 1


@pytest.mark.parametrize("scale", [1e-7, 1e-4, 1e-2, 1.0])
def test_quantiles_are_those_of_the_tokens_to_six_percent(scale):
    d = scale * torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    base = torch.full_like(d, -10.0)
    found = measure(base + d, base).to_metrics()
    ordered = (base + d - base).sort().values
    for name, q in (("p99", 0.99), ("p1", 0.01), ("p99_9", 0.999), ("p0_1", 0.001), ("p50", 0.5)):
        exact = float(ordered[math.ceil(q * len(d)) - 1])  # the token at which q is reached
        # a bin is a factor 9/8 wide at most, its geometric middle sqrt(9/8) = 1.061 from its edges
        assert found[f"mismatch/log_ratio_{name}"] == pytest.approx(exact, rel=0.061), name


@EXAMPLES
@given(st.floats(2.0**-30, 1000.0), st.sampled_from([1, -1]))
def test_any_log_ratio_falls_into_a_bin_that_tells_it_to_six_percent(size, sign):
    d = torch.tensor([sign * size], dtype=torch.float64)
    low, high = torch.minimum(d, torch.zeros(1)), torch.minimum(-d, torch.zeros(1))
    found = measure(low, high).to_metrics()
    assert found["mismatch/log_ratio_p50"] == pytest.approx(sign * size, rel=0.061)


@pytest.mark.parametrize("size", [900.0, 1e9, 1e30, 3.4e38])
def test_extreme_ratios_stay_finite(size):
    found = measure(torch.tensor([0.0, -size]), torch.tensor([-size, 0.0])).to_metrics()
    assert all(math.isfinite(v) for v in found.values()), found
    assert found["mismatch/max_abs_diff"] == pytest.approx(size, rel=1e-6)
    assert found["mismatch/k2"] == pytest.approx(size**2 / 2, rel=1e-6)
    assert found["mismatch/k3"] > 0


def test_maxima_are_those_before_any_bound():
    trainer, rollout = torch.tensor([-1.0, -1.0, -9.0]), torch.tensor([-11.0, -1.0, -1.0])
    for correction in (Correction.tis(), Correction.mis(), Correction.icepop()):
        found = correct(trainer, rollout, correction).to_metrics()
        assert found["mismatch/log_ratio_max"] == 10.0 and found["mismatch/log_ratio_min"] == -8.0
    found = correct(
        trainer, rollout, Correction.tis(level="sequence"), layout=Layout.packed([1, 2])
    ).to_metrics()
    assert found["correction/sequence_log_ratio_max"] == 10.0
    assert found["correction/sequence_log_ratio_min"] == -8.0
    assert found["correction/sequence_weight_mean"] == pytest.approx((2 + math.exp(-8)) / 2)


# -- the parts ------------------------------------------------------------------------------------

LABELS = {
    "age": ["0", "1", "2-3", "4+"],
    "turn": ["0", "1", "2", "3", "4-7", "8+"],
    "position": ["0-15", "16-63", "64-255", "256-1023", "1024-4095", "4096-16383", "16384+"],
    "kind": ["text", "control"],
}
STARTS = {
    "age": [0, 1, 2, 4], "turn": [0, 1, 2, 3, 4, 8],
    "position": [0, 16, 64, 256, 1024, 4096, 16384], "kind": [0, 1],
}  # fmt: skip


def make_tokens(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    rollout = -5 * torch.rand(count, generator=g)
    noise = 0.3 * torch.randn(count, generator=g)
    numbers = {
        "ages": torch.randint(0, 8, (count,), generator=g, dtype=torch.int32),
        "turns": torch.randint(0, 12, (count,), generator=g, dtype=torch.int32),
        "positions": (2 ** (17 * torch.rand(count, generator=g))).long() - 1,
        "kinds": torch.randint(0, 2, (count,), generator=g, dtype=torch.int32),
    }
    return (rollout + noise).clamp(max=0), rollout, numbers


@pytest.mark.parametrize("part", LABELS)
def test_each_part_is_the_report_of_its_tokens_alone_and_all_add_up_to_the_whole(part):
    trainer, rollout, numbers = make_tokens(600)
    facts, correction = TokenFacts(**numbers), Correction.mis()
    whole = correct(trainer, rollout, correction, facts=facts).to_metrics()
    found = np.searchsorted(STARTS[part], numbers[f"{part}s"].numpy(), side="right") - 1
    weights = correct(trainer, rollout, correction)
    counts = []
    for index, label in enumerate(LABELS[part]):
        chosen = torch.from_numpy(found == index)
        alone = measure(trainer[chosen], rollout[chosen]).to_metrics()
        figures = ["k1", "k2", "k3", "max_abs_diff", "compared_tokens", "unequal_tokens",
                   "outlier_tokens", "ess"]  # fmt: skip
        for name in figures:
            value = whole[f"mismatch/by_{part}/{label}/{name}"]
            assert value == pytest.approx(alone[f"mismatch/{name}"], rel=1e-9), (label, name)
        counts.append(whole[f"mismatch/by_{part}/{label}/compared_tokens"])
        raw = (trainer - rollout).exp()[chosen]
        bounded = raw.clamp(max=2.0)[weights.keep[chosen]].double()
        assert whole[f"correction/by_{part}/{label}/weight_mean"] == pytest.approx(
            float(bounded.mean()), rel=1e-6
        )
        assert whole[f"correction/by_{part}/{label}/above_share"] == pytest.approx(
            float((raw > 2.0).double().mean()), rel=1e-9
        )
    assert sum(counts) == 600
    named = [n for n in whole if n.startswith(f"mismatch/by_{part}/") and n.endswith("/k1")]
    mean = sum(c * whole[n] for c, n in zip(counts, named, strict=True)) / 600
    assert mean == pytest.approx(whole["mismatch/k1"], rel=1e-9)


def test_a_part_that_does_not_tell_tokens_apart_is_left_out():
    trainer, rollout, _ = make_tokens(10)
    assert not [n for n in measure(trainer, rollout).to_metrics() if "/by_" in n]
    same_age = TokenFacts(ages=torch.zeros(10, dtype=torch.int32))
    assert not [n for n in measure(trainer, rollout, facts=same_age).to_metrics() if "/by_" in n]
    two = TokenFacts(ages=torch.tensor([0, 3] * 5))
    found = {
        n.split("/")[2] for n in measure(trainer, rollout, facts=two).to_metrics() if "/by_" in n
    }
    assert found == {"0", "2-3"}


def test_staleness_is_told_apart_from_numerics():
    rollout = torch.full((4,), -1.0)
    trainer = torch.tensor([-1.0, -1.0, -1.5, -1.5])
    facts = TokenFacts(ages=torch.tensor([0, 0, 1, 1]))
    found = measure(trainer, rollout, facts=facts).to_metrics()
    assert found["mismatch/by_age/0/k3"] == 0 and found["mismatch/by_age/0/unequal_tokens"] == 0
    assert found["mismatch/by_age/1/k1"] == 0.5


def test_positions_are_counted_from_the_rows_first_token_where_none_are_given():
    lengths = [20, 0, 70]
    trainer, rollout, _ = make_tokens(90)
    places = torch.cat([torch.arange(n) for n in lengths])
    implied = report(trainer, rollout, lengths).to_metrics()
    same(
        implied, report(trainer, rollout, lengths, facts=TokenFacts(positions=places)).to_metrics()
    )
    assert implied["mismatch/by_position/0-15/compared_tokens"] == 32
    assert implied["mismatch/by_position/64-255/compared_tokens"] == 6


def test_numbers_outside_of_a_part_count_to_its_ends():
    trainer, rollout, _ = make_tokens(4)
    facts = TokenFacts(ages=torch.tensor([-5, 0, 4, 2**31 - 1]))
    found = measure(trainer, rollout, facts=facts).to_metrics()
    assert found["mismatch/by_age/0/compared_tokens"] == 2
    assert found["mismatch/by_age/4+/compared_tokens"] == 2


# -- no arrangement changes it --------------------------------------------------------------------


@EXAMPLES
@given(tokens(), st.data())
def test_padding_can_hold_anything(case, data):
    logprobs, rollout, lengths = case
    if not lengths:
        return
    plain = report(logprobs, rollout, lengths).to_metrics()
    padding = torch.tensor(data.draw(st.lists(anything, min_size=1, max_size=5)))
    into = data.draw(st.integers(0, len(lengths) - 1))
    at = sum(lengths[:into]) + data.draw(st.integers(0, lengths[into]))

    def pad(x, filler):
        return torch.cat([x[:at], filler, x[at:]])

    ones = torch.ones(len(logprobs), dtype=torch.bool)
    padded = report(
        pad(logprobs, padding), pad(rollout, padding.flip(0)),
        [n + len(padding) * (i == into) for i, n in enumerate(lengths)],
        pad(ones, torch.zeros(len(padding), dtype=torch.bool)),
    )  # fmt: skip
    same(padded.to_metrics(), plain)


@EXAMPLES
@given(tokens(), st.integers(0, 5))
def test_reports_of_any_split_by_rows_merge_to_that_of_the_whole(case, cut):
    logprobs, rollout, lengths = case
    at = sum(lengths[:cut])
    parts = [
        report(logprobs[:at], rollout[:at], lengths[:cut]),
        report(logprobs[at:], rollout[at:], lengths[cut:]),
    ]
    whole = report(*case).to_metrics()
    same(parts[0].merge(parts[1]).to_metrics(), whole)
    same(parts[1].merge(parts[0]).to_metrics(), whole)
    same(parts[0].merge(MismatchReport.empty()).merge(parts[1]).to_metrics(), whole)


@EXAMPLES
@given(tokens(), st.randoms(use_true_random=False))
def test_the_order_of_the_tokens_of_a_row_does_not_matter(case, rng):
    logprobs, rollout, lengths = case
    order, start = [], 0
    for size in lengths:
        row = list(range(start, start + size))
        rng.shuffle(row)
        order, start = order + row, start + size
    same(report(logprobs[order], rollout[order], lengths).to_metrics(), report(*case).to_metrics())


@EXAMPLES
@given(tokens())
def test_tokens_that_are_not_finite_are_left_out_and_counted(case):
    logprobs, rollout, lengths = case
    is_finite = torch.isfinite(logprobs) & torch.isfinite(rollout)
    found = report(*case).to_metrics()
    assert found["mismatch/nonfinite_tokens"] == int((~is_finite).sum())
    assert found["mismatch/compared_tokens"] == int(is_finite.sum())
    left = [int(part.sum()) for part in is_finite.split(lengths)] if lengths else []
    kept = report(logprobs[is_finite], rollout[is_finite], left).to_metrics()
    same({**found, "mismatch/nonfinite_tokens": 0.0}, kept)
    assert found["mismatch/k3"] >= 0 and 0 < found["mismatch/ess"] <= 1 + 1e-6


def test_long_batches_are_measured_in_chunks_with_the_same_result():
    size = 2 * CHUNK_TOKENS + 77
    trainer, rollout, numbers = make_tokens(size)
    lengths = [size // 3, 0, size - size // 3 - 5, 5]
    numbers["turns"] = torch.arange(size) % 9
    whole = report(trainer, rollout, lengths, facts=TokenFacts(**numbers))
    # the same tokens in rows that no chunk cuts: everything but figures of sequences is equal
    parts = report(trainer, rollout, [64] * (size // 64) + [size % 64], facts=TokenFacts(**numbers))
    of_sequences = ("/log_ppl", "/chi2_sequence")
    left, right = (
        {n: v for n, v in r.to_metrics().items() if not any(s in n for s in of_sequences)}
        for r in (whole, parts)
    )
    same(left, right)
    d = (trainer - rollout).double()
    rows = [r.mean() for r in d.split(lengths) if len(r)]
    found = whole.to_metrics()["mismatch/log_ppl_diff_mean"]
    assert found == pytest.approx(-float(torch.stack(rows).mean()), rel=1e-9)


# -- what is refused ------------------------------------------------------------------------------


def test_a_layout_of_another_length_is_refused_with_both():
    with pytest.raises(AlignmentError, match=r"\[2\].*\[3\], rollout_log"):
        measure(torch.zeros(3), torch.zeros(3), layout=Layout.packed([2]))


@pytest.mark.parametrize("name", ["advantages", "ages", "turns", "positions", "kinds"])
def test_facts_of_another_length_are_named(name):
    facts = TokenFacts(**{name: torch.zeros(2)})
    with pytest.raises(AlignmentError, match=rf"shape \[3\]; found {name} \[2\]"):
        measure(torch.zeros(3), torch.zeros(3), facts=facts)
