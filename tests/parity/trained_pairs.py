"""A tiny random model of transformers, and Lockstep's trainer of the same weights."""

import numpy as np
import pytest
import torch

from lockstep.models.hf_io import hf_tensors, load_checkpoint
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer
from lockstep.types import UNKNOWN_EXPERT, Sample

transformers = pytest.importorskip("transformers", reason="pip install 'lockstep-rl[transformers]'")

NUM_LAYERS, NUM_EXPERTS, NUM_ACTIVE = 3, 8, 3
SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "initializer_range": 0.2, "tie_word_embeddings": True,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def make_pair(kind, directory, *, is_moved=True, shape=(), **settings):
    """is_moved: no norm, bias or sink is at its start. shape: more of the config. settings: of the
    trainer."""
    torch.manual_seed(0)
    shape = SHAPE | dict(shape)
    if kind == "gpt_oss":
        config = transformers.GptOssConfig(
            **shape, intermediate_size=24, num_local_experts=NUM_EXPERTS,
            num_experts_per_tok=NUM_ACTIVE, sliding_window=8,
        )  # fmt: skip
    elif kind == "qwen3":
        config = transformers.Qwen3Config(**shape, intermediate_size=48)
    else:
        config = transformers.Qwen3MoeConfig(
            **shape, intermediate_size=40, moe_intermediate_size=24, num_experts=NUM_EXPERTS,
            num_experts_per_tok=NUM_ACTIVE, norm_topk_prob=kind == "qwen3_moe",
            mlp_only_layers=[1] if kind == "qwen3_moe with a dense layer" else [],
        )  # fmt: skip
    make = transformers.AutoModelForCausalLM.from_config
    model = make(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_moved and name.endswith(("sinks", "bias", "norm.weight")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model, Trainer(load_checkpoint(directory), TrainerConfig(**settings), like=directory)


def make_rows(lengths, *, has_routes=False):
    """Rows whose tokens are trained by half. has_routes: with random experts."""
    rng = np.random.default_rng(0)
    rows = []
    for i, length in enumerate(lengths):
        mask = rng.random(length) < 0.5
        mask[0], mask[-1] = False, True
        columns = {}
        if has_routes:
            experts = np.tile(np.arange(NUM_EXPERTS), (length, NUM_LAYERS, 1))
            routes = rng.permuted(experts, axis=-1)[..., :NUM_ACTIVE].astype(np.int16)
            routes[-1] = UNKNOWN_EXPERT
            columns["routed_experts"] = routes
        columns["advantages"] = np.where(mask, rng.normal(), 0).astype(np.float32)
        columns["rollout_logprobs"] = np.where(mask, -5.0, np.nan).astype(np.float32)
        ids = rng.integers(0, SHAPE["vocab_size"], length).astype(np.int32)
        rows.append(Sample(id=f"{i}/0", token_ids=ids, loss_mask=mask, columns=columns))
    return rows


def check_log_probs(trainer, rows, their_logprobs):
    for row, ours in zip(rows, trainer.forward(rows), strict=True):
        theirs = their_logprobs(row).detach().numpy()
        # float32 logits of both agree to 1e-5 (tests/parity/test_decoder_parity.py)
        np.testing.assert_allclose(ours[row.loss_mask], theirs, atol=2e-5)


def ratio_and_advantages(row, logprobs):
    """Both are of the trained tokens. A forward_backward must have written the old log-probs."""
    ratio = (logprobs - torch.from_numpy(row.columns["old_logprobs"][row.loss_mask])).exp()
    return ratio, torch.from_numpy(row.columns["advantages"][row.loss_mask])


def gradients_by_hf_name(trainer):
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(trainer.optimizer.gradients()[name])
    return hf_tensors(trainer.model)
