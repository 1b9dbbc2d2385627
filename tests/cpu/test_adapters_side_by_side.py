"""Several adapters over one base: trained side by side and decoded in one batch, each with the bits
that it has alone."""

import asyncio
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from full_counts import PROOF
from schedules import DTYPES, MODELS, backend_for, make_model, roll_out, train

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.errors import EngineError
from lockstep.models.adapters import decoder_over
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer

SHAPES = {
    "even": LoraConfig(rank=16, alpha=3.0),
    "same": LoraConfig(rank=16, alpha=3.0),
    "odd": LoraConfig(rank=5, alpha=2.0),
    "partial": LoraConfig(rank=16, alpha=3.0, targets=("*.v_proj", "*.down_proj")),
}
"""The first two are multiplied together; the others each by themselves."""
NAMES = ["", *SHAPES]


def make_base(kind, dtype):
    base = make_model(kind, dtype)
    proof = backend_for(kind, dtype, 16)
    if not proof.is_kept:
        pytest.skip(f"this machine cannot keep the contract: {proof.failure}")
    base.ops = proof.ops
    return base


def adapted(base, name):
    """A decoder over `base` with the adapter of this name, whose B is not 0."""
    model, seed = decoder_over(base), NAMES.index(name)
    add_adapter(model, lora_shape(SHAPES[name], base.config), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".B" in name or name.endswith("_lora.B"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def make_engine(base, **settings):
    return EmbeddedEngine(base, EmbeddedConfig(**{"page_size": 16, **settings}))


class Sharing:
    """Gives the requests of `roll_out` to an engine, under each of the names in turn.

    only: those of one name, to an engine whose model has that adapter; the others get no reply."""

    def __init__(self, engine, names, *, only=None):
        self.engine, self.names, self.only = engine, names, only
        self.capabilities = engine.capabilities

    async def generate(self, request):
        number = int(request.id.split("/")[-2])
        name = self.names[number % len(self.names)]
        if self.only is None:
            request = replace(request, adapter=name)
        elif name != self.only:
            return
        async for delta in self.engine.generate(request):
            yield delta


def play(engine, *, seed, only=None, num_requests=15, reply_tokens=30):
    """Rows by the name of the adapter that sampled them."""
    rows = asyncio.run(
        roll_out(
            Sharing(engine, NAMES, only=only),
            np.random.default_rng(seed),
            str(seed),
            num_requests=num_requests,
            reply_tokens=reply_tokens,
        )
    )
    return {name: rows[at :: len(NAMES)] for at, name in enumerate(NAMES)}


def logprobs(row, column="rollout_logprobs"):
    return row.columns[column][row.loss_mask]


GRID = list(product(MODELS, DTYPES, [False, True]))
CASES = [c for n, c in enumerate(GRID) if PROOF or bin(n).count("1") % 2]
"""All of it, or the half in which each pair of settings meets."""


@pytest.mark.parametrize(("kind", "dtype", "is_scarce"), CASES)
def test_a_token_has_the_bits_of_its_adapter_alone_and_of_its_training(kind, dtype, is_scarce):
    base = make_base(kind, dtype)
    trainers = {
        name: Trainer(adapted(base, name), TrainerConfig(lr=1e-2), like="unused") for name in SHAPES
    }
    scarce = {"kv_cache_tokens": 768, "max_num_sequences": 6, "max_step_tokens": 48}
    engine = make_engine(base, **(scarce if is_scarce else {"resident_rows": False}))
    rng = np.random.default_rng(0)
    for seed in range(2):
        for name, trainer in trainers.items():
            asyncio.run(engine.load_adapter(name, trainer.model, version=trainer.version))
        found = play(engine, seed=seed)
        for name, trainer in trainers.items():
            alone = play(make_engine(trainer.model), seed=seed, only=name)
            for mine, theirs in zip(found[name], alone[name], strict=True):
                assert np.array_equal(mine.token_ids, theirs.token_ids)
                assert np.array_equal(logprobs(mine), logprobs(theirs))
            train(trainer, found[name], rng)
            for row in found[name]:
                assert np.array_equal(logprobs(row, "logprobs"), logprobs(row))
    assert sum(row.num_trained for rows in found.values() for row in rows) > 100
    assert engine.stats["cached_tokens"] > 100
    assert not is_scarce or engine.stats["preemptions"] > 0


def test_floods_crashes_and_nans_of_an_adapter_leave_anothers_tokens_and_weights_as_they_are():
    base = make_base("gpt_oss", "float32")
    calm, alone, wild = (
        Trainer(adapted(base, name), TrainerConfig(lr=1e-2), like="unused")
        for name in ("even", "even", "same")
    )
    engine = make_engine(base, kv_cache_tokens=1024, max_num_sequences=16)

    def rows_of(engine, name, step, num_requests=6):
        where = f"{name}/{step}"
        rng = np.random.default_rng(step)
        return roll_out(engine, rng, where, num_requests=num_requests, reply_tokens=40)

    async def both(step):
        for name, trainer in (("calm", calm), ("wild", wild)):
            await engine.load_adapter(name, trainer.model, version=step)
        flood = asyncio.ensure_future(rows_of(Sharing(engine, ["wild"]), "wild", step, 60))
        calm_rows = asyncio.ensure_future(rows_of(Sharing(engine, ["calm"]), "calm", step))
        if step == 1:  # first its client is gone and then it is, in the middle of their replies
            await asyncio.sleep(0.05)
            flood.cancel()
            await engine.drop_adapter("wild")
        return await asyncio.gather(calm_rows, flood, return_exceptions=True)

    def crash(*_):
        raise RuntimeError("out of luck")

    for step in range(3):
        found, of_wild = asyncio.run(both(step))
        wanted = asyncio.run(rows_of(make_engine(alone.model), "alone", step))
        for mine, theirs in zip(found, wanted, strict=True):
            assert np.array_equal(mine.token_ids, theirs.token_ids)
            assert np.array_equal(logprobs(mine), logprobs(theirs))
        if step == 0:
            with pytest.raises(RuntimeError, match="out of luck"):
                wild.forward_backward(of_wild, crash)
        elif step == 1:
            assert isinstance(of_wild, asyncio.CancelledError)
            with torch.no_grad():
                next(p for p in wild.model.parameters() if p.requires_grad).fill_(float("nan"))
        else:
            assert isinstance(of_wild, EngineError)
        for trainer, rows in ((calm, found), (alone, wanted)):
            train(trainer, rows, np.random.default_rng(step))
    ours, theirs = (dict(trainer.model.named_parameters()) for trainer in (calm, alone))
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name])
    assert engine.stats["preemptions"] > 0
