"""The doctor's readers of tinker-cookbook's files, on what its own functions made.

pip install tinker-cookbook (no account is needed: nothing is sampled)
"""

import importlib.util
import json

import numpy as np
import pytest

from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.inputs.trainers import TinkerDump

if any(importlib.util.find_spec(name) is None for name in ("tinker", "tinker_cookbook")):
    pytest.skip("pip install tinker-cookbook", allow_module_level=True)
try:
    import tinker
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.data_processing import trajectory_to_data
    from tinker_cookbook.rl.types import Trajectory, Transition
except ImportError as error:
    pytest.skip(f"tinker-cookbook needs what is not installed: {error}", allow_module_level=True)


def transition(prompt: list[int], reply: list[int], logprobs: list[float], *, is_last: bool):
    return Transition(
        ob=tinker.ModelInput.from_ints(prompt),
        ac=TokensWithLogprobs(tokens=reply, maybe_logprobs=logprobs),
        reward=float(is_last),
        episode_done=is_last,
    )


@pytest.fixture
def trajectory():
    """A turn, a tool's reply, a turn; then one whose prompt was rendered anew."""
    return Trajectory(
        transitions=[
            transition([5, 6], [10, 11], [-0.5, 0.0], is_last=False),
            transition([5, 6, 10, 11, 20], [12], [-1.0], is_last=False),
            transition([5, 6, 10, 20], [13, 14], [-0.25, -0.75], is_last=True),
        ],
        final_ob=tinker.ModelInput.from_ints([5, 6, 10, 20, 13, 14]),
    )


def test_datums_of_a_trajectory_are_read_token_by_token(tmp_path, trajectory):
    with open(tmp_path / "datums_000003.jsonl", "w") as file:
        for datum in trajectory_to_data(trajectory, 0.5):  # as docs/doctor-dumps.md says it
            line = {name: value.tolist() for name, value in datum.loss_fn_inputs.items()}
            line["model_input"] = datum.model_input.to_ints()
            line["training_logprobs"] = [x - 0.125 for x in line["logprobs"]]
            file.write(json.dumps(line) + "\n")
    dump = open_dump(tmp_path)
    assert isinstance(dump, TinkerDump)
    [rows] = dump.chunks()
    assert rows.token_ids.tolist() == [5, 6, 10, 11, 20, 12, 5, 6, 10, 20, 13, 14]
    trained = [0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1]
    assert rows.loss_mask.tolist() == [bool(at) for at in trained]
    nan = np.nan
    expected = [nan, nan, -0.5, 0.0, nan, -1.0, nan, nan, nan, nan, -0.25, -0.75]
    assert np.array_equal(rows.rollout_logprobs, np.float32(expected), equal_nan=True)
    assert set(rows.gap[rows.loss_mask].tolist()) == {-0.125}
    assert set(rows.advantages[rows.loss_mask].tolist()) == {0.5}
