"""Ragged values, and the support of sampled tokens from the trajectory to the training row."""

import numpy as np
import pytest
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import AlignmentError, TokenError
from lockstep.types import Ragged, Sample, SamplingParams, Trajectory

LISTS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=8)


def lists_of(ragged):
    return [ids.tolist() for ids in ragged]


@settings(max_examples=500 if PROOF else 60, deadline=None)
@given(LISTS, LISTS, st.data())
def test_ragged_values_move_by_token_as_lists_do(left, right, data):
    a, b = Ragged.of(left), Ragged.of(right)
    assert lists_of(a) == left and a.sizes.tolist() == [len(x) for x in left]
    both = Ragged.concatenate([a, Ragged.empty(2), b])
    assert lists_of(both) == [*left, [], [], *right]
    tokens = data.draw(st.lists(st.integers(0, len(both) - 1), max_size=10))
    assert lists_of(both.take(tokens)) == [[*left, [], [], *right][i] for i in tokens]
    assert both.values.dtype == np.int32 and both.offsets.dtype == np.int64


def test_ragged_values_are_read_only():
    ragged = Ragged.of([[1, 2], [3]])
    with pytest.raises(ValueError, match="read-only"):
        ragged.values[0] = 5
    with pytest.raises(IndexError, match="token 2 of 2"):
        ragged[2]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 2], "begin with 0"),
        ([0, 2, 1], "not decrease"),
        ([0, 2], r"\b2\b.*\b3\b"),
        ([], "begin with 0"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(offsets, message):
    with pytest.raises(AlignmentError, match=message):
        Ragged(np.array([1, 2, 3], np.int32), np.array(offsets, np.int64))


def test_ids_out_of_range_are_refused():
    with pytest.raises(TokenError, match=r"token 1\b.*id -4"):
        Ragged.of([[3, -4]])


# -- trajectories ---------------------------------------------------------------------------------


def record(support, ids=(3, 4)):
    out = Trajectory(id="t")
    prompt = out.observe([1, 2])
    leaf = out.record(
        ids, logprobs=[-0.5] * len(ids), parent=prompt, prompt_ids=[1, 2], support=support
    )
    return out, leaf


def test_a_row_has_the_support_of_its_path_and_nothing_where_tokens_were_observed():
    trajectory, first = record(Ragged.of([[3, 9], [4]]))
    tool = trajectory.observe([7], parent=first)
    path = trajectory.path_ids(tool)
    last = trajectory.record([8], logprobs=[-1.0], parent=tool, prompt_ids=path)
    row = trajectory.row(last)
    assert lists_of(row.ragged["support"]) == [[], [], [3, 9], [4], [], []]
    assert "support" not in row.columns


def test_a_row_without_truncated_tokens_has_no_support():
    trajectory, leaf = record(None)
    assert trajectory.row(leaf).ragged == {}


@pytest.mark.parametrize(
    ("support", "message"),
    [
        (Ragged.of([[3]]), r"\b2\b.*\b1\b"),
        (Ragged.of([[3, 1], [5, 6]]), r"token 1\b.*\b4\b.*\b2\b.*\(5, 6\)"),
        (Ragged.of([range(3, 30), range(5, 30)]), r"25.*\b5\b.*12, \.\.\."),
        (Ragged(np.array([3, -1, 4], np.int32), np.array([0, 2, 3])), "id -1"),
    ],
)
def test_a_support_that_cannot_be_is_refused(support, message):
    with pytest.raises(TokenError, match=rf"trajectory t, segment 1 \(parent 0\).*{message}"):
        record(support)


def test_an_empty_entry_is_the_whole_vocabulary():
    trajectory, leaf = record(Ragged.of([[], [4, 5]]))
    assert lists_of(trajectory.segments[leaf].support) == [[], [4, 5]]


# -- rows and requests ----------------------------------------------------------------------------


def sample(**columns):
    return Sample("t/0", np.array([1, 2], np.int32), np.array([False, True]), **columns)


def test_a_ragged_column_has_an_entry_per_token_and_is_no_array():
    row = sample(ragged={"support": Ragged.of([[], [2]])})
    with pytest.raises(AlignmentError, match=r"t/0.*'support'.*\[2\].*\[3\]"):
        row.set("support", Ragged.empty(3))
    with pytest.raises(AlignmentError, match="'support'"):
        row.set("support", np.zeros(2, np.int32))
    with pytest.raises(AlignmentError, match="'turn'"):
        sample(ragged={"turn": Ragged.empty(2)})
    row.set("support", Ragged.of([[], [2, 1]]))
    assert lists_of(row.ragged["support"]) == [[], [2, 1]]


@pytest.mark.parametrize(
    ("settings", "is_truncated"),
    [
        ({}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 1}, True),
        ({"top_k": 4, "temperature": 0.0}, False),
    ],
)
def test_greedy_and_unfiltered_requests_are_not_truncated(settings, is_truncated):
    assert SamplingParams(max_tokens=1, **settings).is_truncated == is_truncated
