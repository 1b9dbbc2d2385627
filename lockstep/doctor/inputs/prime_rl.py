"""prime-rl's token export: one line of JSON per trained sequence, with both sides' log-probs.

    trainer.enable_token_export = true    OUTPUT/token_exports/step_STEP/rank_RANK.jsonl

Field names as in prime-rl's main branch of November 2026 (src/prime_rl/trainer/rl/token_export.py,
schema_version 1). Log-probs are at their own token: the trainer shifts its own right by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.inputs.assemble import Row, Values, array_of, floats_of, ids_of, real
from lockstep.doctor.inputs.lines import LineDump
from lockstep.doctor.rows import BoolArray
from lockstep.errors import DataError

_KEYS = frozenset({"token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs"})
_EXPORTS = "token_exports/step_*/rank_*.jsonl"


class PrimeRlDump(LineDump):
    """A file of the token export, a directory of steps, or the output directory of a run."""

    format: ClassVar[str] = "prime-rl"
    patterns: ClassVar[tuple[str, ...]] = (
        "rank_*.jsonl",
        "step_*/rank_*.jsonl",
        _EXPORTS,
        f"*/{_EXPORTS}",
    )
    keys: ClassVar[frozenset[str]] = _KEYS

    def rows_of(
        self, line: Mapping[str, Any], path: Path, number: int, where: str
    ) -> Iterator[Row]:
        yield _row(line, where)


def live_lines(
    batch: Mapping[str, Any], logprobs: Any, lengths: Sequence[int], *, step: int
) -> Iterator[dict[str, Any]]:
    """The lines that the token export writes of a micro batch: its trained sequences, without the
    padding behind them. logprobs: the trainer's, at their own token; lengths: of the sequences."""
    names = {"token_ids": "input_ids", "loss_mask": "loss_mask", "advantages": "advantages"}
    names |= {"inference_logprobs": "inference_logprobs", "rl_weights": "rl_weights"}
    found = {name: batch[key] for name, key in names.items() if batch.get(key) is not None}
    if missing := sorted(_KEYS - {*found, "trainer_logprobs"}):
        raise DataError(
            f"the micro batch of step {step} has no {', '.join(missing)}. Give the micro_batch, "
            'out["logprobs"] and the sequence_lengths that the loop gives to token_exporter.export.'
        )
    columns = {
        n: array_of(v).reshape(-1) for n, v in {**found, "trainer_logprobs": logprobs}.items()
    }
    trained, begin = columns["loss_mask"].astype(np.bool_), 0
    environments = batch.get("env_names") or ["?"] * len(trained)
    for length in lengths:
        end = following = begin + length
        while end > begin and not trained[end - 1] and environments[end - 1] == "":
            end -= 1
        if trained[begin:end].any():
            line = {name: column[begin:end].tolist() for name, column in columns.items()}
            line |= {n: batch[n][begin:end] for n in ("losses", "rewards") if n in batch}
            yield {"step": step} | line
        begin = following


def live_rows(lines: Iterable[Mapping[str, Any]], *, step: int) -> Iterator[Row]:
    """Rows of `live_lines`."""
    for number, line in enumerate(lines):
        line = {**line, "export_sequence_idx": number}
        yield _row(line, f"the batch of step {step}: sequence {number}")


def _row(line: Mapping[str, Any], where: str) -> Row:
    ids = ids_of(line["token_ids"], f"{where}: token_ids")
    values = Values(source=line, where=where, size=len(ids))
    rewards = line.get("rewards")  # the reward of the row at each of its tokens
    known = [real(r) for r in rewards] if isinstance(rewards, list) else []
    step, run = line.get("export_step", line.get("step")), line.get("run_id")
    name = f"{step}/rank{line.get('rank', 0)}/{line.get('export_sequence_idx', '?')}"
    return Row.of(
        row_id=f"{run}/{name}" if isinstance(run, str) else name,
        token_ids=ids,
        loss_mask=_trained(values),
        rollout_logprobs=values.floats("inference_logprobs"),
        trainer_logprobs=values.floats("trainer_logprobs"),
        advantages=values.floats("advantages"),
        rewards=next((r for r in reversed(known) if r is not None), None),
        steps=step,
    )


def _trained(values: Values) -> BoolArray:
    """Tokens of the policy's loss. `loss_mask` is the union of all losses, which includes the
    imitation of given tokens."""
    mask = floats_of(values.source["loss_mask"], values.size, f"{values.where}: loss_mask")
    if not np.isin(mask, (0, 1)).all():
        raise DataError(f"{values.where}: loss_mask: expected true and false, or 1 and 0.")
    losses, weights = values.source.get("losses"), values.source.get("rl_weights")
    if isinstance(losses, list) and len(losses) == values.size:
        if not all(isinstance(at, dict) and isinstance(at.get("rl", {}), dict) for at in losses):
            raise DataError(f"{values.where}: losses must be an object per token, of objects.")
        if any("rl" in at for at in losses):
            return (mask > 0) & [bool(at.get("rl", {}).get("mask")) for at in losses]
    if isinstance(weights, list) and any(weights):
        return (mask > 0) & (floats_of(weights, values.size, f"{values.where}: rl_weights") != 0)
    return mask > 0
