"""One run in progress: its parts and counters, what its checkpoints hold, and how it is shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

from lockstep.agent.buffer import Buffer
from lockstep.agent.gateway.opening import RunGateway
from lockstep.agent.loop import EpisodeSlots
from lockstep.agent.tasks import DifficultySource
from lockstep.config import differences, flatten, to_dict
from lockstep.errors import ConfigError, EngineError, StorageError
from lockstep.launch.gpu import release_gpu_memory
from lockstep.launch.ranks import FREEZE_FACTOR, Ranks
from lockstep.observe.alarms import Health, mismatch_alarm, policy_rows, spells
from lockstep.observe.live import RunHeader, View, ViewKind, open_view
from lockstep.observe.loggers import Loggers
from lockstep.observe.metrics import is_step_row
from lockstep.report.document import write_report
from lockstep.run.build import Parts, SharedBase, recipe_of, resolve_device, tokenizer_of
from lockstep.run.episodes import Tester
from lockstep.run.hooks import current_hooks
from lockstep.run.preflight import ModelFiles, internals, sized_engine
from lockstep.run.prompts import FirstPrompts
from lockstep.run.served import build_policies
from lockstep.run_config import Config
from lockstep.store.checkpoints import POLICY, RunAddress, checkpoint_of
from lockstep.store.config import LastConfig, SampleConfig
from lockstep.store.files import decode_number, encode_number
from lockstep.store.run import Outcome, RunDirectory, Status, load_run
from lockstep.sync.publisher import Level, Publisher
from lockstep.training.checkpoint import SEATS, CheckpointStore
from lockstep.training.critic import CRITIC, Critic
from lockstep.training.learner import uninterrupted
from lockstep.training.trainer import Trainer
from lockstep.types import Group, Sample

Monitor = Callable[..., dict[str, float]]
"""Looks at the rows of a step after its update and returns the metrics `doctor/...`."""

REFERENCE = "reference"
"""Directory of a run that starts from another: the weights that its KL penalty compares with."""
OpenMonitor = Callable[["TrainingRun"], Monitor | None]
"""Makes a run's monitor once its parts are built: see `lockstep.doctor.monitor.open_monitor`. A
function of a module, as ranks pickle it."""


@dataclass(slots=True)
class TrainingRun:
    """The parts, the task stream and the counters of one run."""

    config: Config
    parts: Parts
    path: Path
    directory: RunDirectory | None
    """The run directory; None on every rank but the first."""
    view: View
    loggers: Loggers
    ranks: Ranks | None = None
    monitor: Monitor | None = None
    """On the first rank alone, where the caller gave one."""
    status: Status = "done"
    step: int = 0
    """The next step."""
    elapsed_seconds: float = 0.0
    """Seconds of training since the run began, resumes included."""
    slots: EpisodeSlots = field(init=False)
    """Limits the episodes that run at the same time."""
    health: Health = field(init=False)
    """Finds silent obstacles to learning in the last steps."""
    difficulty: DifficultySource | None = None
    """The tasks of `buffer`, where they are drawn by their expected signal."""
    buffer: Buffer = field(init=False)
    gateway: RunGateway = field(init=False)
    tester: Tester = field(init=False)
    checkpoints: CheckpointStore = field(init=False)
    tested_at: int | None = None
    """The policy was last evaluated before this step."""
    test_reward: float | None = None
    """The result of that evaluation: checkpoints are compared by it."""
    row: dict[str, Any] = field(default_factory=dict)
    """Metrics of a step whose update is made and whose row is not complete; else empty."""
    saved_at: int = 0
    """The step of the newest checkpoint, or the run's first step."""
    longest_step: float = 0.0
    """Seconds of the longest step of this process, its evaluation and checkpoint included."""
    num_skipped_steps: int = 0
    """Steps in a row, up to the last one, whose update was skipped."""
    base: SharedBase | None = None
    """The model and engine that it shares with other runs."""
    sync_level: Level = "none"
    """How far the last weights handed to the engine were verified."""
    _counts: tuple[int, ...] = field(init=False)
    """Updates asked of policy and critic when `step` began."""
    _saving: RLock = field(init=False, default_factory=RLock)
    """Held while a checkpoint is written, which a thread may do when an interrupt comes."""

    def __post_init__(self) -> None:
        config = self.config
        self.slots = EpisodeSlots(config.agent.max_in_flight)
        self.health = Health(flatten(to_dict(config)))
        tasks = FirstPrompts(config, self.parts.renderer).tasks("train")
        if config.signal.order == "expected":
            self.difficulty = DifficultySource(tasks, label=config.task.label, seed=config.seed)
            tasks = self.difficulty
        self.buffer = Buffer(
            tasks=tasks,
            num_tasks=config.groups_per_step,
            max_extra_tasks=config.signal.max_extra_tasks,
            num_steps=config.steps,
            max_staleness=config.max_staleness,
            device=self.parts.trainer.device,
            ranks=self.ranks,
            turn=None if self.base is None else self.base.turn,
            on_progress=lambda done, num_tasks: self.view.phase(
                "sampling", done, num_tasks * config.group_size
            ),
        )
        self.gateway = make_gateway(config, self.parts, self.view, self.ranks)
        self.tester = Tester(
            config, self.parts, self.view, self.gateway, ranks=self.ranks, slots=self.slots
        )
        self.publisher.warn = self.warn
        self.checkpoints = CheckpointStore(self.path / "checkpoints", config.checkpoint)
        self._counts = self._num_updates()

    @property
    def publisher(self) -> Publisher:
        """The way from the trainer's weights to the engine."""
        assert self.parts.publisher is not None, "a run that trains hands its weights over"
        return self.parts.publisher

    def warn(self, text: str) -> None:
        """Shows one line that must not be lost."""
        self.view.note(text, "warning")

    def begin(self, options: RunOptions, origin: Path | None) -> None:
        """Opens the monitor, goes to the step where the run begins or continues, and shows its
        header. origin: the checkpoint of another run that this one began with."""
        if self.directory is not None:
            world = 1 if self.ranks is None else self.ranks.world
            facts = {"is_one_process": self.is_one_process, "processes": world}
            self.directory.add_facts(facts | self.parts.numerics.facts())
            if options.monitor is not None:
                self.monitor = options.monitor(self)
        if options.resume:
            self.restore_newest(origin)
        elif origin is not None:
            self.restore_origin(origin)
        self.view.start(self.header(options.view))

    # -- engine and trainer ---------------------------------------------------------------------

    async def sync(self) -> dict[str, float]:
        """The engine runs the trainer's weights from here on. Returns `sync/...`."""
        publisher = self.publisher
        is_first = publisher.version is None
        if self.config.engine.share_device:
            release_gpu_memory()  # the engine wakes
        try:
            metrics = await self.parts.publish()
        except EngineError:
            if self.ranks is not None:  # alone, any error after an update saves
                self.save_unsaved()
            raise
        if is_first and publisher.form != "shared":
            self.view.note(f"sync: {publisher.describe()}")
        if self.directory is not None and publisher.level != self.sync_level:
            self.directory.add_facts({"sync": publisher.facts()})
        self.sync_level = publisher.level
        if self.takes_turns:
            await self.parts.engine.resume(kv=self.config.sync.kv)
        return metrics

    async def leave_engine(self) -> None:
        """Verifies that the samples are of this run's weights, and hands the device to the
        trainer."""
        engine = self.parts.engine
        await engine.check_lease()
        if self.config.engine.share_device:
            await engine.sleep()
        elif self.takes_turns:
            await engine.pause()

    @property
    def takes_turns(self) -> bool:
        """True if an engine with running requests pauses while the trainer trains: it samples from
        the weights that change, in the same interpreter."""
        return self.config.max_staleness > 0 and self.publisher.form == "shared"

    @property
    def is_one_process(self) -> bool:
        """True if sampler and trainer share one process, one set of ops and the weights. It decides
        which mismatch is normal, so an injected fault does not change it."""
        shares_weights = self.parts.engine.capabilities.shares_weights
        return self.config.is_in_step or (shares_weights and not self.config.max_staleness)

    # -- metrics and trajectories ---------------------------------------------------------------

    async def test(self, *, own_row: int | None = None) -> None:
        """Evaluates the policy and records its episodes. The figures join the row of the step.

        own_row: they make a row of their own instead, with this step; none with evaluation=none.
        The episodes are stored under the last step made, -1 before the first.
        """
        metrics, played = await self.tester.test()
        with uninterrupted():  # an evaluation is kept whole, or made again
            for name, groups in played.items():
                self.record(self.step - 1, groups, split=name)
            if own_row is None:
                self.row.update(metrics)
            elif metrics:
                self.log({"step": own_row, **metrics, **self.engine_metrics()})
            self.tested_at, self.test_reward = self.step, metrics.get(self.tester.criterion)

    def record(self, step: int, groups: Sequence[Group], **options: Any) -> None:
        """Stores trajectories. options: see `RunDirectory.write_trajectories`."""
        if self.directory is not None:
            self.directory.write_trajectories(step, groups, **options)

    def watch(
        self,
        step: int,
        rows: Sequence[Sample],
        sampled_rows: Sequence[Sample],
        groups: Sequence[Group],
        *,
        version: int,
    ) -> dict[str, float]:
        """`doctor/...` of a step's rows after the update: one process checks them for all.
        sampled_rows: the same before a hook changed them."""
        found: dict[str, float] = {}
        if self.monitor is not None and rows:
            found = self.monitor(step, rows, sampled_rows, groups, version=version)
        return found if self.ranks is None else self.ranks.from_leader(found)

    def log(self, row: Mapping[str, Any]) -> None:
        """Writes and shows a row. A single process adds its engine's counts since the last row.
        Ranks gather the counts earlier, because a rank that failed here could not take part."""
        if self.ranks is None:
            row = {**self.engine_metrics(), **row}
        line: dict[str, str] = {}
        if is_step_row(row):
            row = {**row, **self.health.take(row)}
            line = {"health/line": " ".join(each.text for each in self.health.alarms) or "ok"}
        if self.directory is not None:
            self.directory.log(row)
        self.loggers.log({**row, **line})
        self.view.step(row, self.health.alarms)

    def engine_metrics(self) -> dict[str, float]:
        """`engine/...` since the last call, summed over the engines of all ranks."""
        found = self.parts.engine.take_metrics()
        total: Counter[str] = Counter()
        for of_rank in [found] if self.ranks is None else self.ranks.gather(found):
            total.update(of_rank)
        return {f"engine/{name}": value for name, value in total.items()}

    def expect_alike(self, seconds: float) -> None:
        """Limits the wait for other ranks by the time of this step, `seconds`. So a frozen rank is
        found in a time that grows with the work."""
        self.longest_step = max(self.longest_step, seconds)
        if self.ranks is not None:
            limit = FREEZE_FACTOR * self.longest_step + self.config.agent.max_seconds
            self.ranks.limit_waits(min(limit, self.config.parallel.timeout_seconds))

    def stop_reason(self, row: Mapping[str, Any]) -> str:
        """Why the run ends after this row of a step, by the setting that it names; "" if it goes
        on."""
        config, stop_on, rows = self.config, self.config.stop_on, policy_rows(row).values()
        is_skipped = any(of_policy.get("train/skipped_updates", 0) > 0 for of_policy in rows)
        self.num_skipped_steps = self.num_skipped_steps + 1 if is_skipped else 0
        family = self.parts.model_files.model.family
        alarm = mismatch_alarm(row, family, is_one_process=self.is_one_process)
        is_critical = alarm.level == "critical" or row.get("doctor/causes", 0) > 0
        if is_critical and "mismatch" in stop_on:
            return "sampler and trainer differ (stop_on=mismatch)"
        if "weights" in stop_on and any(one.get("sync/alarm", 0) > 0 for one in rows):
            return "the engine does not run the trainer's weights (stop_on without weights goes on)"
        if (num_missing := row.get("signal/missing", 0)) and "shortage" in stop_on:
            return (
                f"{num_missing:.0f} of {config.groups_per_step} groups had no signal after "
                f"{config.signal.max_extra_tasks} more tasks (stop_on=shortage)"
            )
        if (num := self.num_skipped_steps) >= config.trainer.max_skipped_steps:
            return f"{num} steps in a row made no update: a loss or gradient was not finite"
        return ""

    # -- checkpoints ----------------------------------------------------------------------------

    def advance(self, row: dict[str, Any]) -> None:
        """The update of `step` is made and its episodes are recorded: a checkpoint from here on
        continues with what its row still lacks."""
        self.row = row
        self.step += 1
        self._counts = self._num_updates()

    def _num_updates(self) -> tuple[int, ...]:
        learners = (self.parts.trainer, self.parts.critic, *self.own_trainers.values())
        return tuple(learner.num_updates for learner in learners if learner is not None)

    @property
    def own_trainers(self) -> dict[str, Trainer]:
        """Seat -> the trainer of its own policy."""
        return {seat: own.trainer for seat, own in self.parts.own.items()}

    def save(self) -> None:
        """Writes a checkpoint of everything that the next step depends on, and of a row that is not
        complete."""
        if self.directory is not None:
            self.directory.check()
        state = {
            "step": self.step,
            "row": {name: encode_number(value) for name, value in self.row.items()},
            "test_reward": encode_number(self.test_reward),
            "num_skipped_steps": self.num_skipped_steps,
            "elapsed_seconds": self.elapsed_seconds,
            "tested_at": self.tested_at,
            "tasks": self.buffer.state_before(self.step),
        }
        metric = self.test_reward if self.tested_at == self.step else None
        others: dict[str, Any] = {"critic": self.parts.critic, "seats": self.own_trainers}
        with self._saving:
            self.checkpoints.save(self.step, self.parts.trainer, state, metric=metric, **others)
            self.saved_at = self.step
        if self.row:  # for readers: a resume sets it aside and completes it
            self.log(self.row)

    @property
    def undone(self) -> str:
        """Says how much a step that ends in an error has updated."""
        if self._num_updates() == self._counts:
            return "Nothing was updated"
        return "A part of the step was updated, which is not saved"

    def save_if_whole(self) -> None:
        """Saves, unless the step was cut off between a part of its update and its record. No
        uninterrupted run has such a model, and a resume would repeat that part."""
        if self._num_updates() == self._counts:
            self.save()
        else:
            self.warn(
                f"step {self.step} was interrupted within its update, so nothing is saved: the run "
                f"continues from the checkpoint of step {self.saved_at}."
            )

    def save_unsaved(self) -> None:
        """Saves the updates that no checkpoint holds yet, before an error ends the run."""
        try:
            with self._saving:
                if self.saved_at != self.step:
                    self.save_if_whole()
        except StorageError as error:  # often the error that ends the run, which is shown
            self.warn(str(error))

    def restore_newest(self, origin: Path | None) -> None:
        """Continues this run from its newest checkpoint, or begins it again. origin: the checkpoint
        that it began with."""
        newest = self.checkpoints.latest() if self.directory is not None else None
        if self.ranks is not None:
            newest = self.ranks.from_leader(newest)
        if newest is None:
            if self.directory is not None:
                self.directory.rewind(-2)
            self.warn("no checkpoint yet: the run begins again.")
            if origin is not None:
                self.restore_origin(origin)
            return
        if origin is not None:
            self.hold_reference(is_stored=True)
        self._restore(newest, critic=self.parts.critic, seats=self.own_trainers)
        if self.step == 0:  # what the first evaluation left counts as later than that
            self.tested_at = None
        if self.directory is None:
            return
        is_tested = self.tested_at == self.step and not self.row
        if is_tested and self.step >= self.config.steps:  # it ends with the row of that evaluation
            self.view.note(
                f"{self.path} is already finished: all {self.step} steps are made. To train more: "
                f"lockstep train from={self.path} steps={2 * self.step}."
            )
        else:
            last = self.step - 1 if self.step else -2
            self.directory.rewind(last, last_row=last - bool(self.row))
        self.directory.add_facts({"resumed_at": self.step})
        for row in filter(is_step_row, load_run(self.path).metrics):
            self.health.take(row)
        self.warn_of_lost(self.step - bool(self.row))

    def warn_of_lost(self, end: int) -> None:
        """Names the steps before `end` whose row or episodes were deleted."""
        run, keep = load_run(self.path), self.config.record.keep
        rows = {row["step"] for row in run.metrics if is_step_row(row)}
        steps, kept = range(run.first_step, end), range(run.first_step, self.step)
        if isinstance(keep, LastConfig):
            kept = kept[-keep.steps :]
        for file, what, lost in (
            ("metrics.jsonl", "rows", [step for step in steps if step not in rows]),
            ("trajectories", "episodes", [step for step in kept if step not in set(run.steps())]),
        ):
            if lost and not (what == "episodes" and isinstance(keep, SampleConfig)):
                self.warn(
                    f"{self.path / file} has lost the {what} of {len(lost)} step(s), the first of "
                    f"step {lost[0]}, before the checkpoint of step {self.step}. The run "
                    "continues; curves and summary lack them."
                )

    def restore_origin(self, checkpoint: Path) -> None:
        """Starts from another run's checkpoint; a critic or a seat's policy that it lacks starts
        anew."""
        has_critic = (checkpoint / CRITIC).is_dir()
        if self.parts.critic is not None and not has_critic:
            self.warn(f"{checkpoint} has no critic: this run's begins anew.")
        seats = self.own_trainers
        for seat in [seat for seat in seats if not (checkpoint / SEATS / seat).is_dir()]:
            self.warn(f"{checkpoint} has no policy of seats.{seat}: this run's begins anew.")
            del seats[seat]
        self._restore(checkpoint, critic=self.parts.critic if has_critic else None, seats=seats)
        parent = load_run(checkpoint.parents[1])
        if differences(parent.config, to_dict(self.config)).keys() <= {"steps", "name"}:
            for row in parent.metrics:
                if is_step_row(row) and row["step"] < self.step:
                    self.health.take(row)
        self.row = {}  # of the other run
        self.hold_reference()

    def hold_reference(self, *, is_stored: bool = False) -> None:
        """Sets the KL's reference to the weights of the run that this one starts from, and keeps
        them in RUN/reference for a resume. is_stored: takes the weights in RUN/reference."""
        objective = self.config.objective
        if not objective.reads_reference_logprobs or objective.reference != "start":
            return
        for name, trainer in {POLICY: self.parts.trainer, **self.own_trainers}.items():
            place = self.path / REFERENCE / name
            trainer.take_reference(place if is_stored else None)
            if not is_stored:
                trainer.save_policy(place)

    def _restore(
        self, checkpoint: Path, *, critic: Critic | None, seats: Mapping[str, Trainer]
    ) -> None:
        state = self.checkpoints.load(checkpoint, self.parts.trainer, critic=critic, seats=seats)
        self.step, self.elapsed_seconds = state["step"], state["elapsed_seconds"]
        self.tested_at, self.saved_at = state["tested_at"], self.step
        # Older checkpoints lack the next entries.
        self.row = {name: decode_number(value) for name, value in state.get("row", {}).items()}
        self.test_reward = decode_number(state.get("test_reward"))
        self.num_skipped_steps = state.get("num_skipped_steps", 0)
        self.buffer.restore(self.step, state["tasks"])
        self._counts = self._num_updates()

    # -- what a person reads --------------------------------------------------------------------

    def header(self, kind: ViewKind) -> RunHeader:
        """The lines and facts that are shown once, at the start."""
        lines: tuple[str, ...] = ()
        if kind == "verbose":
            found, numerics = self.parts.engine.capabilities, self.parts.numerics
            how: dict[str, Any] = {"has_support": found.has_support, "numerics": numerics}
            sync = f"sync       {self.publisher.describe()}"
            lines = (*internals(self.config, self.parts.model_files, **how), sync)
        return RunHeader(
            num_steps=self.config.steps,
            architecture=self.parts.model_files.model.family,
            is_one_process=self.is_one_process,
            lines=lines,
        )

    def finish(self) -> Outcome:
        """Ends the run: see `finish_run`."""
        self.warn_of_lost(self.step)
        out = {"steps": self.step, "elapsed_seconds": self.elapsed_seconds}
        return Outcome(self.path, self.status, out | finish_run(self.path, self.view, self.health))


