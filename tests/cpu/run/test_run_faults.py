"""Faults of a machine that a run meets: it says so, and ends as it would have without them."""

import builtins
import errno
import gc
import io
import os
import random
import shutil
import signal
import sys
from collections import Counter
from functools import partial

import pytest
from full_counts import PROOF
from quickstarts import ONCE, SHORT, quickstart_with

from lockstep.errors import DiskFullError, StorageError
from lockstep.launch.place import end_by_sigterm
from lockstep.run.hooks import RunHooks, hooked
from lockstep.run.train import train
from lockstep.store.run import load_run
from lockstep.training import learner

SMALL = (*SHORT, *ONCE, "steps=4", "checkpoint.every=1")


def play(path, *settings, resume=False):
    return train(quickstart_with(*SMALL, *settings), out=path, resume=resume, view="json")


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


class BrokenDisk:
    """While it is entered, one call of the system fails for files whose path holds `name`: the
    `at`-th one, or all from that on."""

    def __init__(self, name, call, *, error=errno.EIO, at=1, is_lasting=False):
        self.name, self.call, self.error = name, call, error
        self.at, self.is_lasting, self.count = at, is_lasting, 0

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        for module in (builtins, io):
            self.patch.setattr(module, "open", partial(self.open, builtins.open))
        for name, path_of in (
            ("fsync", lambda fd: os.readlink(f"/proc/self/fd/{fd}")),
            ("replace", lambda source, target: target),
            ("mkdir", lambda path, *mode: path),
        ):
            self.patch.setattr(os, name, partial(self.system, name, getattr(os, name), path_of))
        return self

    def __exit__(self, *_):
        self.patch.undo()

    def fails(self, call, path):
        if call != self.call or self.name not in str(path):
            return False
        self.count += 1
        return self.count == self.at or (self.is_lasting and self.count > self.at)

    def raise_if(self, call, path):
        if self.fails(call, path):
            raise OSError(self.error, os.strerror(self.error), str(path))

    def system(self, call, function, path_of, *arguments):
        self.raise_if(call, path_of(*arguments))
        return function(*arguments)

    def open(self, function, path, mode="r", buffering=-1, *more, **options):
        if isinstance(path, int) or not set(mode) & set("wa+"):
            return function(path, mode, buffering, *more, **options)
        self.raise_if("open", path)
        if self.call not in ("write", "short") or self.name not in str(path):
            return function(path, mode, buffering, *more, **options)
        raw = BrokenFile(path, mode.replace("b", "").replace("t", ""))
        raw.disk = self
        if buffering == 0:
            return raw
        file = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
        return file if "b" in mode else io.TextIOWrapper(file)


