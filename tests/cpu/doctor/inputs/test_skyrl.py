"""SkyRL's files, in the structure in which SkyRL 0.3.0 and its commit a9564572 write them.
tests/parity/test_doctor_skyrl.py has them written by SkyRL itself."""

import io
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.inputs.trainers import SkyRlDump
from lockstep.errors import DataError

nan = np.nan
MODULE = "skyrl.backends.skyrl_train.training_batch"


def packed(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor as SkyRL pickles it: bytes, or a file of torch.save where numpy lacks the dtype."""
    if tensor.dtype == torch.bfloat16:
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        return {"format": "torch", "data": buffer.getvalue()}
    array = tensor.numpy()
    about = {"shape": array.shape, "dtype": str(array.dtype)}
    return {"format": "numpy", "data": array.tobytes(), **about}


def _rebuild_tensor_batch(cls: type, state: dict[str, Any]) -> Any:
    raise AssertionError("a dump is read without its functions")


class TrainingInputBatch(dict):
    """The state that SkyRL pickles."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return _rebuild_tensor_batch, (type(self), self.state)


for named in (_rebuild_tensor_batch, TrainingInputBatch):
    named.__module__ = MODULE


def batch() -> dict[str, Any]:
    """Two rows: a prompt of two ids with a reply of three (a turn, a tool's reply, a turn), and a
    prompt of three with a reply of one. The third repeats the first and fills the batch."""
    columns = {
        "sequences": torch.tensor([[5, 6, 10, 20, 11], [0, 5, 6, 7, 12], [5, 6, 10, 20, 11]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
        "response_mask": torch.tensor([[1, 1, 1], [0, 0, 1], [1, 1, 1]]),
        "loss_mask": torch.tensor([[1.0, 0, 1], [0, 0, 1], [0, 0, 0]]),
        "rollout_logprobs": torch.tensor([[-0.5, 0, -0.25], [0, 0, -1], [-0.5, 0, -0.25]]),
        "action_log_probs": torch.tensor([[-0.75, -9, -0.5], [0, 0, -1], [-0.75, -9, -0.5]]),
        "advantages": torch.tensor([[1.0, 0, 1], [0, 0, -1], [0, 0, 0]]),
    }
    return columns | {"values": None}


@pytest.fixture
def save(tmp_path, monkeypatch):
    parts = MODULE.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.TrainingInputBatch = TrainingInputBatch
    module._rebuild_tensor_batch = _rebuild_tensor_batch

    def save(*, step: int = 7, bounds: Any = ((0, 1), (1, 2)), **changed: Any) -> Path:
        columns = {n: v if v is None else packed(v) for n, v in (batch() | changed).items()}
        metadata = {"response_length": 3, "pad_size": 1, "policy_prompt_boundaries": bounds}
        state = {"batch_dict": columns, "batch_size": 3, "metadata": metadata}
        path = tmp_path / "dumped_data" / f"global_step_{step}_training_input.pkl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(TrainingInputBatch(state | {"device": torch.device("cpu")})))
        return path

    return save


def test_padding_and_rows_that_fill_are_left_out_and_log_probs_stay_at_their_tokens(save):
    dump = open_dump(save(action_log_probs=batch()["action_log_probs"].bfloat16()))
    assert isinstance(dump, SkyRlDump) and dump.facts.trainer == "skyrl"
    [rows] = dump.chunks()
    assert rows.token_ids.tolist() == [5, 6, 10, 20, 11, 5, 6, 7, 12]
    assert rows.loss_mask.tolist() == [False, False, True, False, True, False, False, False, True]
    assert rows.prompt_lengths.tolist() == [2, 3] and rows.groups.tolist() == [0, 1]
    expected = np.float32([nan, nan, -0.5, nan, -0.25, nan, nan, nan, -1.0])
    assert np.array_equal(rows.rollout_logprobs, expected, equal_nan=True)
    expected = [nan, nan, -0.25, nan, -0.25, nan, nan, nan, 0.0]
    assert np.array_equal(rows.gap, expected, equal_nan=True)
    assert rows.advantages[[2, 8]].tolist() == [1.0, -1.0]
    assert rows.row_ids == ("7/0", "7/1") and rows.steps.tolist() == [7, 7]
    assert not dump.has & dump.lacks.keys()


def test_the_export_path_is_read_in_the_order_of_its_steps(save, tmp_path):
    for step in (10, 9):
        save(step=step)
    dump = open_dump(tmp_path)
    assert [r.steps.tolist() for r in dump.chunks(max_tokens=9)] == [[9, 9], [10, 10]]


def test_missing_log_probs_are_named_with_the_setting_that_records_them(save):
    dump = open_dump(save(rollout_logprobs=None, action_log_probs=None))
    assert "generator.sampling_params.logprobs=1" in dump.lacks["rollout_logprobs"]
    assert "off_policy_correction" in dump.lacks["trainer_logprobs"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"response_mask": None}, "no batch of SkyRL: expected sequences"),
        ({"loss_mask": torch.ones(3, 2)}, "row 0: loss_mask: expected 3 numbers"),
        ({"attention_mask": torch.ones(3, 4)}, "attention_mask: expected 5 numbers"),
        ({"sequences": torch.ones(3, 5)}, "sequences: expected a list of token ids"),
        ({"bounds": ["first"]}, "cannot be read as data"),
    ],
)
def test_a_malformed_batch_ends_in_one_error(save, changed, message):
    with pytest.raises(DataError, match=message):
        open_dump(save(**changed))


def test_texts_of_an_evaluation_are_refused_with_the_setting_that_writes_ids(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text('{"input_prompt": "a", "output_response": "b", "score": 1.0}\n')
    with pytest.raises(DataError, match="which trainer"):
        open_dump(path)
