"""Several engines as one: who serves what, and what becomes of requests when one fails."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from check_engine import check_engine
from engine_models import VOCAB, deltas_of, make_engine, make_model, prompt, request
from test_check_engine import PROMPT, TOKEN_BYTES

from lockstep.engines.config import EmbeddedConfig, PoolConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.engines.pool import Pool
from lockstep.errors import ConfigError, EngineDownError, EngineError
from lockstep.models.hf_io import hf_tensors
from lockstep.observe.metrics import find_metric
from lockstep.testing.engines import BrokenEngine, FakeEngine
from lockstep.testing.faults.servers import EngineFrozen, EngineKilled
from lockstep.types import Delta


class _Quick(PoolConfig):
    reply_seconds, load_seconds = 5.0, 2.0


class _QuickReply(_Quick):
    reply_seconds = 1.0


QUICK = _Quick(frozen_seconds=0.6)
BOTH = (False, True)


def make_pool(*engines, config=QUICK, **settings):
    names = [chr(ord("a") + i) for i in range(len(engines))]
    return Pool(engines, config, names=names, **settings)


def run(main, *engines):
    """The result of a coroutine, after which the engines are closed."""

    async def body():
        try:
            return await main
        finally:
            for engine in engines:
                await engine.close()

    return asyncio.run(body())


def ids_of(deltas):
    return [int(i) for d in deltas for i in d.token_ids]


def requests(num=12, *, stream=False, **sampling):
    return [
        request(f"r{i}", prompt(5 + i, seed=i), seed=i, stream=stream, **sampling)
        for i in range(num)
    ]


def alone(asked):
    """What one sound engine answers."""

    async def ask():
        engine = make_engine()
        return await asyncio.gather(*(deltas_of(engine, r) for r in asked))

    return asyncio.run(ask())


@pytest.mark.parametrize(("update", "kind"), [("together", "gpt_oss"), ("rolling", "qwen3")])
def test_a_pool_keeps_every_promise_of_an_engine(update, kind):
    model = make_model(kind)
    engines = [make_engine(model, token_bytes=TOKEN_BYTES) for _ in range(2)]
    pool = make_pool(*engines, config=PoolConfig(update=update))
    report = run(check_engine(pool, prompt_ids=PROMPT, token_bytes=TOKEN_BYTES), pool)
    assert set(report.skipped) == (set() if kind == "gpt_oss" else {"routed experts"})
    assert min(engine.stats["requests"] for engine in engines) > 5
    assert pool.version == 1


# -- what breaks ----------------------------------------------------------------------------------


class Lying(BrokenEngine):
    """Its replies are wrong in the way that `how` names."""

    how = ""

    async def generate(self, request):
        self.num_hits += 1
        if self.how == "misordered":
            *pairs, last = [d async for d in self.inner.generate(replace(request, stream=True))]
            for at in range(0, len(pairs), 2):
                for delta in reversed(pairs[at : at + 2]):
                    yield delta
            yield last
            return
        is_lost = self.how == "lost" and self.num_hits % 2
        async for delta in self.inner.generate(request):
            if self.how == "slow":
                await asyncio.sleep(0.02)
            if self.how == "false versions":
                delta = replace(delta, policy_version=delta.policy_version + 1)
            if not is_lost:
                yield delta
            if self.how == "duplicated":
                yield delta
        if is_lost:
            await asyncio.get_running_loop().create_future()


def lying(how):
    return type(how, (Lying,), {"how": how})


FAULTS = {
    "killed": (EngineKilled(at=0).broken, {"lost_replicas": 1, "frozen_replicas": 0}),
    "frozen": (EngineFrozen(at=0).broken, {"lost_replicas": 1, "frozen_replicas": 1}),
    "duplicated": (lying("duplicated"), {"lost_replicas": 0, "retries": 0}),
    "lost": (lying("lost"), {}),
    "misordered": (lying("misordered"), {"lost_replicas": 1}),
    "false versions": (lying("false versions"), {"lost_replicas": 1}),
    "slow": (lying("slow"), {"lost_replicas": 0, "retries": 0}),
}
COUNTED = {
    "killed": "continued_tokens",
    "frozen": "continued_tokens",
    "lost": "lost_replies",
    "false versions": "wrong_versions",
}


@pytest.mark.parametrize("stream", BOTH)
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_a_replica_does_each_reply_is_the_one_of_a_sound_engine(fault, stream):
    asked = requests(stream=stream)
    break_, wanted = FAULTS[fault]
    broken = break_(make_engine())
    # The replica of a lost reply serves others, or it would be a frozen one.
    config = _QuickReply(frozen_seconds=3.0) if fault == "lost" else QUICK
    pool = make_pool(broken, make_engine(), config=config)

    async def ask():
        replies = await asyncio.gather(*(deltas_of(pool, r) for r in asked))
        again = await asyncio.gather(*(deltas_of(pool, r) for r in asked))
        assert again == replies  # a known id is answered, and not sampled
        return replies, pool.take_metrics(), pool.take_metrics()

    replies, counts, later = run(ask(), pool)
    for reply, sound in zip(replies, alone(asked), strict=True):
        assert ids_of(reply) == ids_of(sound)
        gap = np.concatenate([d.logprobs for d in reply]) - np.concatenate(
            [d.logprobs for d in sound]
        )
        assert abs(gap).max() < 1e-4
        assert [d.finish_reason for d in reply[:-1]] == [None] * (len(reply) - 1)
        assert reply[-1].finish_reason == "length"
        places = [d.first for d in reply]
        assert places == [sum(len(d.token_ids) for d in reply[:i]) for i in range(len(reply))]
    assert broken.num_hits > 0
    assert {name: counts[name] for name in wanted} == wanted
    if fault in COUNTED:
        assert counts[COUNTED[fault]] > 0
    assert counts["failed_requests"] == 0
    assert all(find_metric(f"engine/{name}") for name in counts)
    assert all(later[name] == 0 for name in Pool.EVENTS)  # told once


def test_a_reply_that_goes_on_elsewhere_asks_for_what_is_left_alone():
    asked = request("r", prompt(6), seed=3, stream=True)
    seen = []

    class Watched(BrokenEngine):
        async def generate(self, request):
            seen.append(request)
            async for delta in self.inner.generate(request):
                yield delta

    pool = make_pool(EngineKilled(at=0).broken(make_engine()), Watched(make_engine()))
    deltas = run(deltas_of(pool, asked), pool)
    (rest,) = [r for r in seen if not r.id.startswith("probe")]
    kept = len(rest.prompt_ids) - 6
    assert kept > 0 and rest.sampling.max_tokens == 12 - kept
    assert rest.prompt_ids.tolist() == [*asked.prompt_ids.tolist(), *ids_of(deltas)[:kept]]
    assert rest.seed == asked.seed  # its draws go by the place on the path
    assert len(ids_of(deltas)) == 12


def test_draws_that_are_counted_from_the_first_one_do_not_come_twice():
    asked = request("r", [1, 2], seed=3, stream=True)
    first = FakeEngine(lambda r: [5, 6, 7, 8])
    second = FakeEngine(lambda r: [7, 8])
    pool = make_pool(EngineKilled(at=0).broken(first), second)
    deltas = run(deltas_of(pool, asked), pool)
    assert ids_of(deltas) == [5, 7, 8]
    assert second.requests[0].seed != asked.seed


class Scripted(FakeEngine):
    """Sends the deltas that it is given, then breaks."""

    def __init__(self, *pieces, **settings):
        super().__init__(lambda request: [9, 9, 9, 9], **settings)
        self.pieces = pieces

    async def generate(self, request):
        first = 0
        for ids in self.pieces:
            yield Delta(
                token_ids=np.array(ids, np.int32), logprobs=np.full(len(ids), -1, np.float32),
                policy_version=self.version, first=first,
            )  # fmt: skip
            first += len(ids)
        raise EngineDownError("connection reset by peer")


@pytest.mark.parametrize(
    ("sampling", "reason", "stop"),
    [({"stop_ids": (4,)}, "stop", 4), ({"max_tokens": 2}, "length", None)],
)
def test_a_reply_of_which_only_the_end_was_lost_is_whole(sampling, reason, stop):
    sound = FakeEngine(lambda request: [9])
    pool = make_pool(Scripted([3, 4]), sound)
    deltas = run(deltas_of(pool, request("r", [1], **sampling)), pool)
    assert ids_of(deltas) == [3, 4]
    assert (deltas[-1].finish_reason, deltas[-1].stop) == (reason, stop)
    assert sound.requests == []


def test_a_reply_that_goes_on_under_newer_weights_is_two_segments():
    async def main():
        old, new = Scripted([3, 4]), FakeEngine(lambda request: [9, 2])
        pool = make_pool(old, new)
        await new.load_weights(None, version=1)
        pool._replicas[1].version = 1  # as in the middle of a rolling update
        pool._replicas[1].versions.add(1)
        return await deltas_of(pool, request("r", [1], stop_ids=(2,)))

    deltas = run(main())
    told = [(ids_of([d]), d.policy_version, d.finish_reason) for d in deltas]
    assert told == [([3, 4], 0, None), ([], 0, "weight_update"), ([9, 2], 1, "stop")]


def test_stop_strings_are_not_followed_from_one_replica_to_the_next():
    pool = make_pool(Scripted([3, 4]), FakeEngine(lambda request: [9]))
    asked = request("r", [1], stop_strings=("ab",))
    with pytest.raises(EngineError, match="stop string"):
        run(deltas_of(pool, asked), pool)


def test_when_all_are_gone_the_error_has_the_last_words_of_each():
    pool = make_pool(*(EngineKilled(at=0).broken(make_engine()) for _ in range(2)))

    async def main():
        await pool.load_weights(dict(hf_tensors(make_model())), version=0)
        await deltas_of(pool, request("r", PROMPT))

    wanted = r"all replicas are gone\. a: connection reset by peer\. b: connection reset by peer\."
    with pytest.raises(EngineError, match=wanted):
        run(main(), pool)


def test_a_request_that_no_replica_can_answer_takes_none_out():
    class Refusing(BrokenEngine):
        async def generate(self, request):
            if request.id.startswith("bad"):
                raise EngineError("the weights give values that are not finite")
            async for delta in self.inner.generate(request):
                yield delta

    pool = make_pool(*(Refusing(make_engine()) for _ in range(2)))

    async def main():
        with pytest.raises(EngineError, match=r"\b3\b.* a: .*; b: .*finite"):
            await deltas_of(pool, request("bad", PROMPT))
        with pytest.raises(EngineError, match="vocabulary has the ids"):
            await deltas_of(pool, request("worse", [VOCAB]))
        assert len(ids_of(await deltas_of(pool, request("good", PROMPT)))) == 12
        assert pool.ready == ["a", "b"]
        return pool.take_metrics()

    counts = run(main(), pool)
    assert (counts["failed_requests"], counts["retries"], counts["lost_replicas"]) == (1, 2, 0)


async def ready(pool, names):
    """Waits at most 60 s until these replicas are in."""
    async with asyncio.timeout(60):
        while pool.ready != names:
            await asyncio.sleep(0.02)


def test_an_idle_replica_that_does_not_answer_a_ping_is_out():
    class Pinged(BrokenEngine):
        async def ping(self):
            raise EngineDownError("connection refused")

    events = []
    pool = make_pool(Pinged(make_engine()), make_engine(), on_event=events.append)

    async def main():
        await deltas_of(pool, request("r", PROMPT))
        await ready(pool, ["b"])

    run(main(), pool)
    assert events[0].startswith("a is out: it does not answer: connection refused.")


def test_an_event_loop_that_stood_still_makes_no_replica_frozen():
    pool = make_pool(lying("slow")(make_engine()), make_engine())

    async def main():
        import time

        asked = [asyncio.ensure_future(deltas_of(pool, r)) for r in requests(4, stream=True)]
        await asyncio.sleep(0.06)
        time.sleep(0.9)  # a trainer in this process, which trains
        await asyncio.gather(*asked)
        return pool.take_metrics()

    assert run(main(), pool)["lost_replicas"] == 0


# -- weights --------------------------------------------------------------------------------------


def own_engine():
    return EmbeddedEngine(
        make_model(), EmbeddedConfig(page_size=16, kv_cache_tokens=4096), is_shared=False
    )


@pytest.mark.parametrize("form", ["tensors", "directory"])
def test_a_replica_comes_back_with_the_weights_that_the_others_run(form, tmp_path, checkpoint):
    broken = EngineKilled(at=0, returns_after=0.3).broken(own_engine())
    pool = make_pool(broken, own_engine())
    models = {version: make_model(seed=version) for version in (1, 2)}

    def source(version):
        if form == "tensors":
            return dict(hf_tensors(models[version]))
        return str(checkpoint(models[version], tmp_path / str(version)))

    async def main():
        await pool.load_weights(source(0 + 1), version=1)
        await asyncio.gather(*(deltas_of(pool, r) for r in requests(4)))
        assert pool.ready == ["b"]
        if form == "directory":
            await ready(pool, ["a", "b"])
        else:  # the trainer may be changing its tensors: they are handed out at an update alone
            await asyncio.sleep(0.8)
            assert pool.ready == ["b"]
        await pool.load_weights(source(2), version=2)
        assert pool.ready == ["a", "b"] and pool.version == 2
        ids = np.array(prompt(20), np.int32)
        scores = [await r.engine.score(ids) for r in pool._replicas]
        assert np.array_equal(scores[0].logprobs[1:], scores[1].logprobs[1:])
        return pool.take_metrics()

    assert run(main(), pool)["returned_replicas"] == 1


def test_the_only_replica_dies_between_requests_and_comes_back_by_the_next_load():
    class Dead(BrokenEngine):
        async def check_lease(self):
            raise EngineDownError("killed")

    pool = make_pool(Dead(own_engine()), config=PoolConfig(frozen_seconds=60))

    async def main():
        await pool.check_lease()
        assert pool.ready == []
        await pool.pause()
        await pool.load_weights(dict(hf_tensors(make_model(seed=1))), version=1)
        await pool.resume()
        return await deltas_of(pool, request("r", PROMPT))

    assert {delta.policy_version for delta in run(main(), pool)} == {1}


@pytest.fixture
def checkpoint(tmp_path):
    """Writes a model as a checkpoint directory."""
    from safetensors.torch import save_file

    def write(model, path):
        path.mkdir()
        tensors = {name: t.detach().contiguous() for name, t in dict(hf_tensors(model)).items()}
        save_file(tensors, path / "model.safetensors")
        return path

    return write


def test_a_load_that_fails_in_one_replica_leaves_the_others_at_work():
    class Failing(BrokenEngine):
        async def load_weights(self, source, *, version):
            raise EngineError("out of memory")

    pool = make_pool(Failing(make_engine()), make_engine())

    async def main():
        await pool.load_weights(None, version=4)
        deltas = await deltas_of(pool, request("r", PROMPT))
        assert {d.policy_version for d in deltas} == {4}
        assert pool.ready == ["b"] and pool.version == 4

    run(main(), pool)
    pool = make_pool(Failing(make_engine()), Failing(make_engine()))
    wanted = r"no replica has taken version 1\. a: weights of version 1: out of memory\. b: .*"
    with pytest.raises(EngineError, match=wanted):
        run(pool.load_weights(None, version=1), pool)


def test_in_a_rolling_update_one_replica_samples_while_the_other_loads():
    class Loading(BrokenEngine):
        async def load_weights(self, source, *, version):
            loading.append(self)
            await gate.wait()
            await self.inner.load_weights(source, version=version)
            loading.remove(self)

        async def generate(self, request):
            assert self not in loading
            async for delta in self.inner.generate(request):
                yield delta

    loading, gate = [], asyncio.Event()
    engines = [Loading(make_engine()) for _ in range(2)]
    pool = make_pool(*engines, config=PoolConfig(update="rolling"))

    async def versions(*names):
        replies = await asyncio.gather(*(deltas_of(pool, request(n, PROMPT)) for n in names))
        return {d.policy_version for deltas in replies for d in deltas}

    async def main():
        update = asyncio.ensure_future(pool.load_weights(None, version=1))
        assert await versions("a", "b") == {0}
        assert len(loading) == 1 and pool.version == 0
        gate.set()
        await update
        assert await versions("c", "d") == {1}

    run(main(), pool)


# -- who serves what ------------------------------------------------------------------------------


def test_the_turns_of_an_episode_go_to_the_replica_that_has_its_prefix():
    engines = [make_engine(page_size=4) for _ in range(3)]
    pool = make_pool(*engines, config=PoolConfig())

    async def episode(name, seed):
        path = prompt(16, seed=seed).tolist()
        cached = []
        for turn in range(3):
            asked = replace(request(f"{name}/{turn}", path), affinity=name)
            deltas = await deltas_of(pool, asked)
            cached.append(deltas[0].num_cached_tokens)
            path += [*ids_of(deltas), 1, 2, 3]
        return cached

    async def main():
        return await asyncio.gather(*(episode(f"e{i}", i) for i in range(9)))

    for cached in run(main(), pool):
        assert cached[1] >= 24 and cached[2] >= 36  # all but what was never fed, in pages of 4
    assert {engine.stats["requests"] for engine in engines} == {9}


def test_an_episode_leaves_its_replica_when_that_is_much_busier():
    fakes = [FakeEngine(lambda r: [1] * 50, tokens_per_step=1) for _ in range(2)]
    pool = make_pool(*fakes)

    async def main():
        asked = [replace(request(f"r{i}", [1, 2]), affinity="one episode") for i in range(9)]
        await asyncio.gather(*(deltas_of(pool, r) for r in asked))
        return pool.take_metrics()

    assert run(main(), pool)["spilled_requests"] == 1
    assert sorted(len(fake.requests) for fake in fakes) == [1, 8]


def test_scores_are_spread_and_survive_a_replica():
    class Deaf(BrokenEngine):
        async def score(self, token_ids, **how):
            self.num_hits += 1
            raise EngineDownError("connection reset by peer")

    deaf = Deaf(make_engine())
    pool = make_pool(deaf, make_engine())
    ids = prompt(20)

    async def main():
        wanted = (await make_engine().score(ids)).logprobs
        found = await asyncio.gather(*(pool.score(ids) for _ in range(4)))
        assert all(np.allclose(f.logprobs[1:], wanted[1:], atol=1e-5) for f in found)
        return pool.take_metrics()

    counts = run(main(), pool)
    assert deaf.num_hits == counts["retries"] == 1 and counts["lost_replicas"] == 1


def test_replicas_that_are_not_the_same_engine_are_refused():
    wanted = r"one engine over one model: vocab_size is 97 in a and 1048576 in b"
    with pytest.raises(ConfigError, match=r"'embedded'.*'fake'"):
        make_pool(make_engine(), FakeEngine(lambda r: [1]))
    with pytest.raises(ConfigError, match=wanted):
        make_pool(FakeEngine(lambda r: [1], vocab_size=97), FakeEngine(lambda r: [1]))


def test_the_pool_can_do_what_all_its_replicas_can():
    found = make_pool(make_engine(), make_engine(kv_cache_tokens=128)).capabilities
    assert found.name == "embedded x2"
    assert found.max_tokens == 128 and found.has_prefix_cache and found.has_score
    with pytest.raises(ConfigError, match="has_prefix_cache"):
        make_pool(make_engine(), make_engine(prefix_cache=False))


def test_a_reader_who_leaves_ends_the_request_in_its_replica():
    engine = make_engine()
    pool = make_pool(engine, make_engine())

    async def main():
        deltas = pool.generate(request("r", PROMPT, stream=True, max_tokens=200))
        async for _ in deltas:
            break
        await deltas.aclose()
        return engine._scheduler.num_running

    assert run(main(), pool) == 0
