"""A run of Lockstep as rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lockstep.doctor.checks.causes import CAUSES
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.inputs.assemble import grouped
from lockstep.doctor.inputs.base import CHUNK_TOKENS, Dump, Facts
from lockstep.doctor.stored_paths import prompt_length, replies
from lockstep.errors import DataError
from lockstep.store.lock import is_locked
from lockstep.store.run import Run, load_run
from lockstep.store.trajectories import TrajectoryRecord
from lockstep.types import UNKNOWN_EXPERT, Sample

MONITOR = "doctor"
"""Directory of a run for the rows that showed a cause while it trained."""


class RunDump(Dump):
    """The trajectories of a run directory: the sampled rows with the trainer's log-probs.

    Rows are joined from the sampled segments, as the run joins them; `engine_ids` are these
    segments, reply by reply.
    """

    format: ClassVar[str] = "lockstep"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._run: Run = load_run(path)
        self._steps = self._run.steps()
        first = next(self._rows(), None)
        if first is None:
            raise DataError(
                f"{path}: no stored episode has a reward (record.keep), or no step ended."
            )
        routes = first[0].columns.get("routed_experts")
        self._route_shape = () if routes is None else routes.shape[1:]
        versions = {row.get("step"): row.get("staleness/version") for row in self._run.metrics}
        self._versions = {step: versions.get(step) for step in self._steps}
        self.has = self._together([first]).has
        lacks = {
            "trainer_routed_experts": "a run does not store the trainer's routes",
            "texts": "a run keeps ids and messages, no other text",
            "routed_experts": "trainer.routing_replay=rollout records them",
            "trainer_version": "metrics.jsonl lacks staleness/version for some steps",
        }
        self.lacks = {name: why for name, why in lacks.items() if name not in self.has}
        found = {name: len(self._run.column(f"doctor/{name}")[1]) for name in CAUSES}
        self.found_before = {name: steps for name, steps in found.items() if steps}
        self.facts = self._facts()
        self.notes = self._notes()

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return (path / "config.json").is_file() and (path / "environment.json").is_file()

    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        sized = ((len(sample), (sample, record)) for sample, record in self._rows())
        for pending in grouped(sized, max_tokens):
            yield self._together(pending)

    def step_metrics(self) -> Iterable[Mapping[str, Any]]:
        return self._run.metrics

    def _facts(self) -> Facts:
        config, environment = self._run.config, self._run.environment
        agent: Mapping[str, Any] = config.get("agent") or {}
        family, renderer = environment.get("family"), config.get("renderer")
        name = str(config.get("model", ""))
        began_in = Path(str(environment.get("working_directory", "")))
        # The tokenizer beside the last checkpoint exists when the first model is gone.
        policies = [checkpoint.path / "policy" for checkpoint in self._run.checkpoints()]
        kept = [p for p in policies if (p / "tokenizer.json").is_file()]
        return Facts(
            trainer="lockstep",
            model=str(began_in / name) if name and (began_in / name).is_dir() else name,
            tokenizer=str(kept[-1]) if kept else "",
            renderer=json.dumps(renderer) if renderer else "",
            temperature=agent.get("temperature"),
            top_p=agent.get("top_p"),
            top_k=agent.get("top_k"),
            is_one_process=environment.get("is_one_process"),
            max_staleness=int(config.get("max_staleness") or 0)
            * int((config.get("trainer") or {}).get("updates_per_batch") or 1),
            is_moe=None if family is None else family == "moe",
        )

    def _notes(self) -> list[str]:
        out: list[str] = []
        steps = f"the rows are of steps {self._steps[0]} to {self._steps[-1]}"
        keep: Mapping[str, Any] = (self._run.config.get("record") or {}).get("keep") or {}
        if keep.get("type") == "sample":
            share = keep.get("fraction", 0)
            out.append(f"record.keep=sample: the rows are of {share:.0%} of the groups")
        if keep.get("type") == "last":
            out.append(f"record.keep=last: {steps}")
        if is_locked(self.path / "lock"):
            out.append(f"the run still goes on; {steps}")
        if self.found_before:
            told = ", ".join(f"{cause} in {count}" for cause, count in self.found_before.items())
            out.append(
                f"while it trained, causes were found in rows of its steps ({told}); as they were "
                f"trained: lockstep doctor {self.path / MONITOR}"
            )
        for fault in self._run.environment.get("faults", []):
            out.append(
                f"the fault {fault['type']} was injected; a run stores sampled rows, without the "
                "changes of a fault on their way to the trainer"
            )
        return out

    # -- rows ---------------------------------------------------------------------------------

    def _rows(self) -> Iterator[tuple[Sample, TrajectoryRecord]]:
        for step in self._steps:  # the steps on opening: the run may go on
            for record in self._run.trajectories(step):
                for sample in _samples(record):
                    yield sample, record

    def _together(self, pending: list[tuple[Sample, TrajectoryRecord]]) -> Rows:
        samples = [sample for sample, _ in pending]
        placed = [(r, int(sample.id.rpartition("/")[2])) for sample, r in pending]
        steps = [record.step for record, _ in placed]
        more: dict[str, Any] = {}
        if self._route_shape:
            more["routed_experts"] = np.concatenate([self._routes(sample) for sample in samples])
        if None not in self._versions.values():
            more["trainer_version"] = np.array([self._versions[s] for s in steps], np.int64)
        return Rows.of(
            samples,
            rewards=np.array([r.trajectory.rewards[leaf] for r, leaf in placed]),
            steps=np.array(steps, np.int64),
            prompt_lengths=np.array([prompt_length(sample) for sample in samples], np.int64),
            messages=tuple(tuple(r.trajectory.messages(leaf)) for r, leaf in placed),
            engine_ids=tuple(replies(r.trajectory, leaf) for r, leaf in placed),
            **more,
        )

    def _routes(self, sample: Sample) -> npt.NDArray[np.int16]:
        found = sample.columns.get("routed_experts")
        shape = (len(sample), *self._route_shape)
        return np.full(shape, UNKNOWN_EXPERT, np.int16) if found is None else found


def _samples(record: TrajectoryRecord) -> Iterator[Sample]:
    """The trained rows of a trajectory, with the trainer's log-probs and advantages."""
    trajectory = record.trajectory
    for sample in trajectory.rows():
        for name, values in (
            ("logprobs", record.trainer_logprobs),
            ("advantages", record.advantages),
        ):
            column = np.full(len(sample), np.nan, np.float32)
            for i, tokens in sample.segments.items():
                if (of_segment := values[i]) is not None:
                    column[tokens] = of_segment
            sample.set(name, column)
        sample.group = record.group
        yield sample
