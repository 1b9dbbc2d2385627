"""The correction over 1, 2 and 4 gloo processes: rows spread, rows split, and both at once."""

import math

import pytest
import torch
from correction_ranks import CORRECTIONS, LENGTHS, SPLITS, WORLD, make_batch, part_of, run, work
from processes import run_ranks

CASES = [(d, s, name) for d, s in SPLITS for name in CORRECTIONS]
EVERYTHING = part_of(0, data=1, sequence=1)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found, from one start of the processes for all tests."""
    return run_ranks(work, tmp_path_factory.mktemp("ranks"), world=WORLD)


def whole(results, key):
    """The results of the ranks, each token at its place among those of all rows."""
    parts = [of_rank[key] for of_rank in results if key in of_rank]
    index = torch.cat([part.index for part in parts])
    assert torch.equal(index.sort().values, torch.arange(sum(LENGTHS))), "each token once"
    found = {}
    for name in ("weights", "keep", "penalty"):
        values = [getattr(part.corrected, name) for part in parts]
        if values[0] is not None:
            found[name] = torch.empty(len(index), dtype=values[0].dtype)
            found[name][index] = torch.cat(values)
    return found, parts


@pytest.mark.parametrize(("data", "sequence", "name"), [*CASES, *((0, 0, n) for n in CORRECTIONS)])
def test_the_ranks_together_give_what_one_process_gives(ranks, data, sequence, name):
    found, parts = whole(ranks, (data, sequence, name))
    expected = run(CORRECTIONS[name], EVERYTHING).corrected
    assert torch.equal(found["keep"], expected.keep)
    # float32 weights divided by a float64 mean whose terms came in another order: one last bit
    torch.testing.assert_close(found["weights"], expected.weights, rtol=2e-7, atol=0)
    assert ("penalty" in found) == (expected.penalty is not None)
    if expected.penalty is not None:
        torch.testing.assert_close(found["penalty"], expected.penalty, rtol=1e-6, atol=1e-8)
    metrics = expected.to_metrics()
    for part in parts:
        assert torch.equal(part.corrected.denominator_tokens, expected.denominator_tokens)
        assert torch.equal(part.corrected.denominator_rows, expected.denominator_rows)
        assert part.corrected.to_metrics().keys() == metrics.keys()
        for key, value in part.corrected.to_metrics().items():
            # float64 sums in another order; a deviation is the root of a difference of two
            slack = 1e-7 if key.endswith("weight_std") else 1e-12
            assert value == pytest.approx(metrics[key], rel=1e-9, abs=slack), key


@pytest.mark.parametrize(("data", "sequence", "name"), CASES)
def test_every_rank_reports_the_same_bits(ranks, data, sequence, name):
    first, *others = [r[data, sequence, name].corrected.report for r in ranks[: data * sequence]]
    for other in others:
        assert torch.equal(first.sums, other.sums) and torch.equal(first.maxima, other.maxima)


@pytest.mark.parametrize(("data", "sequence", "name"), CASES)
def test_a_batch_costs_one_sum_and_one_maximum_and_split_rows_one_sum_more(
    ranks, data, sequence, name
):
    for rank in range(data * sequence):
        result = ranks[rank][data, sequence, name]
        report = result.corrected.report
        *of_rows, sums, maxima = result.collectives
        assert (sums, maxima) == (tuple(report.sums.shape), tuple(report.maxima.shape))
        assert len(of_rows) == (sequence > 1)
        for _, num_rows in of_rows:
            assert num_rows == len(part_of(rank, data=data, sequence=sequence).rows)


def test_the_batch_is_worth_the_test():
    """Rows are cut, shares are uneven, a rank is empty; and every correction does something."""
    shares = [len(part_of(r, data=4, sequence=1).index()) for r in range(4)]
    assert 0 in shares and len(set(shares)) > 2
    pieces = [part_of(r, data=1, sequence=4).pieces for r in range(4)]
    assert all(len(p[3]) for p in pieces), "the longest row is on every rank"
    assert any(not len(p[2]) for p in pieces), "a short one is not"
    batch = make_batch()
    assert sum(not math.isfinite(x) for x in (batch["new"] + batch["old"]).tolist()) == 3
    for name, correction in CORRECTIONS.items():
        found = run(correction, EVERYTHING).corrected
        kept = float(found.keep.float().mean())
        assert 0.1 < kept < 1, name
        if correction.reject:
            metrics = found.to_metrics()
            assert all(v > 0 for k, v in metrics.items() if "/rejected_by/" in k), (name, metrics)
        if correction.level != "none":
            assert len(found.weights.unique()) > 4, name
