"""NeMo-RL: the training rows that its GRPO logs at every step, with both sides' log-probs.

    logger.log_dir/exp_NNN/train_data_stepSTEP.jsonl    written always, except with
                                                        env.should_log_nemo_gym_responses

Field names as in NeMo-RL's main branch of November 2026 (nemo_rl/algorithms/grpo.py,
nemo_rl/utils/logger.py). The logger writes a batch of one per line, so that each value stands in a
list of one. Rows are padded on the right; log-probs stand at their own token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.inputs.assemble import Row, floats_of, ids_of, real, whole
from lockstep.doctor.inputs.lines import LineDump, by_number
from lockstep.errors import DataError

_KEYS = frozenset(
    {"token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs", "input_lengths"}
)
"""Of every line that has ids. Earlier versions logged texts and log-probs without them."""


class NemoRlDump(LineDump):
    """`train_data_step*.jsonl` of a run's log directory, or one such file."""

    format: ClassVar[str] = "nemo-rl"
    trainer: ClassVar[str] = "nemo-rl"
    no_row: ClassVar[str] = (
        ": no line of NeMo-RL's train_data_step*.jsonl is in it. Give the run's log directory "
        "(logger.log_dir/exp_NNN)."
    )
    why: ClassVar[Mapping[str, str]] = {
        "trainer_logprobs": "all of prev_logprobs are 0.0: with loss_fn.force_on_policy_ratio "
        "NeMo-RL computes none before the update.",
        "routed_experts": "the logged rows leave the experts out.",
        "policy_version": "the logged rows do not say which weights sampled a token.",
        "messages": "the logged rows have the dialogue as text.",
        "groups": "the logged rows do not say which are of one task.",
    }

    @staticmethod
    def files_of(path: Path) -> list[Path]:
        if path.is_file():
            return [path] if path.suffix == ".jsonl" else []
        return sorted(path.glob("train_data_step*.jsonl"), key=by_number)

    @staticmethod
    def is_own(line: Mapping[str, Any]) -> bool:
        return line.keys() >= _KEYS

    def rows_of(self, line: Mapping[str, Any], path: Path, number: int) -> Iterator[Row]:
        steps = re.findall(r"\d{1,9}", path.stem)
        step = int(steps[-1]) if steps else None
        yield _row(line, step, number - 1, f"{path}:{number}")


def _row(logged: Mapping[str, Any], step: int | None, number: int, where: str) -> Row:
    if lacks := sorted(_KEYS - logged.keys()):
        raise DataError(f"{where}: {', '.join(lacks)} of NeMo-RL's training rows is missing.")

    def one(name: str) -> Any:
        """The value of a batch of one."""
        value = logged.get(name)
        return value[0] if isinstance(value, list) and len(value) == 1 else value

    padded = ids_of(one("token_ids"), f"{where}: token_ids")
    size = whole(one("input_lengths"))
    if size is None or not 0 <= size <= len(padded):
        raise DataError(
            f"{where}: input_lengths must be the tokens of the row before its padding, 0 to "
            f"{len(padded)}."
        )

    def of(name: str) -> Any:
        return floats_of(one(name), len(padded), f"{where}: {name}")[:size]

    loss_mask = of("token_loss_mask") > 0
    if (weight := real(one("sample_loss_mask"))) is not None and weight <= 0:
        loss_mask = np.zeros(size, np.bool_)  # a sample that was filtered out
    rollout = of("generation_logprobs")
    rollout[~loss_mask & (rollout == 0.0)] = np.nan  # what prompts and tool replies are filled with
    trainer = of("prev_logprobs")
    trainer[:1] = np.nan  # nothing predicts the first token; it has a filler
    columns: dict[str, Any] = {"rollout_logprobs": rollout}
    if np.any(trainer[1:] != 0.0):
        columns["trainer_logprobs"] = trainer
    if logged.get("advantages") is not None:
        columns["advantages"] = of("advantages")
    if (reward := real(one("rewards"))) is not None:
        columns["rewards"] = reward
    if step is not None:
        columns["steps"] = step
    return Row(
        row_id=f"{number}" if step is None else f"{step}/{number}",
        token_ids=padded[:size],
        loss_mask=loss_mask,
        columns=columns,
    )
