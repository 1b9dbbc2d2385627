"""Triton kernels whose sums have one order, whatever else is in the batch. Only this module imports
Triton.

A row's bits depend on the row alone, because of three rules:

    One instance for both callers. Whatever differs between a decode step, a prefill chunk and a
    packed row (row counts, strides, page sizes, places in memory) is an argument that the compiler
    may not specialise on, and pointers are 16-byte aligned: the same machine code runs for all.
    One order per sum. No split-K, no atomics, no autotuning: a sum walks fixed blocks left to right
    inside one program, from the start of the row or of the sequence.
    Rows of a tile are alike. A tile has one shape however many of its rows are real; the others are
    zero. Keys that a tile reads beyond those of a row add exact zeros to that row.

TRITON_INTERPRET=1, set before this module is imported, runs the kernels on CPU tensors in float32
(its bfloat16 products are wrong). That checks indexing, masks and the order of blocks, but not the
arithmetic of tensor cores.   Guards: tests/cpu/ops/test_cuda_ops_interpreted.py,
tests/cpu/ops/test_cuda_compiled.py, tests/gpu/test_cuda_contract.py

# M rows  K inner width  N outputs  E experts  V vocabulary  T tokens  H query heads  G key heads
# R = H / G  D head width  B sequences of a block  Q queries of each  P pages  A active experts
# F activation width
"""

# Triton's annotations say that a reduction may give a tuple.
# pyright: reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from lockstep.errors import MissingExtraError

try:
    import triton
    import triton.language as tl
    from triton import knobs
except ImportError:
    raise MissingExtraError.of("triton", extra="cuda", needed_for="The CUDA backend") from None

Tensor = torch.Tensor

IS_INTERPRETED = bool(knobs.runtime.interpret)
"""Whether the kernels run on CPU tensors, in Triton's interpreter."""

POINTER_ALIGNMENT = 16  # bytes; Triton specialises on it, and it is a thread's widest load
ELEMENTS = 1024  # of one program of an elementwise kernel
NORM_ELEMENTS = 4096  # of one program of a norm: one long row, or several short ones
VOCABULARY_BLOCK = 4096  # logits summed in one piece: part of the numerics


class Tile(NamedTuple):
    """Shape of the output that one program of a GEMM computes.

    Two tiles give the same bits if each output is the same chain of the same instruction over K.
    For two-byte types that is one tensor-core instruction of depth 16 after another into one
    float32 accumulator: mma.m16n8k16 on Ampere for every tile; on Hopper wgmma.m64nXk16 from 64
    rows on, and mma below, whose internal sum need not be the same. Hence no tile has fewer rows
    than 64. The width N of the instruction is how many outputs it computes side by side. On
    Blackwell tcgen05.mma has 64 rows in one tile and 128 in the other: only a run can tell there.
    float32 is not for tensor cores here (`input_precision="ieee"`): one fused multiply-add per k.
    """

    rows: int
    outputs: int
    depth: int
    num_warps: int
    num_stages: int


DECODE_TILE = Tile(64, 32, 64, 4, 4)  # narrow: enough programs to read a weight at full bandwidth
TRAINING_TILE = Tile(128, 128, 64, 8, 3)
FLOAT32_TILE = Tile(64, 64, 32, 4, 2)
DECODE_ROWS = 64  # rows up to which a tile of the training shape would be half empty


