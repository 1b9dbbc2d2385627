"""The embedded engine in a process of its own answers as the one in this process does."""

import asyncio
import os
import signal
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from check_engine import check_engine
from engine_contexts import context_of
from engine_models import deltas_of, reply_of, request

from lockstep.engines.config import EmbeddedConfig, PoolConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.engines.pool import Pool
from lockstep.engines.registry import make_engine
from lockstep.engines.worker_engine import outlines_of, shared, tensors_in
from lockstep.errors import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    EngineDownError,
    EngineError,
)
from lockstep.launch.shared_file import Newest, mapped
from lockstep.models.hf_io import hf_tensors, load_checkpoint, save_checkpoint
from lockstep.models.locate import locate_model
from lockstep.ops.invariant import InvariantOps, Rules
from lockstep.renderers.tokenizer import Tokenizer

DIRECTORY = locate_model("tiny-gpt-oss")
CONFIG = EmbeddedConfig(replicas=1, kv_cache_tokens=2048, max_num_sequences=16)
RULES = Rules(row_quantum=8)
"""Not the default: the worker takes those of the trainer's process."""
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(DIRECTORY)


@pytest.fixture(scope="module")
def context(model, tmp_path_factory):
    token_bytes = Tokenizer.from_file(DIRECTORY).all_token_bytes()
    return context_of(
        DIRECTORY, model=model, token_bytes=token_bytes, vocab_size=model.config.vocab_size,
        scratch=tmp_path_factory.mktemp("run"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(context):
    context.model.ops = InvariantOps(RULES)
    engine = make_engine(CONFIG, context)
    yield engine
    asyncio.run(engine.close())


def other_weights(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in hf_tensors(model).items()
    }


def ask(engine, *requests):
    async def run():
        return await asyncio.gather(*(reply_of(engine, r) for r in requests))

    return asyncio.run(run())


def test_it_keeps_every_promise_of_an_engine(engine, context, model):
    report = asyncio.run(
        check_engine(
            engine,
            prompt_ids=PROMPT,
            token_bytes=context.token_bytes,
            weights=dict(hf_tensors(model)),
        )
    )
    assert not report.skipped and len(report.passed) == 18
    assert engine.capabilities.weight_sources == ("tensors", "directory")


def test_it_samples_the_bits_of_the_engine_in_this_process(engine, context, model, tmp_path):
    here = EmbeddedEngine(model, CONFIG, token_bytes=context.token_bytes)
    assert engine.capabilities.fingerprint == here.capabilities.fingerprint
    tensors = other_weights(model, seed=1)
    changed = load_checkpoint(DIRECTORY)
    with torch.no_grad():
        for (_, ours), theirs in zip(hf_tensors(changed).items(), tensors.values(), strict=True):
            ours.copy_(theirs)
    save_checkpoint(changed, tmp_path / "changed", like=DIRECTORY)
    for source in (hf_tensors(model), tensors, str(tmp_path / "changed"), tensors):
        version = engine.version + 1
        asyncio.run(engine.load_weights(source, version=version))
        asyncio.run(here.load_weights(source, version=version))
        asked = [
            request(f"{version}-{i}", [*PROMPT, i], seed=i, max_tokens=8, temperature=0.8)
            for i in range(8)
        ]
        for (ids, logprobs), (expected_ids, expected) in zip(
            ask(engine, *asked), ask(here, *asked), strict=True
        ):
            np.testing.assert_array_equal(ids, expected_ids)
            np.testing.assert_array_equal(logprobs, expected)


def test_errors_come_back_with_their_type_and_text_and_the_worker_goes_on(engine, model):
    with pytest.raises(EngineError, match=r"token 0\b.*id 9999999"):
        ask(engine, request("outside", [9999999]))
    with pytest.raises(CapabilityError, match="top-p and top-k"):
        asyncio.run(engine.score(np.array(PROMPT, np.int32), distribution="sampled"))
    version, tensors = engine.version, other_weights(model, seed=2)
    asyncio.run(engine.load_weights(tensors, version=version + 1))
    before = ask(engine, request("before", PROMPT, temperature=0.0))
    torn = dict(hf_tensors(model))
    name = next(iter(torn))
    torn[name] = torn[name][:-1]
    with pytest.raises(CheckpointError, match=r"misshapen \(1\)"):
        asyncio.run(engine.load_weights(torn, version=version + 2))
    with pytest.raises(EngineError, match="takes tensors or directory; found shared"):
        asyncio.run(engine.load_weights(None, version=version + 2))
    assert engine.version == version + 1
    after = ask(engine, request("after", PROMPT, temperature=0.0))
    np.testing.assert_array_equal(before[0], after[0])


def test_a_worker_that_dies_fails_what_is_in_flight_and_is_started_again(
    context, model, monkeypatch
):
    monkeypatch.setattr(EmbeddedConfig, "restarts", 1)
    engine, weights = make_engine(CONFIG, context), hf_tensors(model)

    async def kill():
        asked = request("long", PROMPT, max_tokens=200, stream=True)
        with pytest.raises(EngineDownError, match=r"engine 0\b.*\d+.*SIGKILL"):
            async for _ in engine.generate(asked):
                os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDownError, match="was ended by SIGKILL"):
            await engine.score(np.array(PROMPT, np.int32))
        with pytest.raises(EngineDownError, match="SIGKILL"):
            await engine.ping()
        await asyncio.gather(*(engine.load_weights(weights, version=1) for _ in range(2)))
        await engine.ping()
        assert len(await deltas_of(engine, request("a", PROMPT))) == 1
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDownError):
            await engine.score(np.array(PROMPT, np.int32))
        with pytest.raises(EngineDownError, match="SIGKILL"):  # once was all
            await engine.load_weights(weights, version=2)
        await engine.close()
        with pytest.raises(EngineError, match="the engine is closed"):
            await engine.score(np.array(PROMPT, np.int32))

    asyncio.run(kill())


