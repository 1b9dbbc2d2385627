"""Lockstep's decoder inside vLLM: the trainer's bits, whatever vLLM's scheduler puts together."""

import asyncio
import json
from dataclasses import replace

import engine_contexts
import numpy as np
import pytest
import torch
from check_engine import check_engine
from full_counts import PROOF
from safetensors.torch import load_file, save_file
from vllm_models import CONFIGS, VOCAB, make_changed, make_checkpoint

from lockstep.engines.config import EmbeddedConfig, VllmConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.engines.ledger import seed_after
from lockstep.engines.registry import make_engine
from lockstep.engines.vllm.plugin import OTHER_CACHES
from lockstep.errors import CapabilityError, EngineError
from lockstep.models.hf_io import hf_tensors, load_checkpoint
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig
from lockstep.models.peft_format import resolve_shape
from lockstep.models.peft_io import save_adapter
from lockstep.ops.context import PackedContext, Support
from lockstep.ops.contract import Fingerprint
from lockstep.ops.selftest import fingerprint, prove
from lockstep.types import Ragged, Request, SamplingParams

MAX_TOKENS = 512
STOP = 7
SMALL_STEPS = ("--max-num-batched-tokens=96", "--block-size=32")
"""Prompts are computed in chunks, and found again in the cache up to a block's end."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("decoder")


def model_of(directory, dtype="float32"):
    """The trainer's decoder, with the ops that the self-test has found."""
    model = load_checkpoint(directory, dtype=getattr(torch, dtype))
    proof = prove(model)
    assert proof.is_kept, proof.failure
    model.ops = proof.ops
    return model


def context_of(directory, model, **settings):
    dtype = "float32" if model is None else str(model.embedding.dtype).removeprefix("torch.")
    shape = {"vocab_size": VOCAB, "max_tokens": MAX_TOKENS, "dtype": dtype}
    return engine_contexts.context_of(directory, model=model, **shape, **settings)


def make_local(directory, model, *, args=(), decoder="lockstep", gib=0.03125, **settings):
    config = VllmConfig(
        in_process=True, kv_cache_gib=gib, decoder=decoder, args=tuple(args), **settings
    )
    return make_engine(config, context_of(directory, model))


def request_of(number, prompt, **sampling):
    return Request(
        id=f"{number}",
        prompt_ids=np.asarray(prompt, np.int32),
        sampling=SamplingParams(**{"max_tokens": 24} | sampling),
        seed=number,
    )


