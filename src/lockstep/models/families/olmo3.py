"""OLMo 3: norms behind attention and MLP."""

from __future__ import annotations

from typing import Any

from lockstep.models.reading import Reading, family, num_layers, window_rope, windows_of


@family("olmo3", rope_theta=500000.0, window_rope_theta=500000.0)
def olmo3(reading: Reading) -> dict[str, Any]:
    r = reading
    kinds = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(num_layers(r))]
    return {
        "norms": "after",
        "norm_weights": "wide",
        "has_qk_norm": True,
        "has_wide_qk_norm": True,
        **window_rope(r),
        **windows_of(r, kinds, r.optional("sliding_window", 4096)),
    }
