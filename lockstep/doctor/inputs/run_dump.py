"""A run of Lockstep as rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lockstep.doctor.checks.causes import CAUSES
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.inputs.base import CHUNK_TOKENS, Dump, Facts
from lockstep.doctor.stored_paths import prompt_length, replies
from lockstep.errors import DataError
from lockstep.store.lock import is_locked
from lockstep.store.run import Run, load_run
from lockstep.store.trajectories import TrajectoryRecord
from lockstep.types import UNKNOWN_EXPERT, Sample

_ALWAYS = frozenset(
    {
        "row_ids",
        "token_ids",
        "loss_mask",
        "rollout_logprobs",
        "trainer_logprobs",
        "is_sampled",
        "turn",
        "policy_version",
        "advantages",
        "prompt_lengths",
        "rewards",
        "groups",
        "steps",
        "messages",
        "engine_ids",
    }
)


MONITOR = "doctor"
"""Directory of a run in which rows are kept that showed a cause while it trained."""


class RunDump(Dump):
    """The trajectories of a run directory: what was sampled, and what the trainer made of it.

    The rows are put together from the segments that were sampled, which is how the run puts them
    together itself; `engine_ids` are those segments, reply by reply.
    """

    format: ClassVar[str] = "lockstep"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._run: Run = load_run(path)
        self._steps = self._run.steps()
        self._route_shape: tuple[int, ...] = ()
        first = next(self._rows(), None)
        if first is None:
            raise DataError(f"{path} has no row to look at: {self._why_none()}")
        routes = first[0].columns.get("routed_experts")
        if routes is not None:
            self._route_shape = routes.shape[1:]
        versions = {row.get("step"): row.get("staleness/version") for row in self._run.metrics}
        self._versions: dict[int, int] = {
            step: int(version)
            for step in self._steps
            if (version := versions.get(step)) is not None
        }

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return (path / "config.json").is_file() and (path / "environment.json").is_file()

    @cached_property
    def facts(self) -> Facts:
        config = self._run.config
        agent: Mapping[str, Any] = config.get("agent") or {}
        family = self._run.environment.get("family")
        renderer = config.get("renderer")
        return Facts(
            trainer="lockstep",
            model=self._model(),
            tokenizer=self._own_tokenizer(),
            renderer=json.dumps(renderer) if renderer else "",
            temperature=agent.get("temperature"),
            top_p=agent.get("top_p"),
            top_k=agent.get("top_k"),
            is_one_process=self._run.environment.get("is_one_process"),
            max_staleness=int(config.get("max_staleness") or 0)
            * int((config.get("trainer") or {}).get("updates_per_batch") or 1),
            is_moe=None if family is None else family == "moe",
        )

    @cached_property
    def has(self) -> frozenset[str]:
        sometimes = {
            "routed_experts": bool(self._route_shape),
            "trainer_version": len(self._versions) == len(self._steps),
        }
        return _ALWAYS | {name for name, is_there in sometimes.items() if is_there}

    @cached_property
    def lacks(self) -> Mapping[str, str]:
        out = {
            "trainer_routed_experts": "a run does not store the trainer's routes; give the model "
            "to record them again",
            "texts": "a run keeps the ids of the replies and their messages, no other text",
        }
        if not self._route_shape:
            out["routed_experts"] = (
                "the run did not record them: trainer.routing_replay=rollout does"
            )
        if "trainer_version" not in self.has:
            out["trainer_version"] = (
                "metrics.jsonl does not say it of all steps (staleness/version)"
            )
        return out

    @cached_property
    def notes(self) -> Sequence[str]:
        out: list[str] = []
        keep: Mapping[str, Any] = (self._run.config.get("record") or {}).get("keep") or {}
        if keep.get("type") == "sample":
            out.append(
                f"record.keep=sample: the rows are of {keep.get('fraction', 0):.0%} of the groups"
            )
        if keep.get("type") == "last":
            out.append(
                f"record.keep=last: the rows are of steps {self._steps[0]} to {self._steps[-1]}; "
                "older ones were deleted"
            )
        if is_locked(self.path / "lock"):
            out.append(
                f"the run still goes on; the rows are of its steps {self._steps[0]} to "
                f"{self._steps[-1]}"
            )
        if found := self.found_before:
            told = ", ".join(f"{cause} in {steps}" for cause, steps in found.items())
            out.append(
                f"while it trained, causes were found in rows of its steps ({told}); as they were "
                f"trained: lockstep doctor {self.path / MONITOR}"
            )
        for fault in self._run.environment.get("faults", []):
            out.append(
                f"the fault {fault['type']} was injected into this run. A run stores what was "
                "sampled; what a fault does to the rows on their way to the trainer is not in it"
            )
        return out

    @cached_property
    def found_before(self) -> Mapping[str, int]:
        steps = {name: self._run.column(f"doctor/{name}")[1] for name in CAUSES}
        return {name: len(values) for name, values in steps.items() if values}

    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        pending: list[tuple[Sample, TrajectoryRecord]] = []
        size = 0
        for sample, record in self._rows():
            if pending and size + len(sample) > max_tokens:
                yield self._together(pending)
                pending, size = [], 0
            pending.append((sample, record))
            size += len(sample)
        if pending:
            yield self._together(pending)

    def step_metrics(self) -> Iterable[Mapping[str, Any]]:
        return self._run.metrics

    # -- what it was made with ----------------------------------------------------------------

    def _model(self) -> str:
        """The setting `model`; a directory by its whole path, as the run was started elsewhere."""
        name = str(self._run.config.get("model", ""))
        began_in = Path(str(self._run.environment.get("working_directory", "")))
        return str(began_in / name) if name and (began_in / name).is_dir() else name

    def _own_tokenizer(self) -> str:
        """The tokenizer that stands beside the run's last checkpoint: it is there when the model
        that the run began with is gone."""
        for checkpoint in reversed(self._run.checkpoints()):
            if (checkpoint.path / "policy" / "tokenizer.json").is_file():
                return str(checkpoint.path / "policy")
        return ""

    def _why_none(self) -> str:
        if self._steps:
            return (
                f"its steps {self._steps[0]} to {self._steps[-1]} are stored, and no episode of "
                "them has a reward. `lockstep report` shows how they ended."
            )
        if is_locked(self.path / "lock"):
            return "it still goes on, and its first step is not stored yet. Try again later."
        if not self._run.metrics:
            return "it ended before its first step was done. See what it said when it ended."
        return (
            "no trajectories are stored. record.keep decides which are; a run whose directory was "
            "copied needs its trajectories/ too."
        )

    # -- rows ---------------------------------------------------------------------------------

    def _rows(self) -> Iterator[tuple[Sample, TrajectoryRecord]]:
        for step in self._steps:  # those of when it was opened: the run may go on
            for record in self._run.trajectories(step):
                for sample in _samples(record):
                    yield sample, record

    def _together(self, pending: list[tuple[Sample, TrajectoryRecord]]) -> Rows:
        samples = [sample for sample, _ in pending]
        records = [record for _, record in pending]
        leaves = [int(sample.id.rpartition("/")[2]) for sample in samples]
        placed = list(zip(records, leaves, strict=True))
        more: dict[str, Any] = {}
        if self._route_shape:
            more["routed_experts"] = np.concatenate([self._routes(sample) for sample in samples])
        if "trainer_version" in self.has:
            more["trainer_version"] = np.array([self._versions[r.step] for r in records], np.int64)
        return Rows.of(
            samples,
            rewards=np.array([r.trajectory.rewards[leaf] for r, leaf in placed]),
            steps=np.array([r.step for r in records], np.int64),
            prompt_lengths=np.array([prompt_length(sample) for sample in samples], np.int64),
            messages=tuple(tuple(r.trajectory.messages(leaf)) for r, leaf in placed),
            engine_ids=tuple(replies(r.trajectory, leaf) for r, leaf in placed),
            **more,
        )

    def _routes(self, sample: Sample) -> npt.NDArray[np.int16]:
        found = sample.columns.get("routed_experts")
        if found is not None:
            return found
        return np.full((len(sample), *self._route_shape), UNKNOWN_EXPERT, np.int16)


def _samples(record: TrajectoryRecord) -> Iterator[Sample]:
    """The rows of a trajectory that were trained, with the trainer's log-probs laid into them."""
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
