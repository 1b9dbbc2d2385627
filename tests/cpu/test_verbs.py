"""Every verb of the command line is a function that takes what the command takes."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

import lockstep
from lockstep.cli import COMMANDS, OK, main
from lockstep.errors import ConfigError, UnknownNameError

FUNCTIONS = {
    "train": "train",
    "sft": "train_supervised",
    "eval": "evaluate",
    "report": "write_report",
    "doctor": "diagnose",
    "noise": "measure_noise",
    "replay": "replay",
    "render": "render",
    "export": "export",
    "serve": "serve",
    "fetch": "fetch",
    "recipes": "list_recipes",
}
SMALL = {"steps": 2, "groups_per_step": 1, "group_size": 2, "evaluation": {"num_tasks": 1}}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return lockstep.train("quickstart", out=tmp_path_factory.mktemp("run") / "a", **SMALL)


def test_each_verb_has_its_function_and_dir_lists_them():
    missing = set(COMMANDS) - set(FUNCTIONS) - {"completion"}
    assert not missing and set(FUNCTIONS.values()) <= set(dir(lockstep))
    assert dir(lockstep) == sorted([*lockstep.__all__, "__version__"])
    for name in dir(lockstep):
        assert getattr(lockstep, name) is not None
    assert lockstep.__version__ == importlib.metadata.version("lockstep-rl")


def test_a_mistyped_function_is_answered_with_its_name():
    with pytest.raises(AttributeError, match=r"lockstep\.evaluate"):
        lockstep.evalute  # noqa: B018


def test_the_import_is_lazy_and_dir_and_version_keep_it_so():
    code = (
        "import sys, lockstep; dir(lockstep); lockstep.__version__\n"
        "heavy = {'torch', 'numpy', 'rich', 'pyarrow', 'IPython'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_and_an_outcome_stand_for_their_path(outcome):
    run = lockstep.load(outcome)
    assert os.fspath(run) == os.fspath(outcome) == str(outcome.path) and outcome.run == run
    assert lockstep.diagnose(outcome).outcome == "consistent"


def test_settings_are_keywords_as_in_a_file(outcome):
    config = outcome.run.config
    assert config["steps"] == 2 and config["evaluation"]["num_tasks"] == 1
    with pytest.raises(ConfigError, match="group_sise"):
        lockstep.train("quickstart", group_sise=3)
    with pytest.raises(ConfigError, match="quickstert"):
        lockstep.train("quickstert")


def test_results_have_a_short_repr_and_a_page(outcome):
    run = outcome.run
    diagnosis = lockstep.diagnose(outcome)
    replay = lockstep.replay(f"{outcome.path}#0")
    record = next(run.trajectories(0))
    assert repr(outcome).startswith("Outcome(done, 2 steps, reward ")
    assert repr(run) == f"Run({str(run.path)!r}, 2 steps)"
    assert repr(diagnosis).startswith("Diagnosis(consistent: no cause found, ")
    assert repr(replay).startswith("Replay(Trajectory(")
    for shown in (outcome, run, diagnosis, replay, record, run.plot("reward/mean")):
        assert len(repr(shown)) < 400 and shown._repr_html_().startswith("<")
    assert "<svg" in run._repr_html_() and "report.html" in outcome._repr_html_()


def test_a_diagnosis_with_causes_shows_share_and_remedy():
    diagnosis = lockstep.diagnose("example")
    page = diagnosis._repr_html_()
    assert "reencoded" in repr(diagnosis) and "likely" in page and "remedy" in page


def test_a_mistyped_metric_is_answered_with_its_name(outcome):
    run = outcome.run
    for ask in (
        lambda: run.column("rewrd/mean"),
        lambda: run.plot("rewrd/mean"),
        lambda: run.metrics[-2]["rewrd/mean"],
    ):
        with pytest.raises(UnknownNameError, match="'reward/mean'"):
            ask()
    with pytest.raises(UnknownNameError, match="'model'"):
        run.config["modle"]
    with pytest.raises(UnknownNameError, match="'steps'"):
        outcome.summary["step"]
    assert run.values("rewrd/mean") == []


def test_functions_return_what_their_commands_print(outcome, tmp_path, capsys):
    path = str(outcome.path)
    evaluation = lockstep.evaluate(f"{path}@2", evaluation={"num_tasks": 2})
    capsys.readouterr()
    assert main(["eval", f"{path}@2", "evaluation.num_tasks=2", "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"] == evaluation.metrics and found["checkpoint"] == evaluation.checkpoint
    assert evaluation._repr_html_().startswith("<")

    assert lockstep.write_report(outcome, out=tmp_path / "r.html").stat().st_size > 10_000
    with pytest.raises(ConfigError, match="needs a run"):
        lockstep.write_report()
    assert lockstep.export(outcome, tmp_path / "model").checkpoint == "step-000002"
    assert (tmp_path / "model" / "config.json").is_file()

    assert main(["recipes", "--json"]) == OK
    assert json.loads(capsys.readouterr().out) == lockstep.list_recipes()


def test_a_dialogue_is_rendered_from_lists_as_from_files(tmp_path, capsys):
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    tools = [{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}]
    file = tmp_path / "dialogue.json"
    file.write_text(json.dumps({"messages": messages, "tools": tools}))
    rendered = lockstep.render("tiny-gpt-oss", messages, tools=tools)
    assert main(["render", "tiny-gpt-oss", str(file), "--json"]) == OK
    assert json.loads(capsys.readouterr().out) == rendered.to_json()
    assert "user" in rendered._repr_html_()
    with pytest.raises(ConfigError, match="tools must be one, too"):
        lockstep.render("tiny-gpt-oss", str(file), tools=tools)


def test_a_server_takes_settings_as_keywords():
    from lockstep.model_server import find_served

    served = find_served("tiny-qwen3", ["gateway.port=0"], tree={"max_tokens": 64, "seed": 3})
    assert (served.config.max_tokens, served.config.seed) == (64, 3)
