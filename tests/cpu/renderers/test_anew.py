"""Rows of a program that renders the history anew, beside those that extend."""

import numpy as np
import pytest

from lockstep.errors import DataError
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.renderers.origins import rendered_anew, turns_of
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, ToolCall, Trajectory

USER = Message(role="user", content="What is 2+2?")
CALL = Message(role="assistant", tool_calls=(ToolCall(name="add", arguments='{"a":2}'),))
TOOL = Message(role="tool", name="add", content="4")
ANSWER = Message(role="assistant", content="4")


def dialogue(renderer, *replies):
    """A dialogue whose turns were sampled with these ids, at a log-prob of -t/10 for token t."""
    trajectory = Trajectory(id="demo")
    leaf = trajectory.observe(renderer.render([USER]), messages=[USER])
    for number, ids in enumerate(replies):
        if number:
            glue = renderer.extend(replies[number - 1], [TOOL])
            leaf = trajectory.observe(glue, parent=leaf, messages=[TOOL])
        leaf = trajectory.record(
            ids, logprobs=[-t / 10 for t in range(len(ids))], parent=leaf,
            prompt_ids=trajectory.path_ids(leaf), messages=[renderer.parse(ids)],
        )  # fmt: skip
    return trajectory, leaf


def test_a_dialogue_that_the_template_writes_as_it_was_sampled_is_the_same_row():
    renderer = ChatMLRenderer(byte_tokenizer(), ChatMLConfig(variant="qwen2.5"))
    replies = [renderer.render_reply(CALL), renderer.render_reply(ANSWER)]
    trajectory, leaf = dialogue(renderer, *replies)
    row, num_same = rendered_anew(turns_of(trajectory, leaf), renderer)
    expected = trajectory.row(leaf)
    assert row.token_ids.tolist() == expected.token_ids.tolist()
    assert num_same == [len(reply) for reply in replies]
    trained = expected.loss_mask
    np.testing.assert_array_equal(
        row.columns["rollout_logprobs"][trained], expected.columns["rollout_logprobs"][trained]
    )


def test_a_turn_that_is_kept_as_text_moves_everything_after_its_header():
    renderer = HarmonyRenderer(byte_tokenizer())
    tokenizer = renderer.tokenizer
    replies = [renderer.render_reply(CALL), renderer.render_reply(ANSWER)]
    trajectory, leaf = dialogue(renderer, *replies)
    row, num_same = rendered_anew(
        turns_of(trajectory, leaf),
        renderer,
        written=lambda turn: Message(role="assistant", content=tokenizer.decode(turn.token_ids)),
    )
    assert num_same[0] < 0.2 * len(replies[0])
    assert num_same[1] == len(replies[1])
    assert row.token_ids.tolist() != trajectory.path_ids(leaf).tolist()


def test_a_turn_that_crossed_a_weight_update_is_one():
    renderer = ChatMLRenderer(byte_tokenizer())
    ids = renderer.render_reply(ANSWER)
    trajectory = Trajectory(id="demo")
    leaf = trajectory.observe(renderer.render([USER]), messages=[USER])
    for part, reason in ((ids[:3], "weight_update"), (ids[3:], "stop")):
        leaf = trajectory.record(
            part, logprobs=[-1.0] * len(part), parent=leaf, finish_reason=reason,
            prompt_ids=trajectory.path_ids(leaf), messages=[ANSWER] if reason == "stop" else [],
        )  # fmt: skip
    (turn,) = turns_of(trajectory, leaf)
    assert turn.token_ids.tolist() == ids


def test_a_dialogue_without_a_turn_is_refused_by_name():
    with pytest.raises(DataError, match="train/0/x"):
        rendered_anew([], ChatMLRenderer(byte_tokenizer()), id="train/0/x")
