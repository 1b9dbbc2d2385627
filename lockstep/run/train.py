"""The training loop: eight verbs in order, and no mechanism.

sample, score     agent/loop.py     episodes over the engine, token in, token out; agent/buffer.py
                                  holds them, and samples ahead of the trainer if it may
record            store/            trajectories and metrics, append-only
align             training/rows.py     episodes to rows with advantages; packing lays them out
measure, correct, update            training/trainer.py, in one pass over the rows or in two
sync              sync/             the engine runs the new weights, by version, verified
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lockstep.agent.loop import Budget, collect, training_sampling
from lockstep.agent.rescoring import Rescorer
from lockstep.agent.tasks import derive_seed
from lockstep.config import differences, to_dict
from lockstep.errors import ContractError, RolloutError
from lockstep.launch.config import ParallelConfig
from lockstep.launch.processes import on_all_ranks
from lockstep.launch.ranks import Ranks
from lockstep.observe.live import SilentView, open_view
from lockstep.observe.loggers import open_loggers
from lockstep.run.build import build, checkpoint_of, resolve_device
from lockstep.run.hooks import check_same_hooks, current_hooks
from lockstep.run.preflight import preflight
from lockstep.run.step_metrics import check_failures, describe_first_step, step_metrics
from lockstep.run.training_run import Tester, TrainingRun, make_gateway
from lockstep.run_config import Config
from lockstep.store.run import Outcome, RunDirectory, Status, default_run_path, load_run
from lockstep.training.averaging import average_rows
from lockstep.training.correcting import UnequalTokenError
from lockstep.training.rows import rows_for_training
from lockstep.training.staleness import sort_by_age
from lockstep.types import Group, Sample, Task


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
    from its newest checkpoint, to the same bits as without a stop. start: (run, step) whose
    weights, optimizer and task stream a new run goes on from; what differs in the settings is
    recorded. Raises ConfigError, DataError or CheckpointError before a model is loaded where that
    can be known.
    """
    preflight(config)
    return on_all_ranks(
        config.parallel, _train, config,
        device="cpu" if config.placement.is_elsewhere() else resolve_device(config),
        placement=config.placement, engines=config.engine.workers,
        out=out, resume=resume, start=start, view=view,
    )  # fmt: skip


def _train(
    ranks: Ranks | None,
    config: Config,
    *,
    out: str | Path | None,
    resume: bool,
    start: tuple[Path, int | None] | None,
    view: Literal["live", "json"],
) -> Outcome:
    """What each process of a run does: the first one writes and shows, all others follow."""
    is_leader = ranks is None or ranks.is_leader
    path = Path(out) if out else default_run_path(config.name)
    if ranks is not None:
        ranks.check_same(to_dict(config))
        path = ranks.from_leader(path)
    model_files = preflight(config)
    facts: dict[str, Any] = {
        "architecture": model_files.model.architecture,
        "family": model_files.model.family,
        "faults": list(current_hooks().recorded),
    }
    if start is not None:
        parent = load_run(start[0])
        changed = differences(parent.config, to_dict(config))
        origin = checkpoint_of(parent, start[1])
        facts["from"] = {"checkpoint": str(origin), "changed": changed}
    directory = None
    if is_leader and resume:
        check_same_hooks(load_run(path).environment)
        directory = RunDirectory.open(path, record=config.record, facts=facts)
    elif is_leader:
        directory = RunDirectory.create(path, to_dict(config), record=config.record, facts=facts)
    shown = open_view(is_json=view == "json") if is_leader else SilentView()
    loggers = open_loggers(
        config.record.loggers if is_leader else (),
        run_path=path,
        project=config.record.project,
        config=to_dict(config),
        warn=lambda text: shown.note(text, "warning"),
    )
    with directory or contextlib.nullcontext():
        parts = build(
            config, model_files, ranks=ranks,
            scratch=path, on_wait=lambda text: shown.note(text),
        )  # fmt: skip
        run = TrainingRun(config, model_files, parts, path, directory, shown, loggers, ranks)
        if resume:
            run.restore_newest()
        elif start is not None:
            run.restore_origin(origin)
        shown.start(run.header())
        try:
            status = asyncio.run(run_steps(run))
        except KeyboardInterrupt:
            if ranks is not None:  # the second one: others are at some other place
                raise
            status: Status = "interrupted"
            run.save()
        finally:
            loggers.close()
            shown.close()
    if not is_leader:
        return Outcome(path, status, {})
    run.write_report()
    return Outcome(path, status, run.summary())


