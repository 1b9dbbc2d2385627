"""Faults of the rows between sampler and trainer: their ids, masks, places and log-probs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from lockstep.agent.tasks import derive_seed
from lockstep.doctor.checks.tokens.context import opening_of
from lockstep.errors import ConfigError
from lockstep.models.config import ModelConfig
from lockstep.renderers.base import Renderer
from lockstep.renderers.pieces import first_difference
from lockstep.run.hooks import LogProbs
from lockstep.run_config import Config
from lockstep.testing.faults.base import RowFault, is_chosen
from lockstep.types import (
    COLUMNS,
    UNKNOWN_EXPERT,
    Float32Array,
    Int64Array,
    Message,
    Ragged,
    Sample,
    frozen_ids,
)

FILLER = 0.0
"""Log-prob of a token whose own is lost: the value of an array of zeros."""
MIN_INJECTED_TEXT = 5
"""Tokens between two control tokens that are a message's text and not its header."""


@dataclass(frozen=True, kw_only=True)
class _EditFault(RowFault):
    """Base of faults of ids and masks. Trained tokens whose log-prob is NaN after the change get
    the trainer's."""

    def change_rows(
        self, rows: Sequence[Sample], renderer: Renderer, log_probs: LogProbs
    ) -> list[Sample]:
        changed = super().change_rows(rows, renderer, log_probs)
        pairs = zip(changed, rows, strict=True)
        unknown = [row for row, old in pairs if row is not old and _is_unknown(row).any()]
        for row, values in zip(unknown, log_probs(unknown) if unknown else (), strict=True):
            own = row.columns["rollout_logprobs"]
            row.set("rollout_logprobs", np.where(_is_unknown(row), values, own))
        return changed


def _is_unknown(row: Sample) -> npt.NDArray[np.bool_]:
    return row.loss_mask & np.isnan(row.columns["rollout_logprobs"])


# -- ids and masks --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RetokenizedRows(_EditFault):
    """Each run of sampled text is decoded and encoded again, as by a program that keeps messages
    instead of ids. The text stays, but ids change where the model had spelt it in another way.
    Control tokens stay; columns other than log-probs follow by position in the run."""

    logprobs: Literal["by_position", "recomputed"] = "by_position"
    """by_position: the sampled log-probs are laid on the new ids in order, 0.0 where they run out.
    recomputed: the trainer computes them for the new ids, so that KL looks clean while the policy
    is trained on tokens that it did not choose."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        tokenizer = renderer.tokenizer
        ids, turn, mask = row.token_ids, row.columns["turn"], row.loss_mask
        is_text = (turn >= 0) & ~np.isin(ids, list(tokenizer.control_ids))
        new_ids: list[int] = []
        source: list[int] = []
        runs = groupby(range(len(row)), key=lambda at: (is_text[at], turn[at], mask[at]))
        for (has_text, _, _), run in runs:
            places = list(run)
            piece = ids[places].tolist()
            if has_text:
                piece = tokenizer.encode(tokenizer.decode(piece))
            new_ids += piece
            source += [min(places[0] + i, places[-1]) for i in range(len(piece))]
        out = taken(row, source, new_ids)
        is_sampled = out.columns["turn"] >= 0
        for name in (name for name in row.columns if name.endswith("logprobs")):
            values = row.columns[name][turn >= 0]
            laid = np.full(is_sampled.sum(), FILLER, np.float32)
            laid[: len(values)] = values[: len(laid)]
            out.columns[name][is_sampled] = laid
        if self.logprobs == "recomputed":
            return with_logprobs(out, np.full(len(out), np.nan))
        return out


@dataclass(frozen=True, kw_only=True)
class RerenderedHistory(_EditFault):
    """Every turn but the last is rendered again from what the program kept of it, with its
    log-probs laid on the result: a loop that makes prompts with a chat template, and the row from
    the last prompt. Where the new turn is longer, the rest counts as observed."""

    kept: Literal["text", "message"] = "text"
    """text: the decoded reply without control tokens, as an assistant's content, calls included.
    message: the reply as the renderer parses it; only spellings and line breaks change then."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        tokenizer = renderer.tokenizer
        ids: list[int] = []
        source: list[int] = []
        observed: list[int] = []
        begin = 0
        for first, end in turns(row)[:-1]:
            sampled = row.token_ids[first:end].tolist()
            message = renderer.parse(sampled)
            if self.kept == "text":
                text = tokenizer.decode([i for i in sampled if i not in tokenizer.control_ids])
                message = Message(role="assistant", content=text)
            opening, new = self._written(message, renderer)
            ids += [*row.token_ids[begin : first - len(opening)].tolist(), *opening, *new]
            source += [*range(begin, first), *(min(first + i, end - 1) for i in range(len(new)))]
            observed += range(len(ids) - len(new) + len(sampled), len(ids))
            begin = end
        ids += row.token_ids[begin:].tolist()
        source += range(begin, len(row))
        return observed_at(taken(row, source, ids), np.array(observed, np.int64))

    def _written(self, message: Message, renderer: Renderer) -> tuple[list[int], list[int]]:
        """(the changed end of the opening before it; the ids from where a sampled turn would begin)
        of an assistant's message inside of a history, up to what ends it.

        The opening's last word may run into the message's first: a line break and a line break.
        """
        user = Message(role="user", content="x")
        before, two = renderer.render([user]), renderer.render([user, user])
        whole = renderer.render([user, message, user])
        begin = first_difference(before, whole)
        tail = len(two) - first_difference(before, two)
        # What is left ends with the token that opens the next message, and maybe a line break.
        body = whole[len(before) : len(whole) - tail - 1]
        while body and body[-1] not in renderer.tokenizer.control_ids:
            body.pop()
        return whole[begin : len(before)], body


