"""The report of every step: what it says, and that no arrangement of the tokens changes it."""

import math

import numpy as np
import pytest
import torch
from conftest import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.correction import metrics as module
from lockstep.correction.metrics import MismatchReport
from lockstep.errors import AlignmentError
from lockstep.types import FORCED_LOGPROB

EXAMPLES = settings(max_examples=1000 if PROOF else 50, deadline=None)
values = st.floats(-30, 0, width=32)
anything = st.one_of(values, st.just(math.nan), st.just(-math.inf), st.just(math.inf))


@st.composite
def tokens(draw, max_rows=5):
    """(logprobs, rollout, row) of rows with 0..6 tokens, some of them not finite."""
    rows = draw(st.lists(st.lists(st.tuples(anything, anything), max_size=6), max_size=max_rows))
    flat = [pair for row in rows for pair in row]
    index = [i for i, row in enumerate(rows) for _ in row]
    return (
        torch.tensor([a for a, _ in flat], dtype=torch.float32),
        torch.tensor([b for _, b in flat], dtype=torch.float32),
        torch.tensor(index, dtype=torch.int64),
        len(rows),
    )


def same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert math.isfinite(value)
        assert value == pytest.approx(right[name], rel=1e-9, abs=1e-12), name


def report(logprobs, rollout, row, num_rows, mask=None):
    return MismatchReport.of(logprobs, rollout, row=row, num_rows=max(num_rows, 1), mask=mask)


def test_every_number_is_what_the_formula_says():
    trainer = np.array([-1.0, -2.0, -0.5, -3.0, -0.001, -4.0], np.float32)
    rollout = np.array([-1.0, -2.5, -0.6, -2.0, -0.002, -4.00005], np.float32)
    row = torch.tensor([0, 0, 0, 1, 1, 1])
    found = MismatchReport.of(
        torch.from_numpy(trainer), torch.from_numpy(rollout), row=row, num_rows=2
    ).to_metrics()
    d = trainer.astype(np.float64) - rollout.astype(np.float64)
    k3 = np.exp(d) - 1 - d
    unforced = rollout <= FORCED_LOGPROB
    ratio = np.exp(d)
    per_row = [abs(d[:3].mean()), abs(d[3:].mean())]
    expected = {
        "k1": -d.mean(), "k2": 0.5 * (d**2).mean(), "k3": k3.mean(),
        "k1_unforced": -d[unforced].mean(), "k2_unforced": 0.5 * (d[unforced] ** 2).mean(),
        "k3_unforced": k3[unforced].mean(), "max_abs_diff": np.abs(d).max(),
        "log_ratio_max": d.max(), "log_ratio_min": d.min(), "unequal_tokens": 5,
        "outlier_tokens": 4, "compared_tokens": 6, "forced_share": 1 / 6, "nonfinite_tokens": 0,
        "ess": ratio.sum() ** 2 / (6 * (ratio**2).sum()),
        "log_ppl_abs_diff_max": max(per_row), "log_ppl_abs_diff_mean": np.mean(per_row),
    }  # fmt: skip
    for name, value in expected.items():
        assert found[f"mismatch/{name}"] == pytest.approx(float(value), rel=1e-12), name


@EXAMPLES
@given(tokens(), st.data())
def test_padding_can_hold_anything(case, data):
    logprobs, rollout, row, num_rows = case
    plain = report(logprobs, rollout, row, num_rows).to_metrics()
    padding = torch.tensor(data.draw(st.lists(anything, min_size=1, max_size=5)))
    at = data.draw(st.integers(0, len(row)))

    def pad(x, filler):
        return torch.cat([x[:at], filler, x[at:]])

    mask = pad(torch.ones(len(row), dtype=torch.bool), torch.zeros(len(padding), dtype=torch.bool))
    padded = report(
        pad(logprobs, padding), pad(rollout, padding.flip(0)),
        pad(row, torch.zeros(len(padding), dtype=torch.int64)), num_rows, mask,
    )  # fmt: skip
    same(padded.to_metrics(), plain)


@EXAMPLES
@given(tokens(), st.integers(0, 5))
def test_reports_of_any_split_by_rows_merge_to_that_of_the_whole(case, cut):
    logprobs, rollout, row, num_rows = case
    first = row < cut
    parts = [report(logprobs[i], rollout[i], row[i], num_rows) for i in (first, ~first)]
    same(parts[0].merge(parts[1]).to_metrics(), report(*case).to_metrics())
    same(parts[1].merge(parts[0]).to_metrics(), report(*case).to_metrics())


