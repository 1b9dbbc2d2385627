"""A step of a real run with top-k or top-p: exact where the support is recorded, told where not."""

import pytest
from quickstarts import AT_END, SHORT, quickstart_with, run_with

from lockstep.errors import ConfigError
from lockstep.run.preflight import preflight

SMALL = (*SHORT, *AT_END, "steps=1", "groups_per_step=3")


def first_row(path, *overrides):
    """The metrics row of the step."""
    rows = run_with(path, *SMALL, *overrides).metrics
    return next(row for row in rows if "mismatch/k3" in row)


@pytest.mark.parametrize("filters", [["agent.top_k=8"], ["agent.top_p=0.9"]])
def test_sampler_and_trainer_agree_over_the_recorded_support(tmp_path, filters):
    row = first_row(tmp_path / "with", *filters)
    assert row["episodes/failed"] == 0 and row["mismatch/compared_tokens"] > 100
    assert row["mismatch/unequal_tokens"] == row["mismatch/k3"] == 0, "as without truncation"
    assert row["mismatch/support_bias"] == 0
    without = first_row(tmp_path / "without", *filters, "agent.record_support=false")
    # mean(-log S), and S is below 1
    assert without["mismatch/k1"] > 1e-3
    assert without["mismatch/support_bias"] == pytest.approx(without["mismatch/k1"], rel=1e-5)
    row = first_row(tmp_path / "stock", *filters, "contract=none")
    assert without["mismatch/compared_tokens"] == row["mismatch/compared_tokens"]
    assert row["train/entropy"] < without["train/entropy"], "of what is left, there is less"


def test_averaged_log_probs_of_truncated_tokens_are_refused_before_a_model_is_loaded():
    settings = ["agent.top_k=8", "correction.rescorings=8"]
    with pytest.raises(ConfigError, match=r"rescorings=8.*agent\.top_p=1 "):
        preflight(quickstart_with(*settings))


def test_a_run_that_does_not_truncate_says_nothing_of_a_support(tmp_path):
    assert "mismatch/support_bias" not in first_row(tmp_path / "run")
