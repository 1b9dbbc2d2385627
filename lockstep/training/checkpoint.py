"""Checkpoints that exist as a whole or not at all: written to a temporary directory, checked on
reading; old ones are removed.

step-000030/
    policy/                 Hugging Face form: config.json, model.safetensors, tokenizer files;
                            with lora, the adapter in PEFT's form and a digest of its model
    optimizer.safetensors   moments and, for a low-precision policy, float32 masters
    trainer.json            updates made, skipped, policy version
    state.json              the loop's state (position in the tasks, ...)
    critic/                 with advantage=gae: its model, optimizer and counters
    seats/SEAT/             with seats.SEAT=own: policy, optimizer and counters of that seat
    manifest.json           every file with its size and digest; written last
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.store.files import replace_directory, storage_errors, sync_tree, write_json
from lockstep.training.critic import CRITIC, Critic
from lockstep.training.trainer import Trainer

MANIFEST, STATE, SEATS = "manifest.json", "state.json", "seats"
FORMAT_VERSION = 1

NO_SEATS: Mapping[str, Trainer] = MappingProxyType({})

_NAME = re.compile(r"step-(\d{6,})")
_REPLACED = re.compile(r"\.step-(\d{6,})\.replaced")
"""A checkpoint that one of the same step was about to replace when the run was killed."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of a checkpoint."""

    format_version: int
    step: int
    metric: float | None
    """Figure by which `best` is chosen; None if the step was not evaluated."""
    files: Mapping[str, tuple[int, str]]
    """path -> (bytes, sha256)."""


class CheckpointStore:
    """The checkpoints of one run, by step.

    keep_last: number of newest ones to keep. keep_best: keep the one with the highest metric too.
    Only whole checkpoints count: a torn one never replaces a good one.
    """

    def __init__(self, root: str | Path, *, keep_last: int = 2, keep_best: bool = True) -> None:
        self.root = Path(root)
        self.keep_last, self.keep_best = keep_last, keep_best

    def save(
        self,
        step: int,
        trainer: Trainer,
        state: Mapping[str, Any],
        *,
        metric: float | None = None,
        critic: Critic | None = None,
        seats: Mapping[str, Trainer] = NO_SEATS,
    ) -> Path:
        """Writes `step-NNNNNN`, replacing one of the same step, and removes old ones.

        state: JSON-able; `load` returns it. A kill at any moment leaves the former checkpoints, and
        so does an error of the disk: StorageError. Called by all ranks of the trainer; the first
        one writes.
        """
        target = self.root / f"step-{step:06d}"
        beside = self.root / f".{target.name}.partial"
        with storage_errors(target, partial=beside):
            if trainer.is_writer:
                self.root.mkdir(parents=True, exist_ok=True)
                for leftover in {*self.root.glob(".step-*")} - {*self._named().values()}:
                    shutil.rmtree(leftover, ignore_errors=True)  # of a write that was killed
            trainer.save(beside)
            if critic is not None:
                critic.save(beside / CRITIC)
            for seat, of_seat in seats.items():
                of_seat.save(beside / SEATS / seat)
            if not trainer.is_writer:
                return target
            try:
                write_json(beside / STATE, dict(state))
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the state of step {step} cannot be written as JSON ({error}); expected "
                    "numbers, text, lists and objects, and no NaN."
                ) from error
            metric = metric if metric is not None and math.isfinite(metric) else None
            manifest = {"format_version": FORMAT_VERSION, "step": step, "metric": metric}
            files = {name: list(entry) for name, entry in _digest_files(beside).items()}
            write_json(beside / MANIFEST, {**manifest, "files": files})
            sync_tree(beside)
            replace_directory(beside, target, aside=self.root / f".{target.name}.replaced")
            self._let_go()
        return target

    def load(
        self,
        checkpoint: Path,
        trainer: Trainer,
        *,
        weights_only: bool = False,
        critic: Critic | None = None,
        seats: Mapping[str, Trainer] = NO_SEATS,
    ) -> dict[str, Any]:
        """Restores the trainer.

        weights_only: the models alone, for a run that starts from them. critic, seats: restored
        too. Returns the state that `save` was given. Raises CheckpointError if the checkpoint is
        torn, of another model, or without one of these.
        """
        verify(checkpoint)
        if critic is not None:
            critic.load(checkpoint / CRITIC, weights_only=weights_only)
        for seat, of_seat in seats.items():
            of_seat.load(checkpoint / SEATS / seat, weights_only=weights_only)
        trainer.load(checkpoint, weights_only=weights_only)
        return json.loads((checkpoint / STATE).read_text("utf-8"))

    def latest(self) -> Path | None:
        """The newest whole checkpoint, every byte of it checked; None if there is none.

        Torn ones are skipped with a warning that names the problem.
        """
        for _, path in sorted(self._named().items(), reverse=True):
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
        rated = [(m.metric, m.step, path) for path, m in self._whole() if m.metric is not None]
        return max(rated, key=lambda r: r[:2])[2] if rated else None

    def at(self, step: int) -> Path:
        """The checkpoint of `step`. Raises CheckpointError naming the existing steps."""
        named = self._named()
        if step not in named:
            known = ", ".join(map(str, sorted(named))) or "none"
            raise CheckpointError(f"{self.root} has no checkpoint of step {step}; it has {known}.")
        return named[step]

    def steps(self) -> list[int]:
        """Steps of the checkpoints whose files exist with their sizes, in order."""
        return sorted(manifest.step for _, manifest in self._whole())

    def _named(self) -> dict[int, Path]:
        entries = list(self.root.iterdir()) if self.root.is_dir() else []
        named = {
            int(m[1]): path
            for pattern in (_REPLACED, _NAME)  # the later one counts
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

    def _whole(self) -> list[tuple[Path, Manifest]]:
        out: list[tuple[Path, Manifest]] = []
        for path in self._named().values():
            with suppress(CheckpointError):
                out.append((path, verify(path, digests=False)))
        return out

    def _let_go(self) -> None:
        keep = set(self.steps()[-self.keep_last :])
        best = self.best() if self.keep_best else None
        for path, manifest in self._whole():
            if manifest.step not in keep and path != best:
                # Renamed first: a kill within the deletion must not leave half a checkpoint.
                doomed = path.with_name(f".{path.name.strip('.')}.deleted")
                os.replace(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


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
            f"{checkpoint} has no {MANIFEST}: not a checkpoint, or one that was never finished."
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
        elif digests and _sha256(file) != digest:
            problems.append(f"{name} has changed since it was written")
    if problems:
        raise CheckpointError(f"{checkpoint} is torn: {'; '.join(problems)}.")
    return manifest


def _digest_files(directory: Path) -> dict[str, tuple[int, str]]:
    """relative path -> (bytes, sha256) of every file below."""
    return {
        file.relative_to(directory).as_posix(): (file.stat().st_size, _sha256(file))
        for file in sorted(p for p in directory.rglob("*") if p.is_file())
    }


def _sha256(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
