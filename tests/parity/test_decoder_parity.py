"""Every family of the decoder against Hugging Face's models: logits, gradients, checkpoints."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from lockstep.errors import CheckpointError
from lockstep.models.hf_io import INDEX, load_checkpoint, save_checkpoint
from lockstep.models.shapes import decoder_layout
from lockstep.ops.context import PackedContext
from lockstep.training.optimizer import is_decayed

transformers = pytest.importorskip("transformers", reason="pip install 'lockstep-rl[transformers]'")

CONFIGS = json.loads(Path(__file__).with_suffix(".json").read_text())
SHAPE, ROPE = CONFIGS["shape"], CONFIGS["rope"]
CASES, HYBRIDS, LATENTS = (CONFIGS[name] for name in ("cases", "hybrids", "latents"))
"""Case -> (class of transformers, name of its rope, whether the head is tied, more of its config).
The latents have no layer with experts, for routers are float32 in a model of any dtype."""


def make_hf(case, *, seed=0):
    """No norm, bias or sink is at its start."""
    name, rope, is_tied, extra = {**CASES, **HYBRIDS, **LATENTS}[case]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(
        **{**SHAPE, **extra}, rope_parameters=dict(ROPE[rope]), tie_word_embeddings=is_tied
    )
    cls = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    model = cls._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias", "norm.weight", "gate.weight", "A_log")):
                parameter.add_(torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer))
    return model.float().eval()


@pytest.fixture(params=[*CASES, *HYBRIDS])
def pair(request, tmp_path):
    theirs = make_hf(request.param)
    theirs.save_pretrained(tmp_path / "hf")
    return theirs, load_checkpoint(tmp_path / "hf"), tmp_path


def our_logits(model, lengths, ids):
    positions = torch.cat([torch.arange(n) for n in lengths])
    return model.logits(model(ids, positions, PackedContext.of(lengths)))


def as_in_transformers(model, values):
    """values: our parameter name -> tensor of its shape. The same under the names of transformers'
    parameters, which are those of the checkpoint but for Qwen3-MoE's experts: one by one on disk,
    in memory as ours."""
    out = {}
    for name, layout in decoder_layout(model.config).items():
        if name.endswith("choice_bias"):  # a buffer there
            assert values[name] is None
            continue
        if ".experts.0." in layout.pieces[0].name:
            out["model." + name.replace("mlp.", "mlp.experts.")] = values[name]
        else:
            out |= {p.name: p.view(values[name]).reshape(p.shape) for p in layout.pieces}
    return out


@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_logits_and_gradients_equal_transformers(pair):
    theirs, ours, _ = pair
    lengths = [21, 4, 33]
    ids = torch.randint(199, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    found = our_logits(ours, lengths, ids)
    wanted = torch.cat([theirs(input_ids=row[None]).logits[0] for row in ids.split(lengths)])
    scale = wanted.abs().max()
    assert (found - wanted).abs().max() <= 1e-5 * scale

    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4))
    (found.log_softmax(-1) * weight).sum().backward()
    mine = as_in_transformers(ours, {n: p.grad for n, p in ours.named_parameters()})
    other = their_gradients(theirs, lengths, ids, weight)
    assert mine.keys() == other.keys()
    if max(distances(mine, other).values()) <= 1e-5:
        return
    # Sums that cancel (a sink's) are less exact in float32, on either side: float64 is the judge.
    theirs.set_experts_implementation("eager")
    exact = their_gradients(theirs.double(), lengths, ids, weight)
    own = distances(other, exact)
    wrong = {n: x for n, x in distances(mine, exact).items() if x > max(1e-5, own[n])}
    assert not wrong, own


@pytest.mark.parametrize("pair", [*HYBRIDS, *LATENTS], indirect=True)
def test_a_model_equals_transformers_in_float64(pair, monkeypatch):
    """In float32 both sides of a hybrid are some 1e-4 from the exact numbers, since a norm follows
    a state that is almost empty; and transformers unfolds latents. It computes parts in float32
    whatever the model's dtype; here these parts are float64 too, but for the angles, which ours
    reads from a float32 table."""
    theirs, _, root = pair
    lengths = [21, 4, 133]
    ids = torch.randint(199, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    ours = load_checkpoint(root / "hf", dtype=torch.float64)
    found = our_logits(ours, lengths, ids)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(4)).double()
    (found.log_softmax(-1) * weight).sum().backward()
    mine = as_in_transformers(ours, {n: p.grad for n, p in ours.named_parameters()})

    scale = theirs.model.rotary_emb.attention_scaling
    inverse, as_float32 = theirs.model.rotary_emb.inv_freq.clone(), torch.Tensor.float

    def rotations(x, position_ids):
        position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids
        angle = as_float32(position_ids)[..., None] * inverse
        angle = torch.cat([angle, angle], -1)
        return (angle.cos() * scale).to(x.dtype), (angle.sin() * scale).to(x.dtype)

    theirs = theirs.double()
    theirs.set_experts_implementation("eager")
    theirs.model.rotary_emb.forward = rotations
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    wanted = torch.cat([theirs(input_ids=row[None]).logits[0] for row in ids.split(lengths)])
    other = their_gradients(theirs, lengths, ids, weight)
    assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()
    assert mine.keys() == other.keys() and max(distances(mine, other).values()) <= 1e-9


def their_gradients(theirs, lengths, ids, weight):
    theirs.zero_grad()
    logits = torch.cat([theirs(input_ids=row[None]).logits[0] for row in ids.split(lengths)])
    (logits.log_softmax(-1) * weight).sum().backward()
    return {name: p.grad.clone() for name, p in theirs.named_parameters()}


def distances(found, wanted):
    return {n: float((found[n] - x).norm() / x.norm()) for n, x in wanted.items()}


@pytest.mark.parametrize("max_shard_size", ["1GB", "40KB"])
def test_a_checkpoint_is_saved_back_byte_equal(pair, max_shard_size):
    theirs, _, root = pair
    theirs.to(torch.bfloat16).save_pretrained(root / "bf16", max_shard_size=max_shard_size)
    ours = load_checkpoint(root / "bf16", dtype=torch.bfloat16)
    save_checkpoint(ours, root / "again", like=root / "bf16")

    before, after = ({p.name: p for p in (root / d).iterdir()} for d in ("bf16", "again"))
    assert set(after) == set(before) - {"generation_config.json"} | {*after}
    assert (INDEX in before) == (max_shard_size == "40KB") and (INDEX in after) == (INDEX in before)
    for name in (n for n in before if n.endswith(".safetensors")):
        assert after[name].read_bytes() == before[name].read_bytes(), name
    configs = [json.loads(d["config.json"].read_text()) for d in (before, after)]
    assert configs[0] == configs[1]
    ids = torch.arange(12)[None]
    logits = [
        type(theirs).from_pretrained(root / d)(input_ids=ids).logits for d in ("bf16", "again")
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize("case", [*CASES, *HYBRIDS])
def test_the_parameters_of_transformers_trainer_are_decayed_but_for_sinks_and_rates(case, tmp_path):
    theirs = make_hf(case)
    decayed = transformers.Trainer.get_decay_parameter_names(None, theirs)
    theirs.save_pretrained(tmp_path / "hf")
    ours = load_checkpoint(tmp_path / "hf")
    named = {n: torch.full_like(p, is_decayed(n)) for n, p in ours.named_parameters()}
    named |= {name: None for name in named if name.endswith("choice_bias")}
    for name, values in as_in_transformers(ours, named).items():
        is_theirs = name in decayed and not name.endswith(("sinks", "A_log"))
        assert bool(values.any()) == is_theirs, name


def test_experts_in_one_tensor_are_read_as_one_by_one(tmp_path):
    """Qwen3.5 is published so; transformers saves a tensor for each."""
    make_hf("qwen3_5_moe_text").save_pretrained(tmp_path / "hf")
    wanted = load_checkpoint(tmp_path / "hf")
    tensors = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config.pop("intermediate_size", None)  # which it has no use for
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    for name, parameter in wanted.named_parameters():
        if parameter.ndim == 3 and name.endswith("_proj"):
            stem = f"model.{name.replace('mlp.', 'mlp.experts.')}"
            for one in decoder_layout(wanted.config)[name].pieces:
                del tensors[one.name]
            tensors[stem] = parameter.detach().clone()
    safetensors.torch.save_file(tensors, tmp_path / "hf" / "model.safetensors")
    found = load_checkpoint(tmp_path / "hf")
    for name, parameter in wanted.named_parameters():
        assert torch.equal(dict(found.named_parameters())[name], parameter), name
    del tensors[stem]
    safetensors.torch.save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"\(\d+\).*experts.0.down_proj.weight"):
        load_checkpoint(tmp_path / "hf")
