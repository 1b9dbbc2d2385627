"""The traces of a model trained over Tinker's API: a run directory like any other.

`lockstep report`, `lockstep doctor` and `lockstep export` read it. The API knows no rewards: the
reward of a stored episode is the mean advantage of its sampled tokens.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.config import to_dict
from lockstep.correction import Layout, MismatchReport, TokenFacts, measure
from lockstep.errors import StorageError
from lockstep.observe.live import RunHeader, View
from lockstep.report.document import write_report
from lockstep.run.build import tokenizer_of
from lockstep.store.run import RunDirectory, load_run
from lockstep.tinker.embedded import Base
from lockstep.tinker.requests import (
    TARGETS,
    Datum,
    ForwardBackward,
    ForwardBackwardResult,
    ModelSpec,
    OptimStep,
)
from lockstep.training.rows import sort_by_age
from lockstep.types import Float32Array, Group, Int32Array, Sample, Task, Trajectory

MAX_ROWS = 1024
"""Rows of one step whose episodes are stored; all of them are measured."""

Bools = npt.NDArray[np.bool_]


class ModelRecord:
    """Collects the passes of one model, and writes a row and a part for each update.

    The first pass begins the run directory, or continues it.
    """

    def __init__(
        self,
        model_id: str,
        spec: ModelSpec,
        *,
        root: Path,
        bases: Mapping[str, Base],
        write: Callable[[str], object],
    ) -> None:
        """root: of the run directories. bases: by their names. write: gets a line for each
        update."""
        self._path, self._spec, self._base = root / model_id, spec, bases[spec.base_model]
        facts = self._base.facts
        family, is_one = facts["family"], facts["is_one_process"]
        self._view = View(lambda line: write(f"{model_id}  {line}"))
        self._view.start(RunHeader(num_steps=None, architecture=family, is_one_process=is_one))
        self._directory: RunDirectory | None = None
        self._last_step, self._began = -1, time.monotonic()
        self._unwritten: list[tuple[dict[str, Any], list[Group], list[Sample]]] = []
        self._writing = threading.Lock()
        self._forget()

    def _opened(self) -> RunDirectory:
        if self._directory is None:
            base, spec = self._base, self._spec
            if (self._path / "config.json").is_file():
                self._directory = RunDirectory.open(self._path, facts=base.facts)
            else:
                config = to_dict(replace(base.config, dtype=base.config.compute_dtype))
                config |= {"recipe": "tinker", "seed": spec.seed}
                config["lora"] = asdict(spec) if spec.rank else None
                self._directory = RunDirectory.create(self._path, config, facts=base.facts)
            rows = load_run(self._path).metrics
            self._last_step = max((row["step"] for row in rows), default=-1)
        return self._directory

    def _forget(self) -> None:
        self._groups: dict[str, Group] = {}
        self._samples: list[Sample] = []
        self._report = MismatchReport.empty()
        self._loss = 0.0
        self._num_rows = self._num_tokens = 0
        self._origins: Counter[str] = Counter()

    def add(self, request: ForwardBackward, result: ForwardBackwardResult, version: int) -> None:
        """Takes in a pass that collected gradients. version: of the weights in training."""
        self._opened()
        self._loss += result.metrics["loss:sum"]
        self._origins.update(request.origins)
        compared: list[tuple[npt.NDArray[Any], ...]] = []
        for datum, logprobs in zip(request.data, result.logprobs, strict=True):
            self._num_rows += 1
            is_sampled = sampled_places(datum)
            if is_sampled is None:
                continue
            found = np.asarray(logprobs, np.float32)
            recorded = np.asarray(datum.inputs["logprobs"], np.float32)
            versions = _versions(datum, version)
            ages, places = version - versions[is_sampled], np.flatnonzero(is_sampled) + 1
            compared.append((found[is_sampled], recorded[is_sampled], ages, places))
            if len(self._samples) < MAX_ROWS:
                self._keep(datum, found, is_sampled, versions)
        counts = [len(of_row) for of_row, *_ in compared]
        if num := sum(counts):
            self._num_tokens += num
            trainer, rollout, ages, places = map(np.concatenate, zip(*compared, strict=True))
            layout = Layout.packed(counts)
            facts = TokenFacts(ages=ages, positions=places)
            self._report = self._report.merge(measure(trainer, rollout, layout=layout, facts=facts))

    def _keep(
        self, datum: Datum, logprobs: Float32Array, is_sampled: Bools, versions: Int32Array
    ) -> None:
        """Keeps the datum as an episode: observed and sampled segments in turn, one for each
        version of the weights. Without sampled targets, or if these are not the ids that follow,
        it is none."""
        targets = np.asarray(datum.inputs[TARGETS])
        ids = np.append(datum.token_ids, targets[-1]).astype(np.int32)
        if not is_sampled.any() or (targets != ids[1:])[is_sampled].any():
            return
        recorded = np.append(np.float32(np.nan), datum.inputs["logprobs"])
        drawn_by = np.append(-1, np.where(is_sampled, versions, -1))  # -1: observed
        borders = np.flatnonzero(np.diff(drawn_by)) + 1
        task = hashlib.blake2b(ids[: borders[0]].tobytes(), digest_size=6).hexdigest()
        trajectory = Trajectory(id=f"{self._last_step + 1}-{self._num_rows}", task_id=task)
        parent = trajectory.observe(ids[: borders[0]])  # the first id is never sampled
        for start, stop in pairwise((*borders, len(ids))):
            if drawn_by[start] < 0:
                parent = trajectory.observe(ids[start:stop], parent=parent)
                continue
            parent = trajectory.record(
                ids[start:stop],
                logprobs=recorded[start:stop],
                parent=parent,
                prompt_ids=ids[:start],
                policy_version=int(drawn_by[start]),
                finish_reason="stop" if ids[stop - 1] in self._base.info.stop_ids else "length",
            )
        trajectory.rewards[parent] = float(np.mean(_advantages(datum)[is_sampled]))
        trajectory.status = "finished"
        group = self._groups.setdefault(task, Group(task=Task(id=task), trajectories=[]))
        group.trajectories.append(trajectory)
        (row,) = trajectory.rows()
        row.group = list(self._groups).index(task)
        columns = {"logprobs": (logprobs, np.nan), "advantages": (_advantages(datum), 0.0)}
        for column, (values, elsewhere) in columns.items():
            whole = np.full(len(row), elsewhere, np.float32)
            whole[1:][is_sampled] = values[is_sampled]
            row.set(column, whole)
        self._samples.append(row)

    def step(self, step: int, request: OptimStep, metrics: Mapping[str, float]) -> None:
        """Records the update number `step`, counted from 0, by the passes since the last one. One
        that is recorded already, by a server that ended meanwhile, is not recorded again."""
        self._opened()
        groups, samples = list(self._groups.values()), self._samples
        row: dict[str, Any] = {
            "step": step,
            "train/loss": self._loss / max(self._num_tokens, 1),
            "train/lr": request.learning_rate,
            "train/skipped_updates": metrics["skipped:sum"],
            "training/rows": float(self._num_rows),
            "tokens/trained": float(self._num_tokens),
            "time/step_seconds": time.monotonic() - self._began,
            **{f"provenance/{name}": float(n) for name, n in self._origins.items()},
            **self._report.to_metrics("mismatch"),
            **sort_by_age(samples, version=step, limit=step + 1, over_stale="correct")[1],
        }
        if "grad_norm:mean" in metrics:
            row["train/grad_norm"] = metrics["grad_norm:mean"]
        self._began = time.monotonic()
        self._forget()
        if step <= self._last_step:
            return
        self._last_step = step
        self._unwritten.append((row, groups, samples))
        self._write()

    def _write(self) -> None:
        """Writes the recorded updates, also those that a full disk refused before."""
        with self._writing:  # `close` may come while the thread of a cancelled `step` still writes
            while self._unwritten:
                row, groups, samples = self._unwritten[0]
                if groups:
                    self._opened().write_trajectories(row["step"], groups, samples=samples)
                self._opened().log(row)
                del self._unwritten[0]
                self._view.step(row)

    def close(self) -> None:
        """Frees the directory and writes its report, if there has been an update."""
        if self._directory is None:
            return
        try:
            self._write()
        except StorageError as error:
            self._view.note(str(error), "warning")
        directory, self._directory = self._directory, None
        directory.close()
        if self._last_step >= 0:
            run = load_run(directory.path)
            place = run.path / "report.html"
            write_report([run], place, tokenizers=[tokenizer_of(run.config)], warn=self._view.note)


def sampled_places(datum: Datum) -> Bools | None:
    """[N] bool: the places whose target was sampled, as this server knows it, or else by the
    log-prob that came with it: clients fill the others with 0.0. None for a datum without
    log-probs, or with several targets a place."""
    logprobs = datum.inputs.get("logprobs")
    if logprobs is None or datum.inputs[TARGETS].ndim > 1:
        return None
    is_drawn = np.zeros(len(datum), bool) if datum.versions is None else datum.versions >= 0
    return is_drawn | (np.asarray(logprobs) != 0)


def _advantages(datum: Datum) -> Float32Array:
    found = datum.inputs.get("advantages")
    return np.zeros(len(datum), np.float32) if found is None else np.asarray(found, np.float32)


def _versions(datum: Datum, version: int) -> Int32Array:
    """[N] version that drew each target; where this server does not know it, the one in
    training."""
    if datum.versions is None:
        return np.full(len(datum), version, np.int32)
    return np.where(datum.versions >= 0, datum.versions, version).astype(np.int32)
