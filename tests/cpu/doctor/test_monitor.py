"""The checks inside of a run: what they find, what comes of it, and that they change nothing."""

import json
import sys
from pathlib import Path

import pytest
from quickstarts import ONCE, SHORT, quickstart_with

import lockstep
from lockstep import diagnose
from lockstep.cli import main
from lockstep.doctor.ladder import climb
from lockstep.doctor.monitor import train
from lockstep.errors import ConfigError
from lockstep.testing.faults import injected, split_faults

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "proof"))
import doctor_faults  # noqa: F401 - its faults are known to --fault

SMALL = (*SHORT, *ONCE, "steps=2", "group_size=6", "evaluation.num_tasks=1")


def run(path, *overrides):
    settings, faults = split_faults([*SMALL, *overrides])
    with injected(*faults):
        return train(quickstart_with(*settings), out=path)


def causes_of(row):
    return sorted(name for name in row if name.startswith("doctor/") and "/rows" not in name)


@pytest.mark.parametrize("model", ["tiny-gpt-oss", "tiny-qwen3"])
def test_a_healthy_run_shows_no_cause(tmp_path, model):
    run(tmp_path / "run", f"model={model}", "contract=none", "stop_on=mismatch")
    steps = [row for row in lockstep.load(tmp_path / "run").metrics if "doctor/rows" in row]
    assert [row["doctor/causes"] for row in steps] == [0, 0]
    assert [causes_of(row) for row in steps] == [["doctor/causes"]] * 2
    assert not (tmp_path / "run" / "doctor").exists()
    assert not (tmp_path / "run" / "trained").exists()


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("shifted_logprobs", "shifted"),
        ("dropped_final_tokens", "missing_final"),
        ("retokenized_rows", "reencoded"),
    ],
)
def test_a_fault_of_the_rows_stops_the_run_with_a_checkpoint_and_the_rows(
    tmp_path, capsys, fault, cause
):
    path = tmp_path / "run"
    outcome = run(path, f"--fault={fault}", "stop_on=mismatch")
    assert outcome.status == "stopped"
    found = lockstep.load(path)
    first = next(row for row in found.metrics if row["step"] == 0)
    assert first["doctor/causes"] >= 1 and first[f"doctor/{cause}"] == 1
    assert found.checkpoints()
    told = "".join(capsys.readouterr())
    assert told.count("step 0: doctor: ") == first["doctor/causes"]
    assert f"step 0: doctor: {cause}" in told
    # What was kept is what was trained: the doctor reads it, and says the same.
    assert cause in [c.name for c, _ in diagnose(path / "doctor").causes]
    # The run itself keeps the rows as they were trained, and its verdict is the same.
    of_run = diagnose(path)
    assert of_run.dump.found_before[cause] == 1 and of_run.outcome == "differs"
    assert cause in [c.name for c, _ in of_run.causes]
    assert sorted(p.name for p in (path / "trained").iterdir()) == ["step-000000.parquet"]
    assert any(f"{cause} in 1" in note for note in of_run.dump.notes)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("late_advantages", "late_advantages"),  # ids and log-probs are as they were sampled
        ("duplicated_prompt", "duplicated_prompt"),  # before a later turn
        ("injected_control_tokens", "wrong_template"),  # ids that the engine was not sent
    ],
)
def test_rows_that_were_changed_beside_the_replies_are_judged_as_they_were_trained(
    tmp_path, fault, cause
):
    run(tmp_path / "run", f"--fault={fault}", "contract=none", "steps=1")
    found = diagnose(tmp_path / "run")
    first, finding = found.causes[0]
    assert (first.name, found.certainty_of(first, finding)[0]) == (cause, "proved")


def test_a_step_with_one_changed_row_keeps_the_trainers_log_probs_of_all(tmp_path):
    run(tmp_path / "run", "--fault=shifted_logprobs,share=0.2")
    rows = lockstep.load(tmp_path / "run").metrics
    num_compared = sum(row.get("mismatch/compared_tokens", 0) for row in rows)
    found = diagnose(tmp_path / "run")
    assert found.examination.gap.tokens == num_compared
    assert [cause.name for cause, _ in found.causes] == ["shifted"]


def test_a_history_that_was_rendered_anew_is_named_by_the_run_and_by_its_ladder(tmp_path, capsys):
    """The defect of the published program: k1 of 4, k2 of 26."""
    path = tmp_path / "run"
    run(path, "--fault=rerendered_history", "contract=none", "steps=1")
    found = diagnose(path)
    assert found.examination.gap.means()["k1"] > 1
    cause, finding = found.causes[0]
    assert cause.name == "rerendered" and found.certainty_of(cause, finding)[0] == "proved"
    assert main(["doctor", str(path)]) == 1
    assert "1. rerendered" in capsys.readouterr().out
    with injected(*split_faults(["--fault=rerendered_history"])[1]):
        ladder = climb(quickstart_with("contract=none"), num_episodes=6)
    [culprit] = ladder.culprits
    assert culprit.causes[0] == "rerendered" and culprit.match < 0.9
    assert "of the sampled tokens are still in their places" in ladder.verdict


def test_a_metric_beyond_the_alarm_is_never_consistent(tmp_path):
    path = tmp_path / "run"
    run(path, "steps=1")
    lines = (path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[0]) | {"mismatch/k1": 4.05, "mismatch/k2": 26.2, "mismatch/k3": 3.0}
    row["mismatch/max_abs_diff"] = 20.0
    (path / "metrics.jsonl").write_text("\n".join([json.dumps(row), *lines[1:]]) + "\n")
    found = diagnose(path)
    assert found.outcome == "differs"
    assert found.headline.startswith("unexplained: a step of the run")


def test_a_run_that_is_not_to_stop_goes_on_and_says_each_cause_once(tmp_path, capsys):
    outcome = run(tmp_path / "run", "--fault=shifted_logprobs")
    assert outcome.status == "done"
    assert "".join(capsys.readouterr()).count("doctor: shifted") == 1
    kept = sorted(path.name for path in (tmp_path / "run" / "doctor").iterdir())
    assert kept == ["causes-rank-0.json", *(f"step-00000{i}-rank-0.parquet" for i in (0, 1))]


def test_looking_changes_nothing_of_the_run(tmp_path):
    looking, not_looking = tmp_path / "a", tmp_path / "b"
    run(looking)
    run(not_looking, "doctor.rows=0")
    rows = [
        [
            {k: v for k, v in row.items() if not k.startswith(("time/", "doctor/"))}
            for row in lockstep.load(path).metrics
        ]
        for path in (looking, not_looking)
    ]
    assert rows[0] == rows[1]
    assert not any("doctor/rows" in row for row in lockstep.load(not_looking).metrics)


def test_log_probs_of_a_later_update_are_not_taken_for_those_before_it(tmp_path):
    run(tmp_path / "run", "trainer.updates_per_batch=2", "trainer.lr=1e-2")
    steps = [row for row in lockstep.load(tmp_path / "run").metrics if "doctor/rows" in row]
    assert [row["doctor/causes"] for row in steps] == [0, 0]
    assert diagnose(tmp_path / "run").examination.gap.max_abs == 0


def test_a_number_of_rows_below_0_is_refused():
    with pytest.raises(ConfigError, match=r"doctor\.rows=-1.*\b0\b"):
        quickstart_with("doctor.rows=-1")
