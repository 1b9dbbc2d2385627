"""The training loop where it is cut off: what is saved, what is not, and what is said."""

import json
import shutil
import signal
from dataclasses import dataclass
from typing import ClassVar

import pytest
from quickstarts import ONCE, SHORT, quickstart_with
from run_rows import rows_of

from lockstep.cli import main
from lockstep.config import to_dict
from lockstep.envs.docsearch.config import DocSearchConfig
from lockstep.errors import OutOfMemoryError, RolloutError
from lockstep.run.hooks import RunHooks, hooked
from lockstep.run.train import train
from lockstep.store.run import load_run
from lockstep.training.checkpoint import CheckpointStore
from lockstep.training.config import TrainerConfig
from lockstep.training.learner import Learner
from lockstep.training.trainer import Trainer

SMALL = (*SHORT, *ONCE, "steps=3", "checkpoint.every=0")


def config(*settings):
    return quickstart_with(*SMALL, *settings)


def checkpoints_of(path):
    return list(load_run(path).checkpoints())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(config(), out=tmp_path_factory.mktemp("runs") / "whole", view="json").path


class CutOff(RunHooks):
    """Raises after the optimizer's step of the second update, before the step is complete."""

    num_updates = 0

    def after_update(self, rows, log_probs):
        self.num_updates += 1
        if self.num_updates == 2:
            raise KeyboardInterrupt


def test_an_interrupt_within_an_update_saves_nothing_of_it(whole, tmp_path, capsys):
    path = tmp_path / "run"
    with hooked(CutOff()):
        assert train(config("checkpoint.every=1"), out=path).status == "interrupted"
    assert checkpoints_of(path) == [1]
    assert "step 1 was interrupted within its update" in capsys.readouterr().out
    train(config("checkpoint.every=1"), out=path, resume=True, view="json")
    assert rows_of(path) == rows_of(whole)


class TwiceWhileSaving(RunHooks):
    """Presses Ctrl-C after the first update is complete, and again while that is being saved."""

    def __init__(self, monkeypatch):
        self.num_updates = 0
        write = CheckpointStore.save

        def save(*arguments, **options):
            signal.raise_signal(signal.SIGINT)
            return write(*arguments, **options)

        monkeypatch.setattr(CheckpointStore, "save", save)

    def after_update(self, rows, log_probs):
        signal.raise_signal(signal.SIGINT)


def test_a_second_interrupt_does_not_cut_the_checkpoint_off(whole, tmp_path, monkeypatch):
    path = tmp_path / "run"
    with hooked(TwiceWhileSaving(monkeypatch)), pytest.raises(KeyboardInterrupt):
        train(config(), out=path)
    monkeypatch.undo()
    assert checkpoints_of(path) == [1]
    train(config(), out=path, resume=True, view="json")
    assert rows_of(path) == rows_of(whole)


def broken_monitor(step, rows, sampled_rows, groups, *, version):
    if step == 1:
        raise OSError("no space left")
    return {}


def open_broken_monitor(_run):
    return broken_monitor


def test_an_error_after_an_update_saves_it_first(whole, tmp_path):
    path = tmp_path / "run"
    with pytest.raises(OSError, match="no space left"):
        train(config(), out=path, view="json", monitor=open_broken_monitor)
    assert checkpoints_of(path) == [2]
    train(config(), out=path, resume=True, view="json")
    assert rows_of(path) == rows_of(whole)
    (resumed,) = load_run(path).environment["resumes"]
    assert resumed["resumed_at"] == 2 and not load_run(whole).environment["resumes"]


@dataclass(frozen=True, kw_only=True)
class LateFailureConfig(DocSearchConfig):
    """Episodes beyond the first eight fail, while `begun` says so."""

    begun: ClassVar[int] = -1000

    def environment(self, task, agent):
        made, begun = super().environment(task, agent), self.begun
        LateFailureConfig.begun += 1
        if begun >= 8:

            async def step(message):
                raise OSError("the index is gone")

            made.step = step
        return made


def test_a_step_whose_episodes_fail_keeps_the_updates_before_it(whole, tmp_path, monkeypatch):
    path, settings = tmp_path / "run", config("task=late_failure")
    monkeypatch.setattr(LateFailureConfig, "begun", -1)  # the check before the run opens one
    with pytest.raises(RolloutError, match=r"step 1: 8 of 8\b"):
        train(settings, out=path, view="json")
    assert checkpoints_of(path) == [1]
    monkeypatch.setattr(LateFailureConfig, "begun", -1000)
    train(settings, out=path, resume=True, view="json")
    assert rows_of(path) == rows_of(whole)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")],
    ids=["python", "torch"],
)
def test_want_of_memory_names_the_setting_and_keeps_the_steps_before(
    whole, tmp_path, monkeypatch, error
):
    forward_backward, calls = Trainer.forward_backward, []

    def third_fails(trainer, *args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return forward_backward(trainer, *args, **options)

    monkeypatch.setattr(Trainer, "forward_backward", third_fails)
    path = tmp_path / "run"
    with pytest.raises(OutOfMemoryError, match=r"step 2\b.*max_tokens_per_microbatch.*@2"):
        train(config(), out=path, view="json")
    monkeypatch.undo()
    assert checkpoints_of(path) == [2]
    assert train(config(), out=path, resume=True, view="json").status == "done"
    assert rows_of(path) == rows_of(whole)


def test_a_run_whose_updates_are_all_skipped_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Learner, "_gradient_norm", lambda self: float("nan"))
    monkeypatch.setattr(TrainerConfig, "max_skipped_steps", 2)
    outcome = train(config("steps=5"), out=tmp_path / "run")
    assert (outcome.status, checkpoints_of(outcome.path)) == ("stopped", [2])
    assert "2 steps in a row made no update: " in capsys.readouterr().out


def test_rows_that_were_lost_from_the_metrics_are_named_when_a_run_continues(
    whole, tmp_path, capsys
):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[2:]))
    train(config(), out=path, resume=True)
    said = capsys.readouterr().out
    assert "has lost the rows of 2 step(s), the first of step 0, before the checkpoint" in said
    fork = tmp_path / "fork"
    train(config("steps=4"), out=fork, start=(whole, 3), view="json")
    train(config("steps=4"), out=fork, resume=True)
    assert "has lost" not in capsys.readouterr().out


def test_the_checks_before_a_run_are_made_once(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(DocSearchConfig, "check", lambda self: calls.append("check"), raising=False)
    words = [f"out={tmp_path / 'run'}", "steps=1"]
    assert main(["train", "quickstart", *SMALL, *words, "--json"]) == 0
    assert calls == ["check"]


def test_a_config_of_defaults_alone_is_one(tmp_path):
    from lockstep.run_config import Config

    assert json.dumps(to_dict(Config(task=DocSearchConfig())))


def test_every_evaluation_keeps_its_episodes(tmp_path):
    words = ("steps=2", "evaluation.every=1", "evaluation.at_start=true")
    run = load_run(train(config(*words), out=tmp_path / "run", view="json").path)
    assert run.steps(split="sampled") == [-1, 0, 1]
    for step in (-1, 0, 1):
        (group, *_) = run.groups(step, split="sampled")
        segments = [x for t in group.trajectories for x in t.segments if x.is_sampled]
        assert {segment.policy_version for segment in segments} == {step + 1}
    assert [row["step"] for row in run.metrics if "eval/sampled/failed" in row] == [-1, 0, 2]
