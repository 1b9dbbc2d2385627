"""What silently eats the learning: one constructed run for each trigger, and healthy ones."""

import json
import tomllib
from pathlib import Path

import pytest
from quickstarts import quickstart_with

from lockstep.config import flatten, to_dict
from lockstep.observe.alarms import TRIGGERS, WINDOW, Health, spells
from lockstep.observe.live import RunHeader, View
from lockstep.recipes import find_recipe
from lockstep.report.document import build_figures
from lockstep.store.run import RunDirectory, load_run

SETTINGS = flatten(to_dict(find_recipe("quickstart")))
HEALTHY = {
    "reward/mean": 0.4, "reward/min": -0.3, "reward/max": 1.0, "train/loss": 0.1,
    "episodes/total": 64, "episodes/failed": 0, "episodes/truncated": 3, "episodes/groups": 8,
    "episodes/turns_mean": 2.4, "episodes/without_signal": 3, "episodes/same_reward": 0,
    "episodes/cut/max_turn_tokens": 3, "episodes/cut/max_tokens": 5, "episodes/cut/max_turns": 2,
    "episodes/cut/max_seconds": 0, "episode/parse_errors": 0.3, "train/lr_to_usual": 1.0,
    "tool/offered/search": 64, "tool/calls/search": 90, "tool/answered/search": 80,
    "tool/failed/search": 40,
}  # fmt: skip
SAME = {"reward/mean": 0.0, "reward/min": 0.0, "reward/max": 0.0, "episodes/same_reward": 64,
        "episodes/without_signal": 8}  # fmt: skip

CASES = {
    name: (case["metrics"], case["text"])
    for name, case in tomllib.loads(Path(__file__).with_name("alarms.toml").read_text()).items()
}
REASONS = {"failed": "environment.score: ValueError: no number (rewards.py:7).",
           "tool_failing": "error: OSError: gone"}  # fmt: skip


def rows_of(*changes):
    return [{"step": step, **HEALTHY, **changed} for step, changed in enumerate(changes)]


def alarms_after(rows, settings=SETTINGS):
    health = Health(settings, dict(REASONS))
    for row in rows:
        metrics = health.take(row)
    assert metrics.keys() == {"health/alarms", *(f"health/{a.name}" for a in health.alarms)}
    return {alarm.name: alarm.text for alarm in health.alarms}


def test_the_table_is_complete_and_each_threshold_has_its_reason():
    assert [trigger.name for trigger in TRIGGERS] == list(CASES)
    for trigger in TRIGGERS:
        assert trigger.because and trigger.evidence > 0
        assert {*trigger.unless} <= CASES.keys()
        assert all("=" in setting for setting in trigger.settings)


@pytest.mark.parametrize("name", CASES)
def test_a_trigger_says_what_happens_and_which_setting_changes_it(name):
    changed, text = CASES[name]
    found = alarms_after(rows_of(changed, changed))
    assert list(found) == [name] and found[name].startswith(text)


def test_the_page_has_one_example_for_each_trigger_and_its_threshold():
    page = (Path(__file__).parents[3] / "docs/troubleshooting.md").read_text()
    for trigger in TRIGGERS:
        changed = CASES[trigger.name][0]
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{trigger.name}` |")]
        assert row.endswith(f" | {alarms_after(rows_of(changed, changed))[trigger.name]} |")
        share = trigger.above if trigger.above < 1 else 0
        assert not share or f" {100 * share:.0f} % or more " in row


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("overfits", "lr_high", "lr_low")])
@pytest.mark.parametrize("at", [0, 4, 11])
def test_one_odd_step_is_no_alarm(name, at):
    changes = [CASES[name][0] if step == at else {} for step in range(12)]
    assert not spells(rows_of(*changes), SETTINGS)


def test_an_alarm_ends_with_what_it_says_and_a_run_of_one_step_is_judged_at_its_end():
    cut = CASES["cut_by_max_turn_tokens"][0]
    ((text, still),) = spells(rows_of(cut, cut, cut, *[{}] * 20), SETTINGS)
    assert text.startswith("Until step 8: ") and not still
    again = rows_of(cut, cut, *[{}] * 20, cut, cut, cut, cut)
    ((text, still),) = spells(again, SETTINGS)
    assert text.startswith("Since step 25: ") and still
    ((text, still),) = spells(rows_of(cut), SETTINGS)
    assert text.startswith("Since step 0: 44 of 64") and still


def test_solved_tasks_are_no_alarm_and_a_reward_that_never_differed_is_one():
    solved = {"reward/mean": 1.0, "reward/min": 1.0, "episodes/same_reward": 64,
              "episodes/without_signal": 8}  # fmt: skip
    assert not alarms_after(rows_of({}, {}, *[solved] * WINDOW))
    assert list(alarms_after(rows_of(*[solved] * 2))) == ["same_reward"]


def test_settings_that_a_run_lacks_and_many_tools_leave_the_sentence_whole():
    custom = SETTINGS | {"task.reward": "mine.py:reward"}
    assert "Set task.reward=FILE.py" in alarms_after(rows_of(SAME, SAME), custom)["same_reward"]
    tools = {f"tool/{kind}/t{n}": 64 * (kind == "offered")
             for n in range(6) for kind in ("offered", "calls")}  # fmt: skip
    bare = {name: value for name, value in SETTINGS.items() if name != "task.instructions"}
    said = alarms_after(rows_of(tools, tools), bare)["tool_unused"]
    assert said.startswith("none of 768 episodes called t0, t1, t2 and 3 more. Set agent.temp")
    for name, (changed, _) in CASES.items():  # a config of an older version
        assert name in alarms_after(rows_of(changed, changed), {"groups_per_step": 8})


def test_the_console_says_it_once_in_full_and_at_each_step_in_short():
    lines = []
    view, health = View(lines.append), Health(SETTINGS)
    view.start(RunHeader(num_steps=4))
    cut = {"episodes/cut/max_turn_tokens": 44, "episodes/failed": 1}
    for row in rows_of(cut, cut, cut, cut):
        health.take(row)
        view.step(row, health.alarms)
    steps = [line for line in lines if line.startswith("step")]
    assert "failed 1/64" in steps[0] and "health" not in steps[0]
    assert all(line.endswith("health: turns cut 69 %") for line in steps[1:])
    assert sum(line.startswith("warning: 88 of 128 episodes") for line in lines) == 1


def test_the_report_lists_them(tmp_path):
    config = quickstart_with()
    cut = CASES["cut_by_max_turns"][0]
    with RunDirectory.create(tmp_path / "run", to_dict(config)) as run:
        for row in rows_of(cut, cut):
            run.log(row)
    (shown,) = build_figures([load_run(tmp_path / "run")], recipes=[None])["runs"]
    text = "Since step 1: 32 of 128 episodes were cut after agent.max_turns=5 turns."
    assert shown["health"] == [{"text": f"{text} Set agent.max_turns=10.", "level": "warning"}]
    assert json.dumps(shown["health"])
