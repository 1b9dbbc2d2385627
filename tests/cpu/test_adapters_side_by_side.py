"""Several adapters over one base: trained side by side and decoded in one batch, each with the bits
that it has alone."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import PROOF
from schedules import MODELS, backend_for, make_model, roll_out, train

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.adapters import decoder_over
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer

SHAPES = {
    "even": LoraConfig(rank=16, alpha=3.0, seed=1),
    "same": LoraConfig(rank=16, alpha=3.0, seed=2),
    "odd": LoraConfig(rank=5, alpha=2.0, seed=3),
    "partial": LoraConfig(rank=16, alpha=3.0, seed=4, targets=("*.v_proj", "*.down_proj")),
}
"""The first two are multiplied together; the others each by themselves."""
KINDS = [("gpt_oss", "float32"), ("gpt_oss", "bfloat16"), ("qwen3", "float32"), ("qwen3", "bfloat16")]


def make_base(kind, dtype):
    base = make_model(kind, dtype)
    proof = backend_for(kind, dtype, 16)
    if not proof.is_kept:
        pytest.skip(f"this machine cannot keep the contract: {proof.failure}")
    base.ops = proof.ops
    return base


def adapted(base, config):
    """A decoder over `base` with an adapter whose B is not 0."""
    model = decoder_over(base)
    add_adapter(model, lora_shape(config, base.config), seed=config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".B" in name or name.endswith("_lora.B"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def make_engine(base, **settings):
    return EmbeddedEngine(base, EmbeddedConfig(**{"page_size": 16, **settings}))


class Sharing:
    """Gives the requests of `roll_out` to one engine under the names in turn, or keeps to one."""

    def __init__(self, engine, names, *, only=None):
        self.engine, self.names, self.only = engine, names, only
        self.capabilities = engine.capabilities

    def generate(self, request):
        number = int(request.id.split("/")[-2])
        name = self.names[number % len(self.names)]
        return self.engine.generate(replace(request, adapter=name))


def play(engine, names, *, seed, name="r", num_requests=8, reply_tokens=30):
    """Rows by the name of the adapter that sampled them."""
    rows = asyncio.run(
        roll_out(
            Sharing(engine, names),
            np.random.default_rng(seed),
            name,
            num_requests=num_requests,
            reply_tokens=reply_tokens,
        )
    )
    return {name: rows[at :: len(names)] for at, name in enumerate(names)}


@pytest.mark.parametrize("scarce", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_every_token_has_the_bits_of_its_adapter_alone_and_of_its_training(kind, dtype, scarce):
    base = make_base(kind, dtype)
    trainers = {
        name: Trainer(adapted(base, config), TrainerConfig(lr=1e-2), like="unused")
        for name, config in SHAPES.items()
    }
    settings = {"kv_cache_tokens": 768, "max_num_sequences": 6, "max_step_tokens": 48}
    settings = settings if scarce else {"resident_rows": False}
    engine = make_engine(base, **settings)
    names = ["", *SHAPES]
    rng = np.random.default_rng(0)
    for round_number in range(2):
        for name, trainer in trainers.items():
            asyncio.run(engine.load_adapter(name, trainer.model, version=trainer.version))
        found = play(engine, names, seed=round_number, name=str(round_number), num_requests=10)
        for name, trainer in trainers.items():
            alone = make_engine(trainer.model)
            again = play(
                Named(alone, name), names, seed=round_number, name=str(round_number), num_requests=10
            )
            for mine, theirs in zip(found[name], again[name], strict=True):
                assert np.array_equal(mine.token_ids, theirs.token_ids)
                assert np.array_equal(*(logprobs(row) for row in (mine, theirs)))
            train(trainer, found[name] * 2, rng)
            for row in found[name]:
                assert np.array_equal(row.columns["logprobs"][row.loss_mask], logprobs(row))
    if scarce:
        assert engine.stats["preemptions"] > 0
    assert engine.stats["cached_tokens"] > 100
