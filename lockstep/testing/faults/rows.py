"""Faults of the rows between sampler and trainer: their ids, masks, places and log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from lockstep.agent.tasks import derive_seed
from lockstep.config import tag
from lockstep.errors import ConfigError
from lockstep.models.config import ModelConfig
from lockstep.renderers.base import Renderer
from lockstep.run.hooks import LogProbs
from lockstep.run_config import Config
from lockstep.testing.faults import edits
from lockstep.testing.faults.base import FILLER, FaultConfig, RowShare
from lockstep.types import Float32Array, Message, Sample

MIN_INJECTED_TEXT = 5
"""Tokens between two control tokens that are a message's text and not its header."""


@dataclass(frozen=True, kw_only=True)
class _RowFault(RowShare, FaultConfig):
    """Base of faults that change one row at a time."""

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
        """`row` with the fault. Trained tokens whose log-prob is NaN get the trainer's."""
        raise NotImplementedError(f"{type(self).__name__} changes no row")


# -- ids and masks --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RetokenizedRows(_RowFault):
    """Each run of sampled text is decoded and encoded again, as by a program that keeps messages
    instead of ids. The text stays, but ids change where the model had spelt it in another way.
    Control tokens stay; columns other than log-probs follow by position in the run."""

    logprobs: Literal["by_position", "recomputed"] = "by_position"
    """by_position: the sampled log-probs are laid on the new ids in order, 0.0 where they run out.
    recomputed: the trainer computes them for the new ids, so that KL looks clean while the policy
    is trained on tokens that it did not choose."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        out = edits.retokenized(row, renderer.tokenizer)
        if self.logprobs == "recomputed":
            out.set("rollout_logprobs", np.full(len(out), np.nan, np.float32))
        return out


@dataclass(frozen=True, kw_only=True)
class RerenderedHistory(_RowFault):
    """Every turn but the last is rendered again from what the program kept of it, with its
    log-probs laid on the result: a loop that makes prompts with a chat template, and the row from
    the last prompt."""

    kept: Literal["text", "message"] = "text"
    """text: the decoded reply without control tokens, as an assistant's content, calls included.
    message: the reply as the renderer parses it; only spellings and line breaks change then."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        return edits.rerendered(row, renderer, is_text=self.kept == "text")


