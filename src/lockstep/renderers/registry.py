"""Makes the renderer that a config describes."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any

from lockstep.errors import ConfigError
from lockstep.renderers.base import Renderer
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import (
    ChatMLConfig,
    HarmonyConfig,
    JinjaConfig,
    Llama3Config,
    MistralConfig,
)
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.renderers.jinja.renderer import JinjaRenderer
from lockstep.renderers.llama3 import Llama3Renderer
from lockstep.renderers.mistral import MistralRenderer
from lockstep.renderers.tokenizer import Tokenizer


@singledispatch
def make_renderer(config: object, tokenizer: Tokenizer) -> Renderer:
    """Makes the renderer for `config` over `tokenizer`.

    The type of the config decides. Register a renderer of your own for the type of its config:

        @make_renderer.register
        def _(config: MyConfig, tokenizer: Tokenizer) -> Renderer:
            return MyRenderer(tokenizer, config)

    Raises RendererError, which lists all control tokens that the tokenizer lacks.
    """
    known = sorted(t.__name__ for t in make_renderer.registry if t is not object)
    raise ConfigError(
        f"no renderer for a {type(config).__name__}; expected one of {', '.join(known)}, or a type "
        "registered with make_renderer.register (see --plugin)."
    )


def _register(config_type: type[Any], renderer: Callable[[Tokenizer, Any], Renderer]) -> None:
    @make_renderer.register(config_type)
    def _(config: Any, tokenizer: Tokenizer) -> Renderer:
        return renderer(tokenizer, config)


_register(HarmonyConfig, HarmonyRenderer)
_register(ChatMLConfig, ChatMLRenderer)
_register(Llama3Config, Llama3Renderer)
_register(MistralConfig, MistralRenderer)
_register(JinjaConfig, JinjaRenderer)
