"""Cost of averaged log-probs: a step of the quickstart with correction=averaged (eight re-scorings,
no recompute) beside correction.anchor=recomputed, which runs the trainer over the batch once more.

Seconds are on the clock per step, where the engine has a process of its own and waits: every tool
call takes 0 to 2 seconds, 32 episodes a step. The model has 10 million parameters: the shipped one,
whose experts are widened by zeros, so that it acts as that one does. Runs in turn; the median of
the steps after the first two of each.

    python benchmarks/averaging.py [--rounds N]
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from measuring import Row, alone, in_turn, main, row
from measuring.runs import steps_of, train_quickstart

from lockstep.models.locate import locate_model

WIDTH = 6400
"""Width of an expert, for 10 million parameters."""
LONGEST = 2.0
"""Seconds of the slowest tool call."""
ARMS = {
    "averaged": "correction=averaged",
    "recomputed": "correction.anchor=recomputed",
    "rollout": "correction=bypass",
}


def widened(folder: Path) -> Path:
    """The shipped model with experts of WIDTH: new units have weights of 0."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(locate_model("tiny-gpt-oss"), folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        kind = name.rpartition(".")[2]
        if kind in ("gate_up_proj", "gate_up_proj_bias"):
            missing = (0, 2 * WIDTH - tensor.shape[-1])
        elif kind == "down_proj":
            missing = (0, 0, 0, WIDTH - tensor.shape[-2])
        else:
            continue
        tensors[name] = torch.nn.functional.pad(tensor, missing).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": WIDTH}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def compare(*, rounds: int = 2, steps: int = 7) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        model, numbers = widened(Path(scratch) / "model"), count()

        def late_steps(arm: str) -> list[dict[str, Any]]:
            number = next(numbers)
            settings = [ARMS[arm], f"model={model}", f"steps={steps}", "groups_per_step=4",
                        f"seed={number // len(ARMS)}", "engine.replicas=1", "contract=none",
                        "evaluation=none"]  # fmt: skip
            out = Path(scratch) / str(number)
            alone(train_quickstart, settings, str(out), LONGEST, False)
            return steps_of(out)[2:]

        taken = in_turn(rounds, {arm: partial(late_steps, arm) for arm in ARMS})
    late = {arm: [row for rows in runs for row in rows] for arm, runs in taken.items()}
    seconds = {arm: [row["time/step_seconds"] for row in rows] for arm, rows in late.items()}
    share = median(r["time/sample_seconds"] / r["time/step_seconds"] for r in late["recomputed"])
    neither = median(seconds.pop("rollout"))
    yield row("averaging, idle engine", *map(median, seconds.values()), "s/step", steps=seconds,
              how=f"on the clock; neither: {neither:.2f}; {share:.0%} is sampling")  # fmt: skip


if __name__ == "__main__":
    main(compare, short={"rounds": 1, "steps": 4})
