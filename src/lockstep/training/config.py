"""Settings of the trainer, its checkpoints, supervised training and teachers. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal

from lockstep.config import ABOVE_0, Checked, Interval, at_least, did_you_mean, require, tag
from lockstep.correction.config import Correction
from lockstep.engines.config import ServedConfig
from lockstep.errors import ConfigError
from lockstep.models.config import FallbackConfig, ModelConfig
from lockstep.objectives.config import KLOrder

Schedule = Literal["constant", "linear", "cosine"]
LongRows = Literal["error", "drop"]
Recompute = Literal["none", "blocks"]
Offload = Literal["none", "optimizer"]
RoutingReplay = Literal["none", "rollout", "recompute"]


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(Checked):
    """Settings that the policy and the critic each have of their own."""

    lr: Annotated[float, ABOVE_0] = 1e-5
    """Peak learning rate, after the warm-up."""
    weight_decay: Annotated[float, at_least(0)] = 0.0
    """Decoupled: each update shrinks the weights by lr * weight_decay. Norms, biases and attention
    sinks are never shrunk."""
    warmup_updates: Annotated[int, at_least(0)] = 0
    """The learning rate rises linearly to its peak during these updates."""
    schedule: Schedule = "constant"
    """Course of the learning rate after the warm-up, until the run's last update."""
    min_lr_share: Annotated[float, Interval("[0, 1]")] = 0.0
    """Ratio of the last learning rate to the peak, with linear and cosine."""
    grad_clip: Annotated[float, at_least(0)] = 1.0
    """Largest global norm of the gradient; a longer one is shortened to it. 0 never clips."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: patterns on their names, such as *.attention.* or *.sinks or
    embedding. They have no gradient and no optimizer state. The critic's blocks begin with body:
    critic.freeze=body.* trains its head alone."""
    updates_per_batch: Annotated[int, at_least(1)] = 1
    """Optimizer steps on each sampled batch: the policy's on shares of the rows, the critic's on
    all rows."""


