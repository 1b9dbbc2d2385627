"""Lockstep: reinforcement learning for tool-using language-model agents, token-exact.

    import lockstep

    outcome = lockstep.train("quickstart", steps=30)
    outcome.run.plot("reward/mean")
    print(lockstep.diagnose(outcome).outcome)

The pure functions are in `lockstep.renderers`, `lockstep.objectives` and `lockstep.correction`.
Names are imported on first use: `import lockstep` costs nothing and loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.package import lazily, package_version

if TYPE_CHECKING:
    from lockstep.doctor.diagnose import diagnose as diagnose
    from lockstep.doctor.monitor import train as train
    from lockstep.doctor.monitor import train_side_by_side as train_side_by_side
    from lockstep.doctor.rendering import render as render
    from lockstep.doctor.replay import find as replay  # noqa: F401 - in __all__
    from lockstep.integrations.trl import watch as watch
    from lockstep.model_server import BackgroundServer as BackgroundServer
    from lockstep.model_server import serve as serve
    from lockstep.models.locate import fetch_model as fetch  # noqa: F401 - in __all__
    from lockstep.run.noise_table import measure_noise as measure_noise
    from lockstep.store.run import load_run as load  # noqa: F401 - in __all__
    from lockstep.supervised import train_supervised as train_supervised
    from lockstep.verbs import evaluate as evaluate
    from lockstep.verbs import export as export
    from lockstep.verbs import list_recipes as list_recipes
    from lockstep.verbs import write_report as write_report

    __version__: str

_get, __all__ = lazily(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    return package_version() if name == "__version__" else _get(name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
