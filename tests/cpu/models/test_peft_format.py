"""Adapters on disk: every misfit is named, before a tensor is read. Values: tests/parity."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_lora import MODELS, make

from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.hf_io import save_checkpoint
from lockstep.models.lora_config import LoraConfig
from lockstep.models.peft_format import (
    BASE,
    CONFIG,
    WEIGHTS,
    check_base,
    config_of,
    digest_of,
    read_shape,
    resolve_shape,
)
from lockstep.models.peft_io import load_adapter, save_adapter

PREFIX = "base_model.model.model.layers"


@pytest.fixture(params=["dense", "moe"])
def saved(request, tmp_path):
    """(an adapted model, the directory of its adapter, that of its base)."""
    model = make(request.param)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    save_adapter(model, tmp_path / "adapter", base=tmp_path / "base")
    return model, tmp_path / "adapter", tmp_path / "base"


def change(path, key, value):
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def test_what_is_written_is_read_back_with_the_same_bits(saved):
    model, directory, _ = saved
    other = make("moe" if model.config.is_moe else "dense", is_trained=False)
    load_adapter(other, directory)
    for name, parameter in model.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter), name
    assert read_shape(directory, model.config) == model.lora


def test_a_mixture_with_dense_layers_is_written_and_read(tmp_path):
    model = make("mixed")
    (tmp_path / "config.json").write_text("{}")
    save_adapter(model, tmp_path / "adapter", base=tmp_path)
    other = make("mixed", is_trained=False)
    load_adapter(other, tmp_path / "adapter")
    for name, parameter in model.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter), name


def test_the_names_are_short_where_all_layers_have_them():
    settings = config_of(make("moe").lora, MODELS["moe"], "base")
    assert settings["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert settings["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    some = make("moe", targets=("*.q_proj", "layers.1.*.o_proj", "layers.0.mlp.*.down_proj")).lora
    settings = config_of(some, MODELS["moe"], "base")
    assert settings["target_modules"] == ["q_proj", "model.layers.1.self_attn.o_proj"]
    assert settings["target_parameters"] == ["model.layers.0.mlp.experts.down_proj"]


def test_every_tensor_that_does_not_fit_is_named(saved):
    model, directory, _ = saved
    tensors = load_file(directory / WEIGHTS)
    del tensors[f"{PREFIX}.0.self_attn.q_proj.lora_B.weight"]
    tensors[f"{PREFIX}.1.self_attn.o_proj.lora_A.weight"] = torch.zeros(3, 31)
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(3, 32)
    save_file(tensors, directory / WEIGHTS)
    with pytest.raises(CheckpointError) as error:
        read_shape(directory, model.config)
    for part in (
        f"missing {PREFIX}.0.self_attn.q_proj.lora_B.weight",
        "unexpected base_model.model.lm_head.lora_A.weight",
        f"{PREFIX}.1.self_attn.o_proj.lora_A.weight: expected [3, 32], found [3, 31]",
    ):
        assert part in str(error.value)


SETTINGS = {
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "init_lora_weights": "pissa",
    "peft_type": "IA3",
    "bias": "all",
    "r": 0,
    "a_setting_of_tomorrow": 1,
}


def test_every_setting_that_is_not_implemented_is_named(saved):
    model, directory, _ = saved
    for key, value in SETTINGS.items():
        change(directory / CONFIG, key, value)
    with pytest.raises(CheckpointError) as error:
        read_shape(directory, model.config)
    assert all(key in str(error.value) for key in SETTINGS)


def test_files_that_are_no_adapter_say_so(saved, tmp_path):
    model, directory, _ = saved
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read_shape(tmp_path, model.config)
    content = (directory / WEIGHTS).read_bytes()
    for part in (content[:-9], content[:40], b""):
        (directory / WEIGHTS).write_bytes(part)
        with pytest.raises(CheckpointError, match="A torn copy"):
            read_shape(directory, model.config)
    (directory / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="pickle"):
        read_shape(directory, model.config)
    (directory / CONFIG).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_shape(directory, model.config)


def test_a_path_says_what_the_adapter_is_and_settings_may_not_differ(saved):
    model, directory, base = saved
    found = resolve_shape(LoraConfig(path=str(directory)), model.config, base, name=str(base))
    assert found == model.lora
    same = LoraConfig(path=str(directory), rank=3, alpha=16.0, rslora=False)
    assert resolve_shape(same, model.config, base, name=str(base)) == found
    other = LoraConfig(path=str(directory), rank=4, alpha=1.0, targets=("*.q_proj",))
    with pytest.raises(ConfigError) as error:
        resolve_shape(other, model.config, base, name=str(base))
    for part in ("lora.rank=4 and 3 there", "lora.alpha=1.0 and 16.0", "lora.targets=*.q_proj"):
        assert part in str(error.value)


def test_a_base_is_told_by_its_weights_and_not_by_its_place(tmp_path):
    model = make("dense")
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    save_checkpoint(model, tmp_path / "one", like=like)
    save_checkpoint(model, tmp_path / "two", like=like)
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "two")
    with torch.no_grad():
        model.embedding += 1e-3
    save_checkpoint(model, tmp_path / "three", like=like)
    assert digest_of(tmp_path / "one") != digest_of(tmp_path / "three")

    save_adapter(model, tmp_path / "adapter", base=tmp_path / "one")
    check_base(tmp_path / "adapter", tmp_path / "two")
    for is_ours in (True, False):
        if not is_ours:  # PEFT's own names the directory
            (tmp_path / "adapter" / BASE).unlink()
        with pytest.raises(CheckpointError, match=r"adapter of .*one"):
            check_base(tmp_path / "adapter", tmp_path / "three")
    change(tmp_path / "adapter" / CONFIG, "base_model_name_or_path", "somebody/small")
    check_base(tmp_path / "adapter", tmp_path / "three")  # a directory may hold it: nobody knows
    check_base(tmp_path / "adapter", tmp_path / "three", name="somebody/small")
    with pytest.raises(CheckpointError, match="somebody/large"):
        check_base(tmp_path / "adapter", tmp_path / "three", name="somebody/large")


def test_an_adapter_of_another_rank_is_not_copied_into_this_one(saved):
    model, directory, _ = saved
    other = make("moe" if model.config.is_moe else "dense", rank=2)
    with pytest.raises(CheckpointError, match=r"rank 3.*rank 2"):
        load_adapter(other, directory)
