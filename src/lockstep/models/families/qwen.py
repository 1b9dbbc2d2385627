"""Qwen2.5, Qwen3 and its mixtures of experts."""

from __future__ import annotations

from typing import Any

from lockstep.models.reading import Reading, family, num_layers, same_windows, windows_of


def _windows(reading: Reading) -> dict[str, tuple[int | None, ...]]:
    r = reading
    has_window = r.flag("use_sliding_window", default=False)
    window = r.optional("sliding_window", 4096) if has_window else None
    if r.get("model_type") == "qwen3_moe":
        return same_windows(r, window)
    first = r.count("max_window_layers", default=28, least=0)
    kinds = [
        "sliding_attention" if window and i >= first else "full_attention"
        for i in range(num_layers(r))
    ]
    return windows_of(r, kinds, window)


@family("qwen2", num_key_value_heads=32)
def qwen2(reading: Reading) -> dict[str, Any]:
    return {"has_attention_bias": True, "has_output_bias": False, **_windows(reading)}


@family("qwen3", head_dim=128, num_key_value_heads=32)
def qwen3(reading: Reading) -> dict[str, Any]:
    return {"has_qk_norm": True, **_windows(reading)}


@family("qwen3_moe", num_key_value_heads=4)
def qwen3_moe(reading: Reading) -> dict[str, Any]:
    r = reading
    return {
        "has_qk_norm": True,
        "intermediate_size": r.count("moe_intermediate_size"),
        **r.experts(),
        "has_normalized_routes": r.flag("norm_topk_prob", default=False),
        **r.dense_layers(),
        **_windows(r),
    }
