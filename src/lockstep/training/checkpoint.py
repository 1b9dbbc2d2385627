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

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.store.checkpoints import FORMAT_VERSION, MANIFEST, Checkpoints, sha256_of, verify
from lockstep.store.files import replace_directory, storage_errors, sync_tree, write_json
from lockstep.training.config import CheckpointConfig
from lockstep.training.critic import CRITIC, Critic
from lockstep.training.trainer import Trainer

STATE, SEATS = "state.json", "seats"

NO_SEATS: Mapping[str, Trainer] = MappingProxyType({})


class CheckpointStore(Checkpoints):
    """The checkpoints of one run, to write and to load. A torn one never replaces a good one."""

    def __init__(self, root: str | Path, kept: CheckpointConfig | None = None) -> None:
        """kept: the checkpoints that `save` leaves; None is the default of the settings."""
        super().__init__(root)
        self.kept = kept or CheckpointConfig()

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
        unfinished = self.root / f".{target.name}.partial"
        with storage_errors(target, partial=unfinished):
            if trainer.is_writer:
                self.root.mkdir(parents=True, exist_ok=True)
                for leftover in {*self.root.glob(".step-*")} - {*self.named().values()}:
                    shutil.rmtree(leftover, ignore_errors=True)  # of a write that was killed
            trainer.save(unfinished)
            if critic is not None:
                critic.save(unfinished / CRITIC)
            for seat, of_seat in seats.items():
                of_seat.save(unfinished / SEATS / seat)
            if not trainer.is_writer:
                return target
            try:
                write_json(unfinished / STATE, dict(state))
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the state of step {step} cannot be written as JSON ({error}); expected "
                    "numbers, text, lists and objects, and no NaN."
                ) from error
            metric = metric if metric is not None and math.isfinite(metric) else None
            manifest = {"format_version": FORMAT_VERSION, "step": step, "metric": metric}
            files = {
                file.relative_to(unfinished).as_posix(): [file.stat().st_size, sha256_of(file)]
                for file in sorted(p for p in unfinished.rglob("*") if p.is_file())
            }
            write_json(unfinished / MANIFEST, {**manifest, "files": files})
            sync_tree(unfinished)
            replace_directory(unfinished, target, aside=self.root / f".{target.name}.replaced")
            self._delete_old()
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

    def _delete_old(self) -> None:
        keep = set(self.steps()[-self.kept.keep_last :])
        best = self.best() if self.kept.keep_best else None
        for path, manifest in self.whole():
            if manifest.step not in keep and path != best:
                # Renamed first: a kill within the deletion must not leave half a checkpoint.
                doomed = path.with_name(f".{path.name.strip('.')}.deleted")
                os.replace(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)
