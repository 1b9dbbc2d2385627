"""The published program of investigation.py at every level of data: what does the doctor say?

    python docs/proof/doctor_published.py        writes doctor_published.json

The program keeps a dialogue as messages, renders it anew before each turn, loses the last reply,
and lays all log-probs by lengths, one place off. Its rows are recorded at these levels of data:

    a  ids, mask and both log-probs          b  also the model
    c  also messages and tools               e  also the ids that the engine returned and was sent
    d  a run of Lockstep with the fault rerendered_history
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from doctor import faulty_run
from investigation import NUM_EPISODES, play_by_messages
from run import configured, save, stamp

from lockstep.doctor.diagnose import diagnose
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.inputs.native import write_rows
from lockstep.doctor.rows import Rows
from lockstep.run.build import Parts, build
from lockstep.run.preflight import preflight

MODELS = ("tiny-gpt-oss", "tiny-qwen3")
RIGHT = {
    "rerendered", "reencoded", "missing_final", "shifted", "boundary", "observation_trained",
}  # fmt: skip
"""Causes that this program has: its history is rendered from decoded text, the last reply is lost,
and log-probs are laid by a wrong length, on one run of tokens that has tool replies in it."""


async def play(config: Any, parts: Parts) -> Rows:
    tasks = config.task.tasks(split="train", seed=config.seed).take(NUM_EPISODES)
    played = [await play_by_messages(config, parts, task) for task in tasks]
    episodes = [episode for episode in played if episode.row.num_trained]
    rows = [episode.row for episode in episodes]
    return Rows.of(
        rows,
        trainer_logprobs=np.concatenate(parts.trainer.forward(rows, column=None)),
        messages=tuple(tuple(episode.messages) for episode in episodes),
        engine_ids=tuple(tuple(episode.replies) for episode in episodes),
        engine_prompt_ids=tuple(tuple(episode.prompts) for episode in episodes),
    )


def tools_of(config: Any) -> str:
    [task] = config.task.tasks(split="train", seed=config.seed).take(1)
    environment = config.task.environment(task, config.agent)
    return json.dumps([
        {"name": t.name, "description": t.description, "parameters": dict(t.parameters)}
        for t in environment.tools
    ])  # fmt: skip


def at_level(rows: Rows, level: str) -> Rows:
    engines = ("engine_ids", "engine_prompt_ids") if level != "e" else ()
    drop = (*engines, *(["messages"] if level in "ab" else []))
    return rows.with_(**dict.fromkeys(drop), turn=None, is_sampled=None)


def told(diagnosis: Any) -> dict[str, Any]:
    causes = [
        {"cause": c.name, "certainty": diagnosis.certainty_of(c, f)[0],
         "share": round(diagnosis.share_of(c.name), 3)}
        for c, f in diagnosis.causes
    ]  # fmt: skip
    gap = diagnosis.examination.gap.means()
    return {
        "outcome": diagnosis.outcome, "headline": diagnosis.headline, "causes": causes,
        "is_right": bool(causes) and causes[0]["cause"] in RIGHT,
        "is_undecided": not causes and diagnosis.outcome != "consistent",
        "next_steps": diagnosis.next_steps,
        "k1": round(gap["k1"], 3), "k2": round(gap["k2"], 3),
    }  # fmt: skip


def judged(model: str, folder: Path) -> dict[str, Any]:
    config = configured(f"model={model}", "contract=none")
    rows = asyncio.run(play(config, build(config, preflight(config))))
    out: dict[str, Any] = {}
    for level in "abce":
        path = folder / f"{model}-{level}.parquet"
        facts = Facts() if level == "a" else Facts(model=model, temperature=1.0)
        if level in "ce":
            facts = replace(facts, tools=tools_of(config))
        write_rows(path, [at_level(rows, level)], facts)
        out[level] = told(diagnose(path, **({} if level == "a" else {"model": model})))
    settings = [f"model={model}", "contract=none", "steps=1", "groups_per_step=4", "group_size=6",
                "evaluation=none", "--fault=rerendered_history"]  # fmt: skip
    faulty_run(settings, folder / f"run-{model}")
    out["d"] = told(diagnose(folder / f"run-{model}"))
    return out


def main() -> None:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            found[model] = judged(model, Path(folder))
            for level, said in found[model].items():
                print(model, level, json.dumps(said), flush=True)
    save("doctor_published", stamp("python docs/proof/doctor_published.py") | {"models": found})


if __name__ == "__main__":
    main()
