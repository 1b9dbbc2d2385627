"""One run in progress: its parts, its place, and everything around the verbs of the loop.

What a checkpoint holds, how a run continues, what is logged and shown, and how it is tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.agent.buffer import Buffer
from lockstep.agent.gateway.opening import RunGateway
from lockstep.agent.loop import EpisodeSlots
from lockstep.config import to_dict
from lockstep.doctor.monitor import Monitor, open_monitor
from lockstep.errors import DataError, EngineError
from lockstep.launch.ranks import Ranks
from lockstep.models.sharding import mesh_of
from lockstep.observe.alarms import mismatch_alarm
from lockstep.observe.live import RunHeader, View
from lockstep.observe.loggers import GuardedLoggers
from lockstep.ops.bisect import bisect
from lockstep.ops.contract import TRUE_ON_POLICY
from lockstep.report.page import write_report
from lockstep.run.build import Parts, vocabulary_of
from lockstep.run.evaluation import evaluate
from lockstep.run.plan import plan
from lockstep.run.preflight import ModelFiles
from lockstep.run.step_metrics import check_failures
from lockstep.run_config import Config
from lockstep.store.run import TRAIN, RunDirectory, load_run
from lockstep.sync.publisher import Level, Publisher
from lockstep.training.checkpoint import CheckpointStore
from lockstep.training.correcting import UnequalTokenError
from lockstep.training.critic import CRITIC, Critic
from lockstep.types import Group, Sample, Task

NUM_COMPANIONS = 8  # rows beside the one that broke the contract: enough to change every kernel


@dataclass(slots=True)
class TrainingRun:
    """The parts, the task stream and the counters of one run."""

    config: Config
    model_files: ModelFiles
    parts: Parts
    path: Path
    directory: RunDirectory | None
    """Where the run is written; None on the ranks that leave that to the first."""
    view: View
    loggers: GuardedLoggers
    ranks: Ranks | None = None
    step: int = 0
    """The next step."""
    elapsed_seconds: float = 0.0
    """Since the run began, resumes included."""
    slots: EpisodeSlots = field(init=False)
    """What every episode of the run waits for."""
    buffer: Buffer = field(init=False)
    gateway: RunGateway = field(init=False)
    """Where finished agents find the model; it starts with the first of them."""
    tester: Tester = field(init=False)
    publisher: Publisher = field(init=False)
    monitor: Monitor | None = field(init=False)
    """Of the first process, unless it is turned off."""
    checkpoints: CheckpointStore = field(init=False)
    tested_at: int | None = None
    """The step that the last evaluation preceded, and what it gave."""
    test_reward: float | None = None
    sync_level: Level = "none"
    """How far the last load was verified."""

    def __post_init__(self) -> None:
        config = self.config
        self.slots = EpisodeSlots(config.agent.max_in_flight)
        self.buffer = Buffer(
            tasks=config.task.tasks(split="train", seed=config.seed),
            num_tasks=config.groups_per_step,
            num_steps=config.steps,
            max_staleness=config.max_staleness,
            device=self.parts.trainer.device,
            ranks=self.ranks,
            on_progress=lambda done, num_tasks: self.view.phase(
                "sampling", done, num_tasks * config.group_size
            ),
        )
        self.gateway = make_gateway(config, self.parts, self.view, self.ranks)
        self.tester = Tester(
            config, self.parts, self.view, self.gateway, ranks=self.ranks, slots=self.slots
        )
        assert self.parts.publisher is not None, "a run that trains hands its weights over"
        self.publisher = self.parts.publisher
        self.publisher.warn = lambda text: self.view.note(text, "warning")
        numerics = self.parts.numerics
        facts = {
            "is_one_process": self.is_one_process,
            "contract": TRUE_ON_POLICY if numerics.is_kept else "none",
            "numerics": numerics.line,
            "fingerprint": asdict(numerics.fingerprint),
            "processes": 1 if self.ranks is None else self.ranks.world,
        }
        if self.directory is not None:
            self.directory.add_facts(facts)
        self.monitor = self._make_monitor()
        self.checkpoints = CheckpointStore(
            self.path / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
        )

    def _make_monitor(self) -> Monitor | None:
        if self.directory is None:
            return None
        return open_monitor(
            self.config,
            self.path,
            renderer=self.parts.renderer,
            is_moe=self.model_files.model.is_moe,
            is_one_process=self.is_one_process,
            warn=lambda text: self.view.note(text, "warning"),
        )

    async def sync(self) -> dict[str, float]:
        """The engine runs the trainer's weights from here on. Returns `sync/...`.

        If it does not take them, a checkpoint holds the update that they came from.
        """
        publisher = self.publisher
        is_first = publisher.version is None
        try:
            metrics = await publisher.publish(self.parts.trainer.version)
        except EngineError:
            if self.step:
                self.save()
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
        """What was sampled is this run's, and the device is the trainer's from here on."""
        engine = self.parts.engine
        await engine.check_lease()
        if self.config.engine.share_device:
            await engine.sleep()
        elif self.takes_turns:
            await engine.pause()

    @property
    def takes_turns(self) -> bool:
        """Whether an engine with requests under way waits while the trainer trains: it runs the
        weights that change, in the same interpreter."""
        is_ahead, publisher = self.config.max_staleness > 0, self.parts.publisher
        return is_ahead and publisher is not None and publisher.form == "shared"

    @property
    def trains_policy(self) -> bool:
        """Whether the next step trains the policy, and not the critic alone."""
        return self.step >= self.config.critic.steps_before_policy

    @property
    def is_one_process(self) -> bool:
        """Whether sampler and trainer are one process over one set of ops and weights: what is
        normal then does not change with a fault that is injected into it."""
        config, engine = self.config, self.parts.engine
        return config.is_in_step or (
            engine.capabilities.shares_weights and not config.max_staleness
        )

    async def test(self) -> dict[str, float]:
        """An evaluation of the policy as it stands; its episodes are recorded too."""
        metrics, played = await self.tester.test()
        for name, groups in played.items():
            self.record(max(self.step - 1, 0), groups, split=name)
        self.tested_at, self.test_reward = self.step, metrics[self.tester.criterion]
        return metrics

    def record(
        self,
        step: int,
        groups: Sequence[Group],
        *,
        samples: Sequence[Sample] = (),
        split: str = TRAIN,
    ) -> None:
        """Stores trajectories; see `RunDirectory.write_trajectories`."""
        if self.directory is not None:
            self.directory.write_trajectories(step, groups, samples=samples, split=split)

    def is_stop_asked(self) -> bool:
        """Whether a signal to any of several processes asked for an end between two steps. One
        process alone is interrupted where it is."""
        return self.ranks is not None and self.ranks.is_stop_asked()

    def log(self, row: Mapping[str, Any]) -> None:
        """Writes and shows a row. Of one process with what happened in its engine since the last
        one; ranks may be at different places when one of them fails, and ask each other before.
        """
        if self.ranks is None:
            row = {**self.engine_metrics(), **row}
        if self.directory is not None:
            self.directory.log(row)
        self.loggers.log(row)
        self.view.step(row)

    def engine_metrics(self) -> dict[str, float]:
        """`engine/...` since the last call: of several ranks, in all their engines."""
        engine = self.parts.engine
        found = engine.take_metrics()
        total: Counter[str] = Counter()
        for of_rank in [found] if self.ranks is None else self.ranks.gather(found):
            total.update(of_rank)
        return {f"engine/{name}": value for name, value in total.items()}

    def is_critical(self, row: Mapping[str, Any]) -> bool:
        family, is_one_process = self.model_files.model.family, self.is_one_process
        alarm = mismatch_alarm(row, family, is_one_process=is_one_process)
        return alarm.level == "critical" or row.get("doctor/causes", 0) > 0

    def watch(
        self, rows: Sequence[Sample], groups: Sequence[Group], metrics: Mapping[str, Any]
    ) -> dict[str, float]:
        """`doctor/...` of a step's rows, as they were trained: one process looks, all know."""
        if not self.config.doctor.rows:
            return {}
        found: dict[str, float] = {}
        if self.monitor is not None and rows:
            version = int(metrics["staleness/version"])
            found = self.monitor.look(self.step, rows, groups, version=version)
        return found if self.ranks is None else self.ranks.from_leader(found)

    def save(self) -> None:
        """A checkpoint of everything that the next step depends on."""
        state = {
            "step": self.step,
            "elapsed_seconds": self.elapsed_seconds,
            "tested_at": self.tested_at,
            "tasks": self.buffer.state_before(self.step),
        }
        metric = self.test_reward if self.tested_at == self.step else None
        self.checkpoints.save(
            self.step, self.parts.trainer, state, metric=metric, critic=self.parts.critic
        )

    def restore_newest(self) -> None:
        newest = self.checkpoints.latest() if self.directory is not None else None
        if self.ranks is not None:
            newest = self.ranks.from_leader(newest)
        if newest is None:
            self._rewind(-2)
            self.view.note("no checkpoint yet: the run begins again.", "warning")
            return
        self.restore(newest, critic=self.parts.critic)
        is_complete = self.step >= self.config.steps and self.tested_at == self.step
        if not is_complete:  # the last evaluation's row stands after the last step's
            self._rewind(self.step - 1)

    def _rewind(self, last_step: int) -> None:
        if self.directory is not None:
            self.directory.rewind(last_step)

    def restore_origin(self, checkpoint: Path) -> None:
        """Goes on from another run's checkpoint; a critic that it has not begins anew."""
        has_critic = (checkpoint / CRITIC).is_dir()
        if self.parts.critic is not None and not has_critic:
            self.view.note(f"{checkpoint} has no critic: this run's begins anew.", "warning")
        self.restore(checkpoint, critic=self.parts.critic if has_critic else None)

    def restore(self, checkpoint: Path, *, critic: Critic | None) -> None:
        state = self.checkpoints.load(checkpoint, self.parts.trainer, critic=critic)
        self.step, self.elapsed_seconds = state["step"], state["elapsed_seconds"]
        self.tested_at = state["tested_at"]
        self.buffer.tasks.load_state_dict(state["tasks"])

    def header(self) -> RunHeader:
        return RunHeader(
            name=self.path.name,
            num_steps=self.config.steps,
            first_step=self.step,
            architecture=self.model_files.model.family,
            is_one_process=self.is_one_process,
            lines=(
                *plan(
                    self.config,
                    has_support=self.parts.engine.capabilities.has_support,
                    numerics=self.parts.numerics,
                    num_trained=self.parts.trainer.num_trained,
                ),
                f"sync       {self.publisher.describe()}",
                f"run        {self.path}",
            ),
        )

    def explain(self, broken: UnequalTokenError, rows: Sequence[Sample]) -> str:
        """What broke the contract: the token, and the op where sampler and trainer part if both are
        run again on its row; if they do not, again in the company of some of the other rows."""
        if self.directory is None:
            return str(broken)
        sample, trainer = broken.sample, self.parts.trainer
        is_sharded = mesh_of(trainer.model.embedding) is not None
        model = self.parts.model if is_sharded else trainer.model  # the same weights
        others = [row.token_ids for row in rows if row.id != sample.id][:NUM_COMPANIONS]
        parting = None
        for company in ([], others):
            again = bisect(
                model, sample.token_ids, company=company,
                is_sampled=~np.isnan(sample.columns["rollout_logprobs"]),
                temperature=trainer.temperature, support=sample.ragged.get("support"),
                recorded=sample.columns["rollout_logprobs"],
            )  # fmt: skip
            parting = again or parting
            if parting is not None and parting.ops:
                break
        found = (
            "Run again by itself, the row gives record and both sides the same bits: what broke it "
            "is in the company it had."
            if parting is None
            else parting.describe()
        )
        return (
            f"{broken} {found} Nothing was updated; {self.path} holds the trajectory: "
            f"lockstep replay '{self.path}#{sample.id}' --score"
        )

    def write_report(self) -> None:
        write_report(
            [load_run(self.path)],
            self.path / "report.html",
            vocabulary=vocabulary_of(to_dict(self.config)),
        )

    def summary(self) -> dict[str, Any]:
        """The last figures of metrics.jsonl, for the command's last line."""
        rows = load_run(self.path).metrics
        rewards = [r["reward/mean"] for r in rows if "reward/mean" in r]
        last = rewards[-10:]
        evaluations = [r for r in rows if any(k.startswith("eval/") for k in r)]
        out: dict[str, Any] = {"steps": self.step, "elapsed_seconds": self.elapsed_seconds}
        if last:
            out |= {"reward_first": rewards[0], "reward_last_10": sum(last) / len(last)}
        if evaluations:
            out |= {k: v for k, v in evaluations[-1].items() if k.startswith("eval/")}
        return out


