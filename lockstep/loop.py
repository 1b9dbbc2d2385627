"""The training loop: eight verbs in order, and no mechanism.

    sample, score     agent/loop.py     episodes over the engine, token in, token out
    record            store/            trajectories and metrics, append-only
    align             train/rows.py     episodes to rows with advantages; train/packing.py packs them
    measure, correct, update            train/trainer.py, in one pass over the rows
    sync              engines/          the engine runs the new weights, by version
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.agent.loop import Budget, collect, sampling_of
from lockstep.agent.tasks import TaskSource
from lockstep.build import Foundation, Parts, build, check_config, checkpoint_of, vocabulary_of
from lockstep.config import differences, to_dict
from lockstep.errors import DataError, RolloutError
from lockstep.evaluation import evaluate
from lockstep.observe.alarms import mismatch_alarm
from lockstep.observe.live import RunHeader, View, open_view
from lockstep.observe.loggers import GuardedLoggers, open_loggers
from lockstep.outcome import Outcome, Status
from lockstep.run_config import Config
from lockstep.step_metrics import check_failures, describe_first_step, step_metrics
from lockstep.store.run import RunDirectory, default_run_path, load_run
from lockstep.train.checkpoint import CheckpointStore
from lockstep.train.rows import rows_for_training
from lockstep.types import Group, Task

def train(
    config: Config,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    start: tuple[Path, int | None] | None = None,
    view: Literal["live", "json"] = "live",
) -> Outcome:
    """Trains as `config` says and returns where the run stands.

    out: the run directory; None makes runs/NAME-TIMESTAMP. resume: `out` holds a run that goes on
    from its newest checkpoint, to the same bits as without a stop. start: (run, step) whose weights,
    optimizer and task stream a new run goes on from; what differs in the settings is recorded.
    Raises ConfigError, DataError or CheckpointError before a model is loaded where that can be known.
    """
    foundation = check_config(config)
    path = Path(out) if out else default_run_path(config.name)
    facts: dict[str, Any] = {
        "architecture": foundation.model.architecture,
        "family": foundation.model.family,
        "is_one_process": True,
    }
    if start is not None:
        parent = load_run(start[0])
        changed = differences(parent.config, to_dict(config))
        origin = checkpoint_of(parent, start[1])
        facts["from"] = {"checkpoint": str(origin), "changed": changed}
    if resume:
        directory = RunDirectory.open(path, record=config.record, facts=facts)
    else:
        directory = RunDirectory.create(path, to_dict(config), record=config.record, facts=facts)
    shown = open_view(is_json=view == "json")
    loggers = open_loggers(
        config.record.loggers,
        run_path=path,
        project=config.record.project,
        config=to_dict(config),
        warn=lambda text: shown.note(text, "warning"),
    )
    with directory:
        run = TrainingRun(
            config, foundation, build(config, foundation), directory, shown, loggers
        )
        if resume:
            run.restore_newest()
        elif start is not None:
            run.restore(origin)
        shown.start(run.header())
        try:
            status = asyncio.run(run.steps())
        except KeyboardInterrupt:
            status: Status = "interrupted"
            run.save()
        finally:
            loggers.close()
            shown.close()
    run.write_report()
    return Outcome(path, status, run.summary())


def evaluate_run(config: Config, path: Path, *, step: int | None) -> tuple[dict[str, float], str]:
    """Plays the held-out tasks with a run's checkpoint. Returns (metrics, checkpoint name)."""
    checkpoint = checkpoint_of(load_run(path), step)
    foundation = check_config(config)
    parts = build(config, foundation, weights=checkpoint / "policy")
    shown = open_view()
    tester = Tester(config, parts, shown)
    metrics = asyncio.run(tester.test())[0]
    shown.close()
    return metrics, checkpoint.name


