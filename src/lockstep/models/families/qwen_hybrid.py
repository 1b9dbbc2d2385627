"""Qwen3-Next and Qwen3.5: linear attention, with attention in every fourth layer."""

from __future__ import annotations

from typing import Any

from lockstep.models.attention_config import LinearShape
from lockstep.models.reading import MOST, Reading, family, names_of, num_layers, same_windows

_READS = ("partial_rotary_factor", "mrope_section")


def _hybrid(reading: Reading, *, is_grouped: bool) -> dict[str, Any]:
    r, count = reading, num_layers(reading)
    every = r.count("full_attention_interval", default=4)
    kinds = r.get("layer_types", default=None)
    if kinds is None:
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    known = {"full_attention", "linear_attention"}
    if (
        len(kinds) != count
        or any(kind not in known for kind in map(str, kinds))
        or "full_attention" not in kinds
    ):
        r.problems.append(
            f"layer_types must name num_hidden_layers={count} of full_attention, linear_attention, "
            f"at least one of them full; found {len(kinds)}: {names_of(kinds)}"
        )
    linear = LinearShape(
        layers=tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention"),
        key_heads=r.count("linear_num_key_heads", default=16, most=MOST),
        value_heads=r.count("linear_num_value_heads", default=32, most=MOST),
        key_dim=r.count("linear_key_head_dim", default=128, most=MOST),
        value_dim=r.count("linear_value_head_dim", default=128, most=MOST),
        conv_width=r.count("linear_conv_kernel_dim", default=4, least=2, most=MOST),
        is_grouped=is_grouped,
    )
    if linear.value_heads % linear.key_heads:
        r.problems.append(
            f"linear_num_value_heads={linear.value_heads} is not a multiple of "
            f"linear_num_key_heads={linear.key_heads}"
        )
    return {
        "linear": linear if linear.layers else None,
        "has_output_gate": True,
        "has_qk_norm": True,
        "norm_weights": "centered",
        "rotary_share": r.rotary_share(0.25),
        "extra_tensors": ("mtp.",),
        **same_windows(r, None),
    }


def _experts(reading: Reading) -> dict[str, Any]:
    r = reading
    return {
        "intermediate_size": r.count("moe_intermediate_size", default=512),
        **r.experts(),
        "shared_width": r.count("shared_expert_intermediate_size", default=512),
        "has_shared_gate": True,
    }


@family("qwen3_next", reads=_READS, head_dim=256, num_key_value_heads=2)
def qwen3_next(reading: Reading) -> dict[str, Any]:
    r, fields = reading, _hybrid(reading, is_grouped=True)
    if not r.count("num_experts", default=512, least=0):
        return fields
    return {
        **fields,
        **_experts(r),
        "has_normalized_routes": r.flag("norm_topk_prob", default=True),
        **r.dense_layers(),
    }


@family("qwen3_5_text", reads=_READS, head_dim=256, num_key_value_heads=4)
def qwen3_5(reading: Reading) -> dict[str, Any]:
    return _hybrid(reading, is_grouped=False)


@family("qwen3_5_moe_text", reads=_READS, head_dim=256, num_key_value_heads=2, intermediate_size=0)
def qwen3_5_moe(reading: Reading) -> dict[str, Any]:
    return {**_hybrid(reading, is_grouped=False), **_experts(reading)}
