"""Faults of the rows' ids, masks and borders: what is trained is not what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from lockstep.config import tag
from lockstep.errors import ConfigError
from lockstep.models.config import ModelConfig
from lockstep.renderers.base import Renderer
from lockstep.run.hooks import LogProbs
from lockstep.run_config import Config
from lockstep.testing.faults import edits
from lockstep.testing.faults.base import (
    FILLER,
    FaultConfig,
    RowShare,
    check_at_least,
)
from lockstep.types import Message, Sample


@dataclass(frozen=True, kw_only=True)
class _RowFault(RowShare, FaultConfig):
    """Base of what is done to one row after another."""

    def change_rows(
        self, rows: Sequence[Sample], renderer: Renderer, log_probs: LogProbs
    ) -> list[Sample]:
        changed = [self.changed(r, renderer) if self.is_hit(r) else r for r in rows]
        unknown = [
            row
            for row, old in zip(changed, rows, strict=True)
            if row is not old and np.isnan(row.columns["rollout_logprobs"][row.loss_mask]).any()
        ]
        for row, values in zip(unknown, log_probs(unknown) if unknown else (), strict=True):
            own = row.columns["rollout_logprobs"]
            is_missing = row.loss_mask & np.isnan(own)
            row.set("rollout_logprobs", np.where(is_missing, values, own))
        return changed

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        """`row` with the fault. A trained token whose log-prob is NaN is given the model's."""
        raise NotImplementedError(f"{type(self).__name__} changes no row")


@dataclass(frozen=True, kw_only=True)
class RetokenizedRows(RowShare, FaultConfig):
    """Each sampled run of text is decoded and encoded again, as by a program that keeps messages
    and no ids. The text is the same; where the model had spelt it in another way, the ids are not.
    Control tokens stay. Other columns than log-probs follow by position in the run."""

    logprobs: Literal["by_position", "recomputed"] = "by_position"
    """by_position: the sampled tokens' log-probs are laid onto the new ids in order, and whatever
    is missing at the end is 0.0. recomputed: the trainer computes them for the new ids, so that KL
    looks clean, and the policy is trained on tokens that it did not choose."""

    def change_rows(
        self, rows: Sequence[Sample], renderer: Renderer, log_probs: LogProbs
    ) -> list[Sample]:
        tokenizer = renderer.tokenizer
        changed = [edits.retokenized(r, tokenizer) if self.is_hit(r) else r for r in rows]
        if self.logprobs == "recomputed":
            hit = [new for new, old in zip(changed, rows, strict=True) if new is not old]
            for row, values in zip(hit, log_probs(hit) if hit else (), strict=True):
                row.set("rollout_logprobs", values)
        return changed


@dataclass(frozen=True, kw_only=True)
class RerenderedHistory(_RowFault):
    """Every turn but the last is rendered anew from what the program kept of it, and its log-probs
    are laid on what came out: a loop that takes the next prompt from a chat template, and the row
    from the last prompt."""

    kept: Literal["text", "message"] = "text"
    """text: the decoded reply without control tokens, as an assistant's words; a call of a tool is
    then spelt out in an answer. message: what the renderer reads in it, calls and thinking apart;
    then only spellings and line breaks change."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        return edits.rerendered(row, renderer, is_text=self.kept == "text")


@dataclass(frozen=True, kw_only=True)
class DroppedFinalTokens(_RowFault):
    """The last sampled tokens of a row's last turn are missing from it: a loop that takes the ids
    from the next prompt, and after the last turn there is none. At least one token of the turn
    stays. What is left has the right log-probs: only counts tell (tokens/trained is below
    tokens/sampled), and the policy never learns how to end."""

    count: int = 1
    """Tokens that are lost at most."""

    def __post_init__(self) -> None:
        RowShare.__post_init__(self)
        check_at_least(self, "count", 1)

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        return edits.without_final(row, self.count)


@dataclass(frozen=True, kw_only=True)
class DroppedSeparators(_RowFault):
    """What the template writes between a turn's stop token and the next message is missing: for
    Qwen the line break behind <|im_end|>, where sampled ids and encoded replies are strung together
    without it. Log-probs of later turns were drawn behind it, and are computed without."""

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        if renderer.name != "chatml":
            raise ConfigError(
                f"fault dropped_separators: renderer={renderer.name} writes nothing between "
                "two messages that could be missing. Choose a model with renderer=chatml, such as "
                "model=tiny-qwen3."
            )

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        return edits.without_separators(row, renderer)


@dataclass(frozen=True, kw_only=True)
class TokensAfterStop(_RowFault):
    """A row goes on behind the stop token that ended it, and what follows is trained: an engine
    that samples a whole batch to its longest reply, and a program that does not cut. The log-probs
    are the model's own: nothing is wrong with the numbers."""

    count: int = 4
    """Tokens behind the stop token: those that the turn begins with, once more."""

    def __post_init__(self) -> None:
        RowShare.__post_init__(self)
        check_at_least(self, "count", 1)

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        return edits.after_stop(row, renderer, self.count)


