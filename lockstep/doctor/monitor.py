"""The checks that need no model, inside of a run: a few rows of every step, as they are trained.

`open_monitor` is handed to a training run, which calls `Monitor.look` after each update. The run
imports nothing of the doctor.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.agent.references import check_not_importing
from lockstep.doctor.checks.causes import CAUSES
from lockstep.doctor.checks.examine import Examination, Stage, all_stages, examine
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.diagnose import make_setting
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.inputs.native import write_rows
from lockstep.doctor.inputs.run_dump import MONITOR, first_prompt, prompt_length, replies
from lockstep.doctor.tokenization import Tokenization
from lockstep.errors import ConfigError
from lockstep.observe.live import ViewKind
from lockstep.recipes import custom_config, find_config
from lockstep.renderers.base import Renderer
from lockstep.run.train import train as train_without_monitor
from lockstep.run.train import train_side_by_side as train_side_by_side_without_monitor
from lockstep.run_config import Config
from lockstep.store.run import Outcome
from lockstep.types import Group, Sample

MAX_KEPT = 8
"""Steps whose rows are kept for each cause: more of the same prove no more."""


def open_monitor(
    config: Config, path: Path, **known: Any
) -> Callable[..., dict[str, float]] | None:
    """The `Monitor.look` of a run; None if `doctor.rows` is 0. Arguments as for `Monitor`."""
    return Monitor(config, path, **known).look if config.doctor.rows else None


class Monitor:
    """Checks some rows of each step, after its update, with the log-probs of both sides."""

    def __init__(
        self,
        config: Config,
        path: Path,
        *,
        renderer: Renderer,
        is_moe: bool,
        is_one_process: bool,
        warn: Callable[[str], None],
    ) -> None:
        """path: directory of the run; rows that show a cause are written below it. warn: prints a
        line for the user."""
        self.num_rows = config.doctor.rows
        self.facts = Facts(
            trainer="lockstep",
            model=config.model,
            stop_ids=frozenset(renderer.stop_ids),
            temperature=config.agent.temperature,
            top_p=config.agent.top_p,
            top_k=config.agent.top_k,
            is_moe=is_moe,
            max_staleness=config.max_staleness * config.trainer.updates_per_batch,
            is_one_process=is_one_process,
        )
        # Without the renderer: rendering again costs more than all other checks together.
        self.setting = make_setting(self.facts, Tokenization(tokenizer=renderer.tokenizer))
        self.directory, self.warn = path / MONITOR, warn
        self._kept: Counter[str] = Counter()
        """Cause -> number of steps in which it was found."""

    def look(
        self, step: int, rows: Sequence[Sample], groups: Sequence[Group], *, version: int
    ) -> dict[str, float]:
        """The metrics `doctor/...` of one step.

        rows: as they were trained, with both sides' log-probs. groups: the episodes of the rows,
        which hold the ids that the engine returned. version: of the weights before the update. Each
        cause is reported once, when it is first found; the rows that show it are kept.
        """
        began = time.perf_counter()
        chosen = choose(rows, self.num_rows, step=step)
        if not chosen:
            return {}
        looked = rows_of(step, chosen, groups, version=version)
        stages = [Stage(checks=checks) for checks in all_stages().values()]
        found = examine(lambda: [looked], stages, self.setting, has=looked.has)
        causes = list(dict.fromkeys(f.cause for f in found.findings if f.verdict == "differs"))
        if causes:
            self._keep(step, looked, found, causes)
        return {
            "doctor/rows": len(chosen),
            "doctor/causes": len(causes),
            **{f"doctor/{cause}": 1.0 for cause in causes},
            "time/doctor_seconds": time.perf_counter() - began,
        }

    def _keep(self, step: int, rows: Rows, examined: Examination, causes: Sequence[str]) -> None:
        path = self.directory / f"step-{step:06d}.parquet"
        if any(self._kept[cause] < MAX_KEPT for cause in causes):
            self.directory.mkdir(exist_ok=True)
            write_rows(path, [rows], self.facts)
        share = {s.cause: s.k2 for s in examined.shares}
        for finding in examined.findings:
            cause = finding.cause
            if finding.verdict != "differs" or cause in self._kept:
                continue
            explained = f" ({share[cause]:.0%} of k2)" if cause in share else ""
            self.warn(
                f"step {step}: doctor: {cause}{explained}: {CAUSES[cause].title} "
                f"{finding.measured}. `lockstep doctor {self.directory}` shows the tokens."
            )
        self._kept.update(causes)


def choose(rows: Sequence[Sample], num_rows: int, *, step: int) -> list[Sample]:
    """At most `num_rows` of `rows`, group by group: rows of one prompt tell the most about each
    other. Each step begins with another group."""
    groups = sorted({row.group for row in rows})
    place = {group: (i - step) % len(groups) for i, group in enumerate(groups)}
    return sorted(rows, key=lambda row: place[row.group])[:num_rows]


def rows_of(step: int, samples: Sequence[Sample], groups: Sequence[Group], *, version: int) -> Rows:
    """Rows as they are trained, and the ids that the engine returned. Without messages:
    the engine's ids show more, and rendering again would cost as much as all other checks."""
    trajectories = {t.id: t for group in groups for t in group.trajectories}
    placed = [
        (trajectories[name], int(leaf))
        for name, _, leaf in (sample.id.rpartition("/") for sample in samples)
    ]
    return Rows.of(
        samples,
        steps=np.full(len(samples), step, np.int64),
        trainer_version=np.full(len(samples), version, np.int64),
        prompt_lengths=np.array([prompt_length(sample) for sample in samples], np.int64),
        engine_ids=tuple(replies(t, leaf) for t, leaf in placed),
        engine_prompt_ids=tuple(first_prompt(t, leaf) for t, leaf in placed),
    )


def train(
    config: Config | str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    start: tuple[Path, int | None] | None = None,
    view: ViewKind = "live",
    **settings: Any,
) -> Outcome:
    """Trains, and returns how the run ended. Its rows are checked by the doctor at each step.

    config: all settings, or the name of a recipe or of a file of settings, with other settings
    over it. In its place: `model=`, `tools=[function, ...]`, `reward=function`, `tasks=` a file, a
    data set of the Hugging Face hub or a list, and any other setting as in a file, as for the
    recipe `custom` (`lockstep.recipes.custom_config`). Other arguments: see
    `lockstep.run.train.train`.

    >>> def reward(episode):
    ...     return episode.answer == episode.task["answer"]
    >>> lockstep.train(model="Qwen/Qwen3-0.6B", reward=reward, tasks="t.jsonl")  # doctest: +SKIP
    """
    if config is None:
        config = custom_config(**settings)
    elif isinstance(config, (str, Path)):
        config = find_config(config, settings)
    elif settings:
        raise ConfigError(
            f"train(config) takes no {next(iter(settings))}=: change the config "
            "(dataclasses.replace), or give model=, reward= and tasks= in its place."
        )
    check_not_importing()
    monitor = open_monitor
    return train_without_monitor(
        config, out=out, resume=resume, start=start, view=view, monitor=monitor
    )


train_side_by_side = partial(train_side_by_side_without_monitor, monitor=open_monitor)
"""`lockstep.train_side_by_side`: the same for several runs over one base model."""
