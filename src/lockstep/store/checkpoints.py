"""The checkpoints of a run, for reading: their list, a check of their files, and addresses."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import CheckpointError, ConfigError, RunError
from lockstep.store.run import CHECKPOINT, Run, is_run, load_run

MANIFEST, POLICY = "manifest.json", "policy"
FORMAT_VERSION = 1
FINISHED = ("model", "adapter")
"""Directories of a supervised run with the weights that it ended with."""
ADAPTER = "adapter_config.json"
"""File of a directory with an adapter."""

RunAddress = tuple[Path, int | None]
"""A run, and the step of one of its checkpoints; None is the best, else the last."""

_REPLACED = re.compile(r"\.step-(\d{6,})\.replaced")
"""Name of an old checkpoint if a kill interrupted its replacement by one of the same step."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of a checkpoint."""

    format_version: int
    step: int
    metric: float | None
    """Figure that decides `best`; None if the step was not evaluated."""
    files: Mapping[str, tuple[int, str]]
    """path -> (bytes, sha256)."""


class Checkpoints:
    """The checkpoints in one directory, by step. Only whole ones count."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def latest(self) -> Path | None:
        """The newest whole checkpoint, every byte of it checked; None if there is none.

        Torn ones are skipped with a warning that names the problem.
        """
        for _, path in sorted(self.named().items(), reverse=True):
            try:
                verify(path)
            except CheckpointError as error:
                _log.warning("%s Passed over for the one before.", error)
                continue
            return path
        return None

    def best(self) -> Path | None:
        """The checkpoint with the highest metric, the newer of equals; None if no step has a
        metric."""
        rated = [(m.metric, m.step, path) for path, m in self.whole() if m.metric is not None]
        return max(rated, key=lambda r: r[:2])[2] if rated else None

    def at(self, step: int) -> Path:
        """The checkpoint of `step`. Raises CheckpointError naming the existing steps."""
        named = self.named()
        if step not in named:
            known = ", ".join(map(str, sorted(named))) or "none"
            raise CheckpointError(f"{self.root} has no checkpoint of step {step}; it has {known}.")
        return named[step]

    def steps(self) -> list[int]:
        """Steps of the checkpoints whose files exist with their sizes, in order."""
        return sorted(manifest.step for _, manifest in self.whole())

    def named(self) -> dict[int, Path]:
        entries = list(self.root.iterdir()) if self.root.is_dir() else []
        named = {
            int(m[1]): path
            for pattern in (_REPLACED, CHECKPOINT)  # the later one counts
            for path in entries
            if (m := pattern.fullmatch(path.name))
        }
        for path in named.values():
            if path.is_symlink():
                raise CheckpointError(
                    f"{path} is a link to {os.readlink(path)}. A run renames and deletes its "
                    "checkpoints: put the directory itself here, or remove the link."
                )
        return {step: path for step, path in named.items() if path.is_dir()}

    def whole(self) -> list[tuple[Path, Manifest]]:
        out: list[tuple[Path, Manifest]] = []
        for path in self.named().values():
            with suppress(CheckpointError):
                out.append((path, verify(path, digests=False)))
        return out


def trained_by(path: str | os.PathLike[str], step: int | None = None) -> tuple[Run, Path]:
    """(run, directory of weights that it trained). path: a run, for its checkpoint at `step`, else
    the best, else the last, else what `lockstep sft` wrote at its end; or a directory in a run that
    holds weights: RUN/model, RUN/adapter, a checkpoint, or a seat of one.

    Raises RunError or CheckpointError if there are none.
    """
    path = Path(path).expanduser()
    owner = next((place for place in (path, *path.absolute().parents) if is_run(place)), path)
    run = load_run(owner)
    if owner == path:
        found = _chosen(run, step)
        return run, found / POLICY if found.name not in FINISHED else found
    held = path / POLICY if (path / POLICY).is_dir() else path
    if step is not None or not any((held / name).is_file() for name in ("config.json", ADAPTER)):
        raise RunError(
            f"{path} holds no weights of the run {owner}. Expected RUN, RUN@STEP, RUN/model, "
            "RUN/adapter or a directory in RUN/checkpoints."
        )
    return run, held


def _chosen(run: Run, step: int | None) -> Path:
    store = Checkpoints(run.path / "checkpoints")
    if step is not None:
        return store.at(step)
    ended = [run.path / name for name in FINISHED if (run.path / name).is_dir()]
    found = store.best() or store.latest() or next(iter(ended), None)
    if found is None:
        raise RunError(f"{run.path} has no checkpoint. Did it end before checkpoint.every steps?")
    return found


def checkpoint_of(run: Run, step: int | None) -> Path:
    """The checkpoint of a run: at `step`, else the best, else the last. RunError if it has none."""
    found = _chosen(run, step)
    if found.name in FINISHED:
        raise RunError(
            f"{run.path} has weights in {found} and no checkpoint to continue from. Start from "
            f"the weights: model={run.path}."
        )
    return found


def split_address(target: str | os.PathLike[str]) -> RunAddress:
    """`RUN@STEP` or `RUN`: the step is None where none is given. Raises ConfigError for a step that
    is no number."""
    text = os.fspath(target)
    path, at, step = text.rpartition("@")
    if not at or Path(text).expanduser().is_dir():
        return Path(text), None
    if not step.isdigit():
        raise ConfigError(f"{text!r}: expected RUN@STEP with a whole number for STEP.")
    return Path(path), int(step)


def verify(checkpoint: Path, *, digests: bool = True) -> Manifest:
    """The manifest, if the files match it; else raises CheckpointError listing every problem.

    digests: read every byte; False compares names and sizes only.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = Manifest(**json.loads(path.read_text("utf-8")))
        files = [(name, size, digest) for name, (size, digest) in manifest.files.items()]
    except FileNotFoundError:
        raise CheckpointError(
            f"{checkpoint} has no {MANIFEST}: not a checkpoint, or never finished."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error!r}). A torn copy?") from error
    if (version := manifest.format_version) > FORMAT_VERSION:
        raise CheckpointError(
            f"{checkpoint} was written in format {version}; this version of Lockstep reads up to "
            f"{FORMAT_VERSION}. Use the version that wrote it."
        )
    problems: list[str] = []
    for name, size, digest in files:
        file = checkpoint / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != size:
            problems.append(f"{name} has {file.stat().st_size} bytes, {size} were written")
        elif digests and sha256_of(file) != digest:
            problems.append(f"{name} has changed since it was written")
    if problems:
        raise CheckpointError(f"{checkpoint} is torn: {'; '.join(problems)}.")
    return manifest


def sha256_of(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