@dataclass(frozen=True, kw_only=True)
class TrainedObservations(_RowFault):
    """Tokens that the model was given between its turns (a tool's reply) are trained: a mask that
    is 1 over everything behind the prompt."""

    count: int = 0
    """How many of each row, from the first turn on; 0 is all of them."""
    logprobs: Literal["recomputed", "filler"] = "recomputed"
    """recomputed: the model's, as of an engine that scores its prompt. filler: 0.0."""

    def __post_init__(self) -> None:
        RowShare.__post_init__(self)
        check_at_least(self, "count", 0)

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        turn = row.columns["turn"]
        sampled = np.flatnonzero(turn >= 0)
        if not sampled.size:
            return row
        observed = np.flatnonzero(turn[sampled[0] :] < 0) + sampled[0]
        out = edits.with_trained(row, observed[: self.count or len(observed)])
        return _filled(out, row) if self.logprobs == "filler" else out


@dataclass(frozen=True, kw_only=True)
class WrongBoundary(_RowFault):
    """The border between prompt and reply is at the wrong place."""

    kind: Literal["moved", "subtracted"] = "moved"
    """moved: the first reply begins `by` places too late (its first tokens are not trained), or too
    early (the prompt's last ones are). subtracted: a loop that leaves before it adds the last
    reply, and takes for the prompt's length what is left when all replies are subtracted from the
    row: negative where these are longer than the row. All log-probs then stand beside others'
    tokens."""
    by: int = -3
    """Of kind=moved: places; below 0 is too early."""

    def __post_init__(self) -> None:
        RowShare.__post_init__(self)
        if not self.by:
            raise ConfigError("by=0 moves nothing; expected another whole number.")

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        if self.kind == "subtracted":
            return edits.by_subtraction(row)[0]
        found = list(edits.turns(row))
        if not found:
            return row
        _, begin, end = found[0]
        if self.by < 0:
            return edits.with_trained(row, range(max(begin + self.by, 1), begin))
        out = edits.taken(row, np.arange(len(row)), row.token_ids)
        place = np.arange(len(row))
        return edits.observed_at(out, (place >= begin) & (place < min(begin + self.by, end)))

    def prompt_length(self, row: Sample, before: Sample) -> int | None:
        if row is before:
            return None
        if self.kind == "subtracted":
            return edits.by_subtraction(before)[1]
        return int(np.flatnonzero(row.loss_mask)[0]) if row.num_trained else None


@dataclass(frozen=True, kw_only=True)
class DuplicatedPrompt(_RowFault):
    """The prompt stands in the row once more, before the last turn: a program that appends what is
    new since the turn before by prompt[-n:], which for n = 0 is all of it."""

    copies: int = 1
    """How often."""

    def __post_init__(self) -> None:
        RowShare.__post_init__(self)
        check_at_least(self, "copies", 1)

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        return edits.with_prompt_again(row, self.copies)


@dataclass(frozen=True, kw_only=True)
class PaddedRows(_RowFault):
    """Padding is left in the row: a layout of prompts padded on the left and replies on the right,
    whose attention mask is lost on the way to the trainer."""

    count: int = 8
    """Padding tokens."""
    place: Literal["inside", "left"] = "inside"
    """inside: between the prompt and the first reply. left: before the prompt."""
    token: str = "<|endoftext|>"
    """The control token that pads."""

    def __post_init__(self) -> None:
        RowShare.__post_init__(self)
        check_at_least(self, "count", 1)

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        renderer.tokenizer.require((self.token,))

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        found = list(edits.turns(row))
        at = found[0][1] if found and self.place == "inside" else 0
        pad_id = renderer.tokenizer.control_id(self.token)
        return edits.with_inserted(row, at, [pad_id] * self.count)


