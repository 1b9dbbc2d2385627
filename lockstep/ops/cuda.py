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

from collections.abc import Callable, Sequence
from functools import partial

import torch

from lockstep.errors import ConfigError
from lockstep.ops import cuda_kernels as kernels
from lockstep.ops.base import Linear, Ops
from lockstep.ops.context import AttentionSpec, PackedContext, PagedBlock, PagedContext

Tensor = torch.Tensor

BACKWARD_SCORES = 1 << 26  # scores of one tile of attention's backward: 256 MiB in float32


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
        matmul.allow_bf16_reduced_precision_reduction = False
        matmul.allow_fp16_reduced_precision_reduction = False

    def resident_dtype(self, dtype: torch.dtype) -> None:
        return None  # the kernel reads pages where they lie

    gemm = staticmethod(kernels.gemm)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, self)
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

    def _packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, context: PackedContext
    ) -> Tensor:
        return _PackedAttention.apply(q, k, v, spec.sinks, spec, context)  # pyright: ignore

    def _paged_attention(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, context: PagedContext
    ) -> Tensor:
        keys, values = context.keys[spec.layer], context.values[spec.layer]
        at_k, at_v = (kernels.Vectors.of_pages(x) for x in (keys, values))
        blocks = [(_tokens(block), block.positions, block.pages) for block in context.blocks]
        out, _ = _attend(q, at_k, at_v, blocks, spec, page_size=keys.shape[2], num_heads=len(keys))
        return out if context.place_index is None else out[context.place_index]

    def log_softmax(
        self, logits: Tensor, *, temperature: float = 1.0, kept: Tensor | None = None
    ) -> Tensor:
        return kernels.log_softmax(logits, temperature=temperature, kept=kept)


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


def _shares_of_all(logits: Tensor) -> Tensor:
    return kernels.log_softmax(logits, temperature=1.0, kept=None).exp()


