"""From a renderer's config to the renderer."""

from __future__ import annotations

from functools import singledispatch

from lockstep.errors import ConfigError
from lockstep.renderers.base import Renderer
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig, HarmonyConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.renderers.tokenizer import Tokenizer


@singledispatch
def make_renderer(config: object, tokenizer: Tokenizer) -> Renderer:
    """The renderer that `config` describes, over `tokenizer`.

    The type of the config decides. A renderer of your own joins with its config's type:

        @make_renderer.register
        def _(config: MyConfig, tokenizer: Tokenizer) -> Renderer:
            return MyRenderer(tokenizer, config)

    Raises RendererError if the tokenizer lacks control tokens: it names all of them.
    """
    known = sorted(t.__name__ for t in make_renderer.registry if t is not object)
    raise ConfigError(
        f"no renderer for a {type(config).__name__}; expected one of {', '.join(known)}, or a type "
        "registered with make_renderer.register (see --plugin)."
    )


@make_renderer.register
def _(config: HarmonyConfig, tokenizer: Tokenizer) -> Renderer:
    return HarmonyRenderer(tokenizer, config)


@make_renderer.register
def _(config: ChatMLConfig, tokenizer: Tokenizer) -> Renderer:
    return ChatMLRenderer(tokenizer, config)
