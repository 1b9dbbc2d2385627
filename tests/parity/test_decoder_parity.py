"""The decoder against Hugging Face's models: logits, gradients, checkpoints."""

import json

import pytest
import torch

from lockstep.errors import CheckpointError
from lockstep.models.hf_io import WEIGHTS, load_checkpoint, save_checkpoint
from lockstep.ops.context import PackedContext

transformers = pytest.importorskip("transformers", reason="pip install 'lockstep-rl[transformers]'")

SHAPE = {
    "vocab_size": 199, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 32,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def make_hf(kind, *, rope=PLAIN, tie=False, seed=0, **extra):
    torch.manual_seed(seed)
    if kind == "gpt_oss":
        config = transformers.GptOssConfig(
            **SHAPE, intermediate_size=40, num_local_experts=4, num_experts_per_tok=2,
            sliding_window=8, rope_parameters=rope, tie_word_embeddings=tie, initializer_range=0.2,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"], **extra,
        )  # fmt: skip
        model = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager")
    else:
        config = transformers.Qwen3Config(
            **SHAPE, intermediate_size=96, rope_parameters=rope, tie_word_embeddings=tie,
            initializer_range=0.2, **extra,
        )  # fmt: skip
        model = transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter))
    return model.float().eval()


@pytest.fixture(
    params=[
        ("gpt_oss", PLAIN, True), ("gpt_oss", YARN, False), ("qwen3", PLAIN, True),
        ("qwen3", YARN, False),
    ],
    ids=lambda p: f"{p[0]}-{p[1]['rope_type']}-{'tied' if p[2] else 'untied'}",
)  # fmt: skip
def pair(request, tmp_path):
    kind, rope, tie = request.param
    theirs = make_hf(kind, rope=rope, tie=tie)
    theirs.save_pretrained(tmp_path / "hf")
    return theirs, load_checkpoint(tmp_path / "hf"), tmp_path


def our_logits(model, lengths, ids):
    positions = torch.cat([torch.arange(n) for n in lengths])
    return model.logits(model(ids, positions, PackedContext.of(lengths)))


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
    (wanted.log_softmax(-1) * weight).sum().backward()
    from lockstep.models.hf_io import parameter_sources

    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    for name, source in parameter_sources(ours.config).items():
        expected = source.load(torch.cat([other[n].grad for n in source.names]))
        error = (mine[name].grad - expected).norm() / expected.norm()
        assert error <= 2e-5, f"{name}: relative gradient error {error:.2e}"


def test_a_checkpoint_is_saved_back_byte_equal(pair):
    theirs, ours, root = pair
    save_checkpoint(ours, root / "again", like=root / "hf")
    from safetensors.torch import load_file

    before, after = load_file(root / "hf" / WEIGHTS), load_file(root / "again" / WEIGHTS)
    assert set(before) == set(after)
    assert all(torch.equal(before[n], after[n]) for n in before)
    reloaded = type(theirs).from_pretrained(root / "again", attn_implementation="eager")
    ids = torch.arange(12)[None]
    assert torch.equal(reloaded.float()(input_ids=ids).logits, theirs(input_ids=ids).logits)


def test_every_misfit_of_a_checkpoint_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    make_hf("qwen3").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    tensors["extra.weight"] = torch.zeros(1)
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(tmp_path)
    for part in ("missing model.layers.1.self_attn.q_norm", "unexpected extra", "found [7]"):
        assert part in str(error.value)


def test_another_architecture_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(CheckpointError, match=r"mamba.*gpt_oss, qwen3"):
        load_checkpoint(tmp_path)
