"""Facts and hypotheses inside of a run: a few rows of every step, as they are trained.

`open_monitor` is handed to a training run, which calls it after each update. The run
imports nothing of the doctor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.agent.references import check_not_importing
from lockstep.config import to_dict
from lockstep.doctor.inputs.native import write_rows
from lockstep.doctor.inputs.run_dump import MONITOR, TRAINED, engine_turns, facts_of, prompt_length
from lockstep.doctor.rows import Rows
from lockstep.doctor.watch import Watch, choose
from lockstep.errors import ConfigError
from lockstep.observe.live import ViewKind
from lockstep.recipes import custom_config, find_config
from lockstep.run.train import check_out, continued, said_first
from lockstep.run.train import train as train_without_monitor
from lockstep.run.train import train_side_by_side as train_side_by_side_without_monitor
from lockstep.run_config import Config
from lockstep.store.checkpoints import RunAddress, split_address
from lockstep.store.run import Outcome
from lockstep.store.trajectories import trainer_logprobs
from lockstep.types import Group, Sample

if TYPE_CHECKING:
    from lockstep.run.training_run import Monitor, TrainingRun


def open_monitor(run: TrainingRun) -> Monitor | None:
    """Makes what looks at each step of a run after its update; None if `doctor.rows` is 0. Rows
    that show a cause are written below the run's directory."""
    config, renderer = run.config, run.parts.renderer
    if not config.doctor.rows:
        return None
    known = run.parts.model_files.facts() | {"is_one_process": run.is_one_process}
    facts = replace(facts_of(to_dict(config), known), stop_ids=frozenset(renderer.stop_ids))
    # Without the renderer: rendering again costs more than all other checks together. A step is
    # looked at whatever time it takes: two runs of one seed report the same.
    watching = Watch(
        run.path / MONITOR,
        tokenizer=renderer.tokenizer,
        facts=facts,
        rows=config.doctor.rows,
        max_share=math.inf,
        warn=run.warn,
        has_page=False,
    )

    def look(
        step: int,
        rows: Sequence[Sample],
        sampled_rows: Sequence[Sample],
        groups: Sequence[Group],
        *,
        version: int,
    ) -> dict[str, float]:
        """The metrics `doctor/...` of one step. rows: as they were trained, with both sides'
        log-probs. sampled_rows: as they were sampled. groups: the episodes of the rows, which hold
        the ids that the engine returned. version: of the weights before the update."""
        drawn = {id(row) for row in sampled_rows}
        if any(id(row) not in drawn for row in rows):
            # A hook changed one: the store has the rows as sampled, without trainer's log-probs.
            (run.path / TRAINED).mkdir(parents=True, exist_ok=True)
            made = rows_of(rows, groups, version=version)
            write_rows(run.path / TRAINED / f"step-{step:06d}.parquet", [made])

        def chosen(limit: int) -> Rows | None:
            index = choose([row.group for row in rows], limit, step=step)
            return rows_of([rows[i] for i in index], groups, version=version) if rows else None

        return watching.look(step, chosen)

    return look


def rows_of(samples: Sequence[Sample], groups: Sequence[Group], *, version: int) -> Rows:
    """Rows as they are trained, and the ids that the engine returned. Without messages:
    the engine's ids show more, and rendering again would cost as much as all other checks."""
    trajectories = {t.id: t for group in groups for t in group.trajectories}
    named = (sample.id.rpartition("/") for sample in samples)
    turns = [engine_turns(trajectories[name], int(leaf)) for name, _, leaf in named]
    return Rows.of(
        samples,
        trainer_version=np.where([trainer_logprobs(s) is None for s in samples], -1, version),
        prompt_lengths=np.array([prompt_length(sample) for sample in samples], np.int64),
        engine_ids=tuple(returned for _, returned in turns),
        engine_prompt_ids=tuple(sent for sent, _ in turns),
    )


@said_first()
def train(
    config: Config | str | os.PathLike[str] | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    start: RunAddress | None = None,
    view: ViewKind = "live",
    **settings: Any,
) -> Outcome:
    """Trains, and returns how the run ended. Its rows are checked by the doctor at each step.

    config: all settings, or the name of a recipe or of a file of settings, with other settings
    over it; with resume=True, the run to go on with. In its place: `model=`,
    `tools=[function, ...]`, `reward=function`, `tasks=` a file, a data set of the Hugging Face hub
    or a list, and any other setting as in a file, as for the recipe `custom`
    (`lockstep.recipes.custom_config`). Other arguments: see `lockstep.run.train.train`.

    >>> def reward(episode):
    ...     return episode.answer == episode.task["answer"]
    >>> lockstep.train(model="Qwen/Qwen3-0.6B", reward=reward, tasks="t.jsonl")  # doctest: +SKIP
    """
    check_not_importing()
    if resume and out is None and not isinstance(config, Config | None):
        out, _ = split_address(config)
        config = out / "config.json"
    check_out(out, resume=resume)
    if config is None:
        config = custom_config(**settings)
    elif not isinstance(config, Config):
        config = find_config(config, settings)
    elif settings:
        raise ConfigError(
            f"train(config) takes no {next(iter(settings))}=: change the config "
            "(dataclasses.replace), or give model=, reward= and tasks= in its place."
        )
    config = continued(config, out) if resume and out else config
    return train_without_monitor(
        config, out=out, resume=resume, start=start, view=view, monitor=open_monitor
    )


train_side_by_side = partial(train_side_by_side_without_monitor, monitor=open_monitor)
"""`lockstep.train_side_by_side`: the same for several runs over one base model."""
