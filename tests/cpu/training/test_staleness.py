"""How old tokens are when they are trained, and which rows are left out for it."""

import numpy as np
import pytest

from lockstep.training.rows import sort_by_age
from lockstep.types import Sample


def row(name, *versions):
    """One observed token, then one sampled token for each version."""
    sample = Sample(
        id=name,
        token_ids=np.arange(len(versions) + 1, dtype=np.int32),
        loss_mask=np.array([False, *(v >= 0 for v in versions)]),
    )
    sample.set("policy_version", np.array([-1, *versions], np.int32))
    return sample


ROWS = [row("fresh", 5, 5), row("crossed", 4, 5), row("old", 2, 4), row("untrained", -1)]


@pytest.mark.parametrize(
    ("over_stale", "kept"),
    [
        ("correct", ["fresh", "crossed", "old", "untrained"]),
        ("drop", ["fresh", "crossed", "untrained"]),
    ],
)
def test_rows_over_the_limit_are_counted_and_left_out_if_asked_for(over_stale, kept):
    rows, metrics = sort_by_age(ROWS, version=5, limit=2, over_stale=over_stale)
    assert [r.id for r in rows] == kept
    assert metrics == {
        "staleness/version": 5.0,
        "staleness/mean": pytest.approx(5 / 6),
        "staleness/max": 3.0,
        "staleness/mixed_rows": 2.0,
        "staleness/over_rows": 1.0,
        "staleness/dropped_rows": float(over_stale == "drop"),
    }


def test_a_batch_without_a_trained_token_has_no_age():
    assert sort_by_age(ROWS[3:], version=5, limit=0, over_stale="drop") == (ROWS[3:], {})
    assert sort_by_age([], version=5, limit=0, over_stale="drop") == ([], {})
