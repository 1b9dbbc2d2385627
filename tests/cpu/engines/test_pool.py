"""Several engines as one: who serves what, and what becomes of requests when one fails."""

import asyncio

import pytest
from engine_models import make_engine, make_model
from test_check_engine import PROMPT, TOKEN_BYTES

from lockstep.engines.config import PoolConfig
from lockstep.engines.pool import Pool
from lockstep.models.hf_io import hf_tensors
from lockstep.testing.check_engine import check_engine

QUICK = PoolConfig(
    check_seconds=0.05, frozen_seconds=0.4, reply_seconds=0.8, retry_seconds=(0.05, 0.2),
    wait_seconds=2.0,
)  # fmt: skip


def make_pool(*engines, config=QUICK, **settings):
    names = [chr(ord("a") + i) for i in range(len(engines))]
    return Pool(engines, config, names=names, **settings)


@pytest.mark.parametrize("update", ["together", "rolling"])
def test_a_pool_keeps_every_promise_of_an_engine(update):
    model = make_model()
    engines = [make_engine(model, token_bytes=TOKEN_BYTES) for _ in range(2)]
    pool = make_pool(*engines, config=PoolConfig(update=update))

    async def run():
        try:
            return await check_engine(
                pool, prompt_ids=PROMPT, token_bytes=TOKEN_BYTES, weights=dict(hf_tensors(model))
            )
        finally:
            await pool.close()

    report = asyncio.run(run())
    assert set(report.skipped) == {"routed experts"}
    assert min(engine.stats.requests for engine in engines) > 5
    assert pool.version == 1 and pool.behind == []
