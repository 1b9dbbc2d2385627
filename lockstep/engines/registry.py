"""From an engine's config to the engine."""

from __future__ import annotations

from functools import singledispatch

from lockstep.engines.base import Engine, EngineContext
from lockstep.engines.config import EmbeddedConfig
from lockstep.errors import CapabilityError, ConfigError


@singledispatch
def make_engine(config: object, context: EngineContext) -> Engine:
    """The engine that `config` describes. The type of the config decides.

    Waits until the engine answers; raises EngineError if it does not in time. An engine of your own
    joins with its type:

        @make_engine.register
        def _(config: MyEngineConfig, context: EngineContext) -> Engine:
            return MyEngine(config, vocab_size=context.vocab_size)
    """
    raise ConfigError(
        f"no engine for a {type(config).__name__}; expected EmbeddedConfig, or a type registered "
        "with make_engine.register (see --plugin)."
    )


@make_engine.register
def _(config: EmbeddedConfig, context: EngineContext) -> Engine:
    import torch

    from lockstep.engines.embedded.engine import EmbeddedEngine
    from lockstep.models.decoder import Decoder
    from lockstep.models.hf_io import copy_decoder

    model = context.model
    if not isinstance(model, Decoder):
        raise CapabilityError(
            f"engine embedded runs the decoder, and cannot run a {type(model).__name__}: choose an "
            "engine outside of this process."
        )
    if config.dtype in ("same", context.dtype):
        return EmbeddedEngine(model, config, token_bytes=context.token_bytes)
    own = copy_decoder(model, dtype=getattr(torch, config.dtype))
    return EmbeddedEngine(own, config, token_bytes=context.token_bytes, is_shared=False)


def check_capabilities(
    engine: Engine,
    *,
    vocab_size: int,
    max_tokens: int,
    is_truncated: bool = False,
    is_rescored: bool = False,
    is_replayed: bool = False,
) -> None:
    """Raises CapabilityError if the engine cannot do what a run needs, before it samples.

    is_truncated: top-p or top-k is on. is_rescored: what was sampled is scored again.
    is_replayed: the trainer replays the experts that the sampled tokens went to.
    """
    found = engine.capabilities
    for holds, text in (
        (
            "tempered" in found.distributions,
            f"records log-probs of {', '.join(found.distributions)}; training needs those of the "
            "distribution that was drawn from (tempered)",
        ),
        (
            "sampled" in found.distributions or not is_truncated,
            f"records log-probs of {', '.join(found.distributions)}; with top_p or top_k, training "
            "needs those of what they leave (sampled). Set agent.top_p=1 agent.top_k=0",
        ),
        (
            found.has_score or not is_rescored,
            "cannot score given ids, which correction.behaviour=averaged needs. Use "
            "correction.behaviour=rollout",
        ),
        (
            found.has_routed_experts or not is_replayed,
            "does not hand out the experts that tokens went to, which trainer.routing_replay="
            "rollout replays. Use recompute or none",
        ),
        (
            found.vocab_size == vocab_size,
            f"has a vocabulary of {found.vocab_size}, the trainer's model one of {vocab_size}: "
            "another model",
        ),
        (
            found.max_tokens >= max_tokens,
            f"takes at most {found.max_tokens} tokens; max_tokens={max_tokens}",
        ),
    ):
        if not holds:
            raise CapabilityError(f"engine {found.name} {text}.")
