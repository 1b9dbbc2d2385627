"""A config.json while it is read, and the fields that model families have in common.

A family is a function that reads the fields of its own, in `models/families.py` or in a file of
--plugin:

    @family("olmo2", rope_theta=500000.0)
    def olmo2(reading: Reading) -> dict[str, Any]:
        return {"norms": "after", ..., **same_windows(reading, None)}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.models.attention_config import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from lockstep.tables import tables_beside

NO_LIMIT = 1 << 31  # positions of a model without a table of them (ALiBi, state space)
MOST = 1 << 16  # layers, heads, experts and numbers of a head: more is a damaged file


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

_TABLES = tables_beside(__file__)
_NEUTRAL: dict[str, list[Any]] = {
    key: [None if value == "null" else value for value in values]
    for key, values in _TABLES["neutral"].items()
}
_FLAG = (bool, "true or false")
_TYPES: dict[str, tuple[type, str]] = {
    "string": (str, "a string"),
    "flag": _FLAG,
    "object": (Mapping, "an object"),
    "list": (list, "a list"),
}
_KINDS = {key: _TYPES[kind] for kind, keys in _TABLES["kinds"].items() for key in keys}
"""Keys that hold no number -> (type of their value, its name)."""

_LAYER_KINDS = ("full_attention", "sliding_attention")

_SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}


def text_of(source: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """(config of the language model, resulting fields of `ModelConfig`). A model that also reads
    images has an inner config; a text model returns its own and no fields."""
    kind, text = str(source.get("model_type")), source.get("text_config")
    if kind not in _TABLES["wholes"] or not isinstance(text, Mapping):
        return source, {}
    prefix, *towers = _TABLES["wholes"][kind]
    of_whole = {
        "model_type": f"{kind}_text",
        # Whatever the text's says. Gemma 3 is tied unless its config says otherwise.
        "tie_word_embeddings": source.get("tie_word_embeddings", kind == "gemma3"),
    }
    found = {**(_TABLES["gemma3"] if kind == "gemma3" else {}), **text, **of_whole}
    return found, {"prefix": prefix, "extra_tensors": tuple(towers)}


@dataclass(frozen=True, slots=True, eq=False)
class ModelFamily:
    """How configs of one model_type are read."""

    read: Callable[[Reading], dict[str, Any]]
    """Returns the fields of `ModelConfig` that are particular to the family."""
    defaults: Mapping[str, Any]
    reads: tuple[str, ...]


FAMILIES: dict[str, ModelFamily] = {}
"""model_type -> family."""


def family(
    model_type: str, *, reads: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[[Reading], dict[str, Any]]], Callable[[Reading], dict[str, Any]]]:
    """Adds a family, as a decorator of the function that reads it.

    defaults: transformers' values for absent keys, if they differ from `read_common`;
    `window_rope_theta` gives layers with a window a rotary base of their own. reads: keys that only
    this family implements; other families refuse them. Raises CheckpointError for a model_type that
    exists already.
    """

    def add(read: Callable[[Reading], dict[str, Any]]) -> Callable[[Reading], dict[str, Any]]:
        if model_type in FAMILIES:
            raise CheckpointError(f"there is a family {model_type} already.")
        FAMILIES[model_type] = ModelFamily(read, defaults, reads)
        return read

    return add


@dataclass(slots=True)
class Reading:
    """A config.json while it is read. Collects problems, which `finish` raises together."""

    source: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Defaults of its family, which come before those of `flag`, `optional` and `count`."""
    reads: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list[str])

    def get(self, *keys: str, default: Any = None) -> Any:
        """Value of the first of `keys` that is present and not null. A problem if it is of another
        kind than the key has."""
        key = next((key for key in keys if self.source.get(key) is not None), "")
        value, (kind, name) = self.source.get(key), _KINDS.get(key, (object, ""))
        if not key or isinstance(value, kind):
            return value if key else default
        self.problems.append(f"{key}={json.dumps(value)} must be {name}")
        return default

    def flag(self, key: str, *, default: bool) -> bool:
        """Null is false, whatever the default."""
        return bool(self.get(key) if key in self.source else self.defaults.get(key, default))

    def places(self, key: str) -> list[int]:
        """Numbers of layers. A problem unless all are whole numbers."""
        found = self.get(key, default=[])
        if wrong := [each for each in found if type(each) is not int or each < 0]:
            self.problems.append(f"{key} holds {json.dumps(wrong[0])}, which is no layer")
        return found

    def optional(self, key: str, default: int | None, *, most: int = NO_LIMIT) -> int | None:
        """Like `count`; null is None, whatever the default."""
        default = self.defaults.get(key, default)
        found = self.source.get(key, default)
        return None if found is None else self.count(key, default=default, most=most)

    def need(self, *keys: str) -> Any:
        """Like `get`; a missing value is a problem, and 1 is returned so that reading goes on."""
        found = self.get(*keys)
        if found is None:
            self.problems.append(f"{' or '.join(keys)} is missing")
        return 1 if found is None else found

    def count(
        self, *keys: str, default: int | None = None, least: int = 1, most: int = NO_LIMIT
    ) -> int:
        """Like `need` (or `get`, with a default); a problem unless it is the default, or a whole
        number from `least` to `most`."""
        default = self.defaults.get(keys[0], default)
        found = self.need(*keys) if default is None else self.get(*keys, default=default)
        if type(found) is int and (found == default or least <= found <= most):
            return found
        bound = f"at most {most}" if type(found) is int and found > most else f"at least {least}"
        self.problems.append(f"{self.shown(*keys)} must be a whole number of {bound}")
        return 1

    def shown(self, *keys: str) -> str:
        """key=value of the first of `keys` that is present and not null, for an error."""
        key = next((key for key in keys if self.source.get(key) is not None), keys[0])
        return f"{key}={json.dumps(self.source.get(key))}"

    def number(self, value: Any, key: str) -> float:
        """A problem unless the value is a finite number above 0."""
        if type(value) in (int, float) and 0 < value <= sys.float_info.max:
            return float(value)
        self.problems.append(f"{key}={json.dumps(value)} must be a finite number above 0")
        return 1.0

    def experts(self) -> dict[str, int]:
        """How many experts there are, and how many a token has."""
        given = [key for key in EXPERT_COUNTS if self.source.get(key) is not None]
        if len({json.dumps(self.source[key]) for key in given}) > 1:
            self.problems.append(f"{' and '.join(map(self.shown, given))} differ")
        return {
            "num_experts": self.count(*EXPERT_COUNTS, most=MOST),
            "num_active_experts": self.count("num_experts_per_tok"),
        }

    def dense_layers(self) -> dict[str, Any]:
        """Layers of a mixture of experts that have a dense MLP, in the manner of Qwen."""
        every, named = self.count("decoder_sparse_step", default=1), self.places("mlp_only_layers")
        layers = (i for i in range(num_layers(self)) if i in named or (i + 1) % every)
        width = self.count("intermediate_size", default=0)
        return {"dense_layers": tuple(layers), "dense_intermediate_size": width}

    def rotary_share(self, default: float) -> float:
        """Share of a head's dims that are rotated."""
        key = "partial_rotary_factor"
        rope = self.get("rope_parameters") or self.get("rope_scaling", default={})
        return self.share(rope.get(key, self.source.get(key, default)), key)

    def share(self, value: Any, key: str) -> float:
        """A problem unless the value is a number in (0, 1]."""
        if (found := self.number(value, key)) > 1:
            self.problems.append(f"{key}={json.dumps(value)} must be at most 1")
        return min(found, 1.0)

    def setting(self, value: Any, key: str, kind: str) -> Any:
        """A problem unless the value is true or false (kind bool), or a number above 0 (float), a
        whole one (int)."""
        whole, expected = {"bool": _FLAG, "int": (int, "a whole number")}.get(kind, (float, ""))
        if expected and type(value) is not whole:
            self.problems.append(f"{key}={json.dumps(value)} must be {expected}")
        found = 1.0 if kind == "bool" else self.number(value, key)
        return value if expected else found

    def expect(self, key: str, *neutral: Any) -> None:
        """A problem unless `key` is absent or one of the values."""
        value = self.source.get(key, neutral[0])
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
        if fields["head_dim"] % 2 and "latent" not in fields:
            self.problems.append(f"head_dim={fields['head_dim']} must be even")
        num_groups, in_use = fields.get("num_expert_groups", 1), fields.get("num_active_groups", 1)
        per_group, rest = divmod(fields.get("num_experts", 0), num_groups)
        # A group's score is the sum of its two best experts.
        if num_groups > 1 and (rest or per_group < 2 or in_use > num_groups):
            self.problems.append(
                f"n_group={num_groups} with topk_group={in_use} and {self.shown(*EXPERT_COUNTS)}"
            )
        experts, active = fields.get("num_experts", 0), fields.get("num_active_experts", 0)
        if active > experts:
            self.problems.append(f"num_experts_per_tok={active} of {experts} experts")
        if fields.get("dense_layers") and not fields["dense_intermediate_size"]:
            self.problems.append("intermediate_size is missing, and some layers are dense")

    def finish(self, where: str) -> None:
        """Raises CheckpointError that lists all problems, if there are any. Long values are cut."""
        if self.problems:
            raise CheckpointError(f"{where}: {'; '.join(p[:800] for p in self.problems)}.")


