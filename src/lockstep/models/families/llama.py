"""Llama 3 and Mistral."""

from __future__ import annotations

from typing import Any

from lockstep.models.reading import Reading, family, same_windows


@family("llama")
def llama(reading: Reading) -> dict[str, Any]:
    reading.expect("sliding_window", None)
    return same_windows(reading, None)


@family("mistral", num_key_value_heads=8)
def mistral(reading: Reading) -> dict[str, Any]:
    window = reading.optional("sliding_window", 4096)
    return {"has_attention_bias": False, **same_windows(reading, window)}
