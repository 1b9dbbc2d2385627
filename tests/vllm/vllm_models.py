"""Checkpoints of small random models, and of the same models with every tensor moved, for the tests
against a real vLLM. Wide enough for it: its kernels want multiples of 32."""

import asyncio
import json

import numpy as np
import torch

from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import load_checkpoint, save_checkpoint
from lockstep.ops.context import PackedContext

VOCAB = 384

LOOP = asyncio.new_event_loop()
"""One for all tests: an engine keeps its connections open, each in its loop."""


def run(awaitable):
    return LOOP.run_until_complete(awaitable)


COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "dtype": "float32",
}  # fmt: skip

CONFIGS = {
    "qwen3": {
        **COMMON, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
        "intermediate_size": 128, "attention_bias": False,
        "layer_types": ["full_attention", "full_attention"],
    },
    "qwen3_moe": {
        **COMMON, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "attention_bias": False,
    },
    "gpt_oss": {
        **COMMON, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"],
        "rms_norm_eps": 1e-5,
        "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
        "attention_bias": True, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
WIDE = {"hidden_size": 128}  # vLLM's Qwen2 has heads of hidden_size / heads, whatever head_dim says
EXPERTS = {"intermediate_size": 128, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
SIGMOIDS = {
    **EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
}  # fmt: skip
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
WINDOWS = {
    "intermediate_size": 128, "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rope_parameters": HALF,
}  # fmt: skip
SHARED = {
    **LINEAR, **EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
DENSE = {"intermediate_size": 128, "sliding_window": None}
for kind, name, extra in (
    ("qwen2", "Qwen2", {**DENSE, **WIDE}),
    ("llama", "Llama", DENSE),
    ("mistral", "Mistral", DENSE),
    ("glm4_moe", "Glm4Moe", {**SIGMOIDS, "use_qk_norm": True, "rope_parameters": HALF}),
    (
        "deepseek_v3", "DeepseekV3",
        {
            **SIGMOIDS, "kv_lora_rank": 512, "q_lora_rank": 64, "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64, "v_head_dim": 32, "num_key_value_heads": 4, "head_dim": 64,
        },
    ),
    ("olmo3", "Olmo3", {**WINDOWS, **WIDE}),
    (
        "gemma3_text", "Gemma3",
        {**WINDOWS, "query_pre_attn_scalar": 48, "tie_word_embeddings": True},
    ),
    ("qwen3_next", "Qwen3Next", SHARED),
    ("qwen3_5_text", "Qwen3_5", {**LINEAR, **DENSE}),
    ("qwen3_5_moe_text", "Qwen3_5Moe", SHARED),
):  # fmt: skip
    own = {"model_type": kind, "architectures": [f"{name}ForCausalLM"]}
    CONFIGS[kind] = {**COMMON, **extra, **own}

HYBRIDS = sorted(kind for kind, config in CONFIGS.items() if "linear_key_head_dim" in config)
"""Kinds with linear attention, which vLLM runs on a CPU in bfloat16 only, with heads of 128 and
without a prefix cache: it asserts all three."""

DTYPES = [(kind, "float32") for kind in sorted(CONFIGS.keys() - set(HYBRIDS))]
DTYPES += [(kind, "bfloat16") for kind in sorted(CONFIGS)]
"""(kind, dtype) of what vLLM can run on a CPU."""


def is_hybrid(directory):
    return ModelConfig.from_directory(directory).linear is not None


def make_checkpoint(kind, directory, *, seed=0, std=0.12):
    """Writes a checkpoint of random weights, sinks and biases included; returns its directory.

    std: with 0.3 a rounding is multiplied by a thousand on its way, and no tolerance is left.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIGS[kind]))
    model = Decoder(ModelConfig.from_directory(directory))
    model.init_weights(std=std, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias")):
                parameter.normal_(0.0, std, generator=generator)
    return save_again(model, directory, like=directory)


def make_changed(directory, new, *, seed=1, scale=0.5):
    """Writes the checkpoint with every tensor moved by noise of `scale` times its own spread: an
    update that leaves one of them out is another model."""
    model = load_checkpoint(directory)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.std() if parameter.numel() > 1 else parameter.abs().mean()
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (scale * spread + 0.01))
    return save_again(model, new, like=directory)


def save_again(model, directory, *, like):
    filled = directory.with_name(directory.name + "-filled")
    save_checkpoint(model, filled, like=like)
    directory.mkdir(parents=True, exist_ok=True)
    for file in filled.iterdir():
        file.replace(directory / file.name)
    filled.rmdir()
    return directory


def trainer_logprobs(directory, ids, *, temperature=1.0):
    """[T] float64 log-prob of each id by the trainer's forward over the whole row; NaN at 0."""
    model = directory if isinstance(directory, Decoder) else load_checkpoint(directory)
    row = torch.from_numpy(np.asarray(ids, np.int64))
    with torch.no_grad():
        hidden = model(row, torch.arange(len(row)), PackedContext.of([len(row)]))
        values, _ = model.log_probs(hidden[:-1], row[1:], temperature=temperature)
    return np.concatenate([[np.nan], values.numpy()])
