"""Faults of the trainer's decoder, and of when it scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lockstep.config import tag
from lockstep.errors import ConfigError
from lockstep.models.config import ModelConfig
from lockstep.renderers.base import Renderer
from lockstep.run.hooks import LogProbs
from lockstep.run_config import Config
from lockstep.testing.faults.base import FaultConfig, Learn
from lockstep.types import Sample

if TYPE_CHECKING:
    from lockstep.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class _SinkFault(FaultConfig):
    """Base of training kernels that are wrong about attention sinks."""

    verifies_sync: ClassVar[bool] = False

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        if not model.has_sinks:
            raise ConfigError(
                f"fault {tag(type(self))} needs a model with attention sinks; model={config.model} "
                f"({model.architecture}) has none. Choose a gpt-oss."
            )


@dataclass(frozen=True, kw_only=True)
class IgnoredSinks(_SinkFault):
    """The trainer's attention has no sinks: a training kernel that drops the argument, as flash
    attention 2 does for gpt-oss. All log-probs of the trainer are of another model."""

    def make_trained(self, model: Decoder) -> Decoder:
        from lockstep.models.variants import without_sinks

        return without_sinks(model)


@dataclass(frozen=True, kw_only=True)
class DetachedSinks(_SinkFault):
    """The trainer's sinks have no gradient: a kernel with sinks in its forward only. Log-probs are
    right, and the sinks stay as they were loaded."""

    def make_trained(self, model: Decoder) -> Decoder:
        from lockstep.testing.faulty_decoders import with_detached_sinks

        return with_detached_sinks(model)


@dataclass(frozen=True, kw_only=True)
class IgnoredWindow(FaultConfig):
    """The trainer's attention ignores sliding windows: a kernel that is called without the window.
    Rows up to the window's length are right."""

    verifies_sync: ClassVar[bool] = False

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        if not any(model.windows):
            raise ConfigError(
                f"fault ignored_window needs a model with a sliding window; model={config.model} "
                f"({model.architecture}) has none. Choose a gpt-oss."
            )

    def make_trained(self, model: Decoder) -> Decoder:
        from lockstep.models.variants import without_windows

        return without_windows(model)


@dataclass(frozen=True, kw_only=True)
class ActiveDropout(FaultConfig):
    """The trainer's attention has dropout, drawn again in each forward: a model that is in train
    mode while its log-probs are computed."""

    verifies_sync: ClassVar[bool] = False

    prob: float = 0.1
    """Share that is dropped."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        if not 0 < self.prob < 1:
            raise ConfigError(f"prob={self.prob} must lie in (0, 1).")

    def make_trained(self, model: Decoder) -> Decoder:
        from lockstep.models.variants import with_dropout

        return with_dropout(model, self.prob, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class ScoredAfterUpdate(FaultConfig):
    """The recorded log-probs of the trainer are those after the update on the row: a program that
    logs the training forward of a later epoch, or computes them when it writes. A run's metrics are
    those before the update; its recorded trajectories are not."""

    least: ClassVar = {"updates": 1}

    updates: int = 1
    """Updates on the rows of a dump. In a run they are trainer.updates_per_batch."""

    def after_update(self, rows: Sequence[Sample], log_probs: LogProbs) -> None:
        for row, values in zip(rows, log_probs(rows), strict=True):
            for name in ("logprobs", "old_logprobs"):
                if name in row.columns:
                    row.set(name, values)

    def make_other(self, model: Decoder, learn: Learn) -> Decoder:
        return learn(self.updates, is_by_these_rows=True)
