"""The recipes of real models, on a tiny model of Qwen3's config and tokenizer, and on their full
shapes without weights."""

import json
import shutil
from pathlib import Path

import pytest
from full_counts import PROOF
from real_tokenizers import directory_of

import lockstep
from lockstep.cli import main
from lockstep.config import resolve
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import save_checkpoint
from lockstep.recipes import find_recipe

HUB = json.loads((Path(__file__).parents[1] / "cpu" / "models" / "hub_configs.json").read_text())
QWEN3 = HUB["Qwen3-8B"] | {
    "eos_token_id": 151645,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
"""The config of Qwen3-0.6B."""
SIZE_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
SMALL = ["steps=1", "groups_per_step=2", "group_size=2", "evaluation.num_tasks=1"]
SMALL += ["max_tokens=700", "agent.max_turns=2", "agent.max_turn_tokens=4"]
SMALL += ["evaluation.at_start=false", "evaluation.greedy=false"]


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory):
    """GSM8K's form, in a folder."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for split, count in (("train", 30), ("test", 4)):
        rows = [
            {"question": f"{split}: Ann has {n} pens. How many?", "answer": f"{n}\n#### {n}"}
            for n in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def files_of(folder, **changes):
    """Config and tokenizer of a model, without weights."""
    shutil.copytree(directory_of("qwen3"), folder)
    (folder / "config.json").write_text(json.dumps(QWEN3 | changes))
    return folder


@pytest.mark.parametrize("name", ["retool-dapo", *["gsm8k"] * PROOF])
def test_the_recipe_trains_a_tiny_model_of_qwen3s_form(name, gsm8k, tmp_path):
    like = files_of(tmp_path / "like", **TINY)
    model = Decoder(ModelConfig.from_directory(like))
    model.init_weights(std=0.02, seed=0)
    save_checkpoint(model, tmp_path / "model", like=like)
    path = [f"task.path={gsm8k}", "task.source=gsm8k"]
    config = resolve(find_recipe(name), [f"model={tmp_path / 'model'}", *path, *SMALL])
    outcome = lockstep.train(config, out=tmp_path / "run", view="json")
    assert outcome.status == "done"
    run = lockstep.load(outcome.path)
    assert run.environment["contract"] == "true-on-policy"
    assert run.column("mismatch/k3")[1] == [0.0]


@pytest.mark.parametrize(
    ("name", "size", "least", "most"), [("gsm8k", {}, 10, 20), ("retool-dapo", SIZE_4B, 10, 24)]
)
def test_the_plan_predicts_memory_from_the_config_alone(
    name, size, least, most, gsm8k, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("lockstep.run.preflight.check_driver", lambda setting: None)  # a GPU
    model = files_of(tmp_path / "model", **size)
    words = [f"model={model}", f"task.path={gsm8k}", "task.source=gsm8k", "device=cuda"]
    words += ["engine=vllm", "engine.share_device=true", "--dry-run"]
    assert main(["train", name, *words]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("# memory"))
    assert least < float(line.split("about ")[1].split()[0]) < most
