"""Lockstep: reinforcement learning for tool-using language-model agents, token-exact.

    import lockstep
    from lockstep.recipes import find_recipe

    outcome = lockstep.train(find_recipe("quickstart"))
    run = lockstep.load(outcome.path)
    print(lockstep.diagnose(outcome.path).outcome)

The pure functions are in `lockstep.renderers`, `lockstep.objectives` and `lockstep.correction`.
Names are imported on first use: `import lockstep` costs nothing and loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.doctor.diagnose import diagnose as diagnose
    from lockstep.doctor.monitor import train as train
    from lockstep.doctor.monitor import train_side_by_side as train_side_by_side
    from lockstep.run.train import evaluate as evaluate
    from lockstep.store.run import load_run as load
    from lockstep.supervised import train_supervised as train_supervised

_PUBLIC = {
    "diagnose": ("lockstep.doctor.diagnose", "diagnose"),
    "train": ("lockstep.doctor.monitor", "train"),
    "train_side_by_side": ("lockstep.doctor.monitor", "train_side_by_side"),
    "train_supervised": ("lockstep.supervised", "train_supervised"),
    "evaluate": ("lockstep.run.train", "evaluate"),
    "load": ("lockstep.store.run", "load_run"),
}
__all__ = ["diagnose", "evaluate", "load", "train", "train_side_by_side", "train_supervised"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(importlib.import_module(module), attribute)
