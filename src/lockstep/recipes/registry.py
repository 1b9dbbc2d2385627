"""The registry of recipes, filled by `recipe` and `supervised_recipe`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lockstep.agent.task_config import TaskConfig
from lockstep.config import choices, did_you_mean
from lockstep.errors import ConfigError
from lockstep.run_config import Config, SupervisedConfig

RECIPES: dict[str, Callable[[], Config]] = {}
SUPERVISED_RECIPES: dict[str, Callable[[], SupervisedConfig]] = {}


Make = TypeVar("Make", bound=Callable[[], Any])


def recipe(function: Make) -> Make:
    """Registers `function` for `lockstep train`, under its name with - for _. Raises ConfigError if
    another function has the name."""
    return _registered(function, RECIPES)


def supervised_recipe(function: Make) -> Make:
    """Registers `function` for `lockstep sft`, as `recipe` does for `lockstep train`."""
    return _registered(function, SUPERVISED_RECIPES)


def _registered(function: Make, recipes: dict[str, Any]) -> Make:
    name = function.__name__.replace("_", "-")
    known = recipes.get(name) or function
    places = [f"{made.__module__}.{made.__qualname__}" for made in (known, function)]
    if places[0] != places[1]:  # the same place again is a cell of a notebook that was run again
        raise ConfigError(f"two recipes are called {name}: {' and '.join(places)}. Rename one.")
    recipes[name] = function
    return function


def find_recipe(name: str) -> Config:
    """The config of a recipe. Raises ConfigError with the nearest name if it is unknown."""
    if name not in RECIPES:
        hint = did_you_mean(name, [*RECIPES, *SUPERVISED_RECIPES])
        if name in SUPERVISED_RECIPES:
            hint = " It is a recipe of `lockstep sft`."
        elif name in choices(TaskConfig):
            hint = f" It is a kind of task: take a recipe, and task={name} as a setting."
        text = f"no recipe, config.json or run is called {name!r}.{hint}"
        raise ConfigError(text)  # a traceback shows this line, and the sentence once
    return RECIPES[name]()


def find_supervised_recipe(name: str) -> SupervisedConfig:
    """The config of a supervised recipe. Raises ConfigError with the nearest name."""
    if name not in SUPERVISED_RECIPES:
        hint = did_you_mean(name, SUPERVISED_RECIPES)
        text = f"no supervised recipe is called {name!r}.{hint}"
        raise ConfigError(text)
    return SUPERVISED_RECIPES[name]()
