"""Shapes and switches of a decoder, read from a Hugging Face config. No torch: the CLI reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from lockstep.config import read_json
from lockstep.errors import CheckpointError

Architecture = Literal[
    "gpt_oss",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "llama",
    "mistral",
    "olmo3",
    "gemma3_text",
    "glm4_moe",
]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)


NormWeights = Literal["plain", "wide", "centered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All frequencies divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's position scaling, with Hugging Face's names: long wavelengths are divided by
    `factor`, short ones kept, and those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN position scaling (arXiv 2309.00071), with Hugging Face's names."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


class _Kind:
    num_experts: int

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def family(self) -> Literal["dense", "moe"]:
        """Kind of model for which mismatch bands are quoted."""
        return "moe" if self.is_moe else "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(_Kind):
    """Shapes and switches of one decoder. `from_hf` reads a config.json and refuses settings that
    are not implemented. `save_checkpoint` copies the file itself."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP, or of an expert."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    windows: tuple[int | None, ...]
    """Sliding window of each layer; None is full attention."""
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    has_attention_bias: bool = False
    """Biases on the projections to queries, keys and values."""
    has_output_bias: bool = True
    """With `has_attention_bias`, a bias on the output projection too. Qwen2 has none there."""
    has_qk_norm: bool = False
    has_wide_qk_norm: bool = False
    """With `has_qk_norm`, queries and keys are normed over all their heads at once."""
    norms: Literal["before", "after", "both"] = "before"
    """Norms of the input of attention and MLP, of their output before it is added, or of both."""
    norm_weights: NormWeights = "plain"
    """wide: a norm scales in float32, before it rounds. centered: wide, by 1 + the weight."""
    activation: Literal["silu", "gelu"] = "silu"
    """Of the MLP's gate; gelu in its tanh form."""
    embedding_scale: float = 1.0
    """Factor on the embeddings, rounded to the compute dtype."""
    query_scale: float | None = None
    """Attention scores are divided by its root; None is `head_dim`."""
    rotary_share: float = 1.0
    """Share of a head's dims, from the first on, that are rotated."""
    window_rope_theta: float | None = None
    """Base of the rotation in layers with a window, which has no scaling; None: that of the
    others."""
    has_sinks: bool = False
    num_experts: int = 0
    """Experts per routed layer; 0 means dense MLPs."""
    num_active_experts: int = 0
    swiglu_limit: float = 0.0
    """Limit at which gpt-oss' activation clamps gate and up. 0 is the plain silu(gate) * up."""
    has_router_bias: bool = False
    has_expert_bias: bool = False
    """Biases on both projections of every expert."""
    has_normalized_routes: bool = True
    """A token's router weights are the softmax over its own experts, and sum to 1. Otherwise they
    are its experts' share of the softmax over all experts."""
    has_sigmoid_routes: bool = False
    """Experts are scored by sigmoids in float32, with a bias that counts for the choice alone."""
    num_expert_groups: int = 1
    num_active_groups: int = 1
    """Of the groups of experts, those that a token may choose from."""
    route_scale: float = 1.0
    """Factor on a token's router weights."""
    shared_width: int = 0
    """MLP width of the experts that every token goes to; 0: there are none."""
    num_extra_layers: int = 0
    """Layers behind the last one that predict further tokens. A checkpoint keeps their tensors as
    they are; they are neither run nor trained."""
    dense_layers: tuple[int, ...] = ()
    """Layers of a mixture of experts that have a dense MLP, in order."""
    dense_intermediate_size: int = 0
    """MLP width of `dense_layers`."""

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_share)

    @property
    def cached_per_token(self) -> int:
        """Numbers that a cache holds per token: keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Layers with experts, in order. Routes and loads are indexed by position in this tuple:
        routed layer 0 is its first entry."""
        if not self.is_moe:
            return ()
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layers)

    @classmethod
    def from_hf(cls, source: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
        """Reads a Hugging Face config of one of ARCHITECTURES.

        Raises CheckpointError for another architecture, and one that lists every missing setting
        and every setting that changes the numbers and is not implemented. Keys that transformers'
        own model of the architecture does not read are ignored.
        """
        architecture = source.get("model_type")
        if architecture not in _READERS:
            raise CheckpointError(
                f"{where}: model_type {architecture!r} is not supported; supported are "
                f"{', '.join(ARCHITECTURES)}. fallback=true trains any causal language model of "
                "transformers, with an external engine (models/fallback)."
            )
        reading = _Reading(source)
        fields = _read_common(reading, _DEFAULTS.get(architecture, {}))
        fields |= _READERS[architecture](reading)
        reading.check_shapes(fields)
        reading.finish(where)
        return cls(architecture=architecture, **fields)

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Reads `directory`/config.json."""
        path = Path(directory) / "config.json"
        return cls.from_hf(read_json(path, CheckpointError), where=str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackConfig(_Kind):
    """Facts about a model that transformers runs (`models.fallback`), read without transformers."""

    architecture: str
    """Its model_type."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    num_experts: int = 0
    num_active_experts: int = 0
    routed_layers: ClassVar[tuple[int, ...]] = ()
    """Empty: routes can be neither read nor replayed."""

    @classmethod
    def from_directory(cls, directory: str | Path) -> FallbackConfig:
        """Reads `directory`/config.json. Raises CheckpointError for encoder-decoders, models of
        more than text, and quantised weights: they cannot be trained on token ids alone."""
        path = Path(directory) / "config.json"
        reading = _Reading(read_json(path, CheckpointError))
        if reading.get("text_config") is not None:
            reading.problems.append("text_config: the model reads more than text")
        reading.expect("is_encoder_decoder", None, False)
        reading.expect("quantization_config", None)
        out = cls(
            architecture=reading.need("model_type"),
            vocab_size=reading.count("vocab_size"),
            hidden_size=reading.count("hidden_size", "n_embd", "d_model"),
            num_layers=reading.count("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
            max_positions=reading.count(
                "max_position_embeddings", "n_positions", "max_seq_len", default=NO_LIMIT
            ),
            num_experts=reading.count(*_EXPERT_COUNTS, default=0),
            num_active_experts=reading.count("num_experts_per_tok", default=0),
        )
        reading.finish(str(path))
        return out


NO_LIMIT = 1 << 31  # positions of a model without a table of them (ALiBi, state space)
MOST = 1 << 16  # layers, heads, experts and numbers of a head: more is a damaged file


# -- reading --------------------------------------------------------------------------------------

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

_DEFAULTS: dict[Architecture, dict[str, Any]] = {
    "gpt_oss": {"rope_theta": 150000.0, "head_dim": 64, "attention_bias": True},
    "qwen3": {"head_dim": 128},
    "olmo3": {"rope_theta": 500000.0},
    "gemma3_text": {"rope_theta": 1000000.0, "head_dim": 256, "tie_word_embeddings": True},
}
"""Values that transformers assumes for absent keys, where they differ from `_read_common`."""

_LAYER_KINDS = ("full_attention", "sliding_attention")
_WINDOW_THETAS = {"olmo3": 500000.0, "gemma3_text": 10000.0}
"""Architectures whose layers with a window rotate by a base of their own -> the one that
transformers assumes."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu", "swish"),
    "hidden_activation": (None, "gelu_pytorch_tanh"),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1),
    "swiglu_alpha": (None, 1.702),
}
"""Keys that change the numbers of one of the architectures -> values with which they do not."""

_READ_KEYS = {("glm4_moe", "partial_rotary_factor")}
"""Keys of _NEUTRAL that an architecture reads."""

_SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}


@dataclass(slots=True)
class _Reading:
    """A config.json while it is read. Collects problems, which `finish` raises together."""

    source: Mapping[str, Any]
    problems: list[str] = field(default_factory=list[str])

    def get(self, *keys: str, default: Any = None) -> Any:
        """Value of the first of `keys` that is present and not null."""
        return next((v for k in keys if (v := self.source.get(k)) is not None), default)

    def need(self, *keys: str) -> Any:
        """Like `get`; a missing value is a problem, and 1 is returned so that reading goes on."""
        found = self.get(*keys)
        if found is None:
            self.problems.append(f"{' or '.join(keys)} is missing")
        return 1 if found is None else found

    def count(self, *keys: str, default: int | None = None, most: int = NO_LIMIT) -> int:
        """Like `need` (or `get`, with a default); a problem unless it is a whole number up to
        `most`."""
        found = self.need(*keys) if default is None else self.get(*keys, default=default)
        least = 0 if default == 0 else 1
        if type(found) is int and least <= found <= most:
            return found
        bound = f"at most {most}" if type(found) is int and found > most else f"at least {least}"
        self.problems.append(f"{keys[0]}={json.dumps(found)} must be a whole number of {bound}")
        return 1

    def number(self, value: Any, key: str) -> float:
        """A problem unless the value is a finite number above 0."""
        if isinstance(value, int | float) and 0 < value < math.inf:
            return float(value)
        self.problems.append(f"{key}={json.dumps(value)} must be a finite number above 0")
        return 1.0

    def expect(self, key: str, *neutral: Any) -> None:
        """A problem unless `key` is absent or one of the values."""
        value = self.source.get(key)
        if value not in neutral:
            expected = " or ".join(json.dumps(v) for v in neutral if v is not None) or "none"
            self.problems.append(
                f"{key}={json.dumps(value)} is not implemented (expected {expected})"
            )

    def check_shapes(self, fields: Mapping[str, Any]) -> None:
        heads, groups = fields["num_heads"], fields["num_kv_heads"]
        if heads % groups:
            self.problems.append(
                f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}"
            )
        if fields["head_dim"] % 2:
            self.problems.append(f"head_dim={fields['head_dim']} must be even")
        num_groups, in_use = fields.get("num_expert_groups", 1), fields.get("num_active_groups", 1)
        if num_groups > 1 and (fields["num_experts"] % num_groups or in_use > num_groups):
            self.problems.append(
                f"n_group={num_groups} with topk_group={in_use} and {fields['num_experts']} experts"
            )
        experts, active = fields.get("num_experts", 0), fields.get("num_active_experts", 0)
        if active > experts:
            self.problems.append(f"num_experts_per_tok={active} of {experts} experts")

    def finish(self, where: str) -> None:
        """Raises CheckpointError that lists all problems, if there are any."""
        if self.problems:
            raise CheckpointError(f"{where}: {'; '.join(self.problems)}.")


def _read_common(reading: _Reading, defaults: Mapping[str, Any]) -> dict[str, Any]:
    r = reading
    for key, neutral in _NEUTRAL.items():
        if (r.get("model_type"), key) not in _READ_KEYS:
            r.expect(key, *neutral)
    quantization = r.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        if (r.get("model_type"), method) != ("gpt_oss", "mxfp4"):
            r.problems.append(
                f"quantization_config: weights quantised by {method or quantization!r} cannot be "
                "read, only mxfp4 of gpt_oss. Use the checkpoint that they were quantised from"
            )
    hidden, heads = r.count("hidden_size"), r.count("num_attention_heads", most=MOST)
    head_dim = r.source.get("head_dim", defaults.get("head_dim"))
    if head_dim is not None:
        head_dim = r.count("head_dim", default=head_dim, most=MOST)
    else:
        head_dim = hidden // heads
        if hidden % heads:
            r.problems.append(
                f"head_dim is missing, and hidden_size={hidden} is no multiple of "
                f"num_attention_heads={heads}"
            )
    max_positions = r.count("max_position_embeddings")
    theta, scaling = _read_rope(r, max_positions, defaults.get("rope_theta", 10000.0))
    return {
        "vocab_size": r.count("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": r.count("intermediate_size"),
        "num_layers": r.count("num_hidden_layers", most=MOST),
        "num_heads": heads,
        "num_kv_heads": r.count("num_key_value_heads", default=heads),
        "head_dim": head_dim,
        "rms_norm_eps": r.number(r.need("rms_norm_eps"), "rms_norm_eps"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_positions": max_positions,
        "tie_embeddings": bool(
            r.get("tie_word_embeddings", default=defaults.get("tie_word_embeddings", False))
        ),
        "has_attention_bias": bool(
            r.get("attention_bias", default=defaults.get("attention_bias", False))
        ),
    }


def _read_rope(
    reading: _Reading, max_positions: int, theta: float
) -> tuple[float, RopeScaling | None]:
    """`rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` before."""
    r = reading
    old, new = r.get("rope_scaling", default={}), r.get("rope_parameters", default={})
    if old and new and old != new:
        r.problems.append(
            f"rope_parameters={json.dumps(new)} and rope_scaling={json.dumps(old)} differ"
        )
    rope: Mapping[str, Any] = new or old
    if not isinstance(rope, Mapping):
        r.problems.append(f"rope_parameters={json.dumps(rope)} must be an object")
        return theta, None
    if r.get("model_type") in _WINDOW_THETAS and not rope.keys() - {*_LAYER_KINDS}:
        rope = rope.get("full_attention") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        r.problems.append(f"rope_parameters by layer type ({', '.join(rope)}) are not implemented")
        return theta, None
    given = rope.get("rope_theta")
    theta = r.number(r.get("rope_theta", default=theta) if given is None else given, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *_SCALINGS):
        r.problems.append(
            f"rope_type={kind!r} is not implemented (expected default, {', '.join(_SCALINGS)})"
        )
        return theta, None
    scaling = _SCALINGS.get(kind)
    settings = fields(scaling) if scaling is not None else ()
    read = {"rope_type", "type", "rope_theta", *(setting.name for setting in settings)}
    unread = {k: v for k, v in rope.items() if k not in read and v is not None}
    if unread.get("partial_rotary_factor") == 1 or r.get("model_type") == "glm4_moe":
        unread.pop("partial_rotary_factor", None)
    if scaling is None:
        if unread.keys() & {"partial_rotary_factor", "mrope_section"}:
            r.problems.append(f"rope_parameters={json.dumps(unread)} is not implemented")
        return theta, None
    r.problems += [f"{k}={v!r} of rope_type={kind!r} is not implemented" for k, v in unread.items()]
    original = "original_max_position_embeddings"
    values = {original: max_positions, **rope}
    if r.get(original):
        values[original] = r.get(original)
    if kind == "yarn":
        values.setdefault("factor", max_positions / values[original])
    given = {s.name: values[s.name] for s in settings if values.get(s.name) is not None}
    missing = [s.name for s in settings if s.default is MISSING and s.name not in given]
    r.problems += [f"{name} is missing" for name in missing]
    return theta, None if missing else scaling(**given)


def _num_layers(reading: _Reading) -> int:
    found = reading.get("num_hidden_layers")
    is_known = type(found) is int and found <= MOST
    return found if is_known else 0  # `_read_common` reports it


def _windows(
    reading: _Reading, kinds: list[str], window: int | None
) -> dict[str, tuple[int | None, ...]]:
    """layer_types of the config, or `kinds` where it has none, as one window per layer."""
    num_layers = _num_layers(reading)
    kinds = reading.get("layer_types", default=kinds)
    known = {"full_attention": None, "sliding_attention": window}
    if len(kinds) != num_layers or not set(kinds) <= set(known):
        reading.problems.append(
            f"layer_types must name {num_layers} of {', '.join(known)}; found {len(kinds)}: "
            f"{', '.join(sorted(set(kinds)))}"
        )
        return {"windows": ()}
    if "sliding_attention" in kinds and not (isinstance(window, int) and window > 0):
        reading.problems.append(
            f"layer_types has sliding_attention, and sliding_window is {json.dumps(window)}"
        )
    return {"windows": tuple(known[kind] for kind in kinds)}


def _same_windows(reading: _Reading, window: int | None) -> dict[str, tuple[int | None, ...]]:
    """One window for all layers, in an architecture that does not read layer_types."""
    return {"windows": (window,) * _num_layers(reading)}


def _read_gpt_oss(reading: _Reading) -> dict[str, Any]:
    r = reading
    if r.get("rope_parameters", "rope_scaling", "rope_theta") is None:
        r.problems.append("rope_parameters (or rope_theta and rope_scaling) is missing")
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(_num_layers(r))]
    return {
        "has_sinks": True,
        "num_experts": r.count(*_EXPERT_COUNTS, most=MOST),
        "num_active_experts": r.count("num_experts_per_tok"),
        "swiglu_limit": r.number(r.get("swiglu_limit", default=7.0), "swiglu_limit"),
        "has_router_bias": True,
        "has_expert_bias": True,
        **_windows(r, kinds, r.source.get("sliding_window", 128)),
    }


def _qwen_windows(reading: _Reading) -> dict[str, tuple[int | None, ...]]:
    r = reading
    window = r.get("sliding_window", default=4096) if r.get("use_sliding_window") else None
    if r.get("model_type") == "qwen3_moe":
        return _same_windows(r, window)
    first = r.get("max_window_layers", default=28)
    kinds = [
        "sliding_attention" if window and i >= first else "full_attention"
        for i in range(_num_layers(r))
    ]
    return _windows(r, kinds, window)


def _read_qwen2(reading: _Reading) -> dict[str, Any]:
    return {"has_attention_bias": True, "has_output_bias": False, **_qwen_windows(reading)}


def _read_qwen3(reading: _Reading) -> dict[str, Any]:
    return {"has_qk_norm": True, **_qwen_windows(reading)}


def _read_qwen3_moe(reading: _Reading) -> dict[str, Any]:
    r = reading
    step, dense = r.get("decoder_sparse_step", default=1), r.get("mlp_only_layers", default=[])
    num_layers = _num_layers(r)
    return {
        "has_qk_norm": True,
        "intermediate_size": r.count("moe_intermediate_size"),
        "num_experts": r.count(*_EXPERT_COUNTS, most=MOST),
        "num_active_experts": r.count("num_experts_per_tok"),
        "has_normalized_routes": bool(r.get("norm_topk_prob", default=False)),
        "dense_layers": tuple(i for i in range(num_layers) if i in dense or (i + 1) % step),
        "dense_intermediate_size": r.get("intermediate_size", default=0),
        **_qwen_windows(r),
    }


def _window_rope(reading: _Reading) -> dict[str, float]:
    """The rotation of windowed layers, where `rope_parameters` has one for each kind of layer."""
    r, key = reading, "rope_local_base_freq"
    rope = (r.get("rope_parameters", default={}) or {}).get("sliding_attention") or {}
    if (kind := rope.get("rope_type", "default")) != "default":
        r.problems.append(f"rope_type={kind!r} of sliding_attention is not implemented")
    theta = rope.get("rope_theta", r.get(key, default=_WINDOW_THETAS[r.get("model_type")]))
    return {"window_rope_theta": r.number(theta, key)}


def _read_olmo3(reading: _Reading) -> dict[str, Any]:
    r = reading
    kinds = [
        "sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(_num_layers(r))
    ]
    return {
        "norms": "after",
        "norm_weights": "wide",
        "has_qk_norm": True,
        "has_wide_qk_norm": True,
        **_window_rope(r),
        **_windows(r, kinds, r.source.get("sliding_window", 4096)),
    }


def _read_gemma3(reading: _Reading) -> dict[str, Any]:
    r, hidden = reading, reading.count("hidden_size")
    every = r.count("sliding_window_pattern", default=6)
    kinds = [
        "sliding_attention" if (i + 1) % every else "full_attention" for i in range(_num_layers(r))
    ]
    return {
        "norms": "both",
        "norm_weights": "centered",
        "has_qk_norm": True,
        "activation": "gelu",
        "embedding_scale": hidden**0.5,
        "query_scale": r.number(
            r.get("query_pre_attn_scalar", default=256), "query_pre_attn_scalar"
        ),
        **_window_rope(r),
        **_windows(r, kinds, r.source.get("sliding_window", 4096)),
    }


def _read_glm4_moe(reading: _Reading) -> dict[str, Any]:
    r = reading
    width = r.count("moe_intermediate_size")
    rope = r.get("rope_parameters", default={}) or {}
    share = rope.get("partial_rotary_factor", r.get("partial_rotary_factor", default=0.5))
    return {
        "has_output_bias": False,
        "has_qk_norm": bool(r.get("use_qk_norm", default=False)),
        "rotary_share": r.number(share, "partial_rotary_factor"),
        "intermediate_size": width,
        "num_experts": r.count(*_EXPERT_COUNTS, most=MOST),
        "num_active_experts": r.count("num_experts_per_tok"),
        "has_sigmoid_routes": True,
        "num_expert_groups": r.count("n_group", default=1),
        "num_active_groups": r.count("topk_group", default=1),
        "has_normalized_routes": bool(r.get("norm_topk_prob", default=True)),
        "route_scale": r.number(
            r.get("routed_scaling_factor", default=1.0), "routed_scaling_factor"
        ),
        "shared_width": width * r.count("n_shared_experts", default=1),
        "num_extra_layers": r.get("num_nextn_predict_layers", "num_mtp_layers", default=1),
        "dense_layers": tuple(range(r.get("first_k_dense_replace", default=1))),
        "dense_intermediate_size": r.count("intermediate_size"),
        **_same_windows(r, None),
    }


def _read_llama(reading: _Reading) -> dict[str, Any]:
    reading.expect("sliding_window", None)
    return _same_windows(reading, None)


def _read_mistral(reading: _Reading) -> dict[str, Any]:
    window = reading.source.get("sliding_window", 4096)
    return {"has_attention_bias": False, **_same_windows(reading, window)}


_READERS: dict[Architecture, Callable[[_Reading], dict[str, Any]]] = {
    "gpt_oss": _read_gpt_oss,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "qwen3_moe": _read_qwen3_moe,
    "llama": _read_llama,
    "mistral": _read_mistral,
    "olmo3": _read_olmo3,
    "gemma3_text": _read_gemma3,
    "glm4_moe": _read_glm4_moe,
}
