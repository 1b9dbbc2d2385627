"""Makes dumps of a trainer with a known defect. Proofs and tests of the doctor read them.

`faulty_rows` applies faults of `lockstep.testing.faults` and `doctor_faults` to the rows of a sound
run and recomputes the log-probs that they change. Five faults exist in dumps only.

# T tokens  L routed layers  A active experts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import torch
from doctor_faults import (
    InjectedControlTokens,
    ScoredAfterUpdate,
    WrongBoundary,
    length_by_subtraction,
)

from lockstep.agent.tasks import derive_seed
from lockstep.config import Interval, at_least
from lockstep.doctor.rows import Rows
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import copy_decoder
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.models.moe import Routing
from lockstep.renderers.base import Renderer
from lockstep.testing.faults.base import FaultConfig, RowFault, check_one, is_chosen
from lockstep.testing.faults.rows import (
    _ValueFault,
    taken,
    turns,
)
from lockstep.testing.faults.sides import (
    ProcessedLogprobs,
    QuantisedRollout,
    StaleWeights,
    UnmergedAdapter,
    _NoiseFault,
)
from lockstep.training.packing import pack, plan_microbatches
from lockstep.types import UNKNOWN_EXPERT, Float32Array, Int32Array, Message, Sample

MICROBATCH_TOKENS = 16384
"""Tokens of one forward."""
LEARNING_RATE = 1e-3
"""Learning rate of the updates that a fault needs."""

Scored = tuple[Float32Array, npt.NDArray[np.int16] | None]
"""A row's log-probs [T], NaN where nothing is trained, and its experts [T, L, A], -1 where nothing
was read; None for a dense model."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Sound rows at temperature 1, and the model that both sides should run."""

    model: Decoder
    renderer: Renderer
    samples: Sequence[Sample]
    """Rows as `rows_for_training` makes them, with `rollout_logprobs` and `advantages`."""
    sampler: Decoder | None = None
    """Decoder that sampled the rows, if not the model: for more log-probs of the sampler."""
    earlier: Sequence[Sample] = ()
    """Rows of the updates of a stale dump; empty for `samples`."""
    model_ids: Callable[[Int32Array], Int32Array] = field(default=lambda ids: ids)
    """Maps the tokenizer's ids to those of a model with fewer ids."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Sample's id -> reward of its episode."""
    messages: Mapping[str, Sequence[Message]] = field(default_factory=dict[str, Sequence[Message]])
    """Sample's id -> its dialogue."""

    def scored(self, decoder: Decoder, rows: Sequence[Sample]) -> list[Scored]:
        """The log-probs and experts of each row by `decoder`."""
        logprobs = [np.full(len(row), np.nan, np.float32) for row in rows]
        routes: list[npt.NDArray[np.int16] | None] = [None for _ in rows]
        read = [self._read(row) for row in rows]
        for batch in pack(read, plan_microbatches(read, MICROBATCH_TOKENS)):
            routing = Routing() if decoder.config.is_moe else None
            with torch.no_grad():
                hidden = decoder(batch.ids, batch.positions, batch.context, routing)
                values, _ = decoder.log_probs(hidden[batch.predictors], batch.targets)
            for row, places, found in batch.unpack(values):
                logprobs[row][places] = found
            if routing is None:
                continue
            chosen = routing.stacked().numpy().astype(np.int16)
            for row, fed in zip(batch.rows, batch.inputs, strict=True):
                of_row = np.full((len(rows[row]), *chosen.shape[1:]), UNKNOWN_EXPERT, np.int16)
                of_row[: len(fed)] = chosen[fed]
                routes[row] = of_row
        return list(zip(logprobs, routes, strict=True))

    def _read(self, row: Sample) -> Sample:
        """`row` in the model's ids, with its advantages."""
        return Sample(
            id=row.id,
            token_ids=self.model_ids(row.token_ids),
            loss_mask=row.loss_mask,
            columns={"advantages": row.columns["advantages"]},
        )

    def learn(
        self, num_updates: int, *, is_by_these_rows: bool = False, has_adapter: bool = False
    ) -> Decoder:
        """A copy of the model after so many AdamW updates on advantage times log-prob.
        is_by_these_rows: not by the earlier ones. has_adapter: only an adapter is trained."""
        rows = self.samples if is_by_these_rows or not self.earlier else self.earlier
        model = copy_decoder(self.model).requires_grad_(True)
        if has_adapter:
            add_adapter(model, lora_shape(LoraConfig(rank=8), model.config), seed=0)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        read = [self._read(row) for row in rows]
        batches = list(pack(read, plan_microbatches(read, MICROBATCH_TOKENS)))
        num_trained = sum(row.num_trained for row in rows)
        for _ in range(num_updates):
            optimizer.zero_grad()
            for batch in batches:
                logprobs, _ = model.score(
                    batch.ids,
                    batch.positions,
                    batch.context,
                    predictors_N=batch.predictors,
                    targets_N=batch.targets,
                )
                (-(logprobs * batch.columns["advantages"]).sum() / num_trained).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
        return model.requires_grad_(False)


