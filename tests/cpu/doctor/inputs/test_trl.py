"""TRL's files, in the structure in which TRL 1.16 writes them. tests/parity/test_doctor_trl.py has
them written by a GRPOTrainer."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.inputs.trainers import TrlDump
from lockstep.errors import DataError

nan = np.nan


def batch() -> dict[str, torch.Tensor]:
    """Two rows: a prompt of two ids with a completion of three (a turn, a tool's reply, a turn),
    and a prompt of three with a completion of one."""
    return {
        "prompt_ids": torch.tensor([[0, 5, 6], [5, 6, 7]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[10, 20, 11, 0], [12, 0, 0, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]),
        "advantages": torch.tensor([1.0, -1.0]),
        "num_items_in_batch": torch.tensor(3),
        "old_per_token_logps": torch.tensor([[-0.75, -9.0, -0.25, -9.0], [-1.0, -9.0, -9.0, -9.0]]),
        "sampling_per_token_logps": torch.tensor([[-0.5, 0.0, nan, 0.0], [-1.0, 0.0, 0.0, 0.0]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]),
    }


def save(path: Path, **changed: torch.Tensor | None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({n: t for n, t in (batch() | changed).items() if t is not None}, path)
    return path


def test_padding_is_left_out_and_log_probs_stay_at_their_tokens(tmp_path):
    dump = open_dump(save(tmp_path / "batch_00007.pt"))
    assert isinstance(dump, TrlDump) and dump.facts.trainer == "trl"
    [rows] = dump.chunks()
    assert rows.token_ids.tolist() == [5, 6, 10, 20, 11, 5, 6, 7, 12]
    assert rows.loss_mask.tolist() == [False, False, True, False, True, False, False, False, True]
    assert rows.prompt_lengths.tolist() == [2, 3] and rows.steps.tolist() == [7, 7]
    expected = np.float32([nan, nan, -0.5, nan, nan, nan, nan, nan, -1.0])
    assert np.array_equal(rows.rollout_logprobs, expected, equal_nan=True)
    expected = [nan, nan, -0.25, nan, nan, nan, nan, nan, 0.0]
    assert np.array_equal(rows.gap, expected, equal_nan=True)
    assert rows.advantages[[2, 8]].tolist() == [1.0, -1.0]
    assert all(getattr(rows, name) is not None for name in dump.has)
    assert not dump.has & dump.lacks.keys()


def test_without_tools_all_of_the_completion_is_trained(tmp_path):
    dump = open_dump(save(tmp_path / "7.pt", tool_mask=None, sampling_per_token_logps=None))
    [rows] = dump.chunks()
    assert rows.loss_mask.tolist() == [False] * 2 + [True] * 3 + [False] * 3 + [True]
    assert "use_vllm=True" in dump.lacks["rollout_logprobs"]


def test_batches_of_a_directory_come_in_the_order_of_their_steps(tmp_path):
    for step in (10, 9):
        save(tmp_path / f"{step}.pt")
    dump = open_dump(tmp_path)
    assert [rows.steps.tolist() for rows in dump.chunks(max_tokens=9)] == [[9, 9], [10, 10]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"completion_mask": torch.ones(2, 3)}, r"row 0: completion_mask.*\b4\b.*\b3\b"),
        ({"old_per_token_logps": torch.zeros(2, 3)}, r"row 0: old_per_token_logps.*\b4\b.*\b3\b"),
        ({"prompt_ids": torch.zeros(2, 3)}, "prompt_ids"),
        ({"prompt_mask": torch.ones(3)}, "each of two dimensions"),
        ({"tool_mask": torch.ones(1, 4)}, r"row 1: tool_mask.*\b4\b.*\b0 x 4"),
    ],
)
def test_what_contradicts_itself_is_named_with_its_row(tmp_path, changed, message):
    with pytest.raises(DataError, match=message):
        list(open_dump(save(tmp_path / "7.pt", **changed)).chunks())
