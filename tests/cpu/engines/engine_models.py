"""Small random decoders, and ways to ask an engine, for the tests of this folder."""

import asyncio

import numpy as np
import torch
from tiny_configs import tiny_config

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.decoder import Decoder
from lockstep.ops.context import PackedContext
from lockstep.ops.invariant import InvariantOps
from lockstep.types import Request, SamplingParams

VOCAB = 97


def make_model(kind="qwen3", *, max_positions=256, std=0.4, seed=0):
    config = tiny_config(
        {"hybrid": "qwen3_5_text", "latent": "deepseek_v3"}.get(kind, kind),
        vocab_size=VOCAB,
        max_positions=max_positions,
    )
    # Rounding errors grow along a state, so a hybrid is compared in every bit.
    model = Decoder(config, ops=InvariantOps() if kind == "hybrid" else None)
    model.init_weights(std=std, seed=seed)
    return model


def make_engine(model=None, *, token_bytes=None, **settings):
    defaults = {"page_size": 16, "kv_cache_tokens": 4096, "max_num_sequences": 16}
    defaults |= {"max_step_tokens": 512}
    return EmbeddedEngine(
        model or make_model(), EmbeddedConfig(**(defaults | settings)), token_bytes=token_bytes
    )


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def request(name, ids, *, seed=0, priority=0, stream=False, **sampling):
    sampling = {"max_tokens": 12} | sampling
    return Request(
        id=name,
        prompt_ids=np.asarray(ids, np.int32),
        sampling=SamplingParams(**sampling),
        seed=seed,
        priority=priority,
        stream=stream,
    )


async def deltas_of(engine, req):
    return [delta async for delta in engine.generate(req)]


async def reply_of(engine, req):
    """(ids, log-probs) of a whole reply."""
    deltas = await deltas_of(engine, req)
    return (
        np.concatenate([d.token_ids for d in deltas]),
        np.concatenate([d.logprobs for d in deltas]),
    )


def ask(engine, *requests):
    """The last delta of each request, all asked at once."""

    async def run():
        return await asyncio.gather(*(deltas_of(engine, r) for r in requests))

    return [deltas[-1] for deltas in asyncio.run(run())]


def packed_logprobs(model, ids, *, temperature=1.0):
    """[T] log-prob of each id by one forward over the whole row, NaN at 0: the trainer's way."""
    row = torch.from_numpy(np.asarray(ids, np.int64))
    with torch.no_grad():
        hidden = model(row, torch.arange(len(row)), PackedContext.of([len(row)]))
        values, _ = model.log_probs(hidden[:-1], row[1:], temperature=temperature)
    return np.concatenate([[np.nan], values.numpy()])
