"""The dump that `lockstep doctor example` reads: the quickstart's agent, dumped with two defects.

    python docs/proof/example.py          5 seconds; writes src/lockstep/doctor/example.parquet

96 episodes of tiny-gpt-oss, with the sampler's kernels a little off the trainer's. What a program
then did to them on their way to the trainer: a third of the rows was decoded to text and encoded
again, with the log-probs laid onto the new ids in order; in another third every trained token has
the log-prob of the one after it. The trainer scored the rows as they came.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from run import configured

import lockstep.doctor
from lockstep.agent.loop import Budget, collect, training_sampling
from lockstep.agent.tasks import derive_seed
from lockstep.agent.turns import Policy
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.inputs.native import write_rows
from lockstep.doctor.rows import Rows
from lockstep.run.build import build
from lockstep.run.preflight import preflight
from lockstep.testing.faults import injected
from lockstep.testing.faults.rows import RetokenizedRows, ShiftedLogprobs
from lockstep.testing.faults.sides import KernelNoise
from lockstep.training.rows import rows_for_training
from lockstep.types import Sample

EXAMPLE = Path(lockstep.doctor.__file__).parent / "example.parquet"
SETTINGS = ("model=tiny-gpt-oss", "contract=none")
NUM_TASKS, GROUP_SIZE = 24, 4
KINDS = ("sound", "reencoded", "shifted")


def kind_of(row: Sample) -> str:
    """What the program does to the row."""
    return KINDS[derive_seed(0, "example", row.id) % len(KINDS)]


def make_rows() -> Rows:
    config = configured(*SETTINGS)
    with injected(KernelNoise(std=0.002)):
        parts = build(config, preflight(config))
    tokenizer = parts.renderer.tokenizer
    sampling = training_sampling(config.agent, parts.engine.capabilities)
    groups = asyncio.run(
        collect(
            Policy(parts.engine, parts.renderer, sampling),
            lambda task: config.task.environment(task, config.agent),
            config.task.tasks(split="train", seed=config.seed).take(NUM_TASKS),
            group_size=GROUP_SIZE,
            budget=Budget.of(config.agent, max_tokens=config.max_tokens),
            run_seed=config.seed,
        )
    )
    rows: list[Sample] = []
    for row in rows_for_training(groups, config.advantage, control_ids=tokenizer.control_ids):
        match kind_of(row):
            case "reencoded":
                row = RetokenizedRows().changed(row, parts.renderer)
            case "shifted":
                row = ShiftedLogprobs().changed(row, parts.renderer)
        rows.append(row)
    played = {f"{t.id}/{leaf}": (t, leaf) for g in groups for t in g.trajectories
              for leaf in t.leaves()}  # fmt: skip
    return Rows.of(
        rows,
        trainer_logprobs=np.concatenate(parts.trainer.forward(rows, column=None)),
        trainer_version=np.zeros(len(rows), np.int64),
        prompt_lengths=np.array([int(np.argmax(row.columns["turn"] >= 0)) for row in rows]),
        rewards=np.array([played[row.id][0].rewards[played[row.id][1]] for row in rows]),
        steps=np.zeros(len(rows), np.int64),
        messages=tuple(tuple(played[row.id][0].messages(played[row.id][1])) for row in rows),
    )


def main() -> None:
    facts = Facts(model="tiny-gpt-oss", temperature=1.0, top_p=1.0, top_k=0, is_moe=True)
    num_rows = write_rows(EXAMPLE, [make_rows()], facts)
    print(f"{EXAMPLE.name}: {num_rows} rows, {EXAMPLE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
