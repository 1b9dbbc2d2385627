"""Runs over an engine with weights of its own: what is recorded, and what a failure leaves."""

from dataclasses import dataclass, replace

import pytest
from broken_engines import Taking
from quickstarts import quickstart_with

from lockstep.engines.config import EngineConfig
from lockstep.engines.registry import make_engine
from lockstep.errors import EngineError
from lockstep.observe.metrics import find_metric
from lockstep.report.document import build_document
from lockstep.run.train import train
from lockstep.store.run import load_run
from lockstep.testing.faults import injected, parse_fault
from lockstep.testing.faults.servers import WrongWeights

SMALL = (
    "steps=3", "groups_per_step=2", "group_size=4", "evaluation.num_tasks=2", "contract=none",
    "evaluation.greedy=false", "trainer.measure_after_every=0", "sync.form=directory",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CopyingConfig(EngineConfig):
    """An embedded engine that reads its weights from a disk."""

    fails_at: int = -9
    """The version that it does not take."""


@make_engine.register
def _(config: CopyingConfig, context):
    def take(old, new, version):
        if version == config.fails_at:
            raise EngineError("a worker died.")
        return new

    return Taking(context.model, take, sources=("directory",))


def config_of(*settings, **engine):
    return replace(quickstart_with(*SMALL, *settings), engine=CopyingConfig(**engine))


def test_a_run_records_how_far_its_syncs_were_verified(tmp_path):
    outcome = train(config_of(), out=tmp_path / "run", view="json")
    run = load_run(outcome.path)
    facts = run.environment["sync"]
    assert facts["form"] == "directory" and facts["level"] in ("qualified", "correlated")
    assert facts["qualification"]["failure"] == ""
    steps = [row for row in run.metrics if "sync/bytes" in row]
    assert len(steps) == 3
    for row in steps:
        assert all(map(find_metric, row))
        assert row["sync/level"] >= 2 and row["sync/alarm"] == 0
        assert row["sync/probe_gap"] < 1e-3
    assert not (outcome.path / "weights").exists(), "nothing is left of what was sent"
    assert build_document([run])["runs"][0]["sync"] == facts["line"]


def test_an_update_whose_sync_fails_is_in_a_checkpoint(tmp_path):
    with pytest.raises(EngineError, match=r"version 2\b.*resume=true"):
        train(config_of(fails_at=2), out=tmp_path / "run", view="json")
    run = load_run(tmp_path / "run")
    assert [row["step"] for row in run.metrics if "train/loss" in row] == [0, 1]
    outcome = train(config_of(), out=tmp_path / "run", resume=True, view="json")
    assert outcome.status == "done"
    rows = [row for row in load_run(outcome.path).metrics if "train/loss" in row]
    assert [(row["step"], row["policy_version"]) for row in rows] == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize("fault", ["wrong_weights", "half_loaded_weights"])
def test_weights_that_do_not_arrive_later_in_a_run_raise_an_alarm(fault, tmp_path, capsys):
    config = quickstart_with(*[s for s in SMALL if not s.startswith("sync")], "steps=4")
    with injected(parse_fault(fault)):
        outcome = train(config, out=tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.environment["sync"]["qualification"]["failure"] == "", "it begins at version 1"
    alarms = [row["sync/alarm"] for row in run.metrics if "sync/alarm" in row]
    assert alarms[-1] == 1 and not any(alarms[:-1]), "the run ends before the next update"
    assert outcome.status == "stopped"
    assert list(run.checkpoints()) == [len(alarms)]
    assert f"sync: version {len(alarms)}: " in capsys.readouterr().out


def test_weights_that_do_not_arrive_from_the_start_stop_a_run_before_it_samples(tmp_path):
    config = quickstart_with(*[s for s in SMALL if not s.startswith("sync")])
    with injected(WrongWeights(at=0)), pytest.raises(EngineError, match="old values of everything"):
        train(config, out=tmp_path / "run", view="json")
    assert not load_run(tmp_path / "run").metrics
