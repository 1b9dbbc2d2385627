"""The checkpoint of a run that others read."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import RunError
from lockstep.store.run import Run


def checkpoint_of(run: Run, step: int | None) -> Path:
    """The checkpoint of a run: at `step`, else the best, else the last. RunError if it has none."""
    from lockstep.training.checkpoint import CheckpointStore

    store = CheckpointStore(run.path / "checkpoints")
    if step is not None:
        return store.at(step)
    found = store.best() or store.latest()
    if found is None:
        raise RunError(f"{run.path} has no checkpoint. Did it end before checkpoint.every steps?")
    return found
