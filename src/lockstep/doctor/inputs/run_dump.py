"""A run of Lockstep as rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.causes import CAUSES
from lockstep.doctor.inputs.assemble import Row
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.inputs.lines import RowDump, whole_files
from lockstep.doctor.inputs.native import RowsDump
from lockstep.store.files import is_locked
from lockstep.store.run import TRAIN, Run, is_run, load_run, part_path
from lockstep.store.trajectories import TrajectoryRecord
from lockstep.types import Float32Array, Int32Array, Sample, Trajectory

MONITOR, TRAINED = "doctor", "trained"
"""Directories of a run: rows that showed a cause while it trained, and rows that were trained
otherwise than they were sampled."""


class RunDump(RowDump):
    """The trajectories of a run directory: its rows as they were trained.

    Rows are joined from the sampled segments, as the run joins them; `engine_ids` are these
    segments, reply by reply. A row that was trained otherwise is read from `trained/`.
    """

    format: ClassVar[str] = "lockstep"

    def __init__(self, path: Path) -> None:
        self._run: Run = load_run(path)
        # On opening: the run may go on.
        parts = {part_path(path, step, TRAIN): step for step in self._run.steps()}
        whole, torn = whole_files([*parts])
        self._steps = [parts[part] for part in whole]
        _, torn_metrics = whole_files([path / "metrics.jsonl"])
        self._versions = {
            row.get("step"): int(row["staleness/version"])
            for row in self._run.metrics
            if "staleness/version" in row
        }
        super().__init__(path)
        found = {name: len(self._run.values(f"doctor/{name}")) for name in CAUSES}
        self.found_before = {name: steps for name, steps in found.items() if steps}
        # The tokenizer beside the last checkpoint exists when the first model is gone.
        policies = [path / "policy" for path in self._run.checkpoints().values()]
        kept = [str(p) for p in policies if (p / "tokenizer.json").is_file()]
        facts = facts_of(self._run.config, self._run.environment)
        self.facts = replace(facts, tokenizer=kept[-1] if kept else "")
        self.notes = [*self._notes(), *torn, *torn_metrics]

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return is_run(path)

    def rows(self) -> Iterator[Row]:
        for step in self._steps:
            trained = self._trained(step)
            for record in self._run.trajectories(step):
                for sample in record.trajectory.rows():
                    yield self._row(record, sample, trained.get(sample.id))

    def _trained(self, step: int) -> dict[str, Row]:
        """Id -> the row as it was trained, for rows that differ from the sampled ones."""
        path = self.path / TRAINED / f"step-{step:06d}.parquet"
        return {row.row_id: row for row in RowsDump(path).rows()} if path.is_file() else {}

    def step_metrics(self) -> Iterable[Mapping[str, Any]]:
        return self._run.metrics

    def _row(self, record: TrajectoryRecord, sample: Sample, trained: Row | None) -> Row:
        """The row as it was sampled; or with the ids, mask and columns of `trained`."""
        trajectory, leaf = record.trajectory, sample.leaf
        sent, returned = engine_turns(trajectory, leaf)

        def of_segments(values: Sequence[Float32Array | None]) -> Float32Array:
            column = np.full(len(sample), np.nan, np.float32)
            for i, tokens in sample.segments.items():
                if (of_segment := values[i]) is not None:
                    column[tokens] = of_segment
            return column

        columns = sample.columns
        version = self._versions.get(record.step)
        is_scored = any(record.trainer_logprobs[i] is not None for i in sample.segments)
        row = Row.of(
            row_id=sample.id,
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
            rollout_logprobs=columns["rollout_logprobs"],
            trainer_logprobs=of_segments(record.trainer_logprobs),
            advantages=of_segments(record.advantages),
            turn=columns["turn"],
            is_sampled=columns["turn"] >= 0,
            policy_version=columns["policy_version"],
            routed_experts=columns.get("routed_experts"),
            trainer_version=version if is_scored or version is None else -1,
            prompt_lengths=prompt_length(sample),
            rewards=trajectory.rewards[leaf],
            groups=record.group,
            steps=record.step,
            messages=tuple(trajectory.messages(leaf)),
            engine_ids=returned,
            engine_prompt_ids=sent[:1],
        )
        if trained is None:
            return row
        kept = {"messages", "engine_ids", "rewards", "groups", "steps"}
        said = {name: value for name, value in row.columns.items() if name in kept}
        return replace(trained, columns=trained.columns | said | {"engine_prompt_ids": sent})

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
        return out


def facts_of(config: Mapping[str, Any], environment: Mapping[str, Any]) -> Facts:
    """The facts of a run, by its config.json and environment.json."""
    agent: Mapping[str, Any] = config.get("agent") or {}
    family, renderer = environment.get("family"), config.get("renderer")
    name = str(config.get("model", ""))
    began_in = Path(str(environment.get("working_directory", "")))
    return Facts(
        trainer="lockstep",
        model=str(began_in / name) if name and (began_in / name).is_dir() else name,
        renderer=json.dumps(renderer) if renderer else "",
        vocab_size=environment.get("vocab_size"),
        temperature=agent.get("temperature"),
        top_p=agent.get("top_p"),
        top_k=agent.get("top_k"),
        is_one_process=environment.get("is_one_process"),
        max_staleness=int(config.get("max_staleness") or 0)
        * int((config.get("trainer") or {}).get("updates_per_batch") or 1),
        is_moe=None if family is None else family == "moe",
    )


def prompt_length(sample: Sample) -> int:
    """Tokens before the first sampled one."""
    is_sampled = sample.columns["turn"] >= 0
    return int(np.argmax(is_sampled)) if is_sampled.any() else len(sample)


def engine_turns(
    trajectory: Trajectory, leaf: int
) -> tuple[tuple[Int32Array, ...], tuple[Int32Array, ...]]:
    """The ids that the engine was sent before each turn on the path to `leaf`, and the ids that it
    returned. A turn during which the weights changed has two segments, and is one reply."""
    sent, prompts, replies = [np.empty(0, np.int32)], list[Int32Array](), list[Int32Array]()
    path = (trajectory.segments[i] for i in trajectory.path(leaf))
    for (is_sampled, _), segments in groupby(path, key=lambda one: (one.is_sampled, one.turn)):
        ids = np.concatenate([segment.token_ids for segment in segments])
        if is_sampled:
            prompts.append(np.concatenate(sent))
            replies.append(ids)
        sent.append(ids)
    return tuple(prompts), tuple(replies)
