"""Configs of tiny decoders of each kind, for tests that change what they look at."""

from typing import Any

from lockstep.models.attention_config import LatentShape, LinearShape
from lockstep.models.config import ModelConfig

COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_positions": 512,
    "windows": (None, None), "tie_embeddings": True,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"has_qk_norm": True},
    "gpt_oss": {
        "intermediate_size": 24, "windows": (7, None), "num_experts": 4, "num_active_experts": 2,
        "has_sinks": True, "has_attention_bias": True, "has_router_bias": True,
        "has_expert_bias": True, "swiglu_limit": 7.0,
    },
    "qwen3_5_text": {
        "has_qk_norm": True, "has_output_gate": True, "norm_weights": "centered",
        "linear": LinearShape(
            layers=(0,), key_heads=2, value_heads=4, key_dim=8, value_dim=12, conv_width=4,
            is_grouped=False,
        ),
    },
    "deepseek_v3": {
        "num_kv_heads": 1, "head_dim": 10,
        "latent": LatentShape(
            query_rank=0, kv_rank=12, nope_dim=6, rope_dim=4, value_dim=14, is_interleaved=True
        ),
    },
}  # fmt: skip
"""Architecture -> its settings besides COMMON."""


def tiny_config(architecture: str, **changes: Any) -> ModelConfig:
    settings = COMMON | KINDS[architecture] | changes
    return ModelConfig(architecture=architecture, **settings)
