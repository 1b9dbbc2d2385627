"""Makes the renderer that a config describes."""

from __future__ import annotations

from functools import singledispatch

from lockstep.errors import ConfigError
from lockstep.renderers.base import Renderer
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import (
    ChatMLConfig,
    DeepSeekConfig,
    GemmaConfig,
    HarmonyConfig,
    JinjaConfig,
    Llama3Config,
)
from lockstep.renderers.deepseek import DeepSeekRenderer
from lockstep.renderers.gemma import GemmaRenderer
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.renderers.jinja.renderer import JinjaRenderer
from lockstep.renderers.llama3 import Llama3Renderer
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


for _config, _renderer in (
    (HarmonyConfig, HarmonyRenderer),
    (ChatMLConfig, ChatMLRenderer),
    (Llama3Config, Llama3Renderer),
    (DeepSeekConfig, DeepSeekRenderer),
    (GemmaConfig, GemmaRenderer),
    (JinjaConfig, JinjaRenderer),
):
    make_renderer.register(
        _config, lambda config, tokenizer, make=_renderer: make(tokenizer, config)
    )
