import doctest
import importlib
from dataclasses import dataclass

import pytest

from lockstep.errors import ConfigError
from lockstep.renderers.base import Renderer
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig, HarmonyConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.renderers.registry import make_renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.tokenizers import byte_tokenizer


def test_the_config_decides_which_renderer_it_is():
    tokenizer = byte_tokenizer()
    harmony = make_renderer(HarmonyConfig(reasoning_effort="low"), tokenizer)
    chatml = make_renderer(ChatMLConfig(), tokenizer)
    assert isinstance(harmony, HarmonyRenderer) and harmony.config.reasoning_effort == "low"
    assert isinstance(chatml, ChatMLRenderer)
    assert isinstance(harmony, Renderer) and isinstance(chatml, Renderer)


def test_a_config_without_a_renderer_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"ChatMLConfig.*Llama3Config"):
        make_renderer("harmony", byte_tokenizer())


def test_a_renderer_of_ones_own_joins_with_its_config():
    @dataclass(frozen=True, kw_only=True)
    class MyConfig:
        pass

    def make_mine(config: object, tokenizer: Tokenizer) -> Renderer:
        return ChatMLRenderer(tokenizer, ChatMLConfig(enable_thinking=False))

    make_renderer.register(MyConfig, make_mine)
    assert isinstance(make_renderer(MyConfig(), byte_tokenizer()), ChatMLRenderer)


@pytest.mark.parametrize(
    "module",
    [
        "lockstep.renderers.calls",
        "lockstep.renderers.chatml",
        "lockstep.renderers.harmony",
        "lockstep.renderers.llama3",
        "lockstep.renderers.tokenizer",
        "lockstep.renderers.typescript",
        "lockstep.testing.renderers",
    ],
)
def test_examples_in_the_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0 and result.failed == 0
