"""Lockstep's decoder in a vLLM server that the run starts, and attached to one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_decoder import (
    model_of,
    num_unequal,
    random_cuts,
    random_requests,
    replies,
    request_of,
    trained,
)
from vllm_models import make_changed, make_checkpoint, run

from lockstep.engines.config import VllmConfig
from lockstep.engines.registry import make_engine
from lockstep.errors import CapabilityError
from lockstep.models.hf_io import load_checkpoint
from lockstep.ops.selftest import fingerprint


@pytest.fixture(scope="module")
def first(place):
    return make_checkpoint("gpt_oss", place / "decoder", std=0.15)


@pytest.fixture(scope="module")
def model(first):
    return model_of(first)


@pytest.fixture(scope="module")
def server(started, first):
    args = ("--max-num-batched-tokens=96", "--block-size=32")
    with started(first, decoder="lockstep", args=args) as engine:
        yield engine


def test_every_log_prob_is_the_trainers(server, model):
    own = fingerprint(model.ops, torch.float32, torch.device("cpu")).text
    assert server.capabilities.fingerprint == own
    cut = random_cuts(random_requests(1, 8, longest=100))
    requests = [*random_requests(0, 24, longest=100)]
    requests += [replace(request, id=f"cut {request.id}") for request in cut]
    found = run(replies(server, requests))
    unequal, total = num_unequal(model, requests, found)
    assert total > 500
    assert unequal == 0


def test_weights_that_change_in_the_middle_of_a_reply_keep_the_bits(server, first, model, place):
    second = make_changed(first, place / "decoder-second")
    changed = load_checkpoint(second, ops=model.ops)
    prompt = [5 + i % 100 for i in range(30)]
    request = replace(request_of(700, prompt, max_tokens=220), stream=True)

    async def play():
        deltas = []
        async for delta in server.generate(request):
            deltas.append(delta)
            if len(deltas) == 1:
                await server.load_weights(str(second), version=40)
        return deltas

    deltas = run(play())
    ids = np.concatenate([delta.token_ids for delta in deltas])
    logprobs = np.concatenate([delta.logprobs for delta in deltas])
    versions = np.concatenate([np.full(len(d.token_ids), d.policy_version) for d in deltas])
    is_new = versions == 40
    assert 0 < is_new.sum() < len(ids)
    assert np.array_equal(logprobs[~is_new], trained(model, request, ids)[~is_new])
    assert np.array_equal(logprobs[is_new], trained(changed, request, ids)[is_new])


def test_a_server_is_attached_to_as_what_it_is(server, first, place):
    settings = {"urls": (server.wire.url,), "take_over": True}
    context = server.wire._context
    attached = make_engine(VllmConfig(**settings, decoder="lockstep"), context)
    assert attached.capabilities.fingerprint == server.capabilities.fingerprint
    with pytest.raises(CapabilityError, match="runs Lockstep's decoder"):
        make_engine(VllmConfig(**settings, decoder="vllm"), context)


def test_a_server_with_vllms_own_model_is_told_how_to_have_the_decoder(started, place):
    plain = make_checkpoint("qwen3", place / "plain")
    with started(plain) as engine:
        settings = VllmConfig(urls=(engine.wire.url,), take_over=True, decoder="lockstep")
        with pytest.raises(CapabilityError, match=r"vLLM's.*--worker-cls"):
            make_engine(settings, engine.wire._context)
