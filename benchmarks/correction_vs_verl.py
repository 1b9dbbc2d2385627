"""A whole batch corrected, with every metric, against verl's rollout_corr_helper.

256 rows of 2048 to 8192 tokens, padded to 8192, float32; one row in sixteen is far from its
sampler. Twice: truncated token weights alone; and with three rules of rejection and weights
normalised over the batch. Both sides get the same log-probs and the same settings, take turns in
one process, and end with their metrics as numbers on the host. Each figure is the best of its runs:
what else runs on the machine only ever adds time. verl's mask is float32, the fastest of its types.

Memory is what a process of its own holds at its peak beyond its inputs. Printed besides: one
thread; half and a quarter of the rows; and ours with tokens told apart by age, turn, position and
kind, which verl does not do.

    python benchmarks/correction_vs_verl.py [--json] [--repeats N]

verl is installed by `make install-dev`; exit code 3 says that it is not, or of another version: the
reason is printed, and is in the JSON line as {"name", "skipped"}.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

from lockstep.correction import Correction, Layout, Rule, TokenFacts, correct

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "parity"))
from verl_modules import load_verl  # noqa: E402 - from the tests' folder, which is no package

NAME = "correction-vs-verl"
NUM_ROWS, MAX_TOKENS, MIN_TOKENS = 256, 8192, 2048
MIB = 1 << 20
BUFFER_MIB = NUM_ROWS * MAX_TOKENS * 4 / MIB
CANNOT_RUN = 3

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
FULL_WORK = "TIS, 3 rules, normalised"

HOW = (
    "seconds for 256 x 8192 float32 log-probs, ragged, two threads, weights and all metrics; the "
    "best of runs in turn in one process"
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


def make_facts(num_rows: int) -> TokenFacts:
    """Turns of 400 tokens, the last 5 of each protocol; rows of up to three updates ago."""
    shape = (num_rows, MAX_TOKENS)
    places = torch.arange(MAX_TOKENS).expand(shape).contiguous()
    return TokenFacts(
        ages=(torch.arange(num_rows) % 4)[:, None].expand(shape).contiguous(),
        turns=places // 400,
        positions=places,
        kinds=(places % 400 >= 395).long(),
    )


def ours(rows: Rows, correction: Correction, facts: TokenFacts | None = None) -> Callable[[], Any]:
    layout = Layout.padded(rows.mask)

    def run() -> dict[str, float]:
        return correct(
            rows.logprobs, rows.rollout_logprobs, correction, layout=layout, facts=facts
        ).to_metrics()

    return run


def peers(rows: Rows, settings: dict[str, Any]) -> Callable[[], Any]:
    compute = load_verl().rollout_corr_helper.compute_rollout_correction_and_rejection_mask
    mask = rows.mask.float()
    return lambda: compute(rows.logprobs, rows.rollout_logprobs, mask, **settings)


def best_of(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The least seconds of each side; all take turns."""
    seconds: dict[str, float] = {}
    for _ in range(repeats + 1):  # the first of each warms up
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            spent = time.perf_counter() - began
            seconds[name] = min(seconds.get(name, spent), spent)
    return seconds


# -- memory ----------------------------------------------------------------------------------------


def peak_of(side: str) -> float:
    """Peak of this process in MiB above the memory before; a small call loads the code first."""
    make = {
        "ours": lambda rows: ours(rows, FULL),
        "verl": lambda rows: peers(rows, VERL_FULL),
    }[side]
    make(make_rows(1))()
    run = make(make_rows(NUM_ROWS))
    before = peak_rss()
    run()
    return peak_rss() - before


def peak_rss() -> float:
    """MiB. Linux counts it anew for a new program; getrusage takes over what its parent held."""
    status = Path("/proc/self/status")
    if status.is_file():
        lines = status.read_text().splitlines()
        return int(next(x for x in lines if x.startswith("VmHWM:")).split()[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def peak_in_child(side: str) -> float:
    done = subprocess.run(
        [sys.executable, __file__, "--peak", side], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout.strip().splitlines()[-1])


# -- the comparison --------------------------------------------------------------------------------


def compare(repeats: int) -> dict[str, Any]:
    """Everything, printed as it is found; the JSON line."""
    rows = make_rows(NUM_ROWS)
    parts: list[dict[str, Any]] = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for work, (correction, settings) in WORK.items():
            found = best_of(
                {"ours": ours(rows, correction), "verl": peers(rows, settings)}, repeats
            )
            ratio = found["verl"] / found["ours"]
            note(
                f"{work}, {num_threads} thread(s): ours {found['ours']:.4f} s, "
                f"verl {found['verl']:.4f} s, {ratio:.2f}x"
            )
            if num_threads == 2:
                parts.append(part(f"{NAME}/{work}", found, "s", HOW))
    growth = {
        count: best_of({"ours": ours(make_rows(count), FULL)}, repeats)["ours"]
        for count in (NUM_ROWS // 4, NUM_ROWS // 2, NUM_ROWS)
    }
    per_row = ", ".join(f"{n} rows {s:.4f} s ({1e3 * s / n:.3f} ms/row)" for n, s in growth.items())
    note(f"ours, growth: {per_row}")
    told_apart = best_of({"ours": ours(rows, FULL, make_facts(NUM_ROWS))}, repeats)["ours"]
    note(f"ours with age, turn, position and kind of every token: {told_apart:.4f} s")
    peaks = {side: peak_in_child(side) for side in ("ours", "verl")}
    note(
        ", ".join(
            f"{side} {mib:.0f} MiB at its peak ({mib / BUFFER_MIB:.1f} buffers of a batch)"
            for side, mib in peaks.items()
        )
    )
    how = "MiB at the peak beyond the inputs, a process each, the same work in full"
    parts.append(part(f"{NAME}/memory", peaks, "MiB", how))
    full = next(p for p in parts if p["name"].endswith(FULL_WORK))
    return {
        **full,
        "name": NAME,
        "parts": parts,
        "seconds_by_rows": growth,
        "seconds_with_facts": told_apart,
    }


def part(name: str, found: dict[str, float], unit: str, how: str) -> dict[str, Any]:
    return {
        "name": name,
        "ours": round(found["ours"], 4),
        "peer": round(found["verl"], 4),
        "unit": unit,
        "ratio": round(found["verl"] / found["ours"], 3),
        "better": "lower",
        "how": how,
    }


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the JSON line alone on stdout")
    parser.add_argument("--repeats", type=int, default=10, help="runs of each side that count")
    parser.add_argument("--peak", choices=["ours", "verl"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    if options.peak:
        print(peak_of(options.peak))
        return 0
    if options.repeats < 1:
        parser.error(f"--repeats={options.repeats} must be at least 1")
    try:
        load_verl()
    except pytest.skip.Exception as reason:
        note(f"cannot run: {reason}")
        print(json.dumps({"name": NAME, "skipped": str(reason)}))
        return CANNOT_RUN
    print(json.dumps(compare(options.repeats)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