class BrokenFile(io.FileIO):
    def write(self, data):
        if self.disk.call == "short":
            size = len(memoryview(data).cast("B"))
            return super().write(memoryview(data).cast("B")[: max(1, size // 2)])
        self.disk.raise_if("write", self.name)
        return super().write(data)


BROKEN = [
    ("step-000000.parquet", "write", {}),
    ("step-000002.parquet", "fsync", {"is_lasting": True}),
    ("step-000001.parquet", "replace", {"is_lasting": True, "error": errno.EROFS}),
    ("step-000001-sampled.parquet", "open", {"is_lasting": True, "error": errno.EACCES}),
    ("metrics.jsonl", "write", {"at": 3, "is_lasting": True, "error": errno.ENOSPC}),
    ("metrics.jsonl", "fsync", {"at": 4}),
    ("metrics.jsonl", "short", {}),
    ("step-000002.partial/optimizer", "write", {"error": errno.EDQUOT}),
    ("step-000002.partial/manifest", "fsync", {"is_lasting": True}),
    ("model.safetensors", "write", {"error": errno.ENOSPC}),
    ("report.html", "write", {"is_lasting": True, "error": errno.ENOSPC}),
]  # fmt: skip
if PROOF:
    BROKEN += [
        (name, call, {"error": error, "is_lasting": is_lasting})
        for name in (
            "step-000001.parquet", "step-000003.parquet", "step-000001-sampled", "environment.json",
            "step-000003-sampled", "metrics.jsonl", "trainer.json", "state.json",
            "step-000004", "report.json",
        )
        for call, error in (
            ("open", errno.EACCES), ("write", errno.ENOSPC), ("write", errno.EDQUOT),
            ("fsync", errno.EIO), ("replace", errno.EROFS), ("short", 0),
        )
        for is_lasting in ((False,) if call == "short" else (False, True))
    ]  # fmt: skip


def record_of(path):
    """Everything of a run's episodes, in the order in which they are stored."""
    run = load_run(path)
    return [
        (split, r.step, r.group, r.trajectory.id, r.trajectory.rewards, str(r.trainer_logprobs),
         [(s.token_ids.tolist(), str(s.logprobs)) for s in r.trajectory.segments])
        for split in run.splits()
        for r in run.trajectories(split=split)
    ]  # fmt: skip


CACHE = ("tokens/cached", "tokens/prefilled", "episode/cached")
"""What a process that resumes a run computes again."""


def assert_same(path, sound):
    found, wanted = (
        [{k: v for k, v in row.items() if k not in CACHE} for row in rows_of(each)]
        for each in (path, sound)
    )
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == theirs, {k for k in {*mine, *theirs} if mine.get(k) != theirs.get(k)}
    assert record_of(path) == record_of(sound)


DISK = ("evaluation.every=2", "checkpoint.every=2", "evaluation.at_start=true")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return play(tmp_path_factory.mktemp("runs") / "sound", *DISK).path


@pytest.mark.parametrize("name, call, how", BROKEN, ids=str)
def test_no_error_of_the_disk_loses_a_row_or_an_episode(sound, tmp_path, name, call, how, capsys):
    path, disk = tmp_path / "run", BrokenDisk(name, call, **how)
    try:
        with disk:
            play(path, *DISK)
        assert how.get("is_lasting", False) is False or "report" in name
    except StorageError as error:
        assert "cannot be written: " in str(error) and str(path) in str(error)
    assert disk.count or call == "short", "the fault was never reached"
    if (path / "config.json").exists():
        assert play(path, *DISK, resume=True).status == "done"
    else:
        play(path, *DISK)
    assert "has lost" not in capsys.readouterr().out
    assert_same(path, sound)


def test_a_disk_that_is_full_at_a_checkpoint_keeps_the_one_before(whole, tmp_path, monkeypatch):
    write, calls = learner.write_tensors, []

    def fails_from_the_third_on(path, tensors, *, is_writer):
        calls.append(path)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, tensors, is_writer=is_writer)

    monkeypatch.setattr(learner, "write_tensors", fails_from_the_third_on)
    path = tmp_path / "run"
    with pytest.raises(DiskFullError, match="resume=true"):
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


APART = ("engine.replicas=2", "engine.pool.frozen_seconds=2")


@pytest.mark.parametrize("name", ["SIGKILL", *["SIGSTOP"] * PROOF])
def test_an_engine_that_dies_or_freezes_between_steps_is_replaced_and_counted(name, tmp_path):
    unbroken = play(tmp_path / "unbroken", *APART)
    with hooked(Workers(getattr(signal, name))):
        assert play(tmp_path / "run", *APART).status == "done"
    found = events_of(tmp_path / "run")
    assert found.get("engine/restarts", 0) + found["engine/lost_replicas"] >= 1
    same = [row["reward/mean"] for row in rows_of(unbroken.path) if "reward/mean" in row]
    assert [r["reward/mean"] for r in rows_of(tmp_path / "run") if "reward/mean" in r] == same


PLACES = (
    "lockstep/run/", "lockstep/store/", "lockstep/training/ch", "lockstep/training/tr",
    "lockstep/sync/", "lockstep/agent/bu", "lockstep/report/doc", "lockstep/launch/",
)  # fmt: skip


class Calls:
    """Counts the calls of the functions of a run, its store and its checkpoints, by name. At one of
    them it sends signals to this process: two at once are a KeyboardInterrupt at that very place.
    """

    def __init__(self, name="", at=0, numbers=()):
        self.name, self.at, self.numbers = name, at, numbers
        self.found = Counter()

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event != "call" or not any(place in code.co_filename for place in PLACES):
            return
        self.found[code.co_qualname] += 1
        if code.co_qualname == self.name and self.found[self.name] == self.at:
            sys.setprofile(None)
            for number in self.numbers:
                signal.raise_signal(number)

    def play(self, path):
        before = signal.getsignal(signal.SIGTERM)
        end_by_sigterm()
        sys.setprofile(self)
        try:
            play(path, *DISK, resume=(path / "config.json").exists())
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
            signal.signal(signal.SIGTERM, before)
        gc.collect()  # a lock ends with its process, or with what holds it


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    counted = Calls()
    counted.play(tmp_path_factory.mktemp("runs") / "counted")
    return counted.found


@pytest.mark.parametrize("seed", range(200 if PROOF else 4))
def test_an_interrupt_at_any_place_loses_no_row_and_no_episode(sound, calls, tmp_path, seed):
    draws, path = random.Random(seed), tmp_path / "run"
    for _ in range(draws.randint(1, 2)):
        name = draws.choice(sorted(calls))
        numbers = [draws.choice([signal.SIGINT, signal.SIGTERM]), signal.SIGINT]
        at, number = draws.randint(1, calls[name]), draws.randint(1, 2)
        print(name, at, numbers[:number])
        Calls(name, at, numbers[:number]).play(path)
    assert play(path, *DISK, resume=(path / "config.json").exists()).status == "done"
    assert_same(path, sound)


class TakesAway(RunHooks):
    """Does something to the run directory after the third update."""

    def __init__(self, path, take):
        self.path, self.take, self.num_updates = path, take, 0

    def after_update(self, rows, log_probs):
        self.num_updates += 1
        if self.num_updates == 3:
            self.take(self.path)


def replaced_by_a_file(path):
    path.rename(path.with_name("old"))
    path.write_text("")


GOES_ON = {
    "metrics.jsonl": lambda path: (path / "metrics.jsonl").unlink(),
    "config.json": lambda path: (path / "config.json").unlink(),
    "environment.json": lambda path: (path / "environment.json").unlink(),
    "lock": lambda path: (path / "lock").unlink(),
    "checkpoints": lambda path: shutil.rmtree(path / "checkpoints"),
    "metrics.jsonl moved": lambda path: (path / "metrics.jsonl").rename(path / "backup.jsonl"),
}
ENDS = {
    "metrics.jsonl cut": lambda path: (path / "metrics.jsonl").write_text(""),
    "metrics.jsonl longer": lambda path: (path / "metrics.jsonl").open("a").write("{}"),
    "metrics.jsonl copied": lambda path: shutil.copy(
        shutil.move(path / "metrics.jsonl", path / "backup.jsonl"), path / "metrics.jsonl"
    ),
    "trajectories": lambda path: shutil.rmtree(path / "trajectories"),
    "trajectories as a file": lambda path: replaced_by_a_file(path / "trajectories"),
    "checkpoints as a file": lambda path: replaced_by_a_file(path / "checkpoints"),
    "the directory": shutil.rmtree,
    "the directory moved": lambda path: path.rename(path.with_name("moved")),
}


@pytest.mark.parametrize("what", ["metrics.jsonl", *list(GOES_ON)[1:] * PROOF])
def test_what_is_taken_away_and_known_is_written_again(sound, tmp_path, what, caplog):
    path = tmp_path / "run"
    with hooked(TakesAway(path, GOES_ON[what])):
        assert play(path, *DISK).status == "done"
    assert_same(path, sound)
    files = {each.name for each in path.iterdir()}
    assert {"config.json", "environment.json", "lock", "checkpoints"} <= files
    assert "is written anew" in caplog.text or what in ("lock", "checkpoints")
    assert play(path, *DISK, resume=True).status == "done"


@pytest.mark.parametrize("what", ["trajectories", "the directory moved", *[*ENDS] * PROOF])
def test_what_is_taken_away_and_unknown_ends_the_run_with_a_line(sound, tmp_path, what, capsys):
    path = tmp_path / "run"
    with hooked(TakesAway(path, ENDS[what])), pytest.raises(StorageError) as error:
        play(path, *DISK)
    assert str(path) in str(error.value) and "resume=true" in str(error.value)
    if what.startswith("the directory"):
        assert not path.exists(), "nothing is written beside the run"
        if what == "the directory":
            return
        path = path.with_name("moved")
    if (path / "old").exists():  # as a user would mend it
        for name in ("trajectories", "checkpoints"):
            if (path / name).is_file():
                (path / name).unlink()
                (path / "old").rename(path / name)
    capsys.readouterr()
    config = quickstart_with(*SMALL, *DISK)
    assert train(config, out=path, resume=True).status == "done"
    said = capsys.readouterr().out
    if what in ("trajectories", "metrics.jsonl cut"):
        assert "has lost the" in said and "of 2 step(s), the first of step 0" in said
    else:
        assert_same(path, sound)


def test_a_part_that_is_taken_away_is_named_at_the_end(tmp_path, capsys):
    path = tmp_path / "run"
    part = path / "trajectories" / "step-000001.parquet"
    with hooked(TakesAway(path, lambda path: part.unlink())):
        train(quickstart_with(*SMALL, *DISK), out=path)
    assert "has lost the episodes of 1 step(s), the first of step 1" in capsys.readouterr().out