def frozen_names(
    names: Sequence[str], patterns: Sequence[str], *, trainable: Collection[str], setting: str
) -> set[str]:
    """The names that a pattern of `setting` matches (`*`, `?`, `[ab]`).

    Raises ConfigError for a pattern that matches none and if nothing trainable is left.
    """
    idle = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if idle:
        # One name of each kind: the layers repeat them.
        kinds = {re.sub(r"\.\d+(?=\.|$)", ".*", name): name for name in reversed(names)}
        examples = sorted(kinds.values(), key=list(names).index)
        raise ConfigError(
            f"{setting}={','.join(idle)} matches no parameter. A pattern is compared with the "
            f"whole name; names are {', '.join(examples)}."
        )
    frozen = {name for name in names if any(fnmatchcase(name, p) for p in patterns)}
    if frozen and frozen.issuperset(trainable):
        raise ConfigError(
            f"{setting}={','.join(patterns)} leaves nothing to train of {len(names)} parameters."
        )
    return frozen


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(LearnerConfig):
    """Settings of the update: AdamW, its schedule, and the micro-batches."""

    CONFLICTS: ClassVar = {
        "partial_routes=true with routing_replay!=rollout": "only the sampler's routes can be "
        "incomplete. Set trainer.routing_replay=rollout, or leave it out."
    }

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the gradient's first and second moment."""
    eps: ClassVar[float] = 1e-8
    """AdamW's addition to the denominator."""
    max_skipped_steps: ClassVar[int] = 10
    """Steps in a row whose update is skipped, for a loss or gradient that is not finite, until the
    run saves and ends with exit code 3."""
    max_tokens_per_microbatch: Annotated[int, at_least(2)] = 16384
    """Tokens of one forward and backward. Rows are packed without padding and never split, so the
    longest row must fit. Less memory, same result."""
    recompute: Recompute = "none"
    """blocks: activation checkpointing. The training forward keeps only the input of each block,
    and backward computes the block again: up to a third more time, the same bits."""
    offload: Offload = "none"
    """optimizer: AdamW's moments and the float32 masters are kept and updated in the host's memory;
    gradients go there and weights come back. For a model on a GPU."""
    moments: Literal["float32", "float8"] = "float32"
    """float8: AdamW's moments take 2 bytes a parameter in place of 8, in blocks of 256 numbers with
    one scale. Rounded to 4 significant bits after every update."""
    routing_replay: RoutingReplay = "none"
    """Source of the experts of a mixture in the trainer. none: its own router. rollout: the
    sampler's choice, in every forward (R3). recompute: the choice of the trainer's router before
    the first update of a batch, for all updates (R2); this costs a forward. The router weighs the
    experts by its own logits and is trained either way."""
    partial_routes: bool = False
    """True: with routing_replay=rollout, the router chooses for rows without routes, and
    `routing/replayed_share` counts the others. False: a row without routes is an error."""
    expert_bias_rate: Annotated[float, at_least(0)] = 0.0
    """Change per update of the bias that balances the load of experts (DeepSeek V3, GLM 4.5): up
    for an expert with fewer tokens than the mean of its layer, down for more. `moe/load_max` shows
    the same load. 0 keeps the bias as it is; DeepSeek V3 was trained with 0.001."""
    router_aux_loss_coef: Annotated[float, at_least(0)] = 0.0
    """Coefficient of the routers' load-balancing loss, as transformers computes it, for mixtures
    that choose experts by a softmax. Each micro-batch has its own, which counts by its share in the
    trained tokens. 0 adds none; the default of transformers' models is 0.001."""
    measure_after_every: Annotated[int, at_least(0)] = 10
    """Steps between measurements of the mismatch after the update, on the batch; 0 never
    measures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range = all(0 <= beta < 1 for beta in self.betas)
        require(self, betas=(in_range, "two numbers in [0, 1)"))

    def scores_first(self, correction: Correction, *, is_measured: bool) -> bool:
        """True if the batch's log-probs are needed before its first update: two passes, not one.

        is_measured: the rows have the log-probs that `correction` compares with.
        """
        num_updates = self.updates_per_batch
        return (
            correction.needs_forward(num_updates=num_updates)
            or self.routing_replay == "recompute"
            or (num_updates > 1 and is_measured)
        )

    def check_routers(
        self, model: ModelConfig | FallbackConfig, *, has_adapter: bool = False
    ) -> None:
        """Raises ConfigError if there are no routes to replay or to balance, or no bias to
        change."""
        for name, off in (("routing_replay", "none"), ("router_aux_loss_coef", 0)):
            if (value := getattr(self, name)) != off and not model.routed_layers:
                raise ConfigError(
                    f"trainer.{name}={value} needs a model with routers; this one "
                    f"({model.architecture}) has none. Set trainer.{name}={off}."
                )
        is_ours = isinstance(model, ModelConfig)
        has_bias = is_ours and model.has_sigmoid_routes and bool(model.routed_layers)
        if self.router_aux_loss_coef and has_bias:
            raise ConfigError(
                f"trainer.router_aux_loss_coef={self.router_aux_loss_coef:g} is for routers with a "
                f"softmax; this model ({model.architecture}) has sigmoids, and transformers has no "
                "such loss for it. Set it to 0 and balance by trainer.expert_bias_rate=0.001."
            )
        if self.expert_bias_rate and (has_adapter or not has_bias):
            why = f"this one ({model.architecture}) has none"
            if has_bias:
                why = "lora trains, saves and sends an adapter alone"
            raise ConfigError(
                f"trainer.expert_bias_rate={self.expert_bias_rate:g} changes the router bias of "
                f"models such as DeepSeek V3, and {why}. Set it to 0."
            )

    def check_device(self, device: str) -> None:
        """Raises ConfigError for a setting that is not for a model on this kind of device."""
        if self.offload != "none" and device == "cpu":
            raise ConfigError(
                f"trainer.offload={self.offload} moves the optimizer's state to the host's "
                "memory, and the model is on the CPU: it is there already. Leave it at none."
            )


@dataclass(frozen=True, kw_only=True)
class CriticConfig(LearnerConfig):
    """The model of values behind advantage=gae. All settings that are not here (betas,
    micro-batches, recompute, ...) are the trainer's."""

    model: str = ""
    """Model to start from, named as `model` is. A reward model (sequence classification with one
    label) keeps its head; with any other all values begin at 0. Empty: the run's model."""
    clip: Annotated[float, at_least(0)] = 0.5
    """A value stops learning at this distance from its value before the batch, in units of the
    reward. 0 never clips."""
    steps_before_policy: Annotated[int, at_least(0)] = 0
    """First steps that train the critic alone: the values of an untrained critic are noise to the
    policy."""

    def trainer(self, policy: TrainerConfig) -> TrainerConfig:
        """The critic's optimizer and batches: the policy's settings, with its own where it has
        them."""
        own = {field.name: getattr(self, field.name) for field in fields(LearnerConfig)}
        return replace(policy, **own)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Checked):
    """Settings of checkpoints: how often they are written, and which are kept."""

    every: Annotated[int, at_least(0)] = 10
    """Steps between checkpoints; 0 writes only the one at the end."""
    keep_last: Annotated[int, at_least(1)] = 2
    """Newest checkpoints to keep. With two or more, one survives a torn write."""
    keep_best: bool = True
    """Also keep the one with the highest evaluation reward, or in a supervised run with the lowest
    held-out loss: that run saves a checkpoint whenever the loss is lower than before."""


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig(Checked):
    """Tests of a supervised run on rows that it is not trained on: the metric `eval/loss`."""

    every: Annotated[int, at_least(0)] = 10
    """Steps between tests; 0 tests before the first step and after the last one only."""
    path: str = ""
    """File or run with the rows, as sft.path; empty takes a part of sft.path."""
    share: Annotated[float, Interval("[0, 1)")] = 0.1
    """Part of sft.path to hold out. 0 tests nothing, as do fewer rows than 1 / share. Episodes of
    one task stay together."""
    num_rows: Annotated[int, at_least(1)] = 64
    """Most rows to test; the same ones each time."""