# -- faults that no run can have -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ZeroRoutes(RowFault):
    """Routes that the engine did not return are zeros, as in a buffer that it never wrote: expert 0
    as often as a token has experts. A run that replays such routes refuses them."""

    part: Literal["all", "prefix", "layer"] = "prefix"
    """all: of the whole row. prefix: of all positions before its last turn, which the engine had in
    its cache. layer: of one layer, chosen by the row."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        if "routed_experts" not in row.columns or not turns(row):
            return row
        out = taken(row, np.arange(len(row)))
        routes = out.columns["routed_experts"]
        if self.part == "layer":
            routes[:, derive_seed(self.seed, "layer", row.id) % routes.shape[1]] = 0
        else:
            routes[: turns(row)[-1][0] if self.part == "prefix" else len(row)] = 0
        return out


@dataclass(frozen=True, kw_only=True)
class NonfiniteLogprobs(_ValueFault):
    """Some trained tokens have no finite log-prob: an op that overflowed, or a token outside of
    top-p. In a run the episode of such a token fails."""

    value: Literal["nan", "-inf"] = "nan"
    """Value that replaces the log-prob."""
    token_share: Annotated[float, Interval("(0, 1]")] = 0.02
    """Share of the trained tokens that are hit."""

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        rng = np.random.default_rng(derive_seed(self.seed, "nonfinite", row.id))
        is_hit = rng.random(len(logprobs)) < self.token_share
        return np.where(is_hit, np.float32(self.value), logprobs)


@dataclass(frozen=True, kw_only=True)
class ProbabilitiesAsLogprobs(_ValueFault):
    """Probabilities instead of log-probs. A run refuses them, for they are above 0."""

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        return np.exp(logprobs)


@dataclass(frozen=True, kw_only=True)
class AdapterOfUpdates(UnmergedAdapter):
    """The sampler runs the base model, and the trainer has an adapter after `updates` updates."""

    updates: Annotated[int, at_least(1)] = 8
    """Updates of the adapter."""


@dataclass(frozen=True, kw_only=True)
class ScoredAfterUpdates(ScoredAfterUpdate):
    """The trainer's log-probs are those after `updates` updates on the rows."""

    updates: Annotated[int, at_least(1)] = 1
    """Updates on the rows of the dump."""


# -- what a fault changes in a dump ----------------------------------------------------------------


@singledispatch
def trained_by(fault: FaultConfig, source: Source) -> Decoder:
    """The decoder that the trainer runs. `source.model` sampled the tokens."""
    return fault.make_trained(source.model)


@trained_by.register
def _(fault: StaleWeights, source: Source) -> Decoder:
    return source.learn(fault.lag)


@trained_by.register
def _(fault: AdapterOfUpdates, source: Source) -> Decoder:
    return source.learn(fault.updates, has_adapter=True)


@trained_by.register
def _(fault: ScoredAfterUpdates, source: Source) -> Decoder:
    return source.learn(fault.updates, is_by_these_rows=True)


@singledispatch
def sampled_by(fault: FaultConfig, model: Decoder) -> Decoder:
    """The decoder that the sampler runs in place of `model`."""
    return model


@sampled_by.register
def _(fault: _NoiseFault, model: Decoder) -> Decoder:
    return fault.noisy(model)


@sampled_by.register
def _(fault: QuantisedRollout, model: Decoder) -> Decoder:
    return fault.rounded(model)


@singledispatch
def prompt_length(fault: FaultConfig, row: Sample, before: Sample) -> int | None:
    """The wrong prompt length that the fault reports of `row`, which was `before`; None without."""
    return None


@prompt_length.register
def _(fault: WrongBoundary, row: Sample, before: Sample) -> int | None:
    if row is before:
        return None
    if fault.kind == "subtracted":
        return length_by_subtraction(before)
    return int(np.flatnonzero(row.loss_mask)[0]) if row.num_trained else None


@singledispatch
def said(
    fault: FaultConfig, before: Sample, messages: Sequence[Message], renderer: Renderer
) -> Sequence[Message]:
    """The messages of a row that the fault hits. before: the row without it."""
    return messages


@said.register
def _(
    fault: InjectedControlTokens, before: Sample, messages: Sequence[Message], renderer: Renderer
) -> Sequence[Message]:
    """Writes the control tokens' names into the text that they were injected into."""
    if (place := fault.place(before, renderer)) is None:
        return messages
    decode = renderer.tokenizer.decode
    begin, at, end = place
    text = decode(before.token_ids[begin + 1 : end])
    offset = len(decode(before.token_ids[begin + 1 : at]))
    name = decode([renderer.stop_ids[0]]) * fault.count
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


