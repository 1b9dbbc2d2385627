"""Low-rank adapters of the decoder's projections, for sampler and trainer.

An adapter is never merged while it is trained: both sides add the same product, computed by the
same ops, so a contract holds for the adapted model too.

# T tokens  K inputs  N outputs  R rank  S parts of a fused projection  E experts
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import nn

from lockstep.models.config import ModelConfig
from lockstep.models.layer_inputs import LayerInputs
from lockstep.models.lora_config import AdapterSite, LoraShape, lora_sites
from lockstep.ops.base import Ops, linear_backward

Tensor = torch.Tensor


class Projection(nn.Linear):
    """x W^T + b, plus the adapter's product if it has one."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.lora: LowRank | None = None

    def forward(self, x_TK: Tensor, at: LayerInputs) -> Tensor:
        if at.adapters is None and self.lora is not None and self.lora.is_on:
            return self.lora(x_TK, self.weight, self.bias, at.ops)
        out_TN = at.ops.linear(x_TK, self.weight, self.bias)
        return out_TN if at.adapters is None else at.adapters.add(self, x_TK, out_TN, at.ops)

    def of_norm(self, x_TK: Tensor, norm: Tensor | None, eps: float, at: LayerInputs) -> Tensor:
        """The projection of the normed x."""
        if norm is None:
            return self(x_TK, at)
        if self.is_plain(at):
            return at.ops.norm_linear(x_TK, norm, eps, self.weight, self.bias)
        return self(at.ops.rms_norm(x_TK, norm, eps), at)

    def added(
        self, residual_TN: Tensor, x_TK: Tensor, norm: Tensor | None, eps: float, at: LayerInputs
    ) -> Tensor:
        """residual + the projection of x, normed if there is a norm."""
        if norm is not None:
            return residual_TN + at.ops.rms_norm(self(x_TK, at), norm, eps)
        if self.is_plain(at):
            return at.ops.add_linear(residual_TN, x_TK, self.weight, self.bias)
        return residual_TN + self(x_TK, at)

    def is_plain(self, at: LayerInputs) -> bool:
        """True if no adapter takes part."""
        return at.adapters is None and self.lora is None


