"""Sampler and trainer are equal bit for bit, whatever the schedule; with stock ops they are not."""

import asyncio
from copy import deepcopy
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from full_counts import PROOF
from schedules import (
    DTYPES,
    MODELS,
    PAGE_SIZES,
    THREADS,
    Arm,
    backend_for,
    compare,
    family_arms,
    lora_arms,
    make_model,
    proof_arms,
    recomputing_arms,
    replaying_arms,
    roll_out,
)

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.moe import MoE
from lockstep.objectives.config import Reinforce
from lockstep.objectives.losses import make_loss
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer
from lockstep.types import Sample

SHORT = {"num_requests": 5, "reply_tokens": 20}


def arms():
    """In the fast profile each model has two pairs of thread counts in one dtype, and the two
    others in the other; each arm has one short schedule, and together they go through all."""
    if PROOF:
        return proof_arms()
    pairs = (THREADS[:2], THREADS[2:])
    kinds = [
        (model, dtype, threads)
        for i, model in enumerate(MODELS)
        for j, dtype in enumerate(DTYPES)
        for threads in pairs[(i + j) % 2]
    ]
    families = family_arms(**SHORT)
    return [
        *(
            Arm(model=m, dtype=d, threads=t, seeds=(seed,), num_requests=7, reply_tokens=30)
            for seed, (m, d, t) in enumerate(kinds)
        ),
        *(families[i] for i in (0, 3, 4, 7, 8)),  # each once, in one dtype or the other
        *(a for kind in (recomputing_arms, lora_arms, replaying_arms) for a in kind(**SHORT)[::3]),
        lora_arms(**SHORT)[5],  # of latents, whose adapter is multiplied head by head
        # Weights wide enough for the CPU's own bfloat16, with an adapter that is not.
        Arm(model="qwen3, 512 wide", dtype="bfloat16", threads=(2, 1), lora_rank=4, **SHORT),
    ]


def proved_ops(model, dtype):
    proof = backend_for(model, dtype)
    if not proof.is_kept:
        pytest.skip(f"this machine cannot keep the contract: {proof.failure}")
    return proof.ops


@pytest.mark.parametrize("arm", arms(), ids=str)
def test_every_log_prob_of_the_rollout_is_that_of_the_training_forward(arm):
    if not backend_for(arm.model, arm.dtype).is_kept:
        pytest.skip(backend_for(arm.model, arm.dtype).failure)
    found = compare(arm)
    assert found.compared > 100 and found.updates == 2 * len(arm.seeds)
    assert (found.unequal, found.max_abs_diff) == (0, 0.0)


def test_the_schedules_went_through_all_that_could_tell_the_two_apart(capsys):
    found = [compare(arm) for arm in arms() if backend_for(arm.model, arm.dtype).is_kept]
    if not found:
        pytest.skip("this machine keeps the contract for no model")
    compared = sum(f.compared for f in found)
    assert sum(f.preemptions for f in found) > 0
    assert sum(f.cached_tokens for f in found) > 1000
    assert sum(f.chunked_prompts for f in found) > 10
    assert set().union(*(f.page_sizes for f in found)) == set(PAGE_SIZES)
    assert set().union(*(f.resident for f in found)) == {True, False}
    with capsys.disabled():
        unequal = sum(f.unequal for f in found)
        print(f"\ntrue on-policy: {unequal} unequal of {compared} tokens in {len(found)} arms")
    if PROOF and len(found) == len(arms()):
        assert compared >= 100_000


@pytest.mark.parametrize(("model", "dtype"), list(product(MODELS, DTYPES)))
def test_with_stock_ops_the_same_schedules_differ(model, dtype):
    """The control: what makes the tests above able to fail."""
    found = compare(Arm(model=model, dtype=dtype, is_plain=True, num_requests=3, reply_tokens=20))
    assert found.unequal > 0.1 * found.compared
    assert found.max_abs_diff > 0


# -- two sides at a time ------------------------------------------------------------------------


def make_trainer(model, dtype, **config):
    """Over the ops that keep the contract here."""
    decoder = make_model(model, dtype)
    decoder.ops = proved_ops(model, dtype)
    return Trainer(decoder, TrainerConfig(**config), like="unused")


def make_engine(trainer, **settings):
    defaults = {"page_size": 48, "max_num_sequences": 8, "max_step_tokens": 512}
    return EmbeddedEngine(trainer.model, EmbeddedConfig(**{**defaults, **settings}))


