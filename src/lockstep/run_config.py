"""All settings of a run, as one tree. No torch.

Settings that several rooms share (model, seed, longest row, threads) are here once and are handed
down; the others belong to the room that reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from lockstep.agent.config import AgentConfig, FrozenSeat, OwnSeat, SamplingConfig, SeatConfig
from lockstep.agent.gateway.config import GatewayConfig
from lockstep.agent.task_config import DialogueConfig, TaskConfig
from lockstep.config import (
    ABOVE_0,
    FINITE,
    Checked,
    Form,
    Interval,
    at_least,
    check_conflicts,
    conflicts_in,
    require,
    tag,
)
from lockstep.correction.config import Correction
from lockstep.engines.config import EmbeddedConfig, EngineConfig
from lockstep.errors import ConfigError
from lockstep.launch.config import Demand, LocalPlacement, ParallelConfig, PlacementConfig
from lockstep.launch.gpu import Device, shows_gpu
from lockstep.models.lora_config import LoraConfig
from lockstep.objectives.config import GRPO, AdvantageConfig, CreditConfig, ObjectiveConfig, PPOClip
from lockstep.ops.contract import ContractChoice
from lockstep.renderers.config import RendererConfig
from lockstep.store.config import RecordConfig
from lockstep.sync.config import SyncConfig
from lockstep.tables import tables_beside
from lockstep.tinker_config import TinkerConfig
from lockstep.training.config import (
    CheckpointConfig,
    CriticConfig,
    DistillConfig,
    HeldOutConfig,
    SFTConfig,
    TrainerConfig,
)

ComputeDtype = Literal["float32", "bfloat16", "float16"]
DEFAULT_DTYPES: dict[Device, ComputeDtype] = {"cpu": "float32", "cuda": "bfloat16"}
"""A GPU multiplies bfloat16 many times faster than float32; most CPUs do not."""

CONFLICTS: dict[str, dict[str, str]] = tables_beside(__file__)
"""Settings that exclude each other, by when they are checked: `lockstep.config.check_conflicts`."""
MAX_STEPS, MAX_EPISODES = 10**8, 10**6
"""Larger numbers are typing mistakes: such a run would take years."""


def check_is_rl(tree: Mapping[str, Any], run: Path) -> None:
    """Raises ConfigError for the settings of a run of `lockstep sft`."""
    if "sft" in tree:
        raise ConfigError(
            f"{run} was trained by lockstep sft, and has no tasks. Continue it with lockstep sft "
            f"{run} resume=true, or train its model with lockstep train RECIPE model={run}."
        )


@dataclass(frozen=True, kw_only=True)
class _HeldOutTasks(Checked):
    CONFLICTS = CONFLICTS["held_out"]

    task: TaskConfig | None = None
    """Kind of these tasks, with settings of its own; none takes the task that is trained."""
    num_tasks: Annotated[int, at_least(0)] = 128
    """Held-out tasks; the same ones each time. 0, or evaluation=none, tests nothing."""
    num_samples: Annotated[int, at_least(1)] = 1
    """Samples per task: the k of mean@k and pass@k."""
    temperature: Annotated[float | None, at_least(0)] = None
    """Temperature of these samples; None takes that of training, 0 is greedy."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSet(_HeldOutTasks):
    """Further tasks to test on, and how they are sampled."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(_HeldOutTasks):
    """Tests of the policy on tasks that it is not trained on."""

    every: Annotated[int, at_least(0)] = 0
    """Steps between evaluations; 0 tests before the first step and after the last one only."""
    PRESETS: ClassVar[dict[str, Callable[[], EvaluationConfig]]] = {
        "none": lambda: EvaluationConfig(num_tasks=0)
    }
    greedy: bool = True
    """Also play every task once at temperature 0."""
    sets: Mapping[str, EvaluationSet] = field(default_factory=dict[str, EvaluationSet])
    """name -> further tasks to test on: evaluation.sets.NAME.task=KIND. Their figures are
    eval/NAME/..., and the best checkpoint is not chosen by them."""
    success_reward: Annotated[float, FINITE] = 0.999
    """A sample with at least this reward has passed (pass@k)."""
    at_start: bool = True
    """Test before the first step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if taken := {*self.sets} & {"sampled", "greedy", "loss", "train"}:
            raise ConfigError(f"evaluation.sets.{min(taken)}: the name is taken. Choose another.")


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Checked):
    """Checks of the sampled and trained rows of a run."""

    rows: Annotated[int, at_least(0)] = 16
    """Rows of each step to check, whole groups, other tasks in turn; 0 checks none. Only checks
    that need no model are made; they take milliseconds."""


