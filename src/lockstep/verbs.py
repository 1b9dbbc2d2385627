"""Verbs of the command line as functions: each takes what its command takes, and returns what the
command shows. The others are `lockstep.train`, `train_supervised`, `diagnose` and `render`.

A run is given by its path, by PATH@STEP for one checkpoint, or as an `Outcome` or `Run`. Settings
are keywords, as in a file: `evaluate(run, evaluation={"num_tasks": 512})`. overrides: settings as
the command line writes them, over these: ["evaluation.num_tasks=512"].
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.config import from_dict, overlaid
from lockstep.display import Named, block, table, warn
from lockstep.errors import ConfigError
from lockstep.launch.config import ParallelConfig
from lockstep.models.locate import HUB_FILES
from lockstep.report.document import write_report as write_report_of
from lockstep.run.build import export_checkpoint, exported, recipe_of, tokenizer_of
from lockstep.run.model_card import check_hub_name, push, write_card
from lockstep.run.train import check_run
from lockstep.run_config import Config, check_is_rl
from lockstep.store.checkpoints import POLICY, split_address
from lockstep.store.run import load_run

RunPath = str | os.PathLike[str]
"""A run: its path, an `Outcome` or a `Run`."""


@dataclass(frozen=True)
class Evaluation:
    """How a checkpoint did on held-out tasks."""

    run: Path
    checkpoint: str
    metrics: Mapping[str, float]

    def _repr_html_(self) -> str:
        return block(f"{self.run} at {self.checkpoint}", table(self.metrics.items()))


def evaluate(run: RunPath, *, overrides: Sequence[str] = (), **settings: Any) -> Evaluation:
    """Plays held-out tasks with a run's best checkpoint, or RUN@STEP.

    >>> evaluate("runs/first@30", evaluation={"num_tasks": 512})      # doctest: +SKIP
    """
    path, step = split_address(run)
    check_is_rl(stored := load_run(path).config, path)
    config = overlaid(from_dict(Config, stored), settings, overrides)
    if not any(each.evaluation.num_tasks for each in config.tested.values()):
        raise ConfigError("evaluation.num_tasks=0 plays nothing: give evaluation.num_tasks=128.")
    config = replace(config, parallel=ParallelConfig())  # one process is enough to play
    model_files = check_run(config, is_training=False, files=HUB_FILES)
    from lockstep.run.steps import play_checkpoint  # imports torch

    metrics, name = play_checkpoint(config, model_files, path, step=step)
    return Evaluation(run=path, checkpoint=name, metrics=Named(metrics))


def write_report(
    *runs: RunPath, out: str | os.PathLike[str] | None = None, warn: Callable[[str], None] = warn
) -> Path:
    """Writes one HTML file about one run, or several side by side. Returns its path.

    out: None is RUN/report.html for one run, and report.html here for several.
    """
    if not (found := [load_run(path) for path in runs]):
        raise ConfigError("a report needs a run at least: write_report('runs/first').")
    place = found[0].path if len(found) == 1 else Path()
    path = Path(out or place / "report.html")
    tokenizers = [tokenizer_of(run.config) for run in found]
    recipes = [recipe_of(run) for run in found]
    write_report_of(found, path, tokenizers=tokenizers, recipes=recipes, warn=warn)
    return path


@dataclass(frozen=True, slots=True)
class Export:
    """A checkpoint written for other programs."""

    checkpoint: str
    directory: Path
    hub: str = ""
    """Its address on the hub; "" if it was not uploaded."""


def export(
    run: RunPath,
    directory: str | os.PathLike[str] | None = None,
    *,
    merged: bool = False,
    hub: str = "",
    private: bool = False,
) -> Export:
    """Writes a run's checkpoint as a Hugging Face model, or its adapter in PEFT's form, with a
    model card. With `hub` it is also uploaded.

    directory: with `hub` it may be None: RUN/hub/CHECKPOINT. A complete export there is uploaded as
    it is. merged: the model with the adapter in its weights. hub: ORG/NAME, or NAME. private: makes
    a new repository private. Raises RunError if the hub refuses or cannot be reached; the written
    files stay.
    """
    path, step = split_address(run)
    if hub:
        check_hub_name(hub)
    elif directory is None:
        raise ConfigError("where to? Give --hf DIR, or --hub NAME to upload.")
    found, weights = exported(path, step)
    checkpoint = (weights.parent if weights.name == POLICY else weights).name
    place = Path(directory or path / "hub" / (checkpoint + ("-merged" if merged else "")))
    if directory is not None or not (place / "README.md").is_file():
        if directory is None and place.exists():
            shutil.rmtree(place)  # half of one, left by a kill: the card comes last
        export_checkpoint(found, weights, place, is_merged=merged)
        write_card(place, found, checkpoint=checkpoint, hub=hub)
    return Export(checkpoint, place, push(place, hub, is_private=private) if hub else "")


def list_recipes() -> list[dict[str, str]]:
    """Every recipe: its verb, its name, and a description of the training."""
    from lockstep.recipes.registry import RECIPES, SUPERVISED_RECIPES

    return [
        {"verb": verb, "name": name, "about": " ".join((recipe.__doc__ or "").split())}
        for verb, recipes in (("train", RECIPES), ("sft", SUPERVISED_RECIPES))
        for name, recipe in recipes.items()
    ]