def evaluate_run(config: Config, path: Path, *, step: int | None) -> tuple[dict[str, float], str]:
    """Plays the held-out tasks with a run's checkpoint. Returns (metrics, checkpoint name)."""
    checkpoint = checkpoint_of(load_run(path), step)
    config = replace(config, parallel=ParallelConfig())  # one process is enough to play
    model_files = preflight(config, is_training=False)
    parts = build(config, model_files, weights=checkpoint / "policy", is_training=False)
    shown = open_view()
    gateway = make_gateway(config, parts, shown)
    tester = Tester(config, parts, shown, gateway)

    async def play() -> dict[str, float]:
        try:
            if parts.publisher is not None:
                await parts.publisher.publish(parts.trainer.version)
            return (await tester.test())[0]
        finally:
            await gateway.close()
            await config.task.close()
            await parts.engine.close()
            if parts.publisher is not None:
                parts.publisher.close()

    metrics = asyncio.run(play())
    shown.close()
    return metrics, checkpoint.name


async def run_steps(run: TrainingRun) -> Status:
    """All steps that are left. Saves at its end, and at each stop that was asked for."""
    try:
        await run.sync()
        return await _steps(run)
    finally:
        await run.buffer.close()
        await run.gateway.close()
        await run.config.task.close()
        await run.parts.engine.close()
        run.publisher.close()


async def _steps(run: TrainingRun) -> Status:
    config = run.config
    if run.step == 0 and run.tested_at is None and config.evaluation.at_start:
        run.log({"step": -1, **await run.test(), **run.engine_metrics()})
    while run.step < config.steps:
        if run.is_stop_asked():
            run.save()
            return "interrupted"
        row = await one_step(run)
        if row is None:
            run.view.note(f"the tasks ended before step {run.step}.", "warning")
            break
        if run.is_critical(row) and config.doctor.on_critical == "stop":
            run.save()
            return "stopped"
    if run.tested_at != run.step:
        run.log({"step": run.step, **await run.test(), **run.engine_metrics()})
    run.save()
    return "done"


async def one_step(run: TrainingRun) -> dict[str, Any] | None:
    """sample, score, align, measure, correct, update, record, sync. None if no task is left."""
    config, step = run.config, run.step
    began = time.perf_counter()
    batch = await run.buffer.take(step, partial(sample, run))
    groups = batch.groups
    if not groups:
        return None
    sampled = time.perf_counter()
    try:
        check_failures(groups, config.max_failed_share, where=f"step {step}")
    except RolloutError:
        run.record(step, groups)
        run.save()  # the updates so far, and the state that samples this step again
        raise
    run.view.phase("training")
    rows, sampled_rows = [], []
    try:
        await run.leave_engine()
        rows, sampled_rows, metrics = await run.buffer.beside(partial(align, run, groups))
        metrics |= await run.buffer.beside(partial(update, run, rows, sampled_rows))
        metrics |= await run.buffer.beside(partial(run.watch, rows, groups, metrics))
    except UnequalTokenError as broken:
        run.save()  # the state that samples this step again
        raise ContractError(run.explain(broken, rows)) from broken
    finally:
        # What is kept is what was sampled, whatever a hook has made of it for the trainer.
        run.record(step, groups, samples=sampled_rows)
    trained = time.perf_counter()
    for role in filter(None, (run.parts.trainer, run.parts.critic)):
        if role.last_skip:
            run.view.note(f"step {step}: {role.last_skip}", "warning")
    row = step_metrics(step, groups, sampled_rows, metrics)
    run.elapsed_seconds += trained - began
    row |= {
        "time/sample_seconds": batch.sample_seconds,
        "time/wait_seconds": batch.wait_seconds,
        "time/idle_seconds": run.buffer.take_idle_seconds(),
        "time/train_seconds": trained - sampled,
        "time/step_seconds": trained - began,
        "time/elapsed_seconds": run.elapsed_seconds,
    }
    run.step += 1
    try:
        row |= await run.sync()
        every = config.evaluation.every
        if every and run.step % every == 0 and run.step < config.steps:
            row |= await run.test()
        row |= run.engine_metrics()
    finally:  # an interrupt here must not lose the step, whose update is made
        run.log(row)
    is_due = config.checkpoint.every and run.step % config.checkpoint.every == 0
    if is_due or run.tested_at == run.step:
        await run.buffer.beside(run.save)
    return row


