"""The training loop: eight verbs in order, and no mechanism.

sample, score       agent/loop.py          episodes over the engine, token in, token out;
                                           agent/buffer.py holds them, and samples ahead
record              store/                 trajectories and metrics, append-only
align               training/rows.py       episodes to rows with advantages
measure, correct, update                   training/trainer.py, in one pass over the rows or in two
sync                sync/                  the engine runs the new weights, by version, verified
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from lockstep.agent.buffer import Batch
from lockstep.agent.gateway.opening import RunGateway
from lockstep.agent.guard import described, guarded
from lockstep.agent.tasks import derive_seed, seed_globals
from lockstep.errors import ContractError, OutOfMemoryError, RolloutError, is_out_of_memory, named
from lockstep.launch.event_loop import run_to_end
from lockstep.launch.ranks import Ranks
from lockstep.models.config import ModelConfig
from lockstep.observe.live import View, open_view
from lockstep.recipes.fitting import usual_rate
from lockstep.run.build import Parts, SharedBase, load_model
from lockstep.run.episodes import Tester, play_tasks
from lockstep.run.preflight import ModelFiles, read_model_files
from lockstep.run.served import build_policies
from lockstep.run.step_metrics import check_failures, health_metrics, step_metrics
from lockstep.run.training_run import RunOptions, TrainingRun, make_gateway, open_run
from lockstep.run_config import Config
from lockstep.store.checkpoints import checkpoint_of
from lockstep.store.run import Outcome, Status, load_run
from lockstep.training.averaging import average_rows
from lockstep.training.correcting import UnequalTokenError
from lockstep.training.credit import credit_metrics
from lockstep.training.learner import uninterrupted
from lockstep.training.rows import punish_length, rows_for_training, sort_by_age, without_over_long
from lockstep.types import Group, Sample, Task

T = TypeVar("T")

TASK_CLOSE_SECONDS = 60.0
"""Seconds for a task to close the resources that its episodes shared."""


def train_on_rank(
    ranks: Ranks | None, config: Config, model_files: ModelFiles | None, options: RunOptions
) -> Outcome:
    """The work of one process of a run.

    An interrupt saves and ends with the status "interrupted"; an error saves the updates that no
    checkpoint holds, and is raised again.
    """
    model_files = model_files or read_model_files(config)
    with open_run(ranks, config, model_files, options) as run:
        try:
            run.status = run_to_end(run_steps(run))
        except KeyboardInterrupt:
            if ranks is not None:  # a second Ctrl-C: the others are at some other place
                raise
            run.status = "interrupted"
            run.view.note("interrupted: saving a checkpoint.")
            with uninterrupted():  # a second Ctrl-C ends the process after that
                run.save_if_whole()
        except Exception as error:
            if ranks is None or isinstance(error, RolloutError):  # which all ranks raise
                run.save_unsaved()
            raise
    return Outcome(run.path, run.status, {}) if run.directory is None else run.finish()


async def run_steps(run: TrainingRun) -> Status:
    """All steps that are left. Saves at the end, and at each stop that was asked for."""
    try:
        synced = await run.sync()
        if run.row:
            run.row |= synced
        return await _steps(run)
    finally:
        await run.buffer.close()
        await _close(run.config, run.parts, run.gateway)


async def _steps(run: TrainingRun) -> Status:
    config = run.config
    if run.step == 0 and run.tested_at is None and config.evaluation.at_start:
        await run.test(own_row=-1)
    while run.row or run.step < config.steps:
        # One process alone is interrupted where it is.
        if run.ranks is not None and run.ranks.is_stop_asked():
            run.save()
            return "interrupted"
        began = time.perf_counter()
        row = await (end_step(run) if run.row else one_step(run))
        run.expect_alike(time.perf_counter() - began)
        if row is None:
            run.view.note(f"the tasks ended before step {run.step}.", "warning")
            break
        if reason := run.stop_reason(row):
            run.view.note(f"stopped after step {row['step']}: {reason}.", "critical")
            run.save()
            return "stopped"
    if run.tested_at != run.step:
        await run.test(own_row=run.step)
    run.save()
    return "done"


async def one_step(run: TrainingRun) -> dict[str, Any] | None:
    """sample, score, align, measure, correct, update, record, sync. None if no task is left."""
    step, in_thread, began = run.step, run.buffer.in_thread, time.perf_counter()
    seed_globals(run.config.seed, "step", step)
    torch.manual_seed(derive_seed(run.config.seed, "torch", step))
    batch = await run.buffer.take(step, partial(sample, run))
    if not (groups := [part for group in batch.groups for part in group.by_seat()]):
        return None
    sampled, played = time.perf_counter(), [*groups, *batch.replaced]
    with kept_on_error(run, played) as sampled_rows:
        check_failures(played, run.config.max_failed_share, where=f"step {step}")
        run.view.phase("training")
        version, signal = run.parts.trainer.version, signal_metrics(run, batch)
        await run.leave_engine()
        rows, metrics = await train_policies(run, groups, sampled_rows)
        with uninterrupted():  # a step is kept with its episodes and its row, or made again
            run.record(step, played, samples=sampled_rows)
            row = step_metrics(step, groups, sampled_rows, metrics) | signal
            row |= health_row(run, groups)
            row["tokens/sampled"] += signal.get("tokens/replaced", 0)
            try:
                look = partial(run.watch, step, rows, sampled_rows, groups, version=version)
                row |= await in_thread(look)
            finally:  # an error there says nothing about the update, which is whole
                run.advance(row)
            row |= time_metrics(run, batch, began=began, sampled=sampled)
    row |= await run.sync()
    return await end_step(run)


@contextmanager
def kept_on_error(run: TrainingRun, played: Sequence[Group]) -> Generator[list[Sample]]:
    """Yields a list for the sampled rows of a step. If an error ends the step, its episodes are
    stored with these rows. The errors of a step say how to go on."""
    step, rows = run.step, list[Sample]()
    try:
        yield rows
    except UnequalTokenError as broken:
        run.save_if_whole()  # the state that samples this step again
        raise ContractError(
            f"{broken} {run.undone}; {run.path} holds the trajectory: "
            f"`lockstep replay '{run.path}#{broken.sample.id}'` shows it, and "
            f"`lockstep doctor {run.path} --model own` scores all rows of the step again."
        ) from broken
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) or run.step > step:
            raise
        budget, least = run.config.trainer.max_tokens_per_microbatch, run.config.max_tokens
        raise OutOfMemoryError(
            f"step {step} needs more memory than there is ({named(error)}). {run.undone}; "
            f"the steps before it are in {run.path}. Go on from there with a smaller "
            f"trainer.max_tokens_per_microbatch (it is {budget}; max_tokens={least} is the least), "
            f"or with trainer.recompute=blocks: lockstep train from={run.path}@{step} ..."
        ) from error
    finally:
        if run.step == step:
            run.record(step, played, samples=rows)


async def train_policies(
    run: TrainingRun, groups: Sequence[Group], sampled_rows: list[Sample]
) -> tuple[list[Sample], dict[str, Any]]:
    """align, measure, correct, update: every policy of the run. Returns the rows that the first one
    was trained on, and the metrics. Adds the rows as they were sampled to `sampled_rows`."""
    in_thread, trained, figures = run.buffer.in_thread, list[Sample](), dict[str, Any]()
    for seat, parts in {"": run.parts, **run.parts.own}.items():
        played = played_by(seat, groups) if seat else groups
        rows, own_rows, metrics = await in_thread(partial(align, run, played, parts))
        sampled_rows += own_rows
        if parts.teachers is not None:
            metrics |= await parts.teachers.score(rows, groups, parts.trainer, in_thread)
        metrics |= await in_thread(partial(update, run, rows, own_rows, parts))
        room = f"policy/{seat}/" if seat else ""
        figures |= {f"{room}{name}": value for name, value in metrics.items()}
        trained = trained if seat else rows
    return trained, figures


def time_metrics(
    run: TrainingRun, batch: Batch, *, began: float, sampled: float
) -> dict[str, float]:
    """The seconds of a step that ends now. began, sampled: when it began, and had its episodes."""
    trained = time.perf_counter()
    run.elapsed_seconds += trained - began
    return {
        "time/sample_seconds": batch.sample_seconds,
        "time/wait_seconds": batch.wait_seconds,
        "time/idle_seconds": run.buffer.take_idle_seconds(),
        "time/train_seconds": trained - sampled,
        "time/step_seconds": trained - began,
        "time/elapsed_seconds": run.elapsed_seconds,
    }


async def end_step(run: TrainingRun) -> dict[str, Any]:
    """test, log: what an interrupt or an error may have left of a step, whose update is made."""
    row, step = run.row, run.step
    is_due = is_multiple(step, run.config.evaluation.every) and step < run.config.steps
    if is_due and run.tested_at != step:
        await run.test()
    with uninterrupted():
        run.log(row | run.engine_metrics())
        run.row = {}
    if is_multiple(step, run.config.checkpoint.every) or run.tested_at == step:
        await run.buffer.in_thread(run.save)
    return row


def is_multiple(step: int, every: int) -> bool:
    """True if an event that happens every `every` steps (0: never) happens at this step."""
    return every > 0 and step % every == 0


def signal_metrics(run: TrainingRun, batch: Batch) -> dict[str, float]:
    """Number and cost of replaced groups. Also records the tasks' difficulty."""
    found: dict[str, float] = {}
    if run.config.signal.max_extra_tasks:
        found = {
            "signal/replaced": float(len(batch.replaced)),
            "signal/missing": float(sum(not group.has_signal for group in batch.groups)),
            "tokens/replaced": float(
                sum(t.num_sampled_tokens for group in batch.replaced for t in group.trajectories)
            ),
        }
    if run.difficulty is not None:
        found |= run.difficulty.observe([*batch.groups, *batch.replaced])
    return found


