"""A pool over HTTP: connections that break in the middle, servers that take requests and say
nothing, and one that refuses."""

import asyncio

import numpy as np
import pytest
from engine_models import deltas_of, make_engine, prompt, request
from fake_servers import JSON, context
from fake_sglang import FakeSGLang

from lockstep.engines.config import PoolConfig, SGLangConfig
from lockstep.engines.pool import Pool
from lockstep.engines.registry import open_engine
from lockstep.engines.served import ServedEngine
from lockstep.errors import ServerUnreachableError

QUICK = PoolConfig(frozen_seconds=1.0)


class Failing(FakeSGLang):
    """Sound while the run begins; from its third streamed reply on it is not."""

    how, num_streamed, num_failed = "", 0, 0

    async def generate(self, http):
        is_streamed = bool(http[JSON].get("stream"))
        self.num_streamed += is_streamed
        if self.how == "frozen" and self.num_streamed > 2:
            self.num_failed += 1
            await asyncio.sleep(3600)
        self.transport = http.transport
        return await super().generate(http)

    async def model_info(self, http):
        if self.how == "killed" and self.num_failed:
            http.transport.abort()
        return await super().model_info(http)

    async def parts(self, body, asked, request):
        num = 0
        async for part in super().parts(body, asked, request):
            if self.how == "killed" and self.num_streamed > 2 and num == 3:
                self.num_failed += 1
                self.transport.abort()
            num += 1
            yield part


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_server_that_fails_in_the_middle_of_replies_loses_none_of_them(how):
    asked = [
        request(f"r{i}", prompt(5 + i, seed=i), stream=True, temperature=0.0) for i in range(10)
    ]
    told = []
    with Failing() as bad, FakeSGLang() as good:
        config = SGLangConfig(
            urls=(bad.url, good.url), start_seconds=10, request_seconds=30, pool=QUICK
        )
        pool = open_engine(config, context(good.model, on_wait=told.append))
        assert isinstance(pool, Pool) and pool.capabilities.name == "sglang x2"
        bad.how = how

        async def main():
            replies = await asyncio.gather(*(deltas_of(pool, r) for r in asked))
            ready, counts = pool.ready, pool.take_metrics()
            await pool.close()
            return replies, ready, counts

        replies, ready, counts = asyncio.run(main())

    async def alone():
        engine = make_engine(good.model)
        return await asyncio.gather(*(deltas_of(engine, r) for r in asked))

    for reply, sound in zip(replies, asyncio.run(alone()), strict=True):
        ids, wanted = (np.concatenate([d.token_ids for d in r]).tolist() for r in (reply, sound))
        assert ids == wanted
    assert bad.num_failed > 0 and ready == [good.url]
    assert (counts["lost_replicas"], counts["failed_requests"]) == (1, 0)
    assert counts["retries"] > 0
    assert any(text.startswith(f"{bad.url} is out: ") for text in told)


def test_a_server_that_is_not_up_is_named_and_the_others_are_left():
    with FakeSGLang() as server:
        config = SGLangConfig(urls=(server.url, "http://127.0.0.1:9"), start_seconds=0.5)
        with pytest.raises(ServerUnreachableError, match=r"127\.0\.0\.1:9"):
            open_engine(config, context(server.model))


def test_why_a_pool_did_not_start_is_told_though_an_engine_fails_to_close(monkeypatch):
    closed = []

    async def close(engine):
        closed.append(engine)
        raise OSError("gone")

    monkeypatch.setattr(ServedEngine, "close", close)
    with FakeSGLang() as server, FakeSGLang() as other:
        urls = (server.url, other.url, "http://127.0.0.1:9")
        with pytest.raises(ServerUnreachableError, match=r"127\.0\.0\.1:9"):
            open_engine(SGLangConfig(urls=urls, start_seconds=0.5), context(server.model))
    assert len(closed) == 2
