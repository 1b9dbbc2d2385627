"""What vLLM must be told of a checkpoint that it would misread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def hf_overrides(directory: Path) -> dict[str, Any]:
    """Of config.json, in vLLM's `hf_overrides`; empty for most models.

    vLLM's gpt-oss reads its rotary embedding as YaRN alone, and ends at a plain one with a
    KeyError. A plain one is YaRN of factor 1.
    """
    config = json.loads((directory / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    if config.get("model_type") != "gpt_oss" or rope.get("rope_type") != "default":
        return {}
    yarn = {
        "rope_type": "yarn", "rope_theta": rope["rope_theta"], "factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    }  # fmt: skip
    return {"rope_parameters": yarn}
