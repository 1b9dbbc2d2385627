"""The command line as a user types it: help, bad input, runs, forks, resumes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from command_line import lockstep, refusal
from full_counts import PROOF
from quickstarts import SHORT, quickstart_with
from run_rows import timed_rows, without_time

from lockstep import train
from lockstep.cli import BAD_INPUT, OK, main
from lockstep.errors import ConfigError
from lockstep.recipes.registry import RECIPES
from lockstep.store.metrics import read_rows
from lockstep.store.run import load_run

SMALL = (*SHORT, "steps=2", "evaluation.num_tasks=4", "checkpoint.every=1")
VERBS = (
    "train", "sft", "eval", "report", "doctor", "replay", "render", "export", "recipes",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "run"
    assert lockstep("train", "quickstart", *SMALL, f"out={path}") == OK
    return path


def test_help_names_every_verb_and_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(verb in text for verb in VERBS)
    assert "exit codes" in text


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb, capsys):
    try:
        main([verb, "--help"])
    except SystemExit as stop:
        assert stop.code == 0
    assert f"example: lockstep {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["train", "quickstart", "--help"], ["recipes"]])
def test_a_reader_that_leaves_early_sees_no_traceback(words):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lockstep.cli", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.stderr == ""


def test_help_of_a_recipe_lists_every_setting_with_its_text(capsys):
    assert lockstep("train", "quickstart", "--help", "steps=7") == OK
    text = capsys.readouterr().out
    assert "steps=7  (int)" in text
    assert "trainer.lr=0.001  (float)" in text
    assert "Peak learning rate" in text


def test_help_dry_run_and_errors_load_no_torch(tmp_path):
    code = (
        "import sys\nfrom lockstep.cli import main\n"
        "for words in (['train', 'quickstart', '--help'], ['recipes'], "
        "['train', 'quickstart', '--dry-run'], ['train', 'quickstart', 'stepz=1']):\n"
        "    main(words)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_dry_run_prints_the_config_and_the_plan(capsys):
    code, out, _ = lockstep("train", "quickstart", "--dry-run", "--json", "seed=3", capsys=capsys)
    found = json.loads(out)
    assert code == OK
    assert found["config"]["seed"] == 3
    assert any("64 trajectories" in line for line in found["plan"])


def test_a_run_leaves_what_the_docs_say(run):
    names = {p.name for p in run.iterdir()}
    wanted = {"config.json", "environment.json", "metrics.jsonl", "trajectories", "checkpoints"}
    assert wanted | {"report.html"} <= names
    rows = timed_rows(run)
    assert [r["step"] for r in rows] == [-1, 0, 1, 2]
    assert "eval/sampled/mean@1" in rows[0]
    assert "eval/greedy/mean@1" in rows[-1]


def test_every_metric_of_a_run_is_in_the_table(run):
    from lockstep.observe.metrics import find_metric

    for row in timed_rows(run):
        assert all(map(find_metric, row))


def test_sampler_and_trainer_agree_in_every_bit_and_it_was_measured(run):
    steps = [r for r in timed_rows(run) if "mismatch/k3" in r]
    assert len(steps) == 2
    for row in steps:
        assert row["mismatch/compared_tokens"] == row["tokens/sampled"] > 50
        assert row["mismatch/unequal_tokens"] == row["mismatch/max_abs_diff"] == 0
        assert row["mismatch/k1"] == row["mismatch/k2"] == row["mismatch/k3"] == 0
        assert row["mismatch/nonfinite_tokens"] == 0


def test_the_last_line_is_the_run_directory(tmp_path, capsys):
    code, out, _ = lockstep("train", "quickstart", *SMALL, f"out={tmp_path / 'a'}", capsys=capsys)
    assert code == OK
    assert out.splitlines()[-1] == str(tmp_path / "a")


def test_a_run_begins_with_what_is_trained_and_ends_with_what_was_reached(tmp_path, capsys):
    settings = ("groups_per_step=2", "group_size=2", "steps=2", "evaluation.num_tasks=2")
    place = tmp_path / "my run"
    words = ("train", "quickstart", *settings, f"out={place}")
    code, out, _ = lockstep(*words, capsys=capsys)
    lines = out.splitlines()
    assert code == OK
    assert lines[0].startswith("quickstart: trains tiny-gpt-oss on docsearch for 2 steps.")
    assert any("lr 0.001" in s and "advantage grpo, objective ppo_clip" in s for s in lines)
    assert not any(line.startswith(("numerics", "sampler", "memory")) for line in lines)
    assert any(line.startswith("held out, greedy ") and " -> " in line for line in lines)
    assert f"report  {place}/report.html" in lines
    following = [line for line in lines if line.startswith("next    lockstep ")]
    assert len(following) == 3 and all(f"{place}" in line for line in following)
    assert lines[-1] == str(place)
    _, out, _ = lockstep(*words[:-1], "--verbose", f"out={tmp_path / 'b'}", capsys=capsys)
    assert "numerics   true-on-policy" in out
    words = (*words[:-1], "evaluation=none", f"out={tmp_path / 'c'}")
    code, out, _ = lockstep(*words, capsys=capsys)
    assert code == OK and "held out" not in out and "tests      none" in out
    assert all(not name.startswith("eval/") for row in timed_rows(tmp_path / "c") for name in row)
    assert lockstep("eval", str(tmp_path / "c")) == BAD_INPUT
    assert lockstep("eval", str(tmp_path / "c"), "evaluation.num_tasks=2") == OK


def test_json_prints_one_object_with_the_run(tmp_path, capsys):
    code, out, _ = lockstep(
        "train", "quickstart", "--json", *SMALL, f"out={tmp_path / 'a'}", capsys=capsys
    )
    found = json.loads(out)
    assert code == OK
    assert found["run"] == str(tmp_path / "a")
    assert found["steps"] == 2
    assert "eval/sampled/mean@1" in found


def test_a_config_file_repeats_the_run_bit_for_bit(run, tmp_path):
    again = tmp_path / "again"
    assert lockstep("train", run / "config.json", f"out={again}") == OK
    assert without_time(timed_rows(again)) == without_time(timed_rows(run))


def test_a_run_that_was_cut_short_resumes_to_the_same_bits(run, tmp_path):
    """From the checkpoint of step 1 on, with the later rows and parts moved aside."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step-000002")
    assert lockstep("train", copy, "resume=true") == OK
    assert without_time(timed_rows(copy)) == without_time(timed_rows(run))
    assert list((copy / "set-aside").iterdir())
    for name in ("model.safetensors",):
        a = copy / "checkpoints" / "step-000002" / "policy" / name
        assert (
            a.read_bytes() == (run / "checkpoints" / "step-000002" / "policy" / name).read_bytes()
        )


