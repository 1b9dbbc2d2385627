"""A sampler that computes in another dtype than the trainer: a copy of the weights, cast."""

import asyncio

import numpy as np
import pytest
import torch
from check_engine import check_engine
from engine_contexts import context_of
from engine_models import make_model, prompt, reply_of, request

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.registry import make_engine
from lockstep.errors import EngineError
from lockstep.models.hf_io import hf_tensors


def sampler_of(model, dtype, tmp_path):
    size = model.config.vocab_size
    context = context_of(tmp_path, model=model, vocab_size=size, max_tokens=128)
    return make_engine(EmbeddedConfig(dtype=dtype, page_size=16, kv_cache_tokens=4096), context)


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3"])
@pytest.mark.parametrize(("dtype", "epsilon"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_a_sampler_of_fewer_bits_rounds_and_follows_every_load(kind, dtype, epsilon, tmp_path):
    model = make_model(kind)
    engine = sampler_of(model, dtype, tmp_path)
    assert engine._model.embedding.dtype == getattr(torch, dtype)
    assert model.embedding.dtype == torch.float32
    exact = sampler_of(model, "same", tmp_path)
    ids = prompt(60)

    def gap():
        scores = [asyncio.run(e.score(ids)).logprobs[1:] for e in (engine, exact)]
        return np.median(np.abs(scores[0] - scores[1]))  # a flipped expert is far off

    first = gap()
    assert 0 < first < 20 * epsilon
    with torch.no_grad():
        model.final_norm.mul_(1.5)
    asyncio.run(exact.load_weights(None, version=1))
    assert gap() > 4 * first  # a copy: it has not followed
    asyncio.run(engine.load_weights(dict(hf_tensors(model)), version=1))
    assert 0 < gap() < 2 * first
    with pytest.raises(EngineError, match="has weights of its own; found None"):
        asyncio.run(engine.load_weights(None, version=2))
    assert engine.version == 1


def test_a_float16_sampler_keeps_the_protocol(tmp_path):
    model = make_model("qwen3")
    engine = sampler_of(model, "float16", tmp_path)
    weights = dict(hf_tensors(model))
    # A CPU with float16 arithmetic computes one row and many by different kernels; each rounds the
    # logits to 11 bits. On one without, products are made in float32 and agree to 1e-4.
    tolerance = 20 * 2**-11
    report = asyncio.run(
        check_engine(engine, prompt_ids=[3, 4, 5], weights=weights, tolerance=tolerance)
    )
    assert "weights" in report.passed


def test_a_copy_is_made_once_and_named_the_same_dtype_shares(tmp_path):
    model = make_model("qwen3")
    engine = sampler_of(model, "float32", tmp_path)  # what the trainer computes in
    assert engine.capabilities.shares_weights and engine._model is model
    ids, _ = asyncio.run(reply_of(engine, request("a", prompt(5))))
    assert len(ids)
