"""A sample of docs/proof/doctor.py: what `make proof` runs in full."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "proof"))

import doctor

from lockstep.doctor.checks.causes import CAUSES

ASKED = {"seeds": 1, "players": ("tiny-gpt-oss",), "num_tasks": 4}


@pytest.mark.parametrize(
    ("cause", "level"),
    [
        ("reencoded", "full"), ("shifted", "lean"), ("missing_final", "full"), ("clamped", "lean"),
        ("positive", "lean"), ("ignored_sinks", "model"), ("other_weights", "model"),
    ],
)  # fmt: skip
def test_the_cause_that_was_injected_is_named_first(cause, level):
    found = doctor.matrix(doctor.Asked(causes=(cause,), levels=(level,), **ASKED))
    assert [f["named"][:1] for f in found["cases"] if not f["is_right"]] == []
    assert len(found["cases"]) == 3


def test_nothing_is_named_where_nothing_is_wrong():
    found = doctor.healthy(doctor.Asked(healthy=20, **ASKED))
    assert found["dumps"] == 10
    assert found["alarms"] == []


def test_every_cause_is_in_the_matrix_but_those_that_no_fault_makes():
    of_matrix = {case.cause for case in doctor.CASES}
    assert set(CAUSES) - of_matrix == {
        "after_resume", "generation_defaults", "grows_without_learning", "half_head",
        "mixed_versions", "precision", "unphysical",
    }  # fmt: skip
