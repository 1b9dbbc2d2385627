"""Batch-invariant ops for CUDA: the contract of `ops.invariant`, kept by Triton kernels.

Forward uses Triton's kernels, and cuBLAS for row counts where the self-test found the same bits.
Backward is stock torch and need not be invariant. Three switches of torch matter:

    torch.backends.cuda.matmul.fp32_precision         "tf32" is refused: gradients in float32 would
                                                      have 10 bits. It is not torch's default.
    ...matmul.allow_bf16_reduced_precision_reduction  turned off here, since torch's default is on:
    ...matmul.allow_fp16_reduced_precision_reduction  partial sums would be rounded to two bytes.

# T tokens  H query heads  G key heads  D head width  M GEMM rows  K inner width  N outputs
# E experts  A active experts
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lockstep.errors import ConfigError
from lockstep.ops import cuda_draws
from lockstep.ops import cuda_kernels as kernels
from lockstep.ops.base import GELU_CUBIC, GELU_SLOPE, Context, Counts, GemmOps, Rotary, on_device
from lockstep.ops.context import SPLIT_KEYS, AttentionSpec, PagedContext

Tensor = torch.Tensor

LIBRARY_ROWS = (8192, 4096, 2048, 1024, 512)  # of products that cuBLAS may compute
LIBRARY_OUTPUTS = 1 << 28  # of one such product: half a GiB


class CudaOps(GemmOps):
    """`Ops` of Triton kernels. Raises ConfigError where it cannot run."""

    name = "cuda"
    key_block = SPLIT_KEYS

    def __init__(self) -> None:
        super().__init__()
        self.library: dict[tuple[Any, ...], tuple[int, ...]] = {}
        """(dtype, shape of a weight) -> row counts, the largest first, where cuBLAS gave the same
        bits as the kernel; see `learn_library`."""
        matmul = torch.backends.cuda.matmul
        if matmul.fp32_precision == "tf32":
            raise ConfigError(
                "torch.backends.cuda.matmul.fp32_precision is 'tf32'; expected 'ieee': gradients "
                "in float32 would have 10 bits. Set it to 'ieee' before CudaOps is made."
            )
        if not (kernels.IS_INTERPRETED or torch.cuda.is_available()):
            raise ConfigError(
                "CudaOps needs a GPU, and torch sees none. On a CPU the invariant ops are "
                "ops.invariant.InvariantOps; TRITON_INTERPRET=1 runs these kernels there, to test "
                "them."
            )
        if not kernels.IS_INTERPRETED:
            kernels.check_chip()
        self.tiles = kernels.of_chip(kernels.TILES)
        self._squares: tuple[Tensor, Tensor] | None = None
        """(result of the last `add_linear`, its `kernels.squares`): the next norm reads them."""
        matmul.allow_bf16_reduced_precision_reduction = False
        matmul.allow_fp16_reduced_precision_reduction = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (), {"tiles": self.tiles, "library": self.library}

    def reads_work(self, device: torch.device) -> bool:
        return True

    def gemm(self, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        sizes = self.library.get((x_MK.dtype, weight_NK.shape), ()) if bias_N is None else ()
        if not sizes or len(x_MK) < sizes[-1]:
            return kernels.gemm(x_MK, weight_NK, bias_N, self.tiles)
        out, at = x_MK.new_empty(len(x_MK), len(weight_NK)), 0
        for size in sizes:
            while len(x_MK) - at >= size:
                part = slice(at, at + size)
                torch.mm(x_MK[part], weight_NK.t(), out=out[part])
                at += size
        if at < len(x_MK):
            out[at:] = kernels.gemm(x_MK[at:], weight_NK, None, self.tiles)
        return out

    def learn_library(self, weight_NK: Tensor) -> None:
        """Finds the row counts where cuBLAS gives the kernel's bits. cuBLAS is faster for many
        rows, but picks its kernel by the row count, and a kernel that splits the inner sum has
        other bits. So each count is tried, and cuBLAS never gets an untried one."""
        (N, K), dtype = weight_NK.shape, weight_NK.dtype
        key = dtype, weight_NK.shape
        is_for_it = dtype.itemsize == 2 or kernels.IS_INTERPRETED
        if key in self.library or not is_for_it:
            return
        generator = torch.Generator(weight_NK.device).manual_seed(0)
        found: list[int] = []
        for size in LIBRARY_ROWS:
            if size * N > LIBRARY_OUTPUTS:
                continue
            x_MK = torch.randn(size, K, generator=generator, device=weight_NK.device).to(dtype)
            ours = kernels.gemm(x_MK, weight_NK, None, self.tiles)
            if torch.equal(torch.mm(x_MK, weight_NK.t()), ours):
                found.append(size)
        self.library[key] = tuple(found)

    def take_one_tile(self) -> bool:
        """Computes all two-byte GEMMs in tiles of one shape from now on, for a chip whose tiles do
        not agree; False if it does already."""
        tiles = kernels.Tiles(*[self.tiles.few] * 4)
        is_other, self.tiles = tiles != self.tiles, tiles
        return is_other

    def describe_gemm(self, dtype: torch.dtype) -> str:
        """Tiles as rows x outputs x depth."""
        used = self.tiles if dtype.itemsize == 2 else [kernels.FLOAT32_TILE]
        return " ".join(f"{tile.rows}x{tile.outputs}x{tile.depth}" for tile in used)

    def expert_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tokens_per_expert: Counts
    ) -> Tensor:
        counts = on_device(tokens_per_expert, x.device)
        return kernels.gemm(x, weight, bias, self.tiles, counts=counts)

    def route(
        self,
        logits: Tensor,
        num_active: int,
        *,
        experts: Tensor | None = None,
        is_normalized: bool = True,
    ) -> tuple[Tensor, Tensor]:
        weights, chosen = kernels.route(
            logits.detach(), num_active, experts, is_normalized=is_normalized
        )
        stock = super().route

        def differentiable(x: Tensor) -> Tensor:
            return stock(x, num_active, experts=chosen, is_normalized=is_normalized)[0]

        return _run(lambda _: weights, differentiable, logits), chosen

    def sort_pairs(self, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor] | None:
        if experts.numel() > kernels.MOST_PAIRS:
            return None
        return kernels.sort_pairs(experts, num_experts)

    def combine(self, out: Tensor, weights: Tensor) -> Tensor:
        return _run(kernels.combine, super().combine, out, weights)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        stock = partial(super().rms_norm, eps=eps)
        return _run(partial(kernels.rms_norm, eps=eps), stock, x, weight)

    def swiglu(self, gate_up: Tensor, *, alpha: float = 1.0, limit: float | None = None) -> Tensor:
        kernel = partial(kernels.swiglu, alpha=alpha, limit=limit)
        stock = partial(super().swiglu, alpha=alpha, limit=limit)
        return _run(kernel, stock, gate_up)

    def geglu(self, gate_up: Tensor) -> Tensor:
        kernel = partial(kernels.swiglu, alpha=GELU_SLOPE, limit=None, cubic=GELU_CUBIC)
        return _run(kernel, super().geglu, gate_up)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _run(kernels.rope, super().rope, x, cos, sin)

    # -- composed: for a forward without gradient ---------------------------------------------

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        if not _is_fused(x):
            return super().norm_linear(x, norm, eps, weight, bias)
        return kernels.gemm(x, weight, bias, self.tiles, norm=(self._squares_of(x), norm, eps))

    def norm_swiglu(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        if not _is_fused(x):
            return super().norm_swiglu(x, norm, eps, weight)
        norms = (self._squares_of(x), norm, eps)
        return kernels.gemm(x, weight, None, self.tiles, norm=norms, is_gated=True)

    def add_linear(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        if not _is_fused(x):
            return super().add_linear(residual, x, weight, bias)
        squares = kernels.empty_squares(residual)
        out = kernels.gemm(x, weight, bias, self.tiles, residual=residual, squares_out=squares)
        self._squares = (out, squares)
        return out

    def _squares_of(self, x: Tensor) -> Tensor:
        if self._squares is not None and self._squares[0] is x:
            return self._squares[1]
        return kernels.squares(x)

    def rotary_attention(
        self, qkv: Tensor, rotary: Rotary, spec: AttentionSpec, context: Context
    ) -> Tensor:
        cos, sin, _, norms, eps = rotary
        is_part = cos.shape[-1] < qkv.shape[-1]
        if is_part or not (_is_fused(qkv) and isinstance(context, PagedContext)):
            return super().rotary_attention(qkv, rotary, spec, context)
        pages = context.keys[spec.layer], context.values[spec.layer]
        q = kernels.rotate_and_write(qkv, cos, sin, norms, eps, *pages, context.write_index)
        return self._paged_attention(q, qkv, qkv, spec, context)

    def log_softmax(
        self, logits: Tensor, *, temperature: float = 1.0, kept: Tensor | None = None
    ) -> Tensor:
        return kernels.log_softmax(logits, temperature=temperature, kept=kept)

    def draw(self, probs: Tensor, uniform: Tensor) -> Tensor:
        return cuda_draws.draw(probs, uniform)

    def nucleus(self, probs: Tensor, top_p: Tensor) -> Tensor:
        return cuda_draws.nucleus(probs, top_p)


# -- gradients ------------------------------------------------------------------------------------


class _Recomputed(torch.autograd.Function):
    """Forward by a kernel; backward by differentiating the stock function, which is computed again.
    That is elementwise work, and small compared to a GEMM."""

    @staticmethod
    def forward(ctx, kernel, function, *inputs):
        ctx.save_for_backward(*inputs)
        ctx.function = function
        return kernel(*inputs)

    @staticmethod
    def backward(ctx, *grad_outputs):
        needed = ctx.needs_input_grad[2:]
        inputs = [
            x.detach().requires_grad_(is_needed)
            for x, is_needed in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        found = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grad_outputs))
        return None, None, *(next(found) if is_needed else None for is_needed in needed)


def _is_fused(x: Tensor) -> bool:
    """True if kernels compute several ops at once, for few rows. Not in float32: there a product
    and a sum may round once or twice, so two kernels may differ; the interpreter rounds each."""
    if torch.is_grad_enabled() or len(x) >= LIBRARY_ROWS[-1]:
        return False
    return x.dtype.itemsize == 2 or kernels.IS_INTERPRETED


def _run(kernel: Callable[..., Tensor], function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return kernel(*inputs)
    return _Recomputed.apply(kernel, function, *inputs)  # pyright: ignore[reportReturnType]
