"""The parameters of a decoder by name and shape, known from its config alone. No torch: the memory
of a run is planned before a model is made.   Guard: tests/cpu/models/test_shapes.py
"""

from __future__ import annotations

import math
from itertools import groupby

from lockstep.models.config import ModelConfig
from lockstep.models.lora_config import LoraShape, Site

Shapes = dict[str, tuple[int, ...]]


def decoder_shapes(config: ModelConfig) -> Shapes:
    """name -> shape, as `Decoder(config).named_parameters()` has them."""
    c = config
    D, vocabulary = c.hidden_size, (c.vocab_size, c.hidden_size)
    out: Shapes = {"embedding": vocabulary, "final_norm": (D,)}
    if not c.tie_embeddings:
        out["untied_head"] = vocabulary
    for layer in range(c.num_layers):
        is_routed = layer in c.routed_layers
        parts = {
            "input_norm": (D,),
            "post_attention_norm": (D,),
            **_prefixed("attention", _attention(c)),
            **_prefixed("mlp", _experts(c) if is_routed else _mlp(c)),
        }
        out |= _prefixed(f"layers.{layer}", parts)
    return out


def adapter_shapes(config: ModelConfig, lora: LoraShape) -> Shapes:
    """name -> shape of what `add_adapter` adds."""
    out: Shapes = {}
    for projection, group in groupby(lora.sites, lambda site: site.projection):
        sites: list[Site] = list(group)
        first, rank = sites[0], lora.rank
        if first.num_experts:
            at = f"{projection.removesuffix('_proj')}_lora"
            out[f"{at}.A"] = (first.num_experts, rank, first.inputs)
            out[f"{at}.B"] = (first.num_experts, first.outputs, rank)
            continue
        at = f"{projection}.lora"
        out[f"{at}.A"] = (len(sites) * rank, first.inputs)
        out |= {f"{at}.B.{i}": (site.outputs, rank) for i, site in enumerate(sites)}
    return out


def num_elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _attention(c: ModelConfig) -> Shapes:
    fused, width = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.num_heads * c.head_dim
    out: Shapes = {
        "qkv_proj.weight": (fused, c.hidden_size),
        "o_proj.weight": (c.hidden_size, width),
    }
    if c.has_attention_bias:
        out |= {"qkv_proj.bias": (fused,), "o_proj.bias": (c.hidden_size,)}
    if c.has_qk_norm:
        out |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
    if c.has_sinks:
        out["sinks"] = (c.num_heads,)
    return out


def _mlp(c: ModelConfig) -> Shapes:
    D, F = c.hidden_size, c.dense_intermediate_size if c.is_moe else c.intermediate_size
    return {"gate_up_proj.weight": (2 * F, D), "down_proj.weight": (D, F)}


def _experts(c: ModelConfig) -> Shapes:
    D, F, E = c.hidden_size, c.intermediate_size, c.num_experts
    out: Shapes = {
        "router.weight": (E, D),
        "gate_up_proj": (E, 2 * F, D),
        "down_proj": (E, D, F),
    }
    if c.has_router_bias:
        out["router.bias"] = (E,)
    if c.has_expert_bias:
        out |= {"gate_up_bias": (E, 2 * F), "down_bias": (E, D)}
    return out


def _prefixed(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}
