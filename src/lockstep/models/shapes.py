"""Parameters of a decoder by name and shape, and the Hugging Face tensors that each one holds.

Known from the config alone, without torch: the memory of a run is planned before a model is made.
Guard: tests/cpu/models/test_shapes.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any

from lockstep.models.attention_config import LatentShape, LinearShape
from lockstep.models.config import ModelConfig

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
CHOICE_BIAS = "e_score_correction_bias"
"""End of the name of a tensor that is float32 beside others of any dtype."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class HFPiece:
    """One Hugging Face tensor, and its place in a parameter of the decoder."""

    name: str
    shape: Shape
    view: Callable[[Any], Any]
    """Called with the decoder's parameter (or its gradient, or a moment). Returns a view with the
    tensor's numbers in order and its first dim; later dims may be split where `shape` has one."""


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """A parameter of the decoder.

    >>> layout = decoder_layout(config)["layers.0.attention.qkv_proj.weight"]   # doctest: +SKIP
    >>> [piece.name for piece in layout.pieces][0]                              # doctest: +SKIP
    'model.layers.0.self_attn.q_proj.weight'
    """

    shape: Shape
    pieces: tuple[HFPiece, ...]


def decoder_layout(config: ModelConfig) -> dict[str, ParameterLayout]:
    """name -> layout of each parameter of `Decoder(config)`, in the order of the forward."""
    c, D = config, config.hidden_size
    out = {"embedding": _single(EMBEDDING, c.num_rows, D)}
    for i in range(c.num_layers):
        theirs = f"model.layers.{i}"
        mlp = f"{theirs}.mlp"
        layer = _norms(c, theirs)
        if c.linear is not None and i in c.linear.layers:
            layer |= _linear_attention(c, c.linear, f"{theirs}.linear_attn")
        elif c.latent is not None:
            layer |= _latent_attention(c, c.latent, f"{theirs}.self_attn")
        else:
            layer |= _attention(c, f"{theirs}.self_attn")
        if i not in c.routed_layers:
            width = c.dense_intermediate_size if c.is_moe else c.intermediate_size
            halves = {f"{mlp}.gate_proj": width, f"{mlp}.up_proj": width}
            layer["mlp.gate_up_proj.weight"] = _rows(halves, "weight", D)
            layer["mlp.down_proj.weight"] = _single(f"{mlp}.down_proj.weight", D, width)
        elif c.architecture == "gpt_oss":
            layer |= _gpt_oss_experts(c, mlp)
        else:
            layer |= _experts_one_by_one(c, mlp)
        out |= {f"layers.{i}.{name}": parameter for name, parameter in layer.items()}
    out["final_norm"] = _single("model.norm.weight", D)
    if not c.tie_embeddings:
        out["untied_head"] = _single(HEAD, c.num_rows, D)
    if c.has_vision:
        for name, parameter in out.items():
            pieces = (replace(p, name=named(c, p.name)) for p in parameter.pieces)
            out[name] = replace(parameter, pieces=tuple(pieces))
    return out


def named(config: ModelConfig, name: str) -> str:
    """The name in a checkpoint of a tensor that is called so in one of text alone."""
    return config.prefix + name.removeprefix("model.") if name.startswith("model.") else name


def _attention(c: ModelConfig, theirs: str) -> dict[str, ParameterLayout]:
    D, H, K = c.hidden_size, c.num_heads, c.head_dim
    q, kv = H * K, c.num_kv_heads * K
    sizes = (2 * q if c.has_output_gate else q, kv, kv)
    heads = {f"{theirs}.{x}_proj": n for x, n in zip("qkv", sizes, strict=True)}
    out = {
        "attention.qkv_proj.weight": _rows(heads, "weight", D),
        "attention.o_proj.weight": _single(f"{theirs}.o_proj.weight", D, q),
    }
    if c.has_attention_bias:
        out["attention.qkv_proj.bias"] = _rows(heads, "bias")
    if c.has_attention_bias and c.has_output_bias:
        out["attention.o_proj.bias"] = _single(f"{theirs}.o_proj.bias", D)
    if c.has_qk_norm:
        q_width, k_width = (q, kv) if c.has_wide_qk_norm else (K, K)
        out["attention.q_norm"] = _single(f"{theirs}.q_norm.weight", q_width)
        out["attention.k_norm"] = _single(f"{theirs}.k_norm.weight", k_width)
    if c.has_sinks:
        out["attention.sinks"] = _single(f"{theirs}.sinks", H)
    return out