@pytest.mark.parametrize("pause", [0.0, 0.3])
def test_a_worker_may_take_longer_to_start_again_than_to_answer(context, model, pause):
    """A pool waits for its only worker: without it the run would end."""
    worker = make_engine(CONFIG, context)
    pool = Pool([worker], PoolConfig(frozen_seconds=0.4), names=["engine 0"])

    async def kill():
        await pool.load_weights(hf_tensors(model), version=1)
        os.kill(worker.pid, signal.SIGKILL)
        asked = asyncio.ensure_future(reply_of(pool, request("a", PROMPT)))
        while pool.ready:
            await asyncio.sleep(0.01)
        await asyncio.sleep(pause)  # after it the worker starts, to load version 1
        await pool.load_weights(other_weights(model, seed=2), version=2)
        assert (pool.version, len(pool.ready)) == (2, 1)
        await asked
        await pool.close()

    asyncio.run(kill())


def test_an_engine_that_cannot_be_made_says_why(context, tmp_path):
    broken = replace(context, directory=tmp_path, scratch=None)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        make_engine(CONFIG, broken)
    with pytest.raises(CapabilityError, match="runs the decoder, and cannot run a dict"):
        make_engine(CONFIG, replace(context, model={}))
    with pytest.raises(ConfigError, match=r"EmbeddedConfig\.replicas=-1"):
        EmbeddedConfig(replicas=-1)


def test_weights_on_their_way_are_written_once_for_all_who_read_them():
    newest = Newest()
    first = {"a": torch.arange(5.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
    outlines = outlines_of(first)
    file = newest.written(first, 1, partial(shared, first, outlines))
    assert newest.written(first, 1, partial(shared, first, outlines)) is file
    second = {"a": torch.zeros(5), "b": torch.zeros(2, 3, dtype=torch.bfloat16)}
    other = newest.written(second, 2, partial(shared, second, outlines))
    assert newest.has(second, 2) and not newest.has(first, 1)
    found = tensors_in(mapped(file.address), outlines)
    assert all(torch.equal(found[name], first[name]) for name in first), "the first is still read"
    assert found["b"].dtype == torch.bfloat16
    address = file.address
    del file, other
    newest.written(first, 3, partial(shared, first, outlines))
    with pytest.raises(EngineError, match="the trainer has given this load up"):
        mapped(address)
    assert all(torch.equal(found[name], first[name]) for name in first)
