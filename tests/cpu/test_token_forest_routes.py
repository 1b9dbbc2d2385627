"""The routes of a path: each segment keeps its own, and every gap is an error when it is made."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import RoutingReplayError
from lockstep.types import UNKNOWN_EXPERT, Trajectory

IDS = st.lists(st.integers(0, 9), min_size=1, max_size=3)


def routes_of(ids, start, stop):
    """[stop - start, 2, 3]: a function of a token's id and place, as a router's choice is of its
    path."""
    at = np.arange(start, stop)
    base = 7 * at + 3 * np.asarray(ids)[start:stop]
    return ((base[:, None] + np.arange(6)) % 200).reshape(-1, 2, 3).astype(np.uint8)


def sample(t, parent, ids, *, routes_from=None):
    """What the agent loop does with a reply that has routes."""
    prompt = t.path_ids(parent)
    start = t.num_routed(parent) if routes_from is None else routes_from
    path = [*prompt, *ids]
    return t.record(
        ids, logprobs=[-1.0] * len(ids), parent=parent, prompt_ids=prompt,
        routed_experts=routes_of(path, start, len(path) - 1),
        routes_from=start,
    )  # fmt: skip


def assert_whole(t, leaf):
    row = t.row(leaf)
    column = row.columns["routed_experts"]
    assert column.dtype == np.int16 and (column[-1] == UNKNOWN_EXPERT).all()
    assert np.array_equal(column[:-1], routes_of(row.token_ids, 0, len(row) - 1))


def test_a_segment_has_its_own_routes_and_its_parents_last():
    t = Trajectory(id="t")
    prompt = t.observe([1, 2, 3])
    first = sample(t, prompt, [4, 5])
    tool = t.observe([6], parent=first)
    last = sample(t, tool, [7, 8, 9])
    kept = [s.routed_experts for s in t.segments]
    assert [len(r) for r in kept] == [3, 1, 1, 2]
    has_boundary = [s.boundary_routes is not None for s in t.segments]
    assert has_boundary == [False, False, True, False]
    assert np.array_equal(t.segments[tool].boundary_routes, routes_of(t.path_ids(last), 4, 5)[0])
    assert all(r.dtype == np.uint8 and not r.flags.writeable for r in kept)
    assert_whole(t, last)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_the_routes_of_every_path_of_a_forest_are_whole(data):
    """Turns of one id and more, weight updates, turns that follow each other, forks anywhere."""
    t = Trajectory(id="t")
    t.observe(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    ends = []
    for _ in range(data.draw(st.integers(1, 6))):
        parent = data.draw(st.sampled_from([0, *ends]))
        if data.draw(st.booleans()):
            parent = t.observe(data.draw(IDS), parent=parent)
        for piece in data.draw(st.lists(IDS, min_size=1, max_size=3)):
            parent = sample(t, parent, piece)
            ends.append(parent)
    for leaf in ends:
        assert_whole(t, leaf)


def test_forks_that_were_asked_for_together_keep_what_came_first():
    t = Trajectory(id="t")
    prompt = t.observe([1, 2, 3])
    first = sample(t, prompt, [4], routes_from=0)
    kept = t.segments[prompt].routed_experts
    second = sample(t, prompt, [5, 6], routes_from=0)
    assert t.segments[prompt].routed_experts is kept
    assert_whole(t, first)
    assert_whole(t, second)


def test_a_path_without_routes_has_no_column_and_one_with_a_gap_says_where():
    t = Trajectory(id="t")
    prompt = t.observe([1, 2])
    plain = t.record([3, 4], logprobs=[-1, -1], parent=prompt, prompt_ids=[1, 2])
    assert "routed_experts" not in t.row(plain).columns and t.num_routed(plain) == 0
    other = sample(t, prompt, [5, 6])
    last = t.record([7], logprobs=[-1], parent=other, prompt_ids=[1, 2, 5, 6])
    column = t.row(last).columns["routed_experts"]
    assert (column[:, 0, 0] == UNKNOWN_EXPERT).tolist() == [False] * 3 + [True] * 2
    # A later request fills what the one before left out.
    assert t.num_routed(last) == 3
    assert_whole(t, sample(t, last, [8]))


@pytest.mark.parametrize(
    ("routes", "start", "text"),
    [
        (np.zeros((3, 2, 2), np.uint8), 0, r"\b3\b.*\b0\b.*4: 3\b"),
        (np.zeros((5, 2, 2), np.uint8), 0, "expected 4"),
        (np.zeros((1, 2, 2), np.uint8), 3, r"\b0\b.*\b2\b"),
        (np.zeros((4, 2), np.uint8), 0, r"uint8.*int16.*uint8 \[4, 2\]"),
        (np.zeros((4, 2, 2)), 0, r"float64 \[4, 2, 2\]"),
    ],
)
def test_routes_that_leave_a_gap_are_refused_with_both_counts(routes, start, text):
    t = Trajectory(id="t")
    prompt = t.observe([1, 2, 3])
    with pytest.raises(RoutingReplayError, match=rf"trajectory t, segment 1 \(parent 0\).*{text}"):
        t.record(
            [4, 5], logprobs=[-1, -1], parent=prompt, prompt_ids=[1, 2, 3], routed_experts=routes,
            routes_from=start,
        )  # fmt: skip
    assert len(t.segments) == 1 and t.segments[0].routed_experts is None


def test_routes_of_two_models_on_one_path_are_refused():
    t = Trajectory(id="t")
    leaf = sample(t, t.observe([1]), [2, 3])
    with pytest.raises(RoutingReplayError, match=r"\b1\b.*\b3\b.*\b2 x 3"):
        t.record(
            [4], logprobs=[-1], parent=leaf, prompt_ids=[1, 2, 3], routes_from=2,
            routed_experts=np.zeros((1, 1, 3), np.uint8),
        )  # fmt: skip
