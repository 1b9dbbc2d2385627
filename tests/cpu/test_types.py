"""The nouns: the token forest and its rows, and the invariants that raise."""

import numpy as np
import pytest
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.dialogues import read_messages
from lockstep.errors import AlignmentError, DataError, TokenError
from lockstep.types import COLUMNS, Group, Message, Sample, Task, ToolCall, Trajectory


def two_turns():
    """prompt 1 2 | sampled 3 4 | observed 5 | sampled 6 7 8"""
    t = Trajectory(id="t")
    prompt = t.observe([1, 2])
    first = t.record([3, 4], logprobs=[-0.5, -0.1], parent=prompt, prompt_ids=[1, 2], stop=4)
    tool = t.observe([5], parent=first)
    last = t.record(
        [6, 7, 8],
        logprobs=[-1.0, -2.0, -3.0],
        parent=tool,
        prompt_ids=[1, 2, 3, 4, 5],
        policy_version=3,
        stop=8,
    )
    return t, (prompt, first, tool, last)


def test_a_row_is_what_the_model_saw_to_the_last_token_of_the_last_turn():
    t, (*_, last) = two_turns()
    row = t.row(last)
    nan = float("nan")
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row.loss_mask.tolist() == [False, False, True, True, False, True, True, True]
    np.testing.assert_equal(
        row.columns["rollout_logprobs"],
        np.array([nan, nan, -0.5, -0.1, nan, -1, -2, -3], np.float32),
    )
    assert row.columns["turn"].tolist() == [-1, -1, 0, 0, -1, 1, 1, 1]
    assert row.columns["policy_version"].tolist() == [-1, -1, 0, 0, -1, 3, 3, 3]
    assert row.num_trained == 5


def test_a_shared_turn_is_trained_in_one_row_only():
    t, (_, first, *_rest, last) = two_turns()
    other = t.observe([9], parent=first, reason="retry")
    second = t.record([7], logprobs=[-1.0], parent=other, prompt_ids=[1, 2, 3, 4, 9])
    t.rewards = {last: 1.0, second: 0.0}
    rows = list(t.rows())
    assert [r.token_ids.tolist() for r in rows] == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 7]]
    assert sum(r.num_trained for r in rows) == t.num_sampled_tokens == 6
    assert rows[1].loss_mask.tolist() == [False] * 5 + [True]


def test_a_leaf_without_a_reward_is_no_row():
    t, _ = two_turns()
    assert list(t.rows()) == []


def test_a_turn_that_crosses_a_weight_update_is_two_segments_of_one_turn():
    t = Trajectory(id="t")
    prompt = t.observe([1])
    a = t.record([2], logprobs=[-1], parent=prompt, prompt_ids=[1], finish_reason="weight_update")
    b = t.record([3], logprobs=[-1], parent=a, prompt_ids=[1, 2], policy_version=1)
    after = t.observe([4], parent=b)
    assert [t.segments[i].turn for i in (a, b, after)] == [0, 0, 1]
    assert t.num_turns == 1


def test_segments_cannot_be_changed():
    t, (_, first, *_) = two_turns()
    with pytest.raises(ValueError, match="read-only"):
        t.segments[first].token_ids[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        t.segments[first].logprobs[0] = 0


RECORD = {"logprobs": [-1.0, -1.0], "parent": 0, "prompt_ids": [1, 2]}
WRONG = {
    "a prompt of another length": ({"prompt_ids": [1]}, r"has 1 ids, its path has 2"),
    "a prompt that differs": ({"prompt_ids": [1, 9]}, r"at token 1: 9 was sent, 2 is recorded"),
    "a missing log-prob": ({"logprobs": [-1.0]}, r"2 sampled ids but 1 log-probs"),
    "a log-prob that is no number": (
        {"logprobs": [-1.0, float("nan")]},
        r"token 1 \(id 4\) has the log-prob nan",
    ),
    "a probability": ({"logprobs": [-1.0, 0.9]}, r"has the log-prob 0.9.*shifted"),
    "a stop in the middle": ({"stop": 3}, r"stop id 3 must be the last.*token 0 of 2"),
    "a stop that is missing": ({"stop": 5}, r"stop id 5 must be the last.*missing"),
    "a parent that is none": ({"parent": 7}, r"segment 1 \(parent 7\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_violated_invariant_names_segment_and_token(case):
    change, message = WRONG[case]
    t = Trajectory(id="episode")
    t.observe([1, 2])
    with pytest.raises(TokenError, match=message) as error:
        t.record([3, 4], **{**RECORD, **change})
    assert "episode" in str(error.value)
    assert len(t.segments) == 1


@pytest.mark.parametrize(
    ("ids", "message"), [([], "it has no ids"), ([-1], "id -1"), ([2**31], "2147483648")]
)
def test_ids_that_cannot_be_are_refused(ids, message):
    with pytest.raises(TokenError, match=message):
        Trajectory(id="t").observe(ids)


def test_rounding_above_zero_is_clamped_and_counted():
    t = Trajectory(id="t")
    at = t.record([2], logprobs=[5e-7], parent=t.observe([1]), prompt_ids=[1])
    assert t.segments[at].logprobs.tolist() == [0.0]
    assert t.metrics == {"clamped_logprobs": 1}
    t.record([3], logprobs=[-0.5], parent=at, prompt_ids=[1, 2])
    assert t.metrics == {"clamped_logprobs": 1}


def test_a_reward_belongs_to_a_sampled_segment():
    t, (prompt, first, *_) = two_turns()
    t.set_segment_reward(first, 0.5)
    assert t.segments[first].reward == 0.5
    with pytest.raises(TokenError, match="only a sampled segment"):
        t.set_segment_reward(prompt, 0.5)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5), st.booleans()), max_size=25))
