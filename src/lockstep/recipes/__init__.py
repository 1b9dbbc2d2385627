"""Recipes: named functions that return a config. `lockstep recipes` lists them.

A module given with --plugin adds its own:

    @recipe
    def mine() -> Config:
        \"\"\"What it trains, in a line.\"\"\"
        return Config(...)
"""

from lockstep.recipes import shipped as shipped  # its recipes register themselves
from lockstep.recipes.fitting import (
    configure,
    custom_config,
    find_config,
    fitted_supervised,
    read_config,
)
from lockstep.recipes.methods import with_method
from lockstep.recipes.registry import (
    find_recipe,
    find_supervised_recipe,
    recipe,
    supervised_recipe,
)

__all__ = [
    "configure",
    "custom_config",
    "find_config",
    "find_recipe",
    "find_supervised_recipe",
    "fitted_supervised",
    "read_config",
    "recipe",
    "supervised_recipe",
    "with_method",
]