def _linear_attention(c: ModelConfig, at: LinearShape, theirs: str) -> dict[str, ParameterLayout]:
    D, H, gates = c.hidden_size, at.value_heads, at.channels + at.value_width
    if at.is_grouped:
        parts = {f"{theirs}.in_proj_qkvz": gates, f"{theirs}.in_proj_ba": 2 * H}
    else:
        sizes = {"qkv": at.channels, "z": at.value_width, "b": H, "a": H}
        parts = {f"{theirs}.in_proj_{part}": size for part, size in sizes.items()}
    conv = (at.channels, 1, at.conv_width)
    return {
        "attention.in_proj.weight": _rows(parts, "weight", D),
        "attention.conv_weight": _single(f"{theirs}.conv1d.weight", *conv),
        "attention.A_log": _single(f"{theirs}.A_log", H),
        "attention.dt_bias": _single(f"{theirs}.dt_bias", H),
        "attention.value_norm": _single(f"{theirs}.norm.weight", at.value_dim),
        "attention.out_proj.weight": _single(f"{theirs}.out_proj.weight", D, at.value_width),
    }


def _latent_attention(c: ModelConfig, at: LatentShape, theirs: str) -> dict[str, ParameterLayout]:
    D, H = c.hidden_size, c.num_heads
    unfolded, folded = H * (at.nope_dim + at.value_dim), c.key_dim
    kv_a = f"{theirs}.kv_a_proj_with_mqa"
    out = {
        "attention.kv_a_proj.weight": _single(f"{kv_a}.weight", folded, D),
        "attention.kv_a_norm": _single(f"{theirs}.kv_a_layernorm.weight", at.kv_rank),
        "attention.kv_b_proj.weight": _single(f"{theirs}.kv_b_proj.weight", unfolded, at.kv_rank),
        "attention.o_proj.weight": _single(f"{theirs}.o_proj.weight", D, H * at.value_dim),
    }
    q, narrow = H * c.head_dim, at.query_rank
    if narrow:
        out["attention.q_a_proj.weight"] = _single(f"{theirs}.q_a_proj.weight", narrow, D)
        out["attention.q_a_norm"] = _single(f"{theirs}.q_a_layernorm.weight", narrow)
        out["attention.q_b_proj.weight"] = _single(f"{theirs}.q_b_proj.weight", q, narrow)
    else:
        out["attention.q_proj.weight"] = _single(f"{theirs}.q_proj.weight", q, D)
    if c.has_attention_bias:
        out["attention.kv_a_proj.bias"] = _single(f"{kv_a}.bias", folded)
        out["attention.o_proj.bias"] = _single(f"{theirs}.o_proj.bias", D)
        if narrow:
            out["attention.q_a_proj.bias"] = _single(f"{theirs}.q_a_proj.bias", narrow)
    return out


def _norms(c: ModelConfig, layer: str) -> dict[str, ParameterLayout]:
    """Hugging Face calls a norm before the MLP post_attention, where none follows attention."""
    names = {
        "before": {"input_norm": "input", "post_attention_norm": "post_attention"},
        "after": {"attention_output_norm": "post_attention", "mlp_output_norm": "post_feedforward"},
    }
    names["both"] = names["after"] | {
        "input_norm": "input",
        "post_attention_norm": "pre_feedforward",
    }
    return {
        ours: _single(f"{layer}.{theirs}_layernorm.weight", c.hidden_size)
        for ours, theirs in names[c.norms].items()
    }


def decoder_shapes(config: ModelConfig) -> Shapes:
    """name -> shape, as `Decoder(config).named_parameters()` has them."""
    return {name: parameter.shape for name, parameter in decoder_layout(config).items()}