def jit(*unspecialized: str, unaligned: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a kernel once for all values of the arguments that are named, and for all addresses
    of those in `unaligned`."""
    return triton.jit(
        do_not_specialize=list(unspecialized), do_not_specialize_on_alignment=list(unaligned)
    )


@cache
def generation() -> int:
    """Major number of this GPU's compute capability; 9 in the interpreter."""
    return 9 if IS_INTERPRETED else torch.cuda.get_device_capability()[0]


@jit()
def _unchanged(bound):
    return bound


# The interpreter of Triton 3.6 cannot make a loop's bound of a tensor under numpy 2.4.
loop_bound = (lambda bound: bound.handle.data.item()) if IS_INTERPRETED else _unchanged


# -- GEMM --------------------------------------------------------------------------------------


def gemm(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """x @ weight^T + bias, rounded once: [M, N]."""
    return _launch_gemm(x_MK, weight_NK, bias_N, None, _tile(x_MK, len(x_MK)))


def expert_gemm(
    x_MK: Tensor, weight_ENK: Tensor, bias_EN: Tensor | None, rows_per_expert: Sequence[int]
) -> Tensor:
    """`gemm` of each expert with its rows of x, which are sorted by expert: [M, N], same bits."""
    tile = _tile(x_MK, max(rows_per_expert))
    places: list[tuple[int, int, int]] = []
    first = 0
    for expert, count in enumerate(rows_per_expert):
        stop = first + count
        places += [(expert, at, stop) for at in range(first, stop, tile.rows)]
        first = stop
    table = torch.tensor(places, dtype=torch.int64).to(x_MK.device)
    return _launch_gemm(x_MK, weight_ENK, bias_EN, table, tile)


def _tile(x: Tensor, num_rows: int) -> Tile:
    if x.dtype.itemsize > 2:
        return FLOAT32_TILE
    return DECODE_TILE if num_rows <= DECODE_ROWS else TRAINING_TILE


def _launch_gemm(
    x_MK: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor | None, tile: Tile
) -> Tensor:
    (M, K), N = x_MK.shape, weight.shape[-2]
    out_MN = x_MK.new_empty(M, N)
    if out_MN.numel():
        num_places = triton.cdiv(M, tile.rows) if places is None else len(places)
        _gemm_kernel[(num_places, triton.cdiv(N, tile.outputs))](
            aligned(x_MK),
            aligned(weight),
            None if bias is None else aligned(bias),
            out_MN,
            places,
            M,
            N,
            K,
            tile.rows,
            tile.outputs,
            tile.depth,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out_MN


@jit("M")
def _gemm_kernel(
    x,
    weight,
    bias,
    out,
    places,
    M,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """places: (expert, first row, end of the expert's rows) of each tile of rows; None if dense."""
    if places is None:
        first = tl.program_id(0).to(tl.int64) * ROWS
        stop = M.to(tl.int64)
    else:
        place = places + tl.program_id(0) * 3
        expert = tl.load(place)
        first = tl.load(place + 1)
        stop = tl.load(place + 2)
        weight += expert * N * K
        if bias is not None:
            bias += expert * N
    row = first + tl.arange(0, ROWS)
    output = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row = (row < stop)[:, None]
    is_output = (output < N)[None, :]
    k = tl.arange(0, DEPTH)
    x_tile = x + row[:, None] * K + k[None, :]
    weight_tile = weight + output[None, :] * K + k[:, None]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, K, DEPTH):
        if K % DEPTH == 0:
            a = tl.load(x_tile + start, mask=is_row, other=0.0)
            b = tl.load(weight_tile + start, mask=is_output, other=0.0)
        else:
            is_inside = start + k < K
            a = tl.load(x_tile + start, mask=is_row & is_inside[None, :], other=0.0)
            b = tl.load(weight_tile + start, mask=is_output & is_inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + output, mask=output < N, other=0.0).to(tl.float32)[None, :]
    where = out + row[:, None] * N + output[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=is_row & is_output)


# -- sums over one row ---------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Ops.rms_norm`. Rounded after the norm and again after the scale, like `Ops`."""
    D = x.shape[-1]
    x_MD = aligned(x.reshape(-1, D))
    out = torch.empty_like(x_MD)
    if out.numel():
        width = triton.next_power_of_2(D)
        rows = max(1, NORM_ELEMENTS // width)
        _rms_norm_kernel[(triton.cdiv(len(x_MD), rows),)](
            x_MD, aligned(weight), out, len(x_MD), eps, weight.numel() // D, D, rows, width
        )
    return out.view(x.shape)


@jit("M")
def _rms_norm_kernel(
    x,
    weight,
    out,
    M,
    eps,
    NUM_WEIGHTS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    is_inside = (row < M) & (d < D)
    value = tl.load(x + row * D + d, mask=is_inside, other=0.0).to(tl.float32)
    rms = tl.sqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    normed = (value / rms).to(out.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + (row % NUM_WEIGHTS) * D + d, mask=is_inside, other=0.0)
    normed *= scale.to(tl.float32)
    tl.store(out + row * D + d, normed.to(out.dtype.element_ty), mask=is_inside)


def log_softmax(logits: Tensor, *, temperature: float, kept: Tensor | None) -> Tensor:
    """See `Ops.log_softmax`."""
    V = logits.shape[-1]
    rows = aligned(logits.reshape(-1, V))
    out = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    if rows.numel():
        mask = None
        if kept is not None:
            mask = aligned(kept.expand(logits.shape).reshape(-1, V)).view(torch.uint8)
        _log_softmax_kernel[(len(rows),)](
            rows, mask, out, temperature, V, VOCABULARY_BLOCK, num_warps=8
        )
    return out.view(logits.shape)


@jit()
def _log_softmax_kernel(logits, kept, out, temperature, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        highest = tl.maximum(
            highest, _load_logits(logits, kept, temperature, row, start + column, V)
        )
    top = tl.max(highest, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        total += tl.exp(_load_logits(logits, kept, temperature, row, start + column, V) - top)
    normalizer = top + tl.log(tl.sum(total, 0))
    for start in range(0, V, BLOCK):
        value = _load_logits(logits, kept, temperature, row, start + column, V)
        tl.store(out + row * V + start + column, value - normalizer, mask=start + column < V)


@jit()
def _load_logits(logits, kept, temperature, row, column, V: tl.constexpr):
    is_kept = column < V
    value = tl.load(logits + row * V + column, mask=is_kept, other=0.0).to(tl.float32) / temperature
    if kept is not None:
        is_kept = is_kept & (tl.load(kept + row * V + column, mask=is_kept, other=0) != 0)
    return tl.where(is_kept, value, float("-inf"))


# -- elementwise ---------------------------------------------------------------------------------


def swiglu(gate_up: Tensor, *, alpha: float, limit: float | None) -> Tensor:
    """See `Ops.swiglu`. Computed in float32 and rounded once."""
    is_clamped = limit is not None
    F = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], F)
    if out.numel():
        _swiglu_kernel[(triton.cdiv(out.numel(), ELEMENTS),)](
            aligned(gate_up), out, out.numel(), alpha, limit or 0.0, is_clamped, F, ELEMENTS
        )
    return out


@jit("size")
def _swiglu_kernel(
    gate_up,
    out,
    size,
    alpha,
    limit,
    IS_CLAMPED: tl.constexpr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate_at = at // F * 2 * F + at % F
    gate = tl.load(gate_up + gate_at, mask=at < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up + gate_at + F, mask=at < size, other=0.0).to(tl.float32)
    if IS_CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1
    value = up * (gate / (1 + tl.exp(-gate * alpha)))
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < size)


def rope(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `Ops.rope`. cos and sin are rounded to x's dtype, like `Ops`."""
    x_THD = aligned(x_THD)
    _, H, D = x_THD.shape
    out = torch.empty_like(x_THD)
    if out.numel():
        _rope_kernel[(triton.cdiv(out.numel(), ELEMENTS),)](
            x_THD, aligned(cos), aligned(sin), out, out.numel(), H, D, ELEMENTS
        )
    return out


@jit("size")
def _rope_kernel(x, cos, sin, out, size, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < size
    d = at % D
    angle_at = at // (H * D) * D + d
    dtype = out.dtype.element_ty
    c = tl.load(cos + angle_at, mask=is_inside, other=0.0).to(dtype).to(tl.float32)
    s = tl.load(sin + angle_at, mask=is_inside, other=0.0).to(dtype).to(tl.float32)
    value = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
    partner = tl.load(x + at - d + (d + D // 2) % D, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + at, (value * c + partner * s).to(dtype), mask=is_inside)


def combine(out_TAD: Tensor, weights_TA: Tensor) -> Tensor:
    """See `Ops.combine`. Slots are added in order, in float32, and rounded once."""
    T, A, D = out_TAD.shape
    total_TD = out_TAD.new_empty(T, D)
    if total_TD.numel():
        _combine_kernel[(triton.cdiv(T * D, ELEMENTS),)](
            aligned(out_TAD), aligned(weights_TA), total_TD, T * D, A, D, ELEMENTS
        )
    return total_TD


@jit("size")
def _combine_kernel(
    out, weights, total, size, A: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < size
    token = at // D
    value = tl.zeros((BLOCK,), tl.float32)
    for slot in range(A):
        pair = token * A + slot
        part = tl.load(out + pair * D + at % D, mask=is_inside, other=0.0).to(tl.float32)
        value += part * tl.load(weights + pair, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=is_inside)


def aligned(x: Tensor) -> Tensor:
    """`x`, contiguous and at an aligned address. For another alignment Triton compiles another
    instance, whose threads may divide a row, and so sum it, in another way."""
    x = x.contiguous()
    return x if x.data_ptr() % POINTER_ALIGNMENT == 0 else x.clone()
