"""A model that the real client trains leaves a run directory and checkpoints behind."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from lockstep.cli import main
from lockstep.model_server import BackgroundServer
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.store.run import load_run

pytest.importorskip("tinker._version")
tinker = pytest.importorskip("tinker")
MODEL = "tiny-qwen3"
PROMPT = [5, 6, 7, 8, 9, 10]
EXAMPLE = Path(__file__).parents[3] / "examples" / "tinker_docsearch.py"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The directory of a server after two updates by a client: one on policy, and one of tokens
    that an older version drew."""
    out = tmp_path_factory.mktemp("served")
    lines: list[str] = []
    server = BackgroundServer(MODEL, "api=tinker", out=out, note=lines.append)
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-none")
    trainer = service.create_lora_training_client(MODEL, rank=4, seed=3).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=6, stop=[], seed=7)
    replies = sampler.sample(tinker.ModelInput.from_ints(PROMPT), 2, params).result().sequences
    data = [datum_of(reply, sign) for reply, sign in zip(replies, (1.0, -1.0), strict=True)]
    for _ in range(2):
        trainer.forward_backward(data, "importance_sampling").result()
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-5)).result()
    trainer.save_state("final").result()
    service.close("success").result()
    server.close()
    (out / "lines").write_text("\n".join(lines))
    return out


def datum_of(reply, advantage):
    ids, before = PROMPT + list(reply.tokens), len(PROMPT) - 1
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": ids[1:],
            "logprobs": [0.0] * before + list(reply.logprobs),
            "advantages": [0.0] * before + [advantage] * len(reply.tokens),
        },
    )


def run_of(out):
    (path,) = (out / "runs").iterdir()
    return load_run(path)


def test_each_update_has_a_row_with_its_mismatch_and_the_age_of_its_tokens(out):
    first, second = run_of(out).metrics
    assert [first["step"], second["step"]] == [0, 1]
    assert first["mismatch/unequal_tokens"] == 0 and first["mismatch/compared_tokens"] == 12
    assert second["mismatch/unequal_tokens"] > 0, "an update lies between"
    assert [row["staleness/max"] for row in (first, second)] == [0, 1]
    assert [row["provenance/drawn"] for row in (first, second)] == [2, 2]
    assert first["train/grad_norm"] > 0 and first["train/lr"] == 1e-5


def test_episodes_are_stored_as_they_were_drawn(out):
    (group,) = run_of(out).groups(1)
    assert [trajectory.rewards for trajectory in group.trajectories] == [{1: 1.0}, {1: -1.0}]
    for trajectory in group.trajectories:
        prompt, reply = trajectory.segments
        assert prompt.token_ids.tolist() == PROMPT and reply.policy_version == 0


def test_a_line_for_each_update_and_a_report_at_the_end(out):
    run = run_of(out)
    lines = (out / "lines").read_text().splitlines()
    assert f"{run.name}  step 0  loss" in lines[-2] and f"{run.name}  step 1  loss" in lines[-1]
    assert "kl 0" in lines[-2]
    assert run.name in (run.path / "report.html").read_text()


def test_the_doctor_finds_nothing_but_the_age_of_the_tokens(out, capsys):
    main(["doctor", str(run_of(out).path), "--json"])
    found = json.loads(capsys.readouterr().out)
    (cause,) = found["causes"]
    assert cause["cause"] == "stale" and cause["certainty"] == "proved"
    assert "in 2 of 4 rows: tokens are more than max_staleness=0" in cause["measured"]


@pytest.mark.parametrize("is_merged", (False, True))
def test_a_checkpoint_is_exported_as_an_adapter_or_merged(out, tmp_path, is_merged, capsys):
    saved = out / "checkpoints" / run_of(out).name / "weights" / "final"
    into = tmp_path / "exported"
    main(["export", str(saved), "--hf", str(into), *(["--merged"] if is_merged else [])])
    assert "at final ->" in capsys.readouterr().out
    if is_merged:
        base, trained = load_checkpoint(locate_model(MODEL)), load_checkpoint(into)
        pairs = zip(base.parameters(), trained.parameters(), strict=True)
        assert any(not torch.equal(one, other) for one, other in pairs)
    else:
        assert (into / "adapter_config.json").is_file() and not (into / "training").exists()


def test_the_example_trains_with_a_kl_of_exactly_zero(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("tinker_docsearch", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)
    server = BackgroundServer("tiny-gpt-oss", "api=tinker", out=tmp_path)
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-none")
    settings = ("--steps", "2", "--groups", "2", "--group-size", "4", "--kl-coef", "0.01")
    rows = asyncio.run(example.train(example.parse(settings)))
    server.close()
    assert [(row["kl_v1"], row["kl_v2"]) for row in rows] == [(0, 0), (0, 0)]
    assert all("reward/retrieval" in row for row in rows)
