"""The ladder names the rung on which a defect begins, and rules out those below it."""

import json

import pytest
from quickstarts import quickstart_with

from lockstep.cli import main
from lockstep.doctor.gap import Gap
from lockstep.doctor.ladder import Ladder, Rung, climb
from lockstep.errors import DataError
from lockstep.observe.alarms import mismatch_alarm
from lockstep.testing.faults import injected
from lockstep.testing.faults.rows import ShiftedLogprobs
from lockstep.testing.faults.sides import IgnoredSinks


def quickstart(*settings):
    return quickstart_with("contract=none", *settings)


def rung(name, k2, *, is_what_if=False):
    gap = Gap(tokens=100, k2=100 * k2, k3=100 * k2)
    row = {f"mismatch/{key}": value for key, value in gap.means().items()}
    return Rung(
        name=name, adds=f"what {name} adds", gap=gap, alarm=mismatch_alarm(row, "dense"), match=1.0,
        is_what_if=is_what_if,
    )  # fmt: skip


def test_a_healthy_program_is_consistent_on_every_rung_and_rendering_anew_would_not_be():
    ladder = climb(quickstart(), num_episodes=8)
    assert ladder.culprits == [] and len(ladder.ruled_out) == 4
    anew = next(r for r in ladder.rungs if r.is_what_if)
    assert anew.match < 0.1 and anew.gap.means()["k2"] > 10
    assert all(r.match == 1 and r.gap.max_abs < 1e-4 for r in ladder.rungs if not r.is_what_if)


def test_a_kernel_without_sinks_shows_on_plain_text_and_rules_nothing_out():
    with injected(IgnoredSinks()):
        ladder = climb(quickstart(), num_episodes=8)
    assert ladder.culprits == [ladder.rungs[0]]


def test_rows_that_were_changed_show_on_the_training_path_alone():
    with injected(ShiftedLogprobs()):
        ladder = climb(quickstart("model=tiny-qwen3"), num_episodes=8)
    assert ladder.culprits == [ladder.rungs[-1]]
    assert ladder.culprits[0].causes[0] == "shifted" and "off by one" in ladder.verdict
    assert [sentence.split(" (")[0] for sentence in ladder.ruled_out] == [
        "not kernels, precision or weights of the two sides",
        "not the template's prompt and its control tokens",
        "not the tokens between turns, and keys that are kept over them",
    ]


def test_what_is_as_high_on_every_rung_is_the_lowest_ones_doing():
    ladder = Ladder(rungs=(rung("text", 0.5), rung("turn", 0.6)))
    assert [r.name for r in ladder.culprits] == ["text"]


def test_a_gap_that_is_there_from_the_beginning_does_not_hide_one_that_is_far_larger():
    ladder = Ladder(rungs=(rung("text", 0.02), rung("turn", 0.02), rung("path", 9.0)))
    assert [r.name for r in ladder.culprits] == ["path", "text"]


def test_what_another_program_would_get_is_never_the_verdict():
    ladder = Ladder(rungs=(rung("text", 1e-6), rung("anew", 50.0, is_what_if=True)))
    assert ladder.culprits == [] and len(ladder.ruled_out) == 1


def test_no_episode_is_refused_before_a_model_is_loaded():
    with pytest.raises(DataError, match="0 episodes"):
        climb(quickstart(), num_episodes=0)


def test_settings_belong_to_the_ladder(capsys):
    assert main(["doctor", "somewhere", "seed=1"]) == 2
    assert "seed=1 belongs to --ladder" in capsys.readouterr().err.replace("\n", " ")


def test_the_command_climbs_a_recipe(capsys):
    code = main(["doctor", "--ladder", "quickstart", "contract=none", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["culprits"] == [] and len(found["rungs"]) == 5
