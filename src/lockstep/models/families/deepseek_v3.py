"""DeepSeek V3 and what shares its code, such as Kimi K2: latent attention."""

from __future__ import annotations

from typing import Any

from lockstep.models.attention_config import LatentShape
from lockstep.models.reading import Reading, family, same_windows, sigmoid_routes


@family(
    "deepseek_v3",
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
)
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
