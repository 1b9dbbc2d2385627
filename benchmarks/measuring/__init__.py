"""Measures processor time and peak memory of one call, on Linux, for several benchmarks."""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

CLEAR_REFS = Path("/proc/self/clear_refs")
MIB = 2**20


def can_measure() -> bool:
    """True if this system can reset a process' peak."""
    return CLEAR_REFS.exists()


def resident_bytes(field: str) -> int:
    """`VmRSS`: what this process holds. `VmHWM`: the most that it has held."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024


def peak_mib() -> float:
    """MiB that this process held at most, since it started."""
    return resident_bytes("VmHWM") / MIB


def used_by(run: Callable[[], object]) -> tuple[float, float]:
    """(processor seconds, MiB of the peak above the memory before) of one call."""
    # The call would reuse memory that the allocator kept from earlier work, unseen.
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR_REFS.write_text("5")  # resets the peak to the memory in use
    held, began = resident_bytes("VmRSS"), os.times()
    run()
    peak, ended = resident_bytes("VmHWM"), os.times()
    seconds = ended.user + ended.system - began.user - began.system
    return seconds, (peak - held) / MIB


def row_of(
    name: str,
    ours: float,
    peer: float,
    unit: str,
    *,
    how: str,
    better: Literal["lower", "higher"] = "lower",
) -> dict[str, Any]:
    """A row of run_all.py's table. `ratio` says how many times better ours is."""
    ratio = peer / ours if better == "lower" else ours / peer
    found = {"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": round(ratio, 3)}
    print(f"{name}: {ours:,.4g} {unit}, peer {peer:,.4g}, ratio {ratio:.2f}", file=sys.stderr)
    return found | {"better": better, "how": how}


def show(name: str, parts: Sequence[dict[str, Any]]) -> None:
    """Prints the JSON line of a benchmark of several rows."""
    print(json.dumps({"name": name, "parts": list(parts)}))
