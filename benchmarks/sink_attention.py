"""Cost of exact attention sinks: forward and backward beside stock attention without sinks.

16 query and 2 key heads of width 64, float32, one thread. Over 2k tokens in full, the peer is
torch's flash attention (scaled_dot_product_attention, causal); with a window of 128 over 8k tokens,
as one row and packed, it is the same call with a [T, T] mask of window and rows: what a trainer
falls back to, since flash has no window on a CPU. The peer has no sinks anywhere; ours has them,
in the plain and in the invariant backend.

A measurement is a process of its own, after a small call that loads the libraries. Seconds are
processor time of forward and backward. MiB are the peak of that process above its memory before
(the peak is reset by /proc/self/clear_refs): inputs are not counted, gradients are.

    python benchmarks/sink_attention.py [--json] [--rounds N] [--only CASE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.nn.functional as F
from measuring import used_by

from lockstep.ops.base import Ops
from lockstep.ops.context import AttentionSpec, PackedContext
from lockstep.ops.invariant import InvariantOps, ask_for_reproducible_gemm

NAME = "sink_attention"
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


def ours(backend: Any, window: int | None, rows: Rows) -> Callable[..., Tensor]:
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


def measure_here(case: str, side: str) -> dict[str, float]:
    torch.set_num_threads(1)
    _, window, rows = CASES[case]
    if side == "invariant":
        ask_for_reproducible_gemm()
        function = ours(InvariantOps(), window, rows)
    else:
        function = ours(Ops(), window, rows) if side == "plain" else stock(window, rows)

    def once(rows: Rows) -> None:
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

        nonlocal found
        found = used_by(run)

    found = (0.0, 0.0)
    once(rows_of([300]))
    once(rows)
    return {"seconds": found[0], "mib": found[1]}


def measure(script: str, *arguments: str) -> dict[str, float]:
    """Runs `measure_here` of a script in a process of its own."""
    done = subprocess.run(
        [sys.executable, script, "--here", *arguments], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def best(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: min(run[name] for run in runs) for name in runs[0]}


def parts_of(case: str, title: str, how: str, found: dict[str, dict[str, float]]) -> list[Any]:
    """Rows of the table: seconds and MiB of each of our sides against the peer's."""
    parts = []
    for side in found:
        if side.startswith("peer"):
            continue
        for unit, name, digits in (("CPU s", "seconds", 3), ("MiB", "mib", 0)):
            mine, theirs = found[side][name], found["peer"][name]
            parts.append(
                {
                    "name": f"{case}/{side}/{name}", "ours": round(mine, digits),
                    "peer": round(theirs, digits), "unit": unit, "ratio": round(theirs / mine, 2),
                    "better": "lower", "how": f"{title}; {how}",
                }
            )  # fmt: skip
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side; the best counts")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--here", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure_here(*options.here)))
        return
    parts: list[Any] = []
    how = f"forward and backward, one thread, best of {options.rounds}; the peer has no sinks"
    for case in options.only:
        title = CASES[case][0]
        runs: dict[str, list[dict[str, float]]] = {"plain": [], "invariant": [], "peer": []}
        for _ in range(options.rounds):
            for side, of_side in runs.items():
                of_side.append(measure(__file__, case, side))
        found = {side: best(of_side) for side, of_side in runs.items()}
        parts += parts_of(case, title, how, found)
        if not options.json:
            told = "; ".join(
                f"{side} {x['seconds']:.2f} s {x['mib']:.0f} MiB" for side, x in found.items()
            )
            print(f"{title}: {told}", flush=True)
    headline = next((p for p in parts if p["name"] == "window-8k/plain/seconds"), parts[0])
    print(json.dumps(headline | {"name": NAME, "parts": parts}))


if __name__ == "__main__":
    main()
