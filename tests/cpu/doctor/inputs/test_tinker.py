"""tinker-cookbook's summaries and datums, in the structure of its version 0.6.1.
tests/parity/test_doctor_tinker.py has them made by its own functions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.inputs.trainers import TinkerDump
from lockstep.errors import DataError

nan = np.nan


def datum(**changed: Any) -> dict[str, Any]:
    """Two prompt ids, a turn of two, a tool's reply, a turn of one."""
    return {
        "model_input": [5, 6, 10, 11, 20],
        "target_tokens": [6, 10, 11, 20, 12],
        "logprobs": [0.0, -0.5, 0.0, 0.0, -1.0],
        "mask": [0.0, 1.0, 1.0, 0.0, 1.0],
        "advantages": [0.0, 0.5, 0.5, 0.0, 0.5],
        "training_logprobs": [-3.0, -0.25, 0.0, -2.0, -1.0],
    } | changed


def save(path: Path, *lines: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_datum_is_a_row_and_its_log_probs_stand_at_the_targets(tmp_path):
    dump = open_dump(save(tmp_path / "datums_000003.jsonl", datum()))
    assert isinstance(dump, TinkerDump) and dump.facts.trainer == "tinker"
    [rows] = dump.chunks()
    assert rows.token_ids.tolist() == [5, 6, 10, 11, 20, 12]
    assert rows.loss_mask.tolist() == [False, False, True, True, False, True]
    expected = np.float32([nan, nan, -0.5, 0.0, nan, -1.0])
    assert np.array_equal(rows.rollout_logprobs, expected, equal_nan=True)
    assert np.array_equal(rows.gap, [nan, nan, 0.25, 0.0, nan, 0.0], equal_nan=True)
    assert all(getattr(rows, name) is not None for name in dump.has)
    assert not dump.has & dump.lacks.keys()


def test_without_the_trainers_log_probs_the_line_says_how_to_have_them(tmp_path):
    line = datum()
    del line["training_logprobs"]
    dump = open_dump(save(tmp_path / "a.jsonl", line))
    assert "train_step" in dump.lacks["trainer_logprobs"]


def test_numbers_that_only_later_lines_have_are_not_lost_without_a_word(tmp_path):
    early = datum()
    del early["training_logprobs"]
    dump = open_dump(save(tmp_path / "a.jsonl", early, datum()))
    [rows] = dump.chunks()
    assert np.isfinite(rows.gap).tolist() == [False] * 8 + [True] * 2 + [False, True]
    dump = open_dump(save(tmp_path / "a.jsonl", *[early] * 64, datum()))
    with pytest.raises(DataError, match=r"'a/64'.*trainer_logprobs"):
        list(dump.chunks())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_tokens": [5, 6, 10, 11, 20]}, "target_tokens"),
        ({"model_input": [5, 6]}, "target_tokens .5.*model_input .2"),
        ({"logprobs": [0.0]}, r"logprobs: .*\b5\b"),
        ({"mask": None}, r"mask: .*\b5\b.*None"),
    ],
)
def test_what_contradicts_itself_is_named_with_its_line(tmp_path, changed, message):
    with pytest.raises(DataError, match=f"a.jsonl:1: .*{message}"):
        open_dump(save(tmp_path / "a.jsonl", datum(**changed)))