def test_resuming_a_finished_run_changes_nothing(run):
    before = (run / "metrics.jsonl").read_bytes()
    assert lockstep("train", run, "resume=true") == OK
    assert (run / "metrics.jsonl").read_bytes() == before


def test_resuming_before_the_first_checkpoint_begins_again(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints")
    assert lockstep("train", copy, "resume=true") == OK
    assert without_time(timed_rows(copy)) == without_time(timed_rows(run))


def test_a_fork_goes_on_from_a_checkpoint_and_records_what_changed(run, tmp_path, capsys):
    fork = tmp_path / "fork"
    code, _, _ = lockstep("train", f"from={run}@1", "trainer.lr=1e-4", f"out={fork}", capsys=capsys)
    assert code == OK
    assert [r["step"] for r in timed_rows(fork)] == [1, 2]
    facts = json.loads((fork / "environment.json").read_text())
    assert facts["from"]["changed"] == {"trainer.lr": [0.001, 0.0001]}


def test_another_model_trains_with_its_own_format(tmp_path):
    path = tmp_path / "qwen"
    assert lockstep("train", "quickstart", *SMALL, "model=tiny-qwen3", f"out={path}") == OK
    assert timed_rows(path)[1]["mismatch/k3"] < 1e-11


def test_eval_plays_the_held_out_tasks_again(run, capsys):
    code, out, _ = lockstep("eval", f"{run}@2", "--json", capsys=capsys)
    found = json.loads(out)
    assert code == OK
    last = timed_rows(run)[-1]
    assert found["metrics"]["eval/greedy/mean@1"] == last["eval/greedy/mean@1"]
    assert found["metrics"]["eval/sampled/mean@1"] == last["eval/sampled/mean@1"]


def test_eval_samples_at_a_temperature_of_its_own(run, capsys):
    words = ("eval", f"{run}@2", "--json", "evaluation.temperature=0")
    code, out, _ = lockstep(*words, capsys=capsys)
    found = json.loads(out)["metrics"]
    assert code == OK
    assert found["eval/sampled/mean@1"] == found["eval/greedy/mean@1"]


def test_verbs_work_in_a_process_of_their_own(run):
    """Kinds of tasks are known by import: a process that did nothing before must know them too."""
    for words in (["eval", f"{run}@2", "--json"], ["report", str(run), "--json"]):
        command = [sys.executable, "-m", "lockstep.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)


def test_python_has_the_same_verbs(tmp_path):
    code = (
        "import sys, lockstep\n"
        "from lockstep.config import resolve\n"
        "from lockstep.recipes import find_recipe\n"
        "config = resolve(find_recipe('quickstart'), sys.argv[2:])\n"
        "outcome = lockstep.train(config, out=sys.argv[1], view='json')\n"
        "assert outcome.status == 'done'\n"
        "assert len(lockstep.load(outcome.path).metrics) == 4\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run"), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_export_writes_a_checkpoint_that_trains_again(run, tmp_path, capsys):
    out = tmp_path / "hf"
    assert lockstep("export", f"{run}@2", "--hf", out) == OK
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in out.iterdir()}
    assert lockstep("train", "quickstart", f"model={out}", "--dry-run") == OK
    capsys.readouterr()
    assert "not empty" in refusal("export", run, "--hf", out, capsys=capsys)


def test_report_puts_runs_side_by_side(run, tmp_path, capsys):
    page = tmp_path / "both.html"
    assert lockstep("report", run, run, "--out", page) == OK
    assert page.stat().st_size > 10_000


def test_sft_trains_on_a_users_dialogues(tmp_path, capsys):
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Say {w}."},
                {"role": "assistant", "content": w},
            ]
        }
        for w in ("Oslo", "Rome", "Lima", "Paris")
    ]
    path = tmp_path / "dialogues.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, _ = lockstep(
        "sft", "--json", f"sft.path={path}", "sft.steps=3", "sft.rows_per_step=2",
        "model=tiny-gpt-oss", f"out={tmp_path / 'run'}", capsys=capsys,
    )  # fmt: skip
    found = json.loads(out)
    assert code == OK
    run = load_run(tmp_path / "run")
    assert run.config["trainer"]["lr"] == 3e-3  # by the size of the model
    assert run.environment["learning"].startswith("lr 0.003, the usual for supervised training")
    losses = [r["train/loss"] for r in timed_rows(tmp_path / "run")]
    assert losses[-1] < losses[0]
    assert lockstep("train", "quickstart", f"model={found['model']}", "--dry-run") == OK


