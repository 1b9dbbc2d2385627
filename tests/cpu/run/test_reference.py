"""The reference of the KL penalty is what training starts from, or the base model if asked for."""

import json
import shutil

import pytest
from run_rows import rows_of

from lockstep.cli import OK, main

RL = (
    "train", "quickstart", "groups_per_step=1", "group_size=4", "checkpoint.every=1",
    "checkpoint.keep_last=9", "evaluation.num_tasks=0", "trainer.lr=3e-2",
    "agent.max_turn_tokens=24", "trainer.warmup_updates=0",
)  # fmt: skip
KL = ("objective.kl_coef=0.1",)
LORA = ("lora.rank=2",)
PATH = "lora.path=PATH/lora/checkpoints/step-000002/policy"
BASE = "objective.reference=base"
STARTS = {
    "model": ((), 0),
    "model, base": ((BASE,), 0),
    "a run's model": (("model=PATH/whole",), 0),
    "new adapter": (LORA, 0),
    "new adapter, base": ((*LORA, BASE), 0),
    "new adapter over a run": ((*LORA, "model=PATH/lora"), 0),
    "lora.path": ((PATH,), 0),
    "lora.path of supervised training": (("lora.path=PATH/sft/adapter",), 0),
    "lora.path, base": ((PATH, BASE), 1),
    "lora.path in bfloat16": ((PATH, "dtype=bfloat16"), 0),
    "lora.path without the contract": ((PATH, "contract=none"), 0),
    "lora.path, replayed routes": ((PATH, "trainer.routing_replay=rollout"), 0),
    "from": (("from=PATH/whole",), 0),
    "from, base": (("from=PATH/whole", BASE), 1),
    "from a step": (("from=PATH/whole@1", "steps=2"), 0),
    "from in bfloat16": (("from=PATH/half", "dtype=bfloat16"), 0),
    "from with an adapter": ((*LORA, "from=PATH/lora"), 0),
    "from with an adapter, base": ((*LORA, "from=PATH/lora", BASE), 1),
    "from and lora.path": ((PATH, "from=PATH/lora@1", "steps=2"), 0),
    "from, k3": (("from=PATH/whole", "objective.kl_estimator=k3"), 0),
}  # fmt: skip


def trained(root, name, *words):
    told = [w.replace("PATH", str(root)) for w in words]
    assert main([*told, f"out={root / name}", "--json"]) == OK
    return rows_of(root / name)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("reference")
    trained(root, "whole", *RL, "steps=2")
    trained(root, "half", *RL, "steps=2", "dtype=bfloat16")
    trained(root, "lora", *RL, *LORA, "steps=2")
    row = {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
    (root / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    trained(root, "sft", "sft", *LORA, "sft.path=PATH/ids.jsonl", "sft.steps=3", "trainer.lr=3e-2")
    return root


@pytest.mark.parametrize("start", STARTS)
def test_the_kl_of_the_first_step_is_zero_to_what_training_starts_from(root, start):
    words, is_apart = STARTS[start]
    steps = ("steps=3",) if any(w.startswith("from=") for w in words) else ("steps=1",)
    rows = trained(root, start.replace(" ", "-"), *RL, *KL, *steps, *words)
    first = next(row for row in rows if "train/reference_kl" in row)
    assert (first["train/reference_kl"] > 1e-3) if is_apart else not first["train/reference_kl"]


@pytest.mark.parametrize("start", [(PATH,), ("from=PATH/whole",), (*LORA, "from=PATH/lora")])
@pytest.mark.parametrize("cut", [1, 0], ids=["checkpoint", "none"])
def test_a_resumed_run_has_the_reference_that_it_started_with(root, tmp_path, start, cut):
    """cut=0: killed before its first checkpoint."""
    begin = 2 if "from" in start[-1] else 0
    shutil.copytree(root, tmp_path / "root")
    steps = f"steps={begin + 2}"
    expected = trained(tmp_path / "root", "new", *RL, *KL, *start, steps)
    run = tmp_path / "root" / "new"
    for step in range(begin + cut + 1, begin + 3):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    if cut:
        shutil.rmtree(tmp_path / "root" / "whole" / "checkpoints")
    assert main(["train", str(run), "resume=true", "--json"]) == OK
    assert rows_of(run) == expected
