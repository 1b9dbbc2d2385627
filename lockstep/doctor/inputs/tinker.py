"""tinker-cookbook: the summaries that it logs, and datums that a line in its loop saves.

    log_path/iteration_NNNNNN/train_rollout_summaries.jsonl    lengths and rewards (written always)
    one line of JSON per datum                                 docs/doctor-peers.md has the line

Names as in tinker-cookbook 0.6.1 (rl/rollout_logging.py, rl/data_processing.py) and tinker 0.38.
The parity tests read what its own functions made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.inputs.assemble import Row, floats_of, ids_of, in_chunks, real, whole
from lockstep.doctor.inputs.base import CHUNK_TOKENS, Dump, Facts
from lockstep.doctor.inputs.lines import LineDump, by_number, first_line
from lockstep.doctor.inputs.native import json_line, lines_of
from lockstep.errors import DataError

_DATUM = frozenset({"model_input", "target_tokens", "logprobs", "mask"})
"""Keys of a datum's line: its input, and its loss_fn_inputs by their names."""
_SUMMARY = frozenset({"schema_version", "iteration", "group_idx", "traj_idx", "total_reward"})
_SUMMARIES = "train_rollout_summaries.jsonl"


class TinkerSummaries(Dump):
    """`train_rollout_summaries.jsonl` of each iteration: what a rollout was worth, and how long."""

    format: ClassVar[str] = "tinker-summaries"
    has_ids: ClassVar[bool] = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files = _summaries(path)
        if not self._files:
            raise DataError(
                f"{path} has no {_SUMMARIES}. Expected tinker-cookbook's log_path, or one of its "
                "iterations."
            )

    @classmethod
    def recognises(cls, path: Path) -> bool:
        files = _summaries(path)
        line = first_line(files[0]) if files else None
        return line is not None and line.keys() >= _SUMMARY

    @property
    def facts(self) -> Facts:
        return Facts(trainer="tinker")

    @property
    def has(self) -> frozenset[str]:
        return frozenset({"rewards", "steps", "groups"})

    @property
    def lacks(self) -> Mapping[str, str]:
        why = (
            "tinker-cookbook's summaries have lengths and rewards, its logtree has texts. For ids "
            "and both sides' log-probs save the datums of a step, one per line "
            "(docs/doctor-peers.md)."
        )
        return {"token_ids": why, "rollout_logprobs": why, "trainer_logprobs": why}

    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        return in_chunks(self._rows(), self.has, max_tokens=max_tokens)

    def _rows(self) -> Iterator[Row]:
        groups: dict[tuple[Any, Any], int] = {}
        for path in self._files:
            for number, text in lines_of(path):
                where = f"{path}:{number}"
                summary = json_line(text, where)
                if not summary.keys() >= _SUMMARY:
                    missing = ", ".join(sorted(_SUMMARY - summary.keys()))
                    raise DataError(f"{where}: {missing} of tinker-cookbook's summary is missing.")
                step, group = summary["iteration"], summary["group_idx"]
                columns: dict[str, Any] = {
                    "groups": groups.setdefault((str(step), str(group)), len(groups))
                }
                if (number_of := whole(step)) is not None:
                    columns["steps"] = number_of
                if (reward := real(summary["total_reward"])) is not None:
                    columns["rewards"] = reward
                yield Row(
                    row_id=f"{step}/{group}.{summary['traj_idx']}",
                    token_ids=np.empty(0, np.int32),
                    loss_mask=np.empty(0, np.bool_),
                    columns=columns,
                )


class TinkerDump(LineDump):
    """Datums, one per line of a JSONL file: the ids that go in, and of each the target with the
    sampler's log-prob. `training_logprobs`, of the forward pass of the step, are the trainer's.

    A target stands one place after the input that predicts it, and a row is the input with the
    last target behind it; log-probs are moved there.
    """

    format: ClassVar[str] = "tinker"
    trainer: ClassVar[str] = "tinker"
    no_row: ClassVar[str] = " has no line of a datum (docs/doctor-peers.md)."
    why: ClassVar[Mapping[str, str]] = {
        "trainer_logprobs": "write train_step's return value beside each datum, as "
        "training_logprobs (docs/doctor-peers.md).",
        "routed_experts": "Tinker does not return the experts.",
        "policy_version": "a datum does not say which weights sampled it.",
        "rewards": "a datum has advantages; rewards are in train_rollout_summaries.jsonl.",
        "messages": "a datum has ids only.",
        "texts": "a datum has ids only.",
    }

    @staticmethod
    def files_of(path: Path) -> list[Path]:
        if path.is_file():
            return [path] if path.suffix == ".jsonl" else []
        return sorted(path.glob("*.jsonl"), key=by_number)

    @staticmethod
    def is_own(line: Mapping[str, Any]) -> bool:
        return line.keys() >= _DATUM

    def rows_of(self, line: Mapping[str, Any], path: Path, number: int) -> Iterator[Row]:
        yield _row(line, f"{path.stem}/{number - 1}", f"{path}:{number}")


def _summaries(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.name.endswith("_rollout_summaries.jsonl") else []
    found = (*path.glob(_SUMMARIES), *path.glob(f"iteration_*/{_SUMMARIES}"))
    return sorted(found, key=by_number)


def _row(datum: Mapping[str, Any], name: str, where: str) -> Row:
    if lacks := sorted(_DATUM - datum.keys()):
        raise DataError(f"{where}: {', '.join(lacks)} of a datum is missing.")
    given = ids_of(datum["model_input"], f"{where}: model_input")
    targets = ids_of(datum["target_tokens"], f"{where}: target_tokens")
    if len(given) != len(targets) or (given[1:] != targets[:-1]).any():
        raise DataError(
            f"{where}: target_tokens ({len(targets)}) must be model_input ({len(given)}) one place "
            "on, as tinker-cookbook's trajectory_to_data makes them; these are not. A datum with "
            "images has no ids in their place and cannot be read."
        )

    def of(field: str, fill: float) -> Any:
        values = floats_of(datum[field], len(targets), f"{where}: {field}")
        return np.concatenate([np.array([fill], np.float32), values])

    # A mask is 1 or 0, and a weight where the user made it one: what has any is trained.
    loss_mask = of("mask", 0.0) > 0
    rollout = of("logprobs", np.nan)
    rollout[~loss_mask & (rollout == 0.0)] = np.nan  # what an observation is filled with
    columns: dict[str, Any] = {"rollout_logprobs": rollout}
    if datum.get("training_logprobs") is not None:
        columns["trainer_logprobs"] = of("training_logprobs", np.nan)
    if datum.get("advantages") is not None:
        columns["advantages"] = of("advantages", 0.0)
    return Row(
        row_id=name,
        token_ids=np.concatenate([given[:1], targets]),
        loss_mask=loss_mask,
        columns=columns,
    )
