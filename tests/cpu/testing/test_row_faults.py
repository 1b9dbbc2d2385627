"""What each fault of rows and log-probs does to a row, and to nothing beside it."""

import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.doctor.ladder import token_match
from lockstep.models.locate import locate_model
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig, HarmonyConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Message, ToolCall, Trajectory

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "proof"))

from doctor_faults import (
    ClampedLogprobs,
    DroppedSeparators,
    DroppedThinking,
    DuplicatedPrompt,
    FillerLogprobs,
    InjectedControlTokens,
    PaddedRows,
    PostProcessedReplies,
    QuantisedLogprobs,
    RerenderedHistory,
    TokensAfterStop,
    TrainedObservations,
    WrongBoundary,
)

USER = Message(role="user", content="What is the city of Ruth?")
TOOL = Message(role="tool", name="search", content="The city of Ruth is Lima, they say.")
CALL = Message(
    role="assistant",
    thinking="I search.",
    tool_calls=(ToolCall(name="search", arguments='{"keywords": ["Ruth"]}'),),
)
ANSWER = Message(role="assistant", thinking="So it is.", content="Lima")
CHATML = ChatMLRenderer(
    Tokenizer.from_file(locate_model("tiny-qwen3")), ChatMLConfig(has_empty_thinking=False)
)
HARMONY = HarmonyRenderer(
    Tokenizer.from_file(locate_model("tiny-gpt-oss")),
    HarmonyConfig(system_message=False, developer_heading=False, tools_in_prompt=False),
)
BOTH = pytest.mark.parametrize("renderer", [CHATML, HARMONY], ids=["chatml", "harmony"])


def episode(renderer, id="train/0/a/0", replies=(CALL, ANSWER)):
    """A row of a call, a tool's reply and an answer; the n-th sampled token has -n / 8."""
    trajectory = Trajectory(id=id)
    leaf = trajectory.observe(renderer.render([USER]), messages=[USER])
    count = 1
    for number, reply in enumerate(replies):
        if number:
            glue = renderer.extend(trajectory.segments[leaf].token_ids, [TOOL])
            leaf = trajectory.observe(glue, parent=leaf, messages=[TOOL])
        ids = renderer.render_reply(reply)
        leaf = trajectory.record(
            ids, logprobs=-np.arange(count, count + len(ids)) / 8, parent=leaf,
            prompt_ids=trajectory.path_ids(leaf), messages=[reply],
        )  # fmt: skip
        count += len(ids)
    row = trajectory.row(leaf)
    row.set("advantages", np.where(row.loss_mask, 0.5, 0).astype(np.float32))
    return row


def by_the_model(rows):
    """Log-probs of a model that says -9 of every token."""
    return [np.where(row.loss_mask, -9, np.nan).astype(np.float32) for row in rows]


def change(fault, row, renderer=CHATML):
    before = row.token_ids.tolist(), row.loss_mask.tolist(), row.columns["turn"].tolist()
    (out,) = fault.change_rows([row], renderer, by_the_model)
    assert (row.token_ids.tolist(), row.loss_mask.tolist(), row.columns["turn"].tolist()) == before
    return out


def ids_of(row, turn):
    return row.token_ids[row.columns["turn"] == turn].tolist()


def logprobs_of(row):
    return row.columns["rollout_logprobs"][row.loss_mask]


def texts_of(row, renderer):
    return renderer.tokenizer.decode(row.token_ids)


# -- ids -------------------------------------------------------------------------------------------


@BOTH
def test_a_history_that_is_rendered_from_text_spells_its_calls_out(renderer):
    row = episode(renderer)
    out = change(RerenderedHistory(), row, renderer)
    assert ids_of(out, 1) == ids_of(row, 1)  # the last turn is never rendered
    assert ids_of(out, 0) != ids_of(row, 0)
    assert token_match([row], [out]) < 0.7
    count = len(ids_of(row, 0))
    kept = logprobs_of(out)[: len(logprobs_of(out)) - len(ids_of(row, 1))]
    assert kept.tolist() == logprobs_of(row)[:count][: len(kept)].tolist()
    assert texts_of(out, renderer).count("Lima") == texts_of(row, renderer).count("Lima")


