"""The doctor's reader of verl's dumps, on files that verl's own code wrote.

`_write_generations` is taken out of the installed wheel's source, whose module needs all of verl's
training system to be imported. Batches need verl's `DataProto` itself:
pip install --no-deps verl tensordict orjson pyvers omegaconf antlr4-python3-runtime==4.9.3
"""

import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.inputs.trainers import VerlDump

VERSION = "0.9.1"


@pytest.fixture
def proto(monkeypatch):
    """A batch as verl's agent loop makes one: two rows, padded on both sides."""
    if importlib.util.find_spec("verl") is None or importlib.util.find_spec("tensordict") is None:
        pytest.skip(f"pip install --no-deps verl=={VERSION} tensordict orjson pyvers omegaconf")
    protocol = pytest.importorskip("verl.protocol")
    prompts = torch.tensor([[0, 5, 6], [5, 6, 7]])
    responses = torch.tensor([[10, 20, 11, 0], [12, 0, 0, 0]])
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0]]),
        "response_mask": torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0]]),
        "rollout_log_probs": torch.tensor([[-0.5, 0.0, -0.25, 0.0], [-1.0, 0.0, 0.0, 0.0]]),
        "old_log_probs": torch.tensor([[-0.75, -9.0, -0.25, -9], [-1.0, -9, -9, -9]]).bfloat16(),
    }
    return protocol.DataProto.from_dict(
        tensors=tensors,
        non_tensors={"uid": np.array(["a", "b"], object)},
        meta_info={"temperature": 1.0, "global_steps": 7, "timing": {"gen": 0.5}},
    )


def test_a_saved_batch_is_read(tmp_path, proto):
    path = tmp_path / "batch.pkl"
    proto.save_to_disk(path)
    check(open_dump(path))


def test_the_directory_of_skipped_rollouts_is_read(tmp_path, proto):
    skip = pytest.importorskip("verl.utils.skip.rollout_skip")
    writer = object.__new__(skip.RolloutSkip)
    writer.dump_dir, writer.exp_name, writer.project_name = str(tmp_path), "experiment", "project"
    writer.gbs = writer.n = writer.prompt_length = writer.response_length = 4
    writer.prepare_data(7, proto)
    check(open_dump(tmp_path))


def test_the_directory_of_the_v1_trainer_is_read(tmp_path, proto, monkeypatch):
    skip = pytest.importorskip("verl.utils.skip.rollout_skip")
    tensordict = pytest.importorskip("tensordict")
    mask = proto.batch["attention_mask"].bool()
    parts = {"prompts": mask[:, :3]} | dict.fromkeys(
        ("responses", "response_mask", "rollout_log_probs", "old_log_probs"), mask[:, 3:]
    )
    nested = {
        name: torch.nested.as_nested_tensor(
            [row[kept] for row, kept in zip(proto.batch[name], part, strict=True)],
            layout=torch.jagged,
        )
        for name, part in parts.items()
    }
    queue = ModuleType("transfer_queue")  # a service; what it answers is a TensorDict
    queue.kv_batch_get = lambda **_: tensordict.TensorDict(
        nested | {"uid": tensordict.NonTensorStack("a", "b")}, batch_size=2
    )
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    writer = object.__new__(skip.RolloutTqSkip)
    writer.dump_dir, writer.exp_name, writer.project_name = str(tmp_path), "experiment", "project"
    writer.gbs = writer.n = writer.prompt_length = writer.response_length = 4
    writer.parameter_sync_step = 1
    batch = ModuleType("batch")
    batch.keys, batch.partition_id = ["a_0_0", "b_0_0"], "train"
    batch.tags = [{"min_global_steps": 6, "max_global_steps": 6}] * 2
    writer.prepare_data(7, batch, 7)
    dump = open_dump(tmp_path)
    check(dump)
    [rows] = dump.chunks()
    assert rows.policy_version[2] == 6 and rows.trainer_version.tolist() == [6, 6]


def check(dump) -> None:
    assert isinstance(dump, VerlDump)
    [rows] = dump.chunks()
    assert rows.token_ids.tolist() == [5, 6, 10, 20, 11, 5, 6, 7, 12]
    assert rows.loss_mask.tolist() == [False, False, True, False, True, False, False, False, True]
    nan = np.nan
    expected = [nan, nan, -0.25, nan, 0.0, nan, nan, nan, 0.0]
    assert np.array_equal(rows.gap, expected, equal_nan=True)
    assert rows.groups.tolist() == [0, 1] and rows.steps.tolist() == [7, 7]
