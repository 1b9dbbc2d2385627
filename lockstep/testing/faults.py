"""Faults to inject into a run on purpose, by one override: `fault=kernel_noise fault.std=0.01`.

A fault of the engine makes the sampler differ from the trainer, and leaves the trainer as it is; a
fault of the trainer does the reverse. A fault of the rows leaves both sides as they are, and gets
wrong what is written down between them. Each way the run goes on, and what it measures is what a
user with that defect would see.

No torch here: the settings are read by the command line. What computes is in `faulty_engines.py`
and `faulty_decoders.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from lockstep.agent.tasks import derive_seed
from lockstep.config import tag
from lockstep.engines.config import EmbeddedConfig, EngineConfig
from lockstep.errors import ConfigError
from lockstep.models.config import ModelConfig
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import UNKNOWN_EXPERT, Float32Array, Int64Array, Ragged, Sample, frozen_ids

if TYPE_CHECKING:
    from lockstep.engines.base import Engine, EngineContext
    from lockstep.models.decoder import Decoder

LogProbs = Callable[[Sequence[Sample]], Sequence[Float32Array]]
"""[T] float32 per row: the trainer's log-probs of its trained tokens, NaN elsewhere."""

FILLER = 0.0
"""What a token is given whose own log-prob is lost: what an array holds that was made of zeros."""


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """Base of every fault. A subclass is a choice of the setting `fault`, by its tag; it overrides
    one of the hooks, `make_engine`, `make_trained` or `change_rows`.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class DoubledRows(FaultConfig):
    ...     def change_rows(self, rows, tokenizer, log_probs):
    ...         return [*rows, *rows]
    >>> tag(DoubledRows)
    'doubled_rows'
    """

    is_verified: ClassVar[bool] = True
    """Whether each sync of weights is verified as ever. False for a fault that would be refused
    before it could do anything."""

    def check(self, *, model: ModelConfig, name: str, engine: EngineConfig) -> None:
        """Raises ConfigError if this fault cannot be injected into such a run.

        Called before a model is loaded. name: the setting `model`.
        """

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        """The engine that samples in the place of what `config` describes."""
        from lockstep.engines.registry import open_engine

        return open_engine(config, context)

    def make_trained(self, model: Decoder) -> Decoder:
        """The decoder that the trainer runs in the place of `model`, with the same parameters."""
        return model

    def change_rows(
        self, rows: Sequence[Sample], tokenizer: Tokenizer, log_probs: LogProbs
    ) -> list[Sample]:
        """The rows that are trained in the place of `rows`, which are left as they are.

        A row that is not hit is handed on as the same object.
        """
        return list(rows)

    def describe(self) -> str:
        """One line for the plan of a run."""
        settings = "".join(f" {f.name}={getattr(self, f.name)}" for f in fields(self))
        return f"{tag(type(self))}{settings}, injected: this run is broken on purpose"


# -- the sampler differs from the trainer ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GrowingNoise:
    """How large the noise of a computation is. Its standard deviation is

        std + growth * max(version - growth_from, 0)

    and depends on the policy version alone, so that a run that is resumed goes on with it. The
    draws are a hash of `seed`, the version and what is computed: a run repeats bit for bit, while
    another batch, or the same tokens scored again, come with other noise.
    """

    std: float
    """Standard deviation, in logits."""
    growth: float = 0.0
    """Added to `std` with each policy version."""
    growth_from: int = 0
    """The policy version from which on it grows: that of the checkpoint, for a run forked late."""
    seed: int = 0
    """Of the noise."""

    def __post_init__(self) -> None:
        for name in ("std", "growth"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value} must be a finite number of at least 0.")
        if self.growth_from < 0:
            raise ConfigError(f"growth_from={self.growth_from} must be at least 0.")

    def std_at(self, version: int) -> float:
        """The standard deviation under this policy version."""
        return self.std + self.growth * max(version - self.growth_from, 0)


