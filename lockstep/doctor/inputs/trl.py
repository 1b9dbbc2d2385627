"""TRL: the batches that a subclass of three lines saves.

    torch.save(batch, ...)              the value of `_generate_and_score_completions`, with ids and
                                        both sides' log-probs (docs/doctor-dumps.md has the lines)

Names as in TRL 1.16 (trainer/grpo_trainer.py). The parity tests read files of a GRPOTrainer's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.inputs.assemble import (
    Array,
    Row,
    Values,
    floats_of,
    ids_of,
    picked,
    row_name,
    row_of,
)
from lockstep.doctor.inputs.base import HOW_TO_GET_OF
from lockstep.doctor.inputs.lines import FileDump, step_in
from lockstep.doctor.inputs.pickles import is_torch_file, mentions, read_torch
from lockstep.errors import DataError

_BATCH = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


class TrlDump(FileDump):
    """Batches of a GRPOTrainer, saved by torch.save: a file, or a directory of them by step.

    Prompts are padded on the left and completions on the right; places that the masks leave out are
    left out. The sampler's log-probs are `sampling_per_token_logps` (of vLLM, or of a
    rollout_func), the trainer's, before the update, `old_per_token_logps`.
    """

    format: ClassVar[str] = "trl"
    patterns: ClassVar[tuple[str, ...]] = ("*.pt",)
    suffixes: ClassVar[tuple[str, ...]] = (".pt",)
    why: ClassVar[Mapping[str, str]] = HOW_TO_GET_OF["trl"]

    @classmethod
    def is_own(cls, path: Path) -> bool:
        return is_torch_file(path) and mentions(path, _BATCH)

    def rows_in(self, path: Path) -> Iterator[Row]:
        yield from _rows(read_torch(path), step_in(path), path)


def live_rows(
    batch: Mapping[str, Any], index: Sequence[int], group_size: int, *, step: int
) -> Iterator[Row]:
    """The rows `index` of the value of `_generate_and_score_completions`. group_size: rows of one
    prompt, one after the other; 0 if it is unknown."""
    for i, row in zip(
        index, _rows(picked(batch, index), step, f"the batch of step {step}", index), strict=True
    ):
        row.columns |= {"groups": i // group_size} if group_size else {}
        yield row


def _rows(
    batch: Any, step: int | None, where: object, names: Sequence[int] | None = None
) -> Iterator[Row]:
    if not isinstance(batch, dict) or any(np.ndim(batch.get(name, 0)) != 2 for name in _BATCH):
        raise DataError(
            f"{where} is no batch of a GRPOTrainer: expected a dict with the tensors "
            f"{', '.join(_BATCH)}, each of two dimensions."
        )
    for i, name in enumerate(names or range(len(batch["completion_ids"]))):
        yield _row(row_of(batch, i), row_name(step, name), step, f"{where}: row {name}")


def _row(source: Mapping[str, Any], name: str, step: int | None, where: str) -> Row:
    def unpadded(part: str) -> tuple[Array, Array]:
        """(ids, true where an id is no padding) of the prompt or the completion."""
        ids = ids_of(source[f"{part}_ids"], f"{where}: {part}_ids")
        kept = floats_of(source[f"{part}_mask"], len(ids), f"{where}: {part}_mask") > 0
        return ids[kept], kept

    (prompt, _), (completion, kept) = unpadded("prompt"), unpadded("completion")
    size = len(prompt) + len(completion)
    values = Values(source=source, where=where, size=size, kept=kept)
    loss_mask = values.mask("tool_mask")  # 1 where the model wrote
    advantages = source.get("advantages")
    if advantages is not None:  # one number of the row, or one per token
        is_one = not advantages.ndim
        advantages = np.full(size, advantages) if is_one else values.floats("advantages")
    return Row.of(
        row_id=name,
        token_ids=np.concatenate([prompt, completion]),
        loss_mask=np.arange(size) >= len(prompt) if loss_mask is None else loss_mask,
        prompt_lengths=len(prompt),
        rollout_logprobs=values.floats("sampling_per_token_logps"),
        trainer_logprobs=values.floats("old_per_token_logps"),
        advantages=advantages,
        steps=step,
    )
