"""A run of Lockstep as rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.checks.rows import Rows
from lockstep.doctor.inputs.base import CHUNK_TOKENS, Dump, Facts
from lockstep.store.run import Run, load_run
from lockstep.store.trajectories import TrajectoryRecord
from lockstep.types import Float32Array, Sample


class RunDump(Dump):
    """The trajectories of a run directory: what was sampled, and what the trainer made of it."""

    format: ClassVar[str] = "lockstep"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._run: Run = load_run(path)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return (path / "config.json").is_file() and (path / "environment.json").is_file()

    @cached_property
    def facts(self) -> Facts:
        config = self._run.config
        agent: Mapping[str, Any] = config.get("agent") or {}
        family = self._run.environment.get("family")
        return Facts(
            trainer="lockstep",
            model=str(config.get("model", "")),
            temperature=agent.get("temperature"),
            top_p=agent.get("top_p"),
            top_k=agent.get("top_k"),
            is_moe=None if family is None else family == "moe",
        )

    @cached_property
    def has(self) -> frozenset[str]:
        return frozenset(
            {
                "rollout_logprobs",
                "trainer_logprobs",
                "is_sampled",
                "turn",
                "policy_version",
                "advantages",
                "rewards",
                "groups",
                "steps",
                "messages",
            }
        )

    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        pending: list[tuple[Sample, TrajectoryRecord]] = []
        size = 0
        for record in self._run.trajectories():
            for sample in _samples(record):
                if pending and size + len(sample) > max_tokens:
                    yield _rows(pending)
                    pending, size = [], 0
                pending.append((sample, record))
                size += len(sample)
        if pending:
            yield _rows(pending)

    def step_metrics(self) -> Iterable[Mapping[str, Any]]:
        return self._run.metrics


def _samples(record: TrajectoryRecord) -> Iterator[Sample]:
    """The rows of a trajectory that were trained, with the trainer's log-probs laid into them."""
    trajectory = record.trajectory
    for leaf, owned, sample in trajectory.rows():
        for name, values in (
            ("logprobs", record.trainer_logprobs), ("advantages", record.advantages)
        ):  # fmt: skip
            column: list[Float32Array] = [
                np.full(len(trajectory.segments[i]), np.nan, np.float32)
                if i not in owned or values[i] is None
                else values[i]
                for i in trajectory.path(leaf)
            ]
            sample.set(name, np.concatenate(column))
        sample.group = record.group
        yield sample


def _rows(pending: list[tuple[Sample, TrajectoryRecord]]) -> Rows:
    records = [record for _, record in pending]
    leaves = [int(sample.id.rpartition("/")[2]) for sample, _ in pending]
    return Rows.of(
        [sample for sample, _ in pending],
        rewards=np.array(
            [r.trajectory.rewards[leaf] for r, leaf in zip(records, leaves, strict=True)]
        ),
        steps=np.array([r.step for r in records], np.int64),
        messages=tuple(
            tuple(r.trajectory.messages(leaf)) for r, leaf in zip(records, leaves, strict=True)
        ),
    )
