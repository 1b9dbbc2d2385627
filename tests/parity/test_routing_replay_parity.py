"""Replayed routes against transformers' mixtures, whose routers are made to choose the same."""

import re

import pytest
import torch
from trained_pairs import (
    NUM_EXPERTS,
    NUM_LAYERS,
    check_log_probs,
    gradients_by_hf_name,
    make_pair,
    make_rows,
    ratio_and_advantages,
)

from lockstep.objectives.config import PPOClip
from lockstep.objectives.losses import make_loss


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
    replayed = {"max_tokens_per_microbatch": 64, "routing_replay": "rollout"}
    model, trainer = make_pair(kind, tmp_path, **replayed)
    forced, rows = Forced(model, kind), make_rows([7, 40, 23, 31], has_routes=True)
    check_log_probs(trainer, rows, lambda row: their_logprobs(model, row, forced))
    metrics = trainer.forward_backward(rows, make_loss(PPOClip()))
    assert metrics["routing/differing_share"] > 0.9, "the routes are random ones"
    losses = []
    for row in rows:
        ratio, advantages = ratio_and_advantages(row, their_logprobs(model, row, forced))
        losses.append(-ratio * advantages)  # nothing is clipped at a ratio of 1
    torch.cat(losses).mean().backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    num_routers = 0
    for name, ours in gradients_by_hf_name(trainer).items():
        gradient = slice_of(theirs, name)
        gap = (ours - gradient).abs().max() / gradient.abs().max()
        # Sums over tokens and experts in another order, float32: measured up to 3e-6.
        assert gap < 1e-5, (name, float(gap))
        num_routers += "router" in name or "mlp.gate.weight" in name
    assert num_routers == NUM_LAYERS * (2 if kind == "gpt_oss" else 1)