def make_gateway(
    config: Config, parts: Parts, view: View, ranks: Ranks | None = None
) -> RunGateway:
    """Of a run, for the agents of its task that ask over HTTP; nothing listens yet."""
    return RunGateway(
        config.gateway,
        parts.renderer,
        model=Path(config.model).name,
        rank=0 if ranks is None else ranks.rank,
        note=lambda text: view.note(text),
    )


@dataclass(slots=True)
class Tester:
    """Plays the same held-out tasks each time: sampled as in training, and greedily."""

    config: Config
    parts: Parts
    view: View
    gateway: RunGateway
    ranks: Ranks | None = None
    """Those who share the tasks."""
    slots: EpisodeSlots | None = None
    """Shared with the episodes that are sampled for training."""
    tasks: list[Task] = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        source = config.task.tasks(split="eval", seed=config.seed)
        self.tasks = source.take(config.evaluation.num_tasks)
        if not self.tasks:
            raise DataError("the task source has no held-out task to evaluate on.")

    @property
    def criterion(self) -> str:
        """The metric that the best checkpoint is chosen by."""
        return f"eval/sampled/mean@{self.config.evaluation.num_samples}"

    async def test(self) -> tuple[dict[str, float], dict[str, list[Group]]]:
        config = self.config
        arms = [("sampled", config.evaluation.num_samples, config.agent.temperature)]
        if config.evaluation.greedy:
            arms.append(("greedy", 1, 0.0))
        metrics: dict[str, float] = {}
        played: dict[str, list[Group]] = {}
        for name, num_samples, temperature in arms:
            found, groups = await evaluate(
                self.parts.engine,
                self.parts.renderer,
                config.task,
                config.agent,
                self.tasks,
                name=name,
                num_samples=num_samples,
                temperature=temperature,
                max_tokens=config.max_tokens,
                run_seed=config.seed,
                success_reward=config.evaluation.success_reward,
                on_progress=lambda done, total, name=name: self.view.phase(
                    f"evaluating ({name})", done, total
                ),
                ranks=self.ranks,
                slots=self.slots,
                gateway=self.gateway.open,
            )
            where = f"evaluation ({name})"
            check_failures(groups, config.max_failed_share, where=where)
            metrics |= found
            played[name] = groups
        return metrics, played
