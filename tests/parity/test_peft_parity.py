"""Adapters against PEFT: it reads ours and computes the same, and we read what it writes."""

import json

import pytest
import torch
from test_decoder_parity import make_hf, our_logits

from lockstep.errors import CheckpointError
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.lora import adapter_scaled, add_adapter
from lockstep.models.lora_config import LoraConfig
from lockstep.models.peft_format import CONFIG, WEIGHTS, read_shape, resolve_shape
from lockstep.models.peft_io import load_adapter, peft_tensors, save_adapter

peft = pytest.importorskip("peft", reason="pip install 'lockstep-rl[parity]'")
safetensors = pytest.importorskip("safetensors.torch")

LENGTHS = [21, 4, 33]
KINDS = {
    "qwen3": [(), ("*.q_proj", "*.v_proj", "layers.1.mlp.up_proj")],
    "gpt_oss": [
        (),
        ("experts",),
        ("attention", "*.experts.down_proj"),
        ("layers.0.*.experts.gate_up_proj", "layers.2.*.experts.*", "layers.1.*.o_proj"),
    ],
    # Mixtures with dense layers, or experts that every token goes to.
    "qwen3_moe-dense-layers": [(), ("mlp",), ("mlp", "*.experts.down_proj"), ("*.0.mlp.up_proj",)],
    "glm4_moe": [(), ("mlp",), ("experts", "*.shared.*"), ("*.shared.up_proj",)],
    "deepseek_v3-plain": [("mlp", "experts"), ("mlp", "*.o_proj")],
}
CASES = [(kind, targets) for kind, choices in KINDS.items() for targets in choices]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{','.join(case[1]) or 'all'}")
def pair(request, tmp_path):
    """(PEFT's model that loaded our adapter, ours, its directory)."""
    kind, targets = request.param
    theirs = make_hf(kind)
    theirs.save_pretrained(tmp_path / "base")
    ours = load_checkpoint(tmp_path / "base")
    config = LoraConfig(rank=3, alpha=5.0, rslora=kind == "qwen3", targets=targets)
    shape = resolve_shape(config, ours.config, tmp_path / "base", name=str(tmp_path / "base"))
    add_adapter(ours, shape, seed=0)
    fill(p for n, p in ours.named_parameters() if ".B" in n)
    save_adapter(ours, tmp_path / "adapter", base=tmp_path / "base")
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter", is_trainable=True)
    return adapted.eval(), ours, tmp_path


def fill(parameters, std=0.3):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))


def ids():
    return torch.randint(199, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def their_logits(model):
    return torch.cat([model(input_ids=row[None]).logits[0] for row in ids().split(LENGTHS)])


def test_peft_loads_our_adapter_and_gives_our_logits_and_gradients(pair):
    theirs, ours, _ = pair
    found, wanted = our_logits(ours, LENGTHS, ids()), their_logits(theirs)
    with adapter_scaled(ours, 0), theirs.disable_adapter():
        base = their_logits(theirs)
        off = our_logits(ours, LENGTHS, ids())
    scale = wanted.abs().max()
    assert (wanted - base).abs().max() > 0.05 * scale  # the adapter does something
    assert (off - base).abs().max() <= 1e-5 * scale
    assert (found - wanted).abs().max() <= 1e-5 * scale

    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4))
    (found.log_softmax(-1) * weight).sum().backward()
    (wanted.log_softmax(-1) * weight).sum().backward()
    expected = {
        name.replace(".default", ""): p.grad
        for name, p in theirs.named_parameters()
        if "lora" in name
    }
    for parameter in ours.parameters():  # the gradients take the parameters' way to PEFT's names
        if parameter.requires_grad:
            parameter.data = parameter.grad
    mine = dict(peft_tensors(ours))
    assert set(mine) == set(expected)
    for name, grad in mine.items():
        error = (grad - expected[name]).norm() / expected[name].norm()
        assert error <= 1e-5, f"{name}: relative gradient error {error:.2e}"


def test_we_load_what_peft_wrote_and_write_the_same_bytes(pair):
    theirs, ours, root = pair
    fill((p for n, p in theirs.named_parameters() if "lora" in n), std=0.1)
    theirs.save_pretrained(root / "again")
    load_adapter(ours, root / "again")
    scale = their_logits(theirs).abs().max()
    assert (our_logits(ours, LENGTHS, ids()) - their_logits(theirs)).abs().max() <= 1e-5 * scale
    found = read_shape(root / "again", ours.config)
    assert (found.sites, found.rank, found.scale) == (
        ours.lora.sites, ours.lora.rank, ours.lora.scale,
    )  # fmt: skip
    save_adapter(ours, root / "back", base=root / "base")
    left, right = (safetensors.load_file(root / d / WEIGHTS) for d in ("again", "back"))
    assert set(left) == set(right)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_setting_of_peft_that_we_do_not_compute_is_refused_by_name(tmp_path):
    theirs = make_hf("qwen3")
    theirs.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], use_dora=True, rank_pattern={"k_proj": 4}, bias="all"
    )
    peft.get_peft_model(theirs, config).save_pretrained(tmp_path / "adapter")
    model = load_checkpoint(tmp_path / "base").config
    with pytest.raises(CheckpointError) as error:
        read_shape(tmp_path / "adapter", model)
    for part in ("use_dora=True", "rank_pattern={'k_proj': 4}", "bias=all"):
        assert part in str(error.value)
    settings = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert settings["peft_type"] == "LORA"