def _run(kernel: Callable[..., Tensor], function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return _Run.apply(kernel, function, *inputs)  # pyright: ignore[reportReturnType]


# -- attention ------------------------------------------------------------------------------------


def _tokens(block: PagedBlock) -> Tensor:
    """[B, Q]: the token of each query."""
    if block.token_index is not None:
        return block.token_index
    if "tokens" not in block.memo:
        positions = block.positions
        index = torch.arange(positions.numel(), device=positions.device) + block.first_token
        block.memo["tokens"] = index.view_as(positions)
    return block.memo["tokens"]


def _attend(
    q: Tensor,
    keys: kernels.Vectors,
    values: kernels.Vectors,
    blocks: Sequence[tuple[Tensor, Tensor, Tensor]],
    spec: AttentionSpec,
    *,
    page_size: int,
    num_heads: int,
) -> tuple[Tensor, Tensor]:
    """(out [places, H, D], lse [places, H]) of blocks laid end to end: tokens, positions and pages
    of each, as `kernels.attention` reads them. num_heads: of the keys."""
    num_places = sum(tokens.numel() for tokens, _, _ in blocks)
    out = q.new_empty(num_places, *q.shape[1:])
    lse = torch.empty(num_places, q.shape[1], dtype=torch.float32, device=q.device)
    queries, first = kernels.Vectors.of_tokens(q), 0
    for tokens, positions, pages in blocks:
        kernels.attention(
            queries,
            keys,
            values,
            out,
            lse,
            first=first,
            tokens=tokens,
            positions=positions,
            pages=pages,
            page_size=page_size,
            spec=spec,
            num_key_heads=num_heads,
        )
        first += tokens.numel()
    return out, lse


class _PackedAttention(torch.autograd.Function):
    """Forward reads the packed tokens as a cache whose pages hold one token each, and so uses the
    same instance of the kernel as a sampler's steps.

    Backward computes the scores again, in tiles of queries. With P = exp(scores - lse) over keys
    and sink, dS = P * (dP - dO . O), and a sink's gradient is -sum exp(sink - lse) dO . O.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, spec, context):
        at_k, at_v = (kernels.Vectors.of_tokens(x) for x in (k, v))
        blocks = [
            (
                index,
                torch.arange(index.shape[1], device=q.device)[None],
                index,
            )
            for index in context.blocks
        ]
        out, lse = _attend(q, at_k, at_v, blocks, spec, page_size=1, num_heads=k.shape[1])
        if context.place_index is not None:
            out, lse = out[context.place_index], lse[context.place_index]
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.spec, ctx.context = spec, context
        return out

    @staticmethod
    def backward(ctx, *grad_outputs):
        q, k, v, sinks, out, lse_TH = ctx.saved_tensors
        (grad_out,) = grad_outputs
        through_TH = (grad_out.float() * out.float()).sum(-1)
        context: PackedContext = ctx.context
        # An output is read at one of its places; the gradient of its other places and of padding
        # is 0.
        grad_places = _spread(grad_out, context)
        through_places = _spread(through_TH, context)
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        first = 0
        for index in context.blocks:
            places = slice(first, first := first + index.numel())
            shape = index.shape
            parts = _block_gradients(
                q[index],
                k[index],
                v[index],
                grad_places[places].view(*shape, *q.shape[1:]),
                lse_TH[index],
                through_places[places].view(*shape, -1),
                ctx.spec,
            )
            for grad, part in zip(grads, parts, strict=True):
                # Rows may share tokens. On CUDA this sorts, then sums in one order, without
                # atomics.
                grad.index_put_((index,), part, accumulate=True)
        grad_sinks = None
        if sinks is not None:
            grad_sinks = -(torch.exp(sinks.float() - lse_TH) * through_TH).sum(0).to(sinks.dtype)
        grad_q, grad_k, grad_v = (grad.to(q.dtype) for grad in grads)
        return grad_q, grad_k, grad_v, grad_sinks, None, None


def _spread(x_T: Tensor, context: PackedContext) -> Tensor:
    """Puts each token's value at its place in the blocks laid end to end; 0 elsewhere."""
    if context.place_index is None:
        return x_T
    num_places = sum(index.numel() for index in context.blocks)
    places = x_T.new_zeros(num_places, *x_T.shape[1:])
    places[context.place_index] = x_T
    return places


def _block_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    through: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ [B, L, H, D], dK, dV [B, L, G, D]), float32. q, grad_out [B, L, H, D], k, v [B, L, G, D],
    lse and through (dO . O) [B, L, H] float32."""
    (B, L, H, D), G, window, scale = q.shape, k.shape[2], spec.window, spec.scale
    q, grad_out = (x.view(B, L, G, -1, D).permute(0, 2, 3, 1, 4) for x in (q, grad_out))
    lse, through = (x.view(B, L, G, -1, 1).permute(0, 2, 3, 1, 4) for x in (lse, through))
    k, v = (x.transpose(1, 2).reshape(B * G, L, D) for x in (k, v))
    grad_q = q.new_empty(q.shape, dtype=torch.float32)
    grad_k, grad_v = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    step = max(16, BACKWARD_SCORES // (B * H * L))
    for start in range(0, L, step):
        stop = min(L, start + step)
        keys = slice(0 if window is None else max(0, start - window + 1), stop)

        def tile(x: Tensor, rows: slice = slice(start, stop)) -> Tensor:
            return x[:, :, :, rows].reshape(B * G, -1, x.shape[-1])

        q_tile, grad_tile = tile(q), tile(grad_out)
        probs = _matmul(q_tile, k[:, keys].transpose(1, 2)).mul_(scale).sub_(tile(lse)).exp_()
        at_query = torch.arange(start, stop, device=q.device)[:, None]
        at_key = torch.arange(keys.start, stop, device=q.device)
        hidden = at_key > at_query
        if window is not None:
            hidden |= at_key <= at_query - window
        probs.view(B * G, -1, *hidden.shape).masked_fill_(hidden, 0.0)
        grad_v[:, keys] += _matmul(probs.to(q.dtype).transpose(1, 2), grad_tile)
        grad_scores = _matmul(grad_tile, v[:, keys].transpose(1, 2)).sub_(tile(through))
        grad_scores = grad_scores.mul_(probs).mul_(scale).to(q.dtype)
        grad_k[:, keys] += _matmul(grad_scores.transpose(1, 2), q_tile)
        grad_q[:, :, :, start:stop] = _matmul(grad_scores, k[:, keys]).view(
            B, G, -1, stop - start, D
        )
    grad_k, grad_v = (x.view(B, G, L, D).transpose(1, 2) for x in (grad_k, grad_v))
    return grad_q.permute(0, 3, 1, 2, 4).reshape(B, L, H, D), grad_k, grad_v


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Batched product, summed and returned in float32."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32)
