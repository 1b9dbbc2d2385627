"""The families of models that the decoder runs. Each registers itself."""

from __future__ import annotations

from typing import Any

from lockstep.models.attention_config import LatentShape, LinearShape
from lockstep.models.reading import (
    MOST,
    Reading,
    family,
    full_every,
    layer_kinds,
    num_layers,
    same_windows,
    sigmoid_routes,
    window_rope,
    windows_of,
)
from lockstep.tables import tables_beside

_DEFAULTS = tables_beside(__file__)

# -- DeepSeek V3 and what shares its code, such as Kimi K2: latent attention -----------------------


@family("deepseek_v3", **_DEFAULTS["deepseek_v3"])
def deepseek_v3(reading: Reading) -> dict[str, Any]:
    r = reading
    latent = LatentShape(
        query_rank=r.optional("q_lora_rank", 1536) or 0,
        kv_rank=r.count("kv_lora_rank"),
        nope_dim=r.count("qk_nope_head_dim"),
        rope_dim=r.count("qk_rope_head_dim"),
        value_dim=r.count("v_head_dim"),
        is_interleaved=r.flag("rope_interleave", default=True),
    )
    if latent.rope_dim % 2:
        r.problems.append(f"qk_rope_head_dim={latent.rope_dim} must be even")
    return {
        "latent": latent,
        "head_dim": latent.nope_dim + latent.rope_dim,
        "num_kv_heads": 1,
        **sigmoid_routes(r),
        **same_windows(r, None),
    }


# -- Gemma 3, of text alone ------------------------------------------------------------------------


@family("gemma3_text", **_DEFAULTS["gemma3_text"])
def gemma3_text(reading: Reading) -> dict[str, Any]:
    r, hidden = reading, reading.count("hidden_size")
    kinds = full_every(r, r.count("sliding_window_pattern", default=6))
    scale = r.get("query_pre_attn_scalar", default=256)
    return {
        "norms": "both",
        "norm_weights": "centered",
        "has_qk_norm": True,
        "activation": "gelu",
        "embedding_scale": hidden**0.5,
        "query_scale": r.number(scale, "query_pre_attn_scalar"),
        **window_rope(r, "rope_local_base_freq"),
        **windows_of(r, kinds, r.optional("sliding_window", 4096)),
    }


# -- GLM 4.5: experts that sigmoids choose, and shared ones ----------------------------------------


@family("glm4_moe", reads=("partial_rotary_factor",), **_DEFAULTS["glm4_moe"])
def glm4_moe(reading: Reading) -> dict[str, Any]:
    r = reading
    return {
        "has_output_bias": False,
        "has_qk_norm": r.flag("use_qk_norm", default=False),
        "rotary_share": r.rotary_share(0.5),
        **sigmoid_routes(r),
        **same_windows(r, None),
    }


# -- gpt-oss: sinks, and windows in every other layer ----------------------------------------------


@family("gpt_oss", **_DEFAULTS["gpt_oss"])
def gpt_oss(reading: Reading) -> dict[str, Any]:
    r = reading
    if r.get("rope_parameters") is None and not r.get("rope_scaling"):  # transformers: YaRN by 32
        r.problems.append("rope_parameters (or rope_theta and rope_scaling) is missing")
    return {
        "has_sinks": True,
        **r.experts(),
        "swiglu_limit": r.number(r.get("swiglu_limit", default=7.0), "swiglu_limit"),
        "has_router_bias": True,
        "has_expert_bias": True,
        **windows_of(r, full_every(r, 2), r.optional("sliding_window", 128)),
    }


# -- Llama 3 and Mistral ---------------------------------------------------------------------------


@family("llama")
def llama(reading: Reading) -> dict[str, Any]:
    reading.expect("sliding_window", None)
    return same_windows(reading, None)


@family("mistral", **_DEFAULTS["mistral"])
def mistral(reading: Reading) -> dict[str, Any]:
    window = reading.optional("sliding_window", 4096)
    return {"has_attention_bias": False, **same_windows(reading, window)}


# -- OLMo 3: norms behind attention and MLP --------------------------------------------------------


@family("olmo3", **_DEFAULTS["olmo3"])
def olmo3(reading: Reading) -> dict[str, Any]:
    r = reading
    return {
        "norms": "after",
        "norm_weights": "wide",
        "has_qk_norm": True,
        "has_wide_qk_norm": True,
        **window_rope(r),
        **windows_of(r, full_every(r, 4), r.optional("sliding_window", 4096)),
    }


# -- Qwen2.5, Qwen3 and its mixtures of experts ----------------------------------------------------


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


@family("qwen2", **_DEFAULTS["qwen2"])
def qwen2(reading: Reading) -> dict[str, Any]:
    return {"has_attention_bias": True, "has_output_bias": False, **_windows(reading)}


@family("qwen3", **_DEFAULTS["qwen3"])
def qwen3(reading: Reading) -> dict[str, Any]:
    return {"has_qk_norm": True, **_windows(reading)}


@family("qwen3_moe", **_DEFAULTS["qwen3_moe"])
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


# -- Qwen3-Next and Qwen3.5: linear attention, with attention in every fourth layer ----------------


_READS = ("partial_rotary_factor", "mrope_section")


def _hybrid(reading: Reading, *, is_grouped: bool) -> dict[str, Any]:
    r, other = reading, "linear_attention"
    kinds = full_every(r, r.count("full_attention_interval", default=4), other)
    kinds = layer_kinds(r, kinds, other, needs_full=True)
    linear = LinearShape(
        layers=tuple(i for i, kind in enumerate(kinds) if kind == other),
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


@family("qwen3_next", reads=_READS, **_DEFAULTS["qwen3_next"])
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


@family("qwen3_5_text", reads=_READS, **_DEFAULTS["qwen3_5_text"])
def qwen3_5(reading: Reading) -> dict[str, Any]:
    return _hybrid(reading, is_grouped=False)


@family("qwen3_5_moe_text", reads=_READS, **_DEFAULTS["qwen3_5_moe_text"])
def qwen3_5_moe(reading: Reading) -> dict[str, Any]:
    return {**_hybrid(reading, is_grouped=False), **_experts(reading)}
