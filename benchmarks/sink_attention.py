"""Cost of exact attention sinks: forward and backward beside stock attention without sinks.

16 query and 2 key heads of width 64, float32, one thread. Over 2k tokens in full, the peer is
torch's flash attention (scaled_dot_product_attention, causal); with a window of 128 over 8k tokens,
as one row and packed, it is the same call with a [T, T] mask of window and rows: what a trainer
falls back to, since flash has no window on a CPU. The peer has no sinks anywhere; ours has them,
in the plain and in the invariant backend.

A measurement is a process of its own, after a small call that loads the libraries. Seconds are
processor time of forward and backward. MiB are the peak of that process above its memory before
(the peak is reset by /proc/self/clear_refs): inputs are not counted, gradients are.

    python benchmarks/sink_attention.py [--rounds N] [--only CASE ...]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from measuring import Row, best_alone, main, require_proc, row, usage
from measuring.sampling import ops_of

import numpy as np
import torch
import torch.nn.functional as F

from lockstep.ops.base import Ops
from lockstep.ops.context import AttentionSpec, PackedContext

Tensor = torch.Tensor
Rows = list["np.ndarray[Any, np.dtype[np.int64]]"]

NUM_HEADS, NUM_KV_HEADS, WIDTH, WINDOW = 16, 2, 64, 128
SCALE = WIDTH**-0.5


def rows_of(lengths: list[int]) -> Rows:
    ends = np.cumsum(lengths)
    return [np.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)]


def branches(num_rows: int, shared: int, own: int) -> Rows:
    """Rows that begin with the same tokens."""
    starts = [shared + own * i for i in range(num_rows)]
    return [np.r_[0:shared, at : at + own] for at in starts]


CASES: dict[str, tuple[str, int | None, Rows]] = {
    "full-2k": ("one row of 2k tokens, full", None, rows_of([2048])),
    "window-8k": ("one row of 8k tokens, window 128", WINDOW, rows_of([8192])),
    "window-8x1k": ("8 rows of 1k tokens, window 128", WINDOW, rows_of([1024] * 8)),
    "window-ragged": (
        "10 rows of 80 to 3000 tokens, 8k in all, window 128", WINDOW,
        rows_of([3000, 1700, 1150, 800, 600, 400, 250, 120, 92, 80]),
    ),
    "window-branches": (
        "8 rows of 1k tokens, the first 512 shared by all, window 128", WINDOW,
        branches(8, 512, 512),
    ),
}  # fmt: skip


def ours(backend: Ops, window: int | None, rows: Rows) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, rows: Rows = rows) -> Tensor:
        return backend.attention(
            q, k, v, AttentionSpec(sinks, window, SCALE), PackedContext.of_rows(rows),
        )  # fmt: skip

    return run


def stock(window: int | None, rows: Rows) -> Callable[..., Tensor]:
    """Without sinks. Rows that share tokens are laid end to end, as they must be for a mask."""

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, rows: Rows = rows) -> Tensor:
        mask = None
        if window is not None:
            index = torch.from_numpy(np.concatenate(rows))
            if len(index) != len(q):
                q, k, v = q[index], k[index], v[index]
            row = torch.from_numpy(np.repeat(np.arange(len(rows)), [len(r) for r in rows]))
            at = torch.arange(len(row))
            seen = row[:, None] == row
            seen &= at[:, None] >= at
            seen &= at[:, None] - at < window
            mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
            del seen
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=SCALE, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    return run


def measure(case: str, side: str) -> dict[str, float]:
    torch.set_num_threads(1)
    _, window, rows = CASES[case]
    function = stock(window, rows) if side == "peer" else ours(ops_of(side), window, rows)

    def once(rows: Rows) -> dict[str, float]:
        g = torch.Generator().manual_seed(0)
        num_tokens = 1 + max(int(row[-1]) for row in rows)
        inputs = [
            torch.randn(num_tokens, heads, WIDTH, generator=g).requires_grad_()
            for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        ]
        sinks = torch.randn(NUM_HEADS, generator=g).requires_grad_()
        grad = torch.randn(sum(map(len, rows)) if side == "peer" else num_tokens,
                           NUM_HEADS, WIDTH, generator=g)  # fmt: skip

        def run() -> None:
            function(*inputs, sinks, rows=rows).backward(grad)

        return usage(run)

    once(rows_of([300]))
    return once(rows)


def compare(*, rounds: int = 3, only: tuple[str, ...] = tuple(CASES)) -> Iterator[Row]:
    require_proc()
    how = f"forward and backward, one thread, best of {rounds}; the peer has no sinks"
    for case in only:
        found = best_alone(rounds, ("plain", "invariant", "peer"), measure, case)
        peer = found.pop("peer")
        for side, mine in found.items():
            for unit, name in (("CPU s", "seconds"), ("MiB", "mib")):
                title = f"sink attention, {case}/{side}"
                yield row(title, mine[name], peer[name], unit, how=f"{CASES[case][0]}; {how}")


if __name__ == "__main__":
    main(compare, short={"rounds": 1, "only": ("full-2k",)})