@settings(max_examples=2000 if PROOF else 100, deadline=None)
def test_in_any_forest_every_sampled_token_is_trained_once(steps):
    t = Trajectory(id="t")
    t.observe([1])
    for parent, size, is_sampled in steps:
        parent %= len(t.segments)
        ids = [10 + len(t.segments)] * size
        if is_sampled:
            t.record(ids, logprobs=[-1.0] * size, parent=parent, prompt_ids=t.path_ids(parent))
        else:
            t.observe(ids, parent=parent)
    t.rewards = dict.fromkeys(t.leaves(), 1.0)
    rows = list(t.rows())
    assert sum(row.num_trained for row in rows) == t.num_sampled_tokens
    owned = [i for row in rows for i in row.segments]
    assert len(owned) == len(set(owned))
    for row in rows:
        assert row.token_ids.tolist() == t.path_ids(row.leaf).tolist()


# -- samples --------------------------------------------------------------------------------------


def make_sample(**change):
    ids = np.array([1, 2, 3], np.int32)
    return Sample(
        **{"id": "t/0", "token_ids": ids, "loss_mask": np.array([0, 1, 1], bool), **change}
    )


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(AlignmentError, match=r"\b3\b.*loss_mask.*\b2\b"):
        make_sample(loss_mask=np.ones(2, bool))


def test_the_first_token_cannot_be_trained():
    with pytest.raises(AlignmentError, match=r"token 0\b"):
        make_sample(loss_mask=np.ones(3, bool))


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("advantages", np.zeros(2, np.float32), r"float32 \[3\].*float32 \[2\]"),
        ("advantages", np.zeros(3), r"float32 \[3\].*float64 \[3\]"),
        ("advantage", np.zeros(3, np.float32), "'advantage'"),
    ],
)
def test_a_column_that_does_not_fit_is_refused(name, column, message):
    with pytest.raises(AlignmentError, match=message):
        make_sample().set(name, column)


def test_a_log_prob_that_does_not_exist_is_never_a_number():
    for name, spec in COLUMNS.items():
        assert (spec.fill is None) == spec.is_ragged
        assert spec.is_ragged or np.isnan(spec.fill) == ("logprobs" in name or name == "values")


# -- messages and settings ------------------------------------------------------------------------


def test_messages_read_the_openai_form_and_write_one_that_reads_back_equal():
    source = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"name": "g", "arguments": {"b": 2}},
        ],
    }
    message = Message.from_dict(source)
    assert message.thinking == "hm"
    assert message.tool_calls == (
        ToolCall(name="f", arguments='{"a": 1}', id="c1"),
        ToolCall(name="g", arguments='{"b": 2}'),
    )
    assert Message.from_dict(message.to_dict()) == message


def test_a_model_may_draw_a_call_without_a_name_and_is_answered():
    call = {"id": "c1", "type": "function", "function": {"name": "", "arguments": "{}"}}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "no such tool"}
    asked, answered = read_messages(
        [{"role": "assistant", "tool_calls": [call]}, answer], where="here"
    )
    assert asked.tool_calls[0].name == answered.name == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"role": "robot"}, "'robot'"),
        ({"role": "user", "content": [{"type": "image"}]}, r"content\[0\].type.*.image"),
        ({"role": "user", "contents": "x"}, r"\['contents'\]"),
        ({"role": "tool", "content": "x"}, "`name`"),
        ({"role": "user", "tool_calls": [{"name": "f", "arguments": "{}"}]}, "has tool_calls"),
        ({"role": "user", "content": "?", "reasoning": "Hm."}, "has thinking"),
    ],
)
def test_a_malformed_message_is_refused(source, message):
    with pytest.raises(DataError, match=message):
        Message.from_dict(source)


def test_a_failed_trajectory_has_no_say_in_its_groups_rewards():
    good, (*_, last) = two_turns()
    good.rewards[last] = 1.0
    bad = Trajectory(id="b", status="failed")
    assert Group(task=Task(id="x"), trajectories=[good, bad]).rewards == [1.0]