def random_requests(seed, count, *, distributions=("model", "tempered"), longest=350):
    """Requests of random temperatures, with prompts of up to `longest` ids; some share a beginning,
    and half of them can stop early."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(2, VOCAB, 200)
    for number in range(count):
        own = rng.integers(2, VOCAB, int(rng.integers(1, 150)))
        prompt = [*shared[: rng.choice([0, 70, 200])], *own][:longest]
        yield request_of(
            number,
            prompt,
            max_tokens=int(rng.integers(1, 120)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            distribution=str(rng.choice(distributions)),
            stop_ids=(STOP, 11, 13) if rng.random() < 0.5 else (),
        )


async def replies(engine, requests, *, arrive_late=True):
    """(ids, log-probs, deltas) of each request; arriving a few at a time."""

    async def one(at, request):
        for _ in range(5 * (at // 6) if arrive_late else 0):
            await asyncio.sleep(0)
        deltas = [delta async for delta in engine.generate(request)]
        ids = np.concatenate([delta.token_ids for delta in deltas])
        return ids, np.concatenate([delta.logprobs for delta in deltas]), deltas

    return await asyncio.gather(*(one(at, request) for at, request in enumerate(requests)))


def trained(model, request, ids, support=None):
    """Log-probs of the sampled ids by the trainer's packed forward, with another row beside, over
    the ids that each was drawn from."""
    row = torch.tensor([*request.prompt_ids, *ids], dtype=torch.int64)
    other = torch.arange(2, 39)
    packed = torch.cat([other, row])
    positions = torch.cat([torch.arange(len(other)), torch.arange(len(row))])
    first = len(other) + len(request.prompt_ids)
    sampling = request.sampling
    is_tempered = sampling.distribution != "model" and sampling.temperature > 0
    with torch.no_grad():
        logprobs, _ = model.score(
            packed,
            positions,
            PackedContext.of([len(other), len(row)]),
            predictors_N=torch.arange(first - 1, len(packed) - 1),
            targets_N=packed[first:],
            temperature=sampling.temperature if is_tempered else 1.0,
            support=None if support is None else Support.of(support),
        )
    return logprobs.numpy()


def random_cuts(requests):
    """The requests with random top-p and top-k, which record what they leave."""
    rng = np.random.default_rng(7)
    for request in requests:
        cut = {
            "top_p": float(rng.choice([0.5, 0.9, 1.0])),
            "top_k": int(rng.choice([0, 3, 40])),
            "temperature": 0.8,
            "distribution": "sampled",
            "record_support": True,
        }
        yield replace(request, sampling=replace(request.sampling, **cut))


def num_unequal(model, requests, found):
    """(unequal log-probs, all)."""
    unequal = total = 0
    for request, (ids, logprobs, deltas) in zip(requests, found, strict=True):
        support = None
        if request.sampling.record_support and request.sampling.is_truncated:
            support = Ragged.of([kept for delta in deltas for kept in delta.support])
        unequal += int((trained(model, request, ids, support) != logprobs).sum())
        total += len(ids)
    return unequal, total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - OTHER_CACHES))
def test_every_log_prob_is_the_trainers(kind, dtype, place, capsys):
    directory = make_checkpoint(kind, place / kind, std=0.15)
    model = model_of(directory, dtype)
    engine = make_local(directory, model, args=SMALL_STEPS)
    own = fingerprint(model.ops, model.embedding.dtype, torch.device("cpu")).text
    assert engine.capabilities.fingerprint == own
    requests = [*random_requests(0, 400 if PROOF else 48)]
    requests += random_cuts(
        replace(request, id=f"cut {request.id}")
        for request in random_requests(1, 100 if PROOF else 8)
    )
    found = asyncio.run(replies(engine, requests))
    assert {delta.fingerprint for *_, deltas in found for delta in deltas} == {own}
    assert sum(deltas[0].num_cached_tokens for *_, deltas in found) > 1000
    assert any(deltas[-1].finish_reason == "stop" for *_, deltas in found)
    unequal, total = num_unequal(model, requests, found)
    with capsys.disabled():
        print(f"\n{kind} {dtype}: {unequal} of {total:,} log-probs differ from the trainer's")
    assert total > (10_000 if PROOF else 1000)
    assert unequal == 0
    asyncio.run(engine.close())


@pytest.mark.parametrize("kind", sorted(OTHER_CACHES))
def test_latents_and_states_are_refused_by_name_before_anything_loads(kind, place):
    directory = make_checkpoint(kind, place / kind)
    for weights in directory.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(CapabilityError, match=rf"no decoder of a {kind} for vLLM.*decoder=vllm"):
        make_local(directory, None)


@pytest.fixture(scope="module")
def first(place):
    return make_checkpoint("qwen3", place / "first", std=0.15)


@pytest.fixture(scope="module")
def model(first):
    return model_of(first)


@pytest.fixture(scope="module")
def engine(first, model):
    engine = make_local(first, model, args=SMALL_STEPS)
    yield engine
    asyncio.run(engine.close())


def test_it_keeps_every_promise_of_the_protocol(engine, first):
    prompt = [3 + i % 300 for i in range(140)]
    weights = dict(hf_tensors(load_checkpoint(first)))
    report = asyncio.run(check_engine(engine, prompt_ids=prompt, weights=weights, page_size=32))
    assert set(report.skipped) == {"routed experts", "stop strings", "sleep and wake"}


def test_a_seed_draws_what_the_embedded_engine_draws_whatever_is_in_the_batch(engine, model):
    requests = [replace(request, id=f"b{request.id}") for request in random_requests(2, 24)]
    found = asyncio.run(replies(engine, requests))
    embedded = EmbeddedEngine(model, EmbeddedConfig())
    # An engine behind a wire takes a hash of the seed: servers take 31 bits.
    same = [replace(request, seed=seed_after(request.seed, 0)) for request in requests]
    wanted = asyncio.run(replies(embedded, same))
    for (ids, logprobs, _), (other_ids, others, _) in zip(found, wanted, strict=True):
        assert np.array_equal(ids, other_ids)
        assert np.array_equal(logprobs, others)


def test_what_top_p_and_top_k_left_is_handed_over_and_the_bits_are_the_trainers(engine, model):
    requests = [
        replace(request, id=f"c{request.id}") for request in random_cuts(random_requests(5, 30))
    ]
    requests += [replace(request, id=f"d{request.id}") for request in random_requests(6, 6)]
    found = asyncio.run(replies(engine, requests))
    unequal, total = num_unequal(model, requests, found)
    assert total > 1000
    assert unequal == 0
    assert any(len(kept) for *_, deltas in found for d in deltas[:1] for kept in d.support or ())


def test_several_replies_of_one_prompt_share_its_beginning(engine, model):
    prompt = [3 + i % 250 for i in range(170)]
    requests = [request_of(300 + number, prompt, max_tokens=60) for number in range(12)]
    found = asyncio.run(replies(engine, requests))
    assert len({tuple(ids) for ids, *_ in found}) == 12
    assert num_unequal(model, requests, found) == (0, 720)


def test_weights_that_change_in_the_middle_of_a_reply_keep_the_bits(engine, first, model, place):
    second = make_changed(first, place / "second")
    changed = load_checkpoint(second, ops=model.ops)
    prompt = [5 + i % 100 for i in range(90)]
    request = request_of(700, prompt, max_tokens=300)

    async def play():
        reply = asyncio.create_task(replies(engine, [request]))
        for _ in range(120):
            await asyncio.sleep(0)
        await engine.load_weights(dict(hf_tensors(changed)), version=40)
        found = await reply
        await engine.load_weights(str(first), version=41)
        return found, await replies(engine, [request_of(701, prompt, max_tokens=50)])

    ((ids, logprobs, deltas),), again = asyncio.run(play())
    versions = np.concatenate([np.full(len(d.token_ids), d.policy_version) for d in deltas])
    is_new = versions == 40
    assert 0 < is_new.sum() < len(ids)
    assert np.array_equal(logprobs[~is_new], trained(model, request, ids)[~is_new])
    assert np.array_equal(logprobs[is_new], trained(changed, request, ids)[is_new])
    assert num_unequal(model, [request_of(701, prompt)], again) == (0, 50)


def test_scores_are_the_trainers(engine, model):
    ids = np.array([5 + i % 250 for i in range(MAX_TOKENS)], np.int32)
    found = asyncio.run(engine.score(ids)).logprobs
    wanted = trained(model, request_of(0, ids[:1], distribution="model"), ids[1:])
    assert np.array_equal(found[1:], wanted)
    cached = asyncio.run(engine.score(ids, first=400))
    assert cached.num_cached_tokens == 384, "of the score before: blocks of 32"
    assert np.array_equal(cached.logprobs[400:], wanted[399:])


def test_what_the_draws_do_not_know_is_refused(engine):
    from vllm import SamplingParams as VllmSampling

    from lockstep.engines.vllm.sampler import DrawSettings

    for settings in ({"min_p": 0.1}, {"logprobs": 3}, {"prompt_logprobs": 2}):
        with pytest.raises(ValueError, match="Leave it out"):
            DrawSettings.validate_params(VllmSampling(**settings))
    asked = request_of(9, [5]), VllmSampling(min_p=0.1)
    with pytest.raises(EngineError, match="min_p"), engine.wire._calling(*asked):
        pass


def test_vllms_own_model_differs_and_says_nothing_of_its_numerics(first, model):
    engine = make_local(first, model, decoder="vllm")
    requests = [*random_requests(1, 16, distributions=["tempered"])]
    unequal, total = num_unequal(model, requests, asyncio.run(replies(engine, requests)))
    assert engine.capabilities.fingerprint == ""
    assert unequal > total / 4
    asyncio.run(engine.close())


def test_preempted_requests_are_computed_again_to_the_same_bits(first, model):
    # 2 layers of 2 heads of 32, keys and values, 4 bytes: 1 KiB a token, 20 blocks of 32.
    engine = make_local(first, model, args=SMALL_STEPS, gib=20 * 32 / 2**20)
    prompts = np.random.default_rng(3).integers(2, VOCAB, (12, 40))
    requests = [request_of(at, prompt, max_tokens=100) for at, prompt in enumerate(prompts)]
    scheduler = engine.wire._engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []
    scheduler._preempt_request = lambda request, *args, **named: (
        preempted.append(request.request_id),
        preempt(request, *args, **named),
    )[1]
    found = asyncio.run(replies(engine, requests))
    assert len(preempted) > 3
    assert num_unequal(model, requests, found) == (0, 1200)
    asyncio.run(engine.close())


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--enable-lora",), "adds the adapter itself"),
        (("--kv-cache-dtype=fp8",), "keys and values"),
    ],
)
def test_settings_of_vllm_that_change_the_numbers_are_refused(args, expected, first, model):
    with pytest.raises(EngineError, match=expected):
        make_local(first, model, args=args)


def test_the_self_test_finds_the_ops_where_no_trainer_hands_them_over(first, model):
    config = VllmConfig(in_process=True, kv_cache_gib=0.03125, decoder="lockstep")
    engine = make_engine(config, context_of(first, None))
    found = Fingerprint.from_text(engine.capabilities.fingerprint)
    assert found == fingerprint(model.ops, torch.float32, torch.device("cpu"))
    asyncio.run(engine.close())


def test_mxfp4_of_gpt_oss_is_unpacked_as_the_trainer_unpacks_it(place):
    directory = make_checkpoint("gpt_oss", place / "packed", std=0.15)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(config))
    (path,) = directory.glob("*.safetensors")
    tensors, generator = load_file(path), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, width, outputs = tensors.pop(name).shape
        shape = num_experts, outputs, width // 32
        random = {"dtype": torch.uint8, "generator": generator}
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), **random)
        tensors[f"{name}_scales"] = torch.randint(120, 124, shape, **random)
    save_file(tensors, path, metadata={"format": "pt"})
    model = model_of(directory, "bfloat16")
    engine = make_local(directory, model, args=SMALL_STEPS)
    requests = [*random_requests(0, 12)]
    unequal, total = num_unequal(model, requests, asyncio.run(replies(engine, requests)))
    assert (unequal, total > 300) == (0, True)
    asyncio.run(engine.close())


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3"])
def test_an_adapter_beside_the_weights_has_the_trainers_bits(kind, place):
    """Unmerged on both sides, as it is trained; its update too."""
    directory = make_checkpoint(kind, place / f"{kind}-base", std=0.15)
    model = load_checkpoint(directory)
    shape = resolve_shape(LoraConfig(rank=4), model.config, directory, name=kind)
    add_adapter(model, shape, seed=0)
    proof = prove(model)
    assert proof.is_kept, proof.failure
    model.ops = proof.ops
    engine = make_local(directory, model, args=SMALL_STEPS)
    assert "adapter" in engine.capabilities.weight_sources
    for version in (1, 2):
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0.0, 0.2, generator=generator)
        save_adapter(model, place / f"{kind}-adapter", base=directory)
        asyncio.run(engine.load_weights(str(place / f"{kind}-adapter"), version=version))
        requests = [
            replace(request, id=f"{version}-{request.id}")
            for request in random_requests(version, 16, longest=100)
        ]
        unequal, total = num_unequal(model, requests, asyncio.run(replies(engine, requests)))
        assert total > 200
        assert unequal == 0
    with pytest.raises(EngineError, match="adapter beside its weights"):
        asyncio.run(engine.load_weights(str(directory), version=3))
    asyncio.run(engine.close())
