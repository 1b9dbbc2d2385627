"""Engines that fail, in a run over a pool of two: nothing is lost, nothing is trained twice, every
event is counted."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from quickstarts import quickstart_with, run_with

from lockstep import train
from lockstep.engines.base import EngineContext
from lockstep.engines.config import EmbeddedConfig, EngineConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.engines.pool import Pool
from lockstep.engines.registry import make_engine, open_engine
from lockstep.errors import ConfigError, EngineError, RolloutError
from lockstep.models.hf_io import copy_decoder
from lockstep.observe.metrics import find_metric
from lockstep.store.run import load_run
from lockstep.testing.engines import BrokenEngine
from lockstep.testing.faults import FaultConfig, injected
from lockstep.testing.faults.servers import EngineKilled

GROUPS, SAMPLES, STEPS = 2, 4, 2


@dataclass(frozen=True, kw_only=True)
class LoneConfig(EngineConfig):
    """One engine in this process, with weights of its own."""


@dataclass(frozen=True, kw_only=True)
class TwinConfig(EngineConfig):
    """Engines in this process, each with weights of its own."""

    def replica_configs(self):
        return (LoneConfig(),) * 2


@make_engine.register
def _(config: LoneConfig, context: EngineContext):
    own = copy_decoder(context.model, dtype=context.model.embedding.dtype)
    return EmbeddedEngine(own, EmbeddedConfig(), token_bytes=context.token_bytes, is_shared=False)


@dataclass(frozen=True, kw_only=True)
class AllKilled(FaultConfig):
    """Every replica dies in the first reply of version 1."""

    def make_engine(self, config, context):
        return open_engine(config, context, wrap=lambda engine, _: EngineKilled().broken(engine))


QUICK = [
    "seed=3", f"steps={STEPS}", f"groups_per_step={GROUPS}", f"group_size={SAMPLES}",
    "evaluation.at_start=false", "evaluation.num_tasks=1", "evaluation.greedy=false",
    "trainer.warmup_updates=0", "contract=none", "engine=twin",
    "engine.pool.frozen_seconds=1.5",
]  # fmt: skip


def play(path, *overrides):
    run = run_with(path, *QUICK, *overrides)
    for row in run.metrics:
        assert all(map(find_metric, row))
    return run


@cache
def sound(directory: Path):
    return sampled(play(directory / "sound"))


def sampled(run):
    """id -> what was sampled, of every episode of the run."""
    records = [record for step in run.steps() for record in run.trajectories(step)]
    ids = [record.trajectory.id for record in records]
    assert len(set(ids)) == len(ids)
    return {
        record.trajectory.id: [
            s.token_ids.tolist() for s in record.trajectory.segments if s.is_sampled
        ]
        for record in records
    }


def events(run):
    """Each event's number over all rows."""
    return {name: sum(row.get(f"engine/{name}", 0) for row in run.metrics) for name in Pool.EVENTS}


@pytest.mark.parametrize(
    ("fault", "counted"),
    [
        ("engine_killed", {"lost_replicas": 1, "frozen_replicas": 0, "returned_replicas": 0}),
        ("engine_killed,returns_after=0.01", {"lost_replicas": 1, "returned_replicas": 1}),
        ("engine_frozen", {"lost_replicas": 1, "frozen_replicas": 1}),
    ],
)
def test_a_run_loses_nothing_and_trains_nothing_twice(fault, counted, tmp_path, tmp_path_factory):
    run = play(tmp_path / "run", f"--fault={fault},replica=1", "stop_on=")
    found, wanted = sampled(run), sound(tmp_path_factory.getbasetemp())
    assert found.keys() == wanted.keys() and len(found) == STEPS * GROUPS * SAMPLES
    # The same draws in another batch: the same tokens, but for one at the edge of its interval.
    assert np.mean([found[name] == wanted[name] for name in found]) > 0.8
    counts = events(run)
    for name, number in counted.items():
        assert counts[name] == number, (name, counts)
    for row in run.metrics:
        if "mismatch/k3" in row:
            assert row["episodes/failed"] == 0
            assert row["tokens/trained"] == row["tokens/sampled"]
            assert row["mismatch/k3"] < 1e-9  # of the weights that they say they are of
    assert counts["failed_requests"] == 0


