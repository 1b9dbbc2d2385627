"""Runs that train an adapter, as a user types them: start, resume, evaluate, export, go on."""

import json
import shutil
import urllib.request

import numpy as np
import pytest
import torch
from command_line import lockstep, refusal
from quickstarts import SHORT
from run_rows import rows_of

from lockstep.cli import OK
from lockstep.errors import ConfigError
from lockstep.model_server import BackgroundServer, find_served, open_served
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.models.lora import add_adapter
from lockstep.models.peft_format import BASE, CONFIG, WEIGHTS, read_shape
from lockstep.models.peft_io import load_adapter
from lockstep.ops.context import PackedContext

SMALL = (*SHORT, "steps=2", "checkpoint.every=1", "trainer.lr=1e-2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora") / "run"
    assert lockstep("train", "quickstart", *SMALL, "lora.rank=4", f"out={path}") == OK
    return path


def logits_of(model):
    ids = torch.arange(40) % model.config.vocab_size
    return model.logits(model(ids, torch.arange(40), PackedContext.of([40])))


def test_the_plan_says_what_is_trained_and_how_much(tmp_path, capsys):
    words = ["train", "quickstart", *SMALL, "steps=1", "evaluation.at_start=false"]
    own = ["lora.rank=4", "trainer.freeze=*.o_proj.*", f"out={tmp_path / 'run'}"]
    code, out, err = lockstep(*words, *own, capsys=capsys)
    assert code == OK
    text = " ".join((out + err).split())
    assert "trained LoRA, rank 4, scale 4, on 12 projections (attention, experts); frozen" in text
    assert "frozen: *.o_proj.*; 12,800 of 175,376 parameters (7.30%)" in text


def test_the_contract_holds_with_an_adapter(run):
    rows = [row for row in rows_of(run) if "mismatch/unequal_tokens" in row]
    assert json.loads((run / "environment.json").read_text())["contract"] == "true-on-policy"
    assert sum(row["mismatch/unequal_tokens"] for row in rows) == 0
    assert sum(row["mismatch/compared_tokens"] for row in rows) > 100


