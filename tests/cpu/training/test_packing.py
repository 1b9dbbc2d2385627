"""Rows into micro-batches and back: nothing lost, doubled or shifted."""

import numpy as np
import pytest
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import make_rows

from lockstep.errors import AlignmentError, ConfigError
from lockstep.training.packing import pack, plan_microbatches, shift, split_updates
from lockstep.types import Sample


@st.composite
def samples(draw):
    out = []
    for i in range(draw(st.integers(0, 6))):
        length = draw(st.integers(1, 12))
        mask = np.array([False, *draw(st.lists(st.booleans(), min_size=length - 1,
                                               max_size=length - 1))])  # fmt: skip
        index = np.arange(length)
        out.append(
            Sample(
                id=f"s{i}/0",
                token_ids=(100 * i + index).astype(np.int32),
                loss_mask=mask,
                columns={
                    "advantages": (100 * i + index).astype(np.float32),
                    "turn": (1000 * i + index).astype(np.int32),
                },
            )
        )
    return out


@settings(max_examples=1000 if PROOF else 60, deadline=None)
@given(samples(), st.integers(12, 40))
def test_every_trained_token_arrives_once_with_its_own_columns(rows, budget):
    plan = plan_microbatches(rows, budget)
    batches = list(pack(rows, plan))
    assert sum(len(b.targets) for b in batches) == sum(s.num_trained for s in rows)
    seen = []
    for batch in batches:
        assert len(batch.ids) <= budget
        # the token before the target, in the packed input as in the row
        assert (batch.ids[batch.predictors] == batch.targets - 1).all()
        assert (batch.positions[batch.predictors] == batch.targets % 100 - 1).all()
        assert (batch.columns["advantages"] == batch.targets).all()
        assert (batch.columns["turn"] == batch.targets // 100 * 1000 + batch.targets % 100).all()
        counted = np.bincount(batch.row.numpy(), minlength=batch.num_rows)
        assert batch.sizes.tolist() == counted.tolist()
        for row, places, values in batch.unpack(batch.targets):
            assert (rows[row].token_ids[places] == values).all()
            assert (np.flatnonzero(rows[row].loss_mask) == places).all()
            seen.append(row)
    assert sorted(seen) == [i for i, s in enumerate(rows) if s.num_trained]
    assert plan == plan_microbatches(rows, budget)


def test_the_shift_points_at_the_token_before():
    predictors, targets = shift(np.array([False, True, False, False, True, True]))
    assert predictors.tolist() == [0, 3, 4]
    assert targets.tolist() == [1, 4, 5]


def test_a_row_over_the_budget_is_named():
    rows = make_rows([10, 30, 12])
    with pytest.raises(ConfigError, match=r"t1/0.*30.*20.*30"):
        plan_microbatches(rows, 20)


@pytest.mark.parametrize("plan", [[[0, 1]], [[0], [1], [1], [2]], [[0, 1, 2, 2]]])
def test_a_lost_or_doubled_row_is_an_alignment_error(plan):
    with pytest.raises(AlignmentError, match="marked as trained"):
        pack(make_rows([8, 9, 10]), plan)


def test_rows_of_different_columns_are_refused_by_name():
    rows = make_rows([8, 9])
    rows[1].set("weights", np.ones(9, np.float32))
    with pytest.raises(AlignmentError, match="t1/0"):
        pack(rows, [[0, 1]])


def test_what_follows_the_last_trained_token_is_not_computed():
    rows = make_rows([12])
    rows[0].loss_mask[:] = False
    rows[0].loss_mask[3] = True
    (batch,) = pack(rows, [[0]])
    assert len(batch.ids) == 3 and batch.predictors.tolist() == [2]


def test_updates_share_the_rows_between_them():
    rows = make_rows([8] * 5)
    parts = split_updates(rows, 3)
    assert [[s.id for s in p] for p in parts] == [["t0/0", "t3/0"], ["t1/0", "t4/0"], ["t2/0"]]
    assert len(split_updates(rows, 9)) == 5
