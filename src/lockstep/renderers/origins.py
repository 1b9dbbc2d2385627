"""The origin of each token of a dialogue, and what re-rendering would write.

A dialogue that is given as messages is written as an agent loop would: the first prompt, then each
reply as a model samples it, followed by what the renderer adds.

Re-rendering is the commonest mistake of agent training. A program that keeps messages and no ids
renders the whole history before each turn. After the last turn it has one row: the last prompt, the
last reply, and each turn's log-probs at the positions where that turn begins in the last prompt.
Nothing in Lockstep trains on such rows; `rendered_anew` shows what such a program would train on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from lockstep.errors import DataError, located
from lockstep.renderers.base import Renderer
from lockstep.renderers.pieces import first_difference
from lockstep.types import Float32Array, Int32Array, Message, Sample, ToolSchema, Trajectory

Origin = Literal["template", "system", "user", "tool", "assistant"]
"""template: the renderer's own text and control tokens. assistant: sampled, control tokens
included. system, user, tool: the text of a message."""

ORIGINS: tuple[Origin, ...] = ("template", "system", "user", "tool", "assistant")


class OriginatedToken(NamedTuple):
    """One id of a dialogue."""

    id: int
    origin: Origin
    is_control: bool
    message: int
    """Index of the message; -1 for tokens of the template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The prompt before one reply, or the end of the dialogue: extended, and re-rendered as a
    whole."""

    before: int
    """Index of the reply; the number of messages for the end of the dialogue."""
    extended_ids: list[int]
    whole_ids: list[int]

    @property
    def is_same(self) -> bool:
        return self.extended_ids == self.whole_ids

    @property
    def first_difference(self) -> int:
        """Index of the first id that differs; the shorter length if one list begins with the
        other."""
        return first_difference(self.extended_ids, self.whole_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """A dialogue as tokens."""

    tokens: list[OriginatedToken] = field(default_factory=list[OriginatedToken])
    prompts: list[Compared] = field(default_factory=list[Compared])

    @property
    def has_prefix_property(self) -> bool:
        """True if each prompt equals the template's rendering of all messages before it: a program
        that re-renders the history would send the same ids."""
        return all(prompt.is_same for prompt in self.prompts)


def trace(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
) -> Rendering:
    """Returns the tokens of a dialogue with their origins, and each prompt beside its re-rendering.

    Raises RendererError, which begins with the index of the message, for a reply that a model
    cannot sample in one turn (two calls in harmony).

    >>> from lockstep.renderers.chatml import ChatMLRenderer
    >>> from lockstep.renderers.config import ChatMLConfig
    >>> from lockstep.testing.tokenizers import byte_tokenizer
    >>> renderer = ChatMLRenderer(byte_tokenizer(), ChatMLConfig(has_empty_thinking=False))
    >>> hi = [Message(role="user", content="hi"), Message(role="assistant", content="yo")]
    >>> [(t.origin, t.id) for t in trace(renderer, hi).tokens if t.origin != "template"]
    [('user', 104), ('user', 105), ('assistant', 121), ('assistant', 111), ('assistant', 264)]
    """
    out = Rendering()
    control = renderer.tokenizer.control_ids
    begin = 0
    sampled: list[int] = []
    replies = [at for at, message in enumerate(messages) if message.role == "assistant"]
    # The end of the dialogue is a prompt too, unless the dialogue ends with a reply.
    ends = [] if replies[-1:] == [len(messages) - 1] else [len(messages)]
    for at in (*replies, *ends):
        new = messages[begin:at]
        ids = renderer.extend(sampled, new) if begin else renderer.render(new, tools)
        out.tokens.extend(_observed(renderer, ids, new, begin))
        extended_ids = [token.id for token in out.tokens]
        whole_ids = renderer.render(messages[:at], tools)
        out.prompts.append(Compared(before=at, extended_ids=extended_ids, whole_ids=whole_ids))
        if at == len(messages):
            break
        with located(f"message {at}"):
            sampled = renderer.render_reply(messages[at])
        out.tokens.extend(OriginatedToken(id_, "assistant", id_ in control, at) for id_ in sampled)
        begin = at + 1
    return out


def _observed(
    renderer: Renderer, ids: Sequence[int], messages: Sequence[Message], first: int
) -> list[OriginatedToken]:
    """Assigns ids that nobody sampled to the messages whose bytes they spell, the rest to the
    template.

    A token that spells both belongs to the message.
    """
    tokenizer = renderer.tokenizer
    whole = tokenizer.decode_bytes(ids)
    owner = [-1] * len(whole)
    at = 0
    for number, message in enumerate(messages):
        words = message.content.encode("utf-8", errors="replace")
        found = whole.find(words, at) if words else -1
        if found >= 0:
            at = found + len(words)
            owner[found:at] = [number] * len(words)
    out: list[OriginatedToken] = []
    begin = 0
    for id_ in ids:
        size = len(tokenizer.token_bytes(id_))
        is_control = id_ in tokenizer.control_ids
        number = -1 if is_control else max(owner[begin : begin + size], default=-1)
        begin += size
        if number < 0:
            out.append(OriginatedToken(id_, "template", is_control, -1))
            continue
        role = messages[number].role
        origin = "system" if role == "developer" else role
        out.append(OriginatedToken(id_, origin, is_control, first + number))
    return out


# -- re-rendering ----------------------------------------------------------------------------------


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
    for run in trajectory.runs(leaf):
        messages = trajectory.segments[run[-1]].messages
        logprobs = [found for i in run if (found := trajectory.segments[i].logprobs) is not None]
        if not logprobs:
            before += messages
            continue
        turn = SampledTurn(
            before=tuple(before),
            token_ids=trajectory.ids_of(run),
            logprobs=np.concatenate(logprobs),
            message=messages[-1],
        )
        turns.append(turn)
        before = []
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
    columns = {"rollout_logprobs": logprobs, "turn": number}
    return Sample(id=id, token_ids=ids, loss_mask=mask, columns=columns), num_same
