"""Small random decoders, and ways to ask an engine, for the tests of this folder."""

import asyncio

import numpy as np
import torch

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.attention_config import LatentShape, LinearShape
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.ops.context import PackedContext
from lockstep.ops.invariant import InvariantOps
from lockstep.types import Request, SamplingParams

VOCAB = 97


def make_model(kind="qwen3", *, max_positions=256, std=0.4, seed=0):
    shared = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_positions": max_positions,
        "tie_embeddings": True,
    }
    if kind == "qwen3":
        config = ModelConfig(
            architecture="qwen3",
            intermediate_size=48,
            windows=(None, None),
            has_qk_norm=True,
            **shared,
        )
    elif kind == "hybrid":
        config = ModelConfig(
            architecture="qwen3_5_text",
            intermediate_size=48,
            windows=(None, None),
            has_qk_norm=True,
            has_output_gate=True,
            norm_weights="centered",
            linear=LinearShape(
                layers=(0,),
                key_heads=2,
                value_heads=4,
                key_dim=8,
                value_dim=12,
                conv_width=4,
                is_grouped=False,
            ),
            **shared,
        )
    elif kind == "latent":
        config = ModelConfig(
            architecture="deepseek_v3",
            intermediate_size=48,
            windows=(None, None),
            latent=LatentShape(
                query_rank=0,
                kv_rank=12,
                nope_dim=6,
                rope_dim=4,
                value_dim=14,
                is_interleaved=True,
            ),
            **shared | {"num_kv_heads": 1, "head_dim": 10},
        )
    else:
        config = ModelConfig(
            architecture="gpt_oss",
            intermediate_size=24,
            windows=(7, None),
            has_sinks=True,
            has_attention_bias=True,
            num_experts=4,
            num_active_experts=2,
            swiglu_limit=7.0,
            has_router_bias=True,
            has_expert_bias=True,
            **shared,
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
