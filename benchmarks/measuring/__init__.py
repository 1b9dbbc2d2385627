"""What all benchmarks share: the command line, processes, rows of the table, time and memory.

A benchmark is a function that yields rows. Its keyword parameters are the options of its command:

    def compare(*, rounds: int = 3) -> Iterator[Row]:
        found = in_turn(rounds, {side: partial(alone, seconds_of, side) for side in SIDES})
        yield row("a step", min(found["ours"]), min(found["peer"]), "s", how="one thread")

    if __name__ == "__main__":
        main(compare, short={"rounds": 1})

Rows and progress go to stderr. The last line of stdout is JSON: {"name", "parts"}, or {"name",
"skipped"} with exit code 3. With --short the options in `short` are the defaults: `make bench` runs
this form. Import this module before torch, which reads the variables below as it starts.
"""

from __future__ import annotations

import argparse
import ctypes
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, TypeVar

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

T = TypeVar("T")
Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
TRAINERS = ROOT / "build" / "trainers"
"""TRL, as `make test-trainers` installs it."""
CLEAR_REFS = Path("/proc/self/clear_refs")
MIB = 2**20
CANNOT_RUN = 3


class CannotRun(Exception):
    """Why a benchmark cannot run here."""


class SideFailed(Exception):
    """The error of a process that ended without a result."""


# -- the command -----------------------------------------------------------------------------------


def main(compare: Callable[..., Iterable[Row]], *, short: Mapping[str, Any]) -> None:
    """Runs the benchmark with the options of the command line."""
    script = sys.modules["__main__"]
    if sys.argv[1:2] == ["--alone"]:
        function, arguments = sys.argv[2:]
        print(json.dumps(getattr(script, function)(*json.loads(arguments))))
        return
    name = Path(sys.argv[0]).stem
    parser = argparse.ArgumentParser(
        description=script.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help=f"other defaults: {short}")
    for option, parameter in inspect.signature(compare).parameters.items():
        parser.add_argument(f"--{option.replace('_', '-')}", **_form(parameter.default))
    if "--short" in sys.argv:
        parser.set_defaults(**short)
    options = vars(parser.parse_args())
    options.pop("short")
    try:
        print(json.dumps({"name": name, "parts": list(compare(**options))}))
    except CannotRun as reason:
        note(f"cannot run: {reason}")
        print(json.dumps({"name": name, "skipped": str(reason)}))
        sys.exit(CANNOT_RUN)


def _form(default: Any) -> dict[str, Any]:
    """argparse's form of an option. A default of several words lists all choices."""
    if not isinstance(default, tuple):
        return {"type": type(default), "default": default, "help": f"default: {default}"}
    kind = type(default[0]) if default else str
    choices = default if default and kind is str else None
    return {"nargs": "+", "type": kind, "default": default, "choices": choices, "metavar": "WORD",
            "help": f"default: {', '.join(map(str, default))}"}  # fmt: skip


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def listed(figures: Mapping[str, Any]) -> str:
    """Figures with their names, for a note."""
    return "  ".join(f"{k} {v if isinstance(v, str) else f'{v:.6g}'}" for k, v in figures.items())


def row(
    name: str,
    ours: float,
    peer: float,
    unit: str,
    *,
    how: str,
    better: Literal["lower", "higher"] = "lower",
    **more: Any,
) -> Row:
    """A row of run_all.py's table. `ratio` says how many times better ours is."""
    ratio = peer / ours if better == "lower" else ours / peer
    found = {"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": round(ratio, 3)}
    found |= {"better": better, "how": how, **more}
    note(f"{name}: {ours:,.4g} {unit}, peer {peer:,.4g}, ratio {found['ratio']:.2f}")
    return found


def models_of(benchmark: str) -> dict[str, dict[str, Any]]:
    """The models that a benchmark makes: name -> config.json, by models.json."""
    return json.loads(Path(__file__).with_name("models.json").read_text())[benchmark]


# -- processes -------------------------------------------------------------------------------------


def command_of(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The command that calls a function of this script. Arguments pass as JSON."""
    return [sys.executable, sys.argv[0], "--alone", function.__name__, json.dumps(arguments)]


def alone(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> Any:
    """The result of a function of this script in a process of its own. Raises SideFailed."""
    command = command_of(function, *arguments)
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **(environment or {})}
    )
    if done.returncode:
        raise SideFailed(f"{function.__name__}{arguments} failed: {done.stderr.strip()}")
    return json.loads(done.stdout.splitlines()[-1])


def answer_lines(answer: Callable[[Any], dict[str, Any]]) -> None:
    """The process of a `Side`: a JSON line for each JSON line on stdin, after one at the start."""
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


class Side:
    """A process that answers JSON lines with JSON lines. Its first one comes when it is ready."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        limit: float = 3600.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """limit: seconds until the process is killed. Raises SideFailed."""
        self._stderr = TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._timer = threading.Timer(limit, self._process.kill)
        self._timer.daemon = True
        self._timer.start()
        self.pid = self._process.pid
        self.first = self._answer()

    def ask(self, job: Any = None) -> dict[str, Any]:
        """The answer to a job. Raises SideFailed."""
        assert self._process.stdin is not None, "opened as a pipe"
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return self._answer()

    def cpu_seconds(self) -> float:
        """Processor time of the process so far."""
        words = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "opened as a pipe"
        for line in self._process.stdout:
            if line.startswith(('{"', "{}")):  # not what a library prints of a dict
                return json.loads(line)
        raise self._failure()

    def _failure(self) -> SideFailed:
        code = self._process.wait()
        self._stderr.seek(0)
        return SideFailed(f"exit code {code}: {self._stderr.read().strip() or 'no message'}")


# -- time and memory -------------------------------------------------------------------------------


def in_turn(rounds: int, sides: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Results of every side in every round. Sides alternate: other load meets all of them."""
    found: dict[str, list[T]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, run in sides.items():
            found[side].append(run())
    return found


def seconds_of(run: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    began = clock()
    run()
    return clock() - began


def best(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The least value of each figure: other load only adds."""
    return {name: min(run[name] for run in runs) for name in runs[0]}


def best_alone(
    rounds: int, sides: Sequence[str], measure: Callable[..., Any], *arguments: Any
) -> dict[str, dict[str, float]]:
    """Side -> the best figures of `measure(*arguments, side)`, in processes that take turns."""
    runs = in_turn(rounds, {side: partial(alone, measure, *arguments, side) for side in sides})
    return {side: best(found) for side, found in runs.items()}


def require_proc() -> None:
    """Raises CannotRun where the peak of a process cannot be reset."""
    if not CLEAR_REFS.exists():
        raise CannotRun("memory is measured by /proc, as on Linux")


def resident_bytes(field: str) -> int:
    """`VmRSS`: what this process holds. `VmHWM`: the most that it has held."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024


def peak_mib() -> float:
    """MiB that this process held at most, since it started. NaN where that is not known."""
    return resident_bytes("VmHWM") / MIB if CLEAR_REFS.exists() else float("nan")


def usage(run: Callable[[], object]) -> dict[str, float]:
    """Of one call: processor seconds, and MiB of the peak above the memory before."""
    # The call would reuse memory that the allocator kept from earlier work, unseen.
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR_REFS.write_text("5")  # resets the peak to the memory in use
    held, began = resident_bytes("VmRSS"), os.times()
    run()
    peak, ended = resident_bytes("VmHWM"), os.times()
    seconds = ended.user + ended.system - began.user - began.system
    return {"seconds": seconds, "mib": (peak - held) / MIB}
