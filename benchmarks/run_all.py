"""Runs every benchmark of this folder in turn and prints one table: what `make bench` does.

    python benchmarks/run_all.py [--only NAME] [--json]

A benchmark is any other .py file here. Called with --json it ends with one JSON line on stdout,
{"name", "ours", "peer", "unit", "ratio", "better", "how"}; with a list under `parts`, each of them
is a row of the table. One that cannot run ends with {"name", "skipped": why}. The ratio says how
many times better ours is. Exit code 1 if a benchmark failed; 0 if all ran or said why not.
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
PLAIN_WIDTH = 120  # columns in a file or a pipe, where rich would take 80
KEYS = ("name", "ours", "peer", "unit", "ratio", "better", "how")


def benchmarks(only: list[str] | None) -> list[Path]:
    """The files to run, by name. SystemExit names what `only` asks for and there is not."""
    found = sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name)
    if not only:
        return found
    known = {path.stem: path for path in found}
    unknown = [name for name in only if name.removesuffix(".py") not in known]
    if unknown:
        raise SystemExit(f"no benchmark is called {', '.join(unknown)}; known: {', '.join(known)}.")
    return [known[name.removesuffix(".py")] for name in only]


def run_benchmark(path: Path) -> dict[str, Any]:
    """Runs a benchmark and returns its last line; `failed` explains a missing or bad one.

    Its progress, on stderr, is shown as it comes.
    """
    done = subprocess.run([sys.executable, str(path), "--json"], stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    try:
        said = json.loads(lines[-1])
        if isinstance(said, dict) and "skipped" in said:
            return said
        missing = [key for part in rows_of(said) for key in KEYS if key not in part]
    except (IndexError, ValueError, TypeError):
        reason = "no JSON line at its end"
        return {"name": path.stem, "failed": f"exit code {done.returncode}, {reason}"}
    if missing or done.returncode:
        reason = f"its line lacks {', '.join(missing)}" if missing else "see its message above"
        return {"name": path.stem, "failed": f"exit code {done.returncode}, {reason}"}
    return said


def rows_of(said: dict[str, Any]) -> list[dict[str, Any]]:
    return said.get("parts") or [said]


def table_of(results: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("benchmark", no_wrap=True)
    for heading in ("ours", "peer"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("how", overflow="fold", ratio=1)
    for said in results:
        if "failed" in said or "skipped" in said:
            continue
        for row in rows_of(said):
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
    parser.add_argument("--only", action="append", metavar="NAME", help="run this one; repeatable")
    parser.add_argument("--json", action="store_true", help="end with one JSON list of all results")
    options = parser.parse_args()
    messages = Console(stderr=True, highlight=False)
    results: list[dict[str, Any]] = []
    for path in benchmarks(options.only):
        messages.print(f"[bold]{path.stem}[/bold]")
        began = time.perf_counter()
        results.append(run_benchmark(path))
        messages.print(f"[dim]{path.stem}: {time.perf_counter() - began:.0f} s[/dim]\n")
    if options.json:
        print(json.dumps(results))
        return int(any("failed" in said for said in results))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    if any("failed" not in said and "skipped" not in said for said in results):
        console.print(table_of(results))
    for said in results:
        for state, words in (("skipped", "could not run"), ("failed", "failed")):
            if state in said:
                console.print(f"{said['name']} {words}: {said[state]}", markup=False)
    return int(any("failed" in said for said in results))


if __name__ == "__main__":
    sys.exit(main())
