"""Faults of an engine as a server: it dies, stands still, repeats itself, or lies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.engines.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.models.config import ModelConfig
from lockstep.renderers.base import Renderer
from lockstep.run_config import Config
from lockstep.testing.faults.base import FaultConfig

if TYPE_CHECKING:
    from lockstep.engines.base import Engine, EngineContext


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
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 0.")

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        num = len(config.engine.replica_configs())
        if self.replica >= num:
            raise ConfigError(
                f"replica={self.replica}: the engine has {num} of them, counted from 0."
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