def align(
    run: TrainingRun, groups: Sequence[Group]
) -> tuple[list[Sample], list[Sample], dict[str, float]]:
    """Episodes to rows with advantages: those that are trained, and the same as they were sampled,
    before a hook has changed them; how old their tokens are by now, and how noisy."""
    config, parts = run.config, run.parts
    rows = rows_for_training(
        groups,
        config.advantage,
        control_ids=parts.renderer.tokenizer.control_ids,
        critic=parts.critic,
    )
    rows, metrics = sort_by_age(
        rows,
        version=parts.trainer.version,
        limit=config.max_staleness * config.trainer.updates_per_batch,
        over_stale=config.over_stale,
    )
    correction = config.chosen_correction
    if correction.behaviour == "averaged":
        metrics |= average_rows(
            rows, groups, average_sampling_pass=correction.average_sampling_pass
        )
    sampled_rows = rows
    log_probs = partial(parts.trainer.forward, column=None)
    rows = parts.hooks.change_rows(sampled_rows, parts.renderer, log_probs)
    if run.step == 0:
        run.view.note(describe_first_step(groups, rows))
    return rows, sampled_rows, metrics


def update(
    run: TrainingRun, rows: Sequence[Sample], sampled_rows: Sequence[Sample]
) -> dict[str, Any]:
    """measure, correct, update: the policy, and the critic if there is one. Returns the metrics.

    sampled_rows: the critic's, which no hook has changed.
    """
    if not rows:
        return {}
    config, trainer, critic = run.config, run.parts.trainer, run.parts.critic
    if run.trains_policy:
        metrics = trainer.update(rows, config.objective, config.chosen_correction)
    else:
        metrics = trainer.measure(rows, column="logprobs", is_checking=True).to_metrics("mismatch")
    run.parts.hooks.after_update(rows, partial(trainer.forward, column=None))
    if critic is not None:
        metrics |= critic.update(sampled_rows)
    every = config.trainer.measure_after_every
    if every and run.step % every == 0:
        metrics |= trainer.measure(rows).to_metrics("mismatch_after", by_part=False)
    return metrics


def make_rescorer(run: TrainingRun, step: int) -> Rescorer | None:
    """What scores the finished turns of `step` again, where the correction reads the average."""
    correction = run.config.chosen_correction
    if correction.behaviour != "averaged":
        return None
    return Rescorer(
        run.parts.engine,
        num_scorings=correction.rescorings,
        temperature=run.config.agent.temperature,
        max_in_flight=correction.rescorings_in_flight,
        seed=derive_seed(run.config.seed, "rescore", step),
    )


async def sample(
    run: TrainingRun, step: int, tasks: Sequence[Task], on_episode: Callable[[], None]
) -> list[Group]:
    """One group of scored episodes for each of these tasks, for training in `step`."""
    config = run.config
    return await collect(
        run.parts.engine,
        run.parts.renderer,
        lambda task: config.task.environment(task, config.agent),
        tasks,
        group_size=config.group_size,
        sampling=training_sampling(
            config.agent,
            run.parts.engine.capabilities,
            record_routes=config.trainer.routing_replay == "rollout",
        ),
        budget=Budget.of(config.agent, max_tokens=config.max_tokens),
        run_seed=config.seed,
        step=step,
        slots=run.slots,
        order=lambda: step - run.step,
        score_group=config.task.group_scorer(),
        rescorer=make_rescorer(run, step),
        gateway=run.gateway.open,
        on_progress=lambda _: on_episode(),
    )
