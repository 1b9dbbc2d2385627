"""NeMo-RL: the training rows that its GRPO logs at every step, with both sides' log-probs.

    logger.log_dir/exp_NNN/train_data_stepSTEP.jsonl    always written, except with
                                                        env.should_log_nemo_gym_responses

Field names as in NeMo-RL's main branch of November 2026 (nemo_rl/algorithms/grpo.py,
nemo_rl/utils/logger.py). Each line is a batch of one, so that each value is in a list of one. Rows
are padded on the right; log-probs are at their own token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.inputs.assemble import Row, Values, floats_of, ids_of, real, row_name, whole
from lockstep.doctor.inputs.base import HOW_TO_GET_OF
from lockstep.doctor.inputs.lines import LineDump, step_in
from lockstep.errors import DataError


class NemoRlDump(LineDump):
    """`train_data_step*.jsonl` of a run's log directory, or one such file."""

    format: ClassVar[str] = "nemo-rl"
    patterns: ClassVar[tuple[str, ...]] = ("train_data_step*.jsonl",)
    keys: ClassVar[frozenset[str]] = frozenset(  # earlier versions logged texts without ids
        {"token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs", "input_lengths"}
    )
    why: ClassVar[Mapping[str, str]] = HOW_TO_GET_OF["nemo-rl"]

    def rows_of(
        self, line: Mapping[str, Any], path: Path, number: int, where: str
    ) -> Iterator[Row]:
        # Each value is a batch of one.
        source = {n: v[0] if isinstance(v, list) and len(v) == 1 else v for n, v in line.items()}
        padded = ids_of(source["token_ids"], f"{where}: token_ids")
        size = whole(source["input_lengths"])
        if size is None or not 0 <= size <= len(padded):
            raise DataError(f"{where}: input_lengths must be a whole number, 0 to {len(padded)}.")
        values = Values(source=source, where=where, size=size, kept=np.arange(len(padded)) < size)
        is_trained = (
            floats_of(source["token_loss_mask"], len(padded), f"{where}: token_loss_mask") > 0
        )
        if (weight := real(source.get("sample_loss_mask"))) is not None and weight <= 0:
            is_trained[:] = False  # a sample that was filtered out
        trainer = floats_of(source["prev_logprobs"], len(padded), f"{where}: prev_logprobs")[:size]
        trainer[:1] = np.nan  # a filler: nothing predicts the first token
        step = step_in(path)
        yield Row.of(
            row_id=row_name(step, number - 1),
            token_ids=padded[:size],
            loss_mask=is_trained[:size],
            rollout_logprobs=values.floats("generation_logprobs"),
            trainer_logprobs=trainer if np.any(trainer[1:] != 0.0) else None,
            advantages=values.floats("advantages"),
            rewards=source.get("rewards"),
            steps=step,
        )
