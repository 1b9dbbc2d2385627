"""Two trainers on one engine are refused, or found out before anything is trained on."""

import asyncio
from dataclasses import replace

import pytest
from engine_models import deltas_of, make_engine, make_model, prompt, request
from engine_wire import EngineWire

from lockstep.engines.config import PoolConfig
from lockstep.engines.lease import FREE, Lease
from lockstep.engines.pool import Pool
from lockstep.engines.served import ServedEngine
from lockstep.errors import EngineDownError, EngineError, LeaseError
from lockstep.models.hf_io import hf_tensors

WEIGHTS = dict(hf_tensors(make_model()))


class Server:
    """What a server keeps for all its clients."""

    def __init__(self, label="default"):
        self.engine, self.label = make_engine(), label


class LabelledWire(EngineWire):
    """A client of it. tells: answers carry the label."""

    def __init__(self, server, *, tells=True):
        super().__init__(server.engine, change=self.with_label if tells else lambda chunk: chunk)
        self.server = server

    def with_label(self, chunk):
        return replace(chunk, labels=(self.server.label,))

    async def read_label(self):
        return self.server.label

    async def write_label(self, label):
        self.server.label = label

    async def close(self):
        pass


def trainer(server, run="mine", *, take_over=False, **settings):
    wire = LabelledWire(server, **settings)
    wire.lease = Lease(run, server="http://a:1", take_over=take_over)
    return ServedEngine(wire)


async def sample(engine, name="r"):
    return await deltas_of(engine, request(name, prompt(6)))


async def test_a_label_follows_every_load_and_is_given_back():
    server = Server()
    engine = trainer(server)
    for version in (1, 2):
        await engine.load_weights(WEIGHTS, version=version)
        assert server.label.startswith("lockstep/mine/") and server.label[-1] == str(version)
        await sample(engine, f"r{version}")
        await engine.check_lease()
    await engine.close()
    assert server.label == FREE
    await trainer(server, "theirs").load_weights(WEIGHTS, version=1)


async def test_a_second_trainer_is_refused_before_it_loads_anything():
    server = Server()
    await trainer(server).load_weights(WEIGHTS, version=7)
    label, held = server.label, server.engine.version
    with pytest.raises(LeaseError, match=r"'mine'.*version 7\b.*'th"):
        await trainer(server, "theirs").load_weights(WEIGHTS, version=1)
    assert (server.label, server.engine.version) == (label, held)
    await trainer(server, "theirs", take_over=True).load_weights(WEIGHTS, version=1)


def test_a_run_that_is_resumed_takes_its_server_back():
    server = Server("lockstep/mine/of-a-crash/4")
    asyncio.run(trainer(server).load_weights(WEIGHTS, version=4))
    assert server.label.startswith("lockstep/mine/") and server.label.endswith("/4")
    assert "of-a-crash" not in server.label


@pytest.mark.parametrize("tells", [True, False])
async def test_weights_of_another_run_stop_this_one_before_it_trains_on_them(tells):
    server = Server()
    engine = trainer(server, tells=tells)
    await engine.load_weights(WEIGHTS, version=1)
    await trainer(server, "theirs", take_over=True).load_weights(WEIGHTS, version=9)
    if tells:  # no token of it comes in
        with pytest.raises(LeaseError, match=r"version 9\b.*'theirs'"):
            await sample(engine)
    else:
        await sample(engine)
    with pytest.raises(LeaseError, match="is not trained on"):
        await engine.check_lease()
    # It stays so when the other one has gone, and its label with it.
    server.label = engine._lease.label(1)
    with pytest.raises(LeaseError):
        await engine.check_lease()
    server.label = label = "lockstep/theirs/1/9"
    await engine.close()
    assert server.label == label  # not ours to free


async def test_a_second_process_of_the_same_run_is_told_apart():
    server = Server()
    first, second = trainer(server), trainer(server)
    await first.load_weights(WEIGHTS, version=1)
    await second.load_weights(WEIGHTS, version=1)
    await second.check_lease()
    with pytest.raises(LeaseError, match="another process"):
        await first.check_lease()


async def test_a_server_that_was_started_again_is_not_taken_for_the_one_before():
    server = Server()
    engine = trainer(server)
    await engine.load_weights(WEIGHTS, version=1)
    await sample(engine)
    server.label = "default"
    with pytest.raises(EngineDownError, match="was started again"):
        await sample(engine, "again")
    await engine.load_weights(WEIGHTS, version=2)
    await engine.check_lease()


async def test_a_pool_goes_on_without_a_restarted_replica_and_stops_at_a_stolen_one():
    servers = [Server(), Server()]
    pool = Pool([trainer(s) for s in servers], PoolConfig(), names=["a", "b"])
    await pool.load_weights(WEIGHTS, version=1)
    servers[0].label = "default"
    await asyncio.gather(*(sample(pool, f"r{i}") for i in range(4)))
    await pool.check_lease()
    assert pool.ready == ["b"]
    servers[1].label = "lockstep/theirs/1/5"
    with pytest.raises(LeaseError, match="'theirs'"):
        await sample(pool, "last")
    with pytest.raises(LeaseError, match="'theirs'"):
        await pool.check_lease()
    await pool.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        await pool.check_lease()
