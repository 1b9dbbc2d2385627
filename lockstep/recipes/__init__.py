"""Recipes: a recipe is a function that returns a config. `lockstep recipes` lists them.

A module given with --plugin adds its own:

    @recipe
    def mine() -> Config:
        \"\"\"What it trains, in a line.\"\"\"
        return Config(...)
"""

from __future__ import annotations

from collections.abc import Callable

from lockstep.agent.task_config import TaskConfig
from lockstep.config import choices, did_you_mean
from lockstep.errors import ConfigError
from lockstep.run_config import Config, SupervisedConfig

RECIPES: dict[str, Callable[[], Config]] = {}
SUPERVISED_RECIPES: dict[str, Callable[[], SupervisedConfig]] = {}


def recipe(function: Callable[[], Config]) -> Callable[[], Config]:
    """Makes `function` known to `lockstep train` under its name, with - for _."""
    RECIPES[function.__name__.replace("_", "-")] = function
    return function


def supervised_recipe(
    function: Callable[[], SupervisedConfig],
) -> Callable[[], SupervisedConfig]:
    """Makes `function` known to `lockstep sft` under its name, with - for _."""
    SUPERVISED_RECIPES[function.__name__.replace("_", "-")] = function
    return function


def find_recipe(name: str) -> Config:
    """The config of a recipe; ConfigError with the nearest name if there is none."""
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
    """The config of a supervised recipe; ConfigError with the nearest name if there is none."""
    if name not in SUPERVISED_RECIPES:
        raise ConfigError(
            f"no supervised recipe is called {name!r}.{did_you_mean(name, SUPERVISED_RECIPES)}"
        )
    return SUPERVISED_RECIPES[name]()


import lockstep.agent.judge  # noqa: E402  a kind of scorer: known to --help by its import
import lockstep.envs.mcp_tasks  # noqa: E402  kinds of task: known to --help by their import
import lockstep.envs.mixture  # noqa: E402
import lockstep.envs.openenv  # noqa: E402
import lockstep.envs.reasoning_gym.config  # noqa: E402
import lockstep.envs.verifiers.config  # noqa: E402, F401
from lockstep.recipes import (  # noqa: E402, F401  they register themselves
    agents,
    docsearch,
    instructions,
    math,
    tiny_models,
)
