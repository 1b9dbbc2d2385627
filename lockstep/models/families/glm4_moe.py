"""GLM 4.5: experts that sigmoids choose, and shared ones."""

from __future__ import annotations

from typing import Any

from lockstep.models.reading import EXPERT_COUNTS, MOST, Reading, family, same_windows


@family("glm4_moe", reads=("partial_rotary_factor",))
def glm4_moe(reading: Reading) -> dict[str, Any]:
    r = reading
    width = r.count("moe_intermediate_size")
    rope = r.get("rope_parameters", default={}) or {}
    share = rope.get("partial_rotary_factor", r.get("partial_rotary_factor", default=0.5))
    return {
        "has_output_bias": False,
        "has_qk_norm": bool(r.get("use_qk_norm", default=False)),
        "rotary_share": r.number(share, "partial_rotary_factor"),
        "intermediate_size": width,
        "num_experts": r.count(*EXPERT_COUNTS, most=MOST),
        "num_active_experts": r.count("num_experts_per_tok"),
        "has_sigmoid_routes": True,
        "num_expert_groups": r.count("n_group", default=1),
        "num_active_groups": r.count("topk_group", default=1),
        "has_normalized_routes": bool(r.get("norm_topk_prob", default=True)),
        "route_scale": r.number(
            r.get("routed_scaling_factor", default=1.0), "routed_scaling_factor"
        ),
        "shared_width": width * r.count("n_shared_experts", default=1),
        "num_extra_layers": r.get("num_nextn_predict_layers", "num_mtp_layers", default=1),
        "dense_layers": tuple(range(r.get("first_k_dense_replace", default=1))),
        "dense_intermediate_size": r.count("intermediate_size"),
        **same_windows(r, None),
    }
