"""Recipes: named functions that return a config. `lockstep recipes` lists them.

A module given with --plugin adds its own:

    @recipe
    def mine() -> Config:
        \"\"\"What it trains, in a line.\"\"\"
        return Config(...)
"""

from lockstep.recipes import shipped as shipped  # its recipes register themselves
from lockstep.recipes.fitting import configure as configure
from lockstep.recipes.fitting import custom_config as custom_config
from lockstep.recipes.fitting import find_config as find_config
from lockstep.recipes.fitting import fitted_supervised as fitted_supervised
from lockstep.recipes.fitting import read_config as read_config
from lockstep.recipes.methods import with_method as with_method
from lockstep.recipes.registry import find_recipe as find_recipe
from lockstep.recipes.registry import find_supervised_recipe as find_supervised_recipe
from lockstep.recipes.registry import recipe as recipe
from lockstep.recipes.registry import supervised_recipe as supervised_recipe