def num_elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def misfits(expected: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]) -> list[str]:
    """Each tensor that is missing, unexpected or of another shape, in words."""
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in expected]
    return problems + [
        f"{name}: expected {list(shape)}, found {list(found[name])}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]


def _single(name: str, *shape: int) -> ParameterLayout:
    return ParameterLayout(shape, (HFPiece(name, shape, lambda parameter: parameter),))


def _rows(sizes: Mapping[str, int], part: str, *width: int) -> ParameterLayout:
    """Modules of `sizes` rows each, one after another."""
    pieces: list[HFPiece] = []
    first = 0
    for module, size in sizes.items():
        rows = methodcaller("narrow", 0, first, size)
        pieces.append(HFPiece(f"{module}.{part}", (size, *width), rows))
        first += size
    return ParameterLayout((first, *width), tuple(pieces))


def _gpt_oss_experts(c: ModelConfig, mlp: str) -> dict[str, ParameterLayout]:
    """All experts in one tensor, [in, out] each. Hugging Face alternates the outputs of gate and
    up; the decoder keeps all of gate, then all of up."""
    D, E, F = c.hidden_size, c.num_experts, c.intermediate_size
    experts = f"{mlp}.experts"

    def alternating(parameter: Any) -> Any:
        return parameter.unflatten(1, (2, F)).transpose(1, -1)

    gate_up = HFPiece(f"{experts}.gate_up_proj", (E, D, 2 * F), alternating)
    gate_up_bias = HFPiece(f"{experts}.gate_up_proj_bias", (E, 2 * F), alternating)
    down = HFPiece(f"{experts}.down_proj", (E, F, D), methodcaller("transpose", 1, 2))
    return {
        "mlp.router.weight": _single(f"{mlp}.router.weight", E, D),
        "mlp.router.bias": _single(f"{mlp}.router.bias", E),
        "mlp.gate_up_proj": ParameterLayout((E, 2 * F, D), (gate_up,)),
        "mlp.gate_up_bias": ParameterLayout((E, 2 * F), (gate_up_bias,)),
        "mlp.down_proj": ParameterLayout((E, D, F), (down,)),
        "mlp.down_bias": _single(f"{experts}.down_proj_bias", E, D),
    }


def _experts_one_by_one(c: ModelConfig, mlp: str) -> dict[str, ParameterLayout]:
    """A tensor per expert and projection, and the tensors of the shared experts."""
    D, E, F = c.hidden_size, c.num_experts, c.intermediate_size

    def piece(expert: int, name: str, shape: Shape, first: int) -> HFPiece:
        def view(parameter: Any) -> Any:
            return parameter[expert].narrow(0, first, shape[0])

        return HFPiece(f"{mlp}.experts.{expert}.{name}_proj.weight", shape, view)

    halves = (("gate", 0), ("up", F))
    gate_up = (piece(e, name, (F, D), first) for e in range(E) for name, first in halves)
    down = (piece(e, "down", (D, F), 0) for e in range(E))
    out = {"mlp.router.weight": _single(f"{mlp}.gate.weight", E, D)}
    if c.has_sigmoid_routes:
        out["mlp.router.choice_bias"] = _single(f"{mlp}.gate.{CHOICE_BIAS}", E)
    out["mlp.gate_up_proj"] = ParameterLayout((E, 2 * F, D), tuple(gate_up))
    out["mlp.down_proj"] = ParameterLayout((E, D, F), tuple(down))
    if c.shared_width:
        shared = f"{mlp}.shared_expert" if c.has_shared_gate else f"{mlp}.shared_experts"
        rows = {f"{shared}.{name}_proj": c.shared_width for name in ("gate", "up")}
        out["mlp.shared.gate_up_proj.weight"] = _rows(rows, "weight", D)
        shared_down = _single(f"{shared}.down_proj.weight", D, c.shared_width)
        out["mlp.shared.down_proj.weight"] = shared_down
        if c.has_shared_gate:
            out["mlp.shared_gate.weight"] = _single(f"{shared}_gate.weight", 1, D)
    return out
