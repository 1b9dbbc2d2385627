"""Every run that ends can be exported, merged where it trained an adapter, and used as a model."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command_line import lockstep, refusal
from run_rows import rows_of
from safetensors.torch import load_file, save_file

from lockstep.cli import BAD_INPUT, OK
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.models.peft_format import WEIGHTS
from lockstep.run.preflight import read_model_files
from lockstep.run_config import ModelChoice

RL = (
    "train", "quickstart", "steps=1", "groups_per_step=1", "group_size=2", "checkpoint.every=1",
    "evaluation.num_tasks=0", "trainer.lr=1e-2", "agent.max_turn_tokens=16",
)  # fmt: skip
SFT = ("sft", "sft.steps=2", "sft.rows_per_step=2", "sft.path=PATH/ids.jsonl", "trainer.lr=1e-2")
LORA = ("lora.rank=2",)
GO_ON = ("steps=2", "from=PATH/rl")
KINDS = {
    "rl": RL,
    "rl_lora": (*RL, *LORA),
    "rl_bfloat16_lora": (*RL, *LORA, "dtype=bfloat16"),
    "rl_attention_lora": (*RL, *LORA, "lora.targets=attention"),
    "rl_frozen": (*RL, "trainer.freeze=*norm*"),
    "sft": SFT,
    "sft_lora": (*SFT, *LORA),
    "sft_bfloat16": (*SFT, "dtype=bfloat16"),
    "sft_hybrid_lora": (*SFT, *LORA, "model=tiny-qwen3-next"),
    "sft_stage_of_a_recipe": (
        "sft", "tiny-instructions", "--plugin", "tiny_models", "sft.steps=2", "sft.rows_per_step=2",
    ),
    "from": (*RL, *GO_ON),
    "from_lora": (*RL, *LORA, "steps=2", "from=PATH/rl_lora"),
    "lora_path": (*RL, "lora.path=PATH/sft_lora_of_gpt/adapter"),
    "critic": (*RL, "advantage=gae"),
    "seats": (
        *RL, "task=duel", "seats.second=own", *LORA, "--plugin", "PLUGIN",
        "model=tiny-qwen3", "agent.max_turns=2", "group_size=3",
    ),
    "model_of_a_run": (*RL, "model=PATH/rl_lora"),
}  # fmt: skip
BEFORE = {"sft_lora_of_gpt": (*SFT, *LORA, "model=tiny-gpt-oss")}
ADAPTERS = {name for name in KINDS if "lora" in name or name == "seats"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Makes the run of a kind, and those before it, when it is first asked for."""
    root = tmp_path_factory.mktemp("ended")
    row = {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
    (root / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    plugin = str(Path(__file__).parent / "run" / "test_seats.py")

    def made(address):
        kind, _, rest = address.partition("/")
        kind, at, step = kind.partition("@")
        words = {**BEFORE, **KINDS}.get(kind)
        if words and not (root / kind).exists():
            for word in words:
                if "=PATH/" in word and "ids" not in word:
                    made(word.partition("PATH/")[2])
            told = [w.replace("PATH", str(root)).replace("PLUGIN", plugin) for w in words]
            assert lockstep(*told, f"out={root / kind}", "--json") == OK, kind
        return root / (kind + at + step) / rest

    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_each_kind_is_exported_merged_and_a_model(runs, tmp_path, kind):
    run = runs(kind)
    assert lockstep("export", run, "--hf", tmp_path / "out") == OK
    assert (tmp_path / "out" / "README.md").is_file()
    weights = tmp_path / "out"
    if kind in ADAPTERS:
        assert (weights / WEIGHTS).is_file()
        assert lockstep("export", run, "--hf", tmp_path / "merged", "--merged") == OK
        weights = tmp_path / "merged"
    model = load_checkpoint(locate_model(str(run)))
    for name, theirs in load_checkpoint(weights).named_parameters():
        assert torch.equal(theirs, dict(model.named_parameters())[name]), name
    files = read_model_files(ModelChoice(model=str(run), max_tokens=64))
    exported = read_model_files(ModelChoice(model=str(weights), max_tokens=64))
    assert files.renderer_config == exported.renderer_config
    assert files.model == exported.model


@pytest.mark.parametrize(
    ("address", "weights"),
    [
        ("rl", "rl/checkpoints/step-000001/policy"),
        ("rl@1", "rl/checkpoints/step-000001/policy"),
        ("rl/checkpoints/step-000001", "rl/checkpoints/step-000001/policy"),
        ("rl/checkpoints/step-000001/policy", "rl/checkpoints/step-000001/policy"),
        ("sft_lora", "sft_lora/checkpoints/step-000002/policy"),
        ("sft_lora/adapter", "sft_lora/adapter"),
        ("sft/model", "sft/model"),
        ("seats/checkpoints/step-000001/seats/second", None),
        ("rl/trajectories", "holds no weights of the run"),
        ("rl/checkpoints", "holds no weights of the run"),
        ("rl@7", "has no checkpoint of step 7; it has 1"),
        ("sft@7", "has no checkpoint of step 7; it has 2"),
        ("rl@last", "expected RUN@STEP with a whole number"),
        ("sft_lora/adapter@2", "holds no weights of the run"),
        ("none", "is not a run directory"),
    ],
)
def test_weights_are_named_by_a_run_a_step_or_their_directory(
    runs, tmp_path, capsys, address, weights
):
    out, path = tmp_path / "out", runs(weights or f"{address}/policy")
    code = lockstep("export", runs(address), "--hf", out)
    if path.is_dir():
        assert code == OK
        copied = [p.name for p in path.iterdir() if p.suffix == ".safetensors"]
        for name in copied:
            assert (out / name).read_bytes() == (path / name).read_bytes()
        assert copied and not list(out.glob("merged-*"))
    else:
        assert code == BAD_INPUT and weights in " ".join(capsys.readouterr().err.split())
        assert not out.exists()


def test_merging_asks_mkl_for_sums_that_the_contract_needs(runs, tmp_path, monkeypatch):
    """MKL reads its setting at its first product, which may be the merge's."""
    adapter = tmp_path / "adapter"
    shutil.copytree(runs("sft_lora/adapter"), adapter, ignore=shutil.ignore_patterns("merged-*"))
    monkeypatch.delenv("MKL_CBWR")
    locate_model(str(adapter))
    assert os.environ["MKL_CBWR"] == "AUTO,STRICT"


def test_a_run_without_checkpoints_has_what_it_ended_with(runs, tmp_path, capsys):
    for kind in ("sft", "sft_lora"):
        shutil.copytree(runs(kind), tmp_path / kind)
        shutil.rmtree(tmp_path / kind / "checkpoints")
        assert lockstep("export", tmp_path / kind, "--hf", tmp_path / f"{kind}-out") == OK
        assert locate_model(str(tmp_path / kind)).is_relative_to(tmp_path / kind)
    shutil.rmtree(tmp_path / "sft" / "model")
    words = ["export", tmp_path / "sft", "--hf", tmp_path / "no"]
    assert "has no checkpoint" in refusal(*words, capsys=capsys)


def test_a_supervised_run_has_no_tasks_to_start_from(runs, tmp_path, capsys):
    words = [f"from={runs('sft')}", f"out={tmp_path / 'run'}"]
    assert "Start from its weights: model=" in refusal(*RL, *words, capsys=capsys)


def test_a_changed_adapter_is_merged_anew(runs, tmp_path):
    shutil.copytree(runs("sft_lora"), tmp_path / "run")
    adapter = tmp_path / "run" / "adapter"
    first = locate_model(str(adapter))
    assert locate_model(str(adapter)) == first and first.parent == adapter
    save_file({name: 2 * x for name, x in load_file(adapter / WEIGHTS).items()}, adapter / WEIGHTS)
    second = locate_model(str(adapter))
    assert second != first and weights_of(second) != weights_of(first)


def weights_of(path):
    files = sorted(
        p for p in path.rglob("*.safetensors") if "/merged-" not in str(p)[len(str(path)) :]
    )
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in files}


@pytest.mark.parametrize("lora", [(), LORA], ids=["full", "lora"])
def test_a_supervised_run_killed_at_any_point_resumes_to_the_same_bits(tmp_path, lora):
    """In a process of its own, so that SIGKILL can end it: at its start, within steps and within
    writes of checkpoints."""
    asked = {"role": "user", "content": "hi"}
    words = ("yes", "no", "ok") * 4  # of which one is held out
    rows = [{"messages": [asked, {"role": "assistant", "content": x}]} for x in words]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "sft", "model=tiny-qwen3", f"sft.path={tmp_path / 'd.jsonl'}", "sft.steps=30",
        "sft.rows_per_step=2", "checkpoint.every=3", "spelling_dropout=0.2", "evaluation.every=2",
        "trainer.moments=float8", *lora,
    ]  # fmt: skip
    assert lockstep(*words, f"out={tmp_path / 'whole'}", "--json") == OK
    expected = rows_of(tmp_path / "whole"), weights_of(tmp_path / "whole")
    run, command = tmp_path / "killed", [sys.executable, "-m", "lockstep.cli", *words]
    process = subprocess.Popen([*command, f"out={run}"], stdout=subprocess.DEVNULL)
    for at in (1, 4, 9, 20):
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            file = run / "metrics.jsonl"
            if file.is_file() and file.read_text().count("\n") >= at:
                break
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        resumed = [sys.executable, "-m", "lockstep.cli", "sft", str(run), "resume=true"]
        process = subprocess.Popen(resumed, stdout=subprocess.DEVNULL)
    assert process.wait(timeout=120) == OK
    assert (rows_of(run), weights_of(run)) == expected


def test_a_supervised_run_continues_with_its_own_settings(runs, tmp_path, capsys):
    shutil.copytree(runs("sft"), tmp_path / "run")
    assert lockstep("sft", tmp_path / "run", "resume=true", "--json") == OK
    assert weights_of(tmp_path / "run") == weights_of(runs("sft"))
    words = ["sft", tmp_path / "run", "resume=true", "sft.steps=3"]
    assert "sft.steps: 2 -> 3" in refusal(*words, capsys=capsys)
    said = refusal("sft", "resume=true", "sft.path=x", capsys=capsys)
    assert "resume=true needs the run" in said
