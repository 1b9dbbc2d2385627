"""A supervised run: held-out loss, the best checkpoint, rows of a run, what is refused."""

import json

import numpy as np
import pytest
from command_line import refusal
from safetensors.numpy import load_file

import lockstep
from lockstep import train, train_supervised
from lockstep.cli import OK, main
from lockstep.models.locate import locate_model
from lockstep.store.checkpoints import Checkpoints, trained_by
from lockstep.store.run import load_run

SMALL = {"sft.rows_per_step": 4, "evaluation.every": 2, "model": "tiny-gpt-oss"}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A run of the quickstart with two steps of episodes, some of which succeeded."""
    path = tmp_path_factory.mktemp("played") / "run"
    return load_run(train("quickstart", out=path, view="json", steps=2, evaluation="none").path)


def dialogues(path, num_rows, *, shift=0):
    words = ("Oslo", "Rome", "Lima", "Paris", "Bern", "Riga")
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Say {words[at % 6]} {at}."},
                {"role": "assistant", "content": words[(at + shift) % 6]},
            ]
        }
        for at in range(num_rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_the_best_checkpoint_by_held_out_loss_is_kept_and_is_the_model(tmp_path, capsys):
    """Held out are other answers: the format is learnt first, then answers that are not theirs."""
    path = dialogues(tmp_path / "d.jsonl", 24)
    tests = dialogues(tmp_path / "t.jsonl", 12, shift=1)
    words = [f"{name}={value}" for name, value in SMALL.items()]
    words += ["sft.steps=20", f"sft.path={path}", f"evaluation.path={tests}"]
    words += [f"out={tmp_path / 'run'}"]
    assert main(["sft", *words]) == OK
    said = capsys.readouterr().out
    run = load_run(tmp_path / "run")
    steps, losses = run.column("eval/loss")
    assert steps == [-1, *range(1, 20, 2)]
    lowest = min(losses[1:])
    best = Checkpoints(run.path / "checkpoints").best()
    assert best.name == f"step-{1 + steps[losses.index(lowest)]:06d}" != "step-000020"
    assert f"has the weights of {best.name}" in said and "warning: the held-out loss is" in said
    assert "eval  at the start: loss" in said and "held out, loss" in said
    assert [row["health/overfits"] for row in run.metrics if "health/overfits" in row]
    assert str(lockstep.load(run.path)) == f"Run({str(run.path)!r}, 20 steps)"
    for verb, *words in (("train", "resume=true"), ("eval",)):
        assert "lockstep sft" in refusal(verb, run.path, *words, capsys=capsys)
    for place in ("", "/model"):
        files = [trained_by(f"{run.path}{place}")[1], locate_model(f"{run.path}{place}")]
        for file in files:
            ours = load_file(file / "model.safetensors")
            theirs = load_file(best / "policy/model.safetensors")
            assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("lora", [{}, {"lora.rank": 2}], ids=["full", "lora"])
def test_what_a_run_sampled_and_succeeded_in_is_trained_as_it_was_sampled(
    tmp_path, played, lora, capsys
):
    from lockstep.training.sft import load_examples

    rows = load_examples(played.path, min_reward=1)
    kept = [r.trajectory for r in played.trajectories() if r.trajectory.reward >= 1]
    assert 0 < len(kept) < len([*played.trajectories()])
    sampled = [row for trajectory in kept for row in trajectory.rows()]
    assert [r.token_ids.tolist() for r in rows] == [r.token_ids.tolist() for r in sampled]
    assert [r.loss_mask.tolist() for r in rows] == [r.loss_mask.tolist() for r in sampled]
    ended = train_supervised(
        "sft",
        out=tmp_path / "run",
        view="json",
        **{**SMALL, **lora, "sft.path": str(played.path), "sft.steps": 4, "trainer.lr": 1e-4},
    )
    assert ended.summary["eval/loss"] < ended.run.values("eval/loss")[0]
    small = ["steps=1", "groups_per_step=2", "group_size=2", "evaluation=none"]
    go_on = ["train", "quickstart", *small, f"model={ended.path}", f"out={tmp_path / 'rl'}"]
    assert main(go_on) == OK
    again = ["sft", f"sft.path={played.path}", f"model={ended.path}", "sft.steps=1"]
    assert main([*again, f"out={tmp_path / 'again'}"]) == OK
    assert main(["export", str(ended.path), "--hf", str(tmp_path / "out")]) == OK


BAD = {
    "no episode is that good": (["sft.path=RUN", "sft.min_reward=2"], "the highest of"),
    "rows of another tokenizer": (["sft.path=RUN", "model=tiny-qwen3"], "another tokenizer than"),
    "rewards of a file": (["sft.path=FILE", "sft.min_reward=0.5"], "sft.path=FILE is none"),
    "no such test file": (
        ["sft.path=FILE", "evaluation.path=none.jsonl"], "none.jsonl: no such file",
    ),
    "a share of everything": (["sft.path=FILE", "evaluation.share=1"], "evaluation.share"),
    "a dialogue that is too long": (["sft.path=FILE", "max_tokens=4"], "at most 4 fit"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_refused_before_a_model_is_loaded(tmp_path, played, case, capsys):
    words, text = BAD[case]
    path = dialogues(tmp_path / "d.jsonl", 12)
    words = [w.replace("RUN", str(played.path)).replace("FILE", path) for w in words]
    said = refusal("sft", *words, f"out={tmp_path / 'run'}", capsys=capsys)
    assert text.replace("FILE", path) in said and not (tmp_path / "run").exists()


def test_rows_of_a_file_of_their_own_are_tested(tmp_path):
    path, tests = dialogues(tmp_path / "d.jsonl", 24), dialogues(tmp_path / "t.jsonl", 5)
    ended = train_supervised(
        "sft",
        out=tmp_path / "run",
        view="json",
        **{**SMALL, "sft.path": path, "evaluation.path": tests, "sft.steps": 2},
    )
    assert len(ended.run.values("eval/loss")) == 2 and (ended.path / "report.html").is_file()
    assert {"time/step_seconds", "time/train_seconds", "train/lr_to_usual"} <= {
        *ended.run.metrics[-1]
    }
