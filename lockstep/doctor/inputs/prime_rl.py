"""prime-rl's token export: one line of JSON per trained sequence, with both sides' log-probs.

    trainer.enable_token_export = true    OUTPUT/token_exports/step_STEP/rank_RANK.jsonl

Field names as in prime-rl's main branch of November 2026 (src/prime_rl/trainer/rl/token_export.py,
schema_version 1). Log-probs stand at their own token: the trainer shifts its right by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.checks.rows import BoolArray
from lockstep.doctor.inputs.assemble import (
    Row,
    floats_of,
    ids_of,
    mask_of,
    real,
    whole,
)
from lockstep.doctor.inputs.lines import LineDump, by_number
from lockstep.errors import DataError

_KEYS = frozenset({"token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs"})
"""Of every line."""


class PrimeRlDump(LineDump):
    """A file of the token export, a directory of steps, or a run's output directory."""

    format: ClassVar[str] = "prime-rl"
    trainer: ClassVar[str] = "prime-rl"
    no_row: ClassVar[str] = (
        ": no line of prime-rl's token export is in it. It is written with "
        "trainer.enable_token_export = true, to OUTPUT/token_exports."
    )
    why: ClassVar[Mapping[str, str]] = {
        "routed_experts": "the token export leaves the experts out.",
        "policy_version": "the token export does not say which weights sampled a token.",
        "messages": "the token export has ids only.",
        "texts": "the token export has ids only.",
        "groups": "the token export does not say which rows are of one task.",
    }

    @staticmethod
    def files_of(path: Path) -> list[Path]:
        if path.is_file():
            return [path] if path.suffix == ".jsonl" else []
        found = (
            *path.glob("rank_*.jsonl"),
            *path.glob("step_*/rank_*.jsonl"),
            *path.glob("token_exports/step_*/rank_*.jsonl"),
            *path.glob("*/token_exports/step_*/rank_*.jsonl"),
        )
        return sorted(found, key=by_number)

    @staticmethod
    def is_own(line: Mapping[str, Any]) -> bool:
        return line.keys() >= _KEYS

    def rows_of(self, line: Mapping[str, Any], path: Path, number: int) -> Iterator[Row]:
        yield _row(line, f"{path}:{number}")


def _row(record: Mapping[str, Any], where: str) -> Row:
    if lacks := sorted(_KEYS - record.keys()):
        raise DataError(f"{where}: {', '.join(lacks)} of prime-rl's token export is missing.")
    ids = ids_of(record["token_ids"], f"{where}: token_ids")
    size = len(ids)
    mask = _trained(record, size, where)
    rollout = floats_of(record["inference_logprobs"], size, f"{where}: inference_logprobs")
    rollout[~mask & (rollout == 0.0)] = np.nan  # what prime-rl fills prompts and tools with
    columns: dict[str, Any] = {
        "rollout_logprobs": rollout,
        "trainer_logprobs": floats_of(
            record["trainer_logprobs"], size, f"{where}: trainer_logprobs"
        ),
    }
    if record.get("advantages") is not None:
        columns["advantages"] = floats_of(record["advantages"], size, f"{where}: advantages")
    rewards = record.get("rewards")
    if isinstance(rewards, list):  # the row's reward at each of its tokens
        known = [r for r in map(real, rewards) if r is not None]
        columns["rewards"] = known[-1] if known else np.nan
    step = whole(record.get("export_step", record.get("step")))
    if step is not None:
        columns["steps"] = step
    run = record.get("run_id")
    number = record.get("export_sequence_idx", "?")
    name = f"{step}/rank{record.get('rank', 0)}/{number}"
    return Row(
        row_id=f"{run}/{name}" if isinstance(run, str) else name,
        token_ids=ids,
        loss_mask=mask,
        columns=columns,
    )


def _trained(record: Mapping[str, Any], size: int, where: str) -> BoolArray:
    """Tokens of the policy's loss. `loss_mask` is that of all losses together, imitation of given
    tokens too, which nobody sampled."""
    mask = mask_of(record["loss_mask"], size, f"{where}: loss_mask")
    losses = record.get("losses")
    if isinstance(losses, list) and len(losses) == size:
        if not all(isinstance(at, dict) for at in losses) or not all(
            isinstance(at.get("rl", {}), dict) for at in losses
        ):
            raise DataError(f"{where}: losses must be an object per token, of objects by loss.")
        if any("rl" in at for at in losses):
            return mask & np.array([bool(at.get("rl", {}).get("mask")) for at in losses], np.bool_)
    weights = record.get("rl_weights")
    if isinstance(weights, list) and any(weights):
        return mask & (floats_of(weights, size, f"{where}: rl_weights") != 0)
    return mask