@dataclass(frozen=True, kw_only=True)
class DroppedFinalTokens(_RowFault):
    """The last sampled tokens of a row's last turn are missing: a loop that takes the ids from the
    next prompt, which the last turn does not have. At least one token of the turn stays. The other
    log-probs are right: only tokens/trained below tokens/sampled shows it, and the policy never
    learns to end."""

    least: ClassVar = {"count": 1}

    count: int = 1
    """Tokens that are dropped at most."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        return edits.without_final(row, self.count)


@dataclass(frozen=True, kw_only=True)
class DroppedSeparators(_RowFault):
    """The template's separator between a turn's stop token and the next message is missing (for
    Qwen, the line break after <|im_end|>): a program that concatenates sampled ids and encoded
    replies. Log-probs of later turns were sampled with it, and are computed without."""

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
    """Tokens after the stop token that ended a row are trained: an engine that samples a batch to
    its longest reply, and a program that does not cut. The log-probs are the model's own."""

    least: ClassVar = {"count": 1}

    count: int = 4
    """Tokens after the stop token: a repetition of the turn's beginning."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        return edits.after_stop(row, renderer, self.count)


@dataclass(frozen=True, kw_only=True)
class TrainedObservations(_RowFault):
    """Tokens that the model was given between its turns (a tool's reply) are trained: a mask that
    is 1 everywhere after the prompt."""

    least: ClassVar = {"count": 0}

    count: int = 0
    """Tokens of each row, from the first turn on; 0 for all."""
    logprobs: Literal["recomputed", "filler"] = "recomputed"
    """recomputed: the model's, as from an engine that scores its prompt. filler: 0.0."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        turn = row.columns["turn"]
        sampled = np.flatnonzero(turn >= 0)
        if not sampled.size:
            return row
        observed = np.flatnonzero(turn[sampled[0] :] < 0) + sampled[0]
        out = edits.with_trained(row, observed[: self.count or len(observed)])
        if self.logprobs == "filler" and out is not row:
            values = out.columns["rollout_logprobs"].copy()
            values[out.loss_mask & np.isnan(values)] = FILLER
            out.set("rollout_logprobs", values)
        return out


@dataclass(frozen=True, kw_only=True)
class WrongBoundary(_RowFault):
    """The boundary between prompt and reply is at the wrong place."""

    kind: Literal["moved", "subtracted"] = "moved"
    """moved: the first reply begins `by` tokens late (its first tokens are not trained) or early
    (the prompt's last ones are). subtracted: a loop that ends before it adds the last reply, and
    computes the prompt's length as the row's minus all replies': negative if these are longer. All
    log-probs are then at other tokens."""
    by: int = -3
    """Tokens of kind=moved; negative is early."""

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
    """The prompt is in the row again, before the last turn: a program that appends what is new by
    prompt[-n:], which is the whole prompt for n = 0."""

    least: ClassVar = {"copies": 1}

    copies: int = 1
    """Additional copies."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        return edits.with_prompt_again(row, self.copies)


@dataclass(frozen=True, kw_only=True)
class PaddedRows(_RowFault):
    """Padding stays in the row: prompts padded on the left and replies on the right, whose
    attention mask is lost on the way to the trainer."""

    least: ClassVar = {"count": 1}

    count: int = 8
    """Padding tokens."""
    place: Literal["inside", "left"] = "inside"
    """inside: between the prompt and the first reply. left: before the prompt."""
    token: str = "<|endoftext|>"
    """Control token that pads."""

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

    least: ClassVar = {"count": 1}

    kind: Literal["stripped", "completed"] = "stripped"
    """stripped: the last `count` text tokens before the stop token are removed with their
    log-probs, as by a program that tidies replies. completed: a reply that its budget cut off gets
    a stop token that was not sampled, trained with the log-prob 0.0."""
    count: int = 2
    """Tokens of kind=stripped."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        if self.kind == "completed":
            return edits.completed(row, renderer)
        return edits.stripped(row, renderer, self.count)


@dataclass(frozen=True, kw_only=True)
class InjectedControlTokens(_RowFault):
    """Control tokens are inside of what a tool or user wrote: a tokenizer that reads `<|im_end|>`
    in a web page as the end of a turn. The model reads them too, so both sides agree."""

    least: ClassVar = {"count": 1}

    count: int = 1
    """Control tokens in each row."""

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
        """The messages with the control tokens' names in the text that they were in."""
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
        """(control token before, place, control token after) of the last text before the last turn
        that others wrote, and that is more than the opening of a turn."""
        observed = row.columns["turn"] < 0
        controls = np.isin(row.token_ids, list(renderer.tokenizer.control_ids))
        last = [begin for _, begin, _ in edits.turns(row)][-1:]
        ends = np.flatnonzero(observed[: last[0]] & controls[: last[0]]).tolist() if last else []
        for begin, end in reversed(list(pairwise(ends))):
            if end - begin >= MIN_INJECTED_TEXT and observed[begin:end].all():
                return begin, (begin + end) // 2 + 1, end
        return None


@dataclass(frozen=True, kw_only=True)
class DroppedThinking(_RowFault):
    """The thinking of every turn but the last is missing, as a chat template drops it from a
    history. Tokens after it were sampled with it. Rows without thinking are not hit."""

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        if renderer.name not in edits.THINKING:
            raise ConfigError(
                f"fault {tag(type(self))}: where thinking is in renderer={renderer.name} is not "
                f"known; it is for {', '.join(edits.THINKING)}."
            )

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        return edits.without_thinking(row, renderer)


# -- log-probs ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _ValueFault(_RowFault):
    """Base of faults of the sampler's log-probs."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        values = row.columns["rollout_logprobs"].copy()
        values[row.loss_mask] = self.written(values[row.loss_mask], row)
        return edits.with_rollout(row, values)

    def change_rows(
        self, rows: Sequence[Sample], renderer: Renderer, log_probs: LogProbs
    ) -> list[Sample]:
        return [self.changed(row, renderer) if self.is_hit(row) else row for row in rows]

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        """Returns the values to write in place of `logprobs` [trained tokens]."""
        raise NotImplementedError(f"{type(self).__name__} changes no log-prob")

    def refuse_in_runs(self, reason: str) -> None:
        raise ConfigError(
            f"fault {tag(type(self))} cannot be in a run: {reason}. It is for dumps: "
            "lockstep.testing.dumps.faulty_rows."
        )


@dataclass(frozen=True, kw_only=True)
class ShiftedLogprobs(_ValueFault):
    """Every trained token has the log-prob of the token `offset` places after it among the row's
    trained tokens, 0.0 at the end: an off-by-one in the shift to "predicts the next"."""

    offset: int = 1
    """Places; negative takes log-probs from before the token."""

    def __post_init__(self) -> None:
        RowShare.__post_init__(self)
        if self.offset == 0:
            raise ConfigError("offset=0 shifts nothing; expected another whole number.")

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        return edits.shifted(row, self.offset)


@dataclass(frozen=True, kw_only=True)
class FillerLogprobs(_ValueFault):
    """Trained tokens have the log-prob 0.0: an array of zeros where the engine gave none."""

    tokens: Literal["all", "last"] = "all"
    """all: of every turn, like a reply without log-probs. last: each turn's last token, like a stop
    token that the program appends."""

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        if self.tokens == "all":
            return np.full_like(logprobs, FILLER)
        turn = row.columns["turn"][row.loss_mask]
        is_last = np.ones(len(turn), np.bool_)
        is_last[:-1] = turn[1:] != turn[:-1]
        return np.where(is_last, np.float32(FILLER), logprobs)


@dataclass(frozen=True, kw_only=True)
class ClampedLogprobs(_ValueFault):
    """Log-probs below a bound are set to it, "for stability", where they are collected."""

    lowest: float = -3.0
    """The bound."""

    def __post_init__(self) -> None:
        RowShare.__post_init__(self)
        if not -math.inf < self.lowest < 0:
            raise ConfigError(f"lowest={self.lowest} must be a finite number below 0.")

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        return np.maximum(logprobs, np.float32(self.lowest))


@dataclass(frozen=True, kw_only=True)
class QuantisedLogprobs(_ValueFault):
    """Log-probs are rounded, by a JSON writer with few decimals or a transfer in a narrow dtype."""

    to: Literal["decimals", "bfloat16", "float16"] = "decimals"
    """Precision after rounding."""
    decimals: int = 2
    """Decimals of to=decimals."""

    def __post_init__(self) -> None:
        RowShare.__post_init__(self)
        if not 0 <= self.decimals <= 7:
            raise ConfigError(f"decimals={self.decimals} must lie in 0 to 7: float32 has no more.")

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        if self.to == "decimals":
            return np.round(logprobs.astype(np.float64), self.decimals)
        if self.to == "float16":
            return logprobs.astype(np.float16)
        bits = logprobs.view(np.uint32)
        # To nearest, ties to even: half of the removed bits, and the last bit that stays.
        rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


@dataclass(frozen=True, kw_only=True)
class NonfiniteLogprobs(_ValueFault):
    """Some trained tokens have no finite log-prob: an op that overflowed, or a token outside of
    top-p. For dumps: in a run, the episode of such a token fails."""

    value: Literal["nan", "-inf"] = "nan"
    """Value that replaces the log-prob."""
    token_share: float = 0.02
    """Share of the trained tokens that are hit."""

    def __post_init__(self) -> None:
        RowShare.__post_init__(self)
        if not 0 < self.token_share <= 1:
            raise ConfigError(f"token_share={self.token_share} must lie in (0, 1].")

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        self.refuse_in_runs("an episode whose log-probs are not finite fails and is never trained")

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        rng = np.random.default_rng(derive_seed(self.seed, "nonfinite", row.id))
        is_hit = rng.random(len(logprobs)) < self.token_share
        return np.where(is_hit, np.float32(self.value), logprobs)


@dataclass(frozen=True, kw_only=True)
class ProbabilitiesAsLogprobs(_ValueFault):
    """Probabilities instead of log-probs. For dumps: a run refuses them, for they are above 0."""

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        self.refuse_in_runs("a log-prob above 0 is refused where it is sampled")

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        return np.exp(logprobs)
