"""What several benchmarks measure alike: processor time and peak memory of one call, on Linux."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

CLEAR_REFS = Path("/proc/self/clear_refs")
MIB = 2**20


def can_measure() -> bool:
    """Whether this system counts a process' peak anew when it is asked to."""
    return CLEAR_REFS.exists()


def resident_bytes(field: str) -> int:
    """`VmRSS`: what this process holds. `VmHWM`: the most that it has held."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024


def used_by(run: Callable[[], object]) -> tuple[float, float]:
    """(processor seconds, MiB of the peak above what was held before) of one call."""
    # What the allocator has kept of earlier work would be taken again, and not be seen.
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR_REFS.write_text("5")  # the peak is what is held now
    held, began = resident_bytes("VmRSS"), os.times()
    run()
    peak, ended = resident_bytes("VmHWM"), os.times()
    seconds = ended.user + ended.system - began.user - began.system
    return seconds, (peak - held) / MIB