@dataclass(frozen=True, kw_only=True)
class SignalConfig(Checked):
    """Groups that teach: which tasks a step draws, and which episodes it trains."""

    max_extra_tasks: Annotated[int, at_least(0)] = 0
    """Tasks that a step may draw beyond groups_per_step. They replace tasks whose episodes all have
    the same reward and so teach nothing (dynamic sampling of DAPO, Yu et al. 2025). If they do not
    suffice, the step trains the groups without a signal too. 0 replaces none."""
    order: Literal["stream", "expected"] = "stream"
    """stream: tasks as they come. expected: tasks are drawn in proportion to their expected signal,
    the share of their past groups with differing rewards; the others wait for the next epoch."""
    over_long: Literal["train", "drop"] = "train"
    """Treatment of an episode that a budget cut off: train on it, or leave it out once it has
    counted in its group's baseline (overlong filtering of DAPO)."""
    length_penalty_tokens: Annotated[int, at_least(0)] = 0
    """Width in tokens of the penalty zone before max_tokens. Within it, the reward of a training
    episode falls linearly by up to 1 (soft overlong punishment of DAPO). 0 subtracts nothing."""


@dataclass(frozen=True, kw_only=True)
class ModelChoice(Checked):
    """The model and how it is run: settings that every kind of run has."""

    EXCLUSIVE: ClassVar = CONFLICTS["any"]
    """Settings that exclude each other: `lockstep.config.conflicts_in`."""

    name: Annotated[str, Form("[^/]+", "usable as part of a directory name")] = "run"
    """Names the run directory: runs/NAME-TIMESTAMP."""
    model: str = "tiny-gpt-oss"
    """A shipped model, a checkpoint directory in Hugging Face's form, or ORGANISATION/NAME."""
    fallback: bool = False
    """Let transformers run the model in place of the decoder: for architectures that the decoder
    does not have. For training alone: another engine samples, and the contract, routing replay,
    recompute, adapters and sharding are refused. Needs the extra `transformers`."""
    seed: Annotated[int, Interval("[0, 9223372036854775808)")] = 0
    """Seed of tasks, sampling and every other draw."""
    max_tokens: Annotated[int, at_least(1)] = 512
    """Longest row: prompt, sampled and observed tokens of one episode."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the trainer, and of the sampler unless engine.dtype differs; auto is
    bfloat16 on a GPU and float32 on a CPU, and a run stores which. The optimizer keeps float32
    masters. With float16 the loss has a factor against underflow of small gradients."""
    threads: Annotated[int, Interval("[1, 4096]")] = 1
    """CPU threads of torch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto takes a GPU if there is one."""
    memory_limit_gib: Annotated[float, at_least(0)] = 0.0
    """GiB of the device's memory that the run may take. A run with a larger predicted peak is
    refused at start. 0 takes the memory that is free on the device."""
    renderer: RendererConfig | None = None
    """How dialogues become tokens; none takes what the model was trained with: its renderer.json,
    or the format of its architecture."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter in place of the model: lora.rank=8, or lora.path=DIR to go on from
    one in PEFT's form; none trains the model itself."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Optimizer, schedule and micro-batches."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Several processes, one model."""

    @property
    def expected_device(self) -> Device:
        """The device that `device=auto` will choose, as far as can be seen without torch."""
        if self.device == "auto":
            return "cuda" if shows_gpu() else "cpu"
        return self.device

    @property
    def num_processes(self) -> int:
        """Processes that train together."""
        return self.parallel.num_processes(os.environ)

    @property
    def compute_dtype(self) -> ComputeDtype:
        """The setting `dtype`, or this device's default."""
        return DEFAULT_DTYPES[self.expected_device] if self.dtype == "auto" else self.dtype

    def __post_init__(self) -> None:
        super().__post_init__()
        check_conflicts(self, self.EXCLUSIVE)


@dataclass(frozen=True, kw_only=True)
class _SampledModel(ModelChoice):
    """A model that samples, in a training run or for a server."""

    contract: ContractChoice = "auto"
    """Promise about the sampler's and the trainer's log-probs. true-on-policy: equal bit for bit,
    proved at the start and checked on every token, or the run is refused. auto: the same if this
    machine can keep it, else none, and the plan says why. none: stock arithmetic, equal to
    rounding."""
    engine: EngineConfig = field(default_factory=EmbeddedConfig)
    """Engine that samples."""
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    """HTTP server through which agent programs reach the model."""


