"""The shapes that memory is planned with are those of the decoder."""

import math
from dataclasses import replace

import pytest
from tiny_configs import tiny_config

from lockstep.models.attention_config import LatentShape, LinearShape
from lockstep.models.decoder import Decoder
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, adapter_shapes, lora_shape
from lockstep.models.shapes import decoder_shapes, num_elements

DENSE = tiny_config(
    "qwen3", vocab_size=11, hidden_size=12, intermediate_size=10, num_layers=3, head_dim=6,
    max_positions=64, windows=(None,) * 3, tie_embeddings=False,
)  # fmt: skip
MOE = replace(
    DENSE, num_experts=4, num_active_experts=2, dense_layers=(1,), dense_intermediate_size=7
)
LATENT = LatentShape(
    query_rank=5, kv_rank=7, nope_dim=4, rope_dim=2, value_dim=3, is_interleaved=True
)
LINEAR = LinearShape(
    layers=(0, 2), key_heads=2, value_heads=4, key_dim=3, value_dim=5, conv_width=4,
    is_grouped=False,
)  # fmt: skip
CONFIGS = {
    "dense": DENSE,
    "tied, biases": replace(DENSE, tie_embeddings=True, has_attention_bias=True, has_qk_norm=False),
    "experts, one dense layer": MOE,
    "biases, but on the output": replace(DENSE, has_attention_bias=True, has_output_bias=False),
    "norms on both sides": replace(DENSE, norms="both", norm_weights="centered"),
    "norms behind, over all heads": replace(DENSE, norms="after", has_wide_qk_norm=True),
    "sigmoid routes, shared experts": replace(MOE, has_sigmoid_routes=True, shared_width=9),
    "linear attention": replace(DENSE, has_output_gate=True, linear=LINEAR),
    "linear attention, a shared expert with a gate": replace(
        MOE, linear=replace(LINEAR, is_grouped=True), shared_width=9, has_shared_gate=True
    ),
    "latent attention": replace(MOE, has_qk_norm=False, num_kv_heads=1, latent=LATENT),
    "latent attention, biases": replace(
        DENSE,
        has_qk_norm=False,
        has_attention_bias=True,
        num_kv_heads=1,
        latent=replace(LATENT, query_rank=0),
    ),
    "gpt-oss": replace(
        MOE,
        architecture="gpt_oss",
        has_qk_norm=False,
        has_sinks=True,
        has_attention_bias=True,
        has_router_bias=True,
        has_expert_bias=True,
        dense_layers=(),
        windows=(8, None, 8),
    ),
}


def shapes_of(model):
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_is_known_before_the_model_is_made(name):
    assert decoder_shapes(CONFIGS[name]) == shapes_of(Decoder(CONFIGS[name]))


@pytest.mark.parametrize("targets", [(), ("attention",), ("*.q_proj", "*.v_proj", "experts")])
def test_every_parameter_of_an_adapter_is_known_too(targets):
    model = Decoder(MOE)
    lora = lora_shape(LoraConfig(rank=3, targets=targets), MOE)
    own = set(shapes_of(model))
    add_adapter(model, lora, seed=0)
    added = {n: shape for n, shape in shapes_of(model).items() if n not in own}
    assert adapter_shapes(lora) == added
    assert sum(map(math.prod, added.values())) == num_elements(adapter_shapes(lora))
