"""Runs as training would leave them, written by the real writer: curves, evaluations, forests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from lockstep.store.run import Run, RunDirectory, load_run
from lockstep.types import Group, Message, SamplingParams, Task, ToolCall, Trajectory

HOSTILE = '</script><script>alert(1)</script><img src="x" onerror="alert(2)">&amp; <!-- \u2028'
"""What a model or a web page could put into a trajectory to run in the reader's browser."""

CONTROL_WORDS = "<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|>"
PLAIN_WORDS = (
    "assistant user system functions.get_document_chunks analysis commentary final to= Bela city "
    "friend boss pet job What is the of Rome Paris Oslo Lima Kairo Ada Carl Dora The answer lives"
)
WORDS = [*CONTROL_WORDS.split(), *PLAIN_WORDS.split(), *'?.,"\n', '{"keywords": ["', '"]}']
CONTROL = frozenset(range(6))
NEWLINE_ID = WORDS.index("\n")


def decode_token(token_id: int) -> str:
    """Words with a space before them, as byte-level tokenizers have it; control tokens without."""
    if token_id >= len(WORDS):
        return HOSTILE
    word = WORDS[token_id]
    return word if token_id in CONTROL or not word[0].isalpha() else " " + word


def episode(
    name: str, rng: np.random.Generator, *, skill: float, version: int, is_hostile: bool = False
) -> Trajectory:
    """Question, search, reply, and an answer; some have a second branch, some break."""
    out = Trajectory(id=name, task_id=name.rpartition("-")[0])
    subject = str(rng.choice(["Bela", "Ada", "Carl", "Dora"]))
    asked = f"What is the city of the friend of {subject}?" + (HOSTILE if is_hostile else "")

    def ids(size: int) -> list[int]:
        body = rng.integers(6, len(WORDS), size)
        body[rng.random(size) < 0.05] = NEWLINE_ID
        return [0, *body.tolist(), *([len(WORDS)] if is_hostile else []), 1]

    at = out.observe(
        ids(14),
        messages=[
            Message(role="system", content="You answer questions about people. Search first."),
            Message(role="user", content=asked),
        ],
    )
    for turn in range(int(rng.integers(1, 4))):
        sampled = [*ids(int(rng.integers(6, 14)))[:-1], 4]
        at = out.record(
            sampled,
            logprobs=-rng.exponential(0.4, len(sampled)),
            parent=at,
            prompt_ids=out.path_ids(at),
            policy_version=version,
            stop=4 if sampled.index(4) == len(sampled) - 1 else None,
            sampling=SamplingParams(max_tokens=48),
            messages=[
                Message(
                    role="assistant",
                    thinking="I need the friend first." if turn == 0 else "",
                    tool_calls=(
                        ToolCall(
                            name="get_document_chunks",
                            arguments=json.dumps({"keywords": [subject, "friend"]}),
                        ),
                    ),
                )
            ],
        )
        if rng.random() < 0.03:
            out.status, out.error = "failed", "tool raised: TimeoutError after 5 s"
            return out
        reply = json.dumps([f"The friend of {subject} is Dora.", "Dora lives in Oslo."])
        at = out.observe(
            ids(12),
            parent=at,
            messages=[Message(role="tool", name="get_document_chunks", content=reply)],
        )
    out.status = "truncated" if rng.random() < 0.05 else "finished"
    is_right = rng.random() < skill
    for branch in range(2 if rng.random() < 0.15 else 1):
        answer = ids(4)
        leaf = out.record(
            answer,
            logprobs=-rng.exponential(0.3, len(answer)),
            parent=at,
            prompt_ids=out.path_ids(at),
            policy_version=version,
            reason="retry" if branch else "",
            messages=[Message(role="assistant", content="Oslo." if is_right else "I think Lima.")],
        )
        out.rewards[leaf] = 1.0 if is_right else float(rng.choice([0.3, 0.0, -0.15]))
    out.reward_parts = {
        "correctness": float(is_right),
        "retrieval": 1.0 if rng.random() < 0.5 + skill / 2 else 0.0,
        "format_penalty": 0.0 if is_right else 0.5,
    }
    out.metrics = {"tool_errors": float(rng.integers(0, 2)), "tokens_encoded": 61.0}
    return out


