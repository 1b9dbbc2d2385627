"""A large, seeded change of every tensor group of a model, undone bit for bit.

An eighth of the numbers of each matrix change their sign: norms stay, products turn by about 40
degrees, and the same change again restores the bits without a copy. Norms, biases, sinks and
tensors that are 0 (the B of a fresh adapter) get noise added; they are small, and copied.

# K inputs  R rank
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.models.decoder import Decoder
from lockstep.models.lora import ExpertLowRank, LowRank
from lockstep.models.shapes import decoder_layout
from lockstep.models.sharding import full_tensor, local_part, mesh_of
from lockstep.models.tensor_file import blocks_of

Tensor = torch.Tensor

FLIPPED = 1 / 8
"""Share of a matrix's numbers that change their sign. New and old products then have the cosine
1 - 2/8 = 0.75: far from equal, and far from noise, which would drown later layers."""
NOISE = 0.5
"""Size of added noise in root mean squares of the tensor; absolute for a tensor of zeros, because
logits of sinks and routers, and biases of normed streams, are of the order of 1."""
SMALL = 1 << 16
"""Largest tensor that is copied and gets noise: an eighth of four sinks may be none."""

GROUPS = {
    "embedding": r"embed",
    "head": r"untied_head|lm_head",
    "norms": r"norm",
    "attention": r"(attention|attn).*(?<!\.bias)(?<!sinks)$",
    "attention biases": r"(attention|attn).*\.bias$",
    "sinks": r"sinks$",
    "routing biases": r"choice_bias|e_score_correction_bias",
    "router": r"router|\.gate\.weight$",
    "experts": r"\.experts.*(?<!bias)$",
    "expert biases": r"\.experts.*bias$",
    "mlp": r"",
    "adapter": r"lora",
}
"""Group -> what the names of its parameters contain, unless an earlier one's do; in the order of
messages."""


def group_of(name: str, *, ndim: int) -> str:
    """The group of a parameter, by its name in our models or in transformers'.

    >>> [group_of(n, ndim=2) for n in ("embedding", "layers.0.attention.qkv_proj.weight")]
    ['embedding', 'attention']
    >>> group_of("layers.0.mlp.down_proj", ndim=3)
    'experts'
    """
    if "lora" in name:
        return "adapter"
    group = next(group for group, pattern in GROUPS.items() if re.search(pattern, name))
    if group == "mlp" and name.endswith("bias"):
        return "expert biases" if ndim == 2 else group
    return "experts" if group == "mlp" and ndim == 3 else group


@dataclass(slots=True)
class WeightChange:
    """The change of some or all parameters of a model, made and undone in place.

    `requires_grad` and the optimizer's state stay the same. Each rank changes its own part of a
    sharded model; all ranks make the same calls.
    """

    model: Any
    """A decoder, or a model with the same interface."""
    seed: int = 0
    is_adapter_only: bool = False
    """Only the adapter is sent to the engine."""
    changed: set[str] = field(default_factory=set[str])
    """Names of the parameters that are changed now."""
    _kept: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def names(self) -> list[str]:
        """Names of the parameters that are sent, in the order of a checkpoint."""
        return list(self._parameters())

    def groups(self) -> dict[str, list[str]]:
        """Group -> names of its parameters."""
        found = {name: group_of(name, ndim=p.ndim) for name, p in self._parameters().items()}
        out = {group: [n for n, of in found.items() if of == group] for group in GROUPS}
        return {group: names for group, names in out.items() if names}

    @contextmanager
    def turned(self, names: Iterable[str]) -> Generator[None]:
        """Flips the state of these parameters within the block: changed ones are restored, others
        changed."""
        before = set(self.changed)
        try:
            self._turn(set(names))
            yield
        finally:
            self._turn(self.changed ^ before)

    def _turn(self, names: set[str]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters().items():
                if name in names:
                    self._turn_one(name, parameter)
                    self.changed ^= {name}

    def _parameters(self) -> dict[str, Tensor]:
        found = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.is_floating_point() and (not self.is_adapter_only or "lora" in name)
        }
        if isinstance(self.model, Decoder):
            sent = {name: place for place, name in enumerate(decoder_layout(self.model.config))}
            return dict(sorted(found.items(), key=lambda pair: sent.get(pair[0], len(sent))))
        return found

    def _turn_one(self, name: str, parameter: Tensor) -> None:
        own = local_part(parameter.detach())
        if name in self._kept:
            own.copy_(self._kept.pop(name))
            return
        generator = torch.Generator(own.device).manual_seed(self._seed_of(name, parameter))
        is_empty = not full_tensor(parameter.detach()).any()
        if parameter.numel() <= SMALL or is_empty:
            self._kept[name] = own.clone()
            noise = torch.randn(own.shape, generator=generator, device=own.device)
            own.add_((noise * self._noise_size(name, parameter)).to(own.dtype))
            return
        for rows in blocks_of(len(own), own.nbytes):
            part = own[rows]
            draws = torch.rand(part.shape, generator=generator, device=own.device)
            part.mul_(torch.where(draws < FLIPPED, -1, 1).to(part.dtype))

    def _seed_of(self, name: str, parameter: Tensor) -> int:
        """The seed of a parameter, equal on every rank that holds it whole."""
        mesh = mesh_of(parameter)
        place = 0 if mesh is None else mesh.get_local_rank()
        text = f"{self.seed}/{name}/{place}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1

    def _noise_size(self, name: str, parameter: Tensor) -> float:
        size = _rms(parameter)
        if size == 0 and ".lora" in name.replace("_lora", ".lora"):
            return self._adapter_noise(name)
        return NOISE * (size or 1.0)

    def _adapter_noise(self, name: str) -> float:
        """Noise for B, so that B A s has NOISE times the root mean square of the weight beside
        it."""
        parent = name.split(".B")[0].removesuffix(".A")
        adapter = self.model.get_submodule(parent)
        assert isinstance(adapter, LowRank | ExpertLowRank), f"{parent} is no adapter"
        owner, _, attribute = parent.rpartition(".")
        module = self.model.get_submodule(owner)
        attribute = "weight" if attribute == "lora" else attribute.replace("_lora", "_proj")
        weight = getattr(module, attribute)
        inner = adapter.scale * adapter.rank**0.5 * _rms(adapter.A)
        return NOISE * _rms(weight) / inner if inner else NOISE


def _rms(parameter: Tensor) -> float:
    return float(full_tensor(parameter.detach()).float().square().mean().sqrt())
