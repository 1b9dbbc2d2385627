"""Configs and short runs of the recipe quickstart."""

from pathlib import Path
from typing import Any

from lockstep.config import resolve
from lockstep.doctor.monitor import open_monitor
from lockstep.recipes import find_recipe
from lockstep.run.train import train
from lockstep.run_config import Config
from lockstep.store.run import Run, load_run
from lockstep.testing.faults import injected, split_faults

SHORT = ("groups_per_step=2", "group_size=4", "evaluation.num_tasks=2")
"""Settings of a short run. Later words change them."""
ONCE = ("evaluation.at_start=false", "evaluation.greedy=false")
AT_END = ("evaluation.at_start=false", "evaluation.num_samples=1")


def quickstart_with(*words: str) -> Config:
    """words: settings, as on the command line."""
    return resolve(find_recipe("quickstart"), words)


def run_with(path: Path, *words: str, **options: Any) -> Run:
    """A run with these settings and faults, which goes on with other ones too. options: of
    `train`."""
    settings, faults = split_faults(words)
    with injected(*faults):
        options = {"view": "json", "monitor": open_monitor, **options}
        train(quickstart_with(*settings), out=path, **options)
    return load_run(path)


def steps_of(run: Run) -> list[dict[str, Any]]:
    """The metrics of the steps that compared both sides' log-probs."""
    return [row for row in run.metrics if "mismatch/unequal_tokens" in row]
