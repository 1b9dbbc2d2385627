"""Tiny decoders, critics and random rows for the tests of training."""

import json

import numpy as np
import torch

from lockstep.models.config import ModelConfig
from lockstep.models.critic import ValueModel
from lockstep.models.decoder import Decoder
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.training.config import CriticConfig, TrainerConfig
from lockstep.training.critic import Critic
from lockstep.training.trainer import Trainer
from lockstep.types import Sample

VOCAB = 61
_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "rope_theta": 1e4,
}  # fmt: skip
HF_CONFIGS = {
    "qwen3": {**_COMMON, "model_type": "qwen3", "intermediate_size": 48},
    "gpt_oss": {
        **_COMMON, "model_type": "gpt_oss", "intermediate_size": 24, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 8, "rope_scaling": {"rope_type": "default"},
        "layer_types": ["full_attention", "sliding_attention"],
    },
}  # fmt: skip
KINDS = tuple(HF_CONFIGS)
HF_CONFIGS |= {
    "qwen3_next": {
        **_COMMON, "model_type": "qwen3_next", "intermediate_size": 48, "num_hidden_layers": 3,
        "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 6, "linear_value_head_dim": 10, "linear_conv_kernel_dim": 4,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
    },
    "deepseek_v3": {
        **_COMMON, "model_type": "deepseek_v3", "intermediate_size": 48, "num_key_value_heads": 4,
        "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "q_lora_rank": 20,
        "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10,
    },
}  # fmt: skip
OTHER_LAYERS = tuple(kind for kind in HF_CONFIGS if kind not in KINDS)
"""Linear attention and a shared expert; latent attention and routing by groups."""
HF_CONFIGS["glm4_moe"] = {
    **_COMMON, "model_type": "glm4_moe", "intermediate_size": 48, "moe_intermediate_size": 24,
    "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip


def make_trainer(
    tmp_path,
    kind="qwen3",
    *,
    seed=0,
    dtype=None,
    total_updates=None,
    hf=(),
    lora=None,
    ops=None,
    **config,
):
    """A trainer over random weights; no parameter, norms and sinks included, is at its start.

    lora: settings of an adapter, whose B is not 0 either.
    """
    source = {**HF_CONFIGS[kind], **dict(hf)}
    tmp_path.mkdir(parents=True, exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(source))
    model = Decoder(ModelConfig.from_hf(source), ops=ops)
    model.init_weights(std=0.3, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm", "bias", "sinks")):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    if dtype is not None:
        model = model.to(dtype)
    if lora is not None:
        add_adapter(model, lora_shape(LoraConfig(**lora), model.config), seed=seed)
        fill_adapter(model, seed=seed + 2)
    settings = {"lr": 1e-2, **config}
    return Trainer(model, TrainerConfig(**settings), like=tmp_path, total_updates=total_updates)


def make_critic(
    tmp_path,
    kind="qwen3",
    *,
    seed=0,
    dtype=None,
    budget=16384,
    hf=(),
    total=20,
    trainer=(),
    **config,
):
    """A critic over random weights, with a head that is not 0."""
    source = {**HF_CONFIGS[kind], **dict(hf)}
    tmp_path.mkdir(parents=True, exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(source))
    model = ValueModel(ModelConfig.from_hf(source))
    model.body.init_weights(std=0.3, seed=seed)
    if dtype is not None:
        model.body.to(dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        model.value_head.normal_(0.0, 0.3, generator=generator)
    shared = TrainerConfig(max_tokens_per_microbatch=budget, **dict(trainer))
    settings = CriticConfig(**{"lr": 3e-3, **config})
    return Critic(model, settings, shared, like=tmp_path, total_updates=total)


def fill_adapter(model, *, seed):
    """Random numbers for B, which begins at 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".B" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def make_rows(lengths, *, seed=0, vocab=VOCAB, advantages=True):
    """Rows of random ids, two trained runs in each."""
    rng = np.random.default_rng(seed)
    out = []
    for i, length in enumerate(lengths):
        mask = np.zeros(length, bool)
        mask[length // 3 : length // 2] = True
        mask[-max(1, length // 4) :] = True
        mask[0] = False
        columns = {
            "rollout_logprobs": np.where(mask, -rng.exponential(2.0, length), np.nan),
            "advantages": np.where(mask, rng.normal(), 0.0),
        }
        out.append(
            Sample(
                id=f"t{i}/0",
                token_ids=rng.integers(0, vocab, length).astype(np.int32),
                loss_mask=mask,
                columns={k: v.astype(np.float32) for k, v in columns.items()},
            )
        )
    return out


def set_rollout(trainer, rows):
    """Gives rows the trainer's own log-probs as the rollout's: the two sides agree."""
    for row, logprobs in zip(rows, trainer.forward(rows, column=None), strict=True):
        row.set("rollout_logprobs", logprobs)
    return rows


def snapshot(trainer):
    """Every weight and optimizer tensor, copied."""
    weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    state = {
        f"state/{n}": t.clone()
        for n, t in {t.name: t.view() for t in trainer.optimizer.state_tensors()}.items()
    }
    return weights | state


def assert_same_bits(left, right):
    assert set(left) == set(right)
    for name in left:
        assert torch.equal(left[name], right[name]), name
