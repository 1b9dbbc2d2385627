"""Configurations of models that people train, at their real widths. Layers are few: all alike."""

from lockstep.models.config import ModelConfig

SHARED = {"rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "tie_word_embeddings": False}


def qwen3(hidden, ffn, heads, *, vocab=151936, **more):
    return SHARED | {
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        **more,
    }


MODELS = {
    "Qwen3-0.6B": qwen3(1024, 3072, 16, tie_word_embeddings=True),
    "Qwen3-8B": qwen3(4096, 12288, 32),
    "Qwen3-30B-A3B": qwen3(
        2048,
        6144,
        32,
        model_type="qwen3_moe",
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "Llama-3.1-8B": SHARED
    | {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500000.0,
    },
    "gpt-oss-20b": SHARED
    | {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
        "rope_theta": 150000,
        "rope_scaling": {"rope_type": "default"},
    },
}


def config_of(name: str, *, num_layers: int) -> ModelConfig:
    return ModelConfig.from_hf(MODELS[name] | {"num_hidden_layers": num_layers})