@dataclass(frozen=True, kw_only=True)
class Config(_SampledModel):
    """One training run."""

    EXCLUSIVE: ClassVar = CONFLICTS["any"] | CONFLICTS["run"]

    steps: Annotated[int, Interval(f"[1, {MAX_STEPS}]")] = 100
    """Training steps."""
    groups_per_step: Annotated[int, Interval(f"[1, {MAX_EPISODES}]")] = 8
    """Tasks per step."""
    group_size: Annotated[int, Interval(f"[1, {MAX_EPISODES}]")] = 8
    """Episodes per task: what a group baseline compares."""
    max_failed_share: Annotated[float, Interval("[0, 1)")] = 0.5
    """Share of a step's episodes that may fail (a tool crashes the environment, an engine answers
    nonsense). Above it the run stops with the reason; below it the other episodes are trained
    on."""
    max_staleness: Annotated[int, at_least(0)] = 0
    """Number of steps that the sampling weights may be behind. 0 samples and trains in turn. Above
    0, up to this many later batches are sampled ahead. Their episodes get new weights in the middle
    of a reply, and an engine in another process samples while the trainer trains."""
    stop_on: tuple[Literal["weights", "mismatch", "shortage"], ...] = ("weights",)
    """Findings that end the run with a checkpoint and exit code 3; others are reported. weights:
    the engine runs other weights than the trainer's. mismatch: a step has a cause of the doctor's,
    or max(|k1|, k2, k3) above 0.1. shortage: a step has used signal.max_extra_tasks and still has
    groups without a signal."""
    over_stale: Literal["correct", "drop"] = "correct"
    """Treatment of a row with a token older than max_staleness (a replica lagged behind): train on
    it with its correction like any other, or drop it. It is counted either way."""
    signal: SignalConfig = field(default_factory=SignalConfig)
    """Groups that teach: which tasks a step draws, and which episodes it trains."""
    task: TaskConfig
    """The task that the agent is trained on."""
    seats: Mapping[str, SeatConfig] = field(default_factory=dict[str, SeatConfig])
    """seat -> who plays it, in a task of several: seats.second=frozen
    seats.second.model=RUN@STEP. Default: the policy in training plays all of them."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Budgets of an episode and how its tokens are drawn."""
    placement: PlacementConfig = field(default_factory=LocalPlacement)
    """Machines that run the processes of the run."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """Way of the trainer's weights to the engine, and its verification."""
    advantage: AdvantageConfig = field(default_factory=GRPO)
    """How rewards become advantages."""
    credit: CreditConfig = field(default_factory=CreditConfig)
    """Credit of single turns, beside the advantage of their episode."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Model of values for advantage=gae; other advantages have none."""
    objective: ObjectiveConfig = field(default_factory=PPOClip)
    """The policy loss."""
    distill: DistillConfig | None = None
    """Learn from teachers that score the sampled tokens: distill.teacher.model=DIR; none learns
    from rewards alone."""
    correction: Correction | None = None
    """Correction of the gap between sampler and trainer: a preset by its name (`correction=mis`),
    or single settings. none chooses bypass if the sampler runs the trainer's own decoder in its
    dtype and in step with it, and mis otherwise."""
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    """Checks of the trained rows; `stop_on` says what ends a run."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Tests on held-out tasks."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Which checkpoints are saved, and how often."""
    record: RecordConfig = field(default_factory=RecordConfig)
    """Trajectories to keep, and extra loggers."""

    @property
    def demand(self) -> Demand:
        """The needs of the run's processes."""
        is_on_gpu, engine = self.expected_device == "cuda", self.engine
        return Demand(
            num_engines=engine.num_workers,
            cores=self.threads,
            trainer_gpus=int(is_on_gpu),
            engine_gpus=engine.gpus_each if is_on_gpu and not engine.share_device else 0,
        )

    @property
    def tested(self) -> dict[str, Config]:
        """Arm of an evaluation -> these settings with the tasks and the sampling of it alone."""
        own, out = self.evaluation, dict[str, Config]()
        greedy = {"greedy": replace(own, num_samples=1, temperature=0.0)} if own.greedy else {}
        for name, each in {"sampled": own, **greedy, **own.sets}.items():
            alone = {f.name: getattr(each, f.name) for f in fields(EvaluationSet)}
            evaluation = replace(own, sets={}, greedy=False, **alone)
            others: dict[str, Any] = {"task": each.task, "seats": {}} if each.task else {}
            out[name] = replace(self, evaluation=evaluation, **others)
        return out

    @property
    def stops_on_shortage(self) -> bool:
        return "shortage" in self.stop_on

    @property
    def chosen_correction(self) -> Correction:
        """The setting `correction`, or this engine's default."""
        if self.correction is not None:
            return self.correction
        return Correction.bypass() if self.is_in_step else Correction.mis()

    @property
    def learns_from_rewards(self) -> bool:
        """False if teachers alone say what is learned."""
        return self.distill is None or self.distill.reward_coef > 0

    @property
    def own_seats(self) -> list[str]:
        """Seats with a policy of their own that is trained too."""
        return [seat for seat, policy in self.seats.items() if isinstance(policy, OwnSeat)]

    @property
    def is_in_step(self) -> bool:
        """True if the sampler is the trainer's own decoder, with its dtype and weights. Then the
        two can differ only in their ops."""
        engine = self.engine
        is_own = isinstance(engine, EmbeddedConfig) and engine.dtype in ("same", self.compute_dtype)
        return is_own and not self.max_staleness

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chosen_correction.check_updates(self.trainer.updates_per_batch)
        self._check_seats()

    def _check_seats(self) -> None:
        kind, known = tag(type(self.task)), self.task.SEATS
        for seat in self.seats:
            if seat not in known:
                there = f"the seats {', '.join(known)}" if known else "no seats"
                raise ConfigError(
                    f"seats.{seat} is set, and task={kind} has {there}. Leave it out, or take it "
                    f"out of a run's settings with seats.{seat}=none."
                )
        for problem in conflicts_in(self, CONFLICTS["own_seats"]) if self.own_seats else ():
            raise ConfigError(
                f"seats.{self.own_seats[0]}=own has an adapter and nothing beside it, and the run "
                f"has {problem}"
            )

    def check_policy_seat(self) -> None:
        """Raises ConfigError if others have every seat of a match, so that nothing is trained."""
        known, others = self.task.SEATS, (FrozenSeat, OwnSeat)
        if known and all(isinstance(self.seats.get(seat), others) for seat in known):
            raise ConfigError(
                f"no seat is left for the policy of the run ({', '.join(known)}): "
                f"task={tag(type(self.task))} would train nothing. Set seats.{known[0]}=policy."
            )


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(ModelChoice):
    """One supervised run: `lockstep sft`."""

    EXCLUSIVE: ClassVar = CONFLICTS["any"] | CONFLICTS["supervised"]

    sft: SFTConfig = field(default_factory=SFTConfig)
    """The file of dialogues, and how it is trained on."""
    data: DialogueConfig | None = None
    """Dialogues made by a program, in place of sft.path."""
    spelling_dropout: Annotated[float, Interval("[0, 1)")] = 0.0
    """Share of the tokenizer's merges that is left out in replies (BPE dropout): the model learns
    that one text has many spellings."""
    evaluation: HeldOutConfig = field(default_factory=HeldOutConfig)
    """Tests on held-out rows."""
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=100))
    """How often a checkpoint is saved. resume=true continues from the newest."""
    create: Literal["", "gpt_oss", "qwen3", "qwen3_next"] = ""
    """Begin with a tiny model of this architecture, random weights and a tokenizer made for the
    dialogues, in place of `model`."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig(_SampledModel):
    """Settings of `lockstep serve`: the model, and defaults for requests."""

    name: str = "serve"
    api: tuple[Literal["agents", "tinker"], ...] = ("agents",)
    """APIs to offer: agents (OpenAI's and Anthropic's), tinker, or both."""
    tinker: TinkerConfig = field(default_factory=TinkerConfig)
    """Limits of Tinker's API, and what the server keeps."""
    agent: SamplingConfig = field(default_factory=SamplingConfig)
    """How the replies to requests that name nothing else are drawn. No request gets more than
    agent.max_turn_tokens."""
    turn_seconds: Annotated[float, ABOVE_0] = 600.0
    """Seconds until a reply is cut off; the tokens sampled so far are returned."""
    idle_seconds: Annotated[float, at_least(0)] = 3600.0
    """A session without a request for this time has failed: its agent is gone. 0: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, api=(bool(self.api), "agents, tinker, or both"))
        if "tinker" in self.api:
            check_conflicts(self, CONFLICTS["tinker"])