def health_row(run: TrainingRun, groups: Sequence[Group]) -> dict[str, float]:
    """The figures of the health line. Also records examples in words."""
    config, model = run.config, run.parts.model_files.model
    found, reasons = health_metrics(
        groups,
        config.agent,
        compares=config.learns_from_rewards and config.advantage.compares_in_group,
        decode=run.parts.renderer.tokenizer.decode,
    )
    run.health.reasons.update(reasons)
    if isinstance(model, ModelConfig):
        found["train/lr_to_usual"] = config.trainer.lr / usual_rate(config, model)
    if not config.learns_from_rewards:
        del found["episodes/same_reward"]
    return found


def played_by(seat: str, groups: Sequence[Group]) -> list[Group]:
    """The groups of the seat's own policy, to be trained as the run's policy is."""
    return [
        Group(task=group.task, trajectories=[replace(t, policy="") for t in group.trajectories])
        for group in groups
        if group.trajectories[0].policy == seat
    ]


def align(
    run: TrainingRun, groups: Sequence[Group], parts: Parts
) -> tuple[list[Sample], list[Sample], dict[str, float]]:
    """Turns episodes into rows with advantages. Returns the rows to train, the same rows as they
    were sampled, before a hook changed them, and metrics of the tokens' age and noise."""
    config = run.config
    rows = rows_for_training(
        groups,
        config.advantage,
        control_ids=parts.renderer.tokenizer.control_ids,
        critic=parts.critic,
        credit=config.credit,
    )
    rows, metrics = sort_by_age(
        rows,
        version=parts.trainer.version,
        limit=config.max_staleness * config.trainer.updates_per_batch,
        over_stale=config.over_stale,
    )
    metrics |= credit_metrics(groups, config.credit)
    if config.chosen_correction.rescorings:
        metrics |= average_rows(rows, groups)
    if config.signal.over_long == "drop":
        rows, metrics["signal/over_long_rows"] = without_over_long(rows, groups)
    sampled_rows = rows
    log_probs = partial(parts.trainer.forward, column=None)
    rows = parts.hooks.change_rows(sampled_rows, parts.renderer, log_probs)
    return rows, sampled_rows, metrics