def test_a_history_of_messages_that_the_template_writes_alike_is_the_same_row():
    row = episode(CHATML)
    out = change(RerenderedHistory(kept="message"), row)
    assert out.token_ids.tolist() == row.token_ids.tolist()
    np.testing.assert_array_equal(out.loss_mask, row.loss_mask)


def test_the_separator_is_the_line_break_behind_a_turn():
    row = episode(CHATML)
    out = change(DroppedSeparators(), row)
    assert "<|im_end|>\n<|im_start|>user\n<tool_response>" in texts_of(row, CHATML)
    assert "<|im_end|><|im_start|>user\n<tool_response>" in texts_of(out, CHATML)
    assert logprobs_of(out).tolist() == logprobs_of(row).tolist()
    assert change(DroppedSeparators(), episode(HARMONY), HARMONY).token_ids.tolist() == (
        episode(HARMONY).token_ids.tolist()
    )


@BOTH
def test_tokens_after_the_stop_are_trained_with_log_probs_of_the_model(renderer):
    row = episode(renderer)
    out = change(TokensAfterStop(count=3), row, renderer)
    assert out.token_ids[len(row) :].tolist() == ids_of(row, 1)[:3]
    assert out.loss_mask[len(row) :].all()
    assert logprobs_of(out)[-3:].tolist() == [-9.0] * 3
    assert set(out.columns["turn"][len(row) :]) == {1}
    open_row = episode(renderer)
    open_row.token_ids.setflags(write=True)
    open_row.token_ids[-1] = 5
    assert change(TokensAfterStop(), open_row, renderer) is open_row


@BOTH
def test_trained_observations_were_still_not_sampled(renderer):
    row = episode(renderer)
    out = change(TrainedObservations(), row, renderer)
    first = int(np.flatnonzero(row.loss_mask)[0])
    assert out.loss_mask[first:].all()
    np.testing.assert_array_equal(out.columns["turn"], row.columns["turn"])
    new = out.loss_mask & ~row.loss_mask
    assert set(out.columns["rollout_logprobs"][new]) == {-9.0}
    assert set(out.columns["advantages"][new]) == {0.5}
    filled = change(TrainedObservations(count=2, logprobs="filler"), row, renderer)
    new = filled.loss_mask & ~row.loss_mask
    assert new.sum() == 2
    assert set(filled.columns["rollout_logprobs"][new]) == {0.0}


def test_a_border_moves_the_mask_of_the_first_turn():
    row = episode(CHATML)
    first = int(np.flatnonzero(row.loss_mask)[0])
    out = change(WrongBoundary(by=-2), row)
    assert np.flatnonzero(out.loss_mask)[0] == first - 2
    out = change(WrongBoundary(by=3), row)
    assert np.flatnonzero(out.loss_mask)[0] == first + 3
    assert logprobs_of(out).tolist() == logprobs_of(row)[3:].tolist()


def test_a_border_by_subtraction_is_negative_where_the_replies_are_longer_than_the_rest():
    row = episode(CHATML, replies=(CALL, Message(role="assistant", content="Lima " * 60)))
    out = change(WrongBoundary(kind="subtracted"), row)
    replies = int((row.columns["turn"] >= 0).sum())
    cut = len(row) - len(ids_of(row, 1))
    assert out.token_ids.tolist() == row.token_ids[:cut].tolist()
    assert cut < replies
    assert logprobs_of(out).tolist() == logprobs_of(row)[replies - cut + 1 :].tolist()
    assert set(out.columns["advantages"][out.loss_mask]) == {0.5}


@BOTH
def test_the_prompt_stands_again_before_the_last_turn(renderer):
    row = episode(renderer)
    out = change(DuplicatedPrompt(), row, renderer)
    prompt = renderer.render([USER])
    at = int(np.flatnonzero(row.columns["turn"] == 1)[0])
    again = [*row.token_ids[:at], *prompt, *row.token_ids[at:]]
    assert out.token_ids.tolist() == again
    assert logprobs_of(out).tolist() == logprobs_of(row).tolist()


