"""A whole batch corrected, with every metric, against verl's rollout_corr_helper.

256 rows of 2048 to 8192 tokens, padded to 8192, float32; one row in sixteen is far from its
sampler. Twice: truncated token weights alone; and with three rules of rejection and weights
normalised over the batch. Both sides get the same log-probs and the same settings, take turns in
one process, and end with their metrics as numbers on the host. Each figure is the best of its runs:
what else runs on the machine only ever adds time. verl's mask is float32, the fastest of its types.

Memory is what a process of its own holds at its peak beyond its inputs.

    python benchmarks/correction_vs_verl.py [--repeats N]

verl is installed by `make install-dev`; without it, or with another version, this cannot run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from measuring import ROOT, CannotRun, Row, alone, in_turn, main, peak_mib, row, seconds_of

import pytest
import torch

from lockstep.correction import Correction, Layout, Rule, correct

sys.path.insert(0, str(ROOT / "tests" / "parity"))
from verl_modules import load_verl

NUM_ROWS, MAX_TOKENS, MIN_TOKENS = 256, 8192, 2048
BUFFER_MIB = NUM_ROWS * MAX_TOKENS * 4 / 2**20

TIS = Correction.tis(2.0)
FULL = Correction(
    anchor="recomputed",
    level="token",
    limits=(0.0, 2.0),
    normalize=True,
    reject=(
        Rule(stat="ratio", low=0.5, high=2.0),
        Rule(stat="k3", aggregation="mean", high=0.01),
        Rule(stat="k2", aggregation="max", high=2.0),
    ),
)
VERL_TIS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
VERL_FULL = VERL_TIS | {
    "rollout_is_batch_normalize": True,
    "rollout_rs": "token_k1,seq_mean_k3,seq_max_k2",
    "rollout_rs_threshold": "0.5_2.0,0.01,2.0",
}
WORK = {"token TIS": (TIS, VERL_TIS), "TIS, 3 rules, normalised": (FULL, VERL_FULL)}

HOW = (
    "seconds for 256 x 8192 float32 log-probs, ragged, weights and all metrics; the best of runs "
    "in turn in one process"
)


@dataclass(frozen=True)
class Rows:
    """Log-probs of both sides, [rows, MAX_TOKENS] float32, and which tokens count."""

    logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    mask: torch.Tensor


def make_rows(num_rows: int) -> Rows:
    """Random rows, made in place where possible, so that the peak of memory is the rows alone."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(MIN_TOKENS, MAX_TOKENS + 1, (num_rows, 1), generator=g)
    rollout = torch.rand(num_rows, MAX_TOKENS, generator=g).mul_(-4).sub_(1e-3)
    logprobs = torch.randn(num_rows, MAX_TOKENS, generator=g)
    spread = torch.full((num_rows, 1), 0.02)
    spread[::16] = 0.3
    logprobs.mul_(spread).add_(rollout).clamp_(max=0.0)
    return Rows(logprobs, rollout, torch.arange(MAX_TOKENS) < lengths)


def ours(rows: Rows, correction: Correction) -> Callable[[], Any]:
    layout = Layout.padded(rows.mask)

    def run() -> dict[str, float]:
        found = correct(rows.logprobs, rows.rollout_logprobs, correction, layout=layout)
        return found.to_metrics()

    return run


def peers(rows: Rows, settings: dict[str, Any]) -> Callable[[], Any]:
    compute = load_verl().rollout_corr_helper.compute_rollout_correction_and_rejection_mask
    mask = rows.mask.float()
    return lambda: compute(rows.logprobs, rows.rollout_logprobs, mask, **settings)


def peak_of(side: str) -> float:
    """Peak of this process in MiB above the memory before; a small call loads the code first."""
    torch.set_num_threads(2)

    def run(num_rows: int) -> Callable[[], Any]:
        rows = make_rows(num_rows)
        return ours(rows, FULL) if side == "ours" else peers(rows, VERL_FULL)

    run(1)()
    whole = run(NUM_ROWS)
    before = peak_mib()
    whole()
    return peak_mib() - before


def compare(*, repeats: int = 10) -> Iterator[Row]:
    try:
        load_verl()
    except pytest.skip.Exception as reason:
        raise CannotRun(str(reason)) from None
    rows, clocked = make_rows(NUM_ROWS), partial(seconds_of, clock=time.perf_counter)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for work, (correction, settings) in WORK.items():
            sides = {"ours": ours(rows, correction), "verl": peers(rows, settings)}
            timed = {side: partial(clocked, run) for side, run in sides.items()}
            taken = in_turn(repeats + 1, timed)  # one more run of each warms up
            name = f"correction-vs-verl/{work}, {num_threads} threads"
            yield row(name, *map(min, taken.values()), "s", how=HOW)
    mine, theirs = (alone(peak_of, side) for side in ("ours", "verl"))
    how = "beyond the inputs, a process each, the same work in full; in buffers of a batch: "
    how += f"{mine / BUFFER_MIB:.1f} and {theirs / BUFFER_MIB:.1f}"
    yield row("correction-vs-verl/memory", mine, theirs, "MiB", how=how)


if __name__ == "__main__":
    main(compare, short={"repeats": 2})
