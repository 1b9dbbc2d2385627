"""Rows that begin alike: what they share, and which of them a micro-batch holds."""

import numpy as np
import pytest
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.training.forest import plan_forest, share_beginnings

FORESTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


def rows_of(lists):
    return {10 + i: np.array(row, np.int32) for i, row in enumerate(lists)}


def num_distinct(rows):
    return len(share_beginnings(list(rows))[1])


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12))
@settings(max_examples=2000 if PROOF else 200, deadline=None)
def test_beginnings_are_shared_exactly_where_rows_are_equal(rows):
    index, ids, positions = share_beginnings([np.array(r, np.int32) for r in rows])
    beginnings = {tuple(r[: n + 1]) for r in rows for n in range(len(r))}
    assert len(ids) == len(positions) == len(beginnings)
    for row, at in zip(rows, index, strict=True):
        assert ids[at].tolist() == row
        assert positions[at].tolist() == list(range(len(row)))
    for a, at in zip(rows, index, strict=True):
        for b, bt in zip(rows, index, strict=True):
            for n in range(min(len(a), len(b))):
                assert (at[n] == bt[n]) == (a[: n + 1] == b[: n + 1])


@given(FORESTS, st.integers(8, 40), st.integers(1, 4), st.lists(st.integers(1, 8), min_size=12))
@settings(max_examples=2000 if PROOF else 200, deadline=None)
def test_a_plan_has_every_row_once_within_the_budget(lists, budget, num_ranks, trained):
    rows = rows_of(lists)
    num_trained = dict(zip(rows, trained, strict=False))
    plan = plan_forest(rows, num_trained, budget, num_ranks=num_ranks)
    assert sorted(row for part in plan for row in part.rows) == sorted(rows)
    for part in plan:
        assert part.num_tokens == num_distinct(rows[row] for row in part.rows) <= budget
        assert part.num_trained == sum(num_trained[row] for row in part.rows) <= budget
        lengths = [len(rows[row]) for row in part.rows]
        assert lengths == sorted(lengths, reverse=True)
    assert plan == plan_forest(rows, num_trained, budget, num_ranks=num_ranks)


@given(FORESTS, st.integers(8, 40))
@settings(max_examples=2000 if PROOF else 200, deadline=None)
def test_a_tree_that_fits_is_computed_once(lists, budget):
    rows = rows_of(lists)
    plan = plan_forest(rows, dict.fromkeys(rows, 0), budget)
    for root in {row[0] for row in lists}:
        tree = {number for number, row in rows.items() if row[0] == root}
        if num_distinct(rows[number] for number in tree) <= budget:
            assert sum(not tree.isdisjoint(part.rows) for part in plan) == 1


def first_fit(lengths, room):
    """Each row into the first micro-batch with room for it, the longest first."""
    plan = []
    for row in sorted(lengths, key=lambda row: (-lengths[row], row)):
        found = next((p for p in plan if sum(lengths[r] for r in p) + lengths[row] <= room), None)
        if found is None:
            plan.append(found := [])
        found.append(row)
    return plan


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(9, 30))
@settings(max_examples=1000 if PROOF else 100, deadline=None)
def test_rows_that_share_nothing_are_packed_by_first_fit(lengths, budget):
    rows = {i: np.arange(n, dtype=np.int32) + 100 * i for i, n in enumerate(lengths)}
    plan = plan_forest(rows, dict.fromkeys(rows, 0), budget)
    assert [part.rows for part in plan] == first_fit(dict(enumerate(lengths)), budget)


def group(prompt, replies, first=1000):
    """Rows of one prompt, with replies of these lengths."""
    ends = first + np.cumsum(replies)
    bodies = [np.arange(end - n, end) for end, n in zip(ends, replies, strict=True)]
    return [np.concatenate([prompt, body]).astype(np.int32) for body in bodies]


def test_groups_are_not_spread_over_micro_batches():
    """Four groups in turn, as a batch of rows has them: 4 * (200 + 4 * 20) distinct tokens."""
    groups = [group(np.arange(200) + 300 * g, [20] * 4, 2000 * (g + 1)) for g in range(4)]
    rows = dict(enumerate(row for of_task in zip(*groups, strict=True) for row in of_task))
    plan = plan_forest(rows, dict.fromkeys(rows, 20), 300)
    assert [part.num_tokens for part in plan] == [280] * 4
    assert num_distinct(rows.values()) == 4 * 280
    # as before, by length: one row per micro-batch, 16 * 220 tokens
    assert len(first_fit({i: len(row) for i, row in rows.items()}, 300)) == 16


def test_a_tree_over_the_budget_is_split_near_its_root():
    prompt = np.arange(100)
    left = group(np.r_[prompt, 200:250], [10] * 5)
    right = group(np.r_[prompt, 300:350], [10] * 5, 3000)
    rows = dict(enumerate([*left, *right]))
    plan = plan_forest(rows, dict.fromkeys(rows, 10), 200)
    assert sorted(sorted(part.rows) for part in plan) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [part.num_tokens for part in plan] == [200, 200]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_compute_like_numbers_of_distinct_tokens(num_ranks):
    """A group of 16: its prompt is computed on each rank, its replies on one."""
    rows = dict(enumerate(group(np.arange(2048), [256] * 16)))
    plan = plan_forest(rows, dict.fromkeys(rows, 256), 100_000, num_ranks=num_ranks)
    assert [part.num_tokens for part in plan] == [2048 + 16 // num_ranks * 256] * num_ranks


def test_rows_that_share_nothing_leave_no_rank_idle():
    rows = {i: np.arange(50 + i, dtype=np.int32) + 1000 * i for i in range(8)}
    plan = plan_forest(rows, dict.fromkeys(rows, 1), 100_000, num_ranks=4)
    assert [len(part.rows) for part in plan] == [2] * 4
    assert plan_forest({}, {}, 100, num_ranks=4) == []


def test_a_chain_of_a_thousand_turns_is_planned():
    """Each row is the beginning of the next one."""
    whole = np.arange(3000, dtype=np.int32)
    rows = {i: whole[: 3 * (i + 1)] for i in range(1000)}
    plan = plan_forest(rows, dict.fromkeys(rows, 3), 3000)
    assert [part.num_tokens for part in plan] == [3000]


def test_other_routes_are_other_tokens():
    ids = np.array([7, 8, 9], np.int32)
    routes = np.zeros((3, 1, 2), np.int16)
    other = routes.copy()
    other[1] = 5
    rows = {0: ids, 1: ids.copy()}
    plan = plan_forest(rows, {0: 1, 1: 1}, 5, routes={0: routes, 1: other})
    assert [(part.rows, part.num_tokens) for part in plan] == [([0, 1], 5)]
    split = plan_forest(rows, {0: 1, 1: 1}, 4, routes={0: routes, 1: other})
    assert [part.rows for part in split] == [[0], [1]]
