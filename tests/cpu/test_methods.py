"""Published methods by name: what each sets, and what of the user's settings stays."""

import json

import pytest
from quickstarts import quickstart_with

from lockstep.cli import main
from lockstep.config import differences, to_dict
from lockstep.errors import ConfigError
from lockstep.objectives.config import CISPO, GRPO, GSPO, PPOClip
from lockstep.recipes import find_recipe, with_method
from lockstep.recipes.methods import METHODS

EXPECTED = {
    "grpo": (
        PPOClip(clip=(0.2, 0.2), aggregate="sequence_mean", kl_coef=0.04, kl_estimator="k3"), GRPO()
    ),
    "dr_grpo": (
        PPOClip(clip=(0.2, 0.2), aggregate=256),
        GRPO(normalize_std=False),
    ),
    "dapo": (PPOClip(clip=(0.2, 0.28), aggregate="token_mean"), GRPO()),
    "gspo": (GSPO(clip=(3e-4, 4e-4), aggregate="sequence_mean"), GRPO()),
    "cispo": (CISPO(clip=(1.0, 1.0), aggregate="token_mean"), GRPO()),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_a_method_sets_what_its_paper_sets_and_nothing_else(name):
    before = find_recipe("quickstart")
    config = with_method(before, name)
    assert (config.objective, config.advantage) == EXPECTED[name]
    changed = {path.partition(".")[0] for path in differences(to_dict(before), to_dict(config))}
    assert changed <= {"objective", "advantage", "signal"}
    assert (config.signal != before.signal) == (name == "dapo")


def test_dapo_draws_ten_batches_at_most_and_punishes_the_last_fifth_of_tokens():
    before = quickstart_with("max_tokens=1000", "groups_per_step=64")
    signal = with_method(before, "dapo").signal
    assert (signal.max_extra_tasks, signal.length_penalty_tokens) == (576, 200)


def planned(capsys, *settings):
    assert main(["train", "quickstart", *settings, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["config"]


def test_the_users_settings_stand_wherever_they_are_written(capsys):
    first = planned(capsys, "objective.clip=0.1,0.1", "signal.max_extra_tasks=8", "method=dapo")
    assert first == planned(
        capsys, "method=dapo", "objective.clip=0.1,0.1", "signal.max_extra_tasks=8"
    )
    assert first["objective"]["clip"] == [0.1, 0.1] and first["signal"]["max_extra_tasks"] == 8
    assert first["signal"]["length_penalty_tokens"] == 256 // 5
    other = planned(capsys, "method=gspo", "objective.entropy_coef=0.01")
    assert (other["objective"]["type"], other["objective"]["entropy_coef"]) == ("gspo", 0.01)


def test_a_method_follows_the_length_that_the_user_gave(capsys):
    assert planned(capsys, "method=dr_grpo", "max_tokens=300")["objective"]["aggregate"] == 300


def test_a_method_is_trained(tmp_path, capsys):
    settings = ["steps=1", "groups_per_step=2", "group_size=2", "evaluation=none"]
    path = tmp_path / "run"
    assert main(["train", "quickstart", "method=dapo", *settings, f"out={path}", "--json"]) == 0
    stored = json.loads((path / "config.json").read_text())
    assert stored["signal"]["max_extra_tasks"] == 18


def test_an_unknown_method_is_named_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"method=drgrpo.*dr_grpo"):
        with_method(find_recipe("quickstart"), "drgrpo")


def test_other_verbs_take_no_method(capsys):
    assert main(["sft", "method=dapo", "--dry-run"]) == 2
    assert "lockstep sft takes no method=" in capsys.readouterr().err
