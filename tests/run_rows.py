"""The rows of a run's metrics."""

import json
from pathlib import Path


def timed_rows(path):
    return [json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text().splitlines()]


def without_time(rows):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def rows_of(path):
    """Without times: two equal runs have equal rows."""
    return without_time(timed_rows(path))