def update(
    run: TrainingRun, rows: Sequence[Sample], sampled_rows: Sequence[Sample], parts: Parts
) -> dict[str, Any]:
    """measure, correct, update: the policy, and the critic if there is one. Returns the metrics.

    sampled_rows: the critic's, which no hook has changed.
    """
    if not rows:
        return {}
    config, trainer, critic = run.config, parts.trainer, parts.critic
    if run.step >= config.critic.steps_before_policy:
        metrics = trainer.update(rows, config.objective, config.chosen_correction)
    else:
        metrics = trainer.measure(rows, column="logprobs", is_checking=True).to_metrics("mismatch")
    parts.hooks.after_update(rows, partial(trainer.forward, column=None))
    if critic is not None:
        metrics |= critic.update(sampled_rows)
    if is_multiple(run.step, config.trainer.measure_after_every):
        metrics |= trainer.measure(rows).to_metrics("mismatch_after", by_part=False)
    for learner in filter(None, (trainer, critic)):
        if learner.last_skip:
            run.view.note(f"step {run.step}: {learner.last_skip}", "warning")
    return metrics


async def sample(
    run: TrainingRun, step: int, tasks: Sequence[Task], on_episode: Callable[[], None]
) -> list[Group]:
    """One group of scored episodes for each of these tasks, for training in `step`."""
    groups = await play_tasks(
        run.config,
        run.parts,
        tasks,
        step=step,
        slots=run.slots,
        order=lambda: step - run.step,
        is_rescored=True,
        gateway=run.gateway.open,
        on_progress=lambda _: on_episode(),
    )
    if width := run.config.signal.length_penalty_tokens:
        every = (each for group in groups for each in group.trajectories)
        trained = {"", *run.parts.own}
        for trajectory in (each for each in every if each.policy in trained):
            punish_length(trajectory, max_tokens=run.config.max_tokens, width=width)
    return groups


