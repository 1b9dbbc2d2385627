"""The script behind the table of architectures in docs/models.md."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="pip install 'lockstep-rl[transformers]'")
sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "proof"))

import fallbacks


def test_an_architecture_trains_as_its_row_says():
    row, stored = fallbacks.tried("mamba2"), json.loads(fallbacks.RESULTS.read_text())["rows"]
    assert row.keys() == stored["mamba2"].keys() - {"group"}, row
    assert row["skipped"] == 0 and row["sync_level"] >= 2  # the engine runs what it is sent
    for figure in ("k3", "max_abs_diff"):
        assert 0 < row[figure] < 10 * stored["mamba2"][figure]


def test_what_fails_is_a_row_with_its_reason(monkeypatch):
    monkeypatch.setitem(fallbacks.KINDS, "phi", {"num_attention_heads": 5})
    assert "fails" in fallbacks.tried("phi")
