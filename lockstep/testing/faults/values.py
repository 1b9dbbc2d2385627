"""Faults of the log-probs that are written down: other ones, or not log-probs at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
from lockstep.types import Float32Array, Sample


@dataclass(frozen=True, kw_only=True)
class _ValueFault(RowShare, FaultConfig):
    """Base of what is done to the sampler's log-probs of one row after another."""

    def change_rows(
        self, rows: Sequence[Sample], renderer: Renderer, log_probs: LogProbs
    ) -> list[Sample]:
        return [self.changed(row) if self.is_hit(row) else row for row in rows]

    def changed(self, row: Sample) -> Sample:
        """`row` with other log-probs of its trained tokens."""
        values = row.columns["rollout_logprobs"].copy()
        values[row.loss_mask] = self.written(values[row.loss_mask], row)
        return edits.with_rollout(row, values)

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        """What is written down for `logprobs`, [trained tokens]."""
        raise NotImplementedError(f"{type(self).__name__} changes no log-prob")

    def refuse_in_runs(self, reason: str) -> None:
        raise ConfigError(
            f"fault {tag(type(self))} cannot be in a run: {reason}. It is for rows and dumps: "
            "lockstep.testing.dumps.faulty_rows."
        )


@dataclass(frozen=True, kw_only=True)
class ShiftedLogprobs(_ValueFault):
    """Every trained token has the log-prob of the one `offset` places after it among the trained
    tokens of its row; the lost end is 0.0. An off-by-one in the shift to "predicts the next"."""

    offset: int = 1
    """Places. Negative: of the one before it, and the beginning is lost."""

    def __post_init__(self) -> None:
        RowShare.__post_init__(self)
        if self.offset == 0:
            raise ConfigError("offset=0 shifts nothing; expected another whole number.")

    def changed(self, row: Sample) -> Sample:
        return edits.shifted(row, self.offset)


@dataclass(frozen=True, kw_only=True)
class FillerLogprobs(_ValueFault):
    """Trained tokens have the log-prob 0.0: an array made of zeros where the engine gave none."""

    tokens: Literal["all", "last"] = "all"
    """all: of every turn, as for a reply that came without log-probs. last: of each turn's last
    token, as for a stop token that the program appends itself."""

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        if self.tokens == "all":
            return np.full_like(logprobs, FILLER)
        turn = row.columns["turn"][row.loss_mask]
        is_last = np.ones(len(turn), np.bool_)
        is_last[:-1] = turn[1:] != turn[:-1]
        return np.where(is_last, np.float32(FILLER), logprobs)


@dataclass(frozen=True, kw_only=True)
class ClampedLogprobs(_ValueFault):
    """Log-probs below a bound are given the bound, "for stability", where they are collected."""

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
    """Log-probs are rounded: by a JSON writer with few decimals, or a transfer in a narrow type."""

    to: Literal["decimals", "bfloat16", "float16"] = "decimals"
    """What they are rounded to."""
    decimals: int = 2
    """Of to=decimals."""

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
        # To nearest, ties to even: half of what is cut off, and the last bit that stays.
        rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


@dataclass(frozen=True, kw_only=True)
class NonfiniteLogprobs(_ValueFault):
    """Some trained tokens have no finite log-prob: an op that overflowed, or a token outside of
    what top-p left. For dumps: in a run an episode with such a token fails where it is sampled."""

    value: Literal["nan", "-inf"] = "nan"
    """What they have."""
    token_share: float = 0.02
    """Share of the trained tokens."""

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
    """Probabilities stand where log-probs should. For dumps: in a run they are refused where they
    are sampled, being above 0."""

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        self.refuse_in_runs("a log-prob above 0 is refused where it is sampled")

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        return np.exp(logprobs)
