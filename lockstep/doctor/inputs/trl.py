"""TRL: its log of completions, and the batches that a subclass of three lines saves.

    GRPOConfig(log_completions=True)    OUTPUT/completions/completions_STEP.parquet: texts
    torch.save(batch, ...)              what `_generate_and_score_completions` returns, with ids and
                                        both sides' log-probs (docs/doctor-peers.md has the lines)

Names as in TRL 1.16 (trainer/grpo_trainer.py). The parity tests read files of a GRPOTrainer's step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.inputs.assemble import (
    Array,
    Row,
    columns_of,
    ids_of,
    in_chunks,
    of_response,
    real,
    whole,
)
from lockstep.doctor.inputs.base import CHUNK_TOKENS, Dump, Facts
from lockstep.doctor.inputs.files import PARQUET_MAGIC, head_of
from lockstep.doctor.inputs.messages import read_messages
from lockstep.doctor.inputs.pickles import is_torch_file, mentions, numbers, read_torch
from lockstep.errors import DataError

_COLUMNS = frozenset({"step", "prompt", "completion", "advantage"})
"""That TRL writes beside those of the reward functions."""
_BATCH = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


class TrlTexts(Dump):
    """`log_completions`: one Parquet file per step, with the texts of prompts and completions."""

    format: ClassVar[str] = "trl-texts"
    has_ids: ClassVar[bool] = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files = [file for file in _parquet_files(path) if _schema(file) is not None]
        if not self._files:
            raise DataError(
                f"{path} has no Parquet file with the columns {', '.join(sorted(_COLUMNS))}, which "
                "TRL writes to OUTPUT/completions with log_completions=True."
            )
        schema = _schema(self._files[-1])
        assert schema is not None, "kept above"
        rewards = [
            f.name for f in schema if f.name not in _COLUMNS and pa.types.is_floating(f.type)
        ]
        self._reward = rewards[0] if len(rewards) == 1 else None

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return any(_schema(file) is not None for file in _parquet_files(path)[:2])

    @property
    def facts(self) -> Facts:
        return Facts(trainer="trl")

    @property
    def has(self) -> frozenset[str]:
        return frozenset({"texts", "messages", "steps"} | ({"rewards"} if self._reward else set()))

    @property
    def lacks(self) -> Mapping[str, str]:
        why = (
            "log_completions logs texts only. For ids and both sides' log-probs, save what "
            "GRPOTrainer._generate_and_score_completions returns (docs/doctor-peers.md)."
        )
        return {"token_ids": why, "rollout_logprobs": why, "trainer_logprobs": why}

    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        return in_chunks(self._rows(), self.has, max_tokens=max_tokens)

    def _rows(self) -> Iterator[Row]:
        names = ["step", "prompt", "completion", *([self._reward] if self._reward else [])]
        for path in self._files:
            number = 0
            try:
                with pq.ParquetFile(path) as file:
                    for batch in file.iter_batches(256, columns=names, use_threads=False):
                        for logged in batch.to_pylist():
                            yield self._row(logged, f"{path}: row {number}", number)
                            number += 1
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path} cannot be read as Parquet: {error}.") from None

    def _row(self, logged: Mapping[str, Any], where: str, number: int) -> Row:
        columns: dict[str, Any] = {}
        step, prompt, completion = logged["step"], logged["prompt"], logged["completion"]
        if (number_of := whole(step)) is not None:
            columns["steps"] = number_of
        if isinstance(completion, str):
            columns["texts"] = completion
        elif isinstance(prompt, list) and isinstance(completion, list):
            columns["messages"] = read_messages([*prompt, *completion], where=where)
        if self._reward and (reward := real(logged.get(self._reward))) is not None:
            columns["rewards"] = reward
        return Row(
            row_id=f"{step}/{number}",
            token_ids=np.empty(0, np.int32),
            loss_mask=np.empty(0, np.bool_),
            columns=columns,
        )


def _parquet_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    folder = path / "completions" if (path / "completions").is_dir() else path
    return sorted(folder.glob("completions_*.parquet"))


def _schema(path: Path) -> pa.Schema | None:
    """Of a file of TRL's completions; None of any other."""
    try:
        if head_of(path, 4) != PARQUET_MAGIC:
            return None
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError, ValueError):
        return None
    return schema if set(schema.names) >= _COLUMNS else None


# -- batches ----------------------------------------------------------------------------------


