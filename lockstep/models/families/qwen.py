"""Qwen2.5, Qwen3 and its mixtures of experts."""

from __future__ import annotations

from typing import Any

from lockstep.models.reading import (
    EXPERT_COUNTS,
    MOST,
    Reading,
    family,
    num_layers,
    same_windows,
    windows_of,
)


def _windows(reading: Reading) -> dict[str, tuple[int | None, ...]]:
    r = reading
    window = r.window(4096) if r.flag("use_sliding_window", default=False) else None
    if r.get("model_type") == "qwen3_moe":
        return same_windows(r, window)
    first = r.count("max_window_layers", default=28, least=0)
    kinds = [
        "sliding_attention" if window and i >= first else "full_attention"
        for i in range(num_layers(r))
    ]
    return windows_of(r, kinds, window)


@family("qwen2")
def qwen2(reading: Reading) -> dict[str, Any]:
    return {"has_attention_bias": True, "has_output_bias": False, **_windows(reading)}


@family("qwen3", head_dim=128)
def qwen3(reading: Reading) -> dict[str, Any]:
    return {"has_qk_norm": True, **_windows(reading)}


@family("qwen3_moe")
def qwen3_moe(reading: Reading) -> dict[str, Any]:
    r = reading
    step, dense = r.count("decoder_sparse_step", default=1), r.places("mlp_only_layers")
    layers = range(num_layers(r))
    return {
        "has_qk_norm": True,
        "intermediate_size": r.count("moe_intermediate_size"),
        "num_experts": r.count(*EXPERT_COUNTS, most=MOST),
        "num_active_experts": r.count("num_experts_per_tok"),
        "has_normalized_routes": r.flag("norm_topk_prob", default=False),
        "dense_layers": tuple(i for i in layers if i in dense or (i + 1) % step),
        "dense_intermediate_size": r.count("intermediate_size", default=0),
        **_windows(r),
    }
