"""Checkpoints that vLLM would run as another model than their config.json says. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.errors import CapabilityError

GPT_OSS_EPS = 1e-5
"""Epsilon that is fixed in vLLM's model."""


def check_readable(directory: Path, *, fills_head: bool) -> None:
    """Raises CapabilityError for a model that vLLM 0.32 would silently run as another one.

    fills_head: the caller copies the embedding into the head afterwards.
    """
    config = _config(directory)
    if config.get("model_type") != "gpt_oss":
        return
    kinds = config.get("layer_types") or []
    expected = ["sliding_attention", "full_attention"] * len(kinds)
    if kinds != expected[: len(kinds)]:
        raise CapabilityError(
            f"vLLM's gpt-oss has its sliding windows on layers 0, 2, 4 ...; {directory} has "
            f"layer_types {', '.join(kinds[:2])} ...: other keys would be seen than in training. "
            "Take engine=embedded, or a model whose layers begin with sliding_attention."
        )
    if (eps := config.get("rms_norm_eps", GPT_OSS_EPS)) != GPT_OSS_EPS:
        raise CapabilityError(
            f"vLLM's gpt-oss normalises with an epsilon of {GPT_OSS_EPS:g} whatever its config "
            f"says; {directory} has rms_norm_eps {eps:g}. Take engine=embedded, or a model with "
            "that one."
        )
    if config.get("tie_word_embeddings") and not fills_head:
        raise CapabilityError(
            f"vLLM's gpt-oss has a separate head, but {directory} uses its embedding as the head "
            "(tie_word_embeddings), so vLLM would never fill it. Take engine.in_process=true, "
            "which fills it, or engine=embedded."
        )


def config_overrides(directory: Path) -> dict[str, Any]:
    """Values for --hf-overrides. vLLM's gpt-oss reads its rotary embedding as YaRN, and its CPU
    kernel rotates heads of DeepSeek V3 by other tokens' positions where they are plain; a plain one
    is YaRN with factor 1. DeepSeek's routes are a softmax unless the config says sigmoids."""
    config = _config(directory)
    routes = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    found = {"gpt_oss": {}, "deepseek_v3": routes}.get(config.get("model_type", ""))
    rope = config.get("rope_parameters") or {}
    if found is None or rope.get("rope_type") != "default":
        return found or {}
    yarn = {
        "rope_type": "yarn",
        "rope_theta": rope["rope_theta"],
        "factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    return {**found, "rope_parameters": yarn}


def has_latents(directory: Path) -> bool:
    """True if vLLM runs the model by its multi-head latent attention."""
    return _config(directory).get("model_type") == "deepseek_v3"


def _config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())