class TrlDump(Dump):
    """Batches of a GRPOTrainer, saved by torch.save: a file, or a directory of them by step.

    A file is read whole, one after the other. Prompts are padded on the left and completions on
    the right; what the masks leave out is left out. The sampler's log-probs are
    `sampling_per_token_logps` (of vLLM, or of a rollout_func), the trainer's, before the update,
    `old_per_token_logps`.
    """

    format: ClassVar[str] = "trl"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files = _batch_files(path)
        if not self._files:
            raise DataError(f"{path} has no .pt file. Expected batches of a GRPOTrainer.")
        head = list(_rows(self._files[0]))
        if not head:
            raise DataError(f"{self._files[0]} is a batch of 0 rows: there is nothing to look at.")
        self._has = columns_of(head)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        files = _batch_files(path)
        return bool(files) and is_torch_file(files[0]) and mentions(files[0], _BATCH)

    @property
    def facts(self) -> Facts:
        return Facts(trainer="trl")

    @property
    def has(self) -> frozenset[str]:
        return self._has

    @property
    def lacks(self) -> Mapping[str, str]:
        why = {
            "rollout_logprobs": "sampling_per_token_logps are kept with use_vllm=True, or where a "
            "rollout_func returns logprobs.",
            "trainer_logprobs": "old_per_token_logps are computed with use_vllm=True and "
            "vllm_importance_sampling_correction=True, or where a generation is trained more "
            "than once (num_iterations > 1).",
            "policy_version": "TRL samples with the weights of the step that trains.",
            "rewards": "the batch has advantages; rewards are in the log of completions.",
            "texts": "GRPOConfig(log_completions=True) logs them, in files of their own.",
            "messages": "GRPOConfig(log_completions=True) logs them, in files of their own.",
        }
        return {name: reason for name, reason in why.items() if name not in self._has}

    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        rows = (row for path in self._files for row in _rows(path))
        return in_chunks(rows, self._has, max_tokens=max_tokens)


def _batch_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".pt" else []
    return sorted(
        path.glob("*.pt"), key=lambda p: ([int(n) for n in re.findall(r"\d+", p.stem)], p.name)
    )


def _rows(path: Path) -> Iterator[Row]:
    batch = read_torch(path)
    if not isinstance(batch, dict) or any(
        not isinstance(batch.get(name), np.ndarray) or batch[name].ndim != 2 for name in _BATCH
    ):
        raise DataError(
            f"{path} is no batch of a GRPOTrainer: expected a dict with the tensors "
            f"{', '.join(_BATCH)}, each of two dimensions."
        )
    steps = re.findall(r"\d{1,18}", path.stem)
    for i in range(len(batch["completion_ids"])):
        where = f"{path}: row {i}"

        def of(name: str, i: int = i, where: str = where) -> Array | None:
            values = batch.get(name)
            if not isinstance(values, np.ndarray) or not values.ndim:
                return None
            if i >= len(values) or numbers(values) is None:
                raise DataError(f"{where}: {name} has shape {values.shape}: no numbers of row {i}.")
            return values[i]

        yield _row(of, f"{steps[-1]}/{i}" if steps else f"{i}", steps, where)


def _row(of: Any, name: str, steps: list[str], where: str) -> Row:
    parts: list[Array] = []
    masks: list[Array] = []
    for part in ("prompt", "completion"):
        ids, mask = ids_of(of(f"{part}_ids"), f"{where}: {part}_ids"), of(f"{part}_mask")
        if mask is None or mask.shape != ids.shape:
            raise DataError(f"{where}: {part}_mask is not of the shape of {part}_ids.")
        parts.append(ids[mask.astype(np.bool_)])
        masks.append(mask.astype(np.bool_))
    ids = np.concatenate(parts)
    kept, size = masks[1], len(ids)

    def response(field: str, fill: Any = np.nan, dtype: str = "f4") -> Array | None:
        values = of(field)
        if values is None:
            return None
        if values.shape != kept.shape:
            raise DataError(
                f"{where}: {field} has shape {values.shape}, and completion_ids {kept.shape}."
            )
        return of_response(values[kept], size, f"{where}: {field}", fill=fill, dtype=dtype)

    loss_mask = response("tool_mask", fill=False, dtype="?")  # 1 where the model wrote
    if loss_mask is None:
        loss_mask = np.arange(size) >= len(parts[0])
    columns: dict[str, Any] = {"prompt_lengths": len(parts[0])}
    for ours, theirs in (
        ("rollout_logprobs", "sampling_per_token_logps"),
        ("trainer_logprobs", "old_per_token_logps"),
    ):
        values = response(theirs)
        if values is not None:
            if ours == "rollout_logprobs":
                values[~loss_mask & (values == 0.0)] = np.nan  # TRL's filler of tool replies
            columns[ours] = values
    advantage = of("advantages")
    if advantage is not None:
        each = response("advantages") if advantage.ndim else np.full(size, advantage, np.float32)
        columns["advantages"] = each
    if steps and (step := whole(int(steps[-1]))) is not None:
        columns["steps"] = step
    return Row(row_id=name, token_ids=ids, loss_mask=loss_mask, columns=columns)
