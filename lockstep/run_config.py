"""Everything that a training run is, as one tree of settings. No torch.

Facts that several rooms share (model, seed, longest row, threads) stand here once and are handed
down; the rest belongs to the room that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lockstep.agent.config import AgentConfig
from lockstep.agent.task_config import TaskConfig
from lockstep.engines.config import EmbeddedConfig
from lockstep.errors import ConfigError
from lockstep.objectives.config import GRPO, BatchBaseline, MeanBaseline, PPOClip, Reinforce
from lockstep.renderers.config import ChatMLConfig, HarmonyConfig
from lockstep.store.config import RecordConfig
from lockstep.train.config import CheckpointConfig, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How the policy is tested on tasks that it is not trained on."""

    every: int = 0
    """Steps between evaluations; 0 tests before the first step and after the last one only."""
    num_tasks: int = 128
    """Held-out tasks; the same ones each time."""
    num_samples: int = 1
    """Samples per task at the training temperature: the k of mean@k and pass@k."""
    greedy: bool = True
    """Also play every task once at temperature 0."""
    success_reward: float = 0.999
    """A sample with at least this reward has passed (pass@k)."""
    at_start: bool = True
    """Test before the first step: what the run began from."""

    def __post_init__(self) -> None:
        for name in ("num_tasks", "num_samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.every < 0:
            raise ConfigError(f"every={self.every} must be at least 0 (0 is the ends only).")


@dataclass(frozen=True, kw_only=True)
class MismatchConfig:
    """When the gap between sampler and trainer is looked at, and what it does."""

    after_every: int = 10
    """Steps between measurements after the update (mismatch_after/...); 0 is never. The measurement
    before the update is made on every step and cannot be switched off."""
    warning: float = 0.01
    """max(|k1|, k2, k3) above which a step is marked."""
    critical: float = 0.1
    """max(|k1|, k2, k3) above which a step is marked as critical."""
    stop_on_critical: bool = False
    """End the run, with a checkpoint, at the first critical step."""

    def __post_init__(self) -> None:
        if not 0 < self.warning <= self.critical:
            raise ConfigError(
                f"warning={self.warning} must be positive and at most critical={self.critical}."
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run."""

    name: str = "run"
    """Names the run directory: runs/NAME-TIMESTAMP."""
    model: str = "tiny-gpt-oss"
    """A shipped model, a checkpoint directory in Hugging Face's form, or ORGANISATION/NAME."""
    seed: int = 0
    """Of tasks, sampling and everything else that is drawn."""
    steps: int = 100
    """Training steps."""
    max_tokens: int = 512
    """Longest row: prompt, sampled and observed tokens of one episode."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in, on both sides. The optimizer keeps float32 masters."""
    threads: int = 1
    """CPU threads of torch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes a GPU where there is one."""
    groups_per_step: int = 8
    """Tasks per step."""
    group_size: int = 8
    """Episodes per task: what a group baseline compares."""
    task: TaskConfig
    """What the agent is trained on."""
    renderer: HarmonyConfig | ChatMLConfig | None = None
    """How dialogues become tokens; none takes the one that the model's architecture was made for."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Budgets of an episode and how its tokens are drawn."""
    engine: EmbeddedConfig = field(default_factory=EmbeddedConfig)
    """What samples."""
    advantage: GRPO | MeanBaseline | BatchBaseline = field(default_factory=GRPO)
    """How rewards become advantages."""
    objective: PPOClip | Reinforce = field(default_factory=PPOClip)
    """The policy loss."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Optimizer, schedule and micro-batches."""
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    """Alarms on the gap between sampler and trainer."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Tests on held-out tasks."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is saved, and how often."""
    record: RecordConfig = field(default_factory=RecordConfig)
    """What of the trajectories is kept, and extra loggers."""

    def __post_init__(self) -> None:
        for name in ("steps", "max_tokens", "threads", "groups_per_step", "group_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")
        if not self.name or "/" in self.name:
            raise ConfigError(f"name={self.name!r} must be usable as part of a directory name.")
        if self.group_size == 1 and self.advantage.needs_group:
            raise ConfigError(
                "group_size=1 with a group baseline: an episode compared with itself has the "
                "advantage 0 and nothing is learned. Choose group_size=2 or more, or "
                "advantage=batch_baseline."
            )
        if self.trainer.max_tokens_per_microbatch < self.max_tokens:
            raise ConfigError(
                f"trainer.max_tokens_per_microbatch={self.trainer.max_tokens_per_microbatch} is "
                f"smaller than max_tokens={self.max_tokens}: the longest row would fit in no "
                "micro-batch, and a row is never split. Raise the first or lower the second."
            )
        if self.agent.max_turn_tokens >= self.max_tokens:
            raise ConfigError(
                f"agent.max_turn_tokens={self.agent.max_turn_tokens} leaves no room for a prompt "
                f"within max_tokens={self.max_tokens}."
            )