class OtherExperts(MoE):
    """A router that sends every token to the neighbours of the experts that it should."""

    def _route(self, x_TD, ops, routing):
        logits_TE = self.router_logits(x_TD, ops)
        own_TA = ops.route(logits_TE, self.config.num_active_experts)[1]
        weights_TA, experts_TA = ops.route(
            logits_TE, self.config.num_active_experts, experts=(own_TA + 1) % logits_TE.shape[1]
        )
        if routing is not None:
            routing.chosen[self.routed_layer] = experts_TA
        return weights_TA, experts_TA


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sampler_that_routes_otherwise_is_followed_bit_for_bit(process_settings, dtype):
    trainer = make_trainer("gpt_oss", dtype, routing_replay="rollout")
    sampler = deepcopy(trainer.model)
    for block in sampler.layers:
        block.mlp.__class__ = OtherExperts
    engine = EmbeddedEngine(sampler, EmbeddedConfig(page_size=48, max_num_sequences=8))
    rows = asyncio.run(
        roll_out(
            engine, np.random.default_rng(0), "r", num_requests=5, reply_tokens=30, is_routed=True
        )
    )
    for row, found in zip(rows, trainer.forward(rows, column=None), strict=True):
        assert np.array_equal(found[row.loss_mask], row.columns["rollout_logprobs"][row.loss_mask])
    alone = make_trainer("gpt_oss", dtype).forward(rows, column=None)
    gaps = [
        np.nanmax(np.abs(a - r.columns["rollout_logprobs"]))
        for a, r in zip(alone, rows, strict=True)
    ]
    assert min(gaps) > 0.01, "it does route otherwise"


def play(trainer, *, seed):
    rng = np.random.default_rng(seed)
    return asyncio.run(roll_out(make_engine(trainer), rng, "r", num_requests=6, reply_tokens=30))


@pytest.mark.parametrize(("model", "dtype"), list(product(MODELS, DTYPES)))
def test_the_trainers_forward_is_the_engines_prefill(process_settings, model, dtype):
    """Over whole texts, in any chunks: `score` has no decode step."""
    rng = np.random.default_rng(0)
    trainer = make_trainer(model, dtype)
    vocab = trainer.model.config.vocab_size
    rows = []
    for i, length in enumerate((2, 41, 128, 129, 130, 300)):
        ids = rng.integers(0, vocab, length).astype(np.int32)
        rows.append(Sample(id=str(i), token_ids=ids, loss_mask=np.arange(length) > 0))

    async def score_all(engine):
        scores = await asyncio.gather(*(engine.score(row.token_ids) for row in rows))
        return [found.logprobs for found in scores]

    for (sampler, of_trainer), step_tokens in zip(THREADS, (8, 37, 130, 512), strict=True):
        torch.set_num_threads(of_trainer)
        wanted = trainer.forward(rows, column=None)
        torch.set_num_threads(sampler)
        found = asyncio.run(score_all(make_engine(trainer, max_step_tokens=step_tokens)))
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("model", "dtype"), list(product(MODELS, DTYPES)))
def test_the_engines_decode_steps_are_its_prefill(process_settings, model, dtype):
    trainer = make_trainer(model, dtype)
    rows = play(trainer, seed=1)

    async def score_all(engine):
        scores = await asyncio.gather(*(engine.score(row.token_ids) for row in rows))
        return [found.logprobs for found in scores]

    scores = asyncio.run(score_all(make_engine(trainer, page_size=128, max_step_tokens=100)))
    for row, found in zip(rows, scores, strict=True):
        recorded = row.columns["rollout_logprobs"][row.loss_mask]
        np.testing.assert_array_equal(found[row.loss_mask], recorded)


@pytest.mark.parametrize(("model", "dtype"), list(product(MODELS, DTYPES)))
def test_gradients_gather_over_micro_batches_of_any_size_at_the_same_log_probs(
    process_settings, model, dtype
):
    trainer = make_trainer(model, dtype)
    rows = play(trainer, seed=2)
    longest = max(len(row) for row in rows)
    found = []
    for budget in (longest, 2 * longest, 20 * longest):
        trainer.config = replace(trainer.config, max_tokens_per_microbatch=budget)
        num_batches = len(list(trainer.pack(rows)))
        trainer.forward_backward(rows, make_loss(Reinforce()), column="logprobs")
        found.append((num_batches, [row.columns["logprobs"].copy() for row in rows]))
        trainer.optimizer.zero_gradients()
    assert [n for n, _ in found] == sorted({n for n, _ in found}, reverse=True)
    assert found[-1][0] == 1
    for _, logprobs in found[:-1]:
        for a, b in zip(logprobs, found[-1][1], strict=True):
            np.testing.assert_array_equal(a, b)
