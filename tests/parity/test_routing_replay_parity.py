"""Replayed routes against transformers' mixtures, whose routers are made to choose the same."""

import re

import numpy as np
import pytest
import torch

from lockstep.models.hf_io import hf_tensors, load_checkpoint
from lockstep.objectives.config import PPOClip
from lockstep.objectives.losses import make_loss
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


def make_pair(kind, directory):
    torch.manual_seed(0)
    if kind == "gpt_oss":
        config = transformers.GptOssConfig(
            **SHAPE, intermediate_size=24, num_local_experts=NUM_EXPERTS,
            num_experts_per_tok=NUM_ACTIVE, sliding_window=8,
        )  # fmt: skip
    else:
        config = transformers.Qwen3MoeConfig(
            **SHAPE, intermediate_size=40, moe_intermediate_size=24, num_experts=NUM_EXPERTS,
            num_experts_per_tok=NUM_ACTIVE, norm_topk_prob=kind == "qwen3_moe",
        )  # fmt: skip
    make = transformers.AutoModelForCausalLM.from_config
    model = make(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias", "norm.weight")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.float().eval().save_pretrained(directory)
    settings = TrainerConfig(max_tokens_per_microbatch=64, routing_replay="rollout")
    return model, Trainer(load_checkpoint(directory), settings, like=directory)


class Forced:
    """Forward hooks on transformers' routers: they choose `routes` [T, layers, active], in order,
    and weigh them by their own logits: by the softmax there, or by that over all experts."""

    def __init__(self, model, kind) -> None:
        name = "router" if kind == "gpt_oss" else "gate"
        routers = [getattr(layer.mlp, name) for layer in model.model.layers]
        self.routes, self.is_normalized = None, kind != "qwen3_moe unnormalized"
        for layer, router in enumerate(routers):
            router.register_forward_hook(lambda _, __, out, layer=layer: self._force(out, layer))

    def _force(self, out, layer):
        if self.routes is None:
            return None
        experts = torch.from_numpy(self.routes[:, layer]).long()
        logits = out[0].view(-1, NUM_EXPERTS)
        if self.is_normalized:
            return (out[0], logits.gather(-1, experts).softmax(-1), experts)
        return (out[0], logits.softmax(-1).gather(-1, experts), experts)


def make_rows():
    rng = np.random.default_rng(0)
    rows = []
    for i, length in enumerate([7, 40, 23, 31]):
        mask = rng.random(length) < 0.5
        mask[0], mask[-1] = False, True
        routes = rng.permuted(np.tile(np.arange(NUM_EXPERTS), (length, NUM_LAYERS, 1)), axis=-1)
        routes = routes[..., :NUM_ACTIVE].astype(np.int16)
        routes[-1] = UNKNOWN_EXPERT
        columns = {
            "advantages": np.where(mask, rng.normal(), 0).astype(np.float32),
            "rollout_logprobs": np.where(mask, -5.0, np.nan).astype(np.float32),
            "routed_experts": routes,
        }
        ids = rng.integers(0, SHAPE["vocab_size"], length).astype(np.int32)
        rows.append(Sample(id=f"{i}/0", token_ids=ids, loss_mask=mask, columns=columns))
    return rows


def their_logprobs(model, row, forced):
    """The last token is not fed: it predicts nothing, and has no routes."""
    forced.routes = row.columns["routed_experts"][:-1]
    ids = torch.from_numpy(row.token_ids).long()[None]
    logp = torch.log_softmax(model(ids[:, :-1], use_cache=False).logits[0], -1)
    return logp.gather(1, ids[0, 1:, None])[:, 0][torch.from_numpy(row.loss_mask[1:])]


def slice_of(tensors, name):
    """The tensor of this name in a file, where transformers holds a layer's experts as one."""
    found = re.fullmatch(r"(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if found is None:
        return tensors[name]
    prefix, expert, part = found.groups()
    if part == "down":
        return tensors[f"{prefix}.down_proj"][int(expert)]
    return tensors[f"{prefix}.gate_up_proj"][int(expert)].chunk(2)[part == "up"]


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe", "qwen3_moe unnormalized"])
def test_log_probs_and_gradients_of_forced_experts_equal_transformers(kind, tmp_path):
    model, trainer = make_pair(kind, tmp_path)
    forced, rows = Forced(model, kind), make_rows()
    for row, ours in zip(rows, trainer.forward(rows), strict=True):
        theirs = their_logprobs(model, row, forced).detach().numpy()
        # float32 logits of both agree to 1e-5 (tests/parity/test_decoder_parity.py)
        np.testing.assert_allclose(ours[row.loss_mask], theirs, atol=2e-5)

    metrics = trainer.forward_backward(rows, make_loss(PPOClip()))
    assert metrics["routing/differing_share"] > 0.9, "the routes are random ones"
    losses = []
    for row in rows:
        logprobs = their_logprobs(model, row, forced)
        ratio = (logprobs - torch.from_numpy(row.columns["old_logprobs"][row.loss_mask])).exp()
        advantages = torch.from_numpy(row.columns["advantages"][row.loss_mask])
        losses.append(-ratio * advantages)  # nothing is clipped at a ratio of 1
    torch.cat(losses).mean().backward()
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(trainer.optimizer.gradients()[name])
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    num_routers = 0
    for name, ours in hf_tensors(trainer.model).items():
        gradient = slice_of(theirs, name)
        gap = (ours - gradient).abs().max() / gradient.abs().max()
        # Sums over tokens and experts in another order, float32: measured up to 3e-6.
        assert gap < 1e-5, (name, float(gap))
        num_routers += "router" in name or "mlp.gate.weight" in name
    assert num_routers == NUM_LAYERS * (2 if kind == "gpt_oss" else 1)