@pytest.mark.parametrize("place", ["left", "inside"])
def test_padding_is_neither_sampled_nor_trained(place):
    row = episode(CHATML)
    out = change(PaddedRows(count=4, place=place), row)
    at = np.flatnonzero(out.token_ids == CHATML.tokenizer.control_id("<|endoftext|>"))
    first = int(np.flatnonzero(row.loss_mask)[0])
    assert at.tolist() == list(range(4)) if place == "left" else list(range(first, first + 4))
    assert not out.loss_mask[at].any()
    assert set(out.columns["turn"][at]) == {-1}
    assert logprobs_of(out).tolist() == logprobs_of(row).tolist()


@BOTH
def test_a_stripped_reply_keeps_its_stop_and_the_log_probs_of_what_is_left(renderer):
    row = episode(renderer)
    out = change(PostProcessedReplies(count=2), row, renderer)
    assert len(out) == len(row) - 4
    for turn in (0, 1):
        assert ids_of(out, turn)[-1] == ids_of(row, turn)[-1]
    assert set(logprobs_of(out)) < set(logprobs_of(row))


def test_a_reply_that_was_cut_off_is_completed_with_a_stop_that_nobody_sampled():
    row = episode(CHATML)
    assert change(PostProcessedReplies(kind="completed"), row).token_ids.tolist() == (
        row.token_ids.tolist()
    )
    row.token_ids.setflags(write=True)
    row.token_ids[-1] = 5
    out = change(PostProcessedReplies(kind="completed"), row)
    assert out.token_ids.tolist() == [*row.token_ids, *CHATML.stop_ids]
    assert out.columns["rollout_logprobs"][-1] == 0.0
    assert out.loss_mask[-1]


@BOTH
def test_injected_control_tokens_stand_in_the_tools_text_and_both_sides_see_them(renderer):
    row = episode(renderer)
    out = change(InjectedControlTokens(), row, renderer)
    assert len(out) == len(row) + 1
    before, after = texts_of(out, renderer).split("The city of Ruth is")[1].split(" say.")[0], row
    assert renderer.tokenizer.decode(renderer.stop_ids[:1]) in before
    assert (logprobs_of(out) == -9).all()
    assert out.num_trained == after.num_trained


@BOTH
def test_thinking_is_dropped_from_every_turn_but_the_last(renderer):
    text = texts_of(change(DroppedThinking(), episode(renderer), renderer), renderer)
    assert "I search." not in text
    assert "So it is." in text
    assert text.count("keywords") == 1
    bare = episode(renderer, replies=(Message(role="assistant", content="no"), ANSWER))
    assert change(DroppedThinking(), bare, renderer) is bare


# -- numbers ---------------------------------------------------------------------------------------


def test_what_is_written_down_for_log_probs():
    row = episode(CHATML)
    assert set(logprobs_of(change(FillerLogprobs(), row))) == {0.0}
    last = logprobs_of(change(FillerLogprobs(tokens="last"), row))
    ends = [len(ids_of(row, 0)) - 1, row.num_trained - 1]
    assert np.flatnonzero(last == 0).tolist() == ends
    assert logprobs_of(change(ClampedLogprobs(lowest=-2.0), row)).min() == -2


@pytest.mark.parametrize(("to", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_quantised_log_probs_are_the_nearest_of_the_narrow_type(to, bits):
    row = episode(CHATML)
    exact = np.random.default_rng(0).normal(-2, 1, len(row)).astype(np.float32)
    row.set("rollout_logprobs", exact)
    (out,) = QuantisedLogprobs(to=to).change_rows([row], CHATML, by_the_model)
    error = np.abs(logprobs_of(out) - exact[row.loss_mask])
    assert 0 < error.max() <= (np.abs(exact[row.loss_mask]) * 2.0**-bits).max()


def test_decimals_are_those_asked_for():
    found = logprobs_of(change(QuantisedLogprobs(decimals=1), episode(CHATML)))
    np.testing.assert_array_equal(found, np.round(found.astype(np.float64), 1).astype(np.float32))