@dataclass(frozen=True, kw_only=True)
class PostProcessedReplies(_RowFault):
    """Replies are changed after they were sampled."""

    kind: Literal["stripped", "completed"] = "stripped"
    """stripped: the last `count` text tokens before the stop token are cut off, with their
    log-probs, as by a program that tidies up a reply. completed: a reply that was cut off by its
    budget gets a stop token that nobody sampled, trained with the log-prob 0.0."""
    count: int = 2
    """Of kind=stripped."""

    def __post_init__(self) -> None:
        RowShare.__post_init__(self)
        check_at_least(self, "count", 1)

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        if self.kind == "completed":
            return edits.completed(row, renderer)
        return edits.stripped(row, renderer, self.count)


@dataclass(frozen=True, kw_only=True)
class InjectedControlTokens(_RowFault):
    """Control tokens stand in what a tool or a user wrote: a tokenizer that was given their text,
    and reads `<|im_end|>` in a web page as the end of a turn. The model is given them too, so both
    sides compute with them, and agree."""

    count: int = 1
    """How many in each row."""

    def __post_init__(self) -> None:
        RowShare.__post_init__(self)
        check_at_least(self, "count", 1)

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        place = self._place(row, renderer)
        if place is None:
            return row
        out = edits.with_inserted(row, place[1], [renderer.stop_ids[0]] * self.count)
        unknown = np.where(out.loss_mask, np.nan, out.columns["rollout_logprobs"])
        out.set("rollout_logprobs", unknown.astype(np.float32))
        return out

    def said(
        self, before: Sample, messages: Sequence[Message], renderer: Renderer
    ) -> Sequence[Message]:
        """With the control tokens' names in the text that they were read in."""
        place = self._place(before, renderer)
        if place is None:
            return messages
        decode = renderer.tokenizer.decode
        begin, at, end = place
        text = decode(before.token_ids[begin + 1 : end])
        offset = len(decode(before.token_ids[begin + 1 : at]))
        name = decode([renderer.stop_ids[0]]) * self.count
        out = list(messages)
        for number in reversed(range(len(out))):
            content = out[number].content
            first = text.find(content) if content and out[number].role != "assistant" else -1
            if 0 <= first < offset < first + len(content):
                inside = offset - first
                content = content[:inside] + name + content[inside:]
                out[number] = replace(out[number], content=content)
                break
        return out

    def _place(self, row: Sample, renderer: Renderer) -> tuple[int, int, int] | None:
        """(control token before, place, control token behind) of the last text before the last
        turn that somebody else wrote, and that is more than the opening of a turn."""
        observed = row.columns["turn"] < 0
        controls = np.isin(row.token_ids, list(renderer.tokenizer.control_ids))
        last = [begin for _, begin, _ in edits.turns(row)][-1:]
        ends = np.flatnonzero(observed[: last[0]] & controls[: last[0]]).tolist() if last else []
        for begin, end in reversed(list(pairwise(ends))):
            if end - begin >= MIN_INJECTED_TEXT and observed[begin:end].all():
                return begin, (begin + end) // 2 + 1, end
        return None


MIN_INJECTED_TEXT = 5
"""Tokens between two control tokens that are a message's text and not its header."""


@dataclass(frozen=True, kw_only=True)
class DroppedThinking(_RowFault):
    """The thinking of every turn but the last is missing, as a chat template drops it from a
    history. What was drawn behind it is computed without. Rows without thinking are not hit."""

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        if renderer.name not in edits.THINKING:
            raise ConfigError(
                f"fault {tag(type(self))}: where thinking stands in renderer={renderer.name} "
                f"is not known; it is of {', '.join(edits.THINKING)}."
            )

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        return edits.without_thinking(row, renderer)


def _filled(row: Sample, before: Sample) -> Sample:
    """`row` with 0.0 where a trained token has no log-prob."""
    if row is before:
        return row
    values = row.columns["rollout_logprobs"].copy()
    values[row.loss_mask & np.isnan(values)] = FILLER
    row.set("rollout_logprobs", values)
    return row
