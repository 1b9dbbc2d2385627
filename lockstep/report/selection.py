"""Selects the trajectories of a report: the telling ones, and a fair sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.store.files import encode_number
from lockstep.store.run import Address, Run
from lockstep.store.trajectories import TrajectoryRecord, TrajectorySummary, read_row
from lockstep.types import Float32Array

# Steps whose summaries are looked at. Beyond it every n-th step is, the last included.
_MAX_STEPS_READ = 400


NUM_TRAJECTORIES, NUM_TOKENS = 200, 120_000
"""Most trajectories and tokens of a report, about 25 bytes a token with two log-probs: a page of a
few megabytes opens at once, also on a phone."""


@dataclass(frozen=True)
class _Candidate:
    summary: TrajectorySummary
    address: Address
    split: str


def select(
    runs: Sequence[Run], *, num_trajectories: int, num_tokens: int
) -> tuple[list[dict[str, Any]], int, int]:
    """Chooses within these limits, evenly over the runs, and reads only the chosen ones.

    Returns (their documents, number of stored trajectories, number of chosen ones that were too
    long for the budget of tokens). From each run: the worst mismatches, the best and worst rewards
    of its second half, unfinished episodes, evaluations, and an even sample of the rest.
    """
    documents: list[dict[str, Any]] = []
    num_stored = num_left_out = 0
    num_left, tokens_left = num_trajectories, num_tokens
    for index, run in enumerate(runs):
        runs_left = len(runs) - index
        candidates = _candidates(run)
        num_stored += len(candidates)
        spent = 0
        share = tokens_left // runs_left
        for candidate, reasons in _choose(candidates, num_left // runs_left):
            size = candidate.summary.num_tokens
            if spent and spent + size > share:  # one is always shown, however long
                num_left_out += 1
                continue
            spent += size
            num_left -= 1
            record = read_row(*candidate.address)
            documents.append(to_document(record, run=index, split=candidate.split, why=reasons))
        tokens_left -= spent
    return documents, num_stored, num_left_out


def _candidates(run: Run) -> list[_Candidate]:
    out = []
    for split in run.splits():
        steps = run.steps(split=split)
        stride = -(-len(steps) // _MAX_STEPS_READ) if steps else 1
        for step in steps[::-1][::stride][::-1]:
            for summary, address in run.summaries(step, split=split):
                out.append(_Candidate(summary, address, split))
    return out


def _choose(candidates: Sequence[_Candidate], number: int) -> list[tuple[_Candidate, list[str]]]:
    """Up to `number` candidates, each with why it was chosen, the most telling first."""
    trained = [c for c in candidates if c.split == "train"]
    middle = np.median([c.summary.step for c in trained]) if trained else 0
    late = [c for c in trained if c.summary.step >= middle and math.isfinite(c.summary.reward)]
    measured = [c for c in trained if c.summary.max_abs_logprob_diff is not None]
    part = max(1, number * 15 // 100)
    chosen: dict[Address, tuple[_Candidate, list[str]]] = {}

    def take(label: str, ordered: Sequence[_Candidate], limit: int) -> None:
        for candidate in ordered[:limit]:
            if candidate.address in chosen:
                chosen[candidate.address][1].append(label)
            elif len(chosen) < number:
                chosen[candidate.address] = (candidate, [label])

    worst = sorted(measured, key=lambda c: -(c.summary.max_abs_logprob_diff or 0.0))
    take("worst mismatch", worst, part)
    take("worst reward", sorted(late, key=lambda c: c.summary.reward), part)
    take("best reward", sorted(late, key=lambda c: -c.summary.reward), part)
    unfinished = [c for c in candidates if c.summary.status != "finished"]
    take("unfinished", _spread(unfinished, part), part)
    evaluations = [c for c in candidates if c.split != "train"]
    take("evaluation", _spread(evaluations, part), part)
    rest = [c for c in trained if c.address not in chosen]
    sample = _spread(rest, number - len(chosen))
    take("sample", sample, len(sample))
    return list(chosen.values())


def _spread(candidates: Sequence[_Candidate], number: int) -> list[_Candidate]:
    """`number` of them at even distances, first and last included."""
    if len(candidates) <= number:
        return list(candidates)
    places = np.linspace(0, len(candidates) - 1, max(number, 0)).round().astype(int)
    return [candidates[place] for place in places]


def to_document(
    record: TrajectoryRecord, *, run: int, split: str, why: Sequence[str]
) -> dict[str, Any]:
    """One trajectory as JSON. Log-probs are the shortest decimals that are the same float32."""
    trajectory = record.trajectory
    trained = (record.trainer_logprobs, record.advantages, record.importance_weights)
    values = zip(trajectory.segments, *trained, strict=True)
    return {
        "run": run,
        "split": split,
        "why": list(why),
        "step": record.step,
        "group": record.group,
        "task_id": record.task.id,
        "task": dict(record.task.payload),
        "id": trajectory.id,
        "status": trajectory.status,
        "error": trajectory.error,
        "reward": encode_number(trajectory.reward),
        "rewards": [[leaf, encode_number(reward)] for leaf, reward in trajectory.rewards.items()],
        "parts": {name: encode_number(value) for name, value in trajectory.reward_parts.items()},
        "metrics": {name: encode_number(value) for name, value in trajectory.metrics.items()},
        "segments": [
            {
                "parent": segment.parent,
                "is_sampled": segment.is_sampled,
                "turn": segment.turn,
                "policy_version": segment.policy_version,
                "finish_reason": segment.finish_reason,
                "stop": segment.stop,
                "reason": segment.reason,
                "reward": None if segment.reward is None else encode_number(segment.reward),
                "token_ids": segment.token_ids.tolist(),
                "rollout_logprobs": shortest(segment.logprobs),
                "trainer_logprobs": shortest(trainer),
                "advantages": shortest(advantages),
                "importance_weights": shortest(weights),
                "messages": [message.to_dict() for message in segment.messages],
            }
            for segment, trainer, advantages, weights in values
        ],
    }


def shortest(values: Float32Array | None) -> list[Any] | None:
    """As JSON, in the shortest decimals that are the same float32."""
    if values is None:
        return None
    # str of a float32 is the shortest text that reads back as the same float32.
    return [encode_number(float(str(value))) for value in values]
