"""Faults that the proof and the tests of the doctor inject, beside those of the package.

    lockstep train quickstart --plugin docs/proof/doctor_faults.py --fault padded_rows

# T tokens  D model width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from lockstep.config import at_least, tag
from lockstep.doctor.scoring.prompts import opening_of
from lockstep.errors import ConfigError
from lockstep.models.adapter_rows import AdapterRows
from lockstep.models.attention import Attention
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.layer_inputs import LayerInputs, Routing
from lockstep.models.variants import sharing, with_attention, with_config
from lockstep.ops.base import Context
from lockstep.ops.context import PackedContext
from lockstep.renderers.base import Renderer
from lockstep.renderers.pieces import first_difference
from lockstep.run.hooks import LogProbs
from lockstep.run_config import Config
from lockstep.testing.faults.base import FaultConfig, RowFault
from lockstep.testing.faults.rows import (
    FILLER,
    _EditFault,
    _is_unknown,
    _moved,
    _ValueFault,
    taken,
    turns,
    with_logprobs,
    without,
)
from lockstep.testing.faults.sides import _TrainedFault
from lockstep.types import COLUMNS, Float32Array, Int64Array, Message, Sample

Tensor = torch.Tensor

MIN_INJECTED_TEXT = 5
"""Tokens between two control tokens that are a message's text and not its header."""


# -- ids and masks ---------------------------------------------------------------------------------


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

    count: Annotated[int, at_least(1)] = 4
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

    count: Annotated[int, at_least(0)] = 0
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
        cut = turns(row)[-1][0]
        length = cut - int((row.columns["turn"] >= 0).sum())
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


