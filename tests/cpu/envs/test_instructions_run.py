"""A few steps of the recipe `instructions`: the contract holds, evaluation on a file, resuming."""

import json
import shutil

from run_rows import rows_of

from lockstep.cli import OK, main

SMALL = [
    "train", "instructions", "steps=2", "groups_per_step=2", "group_size=4",
    "evaluation.num_tasks=4", "evaluation.at_start=false", "checkpoint.every=1",
    "task.num_turns=2", "task.turn_rewards=true",
]  # fmt: skip


def test_the_recipe_trains_under_the_contract_and_resumes_to_the_same_bits(tmp_path, capsys):
    run, copy = tmp_path / "run", tmp_path / "copy"
    assert main([*SMALL, f"out={run}"]) == OK
    steps = [row for row in rows_of(run) if "reward/mean" in row]
    assert len(steps) == 2 and all(row["mismatch/compared_tokens"] > 50 for row in steps)
    assert sum(row["mismatch/unequal_tokens"] for row in steps) == 0
    assert {"reward/prompt_strict", "reward/instruction_loose"} <= set(steps[0])
    record = {"key": 1, "prompt": "Write.", "instruction_id_list": ["startend:quotation"]}
    (tmp_path / "all.jsonl").write_text(json.dumps({**record, "kwargs": [{}]}) + "\n")
    words = [f"task.path={tmp_path / 'all.jsonl'}", "task.eval_share=1", "evaluation.num_tasks=1"]
    assert main(["eval", str(run), *words, "--json"]) == OK
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    assert found["eval/greedy/reward/1-instruction"] in (0.0, 1.0)
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step-000002")
    assert main(["train", str(copy), "resume=true"]) == OK
    assert rows_of(copy) == rows_of(run)
