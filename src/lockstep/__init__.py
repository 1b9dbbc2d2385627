"""Lockstep: reinforcement learning for tool-using language-model agents, token-exact.

    import lockstep

    outcome = lockstep.train("quickstart", steps=30)
    outcome.run.plot("reward/mean")
    print(lockstep.diagnose(outcome).outcome)

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
    from lockstep.doctor.rendering import render as render
    from lockstep.doctor.replay import find as replay  # noqa: F401 - in _PUBLIC
    from lockstep.integrations.trl import watch as watch
    from lockstep.model_server import BackgroundServer as BackgroundServer
    from lockstep.model_server import serve as serve
    from lockstep.models.locate import fetch_model as fetch  # noqa: F401 - in _PUBLIC
    from lockstep.run.noise_table import measure_noise as measure_noise
    from lockstep.store.run import load_run as load  # noqa: F401 - in _PUBLIC
    from lockstep.supervised import train_supervised as train_supervised
    from lockstep.verbs import evaluate as evaluate
    from lockstep.verbs import export as export
    from lockstep.verbs import list_recipes as list_recipes
    from lockstep.verbs import write_report as write_report

    __version__: str

_PUBLIC = {
    "BackgroundServer": ("lockstep.model_server", "BackgroundServer"),
    "diagnose": ("lockstep.doctor.diagnose", "diagnose"),
    "evaluate": ("lockstep.verbs", "evaluate"),
    "export": ("lockstep.verbs", "export"),
    "fetch": ("lockstep.models.locate", "fetch_model"),
    "list_recipes": ("lockstep.verbs", "list_recipes"),
    "load": ("lockstep.store.run", "load_run"),
    "measure_noise": ("lockstep.run.noise_table", "measure_noise"),
    "render": ("lockstep.doctor.rendering", "render"),
    "replay": ("lockstep.doctor.replay", "find"),
    "serve": ("lockstep.model_server", "serve"),
    "train": ("lockstep.doctor.monitor", "train"),
    "train_side_by_side": ("lockstep.doctor.monitor", "train_side_by_side"),
    "train_supervised": ("lockstep.supervised", "train_supervised"),
    "watch": ("lockstep.integrations.trl", "watch"),
    "write_report": ("lockstep.verbs", "write_report"),
}
# The names above are imported there for type checkers, which read no computed list.
__all__ = [*_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _PUBLIC:
        import difflib

        near = difflib.get_close_matches(name, __all__, n=1)
        hint = f" Did you mean lockstep.{near[0]}?" if near else ""
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}.{hint}")
    module, attribute = _PUBLIC[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lockstep-rl")
    except PackageNotFoundError:
        return "(not installed)"
