"""Settings of the rooms where the agent acts: budgets, sampling, tool limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from lockstep.config import ABOVE_0, Checked, Form, Interval, at_least, require
from lockstep.engines.config import EmbeddedConfig, EngineConfig

MIN_TEMPERATURE = 1e-5
"""Smallest temperature above 0: logits divided by less overflow float32."""


@dataclass(frozen=True, kw_only=True)
class _Sampling(Checked):
    """How the tokens of a turn are drawn."""

    max_turn_tokens: Annotated[int, at_least(1)] = 1024
    """Tokens that the model may sample in one turn; the stop token counts."""
    temperature: Annotated[float, at_least(0)] = 1.0
    """Temperature of the draw; 0 is greedy. Log-probs are recorded under the distribution that was
    drawn from, top_k and top_p included."""
    top_p: Annotated[float, Interval("(0, 1]")] = 1.0
    """Draw from the smallest set of tokens with this much probability; 1 is off."""
    top_k: Annotated[int, at_least(0)] = 0
    """Draw from this many most probable tokens; 0 is off."""

    @property
    def is_truncated(self) -> bool:
        """True if tokens are drawn from a part of the vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        is_drawable = not self.temperature or self.temperature >= MIN_TEMPERATURE
        require(self, temperature=(is_drawable, f"0 or at least {MIN_TEMPERATURE:g}"))


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(_Sampling):
    """How the tokens of a reply are drawn, where a request names nothing else."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig(_Sampling):
    """Budgets of one episode, and how its tokens are drawn."""

    max_turns: Annotated[int, at_least(1)] = 8
    """Turns that the model may take in one episode."""
    max_seconds: Annotated[float, ABOVE_0] = 600.0
    """Wall time of one episode. At its end, a reply is aborted and the episode is scored as it is.
    A single call of the environment is cut off after the same time."""
    continue_cut_turns: bool = False
    """Go on after a turn that hit max_turn_tokens: the renderer closes the turn with observed ids.
    Otherwise such a turn is the last one."""
    record_support: bool = True
    """Record the ids that top_p or top_k kept for every token, so that the trainer renormalises
    over the same ids. Costs 4 bytes per id: at most 4 * top_k per token, and with top_p alone the
    number of ids that the model is unsure about. Without the record, or with an engine that cannot
    make it, the gradient is biased by `mismatch/support_bias`."""
    max_in_flight: Annotated[int, at_least(0)] = 256
    """Episodes that run at the same time, over all batches; 0 has no limit."""
    tool_timeout_seconds: Annotated[float, ABOVE_0] = 30.0
    """After this a tool call is given up, and the model reads that it took too long."""
    tool_output_chars: Annotated[int, at_least(64)] = 8192
    """Characters of a tool's output that the model reads; the rest is cut, with a notice."""


@dataclass(frozen=True, kw_only=True)
class SeatConfig(Checked):
    """Base of the kinds of `seats.NAME`: who plays a seat of the task."""


@dataclass(frozen=True, kw_only=True)
class PolicySeat(SeatConfig):
    """The policy in training; its samples are trained."""

    TAG: ClassVar[str] = "policy"


@dataclass(frozen=True, kw_only=True)
class OwnSeat(SeatConfig):
    """A policy of its own, trained in the same run: another LoRA adapter over the run's model, by
    the same settings as the first. Its figures are `policy/SEAT/...`; a checkpoint has its adapter
    in `seats/SEAT/policy`."""

    TAG: ClassVar[str] = "own"


@dataclass(frozen=True, kw_only=True)
class FrozenSeat(SeatConfig):
    """A policy that plays and is never trained. Its episodes are recorded, and give no rows."""

    TAG: ClassVar[str] = "frozen"

    model: Annotated[str, Form(".+", "RUN@STEP, a shipped model or a checkpoint directory")] = ""
    """Its weights, as for `lockstep serve`: RUN@STEP, a shipped model, a checkpoint directory,
    ORGANISATION/NAME, or an adapter in PEFT's form. A step is needed because a run that goes on
    would be another opponent after a resume."""
    engine: EngineConfig = field(default_factory=EmbeddedConfig)
    """Engine that samples for it: this process, or a server that has the model (engine.urls)."""
