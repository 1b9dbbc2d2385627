"""NeMo-RL's logged training rows, in the structure of nemo_rl/algorithms/grpo.py and
nemo_rl/utils/logger.py of November 2026. The package on PyPI is a placeholder, so that the lines
are written here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.inputs.trainers import NemoRlDump
from lockstep.errors import DataError

nan = np.nan


def logged(**changed: Any) -> dict[str, Any]:
    """Two prompt ids, a turn, a tool's reply, a turn, and two of padding; a batch of one."""
    line = {
        "content": "2 + 2?...",
        "rewards": 0.5,
        "input_lengths": 5,
        "token_ids": [5, 6, 10, 20, 12, 0, 0],
        "token_loss_mask": [0, 0, 1, 0, 1, 0, 0],
        "sample_loss_mask": 1.0,
        "advantages": [0.25] * 7,
        "generation_logprobs": [0.0, 0.0, -0.5, 0.0, 0.0, 0.0, 0.0],
        "prev_logprobs": [0.0, -3.0, -0.25, -2.0, 0.0, -9.0, -9.0],
    } | changed
    return {name: [value] for name, value in line.items() if value is not None} | {"idx": 0}


def save(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_row_is_read_without_its_padding_and_with_both_sides(tmp_path):
    dump = open_dump(save(tmp_path / "train_data_step3.jsonl", logged()))
    assert isinstance(dump, NemoRlDump) and dump.facts.trainer == "nemo-rl"
    [rows] = dump.chunks()
    assert rows.token_ids.tolist() == [5, 6, 10, 20, 12]
    assert rows.loss_mask.tolist() == [False, False, True, False, True]
    expected = np.float32([nan, nan, -0.5, nan, 0.0])
    assert np.array_equal(rows.rollout_logprobs, expected, equal_nan=True)
    assert np.array_equal(rows.gap, [nan, nan, 0.25, nan, 0.0], equal_nan=True)
    assert rows.steps.tolist() == [3] and rows.rewards.tolist() == [0.5]
    assert all(getattr(rows, name) is not None for name in dump.has)
    assert not dump.has & dump.lacks.keys()


def test_a_sample_that_was_filtered_out_is_not_trained(tmp_path):
    path = save(tmp_path / "train_data_step3.jsonl", logged(sample_loss_mask=0.0))
    [rows] = open_dump(path).chunks()
    assert not rows.loss_mask.any()


def test_a_trainer_that_computed_none_is_not_taken_for_one_that_is_certain(tmp_path):
    path = save(tmp_path / "train_data_step3.jsonl", logged(prev_logprobs=[0.0] * 7))
    dump = open_dump(path)
    assert "trainer_logprobs" not in dump.has
    assert "force_on_policy_ratio" in dump.lacks["trainer_logprobs"]


def test_steps_of_a_run_come_in_order(tmp_path):
    for step in (10, 9):
        save(tmp_path / f"train_data_step{step}.jsonl", logged())
    save(tmp_path / "val_data_step9.jsonl", {"content": ["a"], "rewards": [1.0]})
    dump = open_dump(tmp_path)
    assert [rows.steps.tolist() for rows in dump.chunks(max_tokens=5)] == [[9], [10]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"input_lengths": 8}, r"input_lengths.*\b0\b.*\b7\b"),
        ({"prev_logprobs": [0.0]}, r"prev_logprobs.*\b7\b"),
        ({"token_ids": [1.5] * 7}, "token_ids"),
        ({"token_loss_mask": None}, "token_loss_mask"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_its_number(tmp_path, changed, message):
    path = save(tmp_path / "train_data_step3.jsonl", logged(), logged(**changed))
    with pytest.raises(DataError, match=f"step3.jsonl:2: .*{message}"):
        open_dump(path)