def read_common(reading: Reading) -> dict[str, Any]:
    """The fields of `ModelConfig` that every family has."""
    r = reading
    for key, neutral in _NEUTRAL.items():
        if key not in r.reads:
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
    head_dim = r.optional("head_dim", None, most=MOST)
    if head_dim is None:
        head_dim = hidden // heads
        if hidden % heads:
            r.problems.append(
                f"head_dim is missing, and hidden_size={hidden} is no multiple of "
                f"num_attention_heads={heads}"
            )
    max_positions = r.count("max_position_embeddings")
    theta, scaling = read_rope(r, max_positions)
    return {
        "vocab_size": r.count("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": r.count("intermediate_size"),
        "num_layers": r.count("num_hidden_layers", most=MOST),
        "num_heads": heads,
        "num_kv_heads": r.optional("num_key_value_heads", heads) or heads,
        "head_dim": head_dim,
        "rms_norm_eps": r.number(r.need("rms_norm_eps"), "rms_norm_eps"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_positions": max_positions,
        "tie_embeddings": r.flag("tie_word_embeddings", default=False),
        "has_attention_bias": r.flag("attention_bias", default=False),
    }


def read_rope(reading: Reading, max_positions: int) -> tuple[float, RopeScaling | None]:
    """`rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` before."""
    r, theta = reading, reading.defaults.get("rope_theta", 10000.0)
    rope = _rope_settings(r)
    if rope is None:
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
    # Positions of text are the same in every section of mrope_section.
    read = {"rope_type", "type", "rope_theta", *r.reads, *(setting.name for setting in settings)}
    unread = {k: v for k, v in rope.items() if k not in read and v is not None}
    if unread.get("partial_rotary_factor") == 1:
        del unread["partial_rotary_factor"]
    if scaling is None:
        if unread.keys() & {"partial_rotary_factor", "mrope_section"}:
            r.problems.append(f"rope_parameters={json.dumps(unread)} is not implemented")
        return theta, None
    if "window_rope_theta" in r.defaults and rope.get("truncate", True) is False:
        unread["truncate"] = False  # transformers looks for it beside the kinds of layers
    r.problems += [f"{k}={v!r} of rope_type={kind!r} is not implemented" for k, v in unread.items()]
    original = "original_max_position_embeddings"
    values = {original: max_positions, **rope}
    if r.get(original):
        values[original] = r.get(original)
    if kind == "yarn":
        values.setdefault("factor", max_positions / r.number(values[original], original))
    given = {
        s.name: r.setting(values[s.name], s.name, str(s.type))
        for s in settings
        if values.get(s.name) is not None or (s.name in values and s.default is True)
    }
    if given.get("high_freq_factor", 1) <= given.get("low_freq_factor", 0):
        r.problems.append("high_freq_factor must be above low_freq_factor")
    missing = [s.name for s in settings if s.default is MISSING and s.name not in given]
    r.problems += [f"{name} of rope_type={kind!r} is missing" for name in missing]
    return theta, None if missing else scaling(**given)


def _rope_settings(reading: Reading) -> Mapping[str, Any] | None:
    """The settings of the layers that see everything; None if they cannot be read."""
    r = reading
    old, new = r.get("rope_scaling", default={}), r.get("rope_parameters", default={})
    if old and new and old != new:
        r.problems.append(
            f"rope_parameters={json.dumps(new)} and rope_scaling={json.dumps(old)} differ"
        )
    rope: Mapping[str, Any] = new or old
    if "window_rope_theta" in r.defaults:
        if new and new.keys() - {*_LAYER_KINDS}:  # transformers takes its defaults instead
            r.problems.append(
                f"rope_parameters={json.dumps(new)} must have one object each for "
                f"{' and '.join(_LAYER_KINDS)}"
            )
            return None
        if not rope.keys() - {*_LAYER_KINDS}:
            rope = object_of(r, rope, "full_attention")
    if any(isinstance(value, Mapping) for value in rope.values()):
        r.problems.append(f"rope_parameters by layer type ({', '.join(rope)}) are not implemented")
        return None
    return rope


def object_of(reading: Reading, source: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object at a key; {} without one. A problem if it is something else."""
    return Reading(source, problems=reading.problems).get(key, default={})


def num_layers(reading: Reading) -> int:
    found = reading.get("num_hidden_layers")
    is_known = type(found) is int and 0 < found <= MOST
    return found if is_known else 0  # `read_common` reports it


def full_every(reading: Reading, interval: int, other: str = "sliding_attention") -> list[str]:
    """A kind per layer: full attention in each `interval`-th one."""
    layers = range(1, num_layers(reading) + 1)
    return [other if layer % interval else "full_attention" for layer in layers]


def layer_kinds(
    reading: Reading, kinds: list[str], other: str, *, needs_full: bool = False
) -> list[str]:
    """layer_types of the config, or `kinds` where it has none. A problem, and no kinds, unless each
    layer has full attention or the `other` kind. needs_full: at least one has full attention."""
    count, known = num_layers(reading), ("full_attention", other)
    kinds = reading.get("layer_types", default=kinds)
    names = set(map(str, kinds))
    if len(kinds) == count and names <= {*known} and not (needs_full and known[0] not in names):
        return kinds
    rule = ", at least one of them full" if needs_full else ""
    reading.problems.append(
        f"layer_types must name num_hidden_layers={count} of {', '.join(known)}{rule}; found "
        f"{len(kinds)}: {', '.join(sorted({name[:60] for name in names})[:8])}"
    )
    return []


def windows_of(
    reading: Reading, kinds: list[str], window: int | None
) -> dict[str, tuple[int | None, ...]]:
    """layer_types of the config, or `kinds` where it has none, as one window per layer."""
    kinds = layer_kinds(reading, kinds, "sliding_attention")
    if "sliding_attention" in kinds and window is None:
        reading.problems.append(
            f"layer_types has sliding_attention, and sliding_window is {json.dumps(window)}"
        )
    return {"windows": tuple(window if kind == "sliding_attention" else None for kind in kinds)}


def same_windows(reading: Reading, window: int | None) -> dict[str, tuple[int | None, ...]]:
    """One window for all layers, in an architecture that does not read layer_types."""
    return {"windows": (window,) * num_layers(reading)}


def sigmoid_routes(reading: Reading) -> dict[str, Any]:
    """Experts as in DeepSeek V3: chosen by sigmoids, in groups, beside shared ones. GLM 4.5 and
    DeepSeek V3 have different defaults in transformers, so each family sets its own n_group,
    topk_group, routed_scaling_factor and first_k_dense_replace."""
    r, width = reading, reading.count("moe_intermediate_size")
    scale = r.get("routed_scaling_factor", default=r.defaults["routed_scaling_factor"])
    extra = ("num_nextn_predict_layers", "num_mtp_layers")
    num_dense = r.count("first_k_dense_replace", least=0, most=MOST)
    return {
        "intermediate_size": width,
        **r.experts(),
        "has_sigmoid_routes": True,
        "num_expert_groups": r.count("n_group"),
        "num_active_groups": r.count("topk_group"),
        "has_normalized_routes": r.flag("norm_topk_prob", default=True),
        "route_scale": r.number(scale, "routed_scaling_factor"),
        "shared_width": width * r.count("n_shared_experts", default=1),
        "num_extra_layers": r.count(*extra, default=1, least=0),
        "dense_layers": tuple(range(num_dense)),
        "dense_intermediate_size": r.count("intermediate_size"),
    }


def window_rope(reading: Reading, *older: str) -> dict[str, float]:
    """The rotation of windowed layers, where `rope_parameters` has one for each kind of layer.

    older: the key of its base in configs before transformers 5.
    """
    r = reading
    rope = object_of(r, r.get("rope_parameters", "rope_scaling", default={}), "sliding_attention")
    if (kind := rope.get("rope_type", "default")) != "default":
        r.problems.append(f"rope_type={kind!r} of sliding_attention is not implemented")
    theta = rope.get("rope_theta", r.get(*older, default=r.defaults["window_rope_theta"]))
    key = "rope_theta" if "rope_theta" in rope else "".join(older)
    return {"window_rope_theta": r.number(theta, key)}
