"""vLLM in this process: the protocol, log-probs of what was drawn from, weights and adapters."""

import asyncio

import numpy as np
import pytest
import torch
from check_engine import check_engine
from engine_contexts import context_of
from vllm_models import is_hybrid, make_changed, make_checkpoint, trainer_logprobs

from lockstep.engines.config import VllmConfig
from lockstep.engines.registry import make_engine
from lockstep.errors import CapabilityError, ConfigError
from lockstep.models import peft_format
from lockstep.models.config import ModelConfig
from lockstep.models.hf_io import hf_tensors, load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig
from lockstep.models.peft_io import save_adapter
from lockstep.ops.context import PackedContext
from lockstep.types import Request, SamplingParams

BLOCK = 128  # ids of vLLM's pages on a CPU
PROMPT = [3 + i % 300 for i in range(BLOCK + 12)]
CLOSE = 1e-4


def make_local(directory, *, dtype="float32", told=None, **settings):
    if is_hybrid(directory):
        settings["prefix_cache"] = False
    context = context_of(
        directory, vocab_size=ModelConfig.from_directory(directory).vocab_size, max_tokens=512,
        dtype=dtype, on_wait=lambda text: None if told is None else told.append(text),
    )  # fmt: skip
    config = VllmConfig(in_process=True, kv_cache_gib=0.0625, **settings)
    return make_engine(config, context)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("vllm") / "first")


@pytest.fixture(scope="module")
def engine(first):
    threads, seeded = torch.get_num_threads(), torch.random.get_rng_state()
    engine = make_local(first)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(threads)
    assert torch.equal(torch.random.get_rng_state(), seeded)
    yield engine
    asyncio.run(engine.close())


async def reply(engine, ids=PROMPT, *, name, seed=0, **sampling):
    request = Request(
        id=name,
        prompt_ids=np.array(ids, np.int32),
        sampling=SamplingParams(**{"max_tokens": 24} | sampling),
        seed=seed,
    )
    deltas = [delta async for delta in engine.generate(request)]
    ids = np.concatenate([delta.token_ids for delta in deltas])
    return ids, np.concatenate([delta.logprobs for delta in deltas])


def logits_of(directory, ids):
    model, row = load_checkpoint(directory), torch.tensor(ids)
    with torch.no_grad():
        return model.logits(model(row, torch.arange(len(row)), PackedContext.of([len(row)])))


def test_it_keeps_every_promise_of_the_protocol(engine, first):
    weights = dict(hf_tensors(load_checkpoint(first)))
    report = asyncio.run(check_engine(engine, prompt_ids=PROMPT, weights=weights, page_size=BLOCK))
    assert set(report.skipped) == {"support", "routed experts", "stop strings", "sleep and wake"}


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.4])
def test_log_probs_are_those_of_the_tempered_distribution(engine, first, temperature):
    ids, found = asyncio.run(reply(engine, name=f"tempered {temperature}", temperature=temperature))
    wanted = trainer_logprobs(first, [*PROMPT, *ids], temperature=temperature or 1.0)
    assert np.abs(found - wanted[len(PROMPT) :]).max() < CLOSE


def test_greedy_and_drawn_replies_share_a_batch(engine, first):
    async def both():
        return await asyncio.gather(
            reply(engine, name="greedy", temperature=0.0),
            reply(engine, name="drawn", temperature=0.6, seed=4),
        )

    for (ids, found), temperature in zip(asyncio.run(both()), (1.0, 0.6), strict=True):
        wanted = trainer_logprobs(first, [*PROMPT, *ids], temperature=temperature)
        assert np.abs(found - wanted[len(PROMPT) :]).max() < CLOSE


def test_log_probs_are_those_of_what_top_p_and_top_k_left(engine, first):
    cut = {"temperature": 0.9, "top_k": 7, "top_p": 0.85, "distribution": "sampled"}
    ids, found = asyncio.run(reply(engine, name="cut", **cut))
    logits = logits_of(first, [*PROMPT, *ids])[len(PROMPT) - 1 : -1] / cut["temperature"]
    top, order = logits.topk(cut["top_k"], -1)
    probs = top.softmax(-1)
    is_kept = probs.cumsum(-1) - probs < cut["top_p"]
    kept = torch.where(is_kept, top, -torch.inf).log_softmax(-1)
    place = (order == torch.tensor(ids)[:, None]).float().argmax(-1)
    wanted = kept.gather(-1, place[:, None])[:, 0].numpy()
    assert np.abs(found - wanted).max() < CLOSE
    with pytest.raises(CapabilityError, match="log-probs of sampled"):
        asyncio.run(reply(engine, name="other", **cut | {"distribution": "tempered"}))


def test_scores_are_those_of_the_trainer(engine, first):
    ids = np.array([5 + i % 250 for i in range(512)], np.int32)  # as long as it may be
    found = asyncio.run(engine.score(ids)).logprobs
    wanted = trainer_logprobs(first, ids)
    assert np.abs(found[1:] - wanted[1:]).max() < CLOSE
    with pytest.raises(CapabilityError, match="under model"):
        asyncio.run(engine.score(ids, distribution="tempered", temperature=0.7))


