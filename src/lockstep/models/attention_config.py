"""Scalings of rotary positions, by Hugging Face's names; shapes of latent and linear attention."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.ops.contract import BLOCK, CHUNK


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Widths of latent attention: `models.latent_attention`."""

    query_rank: int
    """Width of the latent of queries; 0: they have none."""
    kv_rank: int
    nope_dim: int
    """Dims of a query or key that are not rotated, before the rotated ones."""
    rope_dim: int
    value_dim: int
    is_interleaved: bool
    """True: neighbouring dims are rotated together. False: the two halves of the rotated dims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """Layers of linear attention by the gated delta rule."""

    layers: tuple[int, ...]
    """Indices of linear layers, in order; the others have attention. Linear layer 0 is the first
    entry."""
    key_heads: int
    value_heads: int
    """A multiple of the key heads."""
    key_dim: int
    value_dim: int
    conv_width: int
    """Tokens that the convolution over each channel of queries, keys and values reads."""
    is_grouped: bool
    """Projections hold the parts of one key head after another, and not all queries, then all keys,
    values and gates."""

    @property
    def channels(self) -> int:
        """Inputs of the convolution: queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def state_size(self) -> int:
        """Numbers of a layer's state."""
        return self.value_width * self.key_dim

    def cache_bytes(self, *, num_running: int, num_kept: int, item: int) -> int:
        """Size of a sampler's `ops.chunks.States` for this many sequences, and of its kept states.
        item: bytes of a number in the compute dtype."""
        tail = (self.conv_width - 1) * self.channels * item
        tokens = self.key_heads * self.key_dim + self.value_width + 2 * self.value_heads
        block = BLOCK * (BLOCK * self.value_heads + self.value_width)
        running = 4 * (self.state_size + CHUNK * tokens + block) + 2 * tail
        kept = 4 * self.state_size + tail
        return len(self.layers) * (num_running * running + num_kept * kept)
