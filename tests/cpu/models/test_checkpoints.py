"""Checkpoints that do not fit their config, or are not whole: every fault in one error."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.errors import CheckpointError
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import (
    INDEX,
    WEIGHTS,
    copy_decoder,
    hf_tensors,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from lockstep.models.tiny import hf_config


@pytest.fixture
def checkpoint(tmp_path):
    """In three shards."""
    (tmp_path / "like").mkdir()
    source = hf_config("qwen3", 160, None)
    (tmp_path / "like" / "config.json").write_text(json.dumps(source))
    model = Decoder(ModelConfig.from_hf(source))
    save_checkpoint(model, tmp_path / "it", like=tmp_path / "like", max_shard_bytes=150_000)
    assert len(list((tmp_path / "it").glob("*.safetensors"))) == 3
    return tmp_path / "it"


def shards(directory):
    return sorted(directory.glob("*.safetensors"))


def rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def error_of(directory):
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(directory)
    return str(error.value)


def test_missing_extra_misshapen_and_quantised_tensors_are_all_named(checkpoint):
    model = load_checkpoint(checkpoint)
    shutil.rmtree(checkpoint)
    save_checkpoint(model, checkpoint, like=checkpoint.with_name("like"))

    def change(tensors):
        del tensors["model.layers.1.self_attn.q_norm.weight"]
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["extra.weight"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(7)
        tensors["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(128, 64, dtype=torch.int8)

    rewrite(checkpoint / WEIGHTS, change)
    found = error_of(checkpoint)
    for part in (
        "missing (2): model.layers.0.mlp.up_proj.weight, model.layers.1.self_attn.q_norm.weight",
        "misshapen (1): model.norm.weight (expected [64], found [7])",
        "unreadable (1): model.layers.0.mlp.gate_proj.weight (expected F64 or F32 or F16 or BF16, "
        "found I8; of quantised weights, only MXFP4",
        "unexpected (1): extra.weight",
    ):
        assert part in found


def test_a_long_list_is_cut_and_counted(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"num_hidden_layers": 9, "layer_types": ["full_attention"] * 9}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert "missing (77): " in error_of(checkpoint) and "and 57 more" in error_of(checkpoint)


def test_torn_and_missing_shards_are_named_together(checkpoint):
    first, second, _ = shards(checkpoint)
    first.write_bytes(first.read_bytes()[:-10])
    second.unlink()
    found = error_of(checkpoint)
    assert f"{first} cannot be read" in found and f"names {second.name}, which is not" in found


def test_an_index_that_does_not_fit_its_shards_is_refused(checkpoint):
    rewrite(shards(checkpoint)[2], lambda tensors: tensors.pop("model.norm.weight"))
    assert f"{shards(checkpoint)[2].name} does not hold model.norm.weight" in error_of(checkpoint)
    rewrite(shards(checkpoint)[0], lambda tensors: tensors.update(stray=torch.zeros(2)))
    assert "holds stray, which model.safetensors.index.json has in no file" in error_of(checkpoint)
    (checkpoint / INDEX).write_text('{"weight_map": {"a": "../other/model.safetensors"}}')
    assert "'../other/model.safetensors': expected a file beside it" in error_of(checkpoint)
    for name in ("..", "", "a\0b", "a\nb", "a" * 5000, "\ud800"):
        (checkpoint / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        text = error_of(checkpoint)
        assert f"{INDEX} names {name[:9]!r}"[:-1].replace("'", "") in text, text
        assert "\n" not in text and len(text) < 1000
    many = {f"tensor {number}": f"{number}.safetensors" for number in range(20_000)}
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": many}))
    assert "and 19980 more" in error_of(checkpoint)
    (checkpoint / INDEX).write_text('{"weight_map": ' + "[" * 100_000)
    assert "it is not JSON (maximum recursion depth" in error_of(checkpoint)
    (checkpoint / INDEX).write_text("{}")
    assert "has no weight_map" in error_of(checkpoint)


def test_two_sets_of_weights_and_none_are_refused(checkpoint):
    shutil.copy(shards(checkpoint)[0], checkpoint / WEIGHTS)
    assert "two sets of weights" in error_of(checkpoint)
    for path in (*shards(checkpoint), checkpoint / INDEX):
        path.unlink()
    assert "holds neither model.safetensors nor" in error_of(checkpoint)


def test_a_tied_head_may_be_there_and_must_be_the_embedding(checkpoint):
    path = checkpoint.with_name("tied")
    save_checkpoint(load_checkpoint(checkpoint), path, like=checkpoint.with_name("like"))
    rewrite(
        path / WEIGHTS,
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    save_checkpoint(load_checkpoint(path), path.with_name("again"), like=path)
    assert (path.with_name("again") / WEIGHTS).read_bytes() == (path / WEIGHTS).read_bytes()
    rewrite(path / WEIGHTS, lambda t: t["lm_head.weight"].add_(1))
    assert "lm_head.weight differs from model.embed_tokens.weight" in error_of(path)


def test_weights_that_do_not_fit_leave_the_model_as_it_was():
    config = ModelConfig.from_hf(hf_config("gpt_oss", 160, None))
    model, other = Decoder(config), Decoder(config)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    torn = dict(hf_tensors(other))
    torn.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"\(1\): model\.norm\.weight"):
        load_weights(model, torn, where="here")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_config_that_says_torch_dtype_keeps_that_key(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (checkpoint / "config.json").write_text(json.dumps(config))
    again = checkpoint.with_name("again")
    save_checkpoint(load_checkpoint(checkpoint), again, like=checkpoint)
    assert json.loads((again / "config.json").read_text()) == config
    assert [p.read_bytes() for p in shards(again)] == [p.read_bytes() for p in shards(checkpoint)]


GLM = {
    "model_type": "glm4_moe", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 99,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "moe_intermediate_size": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False, "attention_bias": True,
}  # fmt: skip


@pytest.fixture
def mixture(tmp_path):
    """bfloat16, with a float32 bias of the router, and a layer behind the last."""
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "config.json").write_text(json.dumps(GLM))
    model = Decoder(ModelConfig.from_hf(GLM)).bfloat16()
    save_checkpoint(model, tmp_path / "it", like=tmp_path / "like")

    def change(tensors):
        tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = 5 + torch.arange(4) * 1e-4
        tensors["model.layers.2.eh_proj.weight"] = torch.randn(32, 64, dtype=torch.bfloat16)
        tensors["model.layers.2.shared_head.norm.weight"] = torch.ones(32)

    rewrite(tmp_path / "it" / WEIGHTS, change)
    return tmp_path / "it"


def test_the_bias_of_the_choice_is_float32_where_torchs_default_is_another():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it makes a model
    try:
        model = Decoder(ModelConfig.from_hf(GLM))
    finally:
        torch.set_default_dtype(before)
    assert model.embedding.dtype == torch.bfloat16
    assert model.layers[1].mlp.router.choice_bias.dtype == torch.float32


def test_layers_that_are_not_run_and_float32_beside_bfloat16_are_saved_as_they_were(
    mixture, tmp_path
):
    model = load_checkpoint(mixture, dtype=torch.bfloat16)
    bias = model.layers[1].mlp.router.choice_bias
    assert bias.dtype == torch.float32 and len(set(bias.tolist())) == 4 and not bias.requires_grad
    save_checkpoint(model, tmp_path / "again", like=mixture)
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (mixture / WEIGHTS).read_bytes()
    copied = copy_decoder(model, dtype=torch.float16)
    assert torch.equal(copied.layers[1].mlp.router.choice_bias, bias)

    rewrite(mixture / WEIGHTS, lambda t: t.update({"model.layers.3.x": torch.ones(1)}))
    assert "unexpected (1): model.layers.3.x" in error_of(mixture)
