"""tinker-cookbook: datums that one line in its loop saves (docs/doctor-dumps.md has the line).

Names as in tinker-cookbook 0.6.1 (rl/data_processing.py) and tinker 0.38.
The parity tests read files made by its own functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.inputs.assemble import Row, Values, array_of, floats_of, ids_of
from lockstep.doctor.inputs.base import HOW_TO_GET_OF
from lockstep.doctor.inputs.lines import LineDump
from lockstep.errors import DataError


class TinkerDump(LineDump):
    """Datums, one per line: the input ids, and for each the target with the sampler's log-prob.

    `training_logprobs`, from the forward pass of the step, are the trainer's. A target is one place
    after the input that predicts it: a row is the input plus the last target, and log-probs are
    moved to the place of their target.
    """

    format: ClassVar[str] = "tinker"
    keys: ClassVar[frozenset[str]] = frozenset({"model_input", "target_tokens", "logprobs", "mask"})
    why: ClassVar[Mapping[str, str]] = HOW_TO_GET_OF["tinker"]

    def rows_of(
        self, line: Mapping[str, Any], path: Path, number: int, where: str
    ) -> Iterator[Row]:
        yield _row(line, f"{path.stem}/{number - 1}", where)


def live_rows(
    datums: Sequence[Any], logprobs: Sequence[Any] | None, index: Sequence[int], *, step: int
) -> Iterator[Row]:
    """The rows of the datums `index`. logprobs: the trainer's of every datum, or None."""
    for i in index:
        where = f"the batch of step {step}: datum {i}"
        line = {name: values.tolist() for name, values in datums[i].loss_fn_inputs.items()}
        line["model_input"] = datums[i].model_input.to_ints()
        if logprobs is not None:
            line["training_logprobs"] = array_of(logprobs[i])
        if missing := sorted(TinkerDump.keys - line.keys()):
            raise DataError(
                f"{where}: {', '.join(missing)} is missing. Give the datums as the cookbook's "
                "assemble_training_data makes them, before the mask is removed."
            )
        yield _row(line, f"{step}/{i}", where)


def _row(line: Mapping[str, Any], name: str, where: str) -> Row:
    given = ids_of(line["model_input"], f"{where}: model_input")
    targets = ids_of(line["target_tokens"], f"{where}: target_tokens")
    if len(given) != len(targets) or (given[1:] != targets[:-1]).any():
        raise DataError(
            f"{where}: target_tokens ({len(targets)}) must be model_input ({len(given)}) one "
            "place on. A datum with images cannot be read."
        )

    size = len(targets)  # the first token of a row is no target
    mask = floats_of(line["mask"], size, f"{where}: mask") > 0  # 1 or 0, or a weight
    kept = np.ones(size, np.bool_)
    values = Values(source=line, where=where, size=size + 1, kept=kept)
    return Row.of(
        row_id=name,
        token_ids=np.concatenate([given[:1], targets]),
        loss_mask=np.concatenate([[False], mask]),
        rollout_logprobs=values.floats("logprobs"),
        trainer_logprobs=values.floats("training_logprobs"),
        advantages=values.floats("advantages"),
    )
