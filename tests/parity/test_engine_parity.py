"""Greedy replies of the embedded engine against transformers' generate, on random models."""

import asyncio

import numpy as np
import pytest
import torch

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.hf_io import load_checkpoint
from lockstep.types import Request, SamplingParams

transformers = pytest.importorskip("transformers", reason="pip install 'lockstep-rl[transformers]'")

SHAPE = {
    "vocab_size": 211, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
NEW_TOKENS = 40


def make_hf(kind, seed, tie):
    torch.manual_seed(seed)
    if kind == "gpt_oss":
        config = transformers.GptOssConfig(
            **SHAPE, intermediate_size=40, num_local_experts=4, num_experts_per_tok=2,
            sliding_window=8, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=tie,
        )  # fmt: skip
        model = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager")
    else:
        config = transformers.Qwen3Config(**SHAPE, intermediate_size=96, tie_word_embeddings=tie)
        model = transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter))
    return model.float().eval()


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("kind", "tie"), [("gpt_oss", False), ("qwen3", True), ("qwen3", False)])
async def test_greedy_replies_equal_generate(kind, tie, resident, tmp_path):
    """Prompts of unlike lengths in one ragged batch, with little memory, against one at a time.

    Where the engine's token differs, the two best logits must be a tie to rounding.
    """
    theirs = make_hf(kind, seed=1, tie=tie)
    theirs.save_pretrained(tmp_path)
    settings = EmbeddedConfig(
        page_size=16, kv_cache_tokens=1024, max_num_sequences=6, max_step_tokens=40,
        resident_rows=resident,
    )  # fmt: skip
    engine = EmbeddedEngine(load_checkpoint(tmp_path), settings)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 211, n).astype(np.int32) for n in (1, 5, 16, 33, 70, 9, 9, 100)]
    found = {}

    async def ask(number):
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
        request = Request(id=str(number), prompt_ids=prompts[number], sampling=sampling)
        async for delta in engine.generate(request):
            found[number] = delta

    await asyncio.gather(*(ask(i) for i in range(len(prompts))))
    num_equal = 0
    for number, ids in enumerate(prompts):
        row = torch.from_numpy(ids.astype(np.int64))[None]
        with torch.no_grad():
            wanted = theirs.generate(
                row, attention_mask=torch.ones_like(row), max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS, do_sample=False,
            )[0]  # fmt: skip
            logits = theirs(input_ids=wanted[None]).logits[0, len(ids) - 1 : -1]
        wanted, ours = wanted[len(ids) :].numpy(), found[number].token_ids
        differs = np.flatnonzero(wanted != ours)
        until = int(differs[0]) if differs.size else NEW_TOKENS
        if differs.size:
            best = logits[until].topk(2).values
            assert float(best[0] - best[1]) < 1e-4 * float(logits.abs().max())
        num_equal += until
        logprobs = logits.log_softmax(-1).gather(1, torch.from_numpy(wanted)[:, None])[:, 0]
        np.testing.assert_allclose(found[number].logprobs[:until], logprobs[:until], atol=1e-4)
    assert num_equal >= 0.9 * NEW_TOKENS * len(prompts)
