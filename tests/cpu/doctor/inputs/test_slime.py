"""slime's and miles' debug files, in the structure in which their code of November 2026 writes
them: `torch.save` of `{"rollout_id", "samples": [Sample.to_dict(), ...]}` for rollouts (slime
observability/rollout_data_utils.py, miles ray/rollout/debug_data.py), and for training batches of
`{"format_version": 2, "samples", "dp_shards", "raw_reward"}` (slime observability/
train_data_utils.py) or of one rank's `{"rollout_id", "rank", "rollout_data"}` (miles
utils/train_dump_utils.py). The packages are not on PyPI, so that the files are written here.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.inputs.trainers import SlimeDump
from lockstep.errors import DataError


def sample(index: int, **changed: Any) -> dict[str, Any]:
    """`Sample.to_dict()`: two prompt ids, a turn of two, a tool's reply of two, a turn of one."""
    return {
        "group_index": index // 2,
        "index": index,
        "prompt": "What is 2 + 2?",
        "tokens": [5, 6, 10, 11, 20, 21, 12],
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "response": "a tool says b",
        "response_length": 5,
        "label": "4",
        "reward": 0.5,
        "loss_mask": [1, 1, 0, 0, 1],
        "weight_versions": ["3", "4"],
        "rollout_log_probs": [-0.5, 0.0, 0.0, 0.0, -0.25],
        "rollout_routed_experts": None,
        "remove_sample": False,
        "teacher_log_probs": None,
        "status": "completed",
        "metadata": {"round": 1},
        "generate_function_path": None,
        "train_metadata": None,
        "session_id": None,
        "non_generation_time": 0.0,
        "spec_info": {"spec_accept_token_num": 0},
        "prefix_cache_info": {"cached_tokens": 0},
    } | changed


