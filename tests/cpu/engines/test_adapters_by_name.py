"""Adapters that the embedded engine has by name: isolation, replacement, errors."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_models import ask, make_engine, make_model, packed_logprobs, prompt, request
from watched_ops import CrowdedOps

from lockstep.engines.base import Engine
from lockstep.errors import CapabilityError, CheckpointError, EngineError
from lockstep.models.adapters import decoder_over
from lockstep.models.hf_io import hf_tensors, save_checkpoint
from lockstep.models.locate import locate_model
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.models.peft_io import save_adapter
from lockstep.ops.invariant import InvariantOps


def make_base(kind="gpt_oss", **settings):
    model = make_model(kind, **settings)
    model.ops = InvariantOps()
    return model


def adapted(base, *, seed, rank=8):
    model = decoder_over(base)
    add_adapter(model, lora_shape(LoraConfig(rank=rank), base.config), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def loaded(base, *, version=0, **models):
    engine = make_engine(base)
    for name, model in models.items():
        asyncio.run(engine.load_adapter(name, model, version=version))
    return engine


def by(adapter, name, ids, **settings):
    return replace(request(name, ids, **settings), adapter=adapter)


def logprobs_of(model, ids, reply_ids):
    return packed_logprobs(model, [*ids, *reply_ids])[len(ids) :]


def test_each_request_is_sampled_by_the_adapter_that_it_names():
    base = make_base()
    models = {"": base, "a": adapted(base, seed=1), "b": adapted(base, seed=2)}
    engine = loaded(base, a=models["a"], b=models["b"], version=7)
    assert engine.capabilities.has_adapters
    ids = prompt(9)
    replies = ask(engine, *(by(name, f"r{name}", ids) for name in models))
    assert len({tuple(reply.token_ids) for reply in replies}) == 3
    for (name, model), reply in zip(models.items(), replies, strict=True):
        assert np.array_equal(reply.logprobs, logprobs_of(model, ids, reply.token_ids))
        assert reply.policy_version == (7 if name else 0)
        text = np.concatenate([ids, reply.token_ids])
        scores = asyncio.run(engine.score(text, adapter=name))
        assert np.array_equal(scores.logprobs[len(ids) :], reply.logprobs)
        assert scores.policy_version == reply.policy_version


def test_a_prefix_is_shared_within_an_adapter_alone():
    base = make_base()
    engine = loaded(base, a=adapted(base, seed=1), b=adapted(base, seed=2))
    ids = prompt(40)
    names = ["", "a", "b"]
    first = ask(engine, *(by(name, f"1{name}", ids) for name in names))
    again = ask(engine, *(by(name, f"2{name}", ids, seed=1) for name in names))
    assert [reply.num_cached_tokens for reply in first] == [0, 0, 0]
    assert [reply.num_cached_tokens for reply in again] == [39, 39, 39]


def test_eight_samples_of_an_adapter_wait_for_its_prefix_and_not_for_anothers():
    base = make_base()
    engine = loaded(base, a=adapted(base, seed=1))
    ids = prompt(40)
    ask(engine, *(by(name, f"{name}{i}", ids, seed=i) for name in ("", "a") for i in range(8)))
    assert engine.stats["prefilled_tokens"] == 2 * (40 + 7)


async def after(engine, num_tokens, do, *requests):
    """The deltas of requests; `do` is awaited when each of them has sampled `num_tokens`."""
    counts = dict.fromkeys((r.id for r in requests), 0)
    is_done = False

    async def read(asked):
        nonlocal is_done
        deltas = []
        async for delta in engine.generate(asked):
            deltas.append(delta)
            counts[asked.id] += len(delta.token_ids)
            if not is_done and min(counts.values()) >= num_tokens:
                is_done = True
                await do()
        return deltas

    return await asyncio.gather(*(read(asked) for asked in requests))


@pytest.mark.parametrize("rank", [8, 3])
def test_new_tensors_of_an_adapter_end_the_segments_of_its_requests_alone(rank):
    base = make_base()
    old, new = adapted(base, seed=1), adapted(base, seed=3, rank=rank)
    other = adapted(base, seed=2)
    engine = loaded(base, a=old, b=other)
    ids = prompt(20)

    async def load():
        await engine.load_adapter("a", new, version=5)

    asked = [by(n, f"r{n}", ids, stream=True, max_tokens=20) for n in ("a", "b", "")]
    found = asyncio.run(after(engine, 4, load, *asked))
    for (model, _), deltas in zip([(old, "a"), (other, "b"), (base, "")], found, strict=True):
        reply_ids = np.concatenate([d.token_ids for d in deltas])
        logprobs = np.concatenate([d.logprobs for d in deltas])
        versions = np.concatenate([np.full(len(d.token_ids), d.policy_version) for d in deltas])
        wanted = logprobs_of(model, ids, reply_ids)
        if model is old:
            assert 4 <= (versions == 0).sum() < 20 and set(versions) == {0, 5}
            assert "weight_update" in [d.finish_reason for d in deltas]
            wanted = np.where(versions == 5, logprobs_of(new, ids, reply_ids), wanted)
        else:
            assert set(versions) == {0}
            assert "weight_update" not in [d.finish_reason for d in deltas]
        assert np.array_equal(logprobs, wanted)
    again = ask(engine, by("a", "again", ids), by("b", "again b", ids, seed=1))
    assert [reply.num_cached_tokens for reply in again] == [19, 19], "the new keys are cached"


def test_keys_that_are_kept_over_a_pause_are_told_by_the_fingerprint():
    base = make_base()
    engine = loaded(base, a=adapted(base, seed=1), b=adapted(base, seed=2))

    async def load():
        await engine.pause()
        await engine.load_adapter("a", adapted(base, seed=3), version=1)
        await engine.resume(kv="keep")

    asked = [by(n, f"r{n}", prompt(20), stream=True, max_tokens=12) for n in ("a", "b")]
    of_a, of_b = asyncio.run(after(engine, 4, load, *asked))
    assert "kv=kept" in of_a[-1].fingerprint and of_a[-1].policy_version == 1
    assert "kv=kept" not in of_b[-1].fingerprint
    fresh = ask(engine, by("a", "fresh", prompt(20)))[0]
    assert fresh.num_cached_tokens == 0, "kept keys are nobody's prefix"


def test_new_weights_of_the_base_are_below_every_adapter():
    base, later = make_base(), make_base(seed=5)
    engine = loaded(base, a=adapted(base, seed=1), version=2)
    ids = prompt(20)
    ask(engine, by("a", "before", ids))
    asyncio.run(engine.load_weights(dict(hf_tensors(later)), version=1))
    reply = ask(engine, by("a", "after", ids))[0]
    assert (reply.num_cached_tokens, reply.policy_version) == (0, 2)
    moved = adapted(later, seed=1)
    assert np.array_equal(reply.logprobs, logprobs_of(moved, ids, reply.token_ids))


def test_an_adapter_that_is_not_finite_fails_its_own_requests():
    base = make_base()
    good, bad = adapted(base, seed=1), adapted(base, seed=2)
    engine = loaded(base, good=good, bad=bad)
    asked = [by("good", f"r{i}", prompt(9 + i), max_tokens=30) for i in range(4)]
    wanted = ask(engine, *asked)
    with torch.no_grad():
        next(p for p in bad.parameters() if p.requires_grad).fill_(float("nan"))
    engine = loaded(base, good=good, bad=bad, version=3)

    async def run():
        broken = [by("bad", f"b{i}", prompt(30, i)) for i in range(3)]
        return await asyncio.gather(
            *(collect(engine, r) for r in (*asked, *broken)), return_exceptions=True
        )

    found = asyncio.run(run())
    for reply, before in zip(found[:4], wanted, strict=True):
        assert np.array_equal(reply.token_ids, before.token_ids)
        assert np.array_equal(reply.logprobs, before.logprobs)
    assert all("weights of version 3 of adapter 'bad'" in str(error) for error in found[4:])


async def collect(engine, asked):
    return [delta async for delta in engine.generate(asked)][-1]


def test_a_dropped_adapter_fails_what_runs_and_its_name_is_free_again():
    base = make_base()
    engine = loaded(base, a=adapted(base, seed=1), b=adapted(base, seed=2))

    async def run():
        waiting = [
            asyncio.ensure_future(collect(engine, by(n, f"r{n}", prompt(9), max_tokens=40)))
            for n in ("a", "b")
        ]
        await asyncio.sleep(0.01)
        await engine.drop_adapter("a")
        return await asyncio.gather(*waiting, return_exceptions=True)

    failed, reply = asyncio.run(run())
    assert "the adapter 'a' was dropped while the request was in flight" in str(failed)
    assert len(reply.token_ids) == 40
    with pytest.raises(EngineError, match="'a'"):
        ask(engine, by("a", "r", prompt(9)))
    model = adapted(base, seed=4, rank=3)
    asyncio.run(engine.load_adapter("a", model, version=0))
    reply = ask(engine, by("a", "new", prompt(9)))[0]
    assert np.array_equal(reply.logprobs, logprobs_of(model, prompt(9), reply.token_ids))


def test_the_engine_keeps_its_own_copy():
    base = make_base()
    model = adapted(base, seed=1)
    engine = loaded(base, a=model)
    before = ask(engine, by("a", "1", prompt(9)))[0]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    again = ask(engine, by("a", "2", prompt(9)))[0]
    assert np.array_equal(before.logprobs, again.logprobs)


def test_a_directory_in_pefts_form_is_the_adapter_that_was_saved(tmp_path):
    base = make_base()
    model = adapted(base, seed=1)
    save_checkpoint(base, tmp_path / "base", like=locate_model("tiny-gpt-oss"))
    save_adapter(model, tmp_path / "adapter", base=tmp_path / "base")
    engine = loaded(base, decoder=model, directory=str(tmp_path / "adapter"))
    one, other = ask(engine, *(by(n, n, prompt(9)) for n in ("decoder", "directory")))
    assert np.array_equal(one.token_ids, other.token_ids)
    assert np.array_equal(one.logprobs, other.logprobs)
    with pytest.raises(CheckpointError):
        asyncio.run(engine.load_adapter("directory", str(tmp_path / "none"), version=1))
    assert ask(engine, by("directory", "still", prompt(9)))[0].policy_version == 0


def test_what_is_no_adapter_of_this_model_is_refused():
    base = make_base()
    engine = make_engine(base)

    def load(name, source):
        asyncio.run(engine.load_adapter(name, source, version=0))

    with pytest.raises(EngineError, match="the name is empty"):
        load("", adapted(base, seed=1))
    with pytest.raises(EngineError, match="'a'"):
        load("a", decoder_over(base))
    with pytest.raises(EngineError, match="found one of another shape"):
        load("a", adapted(make_base("qwen3"), seed=1))
    for call in (engine.drop_adapter("a"), engine.score(prompt(9), adapter="a")):
        with pytest.raises(EngineError, match="'a'"):
            asyncio.run(call)


def test_shapes_for_which_the_ops_break_their_contract_are_refused():
    base = make_base()
    base.ops = CrowdedOps()
    engine = make_engine(base)
    with pytest.raises(CapabilityError, match=r"'a'.*rank 8\b"):
        asyncio.run(engine.load_adapter("a", adapted(base, seed=1), version=0))


def test_an_engine_without_adapters_says_so():
    class Plain(Engine):
        capabilities = make_engine().capabilities

    with pytest.raises(CapabilityError, match="load_adapter"):
        asyncio.run(Plain().load_adapter("a", "directory", version=0))
    with pytest.raises(CapabilityError, match="drop_adapter"):
        asyncio.run(Plain().drop_adapter("a"))
