"""The run directory: what a run leaves behind, and how it is written, resumed and read.

config.json         the resolved config; `lockstep train DIR/config.json` runs it again
environment.json    versions, host, threads and command of every start
metrics.jsonl       a row per step
trajectories/       step-000012.parquet, one part per step; step-000012-NAME.parquet of evaluations
                    after it, step--00001-NAME.parquet of those before step 0
checkpoints/        step-000030/ (written by the trainer)
set-aside/          rows and parts that a resume from an earlier checkpoint replaced
lock                the process that writes here
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lockstep.config import read_json
from lockstep.display import Chart, Named, block, chart_of, number, table, unknown_name
from lockstep.errors import DataError, RunError, StorageError
from lockstep.store.config import LastConfig, RecordConfig, SampleConfig
from lockstep.store.files import (
    hold_lock,
    storage_errors,
    sync_directory,
    why_no_directory,
    write_atomically,
    write_json,
)
from lockstep.store.metrics import JsonlLogger, read_rows
from lockstep.store.trajectories import (
    Address,
    TrajectoryRecord,
    TrajectorySummary,
    find_text,
    read_part,
    read_row,
    read_summaries,
    to_groups,
    write_part,
)
from lockstep.types import Group, Sample

FORMAT_VERSION = 1
"""Version of the directory, in environment.json. Parts have a schema version of their own."""

TRAIN = "train"
"""The split whose parts have no name of their own in the file name."""

CHECKPOINT = re.compile(r"step-(\d{6,})")
_OWN_NAMES = ("config.json", "metrics.jsonl", "trajectories", "checkpoints")
_PART = re.compile(r"step-(-00001|\d{6,})(?:-([A-Za-z0-9_.-]+))?\.parquet")
_SPLIT = re.compile(r"[A-Za-z0-9_.-]+")
_NOTED = ("lockstep-rl", "torch", "numpy", "tokenizers", "safetensors", "pyarrow", "transformers")
_log = logging.getLogger(__name__)
_THREADS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS")


Status = Literal["done", "interrupted", "stopped"]


@dataclass(frozen=True, slots=True, repr=False)
class Outcome:
    """How a run ended."""

    path: Path
    """The run directory."""
    status: Status
    """done; interrupted: resume=true continues the run; stopped: by an alarm."""
    summary: Mapping[str, Any]
    """Last figures: steps, reward, evaluation."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "summary", Named(self.summary))

    def __repr__(self) -> str:
        return f"Outcome({self.status}, {_figures(self.summary)}, {str(self.path)!r})"

    def _repr_html_(self) -> str:
        rows = [*_shown(self.summary), ("report", str(self.path / "report.html"))]
        if self.status == "interrupted":
            rows.append(("go on", "the same call with resume=True and out= this run"))
        return block(f"{self.status}: {self.path}", table(rows))

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def run(self) -> Run:
        """The run, for reading: `outcome.run.plot()`."""
        return load_run(self.path)


def default_run_path(name: str, *, root: str | os.PathLike[str] = "runs") -> Path:
    """`runs/NAME-YYYYmmdd-HHMMSS`, with a counter behind it if two runs start in one second."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    path, counter = Path(root) / stem, 2
    while path.exists():
        path, counter = Path(root) / f"{stem}-{counter}", counter + 1
    return path


def describe_environment(facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The facts that decide a run besides its config: versions, host, processor, threads, command.

    facts: JSON values of the caller (fingerprint, architecture).
    """
    versions: dict[str, str] = {}
    for name in _NOTED:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "pid": os.getpid(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "num_usable_cpus": usable,
        "threads": {name: os.environ[name] for name in _THREADS if name in os.environ},
        "working_directory": os.getcwd(),
        "argv": list(sys.argv),
        "git_commit": _git_commit(),
        "versions": versions,
        **(facts or {}),
    }


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


