"""verl's files, in the structure in which verl 0.9.1 writes them. tests/parity/test_doctor_verl.py
has them written by verl itself."""

import io
import json
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.inputs.trainers import VerlDump
from lockstep.errors import DataError

nan = np.nan


class DataProto:
    """The state that verl pickles; its TensorDict is a dict here."""

    def __init__(self, tensors: dict, non_tensors: dict, meta: dict) -> None:
        self.state = tensors, non_tensors, meta

    def __getstate__(self) -> Any:
        tensors, non_tensors, meta = self.state
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        return buffer.getvalue(), non_tensors, meta


DataProto.__module__, DataProto.__qualname__ = "verl.protocol", "DataProto"


def batch() -> dict[str, torch.Tensor]:
    """Two rows: a prompt of two ids with a reply of four (a turn, a tool's reply, a turn), and a
    prompt of three with a reply of one."""
    prompts = torch.tensor([[0, 5, 6], [5, 6, 7]])
    responses = torch.tensor([[10, 20, 11, 0], [12, 0, 0, 0]])
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0]]),
        "response_mask": torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0]]),
        "rollout_log_probs": torch.tensor([[-0.5, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]]),
        "old_log_probs": torch.tensor([[-0.75, -9.0, -0.25, -9.0], [-1.0, -9.0, -9.0, -9.0]]),
        "advantages": torch.tensor([[1.0, 0.0, 1.0, 0.0], [-1.0, 0.0, 0.0, 0.0]]),
        "rm_scores": torch.tensor([[0.0, 0.0, 0.5, 0.0], [0.25, 0.0, 0.0, 0.0]]),
    }


def others(**changed: Any) -> dict[str, np.ndarray]:
    return {
        "uid": np.array(["a", "a"], object),
        "min_global_steps": np.array([6, None], object),
        "max_global_steps": np.array([6, None], object),
    } | changed


@pytest.fixture
def save(tmp_path, monkeypatch):
    module = ModuleType("verl.protocol")
    module.DataProto = DataProto
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    monkeypatch.setitem(sys.modules, "verl.protocol", module)

    def save(
        tensors: dict, *, non_tensors: dict | None = None, name: str = "a.dp", **meta: Any
    ) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        proto = DataProto(tensors, others() if non_tensors is None else non_tensors, meta)
        path.write_bytes(pickle.dumps(proto))
        return path

    return save


def only(dump):
    [rows] = dump.chunks()
    return rows


def check_batch(rows) -> None:
    assert rows.sizes.tolist() == [5, 4]
    assert rows.token_ids.tolist() == [5, 6, 10, 20, 11, 5, 6, 7, 12]
    assert rows.loss_mask.tolist() == [False, False, True, False, True, False, False, False, True]
    assert rows.prompt_lengths.tolist() == [2, 3]
    expected = np.float32([nan, nan, -0.5, nan, 0.0, nan, nan, nan, -1.0])
    assert np.array_equal(rows.rollout_logprobs, expected, equal_nan=True)
    assert rows.groups.tolist() == [0, 0] and rows.rewards.tolist() == [0.5, 0.25]


def test_padding_on_both_sides_is_left_out_and_log_probs_stay_at_their_tokens(save):
    dump = open_dump(save(batch(), global_steps=7, temperature=0.7, pad_token_id=0, eos_token_id=9))
    assert isinstance(dump, VerlDump) and dump.facts.trainer == "verl"
    assert (dump.facts.temperature, dump.facts.pad_id, dump.facts.stop_ids) == (0.7, 0, {9})
    rows = only(dump)
    check_batch(rows)
    expected = [nan, nan, -0.25, nan, -0.25, nan, nan, nan, 0.0]
    assert np.array_equal(rows.gap, expected, equal_nan=True)
    assert rows.advantages[[2, 4, 8]].tolist() == [1.0, 1.0, -1.0]
    assert rows.row_ids == ("7/0", "7/1") and rows.steps.tolist() == [7, 7]
    assert rows.policy_version.tolist() == [-1, -1, 6, -1, 6, -1, -1, -1, -1]
    assert rows.trainer_version.tolist() == [6, -1]
    assert all(getattr(rows, name) is not None for name in dump.has)
    assert not dump.has & dump.lacks.keys()


def test_a_directory_of_steps_is_read_in_their_order(save, tmp_path):
    for step in (10, 9):
        path = save(batch(), name=f"exp/GBS2_N1_in3_out4/{step}/gen_batch.dp")
        path.with_name("meta.json").write_text(json.dumps({"global_steps": step}))
    dump = open_dump(tmp_path)
    assert [r.steps.tolist() for r in dump.chunks(max_tokens=9)] == [[9, 9], [10, 10]]


def test_batches_that_were_saved_by_hand_are_read_in_the_order_of_their_names(save, tmp_path):
    for step in (10, 9):
        save(batch(), name=f"{step}.dp", global_steps=step)
    dump = open_dump(tmp_path)
    assert isinstance(dump, VerlDump)
    assert [r.steps.tolist() for r in dump.chunks(max_tokens=9)] == [[9, 9], [10, 10]]


