"""The benchmark of the doctor's checks runs all of them, on a dump of a few rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

from lockstep.doctor.checks.examine import all_stages

ROOT = Path(__file__).resolve().parents[3]


def test_the_benchmark_runs_every_check():
    command = [sys.executable, "benchmarks/doctor_checks.py", "--tokens", "4000", "--repeats", "1"]
    command += ["--megabytes", "0.01"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    without = {
        "values/routes",
        "training/idle_growth",
        "training/metric_names",
        "training/unphysical",
    }
    kinds = {kind.name for checks in all_stages().values() for kind in checks}
    assert set(said["by_check"]) >= kinds - without, "the dump has what these checks need"
    assert set(said["verdicts"]) == {"rows.parquet", "rows.jsonl"}
    assert all(rate > 0 for rate in said["tokens_per_second"].values())
