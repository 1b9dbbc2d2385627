"""The trainer's packed log-probs and policy gradient against transformers, row by row."""

import numpy as np
import pytest
import torch

from lockstep.models.hf_io import hf_tensors, load_checkpoint
from lockstep.objectives.config import PPOClip
from lockstep.objectives.losses import make_loss
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer
from lockstep.types import Sample

transformers = pytest.importorskip("transformers", reason="pip install 'lockstep-rl[transformers]'")

SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "initializer_range": 0.2, "tie_word_embeddings": True, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def make_pair(kind, directory):
    torch.manual_seed(0)
    if kind == "gpt_oss":
        config = transformers.GptOssConfig(
            **SHAPE, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2,
            sliding_window=8, layer_types=["sliding_attention", "full_attention"],
        )  # fmt: skip
        model = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager")
    else:
        config = transformers.Qwen3Config(**SHAPE, intermediate_size=48)
        model = transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias", "norm.weight")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.float().eval().save_pretrained(directory)
    config = TrainerConfig(max_tokens_per_microbatch=64)
    return model, Trainer(load_checkpoint(directory), config, like=directory)


def make_rows():
    rng = np.random.default_rng(0)
    rows = []
    for i, length in enumerate([7, 40, 23, 31, 12]):
        mask = rng.random(length) < 0.5
        mask[0], mask[-1] = False, True
        columns = {
            "advantages": np.where(mask, rng.normal(), 0).astype(np.float32),
            "rollout_logprobs": np.where(mask, -5.0, np.nan).astype(np.float32),
        }
        ids = rng.integers(0, SHAPE["vocab_size"], length).astype(np.int32)
        rows.append(Sample(id=f"{i}/0", token_ids=ids, loss_mask=mask, columns=columns))
    return rows


def their_logprobs(model, row):
    ids = torch.from_numpy(row.token_ids).long()[None]
    logp = torch.log_softmax(model(ids).logits[0, :-1], -1)
    return logp.gather(1, ids[0, 1:, None])[:, 0][torch.from_numpy(row.loss_mask[1:])]


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_packed_log_probs_and_the_ppo_gradient_equal_transformers(kind, tmp_path):
    model, trainer = make_pair(kind, tmp_path)
    rows = make_rows()
    for row, ours in zip(rows, trainer.forward(rows), strict=True):
        theirs = their_logprobs(model, row).detach().numpy()
        # float32 logits of both agree to 1e-5 (tests/parity/test_decoder_parity.py)
        np.testing.assert_allclose(ours[row.loss_mask], theirs, atol=2e-5)

    trainer.forward_backward(rows, make_loss(PPOClip()))
    losses = []
    for row in rows:
        logprobs = their_logprobs(model, row)
        ratio = (logprobs - torch.from_numpy(row.columns["old_logprobs"][row.loss_mask])).exp()
        advantages = torch.from_numpy(row.columns["advantages"][row.loss_mask])
        losses.append(-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages))
    torch.cat(losses).mean().backward()

    for name, parameter in trainer.model.named_parameters():
        with torch.no_grad():
            parameter.copy_(trainer.optimizer.gradients()[name])
    theirs = dict(model.named_parameters())
    for name, ours in hf_tensors(trainer.model).items():
        wanted = theirs[name].grad
        assert float((ours - wanted).norm()) <= 2e-5 * float(wanted.norm()) + 1e-8, name
