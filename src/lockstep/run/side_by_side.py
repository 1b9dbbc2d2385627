"""Several runs over one base model: each trains an adapter of its own in turn with the others, and
one engine decodes the episodes of all of them in one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.launch.event_loop import run_to_end
from lockstep.run.build import SharedBase, load_model
from lockstep.run.preflight import ModelFiles
from lockstep.run.steps import run_steps
from lockstep.run.training_run import RunOptions, TrainingRun, open_run
from lockstep.run_config import Config
from lockstep.store.run import Outcome
from lockstep.training.learner import uninterrupted

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
            try:
                await asyncio.gather(*map(to_end, runs))
            finally:
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