@EXAMPLES
@given(tokens(), st.randoms(use_true_random=False))
def test_the_order_of_tokens_does_not_matter(case, rng):
    logprobs, rollout, row, num_rows = case
    order = list(range(len(row)))
    rng.shuffle(order)
    same(
        report(logprobs[order], rollout[order], row[order], num_rows).to_metrics(),
        report(*case).to_metrics(),
    )


@EXAMPLES
@given(tokens())
def test_tokens_that_are_not_finite_are_left_out_and_counted(case):
    logprobs, rollout, row, num_rows = case
    is_finite = torch.isfinite(logprobs) & torch.isfinite(rollout)
    found = report(*case).to_metrics()
    assert found["mismatch/nonfinite_tokens"] == int((~is_finite).sum())
    assert found["mismatch/compared_tokens"] == int(is_finite.sum())
    kept = report(logprobs[is_finite], rollout[is_finite], row[is_finite], num_rows).to_metrics()
    same({**found, "mismatch/nonfinite_tokens": 0.0}, kept)
    assert found["mismatch/k3"] >= 0 and 0 < found["mismatch/ess"] <= 1 + 1e-12


def test_long_batches_are_measured_in_chunks_with_the_same_result(monkeypatch):
    g = torch.Generator().manual_seed(0)
    trainer = -torch.rand(1000, generator=g)
    rollout = trainer + 1e-3 * torch.randn(1000, generator=g)
    row = torch.arange(1000) // 90
    whole = report(trainer, rollout, row, 12).to_metrics()
    monkeypatch.setattr(module, "CHUNK_TOKENS", 64)
    same(report(trainer, rollout, row, 12).to_metrics(), whole)


def test_nothing_compared_is_zero_and_says_so():
    for found in (MismatchReport.empty(), MismatchReport.of(torch.zeros(0), torch.zeros(0))):
        metrics = found.to_metrics("mismatch_after")
        assert metrics.pop("mismatch_after/ess") == 1.0
        assert set(metrics.values()) == {0.0}
    nan = torch.full((3,), float("nan"))
    assert MismatchReport.of(nan, nan).to_metrics()["mismatch/nonfinite_tokens"] == 3.0


def test_equal_sides_have_no_mismatch_at_all():
    logprobs = -torch.rand(100)
    found = MismatchReport.of(logprobs, logprobs.clone()).to_metrics()
    nonzero = {name for name, value in found.items() if value}
    assert nonzero <= {"mismatch/compared_tokens", "mismatch/ess", "mismatch/forced_share"}
    assert found["mismatch/ess"] == 1.0


def test_a_shift_by_one_token_shows_in_k2_and_k3_though_k1_cancels():
    g = torch.Generator().manual_seed(0)
    logprobs = -5 * torch.rand(4000, generator=g)
    shifted = MismatchReport.of(logprobs, logprobs.roll(1)).to_metrics()
    assert abs(shifted["mismatch/k1"]) < 1e-6
    assert shifted["mismatch/k2"] > 1 and shifted["mismatch/k3"] > 1


def test_quantiles_are_right_to_six_percent_on_both_sides():
    g = torch.Generator().manual_seed(0)
    for scale in (1e-7, 1e-4, 1.0):
        d = scale * torch.randn(20_000, generator=g, dtype=torch.float64)
        found = MismatchReport.of(d, torch.zeros_like(d)).to_metrics()
        for name, q in (("p99", 0.99), ("p1", 0.01), ("p99_9", 0.999), ("p0_1", 0.001)):
            exact = float(torch.quantile(d, q))
            # a bin's half width is 1.06; the quantile itself lies between two draws
            assert found[f"mismatch/log_ratio_{name}"] == pytest.approx(exact, rel=0.08)
        assert abs(found["mismatch/log_ratio_p50"]) < 0.05 * scale


def test_extreme_ratios_stay_finite():
    found = MismatchReport.of(torch.tensor([0.0, -900.0]), torch.tensor([-900.0, 0.0])).to_metrics()
    assert all(math.isfinite(v) for v in found.values())
    assert found["mismatch/max_abs_diff"] == 900.0


def test_a_row_index_of_another_length_is_refused():
    with pytest.raises(AlignmentError, match=r"row has the shape \[2\], logprobs \[3\]"):
        MismatchReport.of(torch.zeros(3), torch.zeros(3), row=torch.zeros(2, dtype=torch.int64))