@dataclass(frozen=True, kw_only=True)
class KernelNoise(GrowingNoise, FaultConfig):
    """Gaussian noise on the sampler's logits: another engine's kernels, which round otherwise.

    It is added before temperature, top-k and top-p. The log-prob that is recorded is that of the
    noisy distribution which was drawn from; `score` is noisy too, by draws of its own.
    """

    bias: float = 0.0
    """Standard deviation of a second part, one offset per token id that never changes: a systematic
    error, which averaging does not remove. (One offset for all ids would leave softmax as it is.)
    """

    def __post_init__(self) -> None:
        GrowingNoise.__post_init__(self)
        if not 0 <= self.bias < math.inf:
            raise ConfigError(f"bias={self.bias} must be a finite number of at least 0.")

    def check(self, *, model: ModelConfig, name: str, engine: EngineConfig) -> None:
        _check_shared(self, engine)

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.testing.faulty_engines import kernel_noise_engine

        return kernel_noise_engine(self, _check_shared(self, config), context)


@dataclass(frozen=True, kw_only=True)
class RouterNoise(GrowingNoise, FaultConfig):
    """Gaussian noise on the logits of every router, in the sampler only: near a tie a token goes to
    other experts than in the trainer. Keys and values that are cached have it too."""

    def check(self, *, model: ModelConfig, name: str, engine: EngineConfig) -> None:
        _check_shared(self, engine)
        _check_routed(self, model, name)

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.testing.faulty_engines import router_noise_engine

        return router_noise_engine(self, _check_shared(self, config), context)


@dataclass(frozen=True, kw_only=True)
class SamplingNoise(FaultConfig):
    """The noise of a mixture of experts at work, on both sides at once: what a large one measures
    as the mean difference of the two log-probs, their variance in the sampler, and in the trainer.
    """

    router_std: float = 0.0
    """Standard deviation on the sampler's router logits, as `router_noise`: rare, large, new with
    every pass."""
    head_std: float = 0.0
    """The same on its logits, as `kernel_noise`: small, everywhere, new with every pass."""
    bias: float = 0.0
    """As of `kernel_noise`: what stays the same in every pass, and no average removes."""
    trainer_std: float = 0.0
    """Standard deviation on what the trainer's experts give, summed by atomic adds in an order of
    their own; in units of that output. Backward goes through the same noise, but for blocks that
    activation checkpointing computes again, which draw other noise."""
    lost_routes: float = 0.0
    """Share of the later turns that find their prefix gone from the engine's cache: the routes of
    all positions before are lost to `trainer.routing_replay=rollout`."""
    seed: int = 0
    """Of all of it."""

    def __post_init__(self) -> None:
        for name in ("router_std", "head_std", "bias", "trainer_std"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value} must be a finite number of at least 0.")
        if not 0 <= self.lost_routes <= 1:
            raise ConfigError(f"lost_routes={self.lost_routes} is a share; expected 0 to 1.")

    def check(self, *, model: ModelConfig, name: str, engine: EngineConfig) -> None:
        _check_shared(self, engine)
        _check_routed(self, model, name)

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.testing.faulty_engines import sampling_noise_engine

        return sampling_noise_engine(self, _check_shared(self, config), context)

    def make_trained(self, model: Decoder) -> Decoder:
        from lockstep.testing.faulty_decoders import Noise, with_noisy_experts

        if self.trainer_std == 0:
            return model
        return with_noisy_experts(model, Noise(GrowingNoise(std=self.trainer_std, seed=self.seed)))

    def change_rows(
        self, rows: Sequence[Sample], tokenizer: Tokenizer, log_probs: LogProbs
    ) -> list[Sample]:
        return [without_early_routes(row, self.lost_routes, seed=self.seed) for row in rows]