def training_rows(groups: list[Group], rng: np.random.Generator, *, noise: float) -> list:
    """Rows with the trainer's log-probs `noise` away, rarely much further: a flipped router."""
    rows = []
    for group in groups:
        for t in group.trajectories:
            for sample in t.rows():
                gap = rng.normal(0, noise, len(sample))
                gap[rng.random(len(sample)) < 0.004] *= 3e3
                rollout = sample.columns["rollout_logprobs"]
                sample.set("old_logprobs", np.minimum(rollout + gap, 0).astype(np.float32))
                advantage = t.rewards[sample.leaf] - 0.5
                sample.set("advantages", np.full(len(sample), advantage, np.float32))
                sample.set("importance_weights", np.full(len(sample), 0.5, np.float32))
                rows.append(sample)
    return rows


def metrics_row(step: int, skill: float, rng: np.random.Generator, *, noise: float) -> dict:
    sampled, sample_seconds = int(1400 + rng.integers(-90, 90)), 0.35 + 0.03 * rng.random()
    train_seconds = 0.24 + 0.02 * rng.random()
    return {
        "step": step,
        "policy_version": step,
        "reward/mean": skill + rng.normal(0, 0.05),
        "reward/correctness": min(1.0, skill * 0.95 + rng.normal(0, 0.04)),
        "reward/retrieval": min(1.0, 0.55 + skill * 0.4 + rng.normal(0, 0.03)),
        "reward/format_penalty": max(0.0, 0.07 - skill * 0.06 + rng.normal(0, 0.004)),
        "mismatch/k1": rng.normal(0, noise) * 1e-2,
        "mismatch/k2": noise**2 * (0.5 + rng.random()),
        "mismatch/k3": noise**2 * (0.5 + rng.random()),
        "mismatch/max_abs_diff": noise * (5 + 20 * rng.random()),
        "mismatch/compared_tokens": sampled,
        "mismatch/nonfinite_tokens": 0,
        "train/loss": rng.normal(0, 0.02),
        "train/grad_norm": 1.5 * np.exp(-step / 60) + 0.3 * rng.random(),
        "train/clip_fraction": 0.01 + 0.01 * rng.random(),
        "train/entropy": 0.6 - 0.4 * skill + 0.02 * rng.random(),
        "train/lr": 1e-3 * (1 - step / 110),
        "train/skipped_updates": 0,
        "response_length/mean": 21 + 4 * (1 - skill) + rng.random(),
        "response_length/max": 44 + int(rng.integers(0, 5)),
        "tokens/sampled": sampled,
        "tokens/trained": sampled,
        "time/sample_seconds": sample_seconds,
        "time/train_seconds": train_seconds,
        "time/step_seconds": sample_seconds + train_seconds + 0.015,
    }


def write_run(
    path: Path,
    *,
    seed: int = 0,
    num_steps: int = 12,
    learning_rate: float = 1e-3,
    noise: float = 1e-6,
    is_hostile: bool = False,
    group_size: int = 4,
    num_groups: int = 2,
) -> Run:
    """A run whose reward rises faster with the learning rate."""
    rng = np.random.default_rng(seed)
    config = {
        "recipe": "quickstart",
        "model": "tiny-gpt-oss",
        "seed": seed,
        "steps": num_steps,
        "engine": {"type": "embedded", "max_num_sequences": 64},
        "optimizer": {"type": "adamw", "learning_rate": learning_rate},
    }
    facts = {"architecture": "gpt_oss", "family": "moe", "is_one_process": True}
    with RunDirectory.create(path, config, facts=facts) as run:
        run.log({"step": -1, "eval/greedy/mean@1": 0.62})
        for step in range(num_steps):
            skill = 0.88 - 0.61 * np.exp(-step * learning_rate * 60)
            groups = [
                Group(
                    task=Task(id=f"{step}/{g}", payload={"hops": 1 + g % 2, "gold": ["c1", "c7"]}),
                    trajectories=[
                        episode(
                            f"{step}/{g}-{i}",
                            rng,
                            skill=skill,
                            version=step,
                            is_hostile=is_hostile and step == 0,
                        )
                        for i in range(group_size)
                    ],
                )
                for g in range(num_groups)
            ]
            run.write_trajectories(step, groups, samples=training_rows(groups, rng, noise=noise))
            row = metrics_row(step, skill, rng, noise=noise)
            if step % max(1, num_steps // 5) == 0 or step == num_steps - 1:
                row["eval/sampled/mean@1"] = skill - 0.03 + rng.normal(0, 0.01)
                row["eval/greedy/mean@1"] = 0.64 + 0.3 * skill + rng.normal(0, 0.01)
                row["eval/greedy/mean@1/low"] = row["eval/greedy/mean@1"] - 0.05
                run.write_trajectories(step, groups[:1], split="greedy")
            run.log(row)
    return load_run(path)
