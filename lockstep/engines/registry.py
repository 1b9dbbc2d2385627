"""Makes an engine from its settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import singledispatch

from lockstep.engines.base import Engine, EngineContext
from lockstep.engines.config import (
    EmbeddedConfig,
    EngineConfig,
    ServedConfig,
    SGLangConfig,
    VllmConfig,
)
from lockstep.errors import CapabilityError, ConfigError
from lockstep.launch.event_loop import run_to_end

Wrap = Callable[[Engine, int], Engine]
"""(engine, index of the replica) -> the engine to use in its place."""


def open_engine(
    config: EngineConfig, context: EngineContext, *, wrap: Wrap = lambda engine, _: engine
) -> Engine:
    """The engine of a run: one, or a pool if the config describes several replicas.

    Each replica gets its index and a directory of its own in the context. wrap: called with each
    engine, to put something around it.
    """
    configs = config.replica_configs()
    if not config.is_pool:
        return wrap(make_engine(configs[0], context), 0)
    from lockstep.engines.pool import Pool

    names = [
        of_one.urls[0] if isinstance(of_one, ServedConfig) and of_one.urls else f"replica {at}"
        for at, of_one in enumerate(configs)
    ]
    contexts = [
        replace(
            context,
            replica=at,
            scratch=None if context.scratch is None else context.scratch / f"engine-{at}",
            on_wait=lambda text, name=name: context.on_wait(f"{name}: {text}"),
        )
        for at, name in enumerate(names)
    ]
    with ThreadPoolExecutor(len(configs)) as starting:  # each may take minutes
        made = [
            starting.submit(make_engine, of_one, own)
            for of_one, own in zip(configs, contexts, strict=True)
        ]
    errors = [error for future in made if (error := future.exception()) is not None]
    engines = [future.result() for future in made if future.exception() is None]
    if errors:
        run_to_end(_close_all(engines))
        raise errors[0]
    wrapped = [wrap(engine, at) for at, engine in enumerate(engines)]
    has_directories = "directory" in engines[0].capabilities.weight_sources
    return Pool(
        wrapped,
        config.pool,
        names=names,
        started_from=str(context.directory) if has_directories else None,
        on_event=context.on_wait,
    )


async def _close_all(engines: Sequence[Engine]) -> None:
    await asyncio.gather(*(engine.close() for engine in engines))


@singledispatch
def make_engine(config: object, context: EngineContext) -> Engine:
    """One engine, chosen by the type of `config`. Returns when the engine answers; raises
    EngineError if it does not in time. Register an engine of your own with its type:

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
    if config.replicas:
        from lockstep.engines.embedded.replica import make_replica

        return make_replica(model, config, context)
    is_shared = config.dtype in ("same", context.dtype)
    return EmbeddedEngine(
        model if is_shared else copy_decoder(model, dtype=getattr(torch, config.dtype)),
        config,
        token_bytes=context.token_bytes,
        control_ids=context.control_ids,
        is_shared=is_shared,
    )


@make_engine.register
def _(config: VllmConfig, context: EngineContext) -> Engine:
    from lockstep.engines.served import ServedEngine

    if config.in_process:
        from lockstep.engines.vllm.local import LocalWire

        return ServedEngine(LocalWire(config, context))
    from lockstep.engines.vllm.wire import vllm_on_server

    return vllm_on_server(config, context)


@make_engine.register
def _(config: SGLangConfig, context: EngineContext) -> Engine:
    from lockstep.engines.sglang import sglang_engine

    return sglang_engine(config, context)


def check_capabilities(
    engine: Engine,
    *,
    vocab_size: int,
    max_tokens: int,
    is_truncated: bool = False,
    is_rescored: bool = False,
    is_replayed: bool = False,
    is_sharing_device: bool = False,
    is_trained: bool = False,
    temperature: float = 1.0,
) -> None:
    """Raises CapabilityError if the engine lacks a feature that a run needs, before it samples.

    is_truncated: top-p or top-k is on. is_rescored: the engine scores sampled tokens again.
    is_replayed: the trainer replays the experts of the sampled tokens. is_sharing_device: the
    engine frees its memory while the trainer trains. is_trained: its weights follow the trainer's.
    temperature: of the draws; at 1 the model's log-probs are the tempered ones.
    """
    found = engine.capabilities
    records, scores = set(found.distributions), set(found.scored_distributions)
    is_plain, recorded = temperature == 1, f"records log-probs of {', '.join(found.distributions)}"
    for holds, text in (
        (
            found.weight_sources or not is_trained,
            "takes no new weights, and serves `lockstep eval` alone",
        ),
        (
            records & {"tempered", "sampled"} or is_plain,
            f"{recorded}; training needs the tempered distribution. Set agent.temperature=1",
        ),
        (
            "sampled" in records or not is_truncated,
            f"{recorded}; with top_p or top_k, training needs the distribution after the cut "
            "(sampled). Set agent.top_p=1 agent.top_k=0",
        ),
        (
            found.has_score or not is_rescored,
            "cannot score given ids. Set correction.behaviour=rollout",
        ),
        (
            "tempered" in scores or is_plain or not is_rescored,
            f"scores given ids under {', '.join(scores)}. Set agent.temperature=1 or "
            "correction.behaviour=rollout",
        ),
        (
            found.has_routed_experts or not is_replayed,
            "does not hand out the experts that tokens went to. Set "
            "trainer.routing_replay=recompute or none",
        ),
        (
            found.has_sleep or not is_sharing_device,
            "cannot free the memory of its keys and values. Set engine.share_device=false",
        ),
        (
            found.vocab_size == vocab_size,
            f"has a vocabulary of {found.vocab_size}, the trainer's model one of {vocab_size}",
        ),
        (
            found.max_tokens >= max_tokens,
            f"takes at most {found.max_tokens} tokens; max_tokens={max_tokens}",
        ),
    ):
        if not holds:
            raise CapabilityError(f"engine {found.name} {text}.")
