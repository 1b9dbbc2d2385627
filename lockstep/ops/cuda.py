"""Batch-invariant ops for CUDA: the contract of `ops.invariant`, kept by Triton kernels.

Forward uses the kernels of `ops.cuda_kernels` alone, so no global switch of torch can change a
log-prob. Backward is stock torch; it need not be invariant, and depends on three switches:

    torch.backends.cuda.matmul.fp32_precision         "tf32" is refused: gradients in float32 would
                                                      have 10 bits. It is not torch's default.
    ...matmul.allow_bf16_reduced_precision_reduction  turned off here, since torch's default is on:
    ...matmul.allow_fp16_reduced_precision_reduction  partial sums would be rounded to two bytes.

# T tokens  B rows of a block  L its length  H query heads  G key heads  R = H / G  D head width
# M GEMM rows  K inner width  N outputs  E experts  A active experts
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from lockstep.errors import ConfigError
from lockstep.ops import cuda_draws
from lockstep.ops import cuda_kernels as kernels
from lockstep.ops.base import Context, Linear, Ops
from lockstep.ops.context import AttentionSpec, PagedContext

Tensor = torch.Tensor


class CudaOps(Ops):
    """`Ops` of Triton kernels. Raises ConfigError where it cannot run."""

    name = "cuda"

    def __init__(self) -> None:
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
        self._squares: tuple[Tensor, Tensor] | None = None
        """(result of the last `add_linear`, its `kernels.squares`): the next norm reads them."""
        matmul.allow_bf16_reduced_precision_reduction = False
        matmul.allow_fp16_reduced_precision_reduction = False

    def resident_dtype(self, dtype: torch.dtype) -> None:
        return None  # the kernel reads pages where they lie

    def reads_work(self, device: torch.device) -> bool:
        return True

    gemm = staticmethod(kernels.gemm)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled():
            out = Linear.apply(x_MK, weight, bias, self)
        else:
            out = self.gemm(x_MK, weight, bias)
        return out.view(*x.shape[:-1], len(weight))

    def expert_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tokens_per_expert: list[int]
    ) -> Tensor:
        return kernels.expert_gemm(x, weight, bias, tokens_per_expert)

    def route(
        self,
        logits: Tensor,
        num_active: int,
        *,
        experts: Tensor | None = None,
        is_normalized: bool = True,
    ) -> tuple[Tensor, Tensor]:
        if experts is None:
            # topk may break ties in another way for another number of rows; a stable sort may not.
            experts = logits.sort(dim=-1, descending=True, stable=True)[1][:, :num_active]
        if not is_normalized:
            shares = _run(_shares_of_all, partial(torch.softmax, dim=-1), logits.float())
            return shares.gather(-1, experts).to(logits.dtype), experts
        top = logits.gather(-1, experts).float()
        share = (top - top.amax(-1, keepdim=True)).exp()
        total = share[:, 0]
        for slot in range(1, num_active):
            total = total + share[:, slot]
        return (share / total[:, None]).to(logits.dtype), experts

    def combine(self, out: Tensor, weights: Tensor) -> Tensor:
        return _run(kernels.combine, super().combine, out, weights)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        stock = partial(super().rms_norm, eps=eps)
        return _run(partial(kernels.rms_norm, eps=eps), stock, x, weight)

    def swiglu(self, gate_up: Tensor, *, alpha: float = 1.0, limit: float | None = None) -> Tensor:
        kernel = partial(kernels.swiglu, alpha=alpha, limit=limit)
        stock = partial(super().swiglu, alpha=alpha, limit=limit)
        return _run(kernel, stock, gate_up)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _run(kernels.rope, super().rope, x, cos, sin)

    # -- composed: for a forward without gradient ---------------------------------------------

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        if not _is_fused(x):
            return super().norm_linear(x, norm, eps, weight, bias)
        return kernels.gemm(x, weight, bias, norm=(self._squares_of(x), norm, eps))

    def norm_swiglu(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        if not _is_fused(x):
            return super().norm_swiglu(x, norm, eps, weight)
        norms = (self._squares_of(x), norm, eps)
        return kernels.gemm(x, weight, None, norm=norms, is_gated=True)

    def add_linear(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        if not _is_fused(x):
            return super().add_linear(residual, x, weight, bias)
        squares = kernels.empty_squares(residual)
        out = kernels.gemm(x, weight, bias, residual=residual, squares_out=squares)
        self._squares = (out, squares)
        return out

    def _squares_of(self, x: Tensor) -> Tensor:
        if self._squares is not None and self._squares[0] is x:
            return self._squares[1]
        return kernels.squares(x)

    def rotary_attention(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        spec: AttentionSpec,
        context: Context,
        *,
        num_heads: int,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        if not (_is_fused(qkv) and isinstance(context, PagedContext)):
            return super().rotary_attention(
                qkv, cos, sin, spec, context, num_heads=num_heads, norms=norms, eps=eps
            )
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


class _Run(torch.autograd.Function):
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
    """Whether kernels compute several ops at once. In float32, where a product and a sum may round
    once or twice, two kernels need not agree; the interpreter rounds each."""
    return not torch.is_grad_enabled() and (x.dtype.itemsize == 2 or kernels.IS_INTERPRETED)


def _shares_of_all(logits: Tensor) -> Tensor:
    return kernels.log_softmax(logits, temperature=1.0, kept=None).exp()


def _run(kernel: Callable[..., Tensor], function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return kernel(*inputs)
    return _Run.apply(kernel, function, *inputs)  # pyright: ignore[reportReturnType]
