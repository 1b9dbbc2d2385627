"""Settings of vLLM: what contradicts itself is refused before anything starts."""

import pytest

from lockstep.config import resolve
from lockstep.engines.config import VllmConfig
from lockstep.errors import ConfigError
from lockstep.recipes.registry import RECIPES


def test_a_recipe_takes_vllm_by_its_tag():
    config = resolve(
        RECIPES["quickstart"](),
        ["engine=vllm", "engine.python=/somewhere/bin/python"],
    )
    assert isinstance(config.engine, VllmConfig)
    assert config.engine.python == "/somewhere/bin/python"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"urls": ("http://a:1",), "in_process": True}, "Leave one out"),
        ({"in_process": True, "replicas": 2}, "runs one engine"),
        ({"in_process": True, "python": "/bin/python"}, "runs one engine"),
        ({"urls": ("http://a:1",), "dtype": "bfloat16"}, "dtype=bfloat16.*engine.urls"),
        ({"urls": ("http://a:1",), "replicas": 2}, "those servers run already"),
        ({"replicas": 0}, "at least 1"),
        ({"kv_cache_gib": -1.0}, "at least 0"),
        ({"max_adapter_rank": -1}, "at least 0"),
        ({"args": ("max-model-len=3",)}, "--NAME"),
        ({"env": ("FLAG",)}, "NAME=VALUE"),
        ({"urls": ("localhost:8000",)}, "http://HOST:PORT"),
    ],
)
def test_settings_that_contradict_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        VllmConfig(**settings)
