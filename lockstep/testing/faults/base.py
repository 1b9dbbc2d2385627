"""What every fault is, and what it may refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Protocol

from lockstep.agent.tasks import derive_seed
from lockstep.config import tag
from lockstep.engines.config import EmbeddedConfig, EngineConfig
from lockstep.errors import ConfigError
from lockstep.models.config import ModelConfig
from lockstep.renderers.base import Renderer
from lockstep.types import Float32Array, Message, Sample

if TYPE_CHECKING:
    from lockstep.engines.base import Engine, EngineContext
    from lockstep.models.decoder import Decoder

LogProbs = Callable[[Sequence[Sample]], Sequence[Float32Array]]
"""[T] float32 per row: the trainer's log-probs of its trained tokens, NaN elsewhere."""

FILLER = 0.0
"""What a token is given whose own log-prob is lost: what an array holds that was made of zeros."""


class Learn(Protocol):
    """The model of a dump after updates of its own (`testing.dumps`)."""

    def __call__(
        self, num_updates: int, *, is_by_these_rows: bool = False, has_adapter: bool = False
    ) -> Decoder:
        """is_by_these_rows: by the rows of the dump; else by rows that came before them.
        has_adapter: an adapter alone has learnt."""
        ...


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The run that a fault is to be injected into, before a model is loaded."""

    model: ModelConfig
    name: str
    """The setting `model`."""
    engine: EngineConfig
    renderer: Renderer
    has_adapter: bool = False
    """lora is set."""


@dataclass(frozen=True, kw_only=True)
class FaultConfig:
    """Base of every fault. A subclass is a choice of the setting `fault`, by its tag; it overrides
    one of the hooks: `make_engine`, `make_trained`, `change_rows` or `after_update`.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class DoubledRows(FaultConfig):
    ...     def change_rows(self, rows, renderer, log_probs):
    ...         return [*rows, *rows]
    >>> tag(DoubledRows)
    'doubled_rows'
    """

    is_verified: ClassVar[bool] = True
    """Whether each sync of weights is verified as ever. False for a fault that would be refused
    before it could do anything."""

    def check(self, run: Subject) -> None:
        """Raises ConfigError if this fault cannot be injected into such a run."""

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        """The engine that samples in the place of what `config` describes."""
        from lockstep.engines.registry import open_engine

        return open_engine(config, context)

    def make_trained(self, model: Decoder) -> Decoder:
        """The decoder that the trainer runs in the place of `model`, with the same parameters."""
        return model

    def change_rows(
        self, rows: Sequence[Sample], renderer: Renderer, log_probs: LogProbs
    ) -> list[Sample]:
        """The rows that are trained in the place of `rows`, which are left as they are.

        A row that is not hit is handed on as the same object.
        """
        return list(rows)

    def after_update(self, rows: Sequence[Sample], log_probs: LogProbs) -> None:
        """Called with the rows that were just trained on: what is wrong with what is kept of them.
        log_probs: by the weights as they are then."""

    def make_other(self, model: Decoder, learn: Learn) -> Decoder:
        """For a dump: the trainer's decoder, `model` being what drew the tokens."""
        return self.make_trained(model)

    def make_sampler(self, model: Decoder) -> Decoder:
        """For a dump: the sampler's decoder, `model` being what it should run."""
        return model

    @property
    def age(self) -> int:
        """For a dump: versions by which it says that the tokens are older than the trainer."""
        return 0

    def said(
        self, before: Sample, messages: Sequence[Message], renderer: Renderer
    ) -> Sequence[Message]:
        """For a dump: the dialogue of a row that this fault hits. before: the row as it was."""
        return messages

    def prompt_length(self, row: Sample, before: Sample) -> int | None:
        """For a dump: what it says of `row`, which was `before`; None where it is right."""
        return None

    def describe(self) -> str:
        """One line for the plan of a run."""
        settings = "".join(f" {f.name}={getattr(self, f.name)}" for f in fields(self))
        return f"{tag(type(self))}{settings}, injected: this run is broken on purpose"


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


def check_at_least(fault: object, name: str, least: float) -> None:
    """Raises ConfigError where a setting is below `least`."""
    value = getattr(fault, name)
    if not value >= least:
        raise ConfigError(f"{name}={value} must be at least {least}.")


def check_embedded(fault: FaultConfig, engine: EngineConfig) -> EmbeddedConfig:
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


def check_shared(fault: FaultConfig, engine: EngineConfig) -> EmbeddedConfig:
    embedded = check_embedded(fault, engine)
    if embedded.dtype != "same":
        raise ConfigError(
            f"fault={tag(type(fault))} is on the trainer's own decoder; engine.dtype="
            f"{embedded.dtype} samples from a copy. Leave engine.dtype out."
        )
    return embedded


def check_routed(fault: FaultConfig, run: Subject) -> None:
    if not run.model.is_moe:
        raise ConfigError(
            f"fault={tag(type(fault))} needs a model with a router; model={run.name} is dense "
            f"({run.model.architecture}). Choose a mixture of experts, or fault=kernel_noise."
        )
