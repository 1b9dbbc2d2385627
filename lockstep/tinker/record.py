"""What a model trained over Tinker's API leaves behind: a run directory like that of any run.

`lockstep report` and `lockstep doctor` read it. The API knows no rewards: the reward of a stored
episode is the mean advantage of its sampled tokens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lockstep.correction import Layout, MismatchReport, measure
from lockstep.store.run import RunDirectory
from lockstep.tinker.requests import Datum, ForwardBackward, ForwardBackwardResult, OptimStep
from lockstep.types import Float32Array, Group, Sample, Task, Trajectory

MAX_ROWS = 1024
"""Rows of one step whose episodes are stored; all of them are measured."""


class ModelRecord:
    """Collects the requests of one model, and writes a row and a part for each update."""

    def __init__(self, directory: RunDirectory, *, last_step: int) -> None:
        """last_step: the last step that is recorded already; -1 is none. After a restart, updates
        up to it are repeated and not recorded again."""
        self._directory, self._last_step = directory, last_step
        self._forget()
        self._began = time.monotonic()

    def _forget(self) -> None:
        self._groups: dict[str, Group] = {}
        self._samples: list[Sample] = []
        self._report = MismatchReport.empty()
        self._loss = 0.0
        self._num_rows = self._num_tokens = 0

    def add(
        self,
        request: ForwardBackward,
        result: ForwardBackwardResult,
        versions: Sequence[int],
    ) -> None:
        """Takes in a pass that collected gradients. versions: of the weights that drew each
        datum."""
        self._loss += result.metrics["loss:sum"]
        trainers: list[Float32Array] = []
        rollouts: list[Float32Array] = []
        for datum, output, version in zip(request.data, result.outputs, versions, strict=True):
            self._num_rows += 1
            sampled = sampled_places(datum)
            if sampled is None:
                continue
            trainer = np.asarray(output["logprobs"], np.float32)
            trainers.append(trainer[sampled])
            rollouts.append(np.asarray(datum.inputs["logprobs"], np.float32)[sampled])
            if len(self._samples) < MAX_ROWS:
                self._keep(datum, trainer, sampled, version)
        counts = [len(of_row) for of_row in trainers]
        if num := sum(counts):
            self._num_tokens += num
            values = (torch.from_numpy(np.concatenate(x)) for x in (trainers, rollouts))
            found = measure(*values, layout=Layout.packed(torch.tensor(counts)))
            self._report = self._report.merge(found)

    def _keep(
        self,
        datum: Datum,
        trainer: Float32Array,
        sampled: np.ndarray[Any, np.dtype[np.bool_]],
        version: int,
    ) -> None:
        trajectory = episode_of(datum, sampled, id=str(self._num_rows), version=version)
        if trajectory is None:
            return
        prompt = trajectory.segments[0].token_ids
        task = hashlib.blake2b(prompt.tobytes(), digest_size=6).hexdigest()
        trajectory.task_id = task
        group = self._groups.setdefault(task, Group(task=Task(id=task), trajectories=[]))
        group.trajectories.append(trajectory)
        (row,) = trajectory.rows()
        row.group = list(self._groups).index(task)
        for name, values in (("logprobs", trainer), ("advantages", datum.inputs.get("advantages"))):
            if values is not None:
                column = np.full(len(row), np.nan if name == "logprobs" else 0.0, np.float32)
                column[1:][sampled] = values[sampled]
                row.set(name, column)
        self._samples.append(row)

    def step(self, step: int, request: OptimStep, metrics: Mapping[str, float]) -> None:
        """Records the update number `step`, counted from 0, by the passes since the last one."""
        now = time.monotonic()
        row: dict[str, Any] = {
            "step": step,
            "train/loss": self._loss / max(self._num_tokens, 1),
            "train/lr": request.learning_rate,
            "train/skipped_updates": metrics.get("skipped:sum", 0.0),
            "training/rows": self._num_rows,
            "tokens/trained": self._num_tokens,
            "time/step_seconds": now - self._began,
            **self._report.to_metrics("mismatch"),
        }
        if "grad_norm:mean" in metrics:
            row["train/grad_norm"] = metrics["grad_norm:mean"]
        groups, samples = list(self._groups.values()), self._samples
        self._began = now
        self._forget()
        if step <= self._last_step:
            return
        if groups:
            row["reward/mean"] = float(np.mean([r for group in groups for r in group.rewards]))
            self._directory.write_trajectories(step, groups, samples=samples)
        self._directory.log(row)
        self._last_step = step


def sampled_places(datum: Datum) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """[N] bool: the places whose target was sampled, by the log-probs that came with it: clients
    fill the others with 0.0. None for a datum without log-probs, or with several targets a
    place."""
    logprobs = datum.inputs.get("logprobs")
    if logprobs is None or datum.inputs["target_tokens"].ndim > 1:
        return None
    return np.asarray(logprobs) != 0


def episode_of(
    datum: Datum, sampled: np.ndarray[Any, np.dtype[np.bool_]], *, id: str, version: int
) -> Trajectory | None:
    """The datum as an episode: observed and sampled segments in turn. None if its targets are not
    the ids that follow, or nothing was sampled."""
    targets = np.asarray(datum.inputs["target_tokens"])
    if not sampled.any() or (targets[:-1] != datum.token_ids[1:]).any():
        return None
    ids = np.append(datum.token_ids, targets[-1]).astype(np.int32)
    is_sampled = np.append(False, sampled)
    borders = np.flatnonzero(is_sampled[1:] != is_sampled[:-1]) + 1
    trajectory, parent = Trajectory(id=id), None
    logprobs = np.append(np.float32(np.nan), datum.inputs["logprobs"])
    for start, stop in zip((0, *borders), (*borders, len(ids)), strict=True):
        if is_sampled[start]:
            assert parent is not None, "the first id is never sampled"
            parent = trajectory.record(
                ids[start:stop],
                logprobs=logprobs[start:stop],
                parent=parent,
                prompt_ids=ids[:start],
                policy_version=version,
            )
        else:
            parent = trajectory.observe(ids[start:stop], parent=parent)
    assert parent is not None, "a datum has at least one id"
    advantages = datum.inputs.get("advantages")
    reward = 0.0 if advantages is None else float(np.mean(np.asarray(advantages)[sampled]))
    trajectory.rewards[parent] = reward
    trajectory.status = "finished"
    return trajectory
