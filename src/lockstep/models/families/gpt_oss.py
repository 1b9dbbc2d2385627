"""gpt-oss: sinks, and windows in every other layer."""

from __future__ import annotations

from typing import Any

from lockstep.models.reading import Reading, family, num_layers, windows_of


@family("gpt_oss", rope_theta=150000.0, head_dim=64, num_key_value_heads=8, attention_bias=True)
def gpt_oss(reading: Reading) -> dict[str, Any]:
    r = reading
    if r.get("rope_parameters") is None and not r.get("rope_scaling"):  # transformers: YaRN by 32
        r.problems.append("rope_parameters (or rope_theta and rope_scaling) is missing")
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers(r))]
    return {
        "has_sinks": True,
        **r.experts(),
        "swiglu_limit": r.number(r.get("swiglu_limit", default=7.0), "swiglu_limit"),
        "has_router_bias": True,
        "has_expert_bias": True,
        **windows_of(r, kinds, r.optional("sliding_window", 128)),
    }
