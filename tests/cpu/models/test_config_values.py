"""Every key of every family, with values of the wrong kind: read right, or one line."""

import json
import math

import pytest

from lockstep.errors import CheckpointError
from lockstep.models.config import ModelConfig
from lockstep.models.reading import FAMILIES
from lockstep.models.shapes import decoder_shapes, num_elements

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 1e4,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "n_shared_experts": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
LINEAR = {
    "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
SPARSE = {"decoder_sparse_step": 2, "mlp_only_layers": [0]}
SHARED = {"shared_expert_intermediate_size": 16}
OWN = {
    "deepseek_v3": {
        **GROUPED, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "rope_interleave": True,
    },
    "glm4_moe": {**GROUPED, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "gemma3_text": {
        "sliding_window": 64, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8,
        "rope_local_base_freq": 1e4,
    },
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64,
        "swiglu_limit": 7.0, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "qwen2": WINDOW,
    "qwen3": {**WINDOW, "attention_bias": False},
    "qwen3_moe": {**EXPERTS, **SPARSE, "norm_topk_prob": True},
    "qwen3_next": {**EXPERTS, **LINEAR, **SPARSE, **SHARED},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {**EXPERTS, **LINEAR, **SHARED},
    "olmo3": {"sliding_window": 64},
    "mistral": {"sliding_window": 64},
}  # fmt: skip
ORIGINAL = {"factor": 2.0, "original_max_position_embeddings": 128}
ROPES = (
    {"rope_scaling": {"rope_type": "yarn", **ORIGINAL, "beta_fast": 32.0, "beta_slow": 1.0}},
    {"rope_scaling": {"rope_type": "llama3", **ORIGINAL, "low_freq_factor": 1.0,
                      "high_freq_factor": 4.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
)  # fmt: skip
NO_VALUE = (-1, 1.5e300, "x", "4", [[]], ["x"], [None] * 4, math.inf, math.nan, 2**70, 10**400)
"""Values that no key has, but for a large number where any number may be."""
MAY_BE_LARGE = (
    "rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar",
    "swiglu_limit", "routed_scaling_factor", "factor", "beta_fast", "beta_slow",
    "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)  # fmt: skip
UNREAD = {
    "intermediate_size": ("gpt_oss",),
    "head_dim": ("deepseek_v3",),
    "num_key_value_heads": ("deepseek_v3",),
}


def read(family, config):
    found = ModelConfig.from_hf({"model_type": family, **config})
    assert num_elements(decoder_shapes(found)) > 0
    return found


def refused(family, config):
    with pytest.raises(CheckpointError) as caught:
        read(family, config)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 3000 and "it is no config of" not in text, text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_of_another_kind_is_refused_by_its_key(family):
    base = {**COMMON, **OWN.get(family, {})}
    read(family, base)
    for key in base:
        for value in NO_VALUE if key == "rope_scaling" else (*NO_VALUE, {"a": 1}):
            is_large = isinstance(value, int | float) and 1e6 < value < math.inf
            if is_large and key in MAY_BE_LARGE and value != 10**400:
                continue
            if family not in UNREAD.get(key, ()):
                refused(family, {**base, key: value})


@pytest.mark.parametrize("rope", ROPES, ids=json.dumps)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_value_of_a_rotation_is_refused(family, rope):
    base = {**COMMON, **OWN.get(family, {})}
    base.pop("rope_theta")
    base.pop("rope_scaling", None)
    ((key, settings),) = rope.items()
    for name in settings:
        if "window_rope_theta" in FAMILIES[family].defaults and key == "rope_parameters":
            continue  # by kind of layer, below
        for value in (*NO_VALUE[2:8], -1, 0, True):
            refused(family, {**base, key: {**settings, name: value}})
    for value in NO_VALUE:
        refused(family, {**base, key: value})
    if "window_rope_theta" in FAMILIES[family].defaults:
        for kind in ("full_attention", "sliding_attention"):
            for value in NO_VALUE:
                both = dict.fromkeys(("full_attention", "sliding_attention"), settings)
                refused(family, {**base, "rope_parameters": {**both, kind: value}})


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("qwen3_next", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ("gpt_oss", {"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, r"num_experts_per_tok=5 of 4\b"),
        ("qwen3_moe", {"intermediate_size": 0}, "intermediate_size"),
        ("qwen3", {"head_dim": 0}, "head_dim=0"),
        ("qwen3", {"head_dim": -2}, "head_dim=-2"),
        ("qwen3", {"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
        ("qwen3_5_text", {"full_attention_interval": 0}, "full_attention_interval=0"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0"),
        ("qwen3", {"tie_word_embeddings": "false"}, 'tie_word_embeddings="false"'),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, r"partial_rotary_factor=1.5.*\b1\b"),
        ("qwen3", {"rms_norm_eps": True}, "rms_norm_eps=true"),
    ],
)
def test_nonsense_is_named(family, change, message):
    with pytest.raises(CheckpointError, match=message):
        read(family, {**COMMON, **OWN.get(family, {}), **change})
