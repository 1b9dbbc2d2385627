"""Models that read images too: their language model has the logits of transformers, and what reads
images stays in the checkpoint byte for byte."""

import json
from pathlib import Path

import pytest
import torch
from quickstarts import quickstart_with
from safetensors import safe_open

from lockstep.models.config import ModelConfig
from lockstep.models.hf_io import load_checkpoint, save_checkpoint
from lockstep.models.locate import locate_model
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.ops.context import PackedContext
from lockstep.run.preflight import read_model_files, summary

WHOLES = json.loads(Path(__file__).with_suffix(".json").read_text())
IDS = torch.randint(0, 80, (41,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=WHOLES)
def whole(request, tmp_path):
    """(transformers' model, its checkpoint)"""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**WHOLES[request.param])
    config._attn_implementation = "eager"
    made = getattr(transformers, f"{request.param}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    made.save_pretrained(tmp_path / "whole")
    return made, tmp_path / "whole"


def tensors_of(directory):
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def logits_of(model):
    hidden = model(IDS, torch.arange(len(IDS)), PackedContext.of([len(IDS)]))
    return hidden @ model.head.t()


def test_its_language_model_has_the_logits_of_transformers(whole):
    made, directory = whole
    model = load_checkpoint(directory)
    assert model.config.has_vision
    wanted = made(input_ids=IDS[None]).logits[0]
    with torch.no_grad():
        gap = (logits_of(model) - wanted).abs().max() / wanted.abs().max()
    assert gap < 1e-5


def test_a_trained_model_is_saved_with_what_reads_images_as_it_was(whole, tmp_path):
    made, directory = whole
    model = load_checkpoint(directory)
    save_checkpoint(model, tmp_path / "same", like=directory)
    before, same = tensors_of(directory), tensors_of(tmp_path / "same")
    assert before.keys() == same.keys()
    assert all(torch.equal(before[name], same[name]) for name in before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    save_checkpoint(model, tmp_path / "new", like=directory)
    new = tensors_of(tmp_path / "new")
    of_text = {name for name in new if name.startswith(model.config.prefix)} | {"lm_head.weight"}
    kept = new.keys() - of_text
    assert kept and all(torch.equal(before[name], new[name]) for name in kept)
    again = type(made).from_pretrained(tmp_path / "new").eval()
    with torch.no_grad():
        wanted = again(input_ids=IDS[None]).logits[0]
        assert (logits_of(model) - wanted).abs().max() / wanted.abs().max() < 1e-5


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_config_that_leaves_out_what_transformers_assumes_is_read_as_it_reads_it(is_tied):
    """As Gemma 3 is published. The whole says whether the head is tied, whatever the text says."""
    transformers = pytest.importorskip("transformers")
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    sparse = {"model_type": "gemma3", "text_config": text, "tie_word_embeddings": is_tied}
    whole = transformers.Gemma3Config(text_config=dict(text), tie_word_embeddings=is_tied).to_dict()
    found = ModelConfig.from_hf(sparse)
    assert found == ModelConfig.from_hf(whole)
    assert found.tie_embeddings == is_tied


def test_adapters_have_the_names_of_transformers_modules(whole):
    made, directory = whole
    shape = lora_shape(
        LoraConfig(rank=2, targets=("attention",)), ModelConfig.from_directory(directory)
    )
    modules = {name for name, _ in made.named_modules()}
    assert {site.hf_name for site in shape.sites} <= modules


def test_a_run_keeps_the_tower_and_says_so(whole):
    _, directory = whole
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["vocab_size"] = 4096
    config["text_config"]["max_position_embeddings"] = 4096
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "renderer.json"):
        (directory / name).write_bytes((locate_model("tiny-qwen3") / name).read_bytes())
    run = quickstart_with(f"model={directory}")
    found = read_model_files(run)
    assert found.model.has_vision
    assert any("images     not read: the tower is kept" in line for line in summary(run, found))
