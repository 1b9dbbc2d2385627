"""TRL: the batches that a subclass of three lines saves.

    torch.save(batch, ...)              the value of `_generate_and_score_completions`, with ids and
                                        both sides' log-probs (docs/doctor-dumps.md has the lines)

Names as in TRL 1.16 (trainer/grpo_trainer.py). The parity tests read files of a GRPOTrainer's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.inputs.assemble import Array, Row, at_the_end, ids_of, numbers, row_name
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
    trainer: ClassVar[str] = "trl"
    patterns: ClassVar[tuple[str, ...]] = ("*.pt",)
    suffixes: ClassVar[tuple[str, ...]] = (".pt",)
    no_row: ClassVar[str] = " has no row of a batch of a GRPOTrainer (.pt)."
    why: ClassVar[Mapping[str, str]] = {
        "rollout_logprobs": "sampling_per_token_logps are kept with use_vllm=True, or where a "
        "rollout_func returns logprobs.",
        "trainer_logprobs": "old_per_token_logps are computed with use_vllm=True and "
        "vllm_importance_sampling_correction=True, or where a generation is trained more than once "
        "(num_iterations > 1).",
        "policy_version": "TRL samples with the weights of the step that trains.",
        "rewards": "the batch has advantages; rewards are in the log of completions.",
        "texts": "GRPOConfig(log_completions=True) logs them, without ids.",
        "messages": "GRPOConfig(log_completions=True) logs them, without ids.",
    }

    @classmethod
    def is_own(cls, path: Path) -> bool:
        return is_torch_file(path) and mentions(path, _BATCH)

    def rows_in(self, path: Path) -> Iterator[Row]:
        batch = read_torch(path)
        if not isinstance(batch, dict) or any(
            not isinstance(batch.get(name), np.ndarray) or batch[name].ndim != 2 for name in _BATCH
        ):
            raise DataError(
                f"{path} is no batch of a GRPOTrainer: expected a dict with the tensors "
                f"{', '.join(_BATCH)}, each of two dimensions."
            )
        for number in range(len(batch["completion_ids"])):
            yield _row(batch, number, step_in(path), f"{path}: row {number}")


def _row(batch: Mapping[str, Any], number: int, step: int | None, where: str) -> Row:
    def of(name: str) -> Array | None:
        values = batch.get(name)
        if not isinstance(values, np.ndarray) or not values.ndim:
            return None
        if number >= len(values) or numbers(values) is None:
            raise DataError(
                f"{where}: {name} has shape {values.shape}: no numbers of row {number}."
            )
        return values[number]

    def kept(part: str) -> tuple[Array, Array]:
        """(ids without padding, mask) of the prompt or the completion."""
        ids, mask = ids_of(of(f"{part}_ids"), f"{where}: {part}_ids"), of(f"{part}_mask")
        if mask is None or mask.shape != ids.shape:
            raise DataError(f"{where}: {part}_mask is not of the shape of {part}_ids.")
        return ids[mask.astype(np.bool_)], mask.astype(np.bool_)

    (prompt, _), (completion, is_kept) = kept("prompt"), kept("completion")
    ids = np.concatenate([prompt, completion])

    def response(name: str, fill: Any = np.nan, dtype: str = "f4") -> Array | None:
        values = of(name)
        if values is None:
            return None
        if values.shape != is_kept.shape:
            raise DataError(
                f"{where}: {name} has shape {values.shape}, and completion_ids {is_kept.shape}."
            )
        return at_the_end(values[is_kept], len(ids), f"{where}: {name}", fill=fill, dtype=dtype)

    loss_mask = response("tool_mask", fill=False, dtype="?")  # 1 where the model wrote
    if loss_mask is None:
        loss_mask = np.arange(len(ids)) >= len(prompt)
    advantage = of("advantages")
    if advantage is not None:  # one number of the row, or one per token
        advantage = (
            response("advantages") if advantage.ndim else np.full(len(ids), advantage, np.float32)
        )
    return Row(
        row_id=row_name(step, number),
        token_ids=ids,
        loss_mask=loss_mask,
        columns={
            "prompt_lengths": len(prompt),
            "rollout_logprobs": response("sampling_per_token_logps"),
            "trainer_logprobs": response("old_per_token_logps"),
            "advantages": advantage,
            "steps": step,
        },
    )
