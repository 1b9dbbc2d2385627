"""Gemma 3, of text alone."""

from __future__ import annotations

from typing import Any

from lockstep.models.reading import Reading, family, num_layers, window_rope, windows_of


@family(
    "gemma3_text",
    rope_theta=1e6,
    window_rope_theta=1e4,
    head_dim=256,
    num_key_value_heads=4,
    tie_word_embeddings=True,
)
def gemma3_text(reading: Reading) -> dict[str, Any]:
    r, hidden = reading, reading.count("hidden_size")
    every = r.count("sliding_window_pattern", default=6)
    kinds = [
        "sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers(r))
    ]
    return {
        "norms": "both",
        "norm_weights": "centered",
        "has_qk_norm": True,
        "activation": "gelu",
        "embedding_scale": hidden**0.5,
        "query_scale": r.number(
            r.get("query_pre_attn_scalar", default=256), "query_pre_attn_scalar"
        ),
        **window_rope(r, "rope_local_base_freq"),
        **windows_of(r, kinds, r.optional("sliding_window", 4096)),
    }