@dataclass(frozen=True, kw_only=True)
class DroppedFinalTokens(_EditFault):
    """The last sampled tokens of a row's last turn are missing: a loop that takes the ids from the
    next prompt, which the last turn does not have. At least one token of the turn stays. The other
    log-probs are right: only tokens/trained below tokens/sampled shows it, and the policy never
    learns to end."""

    least: ClassVar = {"count": 1}

    count: int = 1
    """Tokens that are dropped at most."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        turn = row.columns["turn"]
        return without(row, np.flatnonzero((turn >= 0) & (turn == turn.max()))[1:][-self.count :])


@dataclass(frozen=True, kw_only=True)
class DroppedSeparators(_EditFault):
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
        is_control = _is_control(row, renderer)
        lost: list[int] = []
        for _, end in turns(row):
            if row.token_ids[end - 1] in renderer.stop_ids and is_control[end:].any():
                lost += range(end, end + int(is_control[end:].argmax()))
        return without(row, lost)


@dataclass(frozen=True, kw_only=True)
class TokensAfterStop(_EditFault):
    """Tokens after the stop token that ended a row are trained: an engine that samples a batch to
    its longest reply, and a program that does not cut. The log-probs are the model's own."""

    least: ClassVar = {"count": 1}

    count: int = 4
    """Tokens after the stop token: a repetition of the turn's beginning."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        begin, end = (turns(row) or [(0, 0)])[-1]
        if end != len(row) or row.token_ids[end - 1] not in renderer.stop_ids:
            return row
        out = taken(row, [*range(end), *range(begin, min(begin + self.count, end))])
        return unknown_at(out, np.arange(end, len(out)))


@dataclass(frozen=True, kw_only=True)
class TrainedObservations(_EditFault):
    """Tokens that the model was given between its turns (a tool's reply) are trained: a mask that
    is 1 everywhere after the prompt."""

    least: ClassVar = {"count": 0}

    count: int = 0
    """Tokens of each row, from the first turn on; 0 for all."""
    logprobs: Literal["recomputed", "filler"] = "recomputed"
    """recomputed: the model's, as from an engine that scores its prompt. filler: 0.0."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        turn = row.columns["turn"]
        first = next((begin for begin, _ in turns(row)), len(row))
        observed = np.flatnonzero(turn[first:] < 0) + first
        out = with_trained(row, observed[: self.count or None])
        if self.logprobs == "filler" and out is not row:
            out.columns["rollout_logprobs"][_is_unknown(out)] = FILLER
        return out


@dataclass(frozen=True, kw_only=True)
class WrongBoundary(_EditFault):
    """The boundary between prompt and reply is at the wrong place."""

    nonzero: ClassVar = {"by": "moves"}

    kind: Literal["moved", "subtracted"] = "moved"
    """moved: the first reply begins `by` tokens late (its first tokens are not trained) or early
    (the prompt's last ones are). subtracted: a loop that ends before it adds the last reply, and
    computes the prompt's length as the row's minus all replies': negative if these are longer. All
    log-probs are then at other tokens."""
    by: int = -3
    """Tokens of kind=moved; negative is early."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        if not turns(row):
            return row
        if self.kind == "subtracted":
            return self._subtracted(row)
        begin, end = turns(row)[0]
        if self.by < 0:
            return with_trained(row, np.arange(max(begin + self.by, 1), begin))
        return observed_at(
            taken(row, np.arange(len(row))), np.arange(begin, min(begin + self.by, end))
        )

    def _subtracted(self, row: Sample) -> Sample:
        """All log-probs are laid from the computed end of the prompt on in order, and every token
        with one is trained."""
        cut, length = turns(row)[-1][0], length_by_subtraction(row)
        values = row.columns["rollout_logprobs"][row.columns["turn"] >= 0]
        begin = max(length, 1)
        out = taken(row, np.arange(cut))
        is_reply = np.arange(cut) >= begin
        laid = np.full(cut, np.nan, np.float32)
        laid[begin:] = values[begin - length :][: cut - begin]
        for name, column in row.columns.items():
            if not COLUMNS[name].is_of_inputs and name not in ("turn", "token_kind"):
                out.columns[name][:] = COLUMNS[name].fill
                out.columns[name][is_reply] = column[row.loss_mask.argmax()]
        out.set("turn", np.where(is_reply, 0, -1).astype(np.int32))
        out.loss_mask[:] = is_reply
        return with_logprobs(out, laid)


def length_by_subtraction(row: Sample) -> int:
    """The prompt's length as the row without its last reply, minus all replies."""
    return turns(row)[-1][0] - int((row.columns["turn"] >= 0).sum())


@dataclass(frozen=True, kw_only=True)
class DuplicatedPrompt(_EditFault):
    """The prompt is in the row again, before the last turn: a program that appends what is new by
    prompt[-n:], which is the whole prompt for n = 0."""

    least: ClassVar = {"copies": 1}

    copies: int = 1
    """Additional copies."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        if not (found := turns(row)):
            return row
        at = found[-1][0]
        prompt = [*range(found[0][0])]
        return taken(row, [*range(at), *prompt * self.copies, *range(at, len(row))])


@dataclass(frozen=True, kw_only=True)
class WrongTemplate(RowFault):
    """The trainer renders the prompt by itself, in another way than the engine read it. What was
    sampled keeps its ids and log-probs."""

    kind: Literal["system", "opening", "beginning", "space"] = "system"
    """system: with a default system message. opening: without the opening of the first reply.
    beginning: with its first token twice. space: with a space before that opening."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        if not (found := turns(row)):
            return row
        first, size = found[0][0], len(opening_of(renderer))
        if self.kind == "opening":
            return without(row, range(max(first - size, 0), first))
        if self.kind == "beginning":
            return with_inserted(row, 0, row.token_ids[:1].tolist())
        if self.kind == "space":
            return with_inserted(row, max(first - size, 0), renderer.tokenizer.encode(" "))
        user = Message(role="user", content="a")
        system = Message(role="system", content="You are a helpful assistant.")
        plain, more = renderer.render([user]), renderer.render([system, user])
        at = first_difference(plain, more)
        return with_inserted(row, at, more[at : at + len(more) - len(plain)])


@dataclass(frozen=True, kw_only=True)
class PaddedRows(_EditFault):
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
        at = turns(row)[0][0] if turns(row) and self.place == "inside" else 0
        pad_id = renderer.tokenizer.control_id(self.token)
        return with_inserted(row, at, [pad_id] * self.count)


@dataclass(frozen=True, kw_only=True)
class PostProcessedReplies(_EditFault):
    """Replies are changed after they were sampled."""

    least: ClassVar = {"count": 1}

    kind: Literal["stripped", "completed"] = "stripped"
    """stripped: the last `count` text tokens before the stop token are removed with their
    log-probs, as by a program that tidies replies. completed: a reply that its budget cut off gets
    a stop token that was not sampled, trained with the log-prob 0.0."""
    count: int = 2
    """Tokens of kind=stripped."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        is_stopped = {end: row.token_ids[end - 1] in renderer.stop_ids for _, end in turns(row)}
        if self.kind == "completed":
            out = row
            for end in reversed([end for end in is_stopped if not is_stopped[end]]):
                source = [*range(end), end - 1, *range(end, len(out))]
                ids = [*out.token_ids[:end], renderer.stop_ids[0], *out.token_ids[end:]]
                out = taken(out, source, ids)
                out.columns["rollout_logprobs"][end] = FILLER
            return out
        is_text = ~_is_control(row, renderer)
        lost: list[int] = []
        for begin, end in turns(row):
            if is_stopped[end]:
                text = np.flatnonzero(is_text[begin + 1 : end]) + begin + 1
                lost += text[-self.count :].tolist()
        return without(row, lost)


@dataclass(frozen=True, kw_only=True)
class InjectedControlTokens(_EditFault):
    """Control tokens are inside of what a tool or user wrote: a tokenizer that reads `<|im_end|>`
    in a web page as the end of a turn. The model reads them too, so both sides agree."""

    least: ClassVar = {"count": 1}

    count: int = 1
    """Control tokens in each row."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        if (place := self.place(row, renderer)) is None:
            return row
        out = with_inserted(row, place[1], [renderer.stop_ids[0]] * self.count)
        own = out.columns["rollout_logprobs"]
        return with_logprobs(out, np.where(out.loss_mask, np.nan, own))

    def place(self, row: Sample, renderer: Renderer) -> tuple[int, int, int] | None:
        """(control token before, place, control token after) of the last text before the last turn
        that others wrote, and that is more than the opening of a turn."""
        observed = row.columns["turn"] < 0
        last = next((begin for begin, _ in reversed(turns(row))), 0)
        controls = np.flatnonzero((observed & _is_control(row, renderer))[:last]).tolist()
        for begin, end in reversed(list(pairwise(controls))):
            if end - begin >= MIN_INJECTED_TEXT and observed[begin:end].all():
                return begin, (begin + end) // 2 + 1, end
        return None


@dataclass(frozen=True, kw_only=True)
class DroppedThinking(_EditFault):
    """The thinking of every turn but the last is missing, as a chat template drops it from a
    history. Tokens after it were sampled with it. Rows without thinking are not hit."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        lost: list[int] = []
        for begin, end in turns(row)[:-1]:
            ids = row.token_ids[begin:end].tolist()
            bare = renderer.without_thinking(ids)
            stop = end - first_difference(ids[::-1], bare[::-1])
            lost += range(stop - len(ids) + len(bare), stop)
        return without(row, lost)


@dataclass(frozen=True, kw_only=True)
class LostRoutes(RowFault):
    """Later turns find their prefix gone from the engine's cache: the routes of all positions
    before are lost to `trainer.routing_replay=rollout`."""

    needs: ClassVar = "routes that the trainer replays"

    share: float = 0.5
    """Share of the later turns that are hit."""

    def is_hit(self, row: Sample) -> bool:
        return True  # `share` is of its turns

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        turn, routes = row.columns["turn"], row.columns.get("routed_experts")
        later = range(1, int(turn.max(initial=-1)) + 1)
        hit = [t for t in later if is_chosen(self.share, self.seed, "lost routes", row.id, t)]
        if routes is None or not hit:
            return row
        out = taken(row, np.arange(len(row)))
        begin = int(np.flatnonzero(turn == hit[-1] - 1).max(initial=-1)) + 1
        out.columns["routed_experts"][:begin] = UNKNOWN_EXPERT
        return out


@dataclass(frozen=True, kw_only=True)
class LateAdvantages(RowFault):
    """Every advantage is `by` tokens behind its own: the shift to "predicts the next" was applied
    to log-probs and mask, and not to advantages. Log-probs are right."""

    nonzero: ClassVar = {"by": "moves"}

    by: int = 1
    """Places; negative is early."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        if "advantages" not in row.columns:
            return row
        out = taken(row, np.arange(len(row)))
        out.columns["advantages"][:] = _moved(row.columns["advantages"], -self.by)
        return out


# -- log-probs ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _ValueFault(RowFault):
    """Base of faults of the sampler's log-probs."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        values = row.columns["rollout_logprobs"].copy()
        values[row.loss_mask] = self.written(values[row.loss_mask], row)
        return with_logprobs(taken(row, np.arange(len(row))), values)

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        """Returns the values to write in place of `logprobs` [trained tokens]."""
        raise NotImplementedError(f"{type(self).__name__} changes no log-prob")


@dataclass(frozen=True, kw_only=True)
class ShiftedLogprobs(_ValueFault):
    """Every trained token has the log-prob of the token `offset` places after it among the row's
    trained tokens, 0.0 at the end: an off-by-one in the shift to "predicts the next"."""

    nonzero: ClassVar = {"offset": "shifts"}

    offset: int = 1
    """Places; negative takes log-probs from before the token."""

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        return _moved(logprobs, self.offset)


@dataclass(frozen=True, kw_only=True)
class FillerLogprobs(_ValueFault):
    """Trained tokens have the log-prob 0.0: an array of zeros where the engine gave none."""

    tokens: Literal["all", "last"] = "all"
    """all: of every turn, like a reply without log-probs. last: each turn's last token, like a stop
    token that the program appends."""

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        turn = row.columns["turn"][row.loss_mask]
        is_hit = np.ones(len(turn), np.bool_)
        if self.tokens == "last":
            is_hit[:-1] = turn[1:] != turn[:-1]
        return np.where(is_hit, np.float32(FILLER), logprobs)


@dataclass(frozen=True, kw_only=True)
class ClampedLogprobs(_ValueFault):
    """Log-probs below a bound are set to it, "for stability", where they are collected."""

    lowest: float = -3.0
    """The bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -np.inf < self.lowest < 0:
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
        super().__post_init__()
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
class _RatioFault(_ValueFault):
    """Base of faults whose log-probs are of another distribution than the one at hand."""

    least: ClassVar = {"std": 0}

    std: float = 0.5
    """Standard deviation of the log ratio of the two at an unlikely token."""

    def log_ratios(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.float64]:
        """[trained tokens] log of a ratio with the mean 1 under the one that drew the tokens: that
        of a normalised distribution to it. The same token after the same ids has the same one;
        a certain token has none."""
        keys: list[int] = []
        key = self.seed
        for of_token in row.token_ids.tolist():
            key = derive_seed(key, of_token)
            keys.append(key)
        kept = np.flatnonzero(row.loss_mask).tolist()
        normal = np.array([np.random.default_rng(keys[at]).normal() for at in kept])
        std = self.std * -np.expm1(np.minimum(logprobs.astype(np.float64), 0.0))
        return std * normal - std**2 / 2

    @staticmethod
    def bounded(new: npt.NDArray[np.float64], logprobs: Float32Array) -> npt.NDArray[np.floating]:
        """`new` below 0: at most a quarter of `logprobs`, for 0.0 would be a filler."""
        return np.minimum(new, logprobs / 4)


@dataclass(frozen=True, kw_only=True)
class DraftLogprobs(_RatioFault):
    """The recorded log-probs are of a distribution that did not draw the tokens: a draft model's,
    or another head's."""

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        return self.bounded(logprobs + self.log_ratios(logprobs, row), logprobs)


@dataclass(frozen=True, kw_only=True)
class LateVersion(_RatioFault):
    """Other weights sampled the first part of each row, up to a token in its middle, and all of it
    has the version of its end: the engine took new weights during the episode, and the version is
    stamped when it is done."""

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        rng = np.random.default_rng(derive_seed(self.seed, "switch", row.id))
        is_first = np.arange(len(logprobs)) < len(logprobs) * rng.uniform(0.3, 0.7)
        other = self.bounded(logprobs - self.log_ratios(logprobs, row), logprobs)
        return np.where(is_first, other, logprobs)


# -- editing a row --------------------------------------------------------------------------------


def turns(row: Sample) -> list[tuple[int, int]]:
    """(begin, end) of each sampled turn of `row`, in order."""
    turn = row.columns["turn"]
    places = [np.flatnonzero(turn == number) for number in range(int(turn.max(initial=-1)) + 1)]
    return [(int(at[0]), int(at[-1]) + 1) for at in places if at.size]


def taken(
    row: Sample,
    source: Sequence[int] | Int64Array,
    token_ids: Sequence[int] | npt.NDArray[np.int32] | None = None,
) -> Sample:
    """A new row of `token_ids` whose other columns are those of the tokens `source` of `row`, as
    are the ids if they are not given.

    What an id was drawn from is known of that id alone: of another one it is left empty, which
    means the whole vocabulary.
    """
    at = np.asarray(source, np.int64)
    ids = frozen_ids(row.token_ids[at] if token_ids is None else token_ids, where=row.id)
    is_same = ids == row.token_ids[at]
    ragged = {
        name: Ragged.of([of[i] if same else of[i][:0] for i, same in enumerate(is_same)])
        for name, of in ((name, column.take(at)) for name, column in row.ragged.items())
    }
    return Sample(
        id=row.id,
        token_ids=ids,
        loss_mask=row.loss_mask[at],
        columns={name: column[at] for name, column in row.columns.items()},
        ragged=ragged,
        group=row.group,
    )


def without(row: Sample, lost: Collection[int] | Int64Array) -> Sample:
    """`row` without these tokens; `row` itself if there are none."""
    return taken(row, np.delete(np.arange(len(row)), list(lost))) if len(lost) else row


def with_inserted(row: Sample, at: int, ids: Sequence[int]) -> Sample:
    """`row` with these observed ids before its token `at`."""
    source = [*range(at), *[max(at - 1, 0)] * len(ids), *range(at, len(row))]
    out = taken(row, source, [*row.token_ids[:at], *ids, *row.token_ids[at:]])
    return observed_at(out, np.arange(at, at + len(ids)))


def with_trained(row: Sample, at: Int64Array) -> Sample:
    """`row` with these observed tokens trained too, with log-probs of NaN. They still count as not
    sampled."""
    if not at.size:
        return row
    out = taken(row, np.arange(len(row)))
    out.loss_mask[at] = True
    for name in {"advantages", "returns"} & row.columns.keys():
        if row.num_trained:
            out.columns[name][at] = row.columns[name][row.loss_mask].mean()
    return out


def with_logprobs(row: Sample, values: npt.NDArray[np.floating]) -> Sample:
    """`row`, which was just made, with these log-probs of the sampler. values: [T]."""
    row.set("rollout_logprobs", values.astype(np.float32))
    return row


def observed_at(row: Sample, at: Int64Array) -> Sample:
    """`row`, which was just made, with these tokens neither sampled nor trained."""
    row.loss_mask[at] = False
    for name, column in row.columns.items():
        if name != "token_kind":
            column[at] = COLUMNS[name].fill
    return unknown_at(row, at)


def unknown_at(row: Sample, at: Int64Array) -> Sample:
    """`row`, which was just made, without log-probs and routes of these tokens."""
    for name, column in row.columns.items():
        if name.endswith("logprobs") or COLUMNS[name].is_of_inputs:
            column[at] = COLUMNS[name].fill
    return row


def _moved(values: Float32Array, by: int) -> Float32Array:
    """The values `by` places after each, 0 where there are none."""
    at = np.arange(len(values)) + by
    is_inside = (at >= 0) & (at < len(values))
    return np.where(is_inside, values[at * is_inside], np.float32(0.0))


def _is_control(row: Sample, renderer: Renderer) -> npt.NDArray[np.bool_]:
    return np.isin(row.token_ids, list(renderer.tokenizer.control_ids))