@dataclass(frozen=True, kw_only=True)
class StaleWeights(FaultConfig):
    """The sampler runs the weights of `lag` policy versions ago; in the first ones, the oldest that
    it has seen. A run that is resumed has seen none: the lag builds up from its checkpoint again.
    """

    is_verified: ClassVar[bool] = False

    lag: int = 1
    """Policy versions by which the sampler is behind."""
    is_honest: bool = True
    """Tokens carry the version that sampled them, so that their age shows. False: they carry the
    newest one, as if the sync had worked."""

    def __post_init__(self) -> None:
        if self.lag < 0:
            raise ConfigError(f"lag={self.lag} must be at least 0.")

    def check(self, *, model: ModelConfig, name: str, engine: EngineConfig) -> None:
        _check_embedded(self, engine)

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.testing.faulty_engines import stale_engine

        return stale_engine(self, _check_embedded(self, config), context)


def _check_embedded(fault: FaultConfig, engine: EngineConfig) -> EmbeddedConfig:
    if not isinstance(engine, EmbeddedConfig):
        raise ConfigError(
            f"fault={tag(type(fault))} changes the decoder that the embedded engine runs; "
            f"engine={tag(type(engine))} runs one of its own. Choose engine=embedded, or a fault "
            "of the rows."
        )
    if engine.replicas:
        raise ConfigError(
            f"fault={tag(type(fault))} changes the engine inside the trainer's process; "
            f"engine.replicas={engine.replicas} samples in others. Leave engine.replicas at 0."
        )
    return engine


def _check_shared(fault: FaultConfig, engine: EngineConfig) -> EmbeddedConfig:
    embedded = _check_embedded(fault, engine)
    if embedded.dtype != "same":
        raise ConfigError(
            f"fault={tag(type(fault))} is on the trainer's own decoder; engine.dtype="
            f"{embedded.dtype} samples from a copy. Leave engine.dtype out."
        )
    return embedded


def _check_routed(fault: FaultConfig, model: ModelConfig, name: str) -> None:
    if not model.is_moe:
        raise ConfigError(
            f"fault={tag(type(fault))} needs a model with a router; model={name} is dense "
            f"({model.architecture}). Choose a mixture of experts, or fault=kernel_noise."
        )


# -- the engine fails, as servers and networks do --------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _EngineFault(FaultConfig):
    """Base of what one replica does to a run. The engine itself may be of any kind."""

    at: int = 1
    """The policy version from which on it happens."""
    replica: int = 0
    """Which replica of a pool it happens to; 0 of an engine alone."""

    def __post_init__(self) -> None:
        for name in ("at", "replica"):
            if getattr(self, name) < 0:
                raise ConfigError(f"fault.{name}={getattr(self, name)} must be at least 0.")

    def check(self, *, model: ModelConfig, name: str, engine: EngineConfig) -> None:
        num = len(engine.replica_configs())
        if self.replica >= num:
            raise ConfigError(
                f"fault.replica={self.replica}: the engine has {num} of them, counted from 0."
            )

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        from lockstep.engines.registry import open_engine

        def wrap(engine: Engine, replica: int) -> Engine:
            return self.broken(engine) if replica == self.replica else engine

        return open_engine(config, context, wrap=wrap)

    def broken(self, engine: Engine) -> Engine:
        """What stands in the place of the engine."""
        raise NotImplementedError(f"{type(self).__name__} breaks no engine")


@dataclass(frozen=True, kw_only=True)
class EngineKilled(_EngineFault):
    """The engine is gone in the middle of a reply: the connection breaks, and no other is taken."""

    returns_after: float = 0.0
    """Seconds until it is back, with the weights that it had; 0 is never."""

    def broken(self, engine: Engine) -> Engine:
        from lockstep.testing.broken_engines import DeadEngine

        return DeadEngine(engine, at=self.at, returns_after=self.returns_after)


@dataclass(frozen=True, kw_only=True)
class EngineFrozen(_EngineFault):
    """The engine stands still in the middle of a reply: it takes every request and answers none."""

    returns_after: float = 0.0
    """Seconds until it goes on; 0 is never."""

    def broken(self, engine: Engine) -> Engine:
        from lockstep.testing.broken_engines import DeadEngine

        return DeadEngine(engine, at=self.at, is_frozen=True, returns_after=self.returns_after)