@dataclass(frozen=True, kw_only=True)
class DuplicatedPrompt(_EditFault):
    """The prompt is in the row again, before the last turn: a program that appends what is new by
    prompt[-n:], which is the whole prompt for n = 0."""

    copies: Annotated[int, at_least(1)] = 1
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

    count: Annotated[int, at_least(1)] = 8
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

    kind: Literal["stripped", "completed"] = "stripped"
    """stripped: the last `count` text tokens before the stop token are removed with their
    log-probs, as by a program that tidies replies. completed: a reply that its budget cut off gets
    a stop token that was not sampled, trained with the log-prob 0.0."""
    count: Annotated[int, at_least(1)] = 2
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

    count: Annotated[int, at_least(1)] = 1
    """Control tokens in each row."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        """The place is in the last text before the last turn that others wrote, and that is more
        than the opening of a turn."""
        observed = row.columns["turn"] < 0
        last = next((begin for begin, _ in reversed(turns(row))), 0)
        controls = np.flatnonzero((observed & _is_control(row, renderer))[:last]).tolist()
        for begin, end in reversed(list(pairwise(controls))):
            if end - begin >= MIN_INJECTED_TEXT and observed[begin:end].all():
                place = (begin + end) // 2 + 1
                out = with_inserted(row, place, [renderer.stop_ids[0]] * self.count)
                own = out.columns["rollout_logprobs"]
                return with_logprobs(out, np.where(out.loss_mask, np.nan, own))
        return row


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


# -- log-probs -------------------------------------------------------------------------------------


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


# -- editing a row ---------------------------------------------------------------------------------


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


def _is_control(row: Sample, renderer: Renderer) -> npt.NDArray[np.bool_]:
    return np.isin(row.token_ids, list(renderer.tokenizer.control_ids))


# -- the trainer's numbers -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class IgnoredRopeScaling(_TrainedFault):
    """The trainer turns queries and keys by the angles of a model without rope scaling, or of
    another base: a config.json that is read by half."""

    theta: float = 0.0
    """Base of the angles; 0 keeps it, and leaves the scaling out."""

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        super().check(config, model, renderer)
        if self.theta == 0 and model.rope_scaling is None:
            raise ConfigError(
                f"fault {tag(type(self))}: model={config.model} has no rope scaling to ignore. Set "
                "theta, or choose a gpt-oss."
            )

    def make_trained(self, model: Decoder) -> Decoder:
        changed = {"rope_theta": self.theta} if self.theta else {"rope_scaling": None}
        return with_config(model, **changed)


@dataclass(frozen=True, kw_only=True)
class WrongPositions(_TrainedFault):
    """The trainer gives every token position 0: position ids that were never filled in."""

    def make_trained(self, model: Decoder) -> Decoder:
        return rearranged(model, without_positions)


@dataclass(frozen=True, kw_only=True)
class PackingLeak(_TrainedFault):
    """The trainer's attention does not stop where a packed row begins: each sees those before it,
    among `rows` that are packed together."""

    rows: Annotated[int, at_least(2)] = 2
    """Rows that see one another."""
    restarts: bool = True
    """Whether positions begin again in each row."""

    def make_trained(self, model: Decoder) -> Decoder:
        return rearranged(model, partial(leaking, rows=self.rows, restarts=self.restarts))


@dataclass(frozen=True, kw_only=True)
class PaddingAttended(_TrainedFault):
    """The trainer pads rows on the left to the longest of their batch, and attention sees it."""

    token: Annotated[int, at_least(0)] = 0
    """Id of the padding."""

    def make_trained(self, model: Decoder) -> Decoder:
        return rearranged(model, partial(padded, token=self.token))


@dataclass(frozen=True, kw_only=True)
class ActiveDropout(_TrainedFault):
    """The trainer's attention has dropout, drawn again in each forward: a model that is in train
    mode while its log-probs are computed."""

    prob: float = 0.1
    """Share that is dropped."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        if not 0 < self.prob < 1:
            raise ConfigError(f"prob={self.prob} must lie in (0, 1).")

    def make_trained(self, model: Decoder) -> Decoder:
        return with_dropout(model, self.prob, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class ScoredAfterUpdate(FaultConfig):
    """The recorded log-probs of the trainer are those after the update on the row: a program that
    logs the training forward of a later epoch, or computes them when it writes. A run's metrics are
    those before the update; its recorded trajectories are not."""

    def after_update(self, rows: Sequence[Sample], log_probs: LogProbs) -> None:
        for row, values in zip(rows, log_probs(rows), strict=True):
            for name in {"logprobs", "old_logprobs"} & row.columns.keys():
                row.set(name, values)


# -- decoders with these faults --------------------------------------------------------------------


Arranged = tuple[Tensor, Tensor, PackedContext, Tensor | None]
"""(ids, positions, context) that are run, and the index of each of the T tokens among them; None
where they are the same."""


def rearranged(
    model: Decoder, arrange: Callable[[Tensor, Tensor, PackedContext], Arranged]
) -> Decoder:
    """`model` over the same parameters, whose packed rows are arranged in another way first."""
    return sharing(model, lambda config: RearrangingDecoder(config, arrange))


class RearrangingDecoder(Decoder):
    """A decoder that lays out packed rows wrongly; a sampler's steps it leaves alone."""

    def __init__(
        self, config: ModelConfig, arrange: Callable[[Tensor, Tensor, PackedContext], Arranged]
    ) -> None:
        super().__init__(config)
        self._arrange = arrange

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        context: Context,
        routing: Routing | None = None,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        if not isinstance(context, PackedContext):
            return super().forward(ids_T, positions_T, context, routing, adapters)
        ids, positions, context, index_T = self._arrange(ids_T, positions_T, context)
        out = super().forward(ids, positions, context, routing, adapters)
        if index_T is None:
            return out
        if routing is not None:
            chosen = routing.chosen.items()
            routing.chosen = {layer: x_TA.index_select(0, index_T) for layer, x_TA in chosen}
        return out.index_select(0, index_T)


def without_positions(ids_T: Tensor, positions_T: Tensor, context: PackedContext) -> Arranged:
    """Every token at position 0."""
    return ids_T, torch.zeros_like(positions_T), context, None


def leaking(
    ids_T: Tensor, positions_T: Tensor, context: PackedContext, *, rows: int, restarts: bool
) -> Arranged:
    """So many rows at a time as one."""
    firsts = np.arange(0, len(context.lengths), rows)
    lengths = np.add.reduceat(context.lengths, firsts)
    joined = PackedContext(lengths, context.index, context.device)
    if not restarts:
        counted = np.concatenate([np.arange(length) for length in lengths])
        positions_T = positions_T.clone()
        positions_T[torch.from_numpy(context.index)] = torch.from_numpy(counted).to(positions_T)
    return ids_T, positions_T, joined, None


def padded(ids_T: Tensor, positions_T: Tensor, context: PackedContext, *, token: int) -> Arranged:
    """Every row as long as the longest, with padding in front."""
    longest, num_tokens = int(context.lengths.max()), len(ids_T)
    rows = np.split(context.index, np.cumsum(context.lengths)[:-1])
    # Padding is one more token, behind the T: place T.
    index = np.concatenate([np.r_[np.full(longest - len(r), num_tokens), r] for r in rows])
    ids = torch.cat([ids_T, ids_T.new_full((1,), token)])[torch.from_numpy(index)]
    positions = torch.arange(longest).repeat(len(rows)).to(positions_T)
    place_T = np.zeros(num_tokens + 1, np.int64)
    place_T[index] = np.arange(len(index))
    layout = PackedContext.of([longest] * len(rows), device=context.device)
    return ids, positions, layout, torch.from_numpy(place_T[:-1]).to(ids_T.device)


class DroppingAttention(Attention):
    """Attention whose output has dropout."""

    def __init__(self, *args, share: float, generator: torch.Generator) -> None:
        super().__init__(*args)
        self._share, self._generator = share, generator

    def add_output(
        self, residual_TD: Tensor, x_TK: Tensor, norm: Tensor | None, at: LayerInputs
    ) -> Tensor:
        out_TD = self.o_proj(x_TK, at)
        out_TD = out_TD if norm is None else at.ops.rms_norm(out_TD, norm, self.eps)
        kept_TD = torch.rand(out_TD.shape, generator=self._generator) >= self._share
        kept_TD = (kept_TD / (1 - self._share)).to(out_TD.device, out_TD.dtype)
        return residual_TD + out_TD * kept_TD


def with_dropout(model: Decoder, share: float, *, seed: int) -> Decoder:
    """`model` with dropout on the output of every attention, drawn anew in each call. seed: of a
    generator on the CPU, so that every device drops the same."""
    generator = torch.Generator().manual_seed(seed)
    return with_attention(model, partial(DroppingAttention, share=share, generator=generator))
