"""The doctor's reader of SkyRL's dumps, on a file that SkyRL's own code wrote.

Its two modules are loaded alone: the packages around them import all of the training system.
pip install --no-deps skyrl==0.3.0 jaxtyping wadler-lindig
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.inputs.trainers import SkyRlDump

VERSION = "0.3.0"


def load(monkeypatch, root: Path, name: str) -> ModuleType:
    parts = name.split(".")
    for end in range(1, len(parts)):
        package = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    path = root.joinpath(*parts[1:]).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def dump(tmp_path, monkeypatch):
    """A batch of two rows in the path that `dump_data` writes."""
    found = importlib.util.find_spec("skyrl")
    if found is None or importlib.util.find_spec("jaxtyping") is None:
        pytest.skip(f"pip install --no-deps skyrl=={VERSION} jaxtyping wadler-lindig")
    assert found.origin is not None
    root = Path(found.origin).parent
    batches = load(monkeypatch, root, "skyrl.backends.skyrl_train.training_batch")
    preprocess = load(monkeypatch, root, "skyrl.train.dataset.preprocess")
    sequences, attention, response, _, loss, logprobs, _ = (
        preprocess.convert_prompts_responses_to_batch_tensors(
            SimpleNamespace(pad_token_id=0),
            prompts=[[5, 6], [5, 6, 7]],
            responses=[[10, 20, 11], [12]],
            rewards=[[0.0, 0.0, 1.0], [0.0]],
            loss_masks=[[1, 0, 1], [1]],
            logprobs=[[-0.5, 0.0, -0.25], [-1.0]],
        )
    )
    columns = {"sequences": sequences, "attention_mask": attention, "response_mask": response}
    columns |= {"loss_mask": loss, "rollout_logprobs": logprobs, "values": None}
    batch = batches.TrainingInputBatch(columns | {"action_log_probs": (logprobs - 0.25).bfloat16()})
    batch.metadata = {"policy_prompt_boundaries": [(0, 1), (1, 2)], "response_length": 3}
    batch = batches.pad_training_input_batch(batch, 2)
    (tmp_path / "dumped_data").mkdir()
    batch.save(tmp_path / "dumped_data" / "global_step_7_training_input.pkl")
    return open_dump(tmp_path)


def test_a_dumped_batch_is_read(dump):
    assert isinstance(dump, SkyRlDump)
    [rows] = dump.chunks()
    assert rows.token_ids.tolist() == [5, 6, 10, 20, 11, 5, 6, 7, 12]
    assert np.flatnonzero(rows.loss_mask).tolist() == [2, 4, 8]
    assert rows.rollout_logprobs[[2, 4, 8]].tolist() == [-0.5, -0.25, -1.0]
    assert rows.trainer_logprobs[[2, 4, 8]].tolist() == [-0.75, -0.5, -1.25]
    assert rows.groups.tolist() == [0, 1] and rows.steps.tolist() == [7, 7]