@pytest.mark.parametrize("fault", ["wrong_weights", "half_loaded_weights"])
def test_weights_that_were_not_taken_show_in_the_mismatch(fault, tmp_path):
    run = play(tmp_path / "run", f"--fault={fault},replica=1", "stop_on=")
    k3 = [row["mismatch/k3"] for row in run.metrics if "mismatch/k3" in row]
    assert k3[0] < 1e-9 and min(k3[1:]) > 1e-6
    assert all(row["tokens/trained"] == row["tokens/sampled"] for row in run.metrics if "k3" in row)


@pytest.mark.parametrize("fault", ["wrong_weights", "half_loaded_weights"])
def test_one_replica_without_the_weights_is_found_by_the_verification(fault, tmp_path):
    """Each replica is looked at: in a median over all, one of many would not show."""
    words = [f"--fault={fault},replica=1", "sync.qualify=on", "stop_on="]
    with pytest.raises(
        EngineError, match=r"does not run the sent weights.*: replica 1: "
    ) as caught:
        play(tmp_path / "at-start", f"--fault={fault},replica=1,at=0", "sync.qualify=on")
    assert "Nothing was sampled" in str(caught.value)
    run = play(tmp_path / "later", *words)
    looks = [row["sync/alarm"] for row in run.metrics if "sync/alarm" in row]
    assert looks[0] > 0  # the load after the first step


@pytest.mark.parametrize("num", [1, 2])
def test_when_no_replica_is_left_the_run_stops_and_says_why(num, tmp_path):
    config = quickstart_with(*QUICK)
    if num == 1:
        config = replace(config, engine=LoneConfig())
    with (
        injected(EngineKilled() if num == 1 else AllKilled()),
        pytest.raises(RolloutError, match="all replicas are gone" if num == 2 else "connection"),
    ):
        train(config, out=tmp_path / "run", view="json")
    # What had been sampled by then is kept.
    assert len(sampled(load_run(tmp_path / "run"))) == 2 * GROUPS * SAMPLES


def test_a_fault_of_a_replica_that_is_not_there_is_refused():
    config = quickstart_with(*QUICK)
    with injected(EngineKilled(replica=2)), pytest.raises(ConfigError, match=r"replica=2.*\b2\b"):
        train(config, out="never")


def test_engine_and_trainer_that_take_turns_on_a_device_change_nothing(tmp_path):
    class Watched(BrokenEngine):
        async def sleep(self):
            told.append("sleep")
            await self.inner.sleep()

        async def load_weights(self, source, *, version):
            told.append(version)
            await self.inner.load_weights(source, version=version)

        async def wake(self):
            told.append("wake")
            await self.inner.wake()

    @dataclass(frozen=True, kw_only=True)
    class Watching(FaultConfig):
        def make_engine(self, config, context):
            return open_engine(config, context, wrap=lambda engine, _: Watched(engine))

    told, rows = [], []
    for shares in (False, True):
        words = [*QUICK, "sync.qualify=off", f"engine.share_device={shares}"]
        config = quickstart_with(*words)
        config = replace(config, engine=LoneConfig(share_device=shares))
        with injected(Watching()):
            train(config, out=tmp_path / str(shares), view="json")
        rows.append(load_run(tmp_path / str(shares)).metrics)
        if not shares:
            assert told == [0, "wake", 1, "wake", 2, "wake"]
    assert told[6:] == [0, "wake", "sleep", 1, "wake", "sleep", 2, "wake"]
    for alone, shared in zip(*rows, strict=True):
        same = {k: v for k, v in alone.items() if not k.startswith(("time/", "sync/"))}
        assert same == {k: shared[k] for k in same}
