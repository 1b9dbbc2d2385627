"""Several runs over one base model: each has the bits that it has alone, whatever the others do."""

import json
import os
import signal

import pytest
from quickstarts import SHORT, quickstart_with
from safetensors.torch import load_file

from lockstep.cli import main
from lockstep.errors import ConfigError, RolloutError, RunError
from lockstep.run.hooks import RunHooks, hooked
from lockstep.run.train import train, train_side_by_side
from lockstep.store.run import load_run

SMALL = (*SHORT, "steps=3", "checkpoint.every=1", "contract=true-on-policy", "lora.rank=4")
OWN = {"a": ("seed=1", "trainer.lr=3e-3"), "b": ("seed=2", "lora.rank=6", "groups_per_step=3")}
UNLIKE = ("time/", "engine/", "doctor/")
"""Metrics of when a step was made and beside what, and of a look that an interrupt may cut off."""


def config(name, *settings):
    own = [*OWN.get(name, ()), *settings]
    return quickstart_with(*SMALL, f"name={name}", *own)


def rows_of(path):
    return [
        {name: value for name, value in row.items() if not name.startswith(UNLIKE)}
        for row in load_run(path).metrics
    ]


def weights_of(path):
    checkpoint = load_run(path).checkpoints()[3]
    return {file.name: load_file(file) for file in sorted(checkpoint.rglob("*.safetensors"))}


def assert_same_bits(mine, theirs):
    assert rows_of(mine) == rows_of(theirs)
    ours, others = weights_of(mine), weights_of(theirs)
    assert ours.keys() == others.keys() and len(ours) == 2
    for file, tensors in ours.items():
        for name, tensor in tensors.items():
            assert tensor.equal(others[file][name]), (file, name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return {name: train(config(name), out=folder / name, view="json").path for name in OWN}


def test_each_run_has_the_metrics_and_weights_that_it_has_alone(alone, tmp_path, capsys):
    configs = {tmp_path / name: config(name) for name in OWN}
    ended = train_side_by_side(configs)
    assert [outcome.status for outcome in ended.values()] == ["done", "done"]
    for name in OWN:
        assert_same_bits(tmp_path / name, alone[name])
        assert (tmp_path / name / "report.html").is_file()
    shown = capsys.readouterr().out
    assert "a step 2/3  reward" in shown and "b step 2/3  reward" in shown


class Failing(RunHooks):
    """Makes the second update of the run with this learning rate fail."""

    num_updates = 0

    def change_rows(self, rows, renderer, log_probs):
        if len(rows) == 8:
            self.num_updates += 1
            if self.num_updates == 2:
                raise RolloutError("its reward has gone away")
        return list(rows)


def test_a_run_that_fails_leaves_the_other_as_it_is_and_both_are_continued(alone, tmp_path):
    configs = {tmp_path / name: config(name) for name in OWN}
    with hooked(Failing()):
        ended = train_side_by_side(configs, view="json")
    assert str(ended[tmp_path / "a"]) == "its reward has gone away"
    assert ended[tmp_path / "b"].status == "done"
    assert_same_bits(tmp_path / "b", alone["b"])
    ended = train_side_by_side(configs, resume=True, view="json")
    assert [outcome.status for outcome in ended.values()] == ["done", "done"]
    for name in OWN:
        assert_same_bits(tmp_path / name, alone[name])


class Interrupted(RunHooks):
    """Ctrl-C in the third update of either run."""

    num_updates = 0

    def after_update(self, rows, log_probs):
        self.num_updates += 1
        if self.num_updates == 3:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_saves_all_runs_and_they_continue_from_the_command_line(
    alone, tmp_path, capsys
):
    settings = ["train", "quickstart", "name=a", *OWN["a"], *SMALL, f"out={tmp_path}", "--json"]
    with hooked(Interrupted()):
        code = main([*settings, "--beside", f"name=b {' '.join(OWN['b'])} trainer.lr=2e-2"])
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 130 and [said["run"] for said in told] == [f"{tmp_path}/a", f"{tmp_path}/b"]
    assert all(0 < said["steps"] < 3 for said in told)
    runs = [f"{tmp_path}/a", "resume=true", "--json", "--beside", f"{tmp_path}/b"]
    assert main(["train", *runs]) == 0
    assert_same_bits(tmp_path / "a", alone["a"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("name=a", "need different names; these have a, a"),
        ("dtype=bfloat16", "dtype is float32 and bfloat16"),
        ("engine.kv_cache_tokens=4096", "engine.kv_cache_tokens is 0 and 4096"),
        ("lora=none", "each needs an adapter of its own. Set lora.rank=16"),
        ("max_staleness=1 contract=auto", "contract is true-on-policy and auto"),
    ],
)
def test_runs_that_cannot_share_a_model_are_refused_before_one_is_loaded(
    settings, message, tmp_path, capsys
):
    words = ["train", "quickstart", "name=a", *SMALL, f"out={tmp_path}"]
    assert main([*words, "--beside", f"name=b {settings}"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("engine.replicas=1",), "engine=embedded.*engine.replicas"),
        (("max_staleness=1", "contract=auto"), "engine.dtype.*max_staleness"),
        (("engine.share_device=true",), "the engine cannot sleep while others sample"),
        (("parallel.processes=2",), "one process"),
    ],
)
def test_settings_of_a_run_that_needs_the_process_for_itself_are_refused(
    settings, message, tmp_path
):
    configs = {tmp_path / name: config(name, *settings) for name in OWN}
    with pytest.raises(ConfigError, match=message):
        train_side_by_side(configs)


def test_a_directory_that_holds_a_run_is_refused_before_any_begins(alone, tmp_path):
    configs = {tmp_path / "a": config("a"), alone["b"]: config("b")}
    with pytest.raises(RunError, match="holds a run already"):
        train_side_by_side(configs)
    assert not list(tmp_path.iterdir())


def test_the_plan_of_all_runs_is_shown_and_nothing_starts(tmp_path, capsys):
    words = ["train", "quickstart", "name=a", *SMALL, f"out={tmp_path}", "--dry-run", "--json"]
    assert main([*words, "--beside", "name=b seed=7"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [config["seed"] for config in shown.values()] == [0, 7]
    assert main([*words, "from=x", "--beside", "name=b"]) == 2
    assert "from=RUN starts one run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
