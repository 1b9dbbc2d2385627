"""Re-rendering, the commonest mistake of agent training, made on purpose.

A program that keeps messages and no ids renders the whole history before each turn. After the last
turn it has one row: the last prompt, the last reply, and each turn's log-probs at the positions
where that turn begins in the last prompt. Nothing in Lockstep trains on such rows; they show what
such a program would train on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.errors import DataError
from lockstep.renderers.base import Renderer
from lockstep.types import Float32Array, Int32Array, Message, Sample, ToolSchema, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTurn:
    """One turn of a dialogue as it was sampled."""

    before: tuple[Message, ...]
    """Messages since the previous turn: the first prompt, or replies of tools and users."""
    token_ids: Int32Array
    logprobs: Float32Array
    message: Message
    """The turn as the renderer parsed it."""


def turns_of(trajectory: Trajectory, leaf: int) -> list[SampledTurn]:
    """Returns the sampled turns on the path to `leaf`. A turn that spans a weight update counts
    once."""
    turns: list[SampledTurn] = []
    before: list[Message] = []
    ids: list[Int32Array] = []
    logprobs: list[Float32Array] = []
    for index in trajectory.path(leaf):
        segment = trajectory.segments[index]
        if not segment.is_sampled or segment.logprobs is None:
            before += segment.messages
            continue
        ids.append(segment.token_ids)
        logprobs.append(segment.logprobs)
        if segment.finish_reason == "weight_update":
            continue
        turns.append(
            SampledTurn(
                before=tuple(before),
                token_ids=np.concatenate(ids),
                logprobs=np.concatenate(logprobs),
                message=segment.messages[-1],
            )
        )
        before, ids, logprobs = [], [], []
    return turns


def rendered_anew(
    turns: Sequence[SampledTurn],
    renderer: Renderer,
    *,
    tools: Sequence[ToolSchema] = (),
    id: str = "",
    written: Callable[[SampledTurn], Message] = lambda turn: turn.message,
) -> tuple[Sample, list[int]]:
    """Returns (row, number of tokens of each turn that are unchanged at their position).

    written: the message that the program keeps for a turn. The row's `rollout_logprobs` are each
    turn's own, laid from the position where its message begins in the last prompt; the column
    `turn` says which turn. The last turn is not rendered: its ids are those that were sampled.
    Raises DataError if there is no turn.
    """
    if not turns:
        raise DataError(f"{id or 'the dialogue'} has no sampled turn: there is nothing to render.")
    history: list[Message] = []
    begins: list[int] = []
    prompt: list[int] = []
    for turn in turns:
        history += turn.before
        prompt = renderer.render(history, tools)
        begins.append(len(prompt))
        history.append(written(turn))
    last = turns[-1].token_ids
    ids = np.concatenate([np.asarray(prompt, np.int32), last])
    mask = np.zeros(len(ids), np.bool_)
    logprobs = np.full(len(ids), np.nan, np.float32)
    number = np.full(len(ids), -1, np.int32)
    num_same: list[int] = []
    for t, (turn, begin) in enumerate(zip(turns, begins, strict=True)):
        end = min(begin + len(turn.token_ids), (*begins, len(ids))[t + 1])
        size = max(end - begin, 0)
        mask[begin:end] = True
        logprobs[begin:end] = turn.logprobs[:size]
        number[begin:end] = t
        num_same.append(int((ids[begin:end] == turn.token_ids[:size]).sum()))
    row = Sample(
        id=id,
        token_ids=ids,
        loss_mask=mask,
        columns={"rollout_logprobs": logprobs, "turn": number},
    )
    return row, num_same
