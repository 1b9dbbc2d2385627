"""Decode as a CUDA graph against decode kernel by kernel: the same bits, over batches that grow and
shrink, new weights and memory that is allocated again. What a graph reads and writes is tested on a
CPU (tests/cpu/engines/test_decode_graph.py); here it is captured."""

import asyncio
import importlib.util

import numpy as np
import pytest
import torch

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.types import Request, SamplingParams

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("pip install 'lockstep-rl[cuda]'", allow_module_level=True)
from lockstep.ops.cuda import CudaOps

DEVICE = "cuda"
VOCAB = 5000
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
MODELS = {
    "qwen3": {"model_type": "qwen3", "intermediate_size": 512},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "intermediate_size": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "attention_bias": True,
        "rope_scaling": {"rope_type": "default"},
    },
}


def make_engine(name, dtype, *, cuda_graphs):
    model = Decoder(ModelConfig.from_hf(SHARED | MODELS[name]), ops=CudaOps())
    model.init_weights(std=0.1, seed=0)
    settings = EmbeddedConfig(
        max_num_sequences=20, kv_cache_tokens=8192, page_size=64, cuda_graphs=cuda_graphs
    )
    return EmbeddedEngine(model.to(DEVICE, dtype).requires_grad_(False), settings)


def requests(round_number, *, is_mixed):
    rng = np.random.default_rng(round_number)
    for i in range(40):
        sampling = {"temperature": 0.8, "top_p": 0.95}
        if is_mixed:
            sampling = [{}, {"temperature": 0.0}, {"top_k": 50}][rng.integers(3)]
        yield Request(
            id=f"{round_number}/{i}",
            prompt_ids=rng.integers(0, VOCAB, rng.integers(1, 900)).astype(np.int32),
            sampling=SamplingParams(
                max_tokens=int(rng.integers(1, 80)),
                stop_ids=tuple(rng.integers(0, VOCAB, 50).tolist()),
                **sampling,
            ),
            seed=i,
        )


async def replies(engine, *, is_mixed):
    """(ids, bits of the log-probs) of three rounds: before and after an update, and after sleep."""

    async def one(request):
        for _ in range(request.seed):
            await asyncio.sleep(0)
        deltas = [delta async for delta in engine.generate(request)]
        return (
            np.concatenate([delta.token_ids for delta in deltas]).tolist(),
            np.concatenate([delta.logprobs for delta in deltas]).view(np.int32).tolist(),
        )

    found = []
    for round_number in range(3):
        asked = requests(round_number, is_mixed=is_mixed)
        found += await asyncio.gather(*(one(request) for request in asked))
        if round_number == 0:
            with torch.no_grad():
                for weight in engine._shared.parameters():
                    weight.mul_(1.01)
            await engine.load_weights(None, version=1)
        else:
            await engine.sleep()
            await engine.wake()
    return found


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_draws_the_bits_of_its_kernels_one_by_one(name, dtype, is_mixed):
    eager, graphed = (
        asyncio.run(replies(make_engine(name, dtype, cuda_graphs=on), is_mixed=is_mixed))
        for on in (False, True)
    )
    assert eager == graphed
    assert sum(len(ids) for ids, _ in graphed) > 1000
