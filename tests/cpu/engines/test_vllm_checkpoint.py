"""Checkpoints that vLLM would run as another model are refused before it starts."""

import json

import pytest

from lockstep.engines.vllm.checkpoint import check_readable, config_overrides
from lockstep.errors import CapabilityError
from lockstep.models.locate import locate_model

GPT_OSS = {
    "model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


def write(path, **changes):
    (path / "config.json").write_text(json.dumps(GPT_OSS | changes))
    return path


def test_windows_on_other_layers_than_vllms_are_refused():
    with pytest.raises(CapabilityError, match=r"layers 0, 2, 4 .*layer_types full_attention"):
        check_readable(locate_model("tiny-gpt-oss"), fills_head=True)
    check_readable(locate_model("tiny-qwen3"), fills_head=False)


def test_another_epsilon_than_vllms_is_refused(tmp_path):
    with pytest.raises(CapabilityError, match=r"1e-05.*rms_norm_eps 1e-06"):
        check_readable(write(tmp_path, rms_norm_eps=1e-6), fills_head=True)


def test_a_head_that_nobody_fills_is_refused(tmp_path):
    directory = write(tmp_path, tie_word_embeddings=True)
    with pytest.raises(CapabilityError, match=r"tie_word_embeddings.*engine\.in_process=true"):
        check_readable(directory, fills_head=False)
    check_readable(directory, fills_head=True)


def test_a_plain_rotary_embedding_is_yarn_of_factor_one(tmp_path):
    rope = config_overrides(write(tmp_path))["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 1.0)
    assert config_overrides(locate_model("tiny-qwen3")) == {}


def test_deepseek_v3_is_told_its_sigmoids_and_a_plain_rotation_in_words_that_rotate_it(tmp_path):
    routes = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    found = config_overrides(write(tmp_path, model_type="deepseek_v3"))
    assert found.items() >= routes.items() and found["rope_parameters"]["rope_type"] == "yarn"
    scaled = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0}}
    assert config_overrides(write(tmp_path, model_type="deepseek_v3", **scaled)) == routes
