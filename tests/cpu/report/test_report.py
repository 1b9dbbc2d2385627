"""A report is one file that needs nothing, runs nothing foreign, and says what the runs say."""

import base64
import hashlib
import json
import math
import re
import shutil
import statistics
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
from html_pages import Page, drawn
from synthetic_runs import CONTROL, HOSTILE, decode_token, write_run

from lockstep.cli import main
from lockstep.config import flatten
from lockstep.errors import RunError
from lockstep.observe.metrics import find_metric
from lockstep.report.document import write_report
from lockstep.store.files import decode_number
from lockstep.store.run import RunDirectory, load_run
from lockstep.store.trajectories import read_summaries
from lockstep.types import Task

TOKENIZER = SimpleNamespace(decode=lambda ids: decode_token(ids[0]), control_ids=CONTROL)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of one experiment, one of another; the first run's texts are hostile."""
    place = tmp_path_factory.mktemp("runs")
    return [
        write_run(place / "slow-0", seed=0, is_hostile=True),
        write_run(place / "slow-1", seed=1),
        write_run(place / "fast-0", seed=0, learning_rate=2e-3, noise=0.2),
    ]


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    """(html, document) of a report over all three."""
    out = tmp_path_factory.mktemp("report") / "report.html"
    assert write_report(runs, out, tokenizers=[TOKENIZER] * len(runs)) == out
    return out.read_text(), json.loads(out.with_suffix(".json").read_text())


# -- the file ---------------------------------------------------------------------------------


def test_the_page_refers_to_nothing_outside_of_itself(written):
    html, _ = written
    page = Page(html)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), tag
        assert "src" not in attributes, tag
        assert attributes.get("href", "#").startswith("#"), tag
    code = [text for tag, attributes, text in page.raw if "type" not in attributes]
    assert len(code) == 2
    for text in code:
        for word in ("http", "//cdn", "url(", "@import", "fetch(", "XMLHttpRequest", "innerHTML"):
            assert word not in text, word


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else(written):
    page = Page(written[0])
    (policy,) = (a["content"] for _, a in page.tags if "http-equiv" in a)
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    code = [text for _, attributes, text in page.raw if "type" not in attributes]
    hashes = [base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in code]
    assert sorted(allowed) == sorted(hashes)
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy


def test_hostile_text_stays_text(written):
    html, document = written
    assert HOSTILE in json.dumps(document, ensure_ascii=False).replace('\\"', '"')
    page = Page(html)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "<img" not in html and "<!-- " not in html and "alert(1)</script" not in html
    data = [text for _, attributes, text in page.raw if attributes.get("type")]
    assert json.loads("".join(data)) == document, "the page and the .json file say the same"


def test_a_hostile_title_stays_text(runs, tmp_path):
    title = "</title><script>alert(1)</script> %DATA% %STYLE%"
    out = write_report(runs[:1], tmp_path / "r.html", title=title)
    page = Page(out.read_text())
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "%DATA% %STYLE% - Lockstep report</title>" in out.read_text()


def test_every_part_of_the_page_is_shipped_and_in_ascii():
    for name in ("page.html", "style.css", "base.js", "charts.js", "trajectories.js", "page.js"):
        files("lockstep.report").joinpath(name).read_text("ascii")


def test_a_run_without_a_step_can_be_reported(tmp_path):
    with RunDirectory.create(tmp_path / "open", {"recipe": "x"}):
        write_report([load_run(tmp_path / "open")], tmp_path / "empty.html")
    document = json.loads((tmp_path / "empty.json").read_text())
    assert document["headlines"] == [] and document["trajectories"] == []
    assert (tmp_path / "empty.html").stat().st_size < 100_000


# -- what it says -----------------------------------------------------------------------------


def test_the_metrics_are_those_of_the_runs(runs, written):
    for run, said in zip(runs, written[1]["runs"], strict=True):
        assert said["steps"] == [row["step"] for row in run.metrics] and said["stride"] == 1
        assert said["num_steps"] == 12, "a row of held-out figures alone is no step"
        for name, values in said["columns"].items():
            assert values == [row.get(name) for row in run.metrics], name
        assert set(said["columns"]) == {n for row in run.metrics for n in row} - {"step"}
        assert said["config"] == run.config and said["environment"] == run.environment
        assert set(said["columns"]) <= set(written[1]["metrics"]), "each has its meaning"


def test_the_trajectories_are_those_of_the_runs(runs, written):
    for said in written[1]["trajectories"]:
        stored = [
            record
            for record in runs[said["run"]].trajectories(said["step"], split=said["split"])
            if record.trajectory.id == said["id"]
        ]
        (record,) = stored
        trajectory = record.trajectory
        assert said["task"] == record.task.payload and said["status"] == trajectory.status
        assert decode_number(said["reward"]) == trajectory.reward or math.isnan(trajectory.reward)
        assert dict(said["rewards"]) == trajectory.rewards
        assert len(said["segments"]) == len(trajectory.segments)
        for index, (mine, segment) in enumerate(
            zip(said["segments"], trajectory.segments, strict=True)
        ):
            assert mine["token_ids"] == segment.token_ids.tolist()
            assert mine["parent"] == segment.parent
            assert mine["messages"] == [m.to_dict() for m in segment.messages]
            for name, values in (
                ("rollout_logprobs", segment.logprobs),
                ("trainer_logprobs", record.trainer_logprobs[index]),
                ("advantages", record.advantages[index]),
                ("importance_weights", record.importance_weights[index]),
            ):
                assert (mine[name] is None) == (values is None)
                if values is not None:
                    assert np.array_equal(np.array(mine[name], np.float32), values)