def save(path: Path, *samples: dict[str, Any], **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": 7, "samples": list(samples)} | more, path)
    return path


def only(dump):
    [rows] = dump.chunks()
    return rows


def test_a_rollout_is_read_with_its_log_probs_where_they_belong(tmp_path):
    dump = open_dump(save(tmp_path / "rollout_7.pt", sample(0), sample(1)))
    assert isinstance(dump, SlimeDump) and dump.facts.trainer == "slime"
    rows = only(dump)
    assert rows.row_ids == ("7/0", "7/1")
    assert rows.sizes.tolist() == [7, 7]
    assert rows.token_ids[:7].tolist() == [5, 6, 10, 11, 20, 21, 12]
    assert rows.loss_mask[:7].tolist() == [False, False, True, True, False, False, True]
    nan = np.nan
    expected = [nan, nan, -0.5, 0.0, nan, nan, -0.25]
    assert np.array_equal(rows.rollout_logprobs[:7], np.float32(expected), equal_nan=True)
    assert rows.policy_version[:7].tolist() == [-1, -1, 3, 3, -1, -1, 4]
    assert rows.prompt_lengths.tolist() == [2, 2] and rows.rewards.tolist() == [0.5, 0.5]
    assert rows.groups.tolist() == [0, 0] and rows.steps.tolist() == [7, 7]
    assert rows.texts == ("a tool says b",) * 2


def test_what_it_has_is_what_its_rows_have_and_the_rest_is_said(tmp_path):
    dump = SlimeDump(save(tmp_path / "7.pt", sample(0, rollout_log_probs=None)))
    rows = only(dump)
    assert all(getattr(rows, name) is not None for name in dump.has)
    assert rows.rollout_logprobs is None
    assert "--save-debug-train-data" in dump.lacks["trainer_logprobs"]
    assert "meta_info.output_token_logprobs" in dump.lacks["rollout_logprobs"]
    assert not dump.lacks.keys() & dump.has


def test_without_a_mask_the_whole_response_is_trained_and_removed_samples_are_not(tmp_path):
    whole = sample(0, loss_mask=None, weight_versions=["3"])
    path = save(tmp_path / "7.pt", whole, sample(1, remove_sample=True))
    rows = only(SlimeDump(path))
    assert rows.loss_mask.tolist() == [False] * 2 + [True] * 5 + [False] * 7
    assert rows.rollout_logprobs[2] == -0.5


def test_versions_that_no_turn_can_be_given_are_not_guessed(tmp_path):
    path = save(tmp_path / "7.pt", sample(0, weight_versions=["3", "4", "5"]), sample(1))
    assert only(SlimeDump(path)).policy_version.tolist() == [-1] * 9 + [3, 3, -1, -1, 4]
    path = save(tmp_path / "8.pt", sample(0, weight_versions=["default"]))
    assert "policy_version" in SlimeDump(path).lacks


def test_a_response_longer_than_its_row_is_kept_as_a_negative_boundary(tmp_path):
    path = save(
        tmp_path / "7.pt",
        sample(0, tokens=[10, 11, 12], loss_mask=[1] * 5, rollout_log_probs=[-5, -4, -3, -2, -1]),
    )
    rows = only(SlimeDump(path))
    assert rows.prompt_lengths.tolist() == [-2]
    assert rows.rollout_logprobs.tolist() == [-3, -2, -1] and rows.loss_mask.all()


def test_lengths_that_contradict_each_other_are_named_with_the_sample(tmp_path):
    path = save(tmp_path / "7.pt", sample(0), sample(1, rollout_log_probs=[-0.5] * 4))
    with pytest.raises(DataError, match=r"sample 1: rollout_log_probs.*\b5\b.*\b4\b"):
        SlimeDump(path)


def test_routed_experts_are_read_for_all_positions_but_the_last(tmp_path):
    routes = np.arange(6 * 2 * 2, dtype=np.int32).reshape(6, 2, 2)
    dump = SlimeDump(save(tmp_path / "7.pt", sample(0, rollout_routed_experts=routes), sample(1)))
    rows = only(dump)
    assert dump.facts.is_moe and rows.routed_experts.shape == (14, 2, 2)
    assert np.array_equal(rows.routed_experts[:6], routes)
    assert (rows.routed_experts[6:] == -1).all()


def train_sample(position: int, **changed: Any) -> dict[str, Any]:
    """One of a training batch: the same names in the plural, tensors in place of lists."""
    return {
        "data_parallel_rank": 0,
        "rollout_position": position,
        "tokens": torch.tensor([5, 6, 10, 11, 20, 21, 12]),
        "response_lengths": 5,
        "total_lengths": 7,
        "loss_masks": torch.tensor([1, 1, 0, 0, 1], dtype=torch.int32),
        "rollout_log_probs": torch.tensor([-0.5, -0.1, 0.0, 0.0, -0.25]),
        "log_probs": torch.tensor([-0.4, -0.1, -9.0, -9.0, -0.5], dtype=torch.bfloat16),
        "advantages": torch.full((5,), 0.75),
        "rewards": 0.7,
    } | changed


def test_a_training_batch_gives_both_sides_and_is_preferred(tmp_path):
    save(tmp_path / "rollout_data" / "7.pt", sample(0))
    save(
        tmp_path / "train_data" / "7.pt", train_sample(0), train_sample(1),
        format_version=2, rank=0, dp_shards=[], raw_reward=[1.0, 0.0],
    )  # fmt: skip
    rows = only(open_dump(tmp_path))
    assert rows.row_ids == ("7/0", "7/1") and rows.rewards.tolist() == [1.0, 0.0]
    gap = rows.gap[:7]
    assert np.isnan(gap[[0, 1, 4, 5]]).all()
    assert gap[[3, 6]] == pytest.approx([0.0, -0.25], abs=1e-3)
    assert rows.advantages[2:7].tolist() == [0.75] * 5


def test_shares_of_ranks_are_put_together_and_counted_once(tmp_path):
    """Of four ranks: two tensor-parallel of two data-parallel; one pipeline stage without the
    trainer's log-probs."""
    for rank in range(4):
        positions = range(rank % 2, 4, 2)
        samples = [train_sample(p) for p in positions]
        shard = {
            name: [s[name] for s in samples]
            for name in samples[0]
            if name not in ("rollout_position", "data_parallel_rank")
        } | {"partition": positions, "raw_reward": [0.0, 1.0, 2.0, 3.0]}
        if rank < 2:
            del shard["log_probs"]
        saved = {"rollout_id": 7, "rank": rank, "rollout_data": shard}
        torch.save(saved, tmp_path / f"7_{rank}.pt")
    rows = only(SlimeDump(tmp_path))
    assert sorted(rows.row_ids) == ["7/0", "7/1", "7/2", "7/3"]
    assert dict(zip(rows.row_ids, rows.rewards, strict=True))["7/3"] == 3.0
    assert np.isfinite(rows.gap).sum() == 12


def test_files_of_a_directory_come_in_order_and_evaluations_are_left_out(tmp_path):
    for rollout in (10, 9, 2):
        save(tmp_path / f"{rollout}.pt", sample(0), rollout_id=rollout)
    save(tmp_path / "eval_2.pt", sample(0))
    dump = open_dump(tmp_path)
    assert [rows.steps.tolist() for rows in dump.chunks(max_tokens=7)] == [[2], [9], [10]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state": torch.zeros(2)}, "`samples`.*--format verl"),
        ([1, 2], "`samples`"),
        ({"rollout_id": 1, "samples": []}, "no row of the format slime"),
        ({"samples": [{"text": "a"}]}, r"sample 0\b.*`tokens`"),
        ({"samples": [sample(0, tokens=["a"])]}, r"sample 0\b"),
        ({"samples": [sample(0, tokens=[1 << 40] * 7)]}, "32"),
        ({"samples": [sample(0, response_length=None)]}, "response_length"),
        ({"samples": [sample(0, loss_mask="11001")]}, r"loss_mask.*\b5\b.*'11001'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, content, message):
    path = tmp_path / "7.pt"
    torch.save(content, path)
    with pytest.raises(DataError, match=message):
        open_dump(path)
