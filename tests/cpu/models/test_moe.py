"""The MoE layer: what a config turns on, values and gradients, memory, loads.

# T tokens  D model width  E experts  A active experts  F expert width
"""

from dataclasses import replace

import torch

from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.moe import MLP, MoE, Routing
from lockstep.ops import api as ops
from lockstep.ops.context import PackedContext

CONFIG = ModelConfig(
    architecture="gpt_oss", vocab_size=31, hidden_size=16, intermediate_size=8, num_layers=1,
    num_heads=2, num_kv_heads=1, head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, max_positions=64,
    windows=(None,), num_experts=4, num_active_experts=2, swiglu_limit=7.0, has_router_bias=True,
    has_expert_bias=True,
)  # fmt: skip
PLAIN = replace(CONFIG, has_router_bias=False, has_expert_bias=False, swiglu_limit=0.0)


# -- what a config turns on -----------------------------------------------------------------------


def test_a_mixture_without_biases_has_no_bias():
    names = {name for name, _ in Decoder(PLAIN).named_parameters()}
    assert not [name for name in names if name.startswith("layers.0.mlp") and "bias" in name]
    assert "layers.0.mlp.gate_up_bias" in dict(Decoder(CONFIG).named_parameters())


def test_shares_of_all_experts_are_the_chosen_ones_softmax_times_their_sum():
    logits = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    own, chosen = ops.route(logits, 2)
    shares, same = ops.route(logits, 2, is_normalized=False)
    assert torch.equal(chosen, same)
    torch.testing.assert_close(shares, logits.softmax(-1).gather(1, chosen))
    torch.testing.assert_close(shares / shares.sum(-1, keepdim=True), own)


def test_dense_layers_in_between_are_not_counted_as_routed():
    config = replace(
        PLAIN, num_layers=4, windows=(None,) * 4, dense_layers=(0, 2), dense_intermediate_size=24
    )
    model = Decoder(config)
    kinds = [type(block.mlp) for block in model.layers]
    assert kinds == [MLP, MoE, MLP, MoE] and config.routed_layers == (1, 3)
    assert model.layers[2].mlp.down_proj.weight.shape == (16, 24)
    routing = Routing()
    model(torch.arange(5), torch.arange(5), PackedContext.of([5]), routing)
    assert sorted(routing.chosen) == [0, 1] and routing.stacked().shape == (5, 2, 2)