def test_a_scored_reply_takes_its_prompt_from_the_cache(engine, first):
    ids = np.array([9 + i % 200 for i in range(2 * BLOCK + 100)], np.int32)
    wanted = trainer_logprobs(first, ids)
    reply = 2 * BLOCK + 40
    # A reply's first id is predicted at the position before it, which must be computed.
    for start, num_cached in ((reply, 0), (reply, 2), (reply, 2), (2 * BLOCK, 1), (1, 0)):
        found = asyncio.run(engine.score(ids, first=start))
        assert found.num_cached_tokens == num_cached * BLOCK
        assert np.isnan(found.logprobs[:start]).all()
        assert np.abs(found.logprobs[start:] - wanted[start:]).max() < CLOSE


def test_more_prompts_than_one_step_computes_keep_their_seeds(engine):
    prompts = [[5 + (i + 7 * number) % 300 for i in range(300)] for number in range(40)]

    async def everyone(tag):
        return await asyncio.gather(
            *(reply(engine, ids, name=f"{tag} {i}", seed=i) for i, ids in enumerate(prompts))
        )

    first, again = asyncio.run(everyone("first")), asyncio.run(everyone("again"))
    for (ids, _), (others, _) in zip(first, again, strict=True):
        assert np.array_equal(ids, others)


def test_tensors_and_directories_are_taken_while_it_runs(engine, first, tmp_path):
    second = make_changed(first, tmp_path / "second")
    ids = np.array(PROMPT, np.int32)
    for version, (source, directory) in enumerate(
        ((dict(hf_tensors(load_checkpoint(second))), second), (str(first), first)), start=50
    ):
        asyncio.run(engine.load_weights(source, version=version))
        found = asyncio.run(engine.score(ids))
        assert found.policy_version == version
        wanted = trainer_logprobs(directory, ids)
        assert np.abs(found.logprobs[1:] - wanted[1:]).max() < CLOSE


def test_a_shipped_model_with_heads_narrower_than_the_kernels_is_sampled():
    directory = locate_model("tiny-qwen3")
    engine = make_local(directory)
    ids, found = asyncio.run(reply(engine, name="narrow"))
    wanted = trainer_logprobs(directory, [*PROMPT, *ids])[len(PROMPT) :]
    assert np.abs(found - wanted).max() < CLOSE
    asyncio.run(engine.close())


def test_what_this_build_cannot_do_is_refused(first):
    with pytest.raises(CapabilityError, match="are for GPUs"):
        make_local(first, deterministic=True)
    with pytest.raises(ConfigError, match=r"engine\.args"):
        make_local(first, args=("--no-such-argument=1",))


def test_an_adapter_is_taken_beside_the_weights(first, tmp_path):
    model = load_checkpoint(first)
    shape = peft_format.resolve_shape(LoraConfig(rank=4), model.config, first, name="first")
    add_adapter(model, shape, seed=0)
    engine = make_local(first, max_adapter_rank=4)
    assert "adapter" in engine.capabilities.weight_sources
    ids = np.array(PROMPT, np.int32)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0.0, 0.2)
        directory = tmp_path / f"adapter-{version}"
        save_adapter(model, directory, base=first)
        asyncio.run(engine.load_weights(str(directory), version=version))
        found = asyncio.run(engine.score(ids)).logprobs
        wanted = trainer_logprobs(model, ids)
        assert np.abs(found[1:] - wanted[1:]).max() < 1e-3
    asyncio.run(engine.close())


def test_adapters_are_taken_by_name_and_mixed_in_a_batch(first, tmp_path):
    model = load_checkpoint(first)
    shape = peft_format.resolve_shape(LoraConfig(rank=4), model.config, first, name="first")
    add_adapter(model, shape, seed=0)
    engine = make_local(first, max_adapter_rank=4, args=("--max-loras=2",))
    ids, wanted = np.array(PROMPT, np.int32), {}
    wanted[""] = trainer_logprobs(load_checkpoint(first), ids)

    def change(name, version):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0.0, 0.2)
        directory = tmp_path / f"{name}-{version}"
        save_adapter(model, directory, base=first)
        wanted[name] = trainer_logprobs(model, ids)
        return engine.load_adapter(name, str(directory), version=version)

    async def scores():
        return await asyncio.gather(*(engine.score(ids, adapter=name) for name in wanted))

    async def look():
        for name, version in (("a", 3), ("b", 4), ("a", 5)):
            await change(name, version)
            for name, found in zip(wanted, await scores(), strict=True):
                assert np.abs(found.logprobs[1:] - wanted[name][1:]).max() < 1e-3
        assert found.policy_version == 4
        await engine.drop_adapter("b")
        await engine.close()

    asyncio.run(look())


def test_weights_that_cannot_be_replaced_in_place_start_the_engine_again(first, tmp_path):
    second, told = make_changed(first, tmp_path / "second"), []
    engine = make_local(first, max_adapter_rank=4, told=told)
    asyncio.run(engine.load_weights(str(second), version=1))
    ids = np.array(PROMPT, np.int32)
    found = asyncio.run(engine.score(ids)).logprobs
    assert np.abs(found[1:] - trainer_logprobs(second, ids)[1:]).max() < CLOSE
    assert any("again" in text for text in told)
    asyncio.run(engine.close())
