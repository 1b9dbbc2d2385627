"""Imports trl beside the folder tests/vllm, which it would take for an installed vllm."""

import importlib.util
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def trl_modules():
    """(trl, its GRPOTrainer). Skips the test where one is missing."""
    for name in ("trl", "datasets", "pandas"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"pip install {name}")
    before = sys.path[:]
    sys.path[:] = [place for place in before if Path(place) != TESTS]
    try:
        import trl

        return trl, trl.GRPOTrainer
    finally:
        sys.path[:] = before


def dataset_of(prompts):
    """A dataset for TRL's trainers. Its fingerprint is given: datasets 5.2 cannot pickle some
    builds of pyarrow to make one."""
    import datasets
    from datasets.table import InMemoryTable

    rows = [{"prompt": prompt} for prompt in prompts]
    return datasets.Dataset(InMemoryTable.from_pylist(rows), fingerprint="prompts")
