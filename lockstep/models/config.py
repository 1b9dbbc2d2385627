"""What a decoder is made of, read from a Hugging Face config. No torch: the CLI reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import CheckpointError

Architecture = Literal["gpt_oss", "qwen3"]
ARCHITECTURES: tuple[Architecture, ...] = ("gpt_oss", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN position scaling (arXiv 2309.00071), with Hugging Face's names."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of one decoder. `from_hf` reads a config.json and refuses what it does
    not implement; the file itself is kept and written back by `save_checkpoint`."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP, or of one expert."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    windows: tuple[int | None, ...]
    """Per layer: the sliding window, or None for full attention."""
    rope_scaling: YarnScaling | None = None
    tie_embeddings: bool = False
    has_attention_bias: bool = False
    has_qk_norm: bool = False
    has_sinks: bool = False
    num_experts: int = 0
    """0 is a dense MLP."""
    num_active_experts: int = 0
    swiglu_limit: float = 0.0
    """Where gpt-oss' activation clamps gate and up. 0 is the plain silu(gate) * up."""
    has_router_bias: bool = False
    has_expert_bias: bool = False
    """On both projections of every expert."""
    has_normalized_routes: bool = True
    """Whether a token's router weights are the softmax over its own experts alone, and sum to 1.
    Otherwise they are those experts' share of the softmax over all."""
    dense_layers: tuple[int, ...] = ()
    """Layers of a mixture of experts that have a dense MLP instead, in order."""
    dense_intermediate_size: int = 0
    """Width of the MLP of `dense_layers`."""

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The layers that have experts, in order. Routes and loads are counted by the place in
        here: routed layer 0 is the first of them."""
        if not self.is_moe:
            return ()
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layers)

    @property
    def family(self) -> Literal["dense", "moe"]:
        """What the mismatch bands are quoted for."""
        return "moe" if self.is_moe else "dense"

    @classmethod
    def from_hf(cls, source: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
        """Reads a Hugging Face config of one of ARCHITECTURES.

        Raises CheckpointError for another architecture and for a setting that would change the
        numbers and is not implemented.
        """
        architecture = source.get("model_type")
        if architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{where}: model_type {architecture!r} is not supported; supported are "
                f"{', '.join(ARCHITECTURES)}."
            )
        try:
            return _READERS[architecture](source, where)
        except KeyError as error:
            raise CheckpointError(f"{where}: the key {error.args[0]!r} is missing.") from None

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Reads `directory`/config.json."""
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist: {directory} is not a checkpoint.")
        return cls.from_hf(json.loads(path.read_text()), where=str(path))


def _common(source: Mapping[str, Any], where: str) -> dict[str, Any]:
    hidden, heads = source["hidden_size"], source["num_attention_heads"]
    if source.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"{where}: hidden_act {source['hidden_act']!r} is not implemented; expected 'silu'."
        )
    rope = dict(source.get("rope_parameters") or {})
    if not rope:  # the spelling before transformers 5
        rope = {
            "rope_theta": source.get("rope_theta", 10000.0),
            **(source.get("rope_scaling") or {}),
        }
    return {
        "vocab_size": source["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": source["intermediate_size"],
        "num_layers": source["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": source.get("num_key_value_heads") or heads,
        "head_dim": source.get("head_dim") or hidden // heads,
        "rms_norm_eps": source["rms_norm_eps"],
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "rope_scaling": _rope_scaling(rope, source, where),
        "max_positions": source["max_position_embeddings"],
        "windows": _windows(source, where),
        "tie_embeddings": bool(source.get("tie_word_embeddings", False)),
        "has_attention_bias": bool(source.get("attention_bias", False)),
    }


def _rope_scaling(
    rope: Mapping[str, Any], source: Mapping[str, Any], where: str
) -> YarnScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise CheckpointError(
            f"{where}: rope_type {kind!r} is not implemented; expected 'default' or 'yarn'."
        )
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise CheckpointError(f"{where}: yarn with mscale is not implemented.")
    original = rope.get("original_max_position_embeddings") or source["max_position_embeddings"]
    return YarnScaling(
        factor=float(rope["factor"]),
        original_max_positions=original,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        attention_factor=rope.get("attention_factor"),
        truncate=rope.get("truncate", True),
    )


def _windows(source: Mapping[str, Any], where: str) -> tuple[int | None, ...]:
    layers = source["num_hidden_layers"]
    kinds = source.get("layer_types")
    if kinds is None:
        is_alternating = source["model_type"] == "gpt_oss"
        kinds = [
            "sliding_attention" if is_alternating and i % 2 == 0 else "full_attention"
            for i in range(layers)
        ]
    known = {"full_attention": None, "sliding_attention": source.get("sliding_window")}
    if len(kinds) != layers or not set(kinds) <= set(known):
        raise CheckpointError(
            f"{where}: layer_types must name {layers} of {sorted(known)}, found {kinds}."
        )
    return tuple(known[kind] for kind in kinds)


def _read_gpt_oss(source: Mapping[str, Any], where: str) -> ModelConfig:
    return ModelConfig(
        architecture="gpt_oss",
        has_sinks=True,
        num_experts=source["num_local_experts"],
        num_active_experts=source["num_experts_per_tok"],
        swiglu_limit=float(source.get("swiglu_limit", 7.0)),
        has_router_bias=True,
        has_expert_bias=True,
        **{**_common(source, where), "has_attention_bias": source.get("attention_bias", True)},
    )


def _read_qwen3(source: Mapping[str, Any], where: str) -> ModelConfig:
    return ModelConfig(architecture="qwen3", has_qk_norm=True, **_common(source, where))


_READERS = {"gpt_oss": _read_gpt_oss, "qwen3": _read_qwen3}