def test_ids_have_their_text_and_control_tokens_are_marked(written):
    document = written[1]
    for run, vocabulary in enumerate(document["vocabularies"]):
        used = {
            i
            for t in document["trajectories"]
            if t["run"] == run
            for segment in t["segments"]
            for i in segment["token_ids"]
        }
        assert vocabulary["texts"] == {str(i): decode_token(i) for i in used}
        assert vocabulary["control_ids"] == sorted(used & CONTROL)


def test_runs_that_differ_in_the_seed_alone_are_one_group(written):
    document = written[1]
    assert [group["runs"] for group in document["groups"]] == [[0, 1], [2]]
    assert [group["label"] for group in document["groups"]] == [
        "learning_rate=0.001", "learning_rate=0.002",
    ]  # fmt: skip
    assert document["groups"][0]["seeds"] == [0, 1]
    assert document["config_differences"] == [
        {"key": "seed", "values": [0, 1, 0]},
        {"key": "optimizer.learning_rate", "values": [1e-3, 1e-3, 2e-3]},
    ]


def test_headlines_are_computed_from_the_rows(runs, written):
    reward, sampled, greedy, mismatch, seconds, speed = written[1]["headlines"]
    lasts = [statistics.fmean(run.column("reward/mean")[1][-10:]) for run in runs]
    first = reward["values"][0]
    assert first["value"] == pytest.approx(statistics.fmean(lasts[:2]))
    assert (first["low"], first["high"]) == (min(lasts[:2]), max(lasts[:2]))
    assert reward["values"][1]["value"] == lasts[2] and reward["values"][1]["low"] is None
    evaluated = runs[2].column("eval/greedy/mean@1")[1]
    assert greedy["values"][1] == {
        "value": evaluated[-1], "low": None, "high": None, "start": evaluated[0], "level": None,
    }  # fmt: skip
    assert sampled["title"] == "Held-out, sampled"
    worst = max(max(abs(r["mismatch/k1"]), r["mismatch/k2"], r["mismatch/k3"])
                for r in runs[2].metrics if "mismatch/k1" in r)  # fmt: skip
    assert mismatch["values"][1]["value"] == worst and worst > 0.01
    assert [v["level"] for v in mismatch["values"]] == ["ok", "warning"]
    assert seconds["values"][1]["value"] == sum(runs[2].column("time/step_seconds")[1])
    assert speed["unit"] == "tokens/s"


def test_values_that_are_not_finite_are_said_and_not_dropped(tmp_path):
    with RunDirectory.create(tmp_path / "run", {"recipe": "x"}) as writer:
        writer.log({"step": 0, "train/loss": math.nan, "train/grad_norm": math.inf})
        writer.log({"step": 1, "train/loss": 0.5})
    write_report([load_run(tmp_path / "run")], tmp_path / "r.html")
    columns = json.loads((tmp_path / "r.json").read_text())["runs"][0]["columns"]
    assert columns == {"train/loss": ["NaN", 0.5], "train/grad_norm": ["Infinity", None]}


def test_a_long_run_is_thinned_to_means(tmp_path):
    with RunDirectory.create(tmp_path / "run", {"recipe": "x"}) as writer:
        for step in range(2500):
            writer.log({"step": step, "reward/mean": step})
    write_report([load_run(tmp_path / "run")], tmp_path / "r.html")
    (run,) = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert run["stride"] == 3 and len(run["steps"]) == 834 and run["num_steps"] == 2500
    assert run["columns"]["reward/mean"][:2] == [1.0, 4.0]


# -- the choice of trajectories ---------------------------------------------------------------


def test_the_extremes_are_always_shown(runs, tmp_path):
    write_report(runs[2:], tmp_path / "r.html", num_trajectories=20)
    document = json.loads((tmp_path / "r.json").read_text())
    assert len(document["trajectories"]) == 20
    assert document["num_stored_trajectories"] == sum(1 for _ in runs[2].summaries()) + sum(
        1 for _ in runs[2].summaries(split="greedy")
    )
    shown = {(t["step"], t["id"], t["split"]) for t in document["trajectories"]}
    assert len(shown) == 20
    stored = [*runs[2].summaries()]
    worst = max(stored, key=lambda s: s.max_abs_logprob_diff or 0)
    assert (worst.step, worst.id, "train") in shown
    rewards = [t["reward"] for t in document["trajectories"] if "best reward" in t["why"]]
    assert rewards and max(s.reward for s in stored) in rewards
    assert {w for t in document["trajectories"] for w in t["why"]} >= {
        "worst mismatch", "best reward", "worst reward", "evaluation", "sample",
    }  # fmt: skip


