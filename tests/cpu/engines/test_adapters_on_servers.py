"""Adapters by name on engines outside of this process, and on several of them: pushed, replaced,
dropped, and there again after a replica was lost."""

import asyncio
import os
import signal

import numpy as np
import pytest
from engine_models import deltas_of, make_engine, prompt
from engine_wire import EngineWire, until
from fake_servers import context
from fake_sglang import FakeSGLang
from test_adapters_by_name import adapted, by, logprobs_of, make_base
from test_pool import QUICK, make_pool

from lockstep.engines.config import EmbeddedConfig, PoolConfig, SGLangConfig
from lockstep.engines.registry import make_engine as open_one
from lockstep.engines.registry import open_engine
from lockstep.engines.served import ServedEngine
from lockstep.errors import CapabilityError, CheckpointError, EngineError
from lockstep.models.adapters import decoder_over
from lockstep.models.hf_io import save_checkpoint
from lockstep.models.locate import locate_model
from lockstep.models.peft_io import save_adapter


@pytest.fixture(scope="module")
def base():
    return make_base()


@pytest.fixture(scope="module")
def models(base):
    return {"a": adapted(base, seed=1), "b": adapted(base, seed=2), "new": adapted(base, seed=3)}


@pytest.fixture(scope="module")
def directories(base, models, tmp_path_factory):
    place = tmp_path_factory.mktemp("adapters")
    save_checkpoint(base, place / "base", like=locate_model("tiny-gpt-oss"))
    for name, model in models.items():
        save_adapter(model, place / name, base=place / "base")
    return {name: str(place / name) for name in models}


def served(base):
    wire = EngineWire(make_engine(base))
    return ServedEngine(wire), wire


async def load(engine, directories, *names, version=0):
    for name in names:
        await engine.load_adapter(name, directories[name], version=version)


def joined(deltas):
    return tuple(np.concatenate([getattr(d, name) for d in deltas]) for name in KEPT)


KEPT = ("token_ids", "logprobs")


@pytest.mark.parametrize("stream", [True, False])
def test_new_tensors_end_the_segments_of_their_name_alone(base, models, directories, stream):
    engine, wire = served(base)
    asked = [by(n, f"r{n}", prompt(20), stream=stream, max_tokens=60) for n in ("a", "b", "")]

    async def run():
        await load(engine, directories, "a", "b")
        replies = asyncio.gather(*(deltas_of(engine, r) for r in asked))
        await until(lambda: wire.engine.stats["sampled_tokens"] > 30)
        await engine.load_adapter("a", directories["new"], version=5)
        return await replies, await engine.score(prompt(9), adapter="a")

    (of_a, *others), scores = asyncio.run(run())
    ids, logprobs = joined(of_a)
    versions = np.concatenate([np.full(len(d.token_ids), d.policy_version) for d in of_a])
    assert 0 < (versions == 0).sum() < 60 and set(versions) == {0, 5}
    assert "weight_update" in [d.finish_reason for d in of_a]
    old, new = (logprobs_of(models[name], prompt(20), ids) for name in ("a", "new"))
    assert np.array_equal(logprobs, np.where(versions == 5, new, old))
    for model, deltas in zip((models["b"], base), others, strict=True):
        ids, logprobs = joined(deltas)
        assert {d.policy_version for d in deltas} == {0}
        assert "weight_update" not in [d.finish_reason for d in deltas]
        assert np.array_equal(logprobs, logprobs_of(model, prompt(20), ids))
    assert scores.policy_version == 5
    names = [told.split("~")[0] for told in wire.told if not told.startswith("abort")]
    assert names == ["load a", "load b", "load a", "drop a"]


def test_a_dropped_adapter_fails_what_runs_and_its_name_is_free_again(base, directories):
    engine, wire = served(base)

    async def run():
        await load(engine, directories, "a", "b")
        asked = [by(n, f"r{n}", prompt(20), max_tokens=60) for n in ("a", "b")]
        replies = asyncio.gather(*(deltas_of(engine, r) for r in asked), return_exceptions=True)
        await until(lambda: wire.engine.stats["sampled_tokens"] > 10)
        await engine.drop_adapter("a")
        with pytest.raises(EngineError, match="'a'"):
            await engine.drop_adapter("a")
        await load(engine, directories, "a", version=1)
        return await replies, await deltas_of(engine, by("a", "again", prompt(9)))

    (failed, reply), again = asyncio.run(run())
    assert "the adapter 'a' was dropped while the request was in flight" in str(failed)
    assert sum(len(d.token_ids) for d in reply) == 60 and again[-1].policy_version == 1