def finish_run(path: Path, view: View, health: Health) -> dict[str, Any]:
    """Writes RUN/report.html, and repeats the health lines that still hold. Returns the last
    figures of metrics.jsonl."""
    run = load_run(path)
    tokenizers, recipes = [tokenizer_of(run.config)], [recipe_of(run)]
    warn = partial(view.note, level="warning")
    try:
        write_report([run], path / "report.html", tokenizers=tokenizers, recipes=recipes, warn=warn)
    except StorageError as error:
        warn(f"{error} Everything else is kept; `lockstep report {path}` writes it.")
    out: dict[str, Any] = {}
    if rewards := run.values("reward/mean"):
        last = rewards[-10:]
        out |= {"reward_first": rewards[0], "reward_last_10": sum(last) / len(last)}
    said = spells(run.metrics, health.settings, reasons=health.reasons)
    if found := [text for text, still in said if still]:
        out["health"] = found
    for line in found:
        warn(line)
    tested = [{k: v for k, v in r.items() if k.startswith("eval/")} for r in run.metrics]
    return out | next(filter(None, reversed(tested)), {})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is started, beside its settings: see `lockstep.run.train.train`."""

    out: Path
    resume: bool = False
    start: RunAddress | None = None
    view: ViewKind = "live"
    monitor: OpenMonitor | None = None

    def find_origin(self, config: Config) -> tuple[Path | None, dict[str, Any]]:
        """(the checkpoint that the run began with, what environment.json says about it)."""
        if self.start is not None:
            parent = load_run(self.start[0])
            origin = checkpoint_of(parent, self.start[1])
            changed = differences(parent.config, to_dict(config))
            return origin, {"from": {"checkpoint": str(origin), "changed": changed}}
        if self.resume and (stored := load_run(self.out).environment.get("from")):
            return Path(stored["checkpoint"]), {}
        return None, {}

    def open_directory(self, config: Config, facts: Mapping[str, Any]) -> RunDirectory:
        """Opens the run's directory for writing. Raises ConfigError for other faults than its."""
        if not self.resume:
            return RunDirectory.create(self.out, to_dict(config), record=config.record, facts=facts)
        if (had := load_run(self.out).environment.get("faults", [])) != facts["faults"]:
            raise ConfigError(
                "resume=true continues the run as it was, and its faults differ: "
                f"{had} -> {facts['faults']}. Give it the same ones."
            )
        return RunDirectory.open(self.out, record=config.record, facts=facts)