def play_checkpoint(
    config: Config, model_files: ModelFiles, path: Path, *, step: int | None
) -> tuple[dict[str, float], str]:
    """Plays the held-out tasks with a run's checkpoint: at `step`, else the best, else the last.
    Returns (metrics, checkpoint name)."""
    checkpoint = checkpoint_of(load_run(path), step)
    parts = build_policies(config, model_files, checkpoint=checkpoint, is_training=False)
    played = play_over(config, parts, lambda *shown: Tester(config, parts, *shown).test())
    return played[0], checkpoint.name


def play_over(
    config: Config, parts: Parts, play: Callable[[View, RunGateway], Coroutine[Any, Any, T]]
) -> T:
    """Plays over an engine with the trainer's weights, and closes everything. Returns what `play`
    does."""
    shown = open_view()
    gateway = make_gateway(config, parts, shown)

    async def played() -> T:
        try:
            await parts.publish()
            return await play(shown, gateway)
        finally:
            await _close(config, parts, gateway)
            shown.close()

    return run_to_end(played())


async def _close(config: Config, parts: Parts, gateway: RunGateway) -> None:
    await gateway.close()
    for task in {id(each.task): each.task for each in (config, *config.tested.values())}.values():
        try:
            await guarded(task.close, seconds=TASK_CLOSE_SECONDS)
        except Exception as error:  # the run is over: its engines must be closed still
            print(f"task.close: {described(error)}", file=sys.stderr)
    for policy in (parts, *parts.own.values()):
        await policy.engine.close()
        if policy.publisher is not None:
            policy.publisher.close()
    engines = [seat.engine for seat in parts.seats.values()]
    for each in (parts.shared_engine, parts.teachers, *engines):
        if each is not None:
            await each.close()


# -- several runs over one base model --------------------------------------------------------------


Ended = dict[Path, Outcome | Exception]
"""Directory of each run -> its outcome, or the error that ended it."""


def train_over_base(
    configs: Mapping[Path, Config], model_files: Sequence[ModelFiles], **options: Any
) -> Ended:
    """See `lockstep.run.train.train_side_by_side`. options: see `RunOptions`."""
    first, *_ = configs.values()
    base = SharedBase(load_model(replace(first, lora=None), model_files[0]))
    failed: dict[Path, Exception] = {}
    with ExitStack() as stack:
        runs = [
            stack.enter_context(
                open_run(None, config, files, RunOptions(out=path, **options), base=base)
            )
            for (path, config), files in zip(configs.items(), model_files, strict=True)
        ]
        left = list(runs)

        async def to_end(run: TrainingRun) -> None:
            try:
                run.status = await run_steps(run)
            except Exception as error:
                run.save_unsaved()
                run.view.note(f"{type(error).__name__}: {error}", "critical")
                failed[run.path] = error
            left.remove(run)

        async def all_to_end() -> None:
            tasks = [asyncio.create_task(to_end(run)) for run in runs]
            try:
                await asyncio.gather(*tasks)
            finally:
                # After an interrupt they end as such, not by an engine that is closed under them.
                await asyncio.wait(tasks)
                assert base.engine is not None, "made for the first run"
                await base.engine.close()

        try:
            run_to_end(all_to_end())
        except KeyboardInterrupt:
            with uninterrupted():
                for run in left:
                    run.status = "interrupted"
                    run.view.note("interrupted: saving a checkpoint.")
                    run.save_unsaved()
    return {run.path: failed.get(run.path) or run.finish() for run in runs}
