"""GLM 4.5: experts that sigmoids choose, and shared ones."""

from __future__ import annotations

from typing import Any

from lockstep.models.reading import Reading, family, same_windows, sigmoid_routes


@family(
    "glm4_moe",
    reads=("partial_rotary_factor",),
    num_key_value_heads=8,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.0,
    first_k_dense_replace=1,
)
def glm4_moe(reading: Reading) -> dict[str, Any]:
    r = reading
    return {
        "has_output_bias": False,
        "has_qk_norm": r.flag("use_qk_norm", default=False),
        "rotary_share": r.rotary_share(0.5),
        **sigmoid_routes(r),
        **same_windows(r, None),
    }
