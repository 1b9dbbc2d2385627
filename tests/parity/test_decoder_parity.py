"""Every family of the decoder against Hugging Face's models: logits, gradients, checkpoints."""

import json

import pytest
import safetensors.torch
import torch

from lockstep.errors import CheckpointError
from lockstep.models.hf_io import INDEX, load_checkpoint, save_checkpoint
from lockstep.models.shapes import decoder_layout
from lockstep.ops.context import PackedContext
from lockstep.training.optimizer import is_decayed

transformers = pytest.importorskip("transformers", reason="pip install 'lockstep-rl[transformers]'")

SHAPE = {
    "vocab_size": 199, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 256,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
WIDE_HEADS = {"head_dim": 16}  # 6 x 16 is twice the hidden size
ROPE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 32,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "latent-yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 32,
    },
    "half": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "sections": {  # of images and films; text has one position in all of them
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
    "by-layer": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "yarn-by-layer": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "attention_factor": 1.2, "original_max_position_embeddings": 32,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    },
}  # fmt: skip
GPT_OSS = {
    **WIDE_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
MOE = {
    **WIDE_HEADS, "moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2,
}  # fmt: skip
SLIDING = {"use_sliding_window": True, "sliding_window": 8}
WINDOWS = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
PACKABLE = {**GPT_OSS, "hidden_size": 64, "intermediate_size": 32}  # multiples of 32
GLM = {
    **WIDE_HEADS, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "num_mtp_layers": 0,
}  # fmt: skip
LATENT = {
    **GLM, "head_dim": 8, "kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 14, "n_group": 4, "topk_group": 2,
    "num_key_value_heads": 6,
}  # fmt: skip
HYBRID = {
    **WIDE_HEADS, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 12, "linear_value_head_dim": 10, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 3,
}  # fmt: skip
SHARED = {
    **HYBRID, "moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 20,
}  # fmt: skip
CASES = {
    "gpt_oss": ("GptOss", "default", True, GPT_OSS),
    "gpt_oss-mxfp4": ("GptOss", "yarn", False, PACKABLE),
    "gpt_oss-yarn": ("GptOss", "yarn", False, GPT_OSS),
    "qwen2": ("Qwen2", "default", True, {}),
    "qwen2-windows": ("Qwen2", "yarn", False, {**SLIDING, "max_window_layers": 1}),
    "qwen3": ("Qwen3", "default", True, WIDE_HEADS),
    "qwen3-biases": ("Qwen3", "yarn", False, {**WIDE_HEADS, "attention_bias": True}),
    "qwen3_moe": ("Qwen3Moe", "default", True, {**MOE, "norm_topk_prob": True}),
    "qwen3_moe-dense-layers": (
        "Qwen3Moe", "linear", False,
        {**MOE, **SLIDING, "norm_topk_prob": False, "decoder_sparse_step": 2},
    ),
    "llama": ("Llama", "llama3", False, {}),
    "llama-biases": ("Llama", "default", True, {**WIDE_HEADS, "attention_bias": True}),
    "mistral": ("Mistral", "default", False, {**WIDE_HEADS, "sliding_window": 8}),
    "olmo3": ("Olmo3", "yarn-by-layer", False, WINDOWS),
    "olmo3-tied": ("Olmo3", "by-layer", True, WINDOWS),
    "gemma3_text": (
        "Gemma3Text", "by-layer", True, {**WINDOWS, **WIDE_HEADS, "query_pre_attn_scalar": 24},
    ),
    "glm4_moe": ("Glm4Moe", "half", False, {**GLM, "use_qk_norm": True, "n_shared_experts": 2}),
    "glm4_moe-groups": (
        "Glm4Moe", "default", True,
        {**GLM, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "attention_bias": True},
    ),
    "deepseek_v3": ("DeepseekV3", "latent-yarn", False, {**LATENT, "attention_bias": True}),
    "deepseek_v3-plain": (
        "DeepseekV3", "default", True, {**LATENT, "q_lora_rank": None, "rope_interleave": False},
    ),
    "mistral-full": ("Mistral", "yarn", True, {"sliding_window": None}),
}  # fmt: skip
HYBRIDS = {
    "qwen3_next": ("Qwen3Next", "half", False, {**SHARED, "mlp_only_layers": [1]}),
    "qwen3_next-dense": ("Qwen3Next", "default", True, {**HYBRID, "num_experts": 0}),
    "qwen3_5_text": ("Qwen3_5Text", "sections", True, HYBRID),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", "half", False, SHARED),
}

DENSE = {**LATENT, "first_k_dense_replace": 3}  # routers are float32 in a model of any dtype
LATENTS = {
    "deepseek_v3-dense": ("DeepseekV3", "latent-yarn", False, {**DENSE, "attention_bias": True}),
    "deepseek_v3-dense-plain": (
        "DeepseekV3", "default", True, {**DENSE, "q_lora_rank": None, "rope_interleave": False},
    ),
}  # fmt: skip


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
