"""The doctor with a model that transformers computes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.doctor.diagnose import diagnose
from lockstep.doctor.inputs.base import Dump, Facts
from lockstep.doctor.rows import Rows

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


SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": 2,
}  # fmt: skip


def gemma3():
    config = transformers.Gemma3TextConfig(
        **SHAPE, sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config), {"sliding_window": 200}, "ignored_window"


def phi3():
    settings = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    parameters = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24,
        "short_factor": [1.0] * 8, "long_factor": [1.0, 1.5, 2, 3, 4, 6, 8, 12],
    }  # fmt: skip
    config = transformers.Phi3Config(
        **settings, rope_parameters=parameters, original_max_position_embeddings=24
    )
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    return transformers.Phi3ForCausalLM(config), {"rope_parameters": plain}, "ignored_rope_scaling"


def olmo2():
    settings = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    parameters = {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}
    config = transformers.Olmo2Config(**settings, rope_parameters=parameters)
    changed = {"rope_parameters": {**parameters, "rope_theta": 10000.0}}
    return transformers.Olmo2ForCausalLM(config), changed, "ignored_rope_scaling"


def scored(model, ids, **inputs):
    with torch.no_grad():
        logits = model(ids, attention_mask=torch.ones_like(ids), **inputs).logits
    out = np.full(ids.shape, np.nan, np.float32)
    chosen = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])
    out[:, 1:] = chosen[..., 0].numpy()
    return out


def dump_of(ids, rollout, trainer):
    return ArrayDump(
        Rows(
            row_ids=tuple(map(str, range(len(ids)))),
            offsets=np.arange(len(ids) + 1) * ids.shape[1],
            token_ids=ids.numpy().ravel().astype(np.int32),
            loss_mask=np.tile(np.arange(ids.shape[1]) >= PROMPT, len(ids)),
            rollout_logprobs=rollout.ravel(),
            trainer_logprobs=trainer.ravel(),
        )
    )


@pytest.mark.parametrize("make", [gemma3, phi3, olmo2])
def test_a_defect_of_another_architecture_is_named(make, tmp_path):
    torch.manual_seed(0)
    model, changed, cause = make()
    model.eval().save_pretrained(tmp_path)
    ids = torch.randint(3, 64, (NUM_ROWS, SIZE))
    plain = scored(model, ids)
    assert not diagnose(dump_of(ids, plain, plain), model=tmp_path).causes
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    for name, value in changed.items():
        setattr(config, name, value)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config).eval()
    positions = torch.arange(SIZE) + (torch.arange(SIZE) >= PROMPT)
    values = {
        cause: scored(other, ids),
        "wrong_positions": scored(model, ids, position_ids=positions.expand(NUM_ROWS, -1)),
    }
    for of in model.modules():
        if isinstance(of, torch.nn.Linear) and of is not model.get_output_embeddings():
            scale = of.weight.data.abs().amax(1, keepdim=True) / 448
            of.weight.data = (of.weight.data / scale).to(torch.float8_e4m3fn).float() * scale
    values["quantised_rollout"] = scored(model, ids)
    for name, side in values.items():
        found = diagnose(dump_of(ids, side, plain), model=tmp_path)
        assert [one.name for one, _ in found.causes] == [name]


def test_a_model_of_another_architecture_is_scored_and_its_noise_is_named(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, 64, (NUM_ROWS // 2, SIZE)).repeat(
        2, 1
    )  # noise is seen where rows repeat
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
    assert verdicts["hypotheses/rest"] == "not_shown", "the sides are equal"
    assert verdicts["hypotheses/arithmetic"] == "not_shown"
    draws = np.random.default_rng(0).standard_normal(rows.num_tokens)
    noisy = np.minimum(values.ravel() + 0.3 * draws, -1e-6).astype(np.float32)
    found = diagnose(ArrayDump(rows.with_(rollout_logprobs=noisy)), model=tmp_path)
    assert [cause.name for cause, _ in found.causes] == ["kernel_noise"]
    apart = rows.with_(rollout_logprobs=noisy).take(range(NUM_ROWS // 2))
    assert not diagnose(ArrayDump(apart), model=tmp_path).causes, "other weights may do the same"