def test_after_an_alarm_the_worst_mismatch_is_shown_first_and_the_page_says_why(written):
    document = written[1]
    first = document["trajectories"][document["first"]["index"]]
    assert first["run"] == 2, "the run with the worst alarm"
    assert first["why"][0] == "worst mismatch"
    assert document["first"]["why"].startswith("the largest difference between")


def test_without_an_alarm_a_success_beside_failures_with_the_most_turns_is_shown_first(
    runs, tmp_path
):
    write_report(runs[:1], tmp_path / "r.html")
    document = json.loads((tmp_path / "r.json").read_text())
    first = document["trajectories"][document["first"]["index"]]
    stored = [summary for summary in runs[0].summaries() if math.isfinite(summary.reward)]
    rewards = {}
    for each in stored:
        rewards.setdefault((each.step, each.group), []).append(each.reward)
    mixed = {key: max(values) for key, values in rewards.items() if min(values) < max(values)}
    last = max(step for step, _ in mixed)
    wins = [e for e in stored if e.step == last and e.reward == mixed.get((last, e.group))]
    wins = [e for e in wins if e.reward == max(each.reward for each in wins)]
    (own,) = [e for e in wins if e.id == first["id"]]
    assert first["step"] == last and own.num_turns == max(each.num_turns for each in wins)
    assert "the success with the most turns" in document["first"]["why"]


def test_the_expected_answer_is_the_answer_of_the_tasks_payload():
    for payload, expected in (
        ({"answer": "Oslo"}, "Oslo"), ({"answer": ["a", 2]}, '["a", 2]'), ({}, None),
    ):  # fmt: skip
        assert Task(id="t", payload=payload).reference == expected


def test_settings_that_differ_from_the_recipe_are_marked(runs, tmp_path):
    recipe = {**flatten(runs[0].config), "steps": 150, "only.there": 1}
    write_report(runs[:2], tmp_path / "r.html", recipes=[recipe, None])
    first, second = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert first["changed"] == [
        {"key": "steps", "values": [12, 150]}, {"key": "only.there", "values": [None, 1]},
    ]  # fmt: skip
    assert second["changed"] is None, "its recipe is not known"


def test_the_budget_of_tokens_holds_and_says_what_it_left_out(runs, tmp_path):
    write_report(runs[:1], tmp_path / "r.html", num_tokens=400)
    document = json.loads((tmp_path / "r.json").read_text())
    tokens = [sum(len(s["token_ids"]) for s in t["segments"]) for t in document["trajectories"]]
    assert 0 < sum(tokens) <= 400 and document["num_left_out_for_size"] > 0
    write_report(runs[:1], tmp_path / "one.html", num_tokens=1)
    assert len(json.loads((tmp_path / "one.json").read_text())["trajectories"]) == 1


def test_a_damaged_part_costs_its_trajectories_and_not_the_report(runs, tmp_path, capsys):
    run = shutil.copytree(runs[1].path, tmp_path / "run")
    parts = sorted((run / "trajectories").glob("*.parquet"))
    parts[0].write_bytes(parts[0].read_bytes()[:-20])

    assert main(["report", str(run), "--out", str(tmp_path / "r.html")]) == 0

    said = " ".join(capsys.readouterr().err.split())
    assert f"{parts[0].name}: the part is damaged" in said
    document = json.loads((tmp_path / "r.json").read_text())
    assert len(document["damaged"]) == 1 and parts[0].name in document["damaged"][0]
    whole = sum(1 for part in parts[1:] for _ in read_summaries(part))
    assert document["num_stored_trajectories"] == whole and document["trajectories"]


def test_without_a_vocabulary_ids_are_shown(runs, tmp_path):
    write_report(runs[:1], tmp_path / "r.html")
    assert json.loads((tmp_path / "r.json").read_text())["vocabularies"] == [None]


def test_wrong_arguments_are_named(runs, tmp_path):
    with pytest.raises(RunError, match="at least one run"):
        write_report([], tmp_path / "r.html")
    with pytest.raises(RunError, match=r"\b3\b.*\b1\b"):
        write_report(runs, tmp_path / "r.html", tokenizers=[TOKENIZER])


# -- in a browser -----------------------------------------------------------------------------


def test_a_browser_draws_the_page_without_an_error_and_runs_no_foreign_script(runs, tmp_path):
    out = write_report(runs, tmp_path / "report.html", tokenizers=[TOKENIZER] * len(runs))
    body = drawn(out.as_uri(), tmp_path / "profile")
    assert body.count('class="curve"') >= 20, "two groups in ten charts"
    assert body.count('class="card tile"') == 6
    assert body.count('role="option"') > 50
    assert "<img" not in body


def test_every_curve_is_of_a_metric_that_a_run_can_have():
    script = files("lockstep.report").joinpath("charts.js").read_text("ascii")
    names = re.findall(r'(?:named|ratio)\("([^"]+)"', script)
    assert len(names) > 20 and all(map(find_metric, names))
    assert "critic/explained_variance" in names
