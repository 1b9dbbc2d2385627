"""Triton kernels whose sums have one order, whatever else is in the batch. Attention's kernel is in
`ops.cuda_attention`, the kernels of draws are in `ops.cuda_draws`.

A row's bits depend on the row alone, because of three rules:

    One instance for both callers. Whatever differs between a decode step, a prefill chunk and a
    packed row (row counts, strides, page sizes, places in memory) is an argument that the compiler
    may not specialise on, and pointers are 16-byte aligned: the same machine code runs for all.
    One order per sum. No split-K, no atomic sums, no autotuning: a sum walks fixed blocks left to
    right, from the start of the row or of the sequence. Where two kernels compute the same number,
    a function that both call says the order: `_tree_sum`, `tl.fma`.
    Rows of a tile are alike. A tile has one shape however many of its rows are real; the others are
    zero. Keys in a tile that belong to other rows add exact zeros to a row.

TRITON_INTERPRET=1, set before this module is imported, runs the kernels on CPU tensors. That checks
indexing, masks and the order of blocks, but not the arithmetic of tensor cores.
Guards: tests/cpu/ops/test_cuda_ops_interpreted.py, tests/gpu_host/test_figures.py,
tests/gpu/test_cuda_contract.py

# M rows  K inner width  N outputs  E experts  V vocabulary  T tokens  H query heads  G key heads
# D head width  P pages  S keys of a page  A active experts  F activation width
"""

# Triton's annotations say that a reduction may give a tuple, and that cdiv takes constants only.
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

from lockstep.errors import ConfigError, MissingExtraError

try:
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    raise MissingExtraError.of("triton", extra="cuda", needed_for="The CUDA backend") from None

Tensor = torch.Tensor

IS_INTERPRETED = bool(knobs.runtime.interpret)
"""True if the kernels run on CPU tensors, in Triton's interpreter."""

POINTER_ALIGNMENT = 16  # bytes; Triton specialises on it, and it is a thread's widest load
ELEMENTS = 1024  # of one program of an elementwise kernel
NORM_ELEMENTS = 4096  # of one program of a norm: one long row, or several short ones
VOCABULARY_BLOCK = 4096  # logits summed in one piece: part of the numerics


class GemmTile(NamedTuple):
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


FLOAT32_TILE = GemmTile(64, 64, 32, 4, 2)


