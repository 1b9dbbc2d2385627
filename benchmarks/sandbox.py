"""Cost of a sandbox: the first program, programs one after the other, and many at once.

    python benchmarks/sandbox.py [--only KIND ...] [--programs N]

`bare` is CPython in a process for each program, without any isolation: the baseline of the others,
not for use. The program is a typical call of a calculator by a model. All times are wall time.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from statistics import median, quantiles

from measuring import Row, listed, main, note, row

from lockstep.agent.sandbox.base import ProgramResult, Sandbox
from lockstep.agent.sandbox.bubblewrap import BubblewrapConfig
from lockstep.agent.sandbox.monty import MontyConfig
from lockstep.errors import ConfigError

PROGRAM = "import math\nprint(sum(math.comb(20, k) for k in range(21)))"
EXPECTED = "1048576"
CONCURRENT = 16


class Bare:
    """CPython in a process for each program."""

    dialect = ""

    def __init__(self, workers: int) -> None:
        self._free = asyncio.Semaphore(workers)

    async def run(self, code: str, *, session: str = "") -> ProgramResult:
        async with self._free:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-c", code, stdout=asyncio.subprocess.PIPE
            )
            output, _ = await process.communicate()
        return ProgramResult(output=output.decode().strip(), ending="ok")

    async def end_session(self, session: str) -> None:
        return

    async def close(self) -> None:
        return


def open_kind(kind: str, workers: int) -> Sandbox:
    if kind == "bare":
        return Bare(workers)
    config = {"monty": MontyConfig, "bwrap": BubblewrapConfig}[kind](workers=workers)
    config.check()
    return config.open()


async def measure(kind: str, *, workers: int, num_programs: int) -> dict[str, float]:
    sandbox = open_kind(kind, workers)

    async def run(session: str = "") -> float:
        began = time.perf_counter()
        result = await sandbox.run(PROGRAM, session=session)
        if result.output != EXPECTED:
            raise SystemExit(f"{kind} printed {result.output!r}, not {EXPECTED}")
        return time.perf_counter() - began

    first = await run()
    await asyncio.sleep(0.5)  # processes that are started ahead are up
    began = time.perf_counter()
    one_by_one = [await run() for _ in range(num_programs)]
    serial = time.perf_counter() - began
    in_session = [await run("a") for _ in range(num_programs)]

    async def stream(share: int) -> list[float]:
        return [await run() for _ in range(share)]

    began = time.perf_counter()
    await asyncio.gather(*(stream(num_programs // CONCURRENT + 1) for _ in range(CONCURRENT)))
    at_once = time.perf_counter() - began
    num_at_once = CONCURRENT * (num_programs // CONCURRENT + 1)
    await sandbox.close()
    return {
        "first_ms": 1e3 * first,
        "p50_ms": 1e3 * median(one_by_one),
        "p95_ms": 1e3 * quantiles(one_by_one, n=20)[-1],
        "session_p50_ms": 1e3 * median(in_session[1:]),
        "per_second_1": num_programs / serial,
        "per_second_16": num_at_once / at_once,
    }


def compare(
    *, only: tuple[str, ...] = ("bare", "monty", "bwrap"), programs: int = 200, workers: int = 2
) -> Iterator[Row]:
    found: dict[str, dict[str, float]] = {}
    for kind in only:
        try:
            found[kind] = asyncio.run(measure(kind, workers=workers, num_programs=programs))
        except ConfigError as error:
            note(f"{kind}: left out: {error}")
            continue
        note(f"{kind}: {listed(found[kind])}")
        if kind != only[0]:
            both = (found[which]["p50_ms"] for which in (kind, only[0]))
            how = f"median of programs one by one; the peer, {only[0]}, is CPython in a process"
            yield row(f"sandbox {kind}", *both, "ms", how=how)


if __name__ == "__main__":
    main(compare, short={"programs": 40})
