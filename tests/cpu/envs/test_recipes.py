"""The shipped recipes, as they are without a setting of the user's."""

import pytest
import tiny_models  # noqa: F401  its recipes register themselves

from lockstep.config import from_dict, resolve, to_dict
from lockstep.recipes import find_recipe, find_supervised_recipe
from lockstep.recipes.registry import RECIPES, SUPERVISED_RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_the_settings_of_a_recipe_agree_with_each_other(name):
    config = resolve(find_recipe(name), [])
    assert config.name == name
    assert from_dict(type(config), to_dict(config)) == config
    assert config.agent.max_turn_tokens < config.max_tokens
    assert RECIPES[name].__doc__


@pytest.mark.parametrize("name", SUPERVISED_RECIPES)
def test_a_supervised_recipe_has_its_name_and_can_be_written_down(name):
    config = resolve(find_supervised_recipe(name), [])
    assert config.name == name
    assert from_dict(type(config), to_dict(config)) == config
    assert SUPERVISED_RECIPES[name].__doc__