# -- the dump --------------------------------------------------------------------------------------


def faulty_rows(source: Source, *faults: FaultConfig, share: float = 1.0, seed: int = 0) -> Rows:
    """The rows of `source` as a trainer with these faults would dump them.

    share: share of the rows that a fault of the trainer's decoder or weights hits; faults of rows
    have their own. seed: seed of that choice.

    Every field of a full dump is filled: `turn` and `is_sampled` as the program believes them,
    `engine_ids` as the engine answered, `engine_prompt_ids` as it was asked.

    Faults of the sampler's numbers (`KernelNoise`, `RouterNoise`) recompute log-probs and routes of
    the same tokens: right to first order in the noise. For more, sample with `fault.make_engine`
    and leave the fault out here. Raises ConfigError for two faults of one side's decoder, of which
    the last would undo the first, and ValueError for `ProcessedLogprobs`, which changes only how
    rows are sampled.
    """
    if any(isinstance(fault, ProcessedLogprobs) for fault in faults):
        raise ValueError(
            "processed_logprobs changes how rows are sampled: sample them with "
            "fault.processing(engine), and call faulty_rows without the fault."
        )
    samplers = [f for f in faults if isinstance(f, _NoiseFault | QuantisedRollout)]
    check_one(samplers, "replace the sampler's decoder")
    learning = StaleWeights | AdapterOfUpdates | ScoredAfterUpdates
    others = [f for f in faults if f.replaces_trained or isinstance(f, learning)]
    check_one(others, "replace the trainer's decoder")
    model, before = source.model, list(source.samples)
    sampler = source.sampler or model
    for fault in faults:
        if (noisy := sampled_by(fault, model)) is not model:
            sampler = noisy
            drawn = zip(before, source.scored(sampler, before), strict=True)
            before = [_redrawn(row, scored) for row, scored in drawn]

    def log_probs(rows: Sequence[Sample]) -> list[Float32Array]:
        return [values for values, _ in source.scored(sampler, rows)]

    rows = before
    for fault in faults:
        rows = fault.change_rows(rows, source.renderer, log_probs)
    scored = source.scored(model, rows)
    hit = [at for at, row in enumerate(rows) if is_chosen(share, seed, "decoder", row.id)]
    for fault in faults:
        if (other := trained_by(fault, source)) is not model:
            for at, found in zip(hit, source.scored(other, [rows[i] for i in hit]), strict=True):
                scored[at] = found
    of_rows = [fault for fault in faults if isinstance(fault, RowFault)]
    pairs = list(zip(rows, before, strict=True))
    routes = [routes for _, routes in scored if routes is not None]
    is_known = all(row.id in source.rewards for row in before)
    has_dialogues = bool(source.messages)
    return Rows.of(
        rows,
        trainer_logprobs=np.concatenate([values for values, _ in scored]),
        trainer_routed_experts=np.concatenate(routes) if len(routes) == len(rows) else None,
        prompt_lengths=np.array([_prompt_length(of_rows, *pair) for pair in pairs], np.int64),
        engine_ids=tuple(
            tuple(row.token_ids[begin:end] for begin, end in turns(row)) for row in before
        ),
        engine_prompt_ids=tuple(
            tuple(row.token_ids[:begin] for begin, _ in turns(row)) for row in before
        ),
        messages=tuple(_dialogue(source, of_rows, *p) for p in pairs) if has_dialogues else None,
        rewards=np.array([source.rewards[row.id] for row in before]) if is_known else None,
        steps=np.zeros(len(rows), np.int64),
        trainer_version=np.array([int(row.columns["policy_version"].max()) for row in before])
        + sum(f.lag for f in faults if isinstance(f, StaleWeights) and f.is_honest),
    )


def _redrawn(row: Sample, scored: Scored) -> Sample:
    """`row` with these log-probs and routes of the sampler."""
    new = replace(row, columns={**row.columns, "rollout_logprobs": scored[0]})
    if scored[1] is not None and "routed_experts" in row.columns:
        new.set("routed_experts", scored[1])
    return new


def _prompt_length(faults: Sequence[RowFault], row: Sample, before: Sample) -> int:
    reported = [n for fault in faults if (n := prompt_length(fault, row, before)) is not None]
    first = turns(row)[0][0] if turns(row) else len(row)
    return reported[-1] if reported else first


def _dialogue(
    source: Source, faults: Sequence[RowFault], row: Sample, before: Sample
) -> tuple[Message, ...] | None:
    if (messages := source.messages.get(before.id)) is None:
        return None
    for fault in faults:
        if row is not before and fault.is_hit(before):
            messages = said(fault, before, messages, source.renderer)
    return tuple(messages)
