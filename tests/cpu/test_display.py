"""Results show themselves in a notebook, and answer a mistyped name."""

import math
import sys
from xml.etree import ElementTree

import pytest

from lockstep.display import Chart, Named, chart_of, number, table
from lockstep.errors import LockstepError, MissingExtraError, UnknownNameError
from lockstep.types import Message, Trajectory


def drawn(values):
    return Chart({"a<b": (list(range(len(values))), values), "c": ([0, 2], [1.0, 0.0])}, 200)


def test_a_chart_has_a_curve_per_series_and_is_written_in_the_form_of_the_ending(tmp_path):
    chart = drawn([0.0, 0.5, 1.0])
    (axes,) = chart.figure().axes
    assert [line.get_label() for line in axes.lines] == ["a<b 1", "c 0"]
    assert axes.get_xlim()[1] == 200 and "a<b" not in chart._repr_html_()
    assert ElementTree.parse(chart.save(tmp_path / "c.svg")).getroot().tag.endswith("svg")


def test_a_long_curve_is_drawn_as_its_running_mean_and_faintly_as_it_is():
    raw, mean, _ = drawn([step % 2 for step in range(100)]).figure().axes[0].lines
    assert set(mean.get_ydata()[10:]) == {0.5} and raw.get_alpha() == 0.25


@pytest.mark.parametrize(
    "values", [[], [1.0], [0.0, 0.0], [math.nan, math.nan], [1e30, -1e30], [0.3, math.inf, 0.4]]
)
def test_a_chart_of_few_equal_or_impossible_values_is_drawn(values):
    ElementTree.fromstring(drawn(values)._repr_html_())


def test_without_matplotlib_a_chart_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "lockstep-rl[plot]" in drawn([1.0])._repr_html_()
    with pytest.raises(MissingExtraError):
        drawn([1.0]).save(tmp_path / "c.svg")


def test_without_names_a_chart_shows_reward_and_held_out_means_or_else_the_loss():
    row = {"step": 0, "train/loss": 1.0, "time/step_seconds": 2.0}
    assert list(chart_of([row]).series) == ["train/loss"]
    row |= {"reward/mean": 0.5, "eval/greedy/mean@1": 0.4, "eval/greedy/mean@1/low": 0.1}
    assert list(chart_of([row]).series) == ["reward/mean", "eval/greedy/mean@1"]


def test_text_of_a_model_is_escaped_in_a_table():
    assert "&lt;script&gt;" in table([("<script>",)]) and "<script>" not in table([("<script>",)])
    trajectory = Trajectory(id="t")
    trajectory.observe([1], messages=[Message(role="user", content="<img onerror=x>")])
    assert "<img" not in trajectory._repr_html_()


def test_a_trajectory_has_a_short_repr_and_a_row_per_segment():
    trajectory = Trajectory(id="demo")
    prompt = trajectory.observe([1, 2], messages=[Message(role="user", content="What is 2 + 3?")])
    reply = [Message(role="assistant", content="5")]
    leaf = trajectory.record(
        [3, 4], logprobs=[-0.5, -0.1], parent=prompt, prompt_ids=[1, 2], messages=reply
    )
    trajectory.rewards = {leaf: 1.0}
    assert repr(trajectory) == "Trajectory('demo', running, 1 turns, 4 tokens, reward 1)"
    page = trajectory._repr_html_()
    assert page.count("<tr>") == 3 and "assistant: 5" in page and "sampled, turn 1" in page


def test_a_mistyped_name_is_answered_with_the_nearest():
    named = Named({"reward/mean": 0.5, "train/loss": 1.0})
    assert named["train/loss"] == 1.0 and named.get("loss") is None and "x" not in named
    with pytest.raises(UnknownNameError, match=r"'rewrd/mean'.*'reward/mean"):
        named["rewrd/mean"]
    with pytest.raises(KeyError, match="reward/mean, train/loss"):
        named["zzzzzz"]
    with pytest.raises(LockstepError, match="It is empty"):
        Named()["zzzzzz"]


def test_numbers_are_read_at_a_glance():
    assert [number(v) for v in (3.1e-9, -0.25, 1234.5, True, math.inf)] == [
        "3.1e-09",
        "-0.25",
        "1,234",
        "True",
        "inf",
    ]