@contextmanager
def open_run(
    ranks: Ranks | None,
    config: Config,
    model_files: ModelFiles,
    options: RunOptions,
    *,
    base: SharedBase | None = None,
) -> Generator[TrainingRun]:
    """A run with its directory and parts, at the step where it begins or continues.

    The first rank writes and shows; all others follow. base: shared with the runs beside this one.
    """
    is_leader = ranks is None or ranks.is_leader
    config = replace(config, dtype=config.compute_dtype)  # a run's config names its actual dtype
    facts = model_files.facts() | {"faults": list(current_hooks().recorded)}
    if model_files.renderer_line:  # a run says how its prompts are written, and why
        config = replace(config, renderer=model_files.renderer_config)
    if ranks is not None:
        ranks.check_same(to_dict(config))
        options = replace(options, out=ranks.from_leader(options.out))
    origin, of_origin = options.find_origin(config)
    directory = options.open_directory(config, facts | of_origin) if is_leader else None
    name = config.name if base is not None else ""
    shown = open_view(options.view if is_leader else "json", name=name)
    loggers = Loggers(
        config.record if is_leader else replace(config.record, loggers=()),
        run_path=options.out,
        config=to_dict(config),
        warn=lambda text: shown.note(text, "warning"),
    )
    with directory or nullcontext():
        resolve_device(config)
        config = replace(config, engine=sized_engine(config, model_files))
        parts = build_policies(
            config, model_files, ranks=ranks, base=base, scratch=options.out, on_wait=shown.note
        )
        run = TrainingRun(config, parts, options.out, directory, shown, loggers, ranks, base=base)
        run.begin(options, origin)
        try:
            yield run
        finally:
            loggers.close()
            shown.close()


def make_gateway(
    config: Config, parts: Parts, view: View, ranks: Ranks | None = None
) -> RunGateway:
    """The gateway for agents that ask over HTTP; it listens once the first of them needs it."""
    return RunGateway(
        config.gateway,
        parts.renderer,
        model=Path(config.model).name,
        rank=0 if ranks is None else ranks.rank,
        note=view.note,
    )