class RunDirectory:
    """The writer of one run. Made by `create` or `open`, which take the lock; `close` frees it.

    >>> with RunDirectory.create(path, {"recipe": "quickstart"}) as run:      # doctest: +SKIP
    ...     run.write_trajectories(0, groups, samples=rows)
    ...     run.log({"step": 0, "reward/mean": 0.27})
    """

    def __init__(
        self,
        path: Path,
        lock: ExitStack,
        record: RecordConfig | None,
        documents: dict[str, dict[str, Any]],
    ) -> None:
        """lock: becomes the writer's own once nothing can fail any more. documents: content of the
        JSON files."""
        self.path, self.metrics = path, JsonlLogger(path / "metrics.jsonl")
        self._record, self._documents = record or RecordConfig(), documents
        self._place = path.stat()
        self._lock = lock.pop_all()

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        config: Mapping[str, Any],
        *,
        record: RecordConfig | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> RunDirectory:
        """Starts a run in an empty or missing directory.

        config: the resolved config as JSON. facts: added to environment.json.
        Raises RunError if the directory holds a run already.
        """
        path = Path(path)
        check_place(path)
        with ExitStack() as lock, storage_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            lock.enter_context(hold_lock(path / "lock"))
            check_place(path)
            (path / "trajectories").mkdir(exist_ok=True)
            (path / "checkpoints").mkdir(exist_ok=True)
            environment = {"format_version": FORMAT_VERSION, **describe_environment(facts)}
            documents = {"environment.json": {**environment, "resumes": []}}
            documents["config.json"] = dict(config)  # last: a directory with it is a run
            for name, document in documents.items():
                write_json(path / name, document)
            return cls(path, lock, record, documents)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        record: RecordConfig | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> RunDirectory:
        """Continues a run, without the half-written files that a kill left. Call `rewind` next.

        Raises RunError if `path` is not a run, or another process writes to it.
        """
        path = load_run(path).path
        with ExitStack() as lock, storage_errors(path):
            lock.enter_context(hold_lock(path / "lock"))
            (path / "trajectories").mkdir(exist_ok=True)
            for partial in (path / "trajectories").glob("*.partial"):
                partial.unlink()
            names = ("environment.json", "config.json")
            documents = {name: read_json(path / name, RunError) for name in names}
            documents["environment.json"]["resumes"].append(describe_environment(facts))
            write_json(path / "environment.json", documents["environment.json"])
            return cls(path, lock, record, documents)

    def log(self, row: Mapping[str, Any]) -> None:
        """Appends a metrics row; on disk when this returns. See `JsonlLogger.log`."""
        self.check()
        self.metrics.log(row)

    def check(self) -> None:
        """Writes anew what somebody deleted of the files that this process knows. Raises
        StorageError if the directory was moved or deleted, and RunError if another run has its
        lock."""
        try:
            is_same = os.path.samestat(self._place, self.path.stat())
        except OSError:
            is_same = False
        if not is_same:
            raise StorageError(
                f"{self.path} was moved or deleted while the run was writing to it, so nothing "
                "more is written. Continue the run where its directory is now, with resume=true."
            )
        if not (self.path / "lock").exists():
            self._lock.enter_context(hold_lock(self.path / "lock"))
        for name, document in self._documents.items():
            if not (self.path / name).exists():
                write_json(self.path / name, document)
                _log.warning("%s/%s was deleted and is written anew.", self.path, name)
        self.metrics.check()

    def write_trajectories(
        self,
        step: int,
        groups: Sequence[Group],
        *,
        samples: Iterable[Sample] = (),
        split: str = TRAIN,
    ) -> None:
        """Stores the step's trajectories as `record.keep` says, and deletes the others.

        samples: the training rows, for the trainer's log-probs and advantages; see `write_part`.
        split: "train", or the name of an evaluation.
        """
        self.check()
        if not _SPLIT.fullmatch(split):
            raise RunError(f"split {split!r} must consist of letters, digits and _ . -")
        keep = self._record.keep
        if isinstance(keep, SampleConfig):
            groups = [g for g in groups if _is_in_sample(step, g.task.id, keep.fraction)]
            kept = {t.id for g in groups for t in g.trajectories}
            samples = [s for s in samples if s.id.rpartition("/")[0] in kept]
            if not groups:
                return
        write_part(part_path(self.path, step, split), groups, step=step, samples=samples)
        if isinstance(keep, LastConfig):
            with storage_errors(self.path / "trajectories"):
                for part_step, _, part in _parts(self.path):
                    if part_step <= step - keep.steps:
                        part.unlink(missing_ok=True)

    def rewind(self, last_step: int, *, last_row: int | None = None) -> Path | None:
        """Moves rows and parts later than `last_step` into set-aside/; nothing is deleted.

        last_step: the last step whose update is in the checkpoint that the run continues from; -1
        for the very start. last_row: the same for rows, where the last one will be written again.
        Returns the place they went to, or None if there was nothing later.
        """
        last_row = last_step if last_row is None else last_row
        path = self.path / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        later = [line for line in lines if json.loads(line)["step"] > last_row]
        parts = [part for step, _, part in _parts(self.path) if step > last_step]
        if not later and not parts:
            return None
        place = default_run_path("resume", root=self.path / "set-aside")
        with storage_errors(place):
            place.mkdir(parents=True)
            if later:
                earlier = b"".join(line for line in lines if json.loads(line)["step"] <= last_row)
                # The copy comes first: a kill between the two leaves the rows twice, never lost.
                write_atomically(place / "metrics.jsonl", lambda file: file.write(b"".join(later)))
                self.metrics.close()
                write_atomically(path, lambda file: file.write(earlier))
                self.metrics = JsonlLogger(path)
            if parts:
                (place / "trajectories").mkdir()
                for part in parts:
                    os.replace(part, place / "trajectories" / part.name)
                sync_directory(place / "trajectories")
                sync_directory(self.path / "trajectories")
        return place

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Adds facts to the latest start in environment.json: the run's own, or the last resume."""
        self.check()
        environment = self._documents["environment.json"]
        (environment["resumes"][-1] if environment["resumes"] else environment).update(facts)
        write_json(self.path / "environment.json", environment)

    def close(self) -> None:
        """Closes the files and frees the lock. May be called twice."""
        self.metrics.close()
        self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run on disk, read on demand and never written; the run may still be training."""

    path: Path

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {len(self.values('time/step_seconds'))} steps)"

    def _repr_html_(self) -> str:
        config = self.config
        settings = [(name, config[name]) for name in ("name", "model", "steps") if name in config]
        steps = ", ".join(map(str, self.checkpoints())) or "none yet"
        rows = [*settings, ("checkpoints", steps), ("report", str(self.path / "report.html"))]
        return block(repr(self), self.plot()._repr_html_(), table(rows))

    def __fspath__(self) -> str:
        return str(self.path)

    def plot(self, *names: str) -> Chart:
        """Curves of these metrics; without a name, of the reward and the held-out means, or of the
        loss where there is no reward.

        >>> load_run("runs/first").plot("reward/mean").save("reward.svg")      # doctest: +SKIP
        """
        for name in names:
            self.column(name)  # a mistyped one is refused
        return chart_of(self.metrics, names, num_steps=self.config.get("steps"))

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def config(self) -> dict[str, Any]:
        return Named(read_json(self.path / "config.json", RunError))

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Facts of the first start; `resumes` lists the later ones."""
        return read_json(self.path / "environment.json", RunError)

    @property
    def first_step(self) -> int:
        """0, or the step of the checkpoint that the run started from (from=RUN@STEP)."""
        origin = self.environment.get("from")
        name = Path(str(origin["checkpoint"])).name if isinstance(origin, dict) else ""
        return max(step_of(name), 0)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, in order."""
        return [Named(row) for row in read_rows(self.path / "metrics.jsonl")]

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of one metric, where it was measured. Raises UnknownNameError, with the
        nearest name, if this run never measured it."""
        rows = [(row["step"], row[name]) for row in self.metrics if name in row]
        if not rows:
            known = {name for row in self.metrics for name in row}
            raise unknown_name(name, sorted(known), where=f"{self.path} has")
        return [step for step, _ in rows], [value for _, value in rows]

    def values(self, name: str) -> list[float]:
        """The values of one metric, in order; empty where it was never measured."""
        return [row[name] for row in self.metrics if name in row]

    def steps(self, *, split: str = TRAIN) -> list[int]:
        """Steps whose trajectories are stored."""
        return [step for step, part_split, _ in _parts(self.path) if part_split == split]

    def splits(self) -> list[str]:
        """The splits that have stored trajectories: "train" and the names of evaluations."""
        return sorted({split for _, split, _ in _parts(self.path)})

    def trajectories(
        self, step: int | None = None, *, split: str = TRAIN
    ) -> Iterator[TrajectoryRecord]:
        """Stored trajectories of one step, or of all in order; read as they are asked for.

        Raises RunError if the step's are not stored.
        """
        for path in self._selected(step, split):
            yield from read_part(path)

    def groups(self, step: int, *, split: str = TRAIN) -> list[Group]:
        """The groups of one step, as they were sampled."""
        return to_groups(self.trajectories(step, split=split))

    def summaries(
        self, step: int | None = None, *, split: str = TRAIN
    ) -> Iterator[TrajectorySummary]:
        """The trajectories' summaries, read without their tokens."""
        for path in self._selected(step, split):
            yield from read_summaries(path, split=split)

    def find(self, trajectory_id: str) -> TrajectoryRecord:
        """The trajectory of that id, latest step first. Raises RunError if none is stored."""
        for _, _, path in reversed(_parts(self.path)):
            for summary in read_summaries(path):
                if summary.id == trajectory_id:
                    return read_row(*summary.address)
        raise RunError(
            f"{self.path} holds no trajectory {trajectory_id!r}. record.keep may have dropped it; "
            "`lockstep report` lists the stored ones."
        )

    def search(self, text: str) -> Iterator[tuple[str, list[Address], int]]:
        """(split, addresses of the trajectories that hold `text`, number of those looked at) per
        stored part, the latest step first; see `find_text`."""
        for _, split, path in reversed(_parts(self.path)):
            try:
                found, number = find_text(path, text)
            except DataError:
                if path.exists():
                    raise
                continue  # a run that still trains let it go
            yield split, [(path, index) for index in found], number

    def checkpoints(self) -> dict[int, Path]:
        """Step -> directory, in order. The trainer checks a checkpoint's files when it loads it."""
        named = {step_of(path.name): path for path in (self.path / "checkpoints").glob("*/")}
        return {step: named[step] for step in sorted(named) if step >= 0}

    def _selected(self, step: int | None, split: str) -> list[Path]:
        parts = [(s, path) for s, part_split, path in _parts(self.path) if part_split == split]
        if step is None:
            return [path for _, path in parts]
        if chosen := [path for s, path in parts if s == step]:
            return chosen
        stored = f"{parts[0][0]}..{parts[-1][0]}" if parts else "none"
        raise RunError(
            f"{self.path} holds no {split} trajectories of step {step} (stored: {stored}). "
            "record.keep decides which steps are kept."
        )