def test_a_batch_of_the_v1_trainer_is_read_from_its_nested_tensors(tmp_path):
    padded = batch()
    lengths = {"prompts": ([1, 0], [3, 3]), "responses": ([0, 0], [3, 1])}
    tensors = {
        name: [
            padded[name][i, begin:end]
            for i, (begin, end) in enumerate(
                zip(*lengths["prompts" if name == "prompts" else "responses"], strict=True)
            )
        ]
        for name in ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores")
    }
    for values in tensors.values():
        values.append(values[0])  # a row that fills the batch
    saved = {
        "tensordict": {
            name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
            for name, values in tensors.items()
        },
        "tags": [{"min_global_steps": 6, "max_global_steps": 6}] * 2 + [{"is_padding": True}],
        "keys": ["u-1_0_0", "u-1_1_0", "padding"],
        "global_steps": 7,
    }
    path = tmp_path / "7" / "0" / "tq_batch.pt"
    path.parent.mkdir(parents=True)
    torch.save(saved, path)
    dump = open_dump(tmp_path)
    assert isinstance(dump, VerlDump)
    rows = only(dump)
    check_batch(rows)
    assert rows.trainer_version.tolist() == [6, 6]
    assert "save_to_disk" in dump.lacks["trainer_logprobs"]


def test_tensors_in_a_plain_dict_are_known_by_their_names(tmp_path):
    torch.save(batch(), path := tmp_path / "batch.pt")
    assert isinstance(dump := open_dump(path), VerlDump)
    assert only(dump).gap[[2, 4]].tolist() == [-0.25, -0.25]


def test_images_of_rows_are_not_read(save):
    images = np.array([{"pixel_values": torch.zeros(2, 3)}, {}], object)
    dump = open_dump(save(batch(), non_tensors=others(multi_modal_inputs=images)))
    assert only(dump).token_ids.tolist() == only(open_dump(save(batch()))).token_ids.tolist()
    apart = np.array([None, None], object)
    apart[0] = torch.zeros(4)
    given = {name: tensor for name, tensor in batch().items() if name != "rollout_log_probs"}
    with pytest.raises(DataError, match="rollout_log_probs"):  # one that is needed is not lost
        open_dump(save(given, non_tensors=others(rollout_log_probs=apart)))


def test_settings_that_are_no_numbers_are_left_out(save):
    dump = VerlDump(save(batch(), global_steps="7", temperature=1 << 2000, eos_token_id=[9, "a"]))
    assert dump.facts.temperature is None and dump.facts.stop_ids == {9}
    assert "steps" not in dump.has


def test_zeros_that_stand_for_no_experts_are_not_taken_for_expert_zero(save):
    routes = torch.zeros(2, 7, 2, 2, dtype=torch.int16)
    routes[0, 1:4] = torch.tensor([[0, 1], [2, 3]], dtype=torch.int16)
    dump = VerlDump(save(batch() | {"routed_experts": routes}))
    rows = only(dump)
    assert dump.facts.is_moe
    assert rows.routed_experts[:3].tolist() == [[[0, 1], [2, 3]]] * 3
    assert (rows.routed_experts[3:] == -1).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"responses": None}, "`prompts`.*`responses`"),
        ({"attention_mask": None}, r"row 0\b.*attention_mask"),
        ({"attention_mask": torch.ones(2, 6)}, r"row 0: attention_mask.*\b7\b.*\b6\b"),
        ({"rollout_log_probs": torch.zeros(2, 3)}, r"row 0: rollout_log_probs.*\b4\b.*\b3\b"),
        ({"advantages": torch.zeros(1, 4)}, r"row 1\b.*\b4\b.*\b0 x 4"),
        ({"responses": torch.zeros(2)}, "`prompts`.*`responses`"),
        ({"old_log_probs": torch.zeros(2, 4, 1)}, r"row 0: old_log_probs.*\b4\b.*\b4 x 1"),
        ({"prompts": torch.zeros(2, 3)}, "prompts: "),
        ({"responses": torch.zeros(0, 4, dtype=torch.int64)}, "no row of the format verl"),
    ],
)
def test_what_contradicts_itself_is_named_with_its_row(save, changed, message):
    tensors = {n: t for n, t in (batch() | changed).items() if t is not None}
    with pytest.raises(DataError, match=message):
        only(open_dump(save(tensors)))


def test_the_newest_batch_is_left_out_if_it_is_cut_off(save, tmp_path):
    for step in (10, 9):
        save(batch(), name=f"exp/{step}/gen_batch.dp")
    newest = tmp_path / "exp/10/gen_batch.dp"
    newest.write_bytes(newest.read_bytes()[:-9])
    dump = open_dump(tmp_path)
    assert only(dump).steps.tolist() == [9, 9]
    [note] = dump.notes
    assert note.startswith(f"{newest} (") and "is left out: its end is missing" in note


def test_another_pickle_is_not_taken_for_a_batch(tmp_path):
    path = tmp_path / "gen_batch.dp"
    path.write_bytes(pickle.dumps({"prompts": [1]}))
    with pytest.raises(DataError, match="not a batch of verl"):
        open_dump(path)
