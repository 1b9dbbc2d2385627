"""Whole runs of `math` and `retool`, a few steps each: the contract, resuming, the tool."""

import json
import shutil
from itertools import pairwise

import pytest
from run_rows import timed_rows

from lockstep.cli import main
from lockstep.store.run import load_run

OK = 0
SMALL = ["groups_per_step=2", "group_size=4", "evaluation.num_tasks=2", "checkpoint.every=1"]


def run(path, recipe, *words):
    assert main(["train", recipe, "--json", *SMALL, *words, f"out={path}"]) == OK
    return path


def rows_of(path):
    rows = timed_rows(path)
    return [row for row in rows if "reward/mean" in row]


def learnt(row):
    """What may not depend on when a run was stopped."""
    return {k: v for k, v in row.items() if k.startswith(("reward/", "train/", "mismatch/"))}


@pytest.mark.parametrize("recipe", ["math", "retool"])
def test_both_sides_agree_in_every_bit_and_a_run_goes_on_from_its_checkpoint(tmp_path, recipe):
    path = run(tmp_path / "run", recipe, "steps=3")
    whole = rows_of(path)
    assert sum(row["mismatch/compared_tokens"] for row in whole) > 0
    assert all(row["mismatch/unequal_tokens"] == 0 for row in whole)
    first, *later = sorted((path / "checkpoints").glob("step-*"))
    for checkpoint in later:
        shutil.rmtree(checkpoint)
    assert main(["train", str(path), "resume=true"]) == OK
    again = rows_of(path)
    assert first.exists() and len(again) == 3
    assert [learnt(row) for row in again] == [learnt(row) for row in whole]


def test_retools_calls_are_run_and_its_failures_counted(tmp_path):
    path = run(tmp_path / "run", "retool", "steps=2")
    rows = rows_of(path)
    assert all(row["episode/tool/calls"] > 0.5 for row in rows)
    assert any(row.get("episode/sandbox/error", 0) > 0 for row in rows)
    said = [
        (before.tool_calls[0].arguments, after.content)
        for group in load_run(path).groups(1)
        for trajectory in group.trajectories
        for messages in [trajectory.messages(trajectory.leaves()[0])]
        for before, after in pairwise(messages)
        if after.role == "tool" and before.tool_calls and after.content.isdigit()
    ]
    assert said
    for arguments, result in said:
        left, sign, right = json.loads(arguments)["code"].partition("*")
        if sign and left.isdigit() and right.isdigit():
            assert int(left) * int(right) == int(result)


def test_without_the_tool_the_same_model_is_worth_less(tmp_path):
    """The shipped model, untrained: greedy, it uses the tool, and knows no products without it."""
    words = ["steps=1", "evaluation.num_tasks=24"]
    found = {}
    for tool in ("true", "false"):
        path = run(tmp_path / tool, "retool", *words, f"task.tool={tool}")
        lines = (path / "metrics.jsonl").read_text().splitlines()
        found[tool] = json.loads(lines[0])["eval/greedy/mean@1"]
    assert found["true"] > found["false"] + 0.3
