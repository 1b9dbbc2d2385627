"""The doctor with a model that transformers computes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.diagnose import diagnose
from lockstep.doctor.inputs.base import Dump, Facts

transformers = pytest.importorskip("transformers", reason="it computes the model")
NUM_ROWS, SIZE, PROMPT = 40, 48, 8


class ArrayDump(Dump):
    format = "arrays"
    facts = Facts()
    has = frozenset({"rollout_logprobs", "trainer_logprobs"})

    def __init__(self, rows):
        super().__init__(Path("arrays"))
        self._rows = rows

    @classmethod
    def recognises(cls, path):
        return False

    def chunks(self, *, max_tokens=0):
        yield self._rows


def test_a_model_of_another_architecture_is_scored_and_its_noise_is_named(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, 64, (NUM_ROWS, SIZE))
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])
    values = np.full((NUM_ROWS, SIZE), np.nan, np.float32)
    values[:, 1:] = logprobs[..., 0].numpy()
    rows = Rows(
        row_ids=tuple(map(str, range(NUM_ROWS))),
        offsets=np.arange(NUM_ROWS + 1) * SIZE,
        token_ids=ids.numpy().ravel().astype(np.int32),
        loss_mask=np.tile(np.arange(SIZE) >= PROMPT, NUM_ROWS),
        rollout_logprobs=values.ravel(),
        trainer_logprobs=values.ravel(),
    )
    healthy = diagnose(ArrayDump(rows), model=tmp_path)
    assert not healthy.causes
    verdicts = {f.check: f.verdict for f in healthy.examination.findings}
    assert verdicts["numerics/other_weights"] == "consistent"
    assert verdicts["numerics/ignored_window"] == "not_checkable"
    draws = np.random.default_rng(0).standard_normal(rows.num_tokens)
    noisy = np.minimum(values.ravel() + 0.3 * draws, -1e-6).astype(np.float32)
    found = diagnose(ArrayDump(rows.with_(rollout_logprobs=noisy)), model=tmp_path)
    assert [cause.name for cause, _ in found.causes] == ["kernel_noise"]
