"""Scalings of rotary positions, with the names of Hugging Face's config, and latent shapes."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Whether neighbours are rotated together; else the halves of the rotated dims."""