def find_runs(root: str | os.PathLike[str]) -> list[Run]:
    """The run at `root`, or the runs in it, up to three directories down, by path."""
    root = Path(root)
    places = [root, *(place for depth in ("*", "*/*", "*/*/*") for place in root.glob(depth))]
    return [Run(p) for p in sorted(places) if is_run(p)]


def is_run(path: Path) -> bool:
    """True if `path` is a run directory."""
    return all((path / name).is_file() for name in ("config.json", "environment.json"))


def _shown(summary: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The figures of a summary that a person asks for first."""
    return [
        (name, value)
        for name, value in summary.items()
        if not name.startswith("eval/") or re.fullmatch(r"eval/(loss|.+/(mean|pass)@\d+)", name)
    ]


def _figures(summary: Mapping[str, Any]) -> str:
    """The figures in one line: `30 steps, reward 0.32 -> 0.93`."""
    parts = [f"{summary['steps']} steps"] if "steps" in summary else []
    if "reward_first" in summary:
        first, last = (number(summary[name]) for name in ("reward_first", "reward_last_10"))
        parts.append(f"reward {first} -> {last}")
    return ", ".join(parts) or "nothing measured"


def load_run(path: str | os.PathLike[str]) -> Run:
    """Opens a run for reading; needs no lock. Raises RunError if `path` is not a run directory."""
    path = Path(path)
    if not is_run(path):
        nearby = [p.parent.name for p in sorted(path.glob("*/config.json"))]
        hint = f" Did you mean one of the runs in it: {', '.join(nearby[-3:])}?" if nearby else ""
        found = "has no config.json" if path.is_dir() else "does not exist"
        raise RunError(f"{path} is not a run directory: it {found}.{hint}")
    run, file = Run(path), path / "environment.json"
    if missing := [k for k in ("format_version", "resumes") if k not in run.environment]:
        raise RunError(f"{file} lacks {' and '.join(missing)}: it was damaged. Restore the file.")
    if (version := run.environment["format_version"]) > FORMAT_VERSION:
        raise RunError(
            f"{path} was written in format {version}; this version of Lockstep reads up to "
            f"{FORMAT_VERSION}. Use the version that wrote it."
        )
    return run


def check_place(path: str | os.PathLike[str]) -> None:
    """Raises RunError if no run can be written to `path`. Creates nothing."""
    path = Path(path)
    if problem := why_no_directory(path):
        raise RunError(f"{path}: no run can be written there: {problem}. Choose out=DIR.")
    found = [name for name in _OWN_NAMES if _holds_something(path / name)]
    if found:
        raise RunError(
            f"{path} holds a run already (it has {', '.join(found)}). Choose another directory "
            "with out=DIR, or continue a training run with resume=true."
        )


def _holds_something(path: Path) -> bool:
    """False for the empty directories of a start that was killed early."""
    return any(path.iterdir()) if path.is_dir() else path.exists()


def part_path(path: Path, step: int, split: str) -> Path:
    """The file of a step's trajectories in the run directory `path`."""
    suffix = "" if split == TRAIN else f"-{split}"
    return path / "trajectories" / f"step-{step:06d}{suffix}.parquet"


def step_of(name: str) -> int:
    """Steps that were trained before the checkpoint of this name; -1 if the name does not say."""
    match = CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else -1


def _parts(path: Path) -> list[tuple[int, str, Path]]:
    """(step, split, file), by step."""
    return sorted(
        (int(match[1]), match[2] or TRAIN, entry)
        for entry in (path / "trajectories").glob("*")
        if (match := _PART.fullmatch(entry.name))
    )


def _is_in_sample(step: int, task_id: str, fraction: float) -> bool:
    digest = hashlib.blake2b(f"{step}/{task_id}".encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def _git_commit() -> str:
    """The working directory's commit, with "+changes" if tracked files differ; "" outside git."""
    command = ["git", "describe", "--always", "--dirty=+changes", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (subprocess.SubprocessError, OSError):
        return ""
    return found.stdout.strip()
