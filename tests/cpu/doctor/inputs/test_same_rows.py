"""The same dialogues, as each trainer lays them out, are the same rows: padded on this side or
that, shifted to targets, of the response alone or of the whole row."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.doctor.inputs.registry import open_dump

NUM_ROWS = 12


@dataclass
class Dialogue:
    ids: np.ndarray
    sampled: np.ndarray
    rollout: np.ndarray
    """0.0 where nothing was sampled, as all of these trainers fill it."""
    trainer: np.ndarray

    @property
    def prompt(self) -> int:
        return int(self.sampled.argmax())


@pytest.fixture(scope="module")
def dialogues() -> list[Dialogue]:
    """Of two or three turns; tokens that were certain (0.0) and tokens equal to the padding."""
    random = np.random.default_rng(0)
    out = []
    for _ in range(NUM_ROWS):
        lengths = random.integers(1, 9, 2 * random.integers(2, 4))
        sampled = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
        size = len(sampled)
        rollout = np.where(sampled, -random.random(size), 0.0).astype(np.float32)
        rollout[sampled & (random.random(size) < 0.2)] = 0.0
        trainer = (rollout - 0.1 * random.random(size)).astype(np.float32)
        out.append(Dialogue(random.integers(0, 9, size), sampled, rollout, trainer))
    return out


def slime(dialogues: list[Dialogue], folder: Path) -> None:
    samples = [
        {
            "tokens": torch.tensor(d.ids),
            "response_lengths": len(d.ids) - d.prompt,
            "loss_masks": torch.tensor(d.sampled[d.prompt :]).int(),
            "rollout_log_probs": torch.tensor(d.rollout[d.prompt :]),
            "log_probs": torch.tensor(d.trainer[d.prompt :]),
        }
        for d in dialogues
    ]
    torch.save({"format_version": 2, "rollout_id": 1, "samples": samples}, folder / "1.pt")


def padded(dialogues: list[Dialogue]) -> dict[str, torch.Tensor]:
    """Prompts on the left, responses on the right."""
    left = max(d.prompt for d in dialogues)
    right = max(len(d.ids) - d.prompt for d in dialogues)
    out = {
        "prompts": torch.zeros(NUM_ROWS, left, dtype=torch.int64),
        "prompt_mask": torch.zeros(NUM_ROWS, left, dtype=torch.int64),
        "responses": torch.zeros(NUM_ROWS, right, dtype=torch.int64),
        "kept": torch.zeros(NUM_ROWS, right, dtype=torch.int64),
        "sampled": torch.zeros(NUM_ROWS, right, dtype=torch.int64),
        "rollout": torch.zeros(NUM_ROWS, right),
        "trainer": torch.zeros(NUM_ROWS, right),
    }
    for i, d in enumerate(dialogues):
        size = len(d.ids) - d.prompt
        out["prompts"][i, left - d.prompt :] = torch.tensor(d.ids[: d.prompt])
        out["prompt_mask"][i, left - d.prompt :] = 1
        out["responses"][i, :size] = torch.tensor(d.ids[d.prompt :])
        out["kept"][i, :size] = 1
        out["sampled"][i, :size] = torch.tensor(d.sampled[d.prompt :])
        out["rollout"][i, :size] = torch.tensor(d.rollout[d.prompt :])
        out["trainer"][i, :size] = torch.tensor(d.trainer[d.prompt :])
    return out


def verl(dialogues: list[Dialogue], folder: Path) -> None:
    batch = padded(dialogues)
    tensors = {
        "prompts": batch["prompts"],
        "responses": batch["responses"],
        "attention_mask": torch.cat([batch["prompt_mask"], batch["kept"]], 1),
        "response_mask": batch["sampled"],
        "rollout_log_probs": batch["rollout"],
        "old_log_probs": batch["trainer"],
    }
    torch.save({"tensordict": tensors, "global_steps": 1}, folder / "tq_batch.pt")


def trl(dialogues: list[Dialogue], folder: Path) -> None:
    batch = padded(dialogues)
    tensors = {
        "prompt_ids": batch["prompts"],
        "prompt_mask": batch["prompt_mask"],
        "completion_ids": batch["responses"],
        "completion_mask": batch["kept"],
        "tool_mask": torch.where(batch["kept"] == 1, batch["sampled"], 1),
        "sampling_per_token_logps": batch["rollout"],
        "old_per_token_logps": batch["trainer"],
    }
    torch.save(tensors, folder / "1.pt")


def areal(dialogues: list[Dialogue], folder: Path) -> None:
    """prox_logp is of the token after, and padding is on the right."""

    def tensors(d: Dialogue) -> dict[str, torch.Tensor]:
        columns = {
            "input_ids": d.ids,
            "attention_mask": np.ones(len(d.ids), int),
            "loss_mask": d.sampled.astype(int),
            "logprobs": d.rollout,
            "prox_logp": np.append(d.trainer[1:], np.float32(-9)),
        }
        return {name: torch.tensor(np.append(v, [0, 0])[None]) for name, v in columns.items()}

    torch.save({"version": 1, "batch": [tensors(d) for d in dialogues]}, folder / "1.pt")


def lines(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def prime_rl(dialogues: list[Dialogue], folder: Path) -> None:
    rows = [
        {
            "token_ids": d.ids.tolist(), "loss_mask": d.sampled.tolist(), "export_step": 1,
            "inference_logprobs": d.rollout.tolist(), "trainer_logprobs": d.trainer.tolist(),
        }
        for d in dialogues
    ]  # fmt: skip
    lines(folder, "rank_0.jsonl", rows)


def nemo_rl(dialogues: list[Dialogue], folder: Path) -> None:
    rows = [
        {
            "token_ids": [[*d.ids.tolist(), 0, 0]], "input_lengths": [len(d.ids)],
            "token_loss_mask": [[*d.sampled.astype(int).tolist(), 0, 0]],
            "generation_logprobs": [[*d.rollout.tolist(), 0.0, 0.0]],
            "prev_logprobs": [[*d.trainer.tolist(), 0.0, 0.0]],
        }
        for d in dialogues
    ]  # fmt: skip
    lines(folder, "train_data_step1.jsonl", rows)


def tinker(dialogues: list[Dialogue], folder: Path) -> None:
    rows = [
        {
            "model_input": d.ids[:-1].tolist(), "target_tokens": d.ids[1:].tolist(),
            "mask": d.sampled[1:].astype(float).tolist(), "logprobs": d.rollout[1:].tolist(),
            "training_logprobs": d.trainer[1:].tolist(),
        }
        for d in dialogues
    ]  # fmt: skip
    lines(folder, "datums_000001.jsonl", rows)


@pytest.mark.parametrize("write", [slime, verl, trl, areal, prime_rl, nemo_rl, tinker])
def test_the_same_dialogues_are_the_same_rows_in_every_trainers_format(tmp_path, dialogues, write):
    write(dialogues, tmp_path)
    dump = open_dump(tmp_path)
    assert dump.facts.trainer == write.__name__.replace("_", "-")
    [rows] = dump.chunks()
    assert rows.sizes.tolist() == [len(d.ids) for d in dialogues]
    assert rows.token_ids.tolist() == [i for d in dialogues for i in d.ids.tolist()]
    sampled = np.concatenate([d.sampled for d in dialogues])
    assert rows.loss_mask.tolist() == sampled.tolist()
    for read, expected in (
        (rows.rollout_logprobs, np.concatenate([d.rollout for d in dialogues])),
        (rows.trainer_logprobs, np.concatenate([d.trainer for d in dialogues])),
    ):
        assert read is not None
        assert np.array_equal(read[sampled], expected[sampled])
    assert rows.rollout_logprobs is not None and np.isnan(rows.rollout_logprobs[~sampled]).all()