class LowRank(nn.Module):
    """Adapter of a projection that may fuse several of Hugging Face's.

    The A of all parts are one matrix, so that the inputs are read once; each part has its own B.
    """

    def __init__(
        self, parts: Sequence[tuple[AdapterSite, int]], sizes: Sequence[int], shape: LoraShape
    ) -> None:
        """parts: the adapted parts, each with its index among all; sizes: outputs of all parts."""
        super().__init__()
        self.places, self.sizes = [place for _, place in parts], sizes
        self.outputs = outputs_of(self.places, sizes)
        self.rank, self.scale, self.is_on = shape.rank, shape.scale, True
        self.A = nn.Parameter(torch.empty(len(parts) * shape.rank, parts[0][0].inputs))
        self.B = nn.ParameterList(torch.zeros(s.outputs, shape.rank) for s, _ in parts)

    def forward(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, ops: Ops) -> Tensor:
        """x W^T + b, with the product of each adapted part added to its outputs."""
        if torch.is_grad_enabled():
            return _Adapted.apply(x_TK, weight_NK, bias_N, self, ops, self.A, *self.B)  # pyright: ignore
        return self.product(x_TK, weight_NK, bias_N, ops)[0]

    def product(
        self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """(`forward`, A x times the scale: [T, S * R])."""
        out_TN = ops.linear(x_TK, weight_NK, bias_N)
        h_TC = ops.linear(x_TK, self.A).mul_(self.scale)
        for B, outputs, h_TR in zip(self.B, self.outputs, h_TC.split(self.rank, 1), strict=True):
            # Rows without a gap: a kernel may take another path for strided ones.
            out_TN[:, outputs] += ops.linear(h_TR.contiguous(), B)
        return out_TN, h_TC

    def factors(self, number: int) -> tuple[Tensor, Tensor]:
        """(A [R, K], B [N, R]) of the `number`-th adapted part: views of the parameters."""
        return self.A[number * self.rank : (number + 1) * self.rank], self.B[number]

    def delta(self) -> Tensor:
        """[N, K] float32: the product to add to the weight, with its scale."""
        rows = [self.A.new_zeros(n, self.A.shape[1], dtype=torch.float32) for n in self.sizes]
        for number, place in enumerate(self.places):
            A, B = (x.detach().float() for x in self.factors(number))
            rows[place] = B @ A * self.scale
        return torch.cat(rows)


def outputs_of(places: Sequence[int], sizes: Sequence[int]) -> list[slice]:
    """The outputs of each adapted part, given its index and the sizes of all parts."""
    return [slice(begin := sum(sizes[:place]), begin + sizes[place]) for place in places]


class _Adapted(torch.autograd.Function):
    """`LowRank.product`. Its backward has no copy of the outputs' gradient in the parts' order, and
    adds up the gradient of x in place."""

    @staticmethod
    def forward(ctx, x_TK, weight_NK, bias_N, adapter, ops, *factors):
        out_TN, h_TC = adapter.product(x_TK, weight_NK, bias_N, ops)
        ctx.save_for_backward(x_TK, weight_NK, h_TC, *factors)
        ctx.outputs, ctx.rank, ctx.scale = adapter.outputs, adapter.rank, adapter.scale
        ctx.dtype = ops.gradient_dtype(x_TK.dtype, weight_NK)
        ctx.factors_dtype = ops.gradient_dtype(x_TK.dtype)
        return out_TN

    @staticmethod
    def backward(ctx, grad_TN):
        x_TK, weight_NK, h_TC, A, *Bs = ctx.saved_tensors
        grads = linear_backward(ctx, grad_TN, x_TK, weight_NK)
        dtype, wide = x_TK.dtype, ctx.factors_dtype
        grad_h, grads_B = torch.empty_like(h_TC, dtype=wide), []
        parts = (x.split(ctx.rank, 1) for x in (h_TC, grad_h))
        for B, outputs, h_TR, grad_TR in zip(Bs, ctx.outputs, *parts, strict=True):
            part = grad_TN[:, outputs].to(wide)
            torch.mm(part, B.to(wide), out=grad_TR)
            grads_B.append((part.t() @ h_TR.to(wide)).to(dtype))
        grad_h *= ctx.scale
        if grads[0] is not None:
            grads[0] = grads[0].to(wide).addmm_(grad_h, A.to(wide)).to(dtype)
        return *grads, None, None, (grad_h.t() @ x_TK.to(wide)).to(dtype), *grads_B


class ExpertLowRank(nn.Module):
    """Adapter of one projection of all experts, with factors for each expert:
    `experts.mix_experts` computes with them, and their gradients."""

    def __init__(self, site: AdapterSite, shape: LoraShape) -> None:
        super().__init__()
        E, R = site.num_experts, shape.rank
        self.rank, self.scale, self.is_on = R, shape.scale, True
        self.A = nn.Parameter(torch.empty(E, R, site.inputs))
        self.B = nn.Parameter(torch.zeros(E, site.outputs, R))

    def delta(self) -> Tensor:
        """[E, N, K] float32: the products to add to the weights, with their scale."""
        return torch.bmm(self.B.detach().float(), self.A.detach().float()) * self.scale


Adapter = LowRank | ExpertLowRank


def add_adapter(model: nn.Module, shape: LoraShape, *, seed: int) -> None:
    """Puts an adapter on a `Decoder`, on its device and in its dtype, and freezes everything else.

    A is drawn as PEFT does (uniform within 1 / sqrt(inputs)), in float32 on the CPU, so that a seed
    means the same on every device. B is 0: the adapted model is the model.
    """
    config: ModelConfig = model.config  # pyright: ignore[reportAssignmentType]
    model.requires_grad_(False)
    chosen = {site.name for site in shape.sites}
    generator = torch.Generator().manual_seed(seed)
    for projection, group in groupby(lora_sites(config), lambda site: site.projection):
        sites = list(group)
        parts = [(site, i) for i, site in enumerate(sites) if site.name in chosen]
        if not parts:
            continue
        owner, attribute, weight = place_of(model, projection)
        with torch.device("cpu"):
            if sites[0].num_experts:
                adapter: Adapter = ExpertLowRank(sites[0], shape)
            else:
                adapter = LowRank(parts, [site.outputs for site in sites], shape)
        bound = 1 / math.sqrt(sites[0].inputs)
        with torch.no_grad():
            adapter.A.uniform_(-bound, bound, generator=generator)
        setattr(owner, attribute, adapter.to(weight.device, weight.dtype))
    model.lora = shape  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


def place_of(model: nn.Module, projection: str) -> tuple[nn.Module, str, Tensor]:
    """(module, its attribute for an adapter, the weight that it adapts) of a decoder's
    projection."""
    parent, _, name = projection.rpartition(".")
    owner = model.get_submodule(parent)
    found = getattr(owner, name)
    if isinstance(found, Projection):
        return found, "lora", found.weight
    return owner, f"{name.removesuffix('_proj')}_lora", found


def adapter_at(model: nn.Module, projection: str) -> Adapter | None:
    """The adapter of a projection of the decoder, if it has one."""
    owner, attribute, _ = place_of(model, projection)
    return getattr(owner, attribute)


def adapted(model: nn.Module) -> Iterator[tuple[str, list[AdapterSite], Adapter]]:
    """(projection, its adapted sites, its adapter), in the order of the model's sites."""
    shape: LoraShape | None = model.lora  # pyright: ignore[reportAssignmentType]
    sites = () if shape is None else shape.sites
    for projection, group in groupby(sites, lambda site: site.projection):
        adapter = adapter_at(model, projection)
        assert adapter is not None, f"{projection} has no adapter, and the model's shape says so"
        yield projection, list(group), adapter


@contextmanager
def patched(*changed: tuple[Any, str, Any]) -> Iterator[None]:
    """(object, attribute, value): the attributes have these values inside of the block."""
    before = [getattr(of, name) for of, name, _ in changed]
    try:
        for of, name, value in changed:
            setattr(of, name, value)
        yield
    finally:
        for (of, name, _), value in zip(changed, before, strict=True):
            setattr(of, name, value)


# -- sinks ----------------------------------------------------------------------------------------


def adapters_of(model: nn.Module) -> list[Adapter]:
    """Every adapter, in the order of the model."""
    return [m for m in model.modules() if isinstance(m, LowRank | ExpertLowRank)]


def adapter_scaled(model: nn.Module, factor: float) -> AbstractContextManager[None]:
    """Scales the adapter of `model` by `factor` inside the block. 0: the model computes without it,
    as the reference policy does. 2: as if the adapter had been merged twice."""
    adapters = adapters_of(model)
    scales = [(adapter, "scale", adapter.scale * factor) for adapter in adapters]
    return patched(*scales, *((adapter, "is_on", factor != 0) for adapter in adapters))


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """A and B of every adapter, in the order of the model."""
    return [parameter for adapter in adapters_of(model) for parameter in adapter.parameters()]


def adapter_replaced(model: nn.Module, values: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Gives the adapter of `model` these values inside the block: see `adapter_parameters`. Its own
    memory and values stay."""
    pairs = zip(adapter_parameters(model), values, strict=True)
    return patched(*((parameter, "data", value) for parameter, value in pairs))


def merged(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """`weight`, the parameter `name` of `model`, plus its adapter's product: summed in float32 and
    rounded once. Unchanged if it has no adapter."""
    projection = name.removesuffix(".weight")
    adapter = adapter_at(model, projection) if projection.endswith("_proj") else None
    if adapter is None:
        return weight
    return (weight.detach().float() + adapter.delta()).to(weight.dtype)
