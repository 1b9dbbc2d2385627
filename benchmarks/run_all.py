"""Runs every benchmark of this folder in turn and prints one table: what `make bench` does.

    python benchmarks/run_all.py [--full] [--only NAME ...] [--json]

A benchmark is any other .py file here; measuring/ has its command and its last line, whose parts
are rows of the table. The short form of each takes ten minutes on two idle cores; the figures of
the pages come from the full form, which takes hours. The ratio says how many times better ours is.
Exit code 1 if a benchmark failed; 0 if all ran or said why not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
BENCHMARKS = {path.stem: path for path in sorted(HERE.glob("*.py")) if path.stem != "run_all"}
PLAIN_WIDTH = 120  # columns in a file or a pipe, where rich would take 80


def run_benchmark(name: str, *, is_full: bool) -> dict[str, Any]:
    """The last line of a benchmark, or why it `failed`. Its progress goes to stderr as it comes."""
    command = [sys.executable, str(BENCHMARKS[name]), *([] if is_full else ["--short"])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"name": name, "failed": f"exit code {done.returncode}, see its message above"}


def table_of(results: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("benchmark", overflow="fold", ratio=1)
    for heading in ("ours", "peer"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("how", overflow="fold", ratio=1)
    for row in (row for found in results for row in found.get("parts", ())):
        table.add_row(
            row["name"],
            f"{row['ours']:,.4g} {row['unit']}",
            f"{row['peer']:,.4g} {row['unit']}",
            f"{row['ratio']:.2f}x",
            f"{row['how']} ({row['better']} is better)",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="the form of the pages' figures")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, metavar="NAME")
    parser.add_argument("--json", action="store_true", help="end with one JSON list of all results")
    options = parser.parse_args()
    messages = Console(stderr=True, highlight=False)
    results: list[dict[str, Any]] = []
    for name in options.only:
        messages.print(f"[bold]{name}[/bold]")
        began = time.perf_counter()
        results.append(run_benchmark(name, is_full=options.full))
        messages.print(f"[dim]{name}: {time.perf_counter() - began:.0f} s[/dim]\n")
    has_failed = any("failed" in found for found in results)
    if options.json:
        print(json.dumps(results))
        return int(has_failed)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(table_of(results))
    for found in results:
        for state, words in (("skipped", "could not run"), ("failed", "failed")):
            if state in found:
                console.print(f"{found['name']} {words}: {found[state]}", markup=False)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
