"""config.json of real models, as they are on the hub, and what is refused."""

import json
import math
from pathlib import Path

import pytest

from lockstep.errors import CheckpointError
from lockstep.models.attention_config import LinearScaling, LinearShape, Llama3Scaling, YarnScaling
from lockstep.models.config import FallbackConfig, ModelConfig

HUB = json.loads(Path(__file__).with_name("hub_configs.json").read_text())
REFUSED = json.loads(Path(__file__).with_name("refused_configs.json").read_text())
"""[model, changes of its config.json, what the error matches]. A "(gone)" key is missing."""
READ = {
    "Olmo-3-7B": {
        "windows": (4096, 4096, 4096, None) * 8,
        "norms": "after",
        "window_rope_theta": 500000.0,
        "rope_theta": 500000.0,
        "tie_embeddings": False,
        "rope_scaling": YarnScaling(
            factor=8.0, original_max_position_embeddings=8192, attention_factor=1.2079441541679836
        ),
    },
    "glm-4.5-air": {
        "rotary_dim": 64,
        "num_experts": 128,
        "shared_width": 1408,
        "num_extra_layers": 1,
        "has_output_bias": False,
    },
    "gemma-3-1b": {
        "windows": ((512,) * 5 + (None,)) * 4 + (512, 512),
        "norms": "both",
        "norm_weights": "centered",
        "embedding_scale": 1152**0.5,
        "query_scale": 256.0,
        "tie_embeddings": True,
        "window_rope_theta": 10000.0,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
    },
    "gpt-oss-20b": {
        "windows": (128, None) * 12,
        "has_sinks": True,
        "head_dim": 64,
        "num_experts": 32,
        "has_attention_bias": True,
        "has_output_bias": True,
        "rope_theta": 150000.0,
        "rope_scaling": YarnScaling(
            factor=32.0, original_max_position_embeddings=4096, truncate=False
        ),
    },
    "Qwen2.5-0.5B": {
        "windows": (None,) * 24,
        "head_dim": 64,
        "has_attention_bias": True,
        "has_output_bias": False,
        "tie_embeddings": True,
        "has_qk_norm": False,
    },
    "Qwen3-30B-A3B": {
        "windows": (None,) * 48,
        "intermediate_size": 768,
        "num_experts": 128,
        "num_active_experts": 8,
        "has_normalized_routes": True,
        "dense_layers": (),
        "has_router_bias": False,
        "has_qk_norm": True,
    },
    "Qwen3-8B": {"windows": (None,) * 36, "head_dim": 128, "has_attention_bias": False},
    "Llama-3.1-8B": {
        "windows": (None,) * 32,
        "head_dim": 128,
        "has_attention_bias": False,
        "rope_scaling": Llama3Scaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    },
    "Mistral-7B-v0.1": {"windows": (4096,) * 32, "rope_theta": 10000.0},
    "Qwen3-Next-80B-A3B": {
        "attention_layers": tuple(range(3, 48, 4)),
        "linear": LinearShape(
            layers=tuple(i for i in range(48) if i % 4 != 3),
            key_heads=16,
            value_heads=32,
            key_dim=128,
            value_dim=128,
            conv_width=4,
            is_grouped=True,
        ),
        "rotary_dim": 64,
        "shared_width": 512,
        "num_active_experts": 10,
        "dense_layers": (),
    },
}


@pytest.mark.parametrize("name", HUB)
def test_the_configs_of_the_hub_are_read(name):
    config = ModelConfig.from_hf(HUB[name])
    assert config.architecture == HUB[name]["model_type"]
    assert {k: getattr(config, k) for k in READ[name]} == READ[name]


def changed(name, **values):
    return {k: v for k, v in {**HUB[name], **values}.items() if v not in (..., "(gone)")}


@pytest.mark.parametrize(
    ("name", "values", "windows"),
    [
        (
            "Qwen2.5-0.5B",
            {"use_sliding_window": True, "max_window_layers": 20},
            (None,) * 20 + (32768,) * 4,
        ),
        ("Qwen3-30B-A3B", {"use_sliding_window": True, "sliding_window": 512}, (512,) * 48),
        ("Mistral-7B-v0.1", {"sliding_window": None}, (None,) * 32),
        ("Mistral-7B-v0.1", {"sliding_window": ...}, (4096,) * 32),
        ("gpt-oss-20b", {"layer_types": ...}, (128, None) * 12),
    ],
)
def test_windows_are_those_of_transformers(name, values, windows):
    assert ModelConfig.from_hf(changed(name, **values)).windows == windows


