"""Checked, places and sizes of a LoRA adapter. No torch: the CLI reads it.

LoRA (arXiv 2106.09685): a frozen projection W x gets scale * B (A x) added, with A [rank, inputs]
and B [outputs, rank] trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Annotated, Literal

from lockstep.config import ABOVE_0, Checked, at_least
from lockstep.errors import ConfigError
from lockstep.models.config import ModelConfig
from lockstep.models.shapes import Shapes, decoder_layout

Group = Literal["attention", "mlp", "experts"]
GROUPS: tuple[Group, ...] = ("attention", "mlp", "experts")

DEFAULT_RANK, DEFAULT_ALPHA = 8, 16.0


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Checked):
    """A low-rank adapter, trained while the model's own weights are frozen.

    It has no dropout, which would make sampler and trainer compute different numbers. A is drawn
    by the run's seed and B starts at 0, so the first step samples from the base model.
    """

    rank: Annotated[int | None, at_least(1)] = None
    """Inner width of each adapted projection; none is 8, or the rank of the adapter at `path`."""
    alpha: Annotated[float | None, ABOVE_0] = None
    """The adapter's product is scaled by alpha / rank; none is 16, or the alpha of the adapter at
    `path`."""
    rslora: bool | None = None
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732); none is false, or as at `path`."""
    targets: tuple[str, ...] = ()
    """Projections to adapt: attention, mlp (dense), experts, or patterns on names such as *.q_proj
    or layers.0.*. Empty: all of them, or the targets of the adapter at `path`."""
    path: str = ""
    """Directory of an adapter in PEFT's form to continue from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSite:
    """One projection of Hugging Face's model; the decoder may fuse several into one."""

    name: str
    """Name that `LoraConfig.targets` are matched with: layers.0.attention.q_proj."""
    group: Group
    projection: str
    """The decoder's projection that computes it: layers.0.attention.qkv_proj."""
    hf_name: str
    """model.layers.0.self_attn.q_proj; for experts, the name of the parameter."""
    inputs: int
    outputs: int
    num_experts: int = 0
    """Experts that it has; 0 is one projection for all tokens."""
    is_interleaved: bool = False
    """Hugging Face alternates the outputs of gate and up; the decoder keeps gate, then up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """An adapter's settings, resolved against a model."""

    rank: int
    alpha: float
    rslora: bool
    sites: tuple[AdapterSite, ...]
    base: str = ""
    """Name of the base model on the hub; empty for a directory."""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def describe(self) -> str:
        groups = [g for g in GROUPS if any(site.group == g for site in self.sites)]
        return (
            f"rank {self.rank}, scale {self.scale:g}, on {len(self.sites)} projections "
            f"({', '.join(groups)})"
        )


def lora_shape(config: LoraConfig, model: ModelConfig, *, base: str = "") -> LoraShape:
    """The adapter that `config` describes for this model, without regard to `path`.

    Raises ConfigError for a target that matches no projection.
    """
    return LoraShape(
        rank=DEFAULT_RANK if config.rank is None else config.rank,
        alpha=DEFAULT_ALPHA if config.alpha is None else config.alpha,
        rslora=bool(config.rslora),
        sites=_chosen(config.targets, lora_sites(model)),
        base=base,
    )


def _chosen(targets: tuple[str, ...], sites: list[AdapterSite]) -> tuple[AdapterSite, ...]:
    if not targets:
        return tuple(sites)

    def is_of(site: AdapterSite, target: str) -> bool:
        return site.group == target if target in GROUPS else fnmatchcase(site.name, target)

    idle = [t for t in targets if not any(is_of(site, t) for site in sites)]
    if idle:
        raise ConfigError(
            f"lora.targets={','.join(idle)}: no projection of this model is called so. Groups: "
            f"{', '.join(dict.fromkeys(site.group for site in sites))}; names: "
            f"{', '.join(site.name for site in sites if '.0.' in site.name)} and so on."
        )
    return tuple(site for site in sites if any(is_of(site, t) for t in targets))


def lora_sites(config: ModelConfig) -> list[AdapterSite]:
    """Every projection that can have an adapter, in the order of the forward."""
    out: list[AdapterSite] = []
    for name, parameter in decoder_layout(config).items():
        projection = name.removesuffix(".weight")
        if not projection.endswith("_proj"):
            continue
        owner, _, part = projection.rpartition(".")
        group: Group = "attention" if owner.endswith(".attention") else "mlp"
        places = [(piece.name.removesuffix(".weight"), piece.shape) for piece in parameter.pieces]
        if len(parameter.shape) == 3:  # Hugging Face may have a tensor per expert; PEFT has none
            owner, group = f"{owner}.experts", "experts"
            places = [(f"{config.prefix}{owner}.{part}", parameter.shape)]
        for in_file, shape in places:
            hf_name = in_file.replace(config.prefix, config.module_prefix, 1)
            out.append(
                AdapterSite(
                    name=f"{owner}.{hf_name.rpartition('.')[2]}",
                    group=group,
                    projection=projection,
                    hf_name=hf_name,
                    inputs=shape[-1],
                    outputs=shape[-2],
                    num_experts=shape[0] if group == "experts" else 0,
                    is_interleaved=config.architecture == "gpt_oss" and part == "gate_up_proj",
                )
            )
    return out


def product_shapes(lora: LoraShape, model: ModelConfig) -> frozenset[tuple[int, ...]]:
    """Shapes of the factors as they are multiplied: by `models.latent_attention` head by head."""
    found = set(adapter_shapes(lora).values())
    at, H, r = model.latent, model.num_heads, lora.rank
    if at is not None and any(site.name.endswith("kv_b_proj") for site in lora.sites):
        C = at.kv_rank
        found |= {(H, r, at.nope_dim), (H, C, r), (H, r, C), (H, at.value_dim, r)}
    return frozenset(found)


def adapter_shapes(lora: LoraShape) -> Shapes:
    """name -> shape of each parameter that `add_adapter` adds."""
    out: Shapes = {}
    for projection, group in groupby(lora.sites, lambda site: site.projection):
        sites = list(group)
        first, rank = sites[0], lora.rank
        if first.num_experts:
            at = f"{projection.removesuffix('_proj')}_lora"
            out[f"{at}.A"] = (first.num_experts, rank, first.inputs)
            out[f"{at}.B"] = (first.num_experts, first.outputs, rank)
            continue
        at = f"{projection}.lora"
        out[f"{at}.A"] = (len(sites) * rank, first.inputs)
        out |= {f"{at}.B.{i}": (site.outputs, rank) for i, site in enumerate(sites)}
    return out