class Tiles(NamedTuple):
    """Tiles of two-byte GEMMs by their size. Part of the fingerprint."""

    narrow: GemmTile
    """For few rows and few outputs: enough programs to read a weight at full bandwidth."""
    few: GemmTile
    """For few rows."""
    large: GemmTile
    huge: GemmTile
    """For many rows."""

    def of(self, num_rows: int, num_outputs: int, *, is_gated: bool) -> GemmTile:
        if num_rows <= DECODE_ROWS:
            return self.narrow if num_outputs < WIDE_OUTPUTS else self.few
        tile = self.huge if num_rows >= HUGE_ROWS else self.large
        # Two products at once have two accumulators.
        return tile._replace(outputs=tile.outputs // 2) if is_gated else tile


TILES = {
    8: Tiles(
        GemmTile(64, 32, 64, 4, 4),
        GemmTile(64, 64, 64, 4, 4),
        GemmTile(128, 128, 64, 8, 3),
        GemmTile(128, 128, 64, 8, 3),
    ),
    9: Tiles(
        GemmTile(64, 32, 128, 4, 4),
        GemmTile(64, 64, 128, 4, 4),
        GemmTile(128, 128, 64, 8, 4),
        GemmTile(128, 256, 64, 8, 3),
    ),
}
TILES[12] = TILES[8]  # consumer Blackwell has Ampere's instructions
"""First generation of the chip -> its tiles."""
SHARED_BYTES = {8: 99 << 10, 9: 227 << 10, 12: 99 << 10}
"""First generation of the chip -> the shared memory that one program of its tiles may take, here
and in `ops.cuda_attention`.   Guard: tests/gpu_host"""
DECODE_ROWS = 64  # larger tiles would be half empty with fewer rows
HUGE_ROWS = 1024
WIDE_OUTPUTS = 8192  # from this number of outputs on, tiles of 64 give enough programs
TILE_GROUP = 8  # tiles of rows that run together over all outputs, so that weights stay in L2
SQUARES = 32  # neighbouring numbers whose squares a GEMM sums for the norm that follows


def jit(*unspecialized: str, unaligned: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a kernel once for all values of the named arguments, and for all addresses of
    arguments in `unaligned`."""
    return triton.jit(
        do_not_specialize=list(unspecialized), do_not_specialize_on_alignment=list(unaligned)
    )


@cache
def generation() -> int:
    """Major number of this GPU's compute capability; 9 in the interpreter."""
    return 9 if IS_INTERPRETED else torch.cuda.get_device_capability()[0]


T = TypeVar("T")


def of_chip(table: Mapping[int, T], chip: int | None = None) -> T:
    """The entry of a table by first generations. chip: None for this process' GPU."""
    found = chip or generation()
    return table[max(known for known in table if known <= found)]


def check_chip() -> None:
    """Raises ConfigError for a GPU without the shared memory of its generation's tiles."""
    chip, needed = torch.cuda.get_device_properties(), of_chip(SHARED_BYTES)
    if chip.shared_memory_per_block_optin < needed:
        raise ConfigError(
            f"{chip.name} gives a kernel {chip.shared_memory_per_block_optin >> 10} KiB of shared "
            f"memory; the kernels of its generation need {needed >> 10} KiB. Choose another GPU "
            "with CUDA_VISIBLE_DEVICES=N, or device=cpu."
        )


@jit()
def _unchanged(bound):
    return bound


# The interpreter of Triton 3.6 cannot make a loop's bound of a tensor under numpy 2.4.
loop_bound = (lambda bound: bound.handle.data.item()) if IS_INTERPRETED else _unchanged


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Runs a kernel. Products and sums may be fused where a kernel does not say how: Triton 3.10
    changes its default. Kernels that must agree share a function or say `tl.fma`."""
    kernel[grid](*arguments, enable_fp_fusion=True, **options)


def launch_elementwise(kernel: Any, inputs: tuple[Tensor, ...], out: Tensor, *sizes: Any) -> Tensor:
    """Runs a kernel that computes ELEMENTS of `out` in each program. Returns `out`."""
    if size := out.numel():
        grid = (triton.cdiv(size, ELEMENTS),)
        launch(kernel, grid, *map(aligned, inputs), out, size, *sizes, ELEMENTS)
    return out


# -- GEMM --------------------------------------------------------------------------------------


def gemm(
    x_MK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    *,
    counts: Tensor | None = None,
    residual: Tensor | None = None,
    norm: tuple[Tensor, Tensor, float] | None = None,
    squares_out: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    """x @ weight^T + bias, rounded once: [M, N]. weight: [N, K]; bias: [N].

    counts: [E] int32 on the device, which sum to M; weight is [E, N, K] then, bias [E, N], and each
    expert takes its rows of x, which are sorted by expert: same bits. residual: [M, N], added to
    the rounded result. norm: (`squares` of x, weight [K], eps): x is normed first, as by
    `rms_norm`. squares_out: [M, N / SQUARES] float32, filled with `squares` of the result.
    is_gated: the result is `swiglu` of the product, [M, N / 2].
    """
    (M, K), N, tile = x_MK.shape, weight.shape[-2] // (2 if is_gated else 1), FLOAT32_TILE
    if x_MK.dtype.itemsize == 2:
        rows = M if counts is None else triton.cdiv(M, len(counts))
        tile = tiles.of(rows, N, is_gated=is_gated)
    out_MN = x_MK.new_empty(M, N)
    if out_MN.numel():
        num_places = triton.cdiv(M, tile.rows)
        if counts is not None:  # each expert's first row begins a tile: one extra at most
            num_places = M // tile.rows + min(len(counts), M)
        squares, norm_weight, eps = norm or (None, None, 0.0)
        E = 1 if counts is None else len(counts)
        inputs = (x_MK, weight, bias, residual, squares, norm_weight)
        launch(
            _gemm_kernel,
            (num_places * triton.cdiv(N, tile.outputs),),
            *(None if x is None else aligned(x) for x in inputs),
            *(out_MN, squares_out, counts),
            *_blocks_of(x_MK, weight, tile, is_plain=norm is None and not is_gated),
            *(num_places, M, eps, N, K, is_gated, *tile[:3], TILE_GROUP),
            triton.next_power_of_2(triton.cdiv(K, SQUARES)),
            *(E, triton.next_power_of_2(E)),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out_MN


def _blocks_of(
    x_MK: Tensor, weight: Tensor, tile: GemmTile, *, is_plain: bool
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Descriptors for the copy engine (TMA) of Hopper and later chips, for many rows of whole 16
    bytes; otherwise None."""
    (_, K), is_many = x_MK.shape, tile.rows > DECODE_ROWS
    if not (is_plain and is_many and generation() >= 9 and K * x_MK.itemsize % 16 == 0):
        return None, None
    weight_ENK = aligned(weight).view(-1, *weight.shape[-2:])
    return (
        TensorDescriptor.from_tensor(aligned(x_MK), [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight_ENK, [1, tile.outputs, tile.depth]),
    )


@jit("num_places", "M")
def _gemm_kernel(
    x,
    weight,
    bias,
    residual,
    squares,
    norm,
    out,
    squares_out,
    counts,
    x_blocks,
    weight_blocks,
    num_places,
    M,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """counts: [E] rows of each expert; None if dense. x_blocks, weight_blocks: x [M, K] and weight
    [E, N, K] for the copy engine; None reads by threads. A block may hold rows past `stop`, which
    are another's and are not stored."""
    columns: tl.constexpr = (N + OUTPUTS - 1) // OUTPUTS
    group = tl.program_id(0) // (GROUP * columns)
    size = tl.minimum(num_places - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * columns)
    at_place = (group * GROUP + within % size).to(tl.int64)
    expert = at_place * 0
    if counts is None:
        first = at_place * ROWS
        stop = M.to(tl.int64)
    else:
        # The program's place among the tiles of all experts; places after them have no rows.
        e = tl.arange(0, EXPERTS)
        count = tl.load(counts + e, mask=e < E, other=0).to(tl.int64)
        tiles = (count + ROWS - 1) // ROWS
        is_before = tl.cumsum(tiles, 0) <= at_place
        expert = tl.sum(is_before.to(tl.int64), 0)
        begin = tl.sum(tl.where(is_before, count, 0), 0)
        first = begin + (at_place - tl.sum(tl.where(is_before, tiles, 0), 0)) * ROWS
        stop = begin + tl.sum(tl.where(e == expert, count, 0), 0)
        expert = tl.minimum(expert, E - 1)
        weight += expert * N * K
        if bias is not None:
            bias += expert * N
    if first >= stop:
        return
    row = first + tl.arange(0, ROWS)
    output = (within // size).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row = (row < stop)[:, None]
    is_output = (output < N)[None, :]
    k = tl.arange(0, DEPTH)
    x_tile = x + row[:, None] * K + k[None, :]
    weight_tile = weight + output[None, :] * K + k[:, None]
    if norm is not None:
        at = tl.arange(0, NUM_SQUARES)[None, :]
        groups: tl.constexpr = (K + 31) // 32
        parts = tl.load(
            squares + row[:, None] * groups + at, mask=is_row & (at < groups), other=0.0
        )
        inverse = _inverse_rms(_tree_sum(parts, ROWS, NUM_SQUARES), eps, K)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    total_up = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, K, DEPTH):
        is_inside = start + k < K
        if x_blocks is None:
            a = tl.load(x_tile + start, mask=is_row & is_inside[None, :], other=0.0)
            b = tl.load(weight_tile + start, mask=is_output & is_inside[:, None], other=0.0)
        else:
            at_output = (within // size) * OUTPUTS
            a = x_blocks.load([first.to(tl.int32), start])
            block = weight_blocks.load([expert.to(tl.int32), at_output, start])
            b = tl.trans(tl.reshape(block, (OUTPUTS, DEPTH)))
        if norm is not None:
            scale = tl.load(norm + start + k, mask=is_inside, other=0.0)
            a = _normed(a, inverse[:, None], scale[None, :])
        total = tl.dot(a, b, total, input_precision="ieee")
        if IS_GATED:
            up = tl.load(
                weight_tile + N * K + start, mask=is_output & is_inside[:, None], other=0.0
            )
            total_up = tl.dot(a, up, total_up, input_precision="ieee")
    dtype = out.dtype.element_ty
    if bias is not None:
        total += tl.load(bias + output, mask=output < N, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        gate = total.to(dtype).to(tl.float32)
        total = _gate(gate, total_up.to(dtype).to(tl.float32), 1.0)
    result = total.to(dtype)
    where = row[:, None] * N + output[None, :]
    if residual is not None:
        result = (
            result.to(tl.float32)
            + tl.load(residual + where, mask=is_row & is_output, other=0.0).to(tl.float32)
        ).to(dtype)
    tl.store(out + where, result, mask=is_row & is_output)
    if squares_out is not None:
        value = tl.where(is_output, result.to(tl.float32), 0.0)
        by_group = tl.reshape(value * value, (ROWS * OUTPUTS // 32, 32))
        sums = tl.reshape(_tree_sum(by_group, ROWS * OUTPUTS // 32, 32), (ROWS, OUTPUTS // 32))
        at = (within // size) * (OUTPUTS // 32) + tl.arange(0, OUTPUTS // 32)[None, :]
        groups_out: tl.constexpr = (N + 31) // 32
        tl.store(
            squares_out + row[:, None] * groups_out + at, sums, mask=is_row & (at < groups_out)
        )


# -- sums over one row ---------------------------------------------------------------------------


@jit()
def _tree_sum(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS]: sums of x [ROWS, SIZE] over neighbours, then over neighbouring pairs, and so on: the
    same order in every kernel, whatever threads hold the numbers. SIZE: a power of two."""
    if SIZE > 1:
        left, right = tl.split(tl.reshape(x, (ROWS, SIZE // 2, 2)))
        total = _tree_sum(left + right, ROWS, SIZE // 2)
    else:
        total = tl.reshape(x, (ROWS,))
    return total


@jit()
def _inverse_rms(sum_of_squares, eps, D: tl.constexpr):
    return 1.0 / tl.sqrt(sum_of_squares / D + eps)


@jit()
def _normed(x, inverse, scale):
    """Rounded after the norm if the scale has x's type, and again after the scale, like `Ops`."""
    value = x.to(tl.float32) * inverse
    if scale.dtype == x.dtype:
        value = value.to(x.dtype).to(tl.float32)
    return (value * scale.to(tl.float32)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Ops.rms_norm`."""
    D = x.shape[-1]
    x_MD = aligned(x.reshape(-1, D))
    out = torch.empty_like(x_MD)
    if out.numel():
        width = triton.next_power_of_2(D)
        rows = max(1, NORM_ELEMENTS // width)
        grid, sizes = (triton.cdiv(len(x_MD), rows),), (weight.numel() // D, D, rows, width)
        tensors = x_MD, aligned(weight), out
        launch(_rms_norm_kernel, grid, *tensors, len(x_MD), eps, *sizes, num_warps=8)
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
    x_tile = tl.load(x + row * D + d, mask=is_inside, other=0.0)
    value = x_tile.to(tl.float32)
    inverse = _inverse_rms(_tree_sum(value * value, ROWS, WIDTH), eps, D)[:, None]
    scale = tl.load(weight + (row % NUM_WEIGHTS) * D + d, mask=is_inside, other=0.0)
    tl.store(out + row * D + d, _normed(x_tile, inverse, scale), mask=is_inside)


def empty_squares(x_MD: Tensor) -> Tensor:
    """Memory for the `squares` of a tensor of this shape."""
    M, D = x_MD.shape
    return torch.empty(M, triton.cdiv(D, SQUARES), dtype=torch.float32, device=x_MD.device)


def squares(x_MD: Tensor) -> Tensor:
    """[M, D / SQUARES] float32: sums of the squares of neighbours, for `gemm` with a norm."""
    M, D = x_MD.shape
    out = empty_squares(x_MD)
    groups = out.shape[1]
    width = triton.next_power_of_2(groups)
    if out.numel():
        launch(_squares_kernel, (M,), aligned(x_MD), out, D, groups, width)
    return out


@jit()
def _squares_kernel(x, out, D: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH * 32)
    value = tl.load(x + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    sums = _tree_sum(tl.reshape(value * value, (WIDTH, 32)), WIDTH, 32)
    at = tl.arange(0, WIDTH)
    tl.store(out + row * GROUPS + at, sums, mask=at < GROUPS)


def log_softmax(logits: Tensor, *, temperature: float, kept: Tensor | None) -> Tensor:
    """See `Ops.log_softmax`."""
    V = logits.shape[-1]
    rows = aligned(logits.reshape(-1, V))
    out = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    if rows.numel():
        mask = None
        if kept is not None:
            mask = aligned(kept.expand(logits.shape).reshape(-1, V)).view(torch.uint8)
        sizes = V, VOCABULARY_BLOCK
        launch(_log_softmax_kernel, (len(rows),), rows, mask, out, temperature, *sizes, num_warps=8)
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


def swiglu(gate_up: Tensor, *, alpha: float, limit: float | None, cubic: float = 0.0) -> Tensor:
    """See `Ops.swiglu`. cubic: the sigmoid is of alpha * (gate + cubic * gate^3). Computed in
    float32 and rounded once."""
    F = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], F)
    of_gate = alpha, limit or 0.0, cubic, limit is not None, cubic != 0
    return launch_elementwise(_swiglu_kernel, (gate_up,), out, *of_gate, F)


@jit("size")
def _swiglu_kernel(
    gate_up,
    out,
    size,
    alpha,
    limit,
    cubic,
    IS_CLAMPED: tl.constexpr,
    IS_CUBIC: tl.constexpr,
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
    if IS_CUBIC:
        alpha = alpha * (1 + gate * gate * cubic)
    tl.store(out + at, _gate(gate, up, alpha).to(out.dtype.element_ty), mask=at < size)


@jit()
def _gate(gate, up, alpha):
    return up * (gate / (1 + tl.exp(-gate * alpha)))


def rope(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `Ops.rope`. cos and sin are rounded to x's dtype, like `Ops`."""
    x_THD = aligned(x_THD)
    out = torch.empty_like(x_THD)
    return launch_elementwise(_rope_kernel, (x_THD, cos, sin), out, *x_THD.shape[1:])


@jit("size")
def _rope_kernel(x, cos, sin, out, size, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < size
    d = at % D
    angle_at = at // (H * D) * D + d
    c = tl.load(cos + angle_at, mask=is_inside, other=0.0)
    s = tl.load(sin + angle_at, mask=is_inside, other=0.0)
    value = tl.load(x + at, mask=is_inside, other=0.0)
    partner = tl.load(x + at - d + (d + D // 2) % D, mask=is_inside, other=0.0)
    tl.store(out + at, _rotated(value, partner, c, s), mask=is_inside)


@jit()
def _rotated(value, partner, c, s):
    c = c.to(value.dtype).to(tl.float32)
    s = s.to(value.dtype).to(tl.float32)
    turned = tl.fma(value.to(tl.float32), c, partner.to(tl.float32) * s)
    return turned.to(value.dtype)


def rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    write_index: Tensor,
) -> Tensor:
    """Queries [T, H, D], normed and rotated, of qkv [T, H + 2 G, D]; the keys, treated alike, and
    the values are written into a layer's pages [G, P, S, D]."""
    T, heads, D = qkv.shape
    G, P, S, _ = keys.shape
    H = heads - 2 * G
    q = qkv.new_empty(T, H, D)
    width = triton.next_power_of_2(D)
    block = max(1, ELEMENTS // width)
    if q.numel():
        inputs = [*map(aligned, (qkv, cos, sin)), *(map(aligned, norms) if norms else (None, None))]
        outputs, sizes = (q, keys, values, write_index), (H, G, D, width, block)
        grid = T, triton.cdiv(heads, block)
        launch(_rotate_kernel, grid, *inputs, *outputs, P * S, eps, *sizes)
    return q


@jit("num_places", unaligned=("write_index",))
def _rotate_kernel(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    q,
    keys,
    values,
    write_index,
    num_places,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    is_inside = (head < H + 2 * G) & (d < D)
    across = (d + D // 2) % D
    row = qkv + (token * (H + 2 * G) + head) * D
    x = tl.load(row + d, mask=is_inside, other=0.0)
    value = x
    partner = tl.load(row + across, mask=is_inside, other=0.0)
    is_query = head < H
    is_key = is_inside & (head >= H) & (head < H + G)
    if q_norm is not None:
        wide = x.to(tl.float32)
        inverse = _inverse_rms(_tree_sum(wide * wide, BLOCK, WIDTH), eps, D)[:, None]
        scale = tl.load(q_norm + d, mask=is_query & (d < D), other=0.0)
        scale += tl.load(k_norm + d, mask=is_key, other=0.0)
        value = _normed(value, inverse, scale)
        scale = tl.load(q_norm + across, mask=is_query & (d < D), other=0.0)
        scale += tl.load(k_norm + across, mask=is_key, other=0.0)
        partner = _normed(partner, inverse, scale)
    c = tl.load(cos + token * D + d, mask=d < D, other=0.0)
    s = tl.load(sin + token * D + d, mask=d < D, other=0.0)
    turned = _rotated(value, partner, c, s)
    tl.store(q + (token * H + head) * D + d, turned, mask=is_query & (d < D))
    place = tl.load(write_index + token)
    at_key = ((head - H) * num_places + place) * D + d
    tl.store(keys + at_key, turned, mask=is_key)
    at_value = ((head - H - G) * num_places + place) * D + d
    tl.store(values + at_value, x, mask=is_inside & (head >= H + G))


def route(
    logits_TE: Tensor, num_active: int, experts_TA: Tensor | None, *, is_normalized: bool
) -> tuple[Tensor, Tensor]:
    """See `Ops.route`. Of equal logits the smaller expert comes first."""
    T, E = logits_TE.shape
    weights_TA = logits_TE.new_empty(T, num_active)
    chosen_TA = torch.empty(T, num_active, dtype=torch.int64, device=logits_TE.device)
    if T:
        inputs = aligned(logits_TE), None if experts_TA is None else aligned(experts_TA)
        sizes = [n for size in (E, num_active) for n in (size, triton.next_power_of_2(size))]
        outputs = weights_TA, chosen_TA
        launch(_route_kernel, (T,), *inputs, *outputs, is_normalized, *sizes, num_warps=1)
    return weights_TA, chosen_TA


@jit()
def _route_kernel(
    logits,
    given,
    weights,
    chosen,
    IS_NORMALIZED: tl.constexpr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    A: tl.constexpr,
    SLOTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)
    logit = tl.load(logits + token * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    left = logit
    top = tl.full((SLOTS,), float("-inf"), tl.float32)
    expert = tl.zeros((SLOTS,), tl.int64)
    for a in range(A):
        if given is None:
            best = tl.minimum(tl.argmax(left, 0, tie_break_left=True), E - 1).to(tl.int64)
        else:
            best = tl.load(given + token * A + a)
        top = tl.where(slot == a, tl.sum(tl.where(e == best, logit, 0.0), 0), top)
        expert = tl.where(slot == a, best, expert)
        left = tl.where(e == best, float("-inf"), left)
    if IS_NORMALIZED:
        share = tl.exp(top - tl.max(top, 0))
        total = 0.0
        for a in range(A):
            total += tl.sum(tl.where(slot == a, share, 0.0), 0)
    else:
        highest = tl.max(logit, 0)
        share = tl.exp(top - highest)
        total = tl.sum(tl.exp(logit - highest), 0)
    where = token * A + slot
    tl.store(weights + where, (share / total).to(weights.dtype.element_ty), mask=slot < A)
    tl.store(chosen + where, expert, mask=slot < A)


MOST_PAIRS = 2048  # each is compared with all others; from here on a sort is faster
PAIRS = 64  # of one program


def sort_pairs(experts_TA: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `Ops.sort_pairs`. A pair's place is the number of pairs before it."""
    num_pairs, device = experts_TA.numel(), experts_TA.device
    order = torch.empty(num_pairs, dtype=torch.int64, device=device)
    place = torch.empty_like(experts_TA)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    if num_pairs == 0:
        return order, place, counts.zero_()
    outputs = order, place, counts
    grid = (triton.cdiv(num_pairs, PAIRS) + triton.cdiv(num_experts, PAIRS),)
    sizes = num_pairs, num_experts, PAIRS
    launch(_sort_pairs_kernel, grid, aligned(experts_TA), *outputs, *sizes)
    return outputs


@jit("num_pairs")
def _sort_pairs_kernel(
    experts, order, place, counts, num_pairs, E: tl.constexpr, BLOCK: tl.constexpr
):
    """The first programs find the places of BLOCK pairs each, the others count BLOCK experts."""
    num_blocks = (num_pairs + BLOCK - 1) // BLOCK
    lane = tl.arange(0, BLOCK)
    is_counting = tl.program_id(0) >= num_blocks
    mine = tl.program_id(0) * BLOCK + lane
    is_mine = mine < num_pairs
    expert = tl.load(experts + mine, mask=is_mine, other=0)
    if is_counting:
        mine = (tl.program_id(0) - num_blocks) * BLOCK + lane
        is_mine = mine < E
        expert = mine.to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int32)
    for block in range(loop_bound(num_blocks)):
        other = block * BLOCK + lane
        of_other = tl.load(experts + other, mask=other < num_pairs, other=E)[None, :]
        is_same = of_other == expert[:, None]
        is_before = (of_other < expert[:, None]) | (is_same & (other[None, :] < mine[:, None]))
        is_counted = tl.where(is_counting, is_same, is_before)
        total += tl.sum(is_counted.to(tl.int32), 1)
    if is_counting:
        tl.store(counts + mine, total, mask=is_mine)
    else:
        tl.store(place + mine, total.to(tl.int64), mask=is_mine)
        tl.store(order + total, mine.to(tl.int64), mask=is_mine)


def combine(out_TAD: Tensor, weights_TA: Tensor) -> Tensor:
    """See `Ops.combine`. Slots are added in order, in float32, and rounded once."""
    T, A, D = out_TAD.shape
    total_TD = out_TAD.new_empty(T, D)
    return launch_elementwise(_combine_kernel, (out_TAD, weights_TA), total_TD, A, D)


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
