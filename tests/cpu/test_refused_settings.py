"""Settings that contradict, or that would do nothing, are refused where they are read."""

import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest

from lockstep.config import resolve
from lockstep.errors import ConfigError
from lockstep.recipes import find_recipe
from lockstep.run.preflight import preflight

REFUSED = tomllib.loads(Path(__file__).with_name("refused_settings.toml").read_text())
RUNS = [(recipe, *case) for recipe, cases in REFUSED["runs"].items() for case in cases]
CLASSES = [(path, *case) for path, cases in REFUSED["classes"].items() for case in cases]


@pytest.mark.parametrize(("recipe", "words", "message"), RUNS)
def test_a_run_that_makes_no_sense_is_refused_before_a_model_is_loaded(recipe, words, message):
    with pytest.raises(ConfigError, match=message):
        preflight(resolve(find_recipe(recipe), words.split()))


@pytest.mark.parametrize(("path", "settings", "message"), CLASSES)
def test_settings_that_make_no_sense_are_refused_with_their_name(path, settings, message):
    is_list = {name for name, value in settings.items() if isinstance(value, list)}
    settings = settings | {name: tuple(settings[name]) for name in is_list}
    with pytest.raises(ConfigError, match=message):
        made = resolve_name(path.removesuffix(".check"))(**settings)
        if path.endswith(".check"):
            made.check()
