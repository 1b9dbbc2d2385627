"""The registry of recipes, filled by `recipe` and `supervised_recipe`."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.agent.task_config import TaskConfig
from lockstep.config import choices, did_you_mean
from lockstep.errors import ConfigError
from lockstep.run_config import Config, SupervisedConfig

RECIPES: dict[str, Callable[[], Config]] = {}
SUPERVISED_RECIPES: dict[str, Callable[[], SupervisedConfig]] = {}


def recipe(function: Callable[[], Config]) -> Callable[[], Config]:
    """Registers `function` for `lockstep train`, under its name with - for _."""
    RECIPES[function.__name__.replace("_", "-")] = function
    return function


def supervised_recipe(
    function: Callable[[], SupervisedConfig],
) -> Callable[[], SupervisedConfig]:
    """Registers `function` for `lockstep sft`, under its name with - for _."""
    SUPERVISED_RECIPES[function.__name__.replace("_", "-")] = function
    return function


def find_recipe(name: str) -> Config:
    """The config of a recipe. Raises ConfigError with the nearest name if it is unknown."""
    if name not in RECIPES:
        known = [*RECIPES, *SUPERVISED_RECIPES]
        hint = ""
        if name in SUPERVISED_RECIPES:
            hint = " It is a recipe of `lockstep sft`."
        elif name in choices(TaskConfig):
            hint = f" It is a kind of task: take a recipe, and task={name} as a setting."
        raise ConfigError(
            f"no recipe, config.json or run is called {name!r}.{hint or did_you_mean(name, known)}"
        )
    return RECIPES[name]()


def find_supervised_recipe(name: str) -> SupervisedConfig:
    """The config of a supervised recipe. Raises ConfigError with the nearest name."""
    if name not in SUPERVISED_RECIPES:
        raise ConfigError(
            f"no supervised recipe is called {name!r}.{did_you_mean(name, SUPERVISED_RECIPES)}"
        )
    return SUPERVISED_RECIPES[name]()