def test_a_server_without_adapters_refuses_them_by_its_name(base, directories):
    engine = ServedEngine(EngineWire(make_engine(base), has_adapters=False))
    with pytest.raises(CapabilityError, match="load_adapter"):
        asyncio.run(load(engine, directories, "a"))


def test_sglang_loads_each_version_under_a_name_of_its_own(base, models, directories):
    with FakeSGLang(base, flags=("enable_lora",)) as server:
        config = SGLangConfig(urls=(server.url,))
        engine = open_one(config, context(base))

        async def run():
            await load(engine, directories, "a", "b")
            await engine.load_adapter("a", directories["new"], version=1)
            replies = [await deltas_of(engine, by(n, f"r{n}", prompt(9))) for n in ("a", "b")]
            return replies, await engine.score(prompt(9), adapter="b")

        replies, scores = asyncio.run(run())
        assert sorted(name.split("~")[0] for name in server.adapters) == ["a", "b"]
    for name, deltas in zip(("new", "b"), replies, strict=True):
        ids, logprobs = joined(deltas)
        wanted = logprobs_of(models[name], prompt(9), ids)
        assert np.abs(logprobs - wanted).max() < 1e-4
    assert np.isfinite(scores.logprobs[1:]).all() and scores.policy_version == 0


# -- several replicas -----------------------------------------------------------------------------


def test_every_replica_samples_every_adapter_and_one_that_refuses_alone_is_out(
    base, models, directories
):
    engines = [served(base)[0] for _ in range(2)]
    pool = make_pool(*engines)

    async def run():
        await load(pool, directories, "a", "b", version=3)
        asked = [by(n, f"{n}{i}", prompt(9), seed=i) for n in ("a", "b") for i in range(4)]
        replies = await asyncio.gather(*(deltas_of(pool, r) for r in asked))
        assert min(engine.stats["requests"] for engine in engines) > 2
        await pool.drop_adapter("b")
        with pytest.raises(EngineError, match="'b'"):
            await pool.drop_adapter("b")
        with pytest.raises(CheckpointError):
            await pool.load_adapter("bad", "nowhere", version=0)
        assert pool.ready == ["a", "b"], "an adapter that nobody takes says nothing of them"
        await engines[0].close()
        await pool.load_adapter("a", directories["new"], version=4)
        assert pool.ready == ["b"]
        again = await deltas_of(pool, by("a", "again", prompt(9)))
        await pool.close()
        return asked, replies, again

    asked, replies, again = asyncio.run(run())
    for request, deltas in zip(asked, replies, strict=True):
        ids, logprobs = joined(deltas)
        assert np.array_equal(logprobs, logprobs_of(models[request.adapter], prompt(9), ids))
        assert deltas[-1].policy_version == 3
    assert again[-1].policy_version == 4


def test_a_replica_that_was_started_again_has_the_adapters_again(tmp_path):
    from lockstep.models.hf_io import load_checkpoint

    directory = locate_model("tiny-gpt-oss")
    base = load_checkpoint(directory)
    model = adapted(decoder_over(base), seed=1)
    save_adapter(model, tmp_path / "a", base=directory)
    # A process that starts on a busy machine loads and replies late.
    patient = PoolConfig(frozen_seconds=QUICK.frozen_seconds)
    pool = open_engine(
        EmbeddedConfig(replicas=1, kv_cache_tokens=2048, max_num_sequences=16, pool=patient),
        context(
            base,
            directory=directory,
            vocab_size=base.config.vocab_size,
            token_bytes=[b"x"] * base.config.vocab_size,
            scratch=tmp_path / "scratch",
        ),
    )

    async def run():
        await pool.load_adapter("a", str(tmp_path / "a"), version=2)
        before = await deltas_of(pool, by("a", "before", prompt(9)))
        os.kill(pool._replicas[0].engine.pid, signal.SIGKILL)
        await until(lambda: not pool.ready, seconds=30)
        await until(lambda: bool(pool.ready), seconds=60)
        after = await deltas_of(pool, by("a", "after", prompt(9)))
        await pool.close()
        return before, after

    before, after = asyncio.run(run())
    for mine, theirs in zip(joined(before), joined(after), strict=True):
        assert np.array_equal(mine, theirs)
    assert after[-1].policy_version == 2