def test_a_mixture_may_have_dense_layers():
    found = ModelConfig.from_hf(
        changed("Qwen3-30B-A3B", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    )
    assert found.dense_layers == (0, 2, 3, 4) and found.dense_intermediate_size == 6144


def test_a_mixture_of_glm_may_have_no_dense_layer_and_none_for_further_tokens():
    source = changed("glm-4.5-air", first_k_dense_replace=0, num_nextn_predict_layers=0)
    found = ModelConfig.from_hf(source)
    assert found.dense_layers == () and found.num_extra_layers == 0
    assert ModelConfig.from_hf(HUB["glm-4.5-air"]).dense_layers == (0,)
    with pytest.raises(CheckpointError, match='num_nextn_predict_layers="x"'):
        ModelConfig.from_hf(changed("glm-4.5-air", num_nextn_predict_layers="x"))


def test_both_spellings_of_rope_read_alike():
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    new = ModelConfig.from_hf(
        changed("Llama-3.1-8B", rope_parameters=rope, rope_scaling=..., rope_theta=...)
    )
    old = ModelConfig.from_hf(
        changed("Llama-3.1-8B", rope_scaling={"type": "linear", "factor": 2.0})
    )
    assert new == old and new.rope_scaling == LinearScaling(factor=2.0)


def test_a_rope_for_each_kind_of_layer_reads_like_the_older_spelling():
    old = changed("gemma-3-1b", rope_scaling={"rope_type": "linear", "factor": 8.0})
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    }
    gone = dict.fromkeys(("rope_scaling", "rope_theta", "rope_local_base_freq"), ...)
    new = changed("gemma-3-1b", rope_parameters=rope, **gone)
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(old)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        *REFUSED,
        ("Qwen3-8B", {"layer_types": ["full_attention"] * 35}, "num_hidden_layers=36"),
        ("Qwen3-8B", {"layer_types": ["sliding_attention"] * 36}, "sliding_window"),
        (
            "Qwen3-Next-80B-A3B",
            {"layer_types": ["linear_attention"] * 47 + ["mamba"]},
            "layer_types.*num_hidden_layers=48.*full_attention.*linear_",
        ),
    ],
)
def test_what_would_change_the_numbers_is_refused_with_key_and_value(name, values, message):
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(changed(name, **values))


def test_all_problems_of_a_config_are_listed_not_the_first():
    source = changed(
        "Qwen3-8B",
        vocab_size=...,
        rms_norm_eps=...,
        hidden_act="relu",
        mlp_bias=True,
        rope_scaling={"rope_type": "longrope"},
    )
    with pytest.raises(CheckpointError) as error:
        ModelConfig.from_hf(source, where="here/config.json")
    for part in (
        "here/config.json: ",
        "vocab_size is missing",
        "rms_norm_eps is missing",
        'hidden_act="relu"',
        "mlp_bias=true",
        "rope_type='longrope'",
    ):
        assert part in str(error.value)


def test_an_unknown_architecture_names_those_that_are_known_and_the_fallback():
    with pytest.raises(CheckpointError, match=r"'mamba'.*gpt_oss.*fallback=true"):
        ModelConfig.from_hf({"model_type": "mamba"})


def test_a_torn_config_is_an_error_with_its_path(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"')
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        ModelConfig.from_directory(tmp_path / "nowhere")


def test_what_the_fallback_must_know_is_read_without_transformers(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_positions": 64}
        )
    )
    found = FallbackConfig.from_directory(tmp_path)
    assert (found.architecture, found.hidden_size, found.max_positions) == ("gpt2", 8, 64)
    hybrid = {"vocab_size": 9, "hidden_size": 8, "layers_block_type": ["mlp"] * 3}
    path.write_text(json.dumps({"model_type": "nemotron_h", **hybrid}))
    assert FallbackConfig.from_directory(tmp_path).num_layers == 3
    path.write_text(json.dumps({"model_type": "t5", "vocab_size": 9, "is_encoder_decoder": True}))
    with pytest.raises(CheckpointError, match=r"is_encoder_decoder=true.*hidden_size.*n_embd"):
        FallbackConfig.from_directory(tmp_path)


FALLBACK = {
    "model_type": "olmo2", "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2,
    "max_position_embeddings": 128, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize("key", FALLBACK)
def test_a_value_that_a_fallback_cannot_have_is_refused_in_one_line(key, tmp_path):
    for value in (-1, 1.5, True, [], {}, 2**70, 10**400, math.nan, math.inf, "4" * 10**5):
        if key == "model_type" and isinstance(value, str):
            continue
        (tmp_path / "config.json").write_text(json.dumps({**FALLBACK, key: value}))
        with pytest.raises(CheckpointError, match=f"{key}=") as caught:
            FallbackConfig.from_directory(tmp_path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000