@dataclass(slots=True)
class TrainingRun:
    """One run in progress: the parts, the task stream and the counters that a checkpoint holds."""

    config: Config
    foundation: Foundation
    parts: Parts
    directory: RunDirectory
    view: View
    loggers: GuardedLoggers
    step: int = 0
    """The next step."""
    elapsed_seconds: float = 0.0
    """Since the run began, resumes included."""
    tasks: TaskSource = field(init=False)
    tester: Tester = field(init=False)
    checkpoints: CheckpointStore = field(init=False)
    tested_at: int | None = None
    """The step that the last evaluation preceded, and what it gave."""
    test_reward: float | None = None

    def __post_init__(self) -> None:
        config = self.config
        self.tasks = config.task.tasks(split="train", seed=config.seed)
        self.tester = Tester(config, self.parts, self.view)
        self.checkpoints = CheckpointStore(
            self.directory.path / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
        )

    async def steps(self) -> Status:
        """All steps that are left. Saves at its end, and at each stop that was asked for."""
        config = self.config
        if self.step == 0 and config.evaluation.at_start:
            self.log({"step": -1, **await self.test()})
        while self.step < config.steps:
            row = await self.one_step()
            if row is None:
                self.view.note(f"the tasks ended before step {self.step}.", "warning")
                break
            if self.is_critical(row) and config.mismatch.stop_on_critical:
                self.save()
                return "stopped"
        if self.tested_at != self.step:
            self.log({"step": self.step, **await self.test()})
        self.save()
        return "done"

    async def one_step(self) -> dict[str, Any] | None:
        """sample, score, align, measure, correct, update, record, sync. None if no task is left."""
        config, parts, step = self.config, self.parts, self.step
        began = time.perf_counter()
        groups = await self.sample()
        if not groups:
            return None
        sampled = time.perf_counter()
        try:
            check_failures(groups, config.max_failed_share, where=f"step {step}")
        except RolloutError:
            self.directory.write_trajectories(step, groups)
            raise
        self.view.phase("training")
        rows = rows_for_training(groups, config.advantage)
        if step == 0:
            self.view.note(describe_first_step(groups, rows))
        try:
            metrics = parts.trainer.update(rows, config.objective) if rows else {}
            every = config.trainer.measure_after_every
            if rows and every and step % every == 0:
                metrics |= parts.trainer.measure_after(rows)
        finally:
            self.directory.write_trajectories(step, groups, samples=rows)
        trained = time.perf_counter()
        if parts.trainer.last_skip:
            self.view.note(f"step {step}: {parts.trainer.last_skip}", "warning")
        row = step_metrics(step, groups, rows, metrics)
        self.elapsed_seconds += trained - began
        row |= {
            "time/sample_seconds": sampled - began,
            "time/train_seconds": trained - sampled,
            "time/step_seconds": trained - began,
            "time/elapsed_seconds": self.elapsed_seconds,
        }
        self.step += 1
        try:
            await parts.engine.load_weights(None, version=parts.trainer.version)
            every = config.evaluation.every
            if every and self.step % every == 0 and self.step < config.steps:
                row |= await self.test()
        finally:  # an interrupt here must not lose the step, whose update is made
            self.log(row)
        is_due = config.checkpoint.every and self.step % config.checkpoint.every == 0
        if is_due or self.tested_at == self.step:
            self.save()
        return row

    async def sample(self) -> list[Group]:
        """One group of scored episodes for each of the next tasks; [] if none is left."""
        config, before = self.config, self.tasks.state_dict()
        tasks = self.tasks.take(config.groups_per_step)
        total, done = len(tasks) * config.group_size, 0

        def progress(_: object) -> None:
            nonlocal done
            done += 1
            self.view.phase("sampling", done, total)

        self.view.phase("sampling", 0, total)
        try:
            return await collect(
                self.parts.engine,
                self.parts.renderer,
                lambda task: config.task.environment(task, config.agent),
                tasks,
                group_size=config.group_size,
                sampling=sampling_of(config.agent),
                budget=Budget.of(config.agent, max_tokens=config.max_tokens),
                run_seed=config.seed,
                step=self.step,
                max_in_flight=config.agent.max_in_flight,
                score_group=config.task.group_scorer(),
                on_progress=progress,
            )
        except BaseException:  # an interrupted step is sampled again, with the same tasks
            self.tasks.load_state_dict(before)
            raise

    # -- around the verbs -------------------------------------------------------------------------

    async def test(self) -> dict[str, float]:
        """An evaluation of the policy as it stands; its episodes are recorded too."""
        metrics, played = await self.tester.test()
        for name, groups in played.items():
            self.directory.write_trajectories(max(self.step - 1, 0), groups, split=name)
        self.tested_at, self.test_reward = self.step, metrics[self.tester.criterion]
        return metrics

    def log(self, row: Mapping[str, Any]) -> None:
        self.directory.log(row)
        self.loggers.log(row)
        self.view.step(row)

    def is_critical(self, row: Mapping[str, Any]) -> bool:
        alarm = mismatch_alarm(row, self.foundation.model.family, is_one_process=True)
        return alarm.level == "critical"

    def save(self) -> None:
        """A checkpoint of everything that the next step depends on."""
        state = {
            "step": self.step,
            "elapsed_seconds": self.elapsed_seconds,
            "tasks": self.tasks.state_dict(),
        }
        metric = self.test_reward if self.tested_at == self.step else None
        self.checkpoints.save(self.step, self.parts.trainer, state, metric=metric)

    def restore_newest(self) -> None:
        newest = self.checkpoints.latest()
        if newest is None:
            self.directory.rewind(-2)
            self.view.note("no checkpoint yet: the run begins again.", "warning")
            return
        self.restore(newest)
        self.directory.rewind(self.step - 1)

    def restore(self, checkpoint: Path) -> None:
        state = self.checkpoints.load(checkpoint, self.parts.trainer)
        self.step, self.elapsed_seconds = state["step"], state["elapsed_seconds"]
        self.tasks.load_state_dict(state["tasks"])
        asyncio.run(self.parts.engine.load_weights(None, version=self.parts.trainer.version))

    def header(self) -> RunHeader:
        from lockstep.build import plan

        return RunHeader(
            name=self.directory.path.name,
            num_steps=self.config.steps,
            first_step=self.step,
            architecture=self.foundation.model.family,
            is_one_process=True,
            lines=(*plan(self.config), f"run        {self.directory.path}"),
        )

    def write_report(self) -> None:
        from lockstep.report.page import write_report

        write_report(
            [load_run(self.directory.path)],
            self.directory.path / "report.html",
            vocabulary=vocabulary_of(to_dict(self.config)),
        )

    def summary(self) -> dict[str, Any]:
        """The last figures of metrics.jsonl, for the command's last line."""
        rows = load_run(self.directory.path).metrics
        rewards = [r["reward/mean"] for r in rows if "reward/mean" in r]
        last = rewards[-10:]
        evaluations = [r for r in rows if any(k.startswith("eval/") for k in r)]
        out: dict[str, Any] = {"steps": self.step, "elapsed_seconds": self.elapsed_seconds}
        if last:
            out |= {"reward_first": rewards[0], "reward_last_10": sum(last) / len(last)}
        if evaluations:
            out |= {k: v for k, v in evaluations[-1].items() if k.startswith("eval/")}
        return out


@dataclass(slots=True)
class Tester:
    """Plays the same held-out tasks each time: sampled as in training, and greedily."""

    config: Config
    parts: Parts
    view: View
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
            )
            where = f"evaluation ({name})"
            check_failures(groups, config.max_failed_share, where=where)
            metrics |= found
            played[name] = groups
        return metrics, played