@dataclass(frozen=True, kw_only=True)
class WrongWeights(_EngineFault):
    """The engine says that it has taken the new weights, and goes on with those that it had."""

    def broken(self, engine: Engine) -> Engine:
        from lockstep.testing.broken_engines import UnloadedEngine

        return UnloadedEngine(engine, at=self.at)


@dataclass(frozen=True, kw_only=True)
class _Share(_EngineFault):
    """Base of what happens to a share of something, chosen by names and not by chance."""

    share: float = 0.5
    """How much of it is hit."""
    seed: int = 0
    """Of the choice."""

    def __post_init__(self) -> None:
        _EngineFault.__post_init__(self)
        if not 0 < self.share <= 1:
            raise ConfigError(f"share={self.share} must lie in (0, 1].")


@dataclass(frozen=True, kw_only=True)
class HalfLoadedWeights(_Share):
    """A share of the tensors keeps the values of the load before, as where a loader skips what it
    does not know."""

    def broken(self, engine: Engine) -> Engine:
        from lockstep.testing.broken_engines import UnloadedEngine

        return UnloadedEngine(engine, at=self.at, share=self.share, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class DuplicatedReplies(_Share):
    """Every piece of a share of the replies comes twice."""

    def broken(self, engine: Engine) -> Engine:
        from lockstep.testing.broken_engines import RepeatingEngine

        return RepeatingEngine(engine, at=self.at, share=self.share, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class LostReplies(_Share):
    """A share of the replies is sampled and never sent."""

    def broken(self, engine: Engine) -> Engine:
        from lockstep.testing.broken_engines import ForgetfulEngine

        return ForgetfulEngine(engine, at=self.at, share=self.share, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class MisorderedReplies(_Share):
    """A share of the replies comes in pieces whose order is wrong."""

    def broken(self, engine: Engine) -> Engine:
        from lockstep.testing.broken_engines import MisorderingEngine

        return MisorderingEngine(engine, at=self.at, share=self.share, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class SlowReplies(_EngineFault):
    """The engine waits before every piece of a reply."""

    seconds: float = 0.1
    """How long."""

    def __post_init__(self) -> None:
        _EngineFault.__post_init__(self)
        if not 0 < self.seconds < math.inf:
            raise ConfigError(f"seconds={self.seconds} must be a finite number above 0.")

    def broken(self, engine: Engine) -> Engine:
        from lockstep.testing.broken_engines import SlowEngine

        return SlowEngine(engine, at=self.at, seconds=self.seconds)


@dataclass(frozen=True, kw_only=True)
class FalseVersions(_Share):
    """A share of the replies carries a version that the engine was never given."""

    def broken(self, engine: Engine) -> Engine:
        from lockstep.testing.broken_engines import LyingEngine

        return LyingEngine(engine, at=self.at, share=self.share, seed=self.seed)


# -- the trainer differs from the sampler ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _SinkFault(FaultConfig):
    """Base of what a training kernel gets wrong about attention sinks."""

    is_verified: ClassVar[bool] = False

    def check(self, *, model: ModelConfig, name: str, engine: EngineConfig) -> None:
        if not model.has_sinks:
            raise ConfigError(
                f"fault={tag(type(self))} needs a model with attention sinks; model={name} "
                f"({model.architecture}) has none. Choose a gpt-oss."
            )


@dataclass(frozen=True, kw_only=True)
class IgnoredSinks(_SinkFault):
    """The trainer's attention has no sinks: a training kernel that drops the argument, as flash
    attention 2 does under gpt-oss. All log-probs of the trainer are of another model."""

    def make_trained(self, model: Decoder) -> Decoder:
        from lockstep.models.variants import without_sinks

        return without_sinks(model)


@dataclass(frozen=True, kw_only=True)
class DetachedSinks(_SinkFault):
    """The trainer's sinks have no gradient: a kernel whose forward knows them and whose backward
    does not. Log-probs are right, and the sinks stay as they were loaded."""

    def make_trained(self, model: Decoder) -> Decoder:
        from lockstep.testing.faulty_decoders import with_detached_sinks

        return with_detached_sinks(model)


# -- the rows are not what was sampled -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RowShare:
    """Which rows a fault hits. Decided by `seed` and the row's id, which names step, task and
    sample: the same rows in a run that is resumed."""

    share: float = 1.0
    """Share of the rows that are hit."""
    seed: int = 0
    """Of the choice."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share={self.share} must lie in (0, 1].")

    def is_hit(self, row: Sample) -> bool:
        return derive_seed(self.seed, row.id) < self.share * 2.0**63


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
        self, rows: Sequence[Sample], tokenizer: Tokenizer, log_probs: LogProbs
    ) -> list[Sample]:
        changed = [retokenized(r, tokenizer) if self.is_hit(r) else r for r in rows]
        if self.logprobs == "recomputed":
            hit = [new for new, old in zip(changed, rows, strict=True) if new is not old]
            for row, values in zip(hit, log_probs(hit) if hit else (), strict=True):
                row.set("rollout_logprobs", values)
        return changed


@dataclass(frozen=True, kw_only=True)
class ShiftedLogprobs(RowShare, FaultConfig):
    """Every trained token has the log-prob of the one `offset` places after it among the trained
    tokens of its row; the lost end is 0.0. An off-by-one in the shift to "predicts the next"."""

    offset: int = 1
    """Places. Negative: of the one before it, and the beginning is lost."""

    def __post_init__(self) -> None:
        RowShare.__post_init__(self)
        if self.offset == 0:
            raise ConfigError("offset=0 shifts nothing; expected another whole number.")

    def change_rows(
        self, rows: Sequence[Sample], tokenizer: Tokenizer, log_probs: LogProbs
    ) -> list[Sample]:
        return [shifted(row, self.offset) if self.is_hit(row) else row for row in rows]


@dataclass(frozen=True, kw_only=True)
class DroppedFinalTokens(RowShare, FaultConfig):
    """The last sampled tokens of a row's last turn are missing from it: a loop that takes the ids
    from the next prompt, and after the last turn there is none. At least one token of the turn
    stays. What is left has the right log-probs: only counts tell (tokens/trained is below
    tokens/sampled), and the policy never learns how to end."""

    count: int = 1
    """Tokens that are lost at most."""

    def __post_init__(self) -> None:
        RowShare.__post_init__(self)
        if self.count < 1:
            raise ConfigError(f"count={self.count} must be at least 1.")

    def change_rows(
        self, rows: Sequence[Sample], tokenizer: Tokenizer, log_probs: LogProbs
    ) -> list[Sample]:
        return [without_final(row, self.count) if self.is_hit(row) else row for row in rows]


# -- what is done to one row -----------------------------------------------------------------------


def retokenized(row: Sample, tokenizer: Tokenizer) -> Sample:
    """`row` with the sampled text spelt as the tokenizer would, and its log-probs by position.

    A run of text ends at a control token, and where the turn or the mask changes.
    """
    ids, turn, mask = row.token_ids, row.columns["turn"], row.loss_mask
    is_text = (turn >= 0) & ~np.isin(ids, list(tokenizer.control_ids))
    ends_run = np.ones(len(ids), np.bool_)
    ends_run[:-1] = ~is_text[:-1] | ~is_text[1:] | (turn[:-1] != turn[1:]) | (mask[:-1] != mask[1:])
    new_ids: list[int] = []
    source: list[int] = []
    """The token of `row` that each new one takes its other columns from."""
    begin = 0
    for end in np.flatnonzero(ends_run).tolist():
        piece = ids[begin : end + 1].tolist()
        if is_text[begin]:
            piece = tokenizer.encode(tokenizer.decode(piece))
        new_ids += piece
        source += [min(begin + i, end) for i in range(len(piece))]
        begin = end + 1
    out = _taken(row, np.array(source, np.int64), new_ids)
    was_sampled, is_sampled = turn >= 0, out.columns["turn"] >= 0
    for name in (name for name in row.columns if name.endswith("logprobs")):
        values, column = row.columns[name][was_sampled], out.columns[name]
        laid = np.full(is_sampled.sum(), FILLER, np.float32)
        count = min(len(values), len(laid))
        laid[:count] = values[:count]
        column[is_sampled] = laid
    return out


def shifted(row: Sample, offset: int) -> Sample:
    """`row` with the rollout's log-probs of its trained tokens moved by `offset` places."""
    values = row.columns["rollout_logprobs"][row.loss_mask]
    at = np.arange(len(values)) + offset
    is_inside = (at >= 0) & (at < len(values))
    column = row.columns["rollout_logprobs"].copy()
    column[row.loss_mask] = np.where(is_inside, values[at * is_inside], np.float32(FILLER))
    out = _taken(row, np.arange(len(row)), row.token_ids)
    out.set("rollout_logprobs", column)
    return out


def without_final(row: Sample, count: int) -> Sample:
    """`row` without the last `count` sampled tokens of its last turn, but for the turn's first."""
    turn = row.columns["turn"]
    lost = np.flatnonzero((turn >= 0) & (turn == turn.max()))[1:][-count:]
    kept = np.delete(np.arange(len(row)), lost)
    return _taken(row, kept, row.token_ids[kept])


def without_early_routes(row: Sample, share: float, *, seed: int) -> Sample:
    """`row` without the routes of what stands before the last turn that found its prefix gone;
    `row` itself if no turn did, or it has no routes."""
    routes = row.columns.get("routed_experts")
    turn = row.columns["turn"]
    hit = [
        t
        for t in range(1, int(turn.max(initial=-1)) + 1)
        if derive_seed(seed, "lost routes", row.id, t) < share * 2.0**63
    ]
    if routes is None or not hit:
        return row
    begin = int(np.flatnonzero(turn == hit[-1] - 1).max(initial=-1)) + 1
    known = routes.copy()
    known[:begin] = UNKNOWN_EXPERT
    out = _taken(row, np.arange(len(row)), row.token_ids)
    out.set("routed_experts", known)
    return out


def token_match(before: Sequence[Sample], after: Sequence[Sample]) -> float:
    """Share of the trained tokens of `before` that stand at the same place in `after`, trained and
    with the same id. The k-th row of one is compared with the k-th of the other; 1 for no token."""
    num_equal = num_trained = 0
    for old, new in zip(before, after, strict=True):
        size = min(len(old), len(new))
        is_equal = (old.token_ids[:size] == new.token_ids[:size]) & new.loss_mask[:size]
        num_equal += int((is_equal & old.loss_mask[:size]).sum())
        num_trained += old.num_trained
    return num_equal / num_trained if num_trained else 1.0


def _taken(
    row: Sample, source: Int64Array, token_ids: Sequence[int] | npt.NDArray[np.int32]
) -> Sample:
    """A row of `token_ids` that has everything else from the tokens `source` of `row`.

    What an id was drawn from is known of that id alone: of another one it is left empty, which
    means the whole vocabulary.
    """
    ids = frozen_ids(token_ids, where=f"sample {row.id}")
    is_same = ids == row.token_ids[source]
    ragged = {
        name: Ragged.of([of[i] if same else of[i][:0] for i, same in enumerate(is_same)])
        for name, of in ((name, column.take(source)) for name, column in row.ragged.items())
    }
    return Sample(
        id=row.id,
        token_ids=ids,
        loss_mask=row.loss_mask[source],
        columns={name: column[source] for name, column in row.columns.items()},
        ragged=ragged,
        group=row.group,
    )
