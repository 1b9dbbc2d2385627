"""AReaL's rollout batches, in the structure that AReaL 2.0.0 (cbff54d6) gives them: a list of
trajectories, each a dict of tensors [n, T] with padding on the right (areal/workflow/rlvr.py), with
`prox_logp` of the next token (areal/trainer/rl_trainer.py). docs/doctor-dumps.md saves them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.inputs.trainers import ArealDump
from lockstep.errors import DataError

nan = np.nan


def trajectories(**changed: torch.Tensor | None) -> list[dict[str, Any]]:
    """Two samples of one task (a turn, a tool's reply, a turn; then one id), and a third of
    another."""
    first = {
        "input_ids": torch.tensor([[5, 6, 10, 20, 11], [5, 6, 12, 0, 0]], dtype=torch.int32),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool(),
        "loss_mask": torch.tensor([[0, 0, 1, 0, 1], [0, 0, 1, 0, 0]], dtype=torch.int32),
        "logprobs": torch.tensor([[0, 0, -0.5, 0, -0.25], [0, 0, -1.0, 0, 0]]),
        "versions": torch.tensor([[-1, -1, 3, -1, 4], [-1, -1, 4, 0, 0]], dtype=torch.int32),
        "rewards": torch.tensor([1.0, 0.0]),
        "prox_logp": torch.tensor([[-7, -0.75, -9, -0.5, -8], [-7, -1.0, -9, -9, -9]]),
    }
    first = {name: value for name, value in (first | changed).items() if value is not None}
    return [
        first,
        {n: value[1:, :3] if value.ndim > 1 else value[1:] for n, value in first.items()},
    ]


def save(path: Path, *, version: int = 4, **changed: torch.Tensor | None) -> Path:
    torch.save({"version": version, "batch": trajectories(**changed)}, path)
    return path


def test_padding_is_left_out_and_log_probs_are_at_their_tokens(tmp_path):
    dump = open_dump(save(tmp_path / "000004.pt"))
    assert isinstance(dump, ArealDump) and dump.facts.trainer == "areal"
    [rows] = dump.chunks()
    assert rows.token_ids.tolist() == [5, 6, 10, 20, 11, 5, 6, 12, 5, 6, 12]
    assert np.flatnonzero(rows.loss_mask).tolist() == [2, 4, 7, 10]
    expected = np.float32([nan, nan, -0.5, nan, -0.25] + [nan, nan, -1.0] * 2)
    assert np.array_equal(rows.rollout_logprobs, expected, equal_nan=True)
    expected = np.float32([nan, -7, -0.75, -9, -0.5] + [nan, -7, -1.0] * 2)
    assert np.array_equal(rows.trainer_logprobs, expected, equal_nan=True)
    assert rows.policy_version.tolist() == [-1, -1, 3, -1, 4, -1, -1, 4, -1, -1, 4]
    assert rows.trainer_version.tolist() == rows.steps.tolist() == [4, 4, 4]
    assert rows.groups.tolist() == [0, 0, 1] and rows.rewards.tolist() == [1.0, 0.0, 0.0]
    assert rows.row_ids == ("4/0.0", "4/0.1", "4/1.0")
    assert not dump.has & dump.lacks.keys()


def test_batches_of_a_directory_come_in_the_order_of_their_versions(tmp_path):
    for version in (10, 9):
        save(tmp_path / f"{version}.pt", version=version)
    dump = open_dump(tmp_path)
    assert [r.steps.tolist() for r in dump.chunks(max_tokens=11)] == [[9] * 3, [10] * 3]


def test_missing_log_probs_are_named_with_the_setting_that_records_them(tmp_path):
    dump = open_dump(save(tmp_path / "4.pt", prox_logp=None, logprobs=None))
    assert "actor.use_decoupled_loss=true" in dump.lacks["trainer_logprobs"]
    assert "rollout.dump_to_file" in dump.lacks["rollout_logprobs"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss_mask": torch.ones(2, 4)}, "trajectory 0: row 0: loss_mask: expected 5 numbers"),
        ({"prox_logp": torch.ones(2, 4)}, "prox_logp: expected 5 numbers"),
        ({"attention_mask": torch.ones(5)}, "trajectory 0 is no rollout batch of AReaL"),
        ({"input_ids": torch.ones(2, 5)}, "input_ids: expected a list of token ids"),
    ],
)
def test_a_malformed_batch_ends_in_one_error(tmp_path, changed, message):
    with pytest.raises(DataError, match=message):
        open_dump(save(tmp_path / "4.pt", **changed))


@pytest.mark.parametrize("saved", [[1], {"batch": 3}, {"batch": [3]}])
def test_another_content_is_refused(tmp_path, saved):
    torch.save(
        {"input_ids": 1, "attention_mask": 2, "loss_mask": 3, "saved": saved},
        path := tmp_path / "4.pt",
    )
    with pytest.raises(DataError, match="no rollout batch of AReaL"):
        open_dump(path)
    torch.save(saved, path)
    with pytest.raises(DataError, match="no rollout batch of AReaL"):
        open_dump(path, format="areal")


def test_texts_of_dump_to_file_are_refused_with_what_to_save(tmp_path):
    path = tmp_path / "1.jsonl"
    path.write_text('{"head_version": 0, "tail_version": 0, "prompt": "a", "completion": "b"}\n')
    with pytest.raises(DataError, match="Save its batches"):
        open_dump(path)
