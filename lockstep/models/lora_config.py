"""Where a LoRA adapter sits on a decoder, and how large it is. No torch: the CLI reads it.

LoRA (arXiv 2106.09685): a frozen projection W x gets scale * B (A x) added, with A [rank, inputs]
and B [outputs, rank] trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from lockstep.errors import ConfigError
from lockstep.models.config import ModelConfig

Group = Literal["attention", "mlp", "experts"]
GROUPS: tuple[Group, ...] = ("attention", "mlp", "experts")

DEFAULT_RANK, DEFAULT_ALPHA = 8, 16.0


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """A low-rank adapter that is trained in place of the model, whose own weights are frozen.

    There is no dropout: sampler and trainer would then compute different numbers.
    """

    rank: int | None = None
    """Inner width of each adapted projection; none is 8, or that of the adapter at `path`."""
    alpha: float | None = None
    """What the adapter adds is scaled by alpha / rank; none is 16, or that of the adapter at
    `path`."""
    rslora: bool | None = None
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732); none is false, or as at `path`."""
    targets: tuple[str, ...] = ()
    """Which projections: attention, mlp (dense), experts, or patterns on their names such as
    *.q_proj or layers.0.*; nothing is all of them, or those of the adapter at `path`."""
    seed: int = 0
    """Of A's random start; B starts at 0, so the first step samples from the model as it is."""
    path: str = ""
    """A directory with an adapter in PEFT's form to go on from."""

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ConfigError(f"lora.rank={self.rank} must be at least 1.")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise ConfigError(f"lora.alpha={self.alpha} must be a finite number above 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One projection as Hugging Face has it, of which the decoder may hold several in one."""

    name: str
    """What `LoraConfig.targets` are matched with: layers.0.attention.q_proj."""
    group: Group
    projection: str
    """Ours that computes it: layers.0.attention.qkv_proj."""
    hf_name: str
    """model.layers.0.self_attn.q_proj; of experts, the parameter."""
    inputs: int
    outputs: int
    num_experts: int = 0
    """0 is one projection for all tokens."""
    is_interleaved: bool = False
    """Hugging Face alternates the outputs of gate and up, ours lay gate, then up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """What an adapter is, once its settings are read against a model."""

    rank: int
    alpha: float
    rslora: bool
    sites: tuple[Site, ...]
    base: str = ""
    """What the model is called on the hub; empty for a directory."""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def num_parameters(self) -> int:
        widths = (max(s.num_experts, 1) * (s.inputs + s.outputs) for s in self.sites)
        return self.rank * sum(widths)

    def describe(self) -> str:
        groups = [g for g in GROUPS if any(site.group == g for site in self.sites)]
        return (
            f"rank {self.rank}, scale {self.scale:g}, on {len(self.sites)} projections "
            f"({', '.join(groups)})"
        )


def lora_shape(config: LoraConfig, model: ModelConfig, *, base: str = "") -> LoraShape:
    """The adapter that `config` asks for on a model of these shapes, `path` aside.

    Raises ConfigError for a target that no projection of the model has.
    """
    return LoraShape(
        rank=DEFAULT_RANK if config.rank is None else config.rank,
        alpha=DEFAULT_ALPHA if config.alpha is None else config.alpha,
        rslora=bool(config.rslora),
        sites=_chosen(config.targets, lora_sites(model)),
        base=base,
    )


def _chosen(targets: tuple[str, ...], sites: list[Site]) -> tuple[Site, ...]:
    if not targets:
        return tuple(sites)

    def is_of(site: Site, target: str) -> bool:
        return site.group == target if target in GROUPS else fnmatchcase(site.name, target)

    idle = [t for t in targets if not any(is_of(site, t) for site in sites)]
    if idle:
        raise ConfigError(
            f"lora.targets={','.join(idle)}: no projection of this model is called so. Groups: "
            f"{', '.join(dict.fromkeys(site.group for site in sites))}; names: "
            f"{', '.join(site.name for site in sites if '.0.' in site.name)} and so on."
        )
    return tuple(site for site in sites if any(is_of(site, t) for t in targets))


def lora_sites(config: ModelConfig) -> list[Site]:
    """Every projection that can have an adapter, in the order of the forward."""
    out: list[Site] = []
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for i in range(c.num_layers):
        ours, theirs = f"layers.{i}.attention", f"model.layers.{i}.self_attn"
        for part, outputs in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            out.append(
                Site(
                    name=f"{ours}.{part}",
                    group="attention",
                    projection=f"{ours}.qkv_proj",
                    hf_name=f"{theirs}.{part}",
                    inputs=c.hidden_size,
                    outputs=outputs,
                )
            )
        out.append(
            Site(
                name=f"{ours}.o_proj",
                group="attention",
                projection=f"{ours}.o_proj",
                hf_name=f"{theirs}.o_proj",
                inputs=q,
                outputs=c.hidden_size,
            )
        )
        out += _expert_sites(c, i) if i in c.routed_layers else _mlp_sites(c, i)
    return out


def _mlp_sites(c: ModelConfig, layer: int) -> list[Site]:
    ours, theirs = f"layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    F, D = c.dense_intermediate_size if c.is_moe else c.intermediate_size, c.hidden_size
    return [
        Site(
            name=f"{ours}.{part}",
            group="mlp",
            projection=f"{ours}.{projection}",
            hf_name=f"{theirs}.{part}",
            inputs=inputs,
            outputs=outputs,
        )
        for part, projection, inputs, outputs in (
            ("gate_proj", "gate_up_proj", D, F),
            ("up_proj", "gate_up_proj", D, F),
            ("down_proj", "down_proj", F, D),
        )
    ]


def _expert_sites(c: ModelConfig, layer: int) -> list[Site]:
    ours, theirs = f"layers.{layer}.mlp", f"model.layers.{layer}.mlp.experts"
    F, D = c.intermediate_size, c.hidden_size
    return [
        Site(
            name=f"{ours}.experts.{part}",
            group="experts",
            projection=f"{ours}.{part}",
            hf_name=f"{theirs}.{part}",
            inputs=inputs,
            outputs=outputs,
            num_experts=c.num_experts,
            is_interleaved=part == "gate_up_proj" and c.architecture == "gpt_oss",
        )
        for part, inputs, outputs in (("gate_up_proj", D, 2 * F), ("down_proj", F, D))
    ]
