"""Faults of a machine that a run meets: it says so, and ends as it would have without them."""

import errno
import os
import signal

import pytest
from full_counts import PROOF

from lockstep.config import resolve
from lockstep.errors import DiskFullError
from lockstep.recipes.registry import find_recipe
from lockstep.run.hooks import RunHooks, hooked
from lockstep.run.train import train
from lockstep.store.run import load_run
from lockstep.training import learner

SMALL = (
    "steps=4", "groups_per_step=2", "group_size=4", "evaluation.num_tasks=2", "checkpoint.every=1",
    "evaluation.at_start=false", "evaluation.greedy=false",
)  # fmt: skip


def play(path, *settings, resume=False):
    return train(
        resolve(find_recipe("quickstart"), [*SMALL, *settings]),
        out=path,
        resume=resume,
        view="json",
    )


def rows_of(path):
    rows = load_run(path).metrics
    names = ("time/", "engine/")
    return [{k: v for k, v in row.items() if not k.startswith(names)} for row in rows]


def events_of(path):
    """Each event of the engine, in all."""
    rows, total = load_run(path).metrics, {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("engine/"):
                total[name] = total.get(name, 0) + value
    return total


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return play(tmp_path_factory.mktemp("runs") / "whole").path


def test_a_disk_that_is_full_at_a_checkpoint_keeps_the_one_before(whole, tmp_path, monkeypatch):
    write, calls = learner.write_tensors, []

    def fails_from_the_third_on(path, tensors, *, is_writer):
        calls.append(path)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, tensors, is_writer=is_writer)

    monkeypatch.setattr(learner, "write_tensors", fails_from_the_third_on)
    path = tmp_path / "run"
    with pytest.raises(DiskFullError, match=r"full .*No space left on device.* resume=true\."):
        play(path)
    monkeypatch.undo()
    assert list(load_run(path).checkpoints()) == [1, 2]
    assert play(path, resume=True).status == "done"
    assert rows_of(path) == rows_of(whole)


def test_a_run_resumes_at_the_border_of_an_epoch(tmp_path):
    """Six questions and two tasks per step: the third step ends an epoch."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.md").write_text("\n\n".join(f"The door of room {n} is red." for n in range(6)))
    questions = tmp_path / "questions.jsonl"
    line = '{{"id": "q{0}", "question": "Room {0}?", "answer": "red", "gold": "a.md#0"}}\n'
    questions.write_text("".join(line.format(n) for n in range(6)))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(line.format(n) for n in range(6, 9)))
    own = (
        f"task.docs={folder}", f"task.questions={questions}", f"task.eval_questions={held_out}",
        "steps=6", "max_tokens=600",
    )  # fmt: skip

    class Ends(RunHooks):
        """Interrupts the fourth step: the last checkpoint is that of the epoch's end."""

        num_updates = 0

        def after_update(self, rows, log_probs):
            self.num_updates += 1
            if self.num_updates == 4:
                raise KeyboardInterrupt

    unbroken = play(tmp_path / "unbroken", *own)
    with hooked(Ends()):
        assert play(tmp_path / "cut", *own).status == "interrupted"
    assert list(load_run(tmp_path / "cut").checkpoints())[-1] == 3
    assert play(tmp_path / "cut", *own, resume=True).status == "done"
    assert rows_of(tmp_path / "cut") == rows_of(unbroken.path)
    stored = [load_run(unbroken.path).groups(step) for step in range(6)]
    epochs = [{g.task.id for groups in stored[at : at + 3] for g in groups} for at in (0, 3)]
    assert epochs == [{f"q{n}" for n in range(6)}] * 2


class Workers(RunHooks):
    """Sends a signal to the process of the first engine after the first update."""

    def __init__(self, number):
        self.number, self.pool = number, None

    def make_engine(self, config, context):
        self.pool = super().make_engine(config, context)
        return self.pool

    def after_update(self, rows, log_probs):
        if self.number:
            os.kill(self.pool._replicas[0].engine.pid, self.number)
            self.number = 0


APART = (
    "engine.replicas=2", "engine.pool.check_seconds=0.2", "engine.pool.frozen_seconds=2",
    "engine.pool.load_seconds=10", "engine.pool.retry_seconds=[0.1,0.5]",
)  # fmt: skip


@pytest.mark.parametrize("name", ["SIGKILL", *["SIGSTOP"] * PROOF])
def test_an_engine_that_dies_or_freezes_between_steps_is_replaced_and_counted(name, tmp_path):
    unbroken = play(tmp_path / "unbroken", *APART)
    with hooked(Workers(getattr(signal, name))):
        assert play(tmp_path / "run", *APART).status == "done"
    found = events_of(tmp_path / "run")
    assert found.get("engine/restarts", 0) + found["engine/lost_replicas"] >= 1
    same = [row["reward/mean"] for row in rows_of(unbroken.path) if "reward/mean" in row]
    assert [r["reward/mean"] for r in rows_of(tmp_path / "run") if "reward/mean" in r] == same