@dataclass(frozen=True, kw_only=True)
class SFTConfig(Checked):
    """Supervised training on the user's own dialogues."""

    path: str = ""
    """A JSONL file: an object per line with `messages` (and `tools`), or `token_ids` and
    `loss_mask`. Or a run of `lockstep train`: the tokens of its training episodes, as they were
    sampled."""
    min_reward: float = 0.999
    """Least reward of an episode to train on, if sft.path is a run."""
    steps: Annotated[int, at_least(1)] = 100
    """Updates."""
    rows_per_step: Annotated[int, at_least(1)] = 32
    """Rows of one update."""
    shuffle: bool = True
    """Draw a new order for each pass over the file."""
    observed_weight: Annotated[float, at_least(0)] = 0.0
    """Loss weight of prompts and tool replies. 0 leaves them out; a little keeps a model that is
    trained from scratch from ignoring them."""
    long_rows: LongRows = "error"
    """Treatment of longer rows: an error that names the line, or they are left out."""


# -- teachers --------------------------------------------------------------------------------------

TeacherSignal = Literal["sampled", "top_k", "full"]


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """One teacher: a model that scores the ids that the student sampled."""

    model: str = ""
    """Model of the teacher, named as `model` is; or RUN@STEP, or RUN for its best checkpoint, else
    its last: name a step if that run may go on. Its tokenizer must give every id of the student's
    the same bytes."""
    engine: ServedConfig | None = None
    """Server that runs the teacher: engine=sglang with engine.urls=URL. Of `model` only config and
    tokenizer are read then. none loads the model into the training process."""


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Checked):
    """On-policy distillation: the student samples, a teacher scores every sampled token."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The teacher of every task that `by_source` does not name."""
    by_source: Mapping[str, TeacherConfig] = field(default_factory=dict)
    """Teachers for parts of a mixture: distill.by_source.NAME.model=DIR for task.parts.NAME."""
    signal: TeacherSignal = "sampled"
    """The teacher's answer about a token. sampled: the log-prob of its id, which gives the token an
    advantage: log teacher - log student, a one-sample estimate of the reverse KL (Lu et al. 2025).
    top_k: the teacher's most likely ids and the mass of all others, whose KL is a loss. full: the
    whole distribution, whose KL is a loss; for teachers in the training process."""
    top_k: Annotated[int, at_least(1)] = 64
    """Ids of the teacher's per token, with signal=top_k."""
    divergence: KLOrder = "reverse"
    """KL of signal=top_k and full. reverse: KL(student || teacher), which avoids what the teacher
    would not say. forward: KL(teacher || student), which covers everything that it would."""
    coef: Annotated[float, ABOVE_0] = 1.0
    """Coefficient of the teacher's advantage or loss."""
    reward_coef: Annotated[float, at_least(0)] = 0.0
    """Factor on the advantages from rewards. 0 learns from the teacher alone; the reward is then
    only reported."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.teachers:
            raise ConfigError(
                "distill has no teacher. Name one with distill.teacher.model=DIR (a shipped model, "
                "a checkpoint directory, or a run), or distill.by_source.NAME.model=DIR."
            )
        for setting, teacher in self.teachers.items():
            if not teacher.model:
                raise ConfigError(f"{setting}.model is empty: it names the teacher's model.")
            if teacher.engine is None:
                continue
            if self.signal != "sampled":
                raise ConfigError(
                    f"distill.signal={self.signal} with {setting}.engine="
                    f"{tag(type(teacher.engine))}: a server scores given ids only. "
                    f"Set distill.signal=sampled, or leave {setting}.engine out."
                )
            if not teacher.engine.urls:
                raise ConfigError(
                    f"{setting}.engine={tag(type(teacher.engine))} needs a server that is up: "
                    f"{setting}.engine.urls=http://HOST:PORT."
                )

    @property
    def teachers(self) -> dict[str, TeacherConfig]:
        """Setting -> teacher; the teacher of all other tasks is first, where there is one."""
        out = {f"distill.by_source.{name}": each for name, each in self.by_source.items()}
        if self.teacher != TeacherConfig():
            out = {"distill.teacher": self.teacher, **out}
        return out

    @property
    def is_served(self) -> bool:
        """True if a server runs any of them."""
        return any(teacher.engine is not None for teacher in self.teachers.values())

    def setting_of(self, source: str) -> str:
        """The setting of the teacher of a task from this source."""
        return f"distill.by_source.{source}" if source in self.by_source else "distill.teacher"

    def check_sources(self, sources: Mapping[str, object]) -> None:
        """Raises ConfigError if a part of the mixture has no teacher, or a teacher no part.
        sources: the parts; empty where the task is no mixture."""
        for name in self.by_source:
            if name not in sources:
                hint = did_you_mean(name, sources) or " The task is no mixture of parts."
                raise ConfigError(f"distill.by_source.{name} is a teacher of no task.{hint}")
        left = [name for name in sources if name not in self.by_source] if sources else [""]
        if left and self.teacher == TeacherConfig():
            raise ConfigError(
                f"tasks of {', '.join(left) or 'this run'} have no teacher. Name one for all with "
                "distill.teacher.model=DIR."
            )
