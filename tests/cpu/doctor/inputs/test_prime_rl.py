"""prime-rl's token export, in the structure of src/prime_rl/trainer/rl/token_export.py of November
2026 (schema_version 1). The package is not on PyPI, so that the lines are written here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.inputs.trainers import PrimeRlDump
from lockstep.errors import DataError

nan = np.nan


def record(**changed: Any) -> dict[str, Any]:
    """A prompt of two ids, a turn, a tool's reply that is imitated, a turn."""
    rl = [False, False, True, False, True]
    return {
        "schema_version": 1,
        "step": 3,
        "export_step": 3,
        "rank": 0,
        "micro_step": 1,
        "micro_sequence_idx": 0,
        "export_sequence_idx": 4,
        "run_id": None,
        "env_name": "calculator",
        "token_ids": [5, 6, 10, 20, 12],
        "position_ids": [0, 1, 2, 3, 4],
        "loss_mask": [False, False, True, True, True],
        "advantages": [0.0, 0.0, 0.5, 0.0, 0.5],
        "losses": [
            {"rl": {"advantage": 0.5, "mask": m}, "ce": {"advantage": 1.0, "mask": i == 3}}
            for i, m in enumerate(rl)
        ],
        "rewards": [1.0] * 5,
        "inference_logprobs": [0.0, 0.0, -0.5, 0.0, 0.0],
        "trainer_logprobs": [-11.9, -3.0, -0.25, -2.0, None],
        "entropy": [0.5] * 5,
        "mismatch_kl": [None] * 5,
        "is_masked": [False] * 5,
    } | changed


def save(path: Path, *records: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in records))
    return path


def test_a_line_is_a_row_with_both_sides_and_the_policys_tokens_trained(tmp_path):
    dump = open_dump(save(tmp_path / "rank_0.jsonl", record()))
    assert isinstance(dump, PrimeRlDump) and dump.facts.trainer == "prime-rl"
    [rows] = dump.chunks()
    assert rows.row_ids == ("3/rank0/4",) and rows.token_ids.tolist() == [5, 6, 10, 20, 12]
    assert rows.loss_mask.tolist() == [False, False, True, False, True]
    expected = np.float32([nan, nan, -0.5, nan, 0.0])
    assert np.array_equal(rows.rollout_logprobs, expected, equal_nan=True)
    assert np.array_equal(rows.gap, [nan, nan, 0.25, nan, nan], equal_nan=True)
    assert rows.rewards.tolist() == [1.0] and rows.steps.tolist() == [3]
    assert all(getattr(rows, name) is not None for name in dump.has)
    assert not dump.has & dump.lacks.keys()


def test_the_weights_of_the_losses_tell_the_same(tmp_path):
    line = record(rl_weights=[0.0, 0.0, 1.0, 0.0, 1.0])
    del line["losses"]
    [rows] = open_dump(save(tmp_path / "rank_0.jsonl", line)).chunks()
    assert rows.loss_mask.tolist() == [False, False, True, False, True]


def test_a_run_is_read_over_its_steps_ranks_and_runs_in_order(tmp_path):
    for step in (10, 9):
        for rank in (1, 0):
            path = tmp_path / "token_exports" / f"step_{step}" / f"rank_{rank}.jsonl"
            save(path, record(export_step=step, rank=rank))
    (tmp_path / "token_exports" / "step_9" / "STABLE").touch()
    dump = open_dump(tmp_path)
    names = [name for rows in dump.chunks(max_tokens=10) for name in rows.row_ids]
    assert names == ["9/rank0/4", "9/rank1/4", "10/rank0/4", "10/rank1/4"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trainer_logprobs": [0.0] * 4}, r"trainer_logprobs.*\b5\b.*\b4\b"),
        ({"inference_logprobs": ["a"] * 5}, r"inference_logprobs.*\b5\b.*\['a'"),
        ({"loss_mask": [2] * 5}, "loss_mask"),
        ({"losses": [{"rl": [1]}] * 5}, "losses must be an object per token"),
        ({"token_ids": "abc"}, "token_ids"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_its_number(tmp_path, changed, message):
    path = save(tmp_path / "rank_0.jsonl", record(), record(**changed))
    with pytest.raises(DataError, match=f"rank_0.jsonl:2: .*{message}"):
        list(open_dump(path).chunks())
