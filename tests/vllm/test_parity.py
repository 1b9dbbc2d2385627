"""8,192 tokens that vLLM has sampled, against the trainer's forward over the same checkpoint."""

import asyncio

import numpy as np
import pytest
import torch
from test_local import make_local
from vllm_models import CONFIGS, HYBRIDS, VOCAB, make_checkpoint, trainer_logprobs

from lockstep.models.hf_io import load_checkpoint
from lockstep.types import Request, SamplingParams

NUM_REPLIES, NEW_TOKENS = 64, 128


def gaps(engine, directory, dtype):
    prompts = np.random.default_rng(0).integers(2, VOCAB, (NUM_REPLIES, 16)).astype(np.int32)

    async def one(number):
        sampling = SamplingParams(max_tokens=NEW_TOKENS)
        request = Request(
            id=f"{number}", prompt_ids=prompts[number], sampling=sampling, seed=number
        )
        (delta,) = [delta async for delta in engine.generate(request)]
        return delta.token_ids, delta.logprobs

    async def everyone():
        return await asyncio.gather(*map(one, range(NUM_REPLIES)))

    model = load_checkpoint(directory, dtype=getattr(torch, dtype))
    found = []
    for prompt, (ids, logprobs) in zip(prompts, asyncio.run(everyone()), strict=True):
        wanted = trainer_logprobs(model, [*prompt, *ids])[len(prompt) :]
        found.append(logprobs - wanted)
    return np.concatenate(found)


@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - set(HYBRIDS)))
def test_float32_agrees_with_the_trainer(kind, tmp_path):
    directory = make_checkpoint(kind, tmp_path / kind, std=0.15)
    engine = make_local(directory)
    found = gaps(engine, directory, "float32")
    asyncio.run(engine.close())
    assert len(found) == 8192
    # Eight decades above float32's rounding of a log-prob lie in sums of other orders: measured
    # is 2.4e-5 at most; a router's flip or a wrong weight gives 1e-2 and more.
    assert np.abs(found).max() < 1e-4


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", *HYBRIDS])
def test_bfloat16_stays_within_its_band(kind, tmp_path, capsys):
    directory = make_checkpoint(kind, tmp_path / kind, std=0.15)
    engine = make_local(directory, dtype="bfloat16")
    found = gaps(engine, directory, "bfloat16")
    asyncio.run(engine.close())
    k2 = float((found**2).mean() / 2)
    with capsys.disabled():
        print(
            f"\n{kind} bfloat16: k1 {found.mean():.2g}, k2 {k2:.2g}, max "
            f"{np.abs(found).max():.2g}, above 0.01 {(np.abs(found) > 0.01).mean():.0%}"
        )
    assert k2 < 0.1  # a wrong weight gives 1 and more
