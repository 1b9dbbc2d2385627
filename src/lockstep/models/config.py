"""Shapes and switches of a decoder, read from a Hugging Face config. No torch: the CLI reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from lockstep.config import read_json
from lockstep.errors import CheckpointError, named
from lockstep.models import families as families  # they register themselves
from lockstep.models.attention_config import LatentShape, LinearShape, RopeScaling
from lockstep.models.reading import EXPERT_COUNTS, FAMILIES, NO_LIMIT, Reading, read_common, text_of

NormWeights = Literal["plain", "wide", "centered"]


class _Kind:
    num_experts: int

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def family(self) -> Literal["dense", "moe"]:
        """Kind of model; the bands of normal mismatch depend on it."""
        return "moe" if self.is_moe else "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(_Kind):
    """Shapes and switches of one decoder. `from_hf` reads a config.json and refuses settings that
    are not implemented. `save_checkpoint` copies the file itself."""

    architecture: str
    """Its model_type."""
    vocab_size: int
    """Ids that are read and drawn; a softmax is over them. See `with_vocabulary`."""
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
    latent: LatentShape | None = None
    """Latent attention: one key head, whose keys hold the values. `head_dim` is the width of
    queries before they are folded."""
    linear: LinearShape | None = None
    """Layers of linear attention; None: there are none."""
    has_output_gate: bool = False
    """The query projection gives each head a gate too, whose sigmoid scales the head's output."""
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
    """Function of the MLP's gate; gelu in its tanh form."""
    embedding_scale: float = 1.0
    """Factor on the embeddings, rounded to the compute dtype."""
    query_scale: float | None = None
    """Attention scores are divided by its root; None is `head_dim`."""
    rotary_share: float = 1.0
    """Share of a head's dims, from the first on, that are rotated."""
    window_rope_theta: float | None = None
    """Base of the rotation in layers with a window, which has no scaling. None: the same as in
    other layers."""
    has_sinks: bool = False
    num_experts: int = 0
    """Experts per routed layer; 0 means dense MLPs."""
    num_active_experts: int = 0
    swiglu_limit: float = 0.0
    """Limit of gpt-oss' activation for gate and up. 0 is the plain silu(gate) * up."""
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
    """Number of expert groups, and how many of them a token may choose from."""
    route_scale: float = 1.0
    """Factor on a token's router weights."""
    shared_width: int = 0
    """MLP width of the experts that every token goes to; 0: there are none."""
    has_shared_gate: bool = False
    """A sigmoid scales what the shared expert adds."""
    num_extra_layers: int = 0
    """Number of layers after the last one, which predict further tokens. A checkpoint keeps their
    tensors as they are; they are neither run nor trained."""
    extra_tensors: tuple[str, ...] = ()
    """Name prefixes of such tensors outside numbered layers, and of the tensors of image towers."""
    prefix: str = "model."
    """Beginning of the names of the decoder's tensors, its head left out, in a checkpoint."""
    dense_layers: tuple[int, ...] = ()
    """Layers of a mixture of experts that have a dense MLP, in order."""
    dense_intermediate_size: int = 0
    """MLP width of `dense_layers`."""
    num_padding_rows: int = 0
    """Rows of the embedding and the head after the last id's row. They are kept as they are."""

    def with_vocabulary(self, size: int | None) -> ModelConfig:
        """The model over the first `size` ids: its tokenizer may have fewer than the model has
        rows. None takes all rows for ids, as config.json does."""
        size = self.num_rows if size is None else min(size, self.num_rows)
        return replace(self, vocab_size=size, num_padding_rows=self.num_rows - size)

    @property
    def num_rows(self) -> int:
        """Rows of the embedding and the head."""
        return self.vocab_size + self.num_padding_rows

    @property
    def has_vision(self) -> bool:
        """True if its checkpoint has a tower that reads images. The tower is not run."""
        return self.prefix != "model."

    @property
    def module_prefix(self) -> str:
        """`prefix` in the names of transformers' modules, which PEFT writes."""
        return "model.language_model." if self.has_vision else "model."

    @property
    def rotary_dim(self) -> int:
        if self.latent is not None:
            return self.latent.rope_dim
        return int(self.head_dim * self.rotary_share)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers whose keys and values are cached, in order."""
        linear = () if self.linear is None else self.linear.layers
        return tuple(i for i in range(self.num_layers) if i not in linear)

    @property
    def cached_per_token(self) -> int:
        """Numbers that a cache holds per token: keys and values of all layers that have them."""
        each = self.num_kv_heads * self.key_dim * len(self.attention_layers)
        return 2 * each if self.latent is None else each

    @property
    def key_dim(self) -> int:
        """Width of a cached key."""
        at = self.latent
        return self.head_dim if at is None else at.kv_rank + at.rope_dim

    def cached_per_sequence(self, item: int) -> int:
        """Bytes of states that a cache holds per running request, kept ones included. item: bytes
        of a number."""
        at = self.linear
        return 0 if at is None else at.cache_bytes(num_running=1, num_kept=1, item=item)

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Layers with experts, in order. Routes and loads are indexed by position in this tuple:
        routed layer 0 is its first entry."""
        if not self.is_moe:
            return ()
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layers)

    @classmethod
    def from_hf(cls, source: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
        """Reads a Hugging Face config of one of FAMILIES.

        Raises CheckpointError for another architecture. Another CheckpointError lists every missing
        setting and every setting that changes the numbers and is not implemented. Keys that
        transformers' own model of the architecture does not read are ignored.
        """
        source, of_whole = text_of(source)
        architecture = str(source.get("model_type"))
        of_family = FAMILIES.get(architecture)
        if of_family is None:
            raise CheckpointError(
                f"{where}: model_type {architecture!r:.80} is not supported; supported are "
                f"{', '.join(FAMILIES)}. fallback=true trains any causal language model of "
                "transformers, with an external engine (models/fallback)."
            )
        reading = Reading(source, of_family.defaults, of_family.reads)
        try:
            fields = read_common(reading) | of_family.read(reading)
            reading.check_shapes(fields)
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            reading.problems.append(f"it is no config of {architecture}: {named(error)}")
        reading.finish(where)
        extra = (*fields.pop("extra_tensors", ()), *of_whole.pop("extra_tensors", ()))
        return cls(architecture=architecture, extra_tensors=extra, **fields, **of_whole)

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
        reading = Reading(read_json(path, CheckpointError))
        if reading.get("text_config") is not None:
            reading.problems.append("text_config: the model reads more than text")
        reading.expect("is_encoder_decoder", None, False)
        reading.expect("quantization_config", None)
        kinds = reading.get("layers_block_type", default=None)
        num_layers = len(kinds) if isinstance(kinds, list) else None  # Nemotron-H has no number
        out = cls(
            architecture=reading.need("model_type"),
            vocab_size=reading.count("vocab_size"),
            hidden_size=reading.count("hidden_size", "n_embd", "d_model"),
            num_layers=reading.count(
                "num_hidden_layers", "n_layer", "num_layers", "n_layers", default=num_layers
            ),
            max_positions=reading.count(
                "max_position_embeddings", "n_positions", "max_seq_len", default=NO_LIMIT
            ),
            num_experts=reading.count(*EXPERT_COUNTS, default=0),
            num_active_experts=reading.count("num_experts_per_tok", default=0),
        )
        reading.finish(str(path))
        return out