def test_a_run_that_was_cut_short_resumes_to_the_same_bits(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000002")
    assert lockstep("train", tmp_path / "run", "resume=true") == OK
    assert rows_of(tmp_path / "run") == rows_of(run)
    left, right = (
        (path / "checkpoints" / "step-000002" / "policy" / WEIGHTS).read_bytes()
        for path in (run, tmp_path / "run")
    )
    assert left == right


def test_eval_plays_with_the_adapter(run, capsys):
    code, out, _ = lockstep("eval", f"{run}@2", "--json", capsys=capsys)
    assert code == OK
    found = json.loads(out.splitlines()[-1])["metrics"]
    last = rows_of(run)[-1]
    assert found == {name: last[name] for name in found}


def test_export_writes_the_adapter_and_merged_the_model_that_computes_the_same(
    run, tmp_path, capsys
):
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    assert lockstep("export", f"{run}@2", "--hf", adapter) == OK
    assert lockstep("export", f"{run}@2", "--hf", merged, "--merged") == OK
    assert {CONFIG, WEIGHTS, BASE} <= {p.name for p in adapter.iterdir()}
    model = load_checkpoint(locate_model("tiny-gpt-oss"))
    base = logits_of(model)
    add_adapter(model, read_shape(adapter, model.config), seed=0)
    load_adapter(model, adapter)
    adapted, found = logits_of(model), logits_of(load_checkpoint(merged))
    assert (adapted - base).abs().max() > 1e-3  # two steps move little
    # Two orders of summing some hundred products of size about 1, in float32.
    assert (found - adapted).abs().max() <= 1e-5 * adapted.abs().max()
    assert (merged / "tokenizer.json").is_file()
    words = ["train", "quickstart", f"model={merged}", "steps=1", *SMALL[1:]]
    assert lockstep(*words, f"out={tmp_path / 'again'}") == OK


def test_a_new_run_goes_on_from_an_adapter(run, tmp_path, capsys):
    policy = run / "checkpoints" / "step-000002" / "policy"
    out = tmp_path / "next"
    words = ["train", "quickstart", *SMALL, "steps=1", f"lora.path={policy}"]
    assert lockstep(*words, f"out={out}") == OK
    kept = run / "metrics.jsonl"
    last = json.loads(kept.read_text().splitlines()[-1])
    first = rows_of(out)[0]  # the evaluation before the first step
    assert first["eval/greedy/mean@1"] == last["eval/greedy/mean@1"]
    said = refusal(*words, "lora.rank=5", f"out={out}-2", capsys=capsys)
    assert "lora.rank=5 and 4 there" in said
    said = refusal(*words, "model=tiny-qwen3", f"out={out}-3", capsys=capsys)
    assert "does not fit the model (qwen3)" in said


def test_an_engine_with_its_own_weights_is_given_merged_ones(tmp_path):
    out = tmp_path / "run"
    words = ["train", "quickstart", *SMALL, "lora.rank=4", "--fault=stale_weights,lag=0"]
    assert lockstep(*words, f"out={out}") == OK
    rows = [row for row in rows_of(out) if "mismatch/k3" in row]
    assert rows[-1]["policy_version"] == 1
    # Merged and unmerged differ by rounding alone.
    assert 0 < rows[-1]["mismatch/max_abs_diff"] < 1e-3


def test_the_contract_is_refused_for_an_engine_that_is_given_merged_weights(tmp_path, capsys):
    words = ["engine=apart", "--plugin", "apart_engine", "contract=true-on-policy"]
    words += ["lora.rank=2", f"out={tmp_path / 'run'}"]
    said = refusal("train", "quickstart", *SMALL, *words, capsys=capsys)
    assert "with the adapter merged into them: equal to rounding" in said


def test_a_reference_kl_needs_no_second_model(run, tmp_path):
    policy = run / "checkpoints" / "step-000002" / "policy"
    out = tmp_path / "run"
    words = ["train", "quickstart", *SMALL, "steps=1", f"lora.path={policy}"]
    words += ["objective.kl_coef=0.1", "objective.reference=base"]
    assert lockstep(*words, f"out={out}") == OK
    (row,) = [row for row in rows_of(out) if "train/reference_kl" in row]
    assert np.isfinite(row["train/reference_kl"]) and row["train/reference_kl"] != 0


BAD = {
    "an unknown target": (["lora.targets=mlps"], "lora.targets=mlps: no projection"),
    "a rank of nothing": (["lora.rank=0"], "lora.rank=0 must be at least 1"),
    "no adapter there": (["lora.path=nowhere"], "nowhere/adapter_config.json does not exist"),
    "dropout": (["lora.dropout=0.1"], "unknown setting 'lora.dropout'"),
    "freezing nothing": (["trainer.freeze=*.attn.*"], "trainer.freeze=*.attn.* matches no"),
    "freezing all": (["trainer.freeze=*"], "leaves nothing to train"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_one_paragraph(case, tmp_path, capsys):
    words, message = BAD[case]
    words = ["train", "quickstart", *SMALL, *words, f"out={tmp_path / 'run'}"]
    assert message in refusal(*words, capsys=capsys)


@pytest.mark.parametrize("setting", ["trainer.freeze=*.attn.*", "trainer.freeze=*"])
def test_what_is_frozen_is_checked_before_weights_are_read(setting, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lockstep.models.hf_io.read_tensors", lambda *_, **__: pytest.fail("read"))
    words = ["train", "quickstart", *SMALL, setting, f"out={tmp_path / 'run'}"]
    assert setting in refusal(*words, capsys=capsys)
    assert not (tmp_path / "run").exists()


def test_merging_what_has_no_adapter_is_refused(tmp_path, capsys):
    words = ["train", "quickstart", *SMALL, "steps=1", "evaluation.at_start=false"]
    assert lockstep(*words, f"out={tmp_path / 'run'}") == OK
    words = ["export", tmp_path / "run", "--hf", tmp_path / "out", "--merged"]
    assert "there is no adapter to merge" in refusal(*words, capsys=capsys)


def test_sft_trains_an_adapter_that_a_run_goes_on_from(tmp_path, capsys):
    rows = [{"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}] * 4
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["sft", f"sft.path={tmp_path / 'ids.jsonl'}", "sft.steps=2", "sft.rows_per_step=2"]
    code, out, _ = lockstep(
        *words, "lora.rank=2", "--json", f"out={tmp_path / 'run'}", capsys=capsys
    )
    assert code == OK
    made = json.loads(out.splitlines()[-1])["adapter"]
    go_on = ["train", "quickstart", *SMALL, "steps=1", "evaluation.at_start=false"]
    assert lockstep(*go_on, f"lora.path={made}", f"out={tmp_path / 'next'}") == OK


def test_an_exported_adapter_is_served_and_answers_with_the_bits_of_its_run(run, tmp_path):
    pytest.importorskip("aiohttp", reason="the extra `http` is not installed")
    exported = tmp_path / "adapter"
    assert lockstep("export", f"{run}@2", "--hf", exported) == OK
    found = []
    for target in (f"{run}@2", str(exported)):
        server = BackgroundServer(target, "agent.max_turn_tokens=24", "seed=3", "max_tokens=512")
        user = {"role": "user", "content": "Where was Bela born?"}
        body = {"model": "", "temperature": 0, "messages": [user]}
        request = urllib.request.Request(
            f"{server.url}/v1/models", headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            body["model"] = json.load(response)["data"][0]["id"]
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "x-lockstep-ids": "1"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            (turn,) = json.load(response)["lockstep"]["turns"]
        found.append((turn["prompt_ids"], turn["token_ids"], turn["logprobs"]))
        server.close()
    assert found[0] == found[1] and len(found[0][2]) > 3


def test_an_adapter_that_names_no_base_needs_one_and_other_engines_name_the_way(run, tmp_path):
    exported = tmp_path / "adapter"
    assert lockstep("export", run, "--hf", exported) == OK
    settings = json.loads((exported / CONFIG).read_text())
    (exported / CONFIG).write_text(json.dumps({**settings, "base_model_name_or_path": None}))
    with pytest.raises(ConfigError, match="base model"):
        find_served(str(exported), [])
    assert find_served(str(exported), ["model=tiny-gpt-oss"]).config.lora.path == str(exported)
    served = find_served(str(exported), ["model=tiny-gpt-oss", "engine=vllm"])
    with pytest.raises(ConfigError, match="engine=embedded"):
        open_served(served, scratch=None)