@pytest.mark.parametrize(
    ("words", "lr"),
    [
        ((), 3e-3),
        (("trainer.lr=1e-5",), 1e-5),
        (("lora.rank=4",), 3e-3),
        (("create=qwen3", "renderer=chatml"), 3e-3),
        (("PATH/mine.yaml",), 2e-3),
        (("PATH/open.yaml",), 3e-3),
    ],
)
def test_a_learning_rate_that_nobody_gives_follows_the_model(tmp_path, capsys, words, lr):
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}\n')
    (tmp_path / "mine.yaml").write_text(f"trainer: {{lr: 2.0e-3}}\nsft: {{path: {ids}}}\n")
    (tmp_path / "open.yaml").write_text(f"sft: {{path: {ids}}}\n")
    words = [word.replace("PATH", str(tmp_path)) for word in words]
    code, out, _ = lockstep("sft", *words, f"sft.path={ids}", "--dry-run", capsys=capsys)
    assert code == OK and json.loads(out)["trainer"]["lr"] == lr


def dry(setting):
    return ["train", "quickstart", setting, "--dry-run"]


BAD = {
    "a misspelt setting": (["train", "quickstart", "stepz=3"], "Did you mean 'steps=3'"),
    "a misspelt recipe": (["train", "quikstart"], "Did you mean 'quickstart'"),
    "no recipe": (["train"], "which recipe, as in"),
    "a task for a recipe": (["train", "mcp"], "task=mcp as a setting"),
    "control characters": (["train", "quick\x1b[2Jstart"], "x1b[2Jstart"),
    "a wrong type": (["train", "quickstart", "steps=ten"], "steps: expected int, found 'ten'"),
    "a lone sample": (["train", "quickstart", "group_size=1"], "group_size=2 or more"),
    "a budget that no row fits": (
        ["train", "quickstart", "trainer.max_tokens_per_microbatch=100"],
        "a row is never split",
    ),
    "a prompt that does not fit": (
        ["train", "quickstart", "max_tokens=20", "agent.max_turn_tokens=8"],
        "no row fits",
    ),
    "more tokens than positions": (
        ["train", "quickstart", "max_tokens=9999"],
        "positions that model=tiny-gpt-oss",
    ),
    "a cache that no episode fits": (
        ["train", "quickstart", "engine.kv_cache_tokens=128"],
        "the longest episode could never run",
    ),
    "a success that no reward reaches": (
        ["train", "quickstart", "evaluation.success_reward=nan"],
        "success_reward=nan must be a finite number",
    ),
    "a negative seed": (dry("seed=-1"), "seed=-1 must be in [0, "),
    "a seed without end": (dry(f"seed={2**63}"), "seed=9223372036854775808 must be in [0, "),
    "greedy training": (dry("agent.temperature=0"), "all alike"),
    "a temperature that overflows": (dry("agent.temperature=1e-40"), "must be 0 or at least 1e-05"),
    "an adapter that is none": (dry("sync.form=adapter"), "the run has no adapter"),
    "weights that nothing moves": (dry("sync.qualify=on"), "shares the trainer's weights"),
    "a logger that is not there": (dry("record.loggers=trackio"), "pip install"),
    "a run to start from that is none": (dry("from=nowhere@2"), "nowhere"),
    "absurd steps": (dry("steps=1000000000000"), "must be in [1, 100000000]"),
    "absurd groups": (dry("group_size=9999999"), "must be in [1, 1000000]"),
    "a place below a file": (dry(f"out={__file__}/run"), "test_cli.py is no directory"),
    "a place for a model below a file": (
        ["sft", "sft.path=x.jsonl", f"out={__file__}/run", "--dry-run"],
        "test_cli.py is no directory",
    ),
    "an unknown engine": (["train", "quickstart", "engine=vlm"], "no such kind"),
    "a misspelt model": (["train", "quickstart", "model=tiny-gpt-os"], "'tiny-gpt-oss'"),
    "another renderer's model": (
        ["train", "quickstart", "renderer=chatml"],
        "lacks the control tokens <|im_start|>",
    ),
    "a missing run": (["eval", "no-such-run"], "no-such-run"),
    "a step in words": (["train", "from=x@last"], "whole number"),
    "a missing plugin": (["train", "quickstart", "--plugin", "no_such_module"], "no_such_module"),
    "sft without data": (["sft"], "dialogues.jsonl: no such file or folder"),
    "a new model without a renderer": (["sft", "create=qwen3"], "Set renderer=KIND"),
    "a new model with an adapter": (
        ["sft", "create=qwen3", "renderer=chatml", "lora.rank=4"],
        "begins with random weights, and lora freezes them",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_paragraph_and_exit_code_2(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words, message = BAD[case]
    said = refusal(*words, capsys=capsys)
    assert message in said and "Traceback" not in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["report", "runs/none", "--out", f"{__file__}/x.html"],
        ["report", "runs/none", "--out", "."],
        ["doctor", "example", "--out", f"{__file__}/x.html"],
        ["export", "runs/none", "--hf", f"{__file__}/model"],
        ["export", "runs/none", "--hf", __file__],
    ],
    ids=" ".join,
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read(words, capsys):
    said = refusal(*words, capsys=capsys)
    assert "cannot be written: " in said and "runs/none is not" not in said


def test_malformed_questions_name_file_and_line(tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("The harbour opens at six.\n")
    (tmp_path / "q.jsonl").write_text('{"id": "1", "question": "?"\n')
    words = [f"task.docs={tmp_path / 'docs'}", f"task.questions={tmp_path / 'q.jsonl'}"]
    said = refusal("train", "docsearch", *words, capsys=capsys)
    assert "q.jsonl:1" in said.replace(" ", "")


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert "mamba" in refusal("train", "quickstart", f"model={tmp_path}", capsys=capsys)


def test_a_second_run_in_one_directory_is_refused(run, capsys):
    words = ["train", "quickstart", *SMALL, f"out={run}"]
    assert "resume=true" in refusal(*words, capsys=capsys)


def test_resuming_with_other_settings_points_to_from(run, capsys):
    said = refusal("train", run, "resume=true", "trainer.lr=1", capsys=capsys)
    assert "from=" in said and "trainer.lr: 0.001 -> 1.0" in said
    with pytest.raises(ConfigError, match=r"trainer\.lr: 0\.001 -> 1\.0"):
        train(run, resume=True, trainer={"lr": 1.0})
    with pytest.raises(ConfigError, match=r"steps: 2 -> 3"):
        train(quickstart_with(*SMALL, "steps=3"), out=run, resume=True)
    assert lockstep("train", "quickstart", *SMALL, f"out={run}", "resume=true") == OK
    assert train(load_run(run), resume=True, view="json").status == "done"


@pytest.mark.parametrize("name", ["SIGTERM", *["SIGINT"] * PROOF])
def test_an_interrupted_run_is_resumable_and_ends_equal(name, tmp_path):
    """Interrupted at a moment of the clock's choosing, resumed, compared with a run without."""
    words = ["train", "quickstart", "steps=15", *SMALL[1:], "evaluation.at_start=false"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert lockstep(*words, f"out={whole}") == OK
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep.cli", *words, f"out={cut}"], stdout=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN),  # as a script's "&" does
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if len(list(read_rows(cut / "metrics.jsonl"))) >= 2:  # whole lines of a growing file
            break
        time.sleep(0.01)
    process.send_signal(getattr(signal, name))
    said = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 130
    assert f"next    lockstep train {cut} resume=true " in said
    assert lockstep("train", cut, "resume=true") == OK
    assert without_time(timed_rows(cut)) == without_time(timed_rows(whole))


def test_the_record_holds_the_trainers_own_log_probs(tmp_path, capsys):
    """Not a copy of the rollout's: the report's colours would show an agreement nobody measured."""
    import numpy as np

    run = tmp_path / "run"
    # Stock ops: the two sides are equal to rounding only, and so can be told apart.
    code, *_ = lockstep("train", "quickstart", "contract=none", *SMALL, f"out={run}", capsys=capsys)
    assert code == OK
    compared = unequal = 0
    for record in load_run(run).trajectories(1):
        for segment, theirs in zip(
            record.trajectory.segments, record.trainer_logprobs, strict=True
        ):
            if segment.is_sampled:
                assert np.abs(theirs - segment.logprobs).max() < 1e-4
                compared += len(segment)
                unequal += int((theirs != segment.logprobs).sum())
    row = next(r for r in timed_rows(run) if r["step"] == 1 and "mismatch/k3" in r)
    assert row["mismatch/k3"] < 1e-11 and row["mismatch/max_abs_diff"] < 1e-4
    assert (compared, unequal) == (row["mismatch/compared_tokens"], row["mismatch/unequal_tokens"])
    assert unequal > 0


def test_a_run_whose_episodes_fail_stops_and_says_why(tmp_path, capsys, monkeypatch):
    (tmp_path / "broken_task.py").write_text(
        "from dataclasses import dataclass\n"
        "from lockstep.envs.docsearch.config import DocSearchConfig\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class BrokenConfig(DocSearchConfig):\n"
        "    def environment(self, task, agent):\n"
        "        made = super().environment(task, agent)\n"
        "        async def step(message):\n"
        "            raise OSError('the index is gone')\n"
        "        made.step = step\n"
        "        return made\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = lockstep(
        "train", "quickstart", *SMALL, "evaluation.at_start=false", "task=broken",
        "--plugin", "broken_task", f"out={tmp_path / 'run'}", capsys=capsys,
    )  # fmt: skip
    assert code == 1
    text = " ".join(err.split())
    assert "step 0: 8 of 8 episodes failed" in text
    assert "the index is gone" in text
    assert (tmp_path / "run" / "trajectories" / "step-000000.parquet").is_file()


def installed(directory, name, source):
    """Lays out a package as pip does, with `name` announced as a plugin of Lockstep."""
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[lockstep.plugins]\n{name} = {name}\n")
    (directory / f"{name}.py").write_text(source)


def test_an_installed_package_adds_a_recipe_without_plugin(tmp_path, capsys, monkeypatch):
    installed(
        tmp_path / "site",
        "their_package",
        "from dataclasses import replace\n"
        "from lockstep.recipes.registry import recipe, find_recipe\n"
        "@recipe\n"
        "def theirs():\n"
        "    'A recipe of an installed package.'\n"
        "    return replace(find_recipe('quickstart'), steps=7)\n",
    )
    monkeypatch.setitem(RECIPES, "theirs", None)  # so that it is gone afterwards
    monkeypatch.syspath_prepend(tmp_path / "site")
    code, out, _ = lockstep("recipes", capsys=capsys)
    assert code == OK
    assert "A recipe of an installed package." in out


def test_an_installed_plugin_that_cannot_be_imported_is_named(tmp_path, capsys, monkeypatch):
    installed(tmp_path / "site", "broken_package", "import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    said = refusal("recipes", capsys=capsys)
    assert "broken_package" in said and "no_such_dependency" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("verb", ["train", "report", "eval"])
def test_a_torn_environment_is_named(run, tmp_path, capsys, verb):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "environment.json").write_text("{}")
    words = ["resume=true"] if verb == "train" else []
    said = refusal(verb, tmp_path / "run", *words, capsys=capsys)
    assert "environment.json lacks format_version" in said


def test_a_lock_that_is_a_directory_is_named(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "lock").unlink()
    (tmp_path / "run" / "lock").mkdir()
    said = refusal("train", tmp_path / "run", "resume=true", capsys=capsys)
    assert "lock cannot be opened" in said


@pytest.mark.parametrize("target", ["nowhere", "step-000002", "."])
def test_a_link_in_place_of_a_checkpoint_is_named(run, tmp_path, capsys, target):
    shutil.copytree(run, tmp_path / "run")
    link = tmp_path / "run" / "checkpoints" / "step-000002"
    link.rename(tmp_path / "kept")
    link.symlink_to(target)
    said = refusal("train", tmp_path / "run", "resume=true", capsys=capsys)
    assert "step-000002 is a link" in said


def test_an_engine_of_ones_own_is_chosen_by_its_tag_and_gets_every_update(tmp_path):
    """One that holds weights of its own: a sync that did not arrive would show as a mismatch."""
    path = tmp_path / "run"
    words = ["engine=apart", "engine.pages=80", "--plugin", "apart_engine"]
    assert lockstep("train", "quickstart", *SMALL, *words, f"out={path}") == OK
    assert json.loads((path / "environment.json").read_text())["is_one_process"] is False
    rows = timed_rows(path)
    assert rows[2]["policy_version"] == 1
    assert rows[2]["mismatch/k3"] < 1e-11
