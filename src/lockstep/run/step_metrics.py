"""The figures of one step's episodes, beside what the trainer and the clock give."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.agent.config import AgentConfig
from lockstep.agent.turns import OFFERED
from lockstep.correction import measure
from lockstep.correction.kl import support_bias
from lockstep.errors import RolloutError
from lockstep.observe.metrics import registered_metrics
from lockstep.training.packing import count_inputs
from lockstep.types import Group, Sample, Trajectory

SEAT_FIGURES = ("k1", "k2", "k3", "max_abs_diff", "compared_tokens", "unequal_tokens")
"""Figures of `mismatch/` that each seat has."""
TOKEN_COUNTERS = ("encoded", "prefilled", "cached")


def step_metrics(
    step: int, groups: Sequence[Group], rows: Sequence[Sample], trainer: Mapping[str, float]
) -> dict[str, Any]:
    """One row of metrics.jsonl, without `time/*`. trainer: the metrics of the update.

    Rewards are over the episodes that did not fail; counters are means over all of them. Those of
    other policies are left out of both.
    """
    every = [t for g in groups for t in g.trajectories]
    own = [t for t in every if not t.policy]
    lengths = [t.num_sampled_tokens for t in every]
    row: dict[str, Any] = {"step": step, "policy_version": _version(every)}
    if scored := _scored(own):
        rewards = np.array([t.reward for t in scored], np.float64)
        for figure in ("mean", "std", "min", "max"):
            row[f"reward/{figure}"] = float(getattr(rewards, figure)())
        parts = [t.reward_parts for t in scored if not t.seat]
        row |= {f"reward/{k}": v for k, v in _means(parts).items()}
    counters = _means([t.metrics for t in own])
    row |= _by_source(groups) | _by_seat(groups, rows)
    row |= {
        "episodes/total": len(every),
        "episodes/failed": sum(t.status == "failed" for t in every),
        "episodes/truncated": sum(t.status == "truncated" for t in every),
        "episodes/turns_mean": float(np.mean([t.num_turns for t in every])),
        "episodes/without_signal": sum(
            len(g.trajectories) > 1 and not g.has_signal and not g.trajectories[0].policy
            for g in groups
        ),
        "response_length/mean": float(np.mean(lengths)),
        "response_length/min": min(lengths),
        "response_length/max": max(lengths),
        "tokens/sampled": sum(lengths),
    }
    for name, value in counters.items():
        if name in (f"tokens/{c}" for c in TOKEN_COUNTERS):
            row[name] = round(value * len(own))
        elif name not in ("turns", "seconds") and not name.startswith(OFFERED):
            row[f"episode/{name}"] = value
    if rows:
        advantages = np.concatenate([r.columns["advantages"][r.loss_mask] for r in rows])
        row |= {
            "advantage/mean": float(advantages.mean()),
            "advantage/std": float(advantages.std()),
            "advantage/max_abs": float(np.abs(advantages).max()),
            "training/rows": len(rows),
        }
        row["tokens/rows"], row["tokens/distinct"] = count_inputs(rows)
    row |= _support_bias(groups, rows) | registered_metrics(groups, rows)
    return row | dict(trainer)


def _scored(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories with a reward."""
    return [t for t in trajectories if t.status != "failed" and t.rewards]


def _by_source(groups: Sequence[Group]) -> dict[str, float]:
    """Episodes of each component of a mixture, and the mean reward of its episodes without
    failure."""
    sources: dict[str, list[Trajectory]] = defaultdict(list)
    for group in groups:
        if group.task.source:
            sources[group.task.source] += group.trajectories
    row: dict[str, float] = {}
    for name, episodes in sorted(sources.items()):
        row[f"episodes/source/{name}"] = len(episodes)
        if scored := _scored(episodes):
            row[f"reward/source/{name}"] = float(np.mean([t.reward for t in scored]))
    return row


def _by_seat(groups: Sequence[Group], rows: Sequence[Sample]) -> dict[str, float]:
    """Mean reward of each seat and its raw parts, frozen seats included; its groups without a
    signal; and the mismatch of its trained tokens."""
    trajectories = [t for g in groups for t in g.trajectories]
    seat_of = {t.id: t.seat for t in trajectories if t.seat}
    row: dict[str, float] = {}
    for seat in sorted(set(seat_of.values())):
        played = [t for t in _scored(trajectories) if t.seat == seat]
        row[f"episodes/seat/{seat}"] = sum(t.seat == seat for t in trajectories)
        rounds = [part.trajectories for g in groups for part in g.by_seat()]
        by_group = [[t.reward for t in _scored(r)] for r in rounds if r[0].seat == seat]
        silent = [rewards for rewards in by_group if len(rewards) > 1 and len(set(rewards)) == 1]
        row[f"episodes/without_signal/{seat}"] = len(silent)
        if played:
            row[f"reward/{seat}/mean"] = float(np.mean([t.reward for t in played]))
        parts = _means([t.reward_parts for t in played])
        row |= {f"reward/{seat}/{name}": value for name, value in parts.items()}
        of_seat = [r for r in rows if seat_of[r.id.rpartition("/")[0]] == seat]
        if of_seat and all("logprobs" in r.columns for r in of_seat):
            trainer, rollout = (
                np.concatenate([r.columns[name][r.loss_mask] for r in of_seat])
                for name in ("logprobs", "rollout_logprobs")
            )
            name = f"mismatch/by_seat/{seat}"
            found = measure(trainer, rollout).to_metrics(name, by_part=False)
            row |= {f"{name}/{k}": found[f"{name}/{k}"] for k in SEAT_FIGURES}
    return row


def _support_bias(groups: Sequence[Group], rows: Sequence[Sample]) -> dict[str, float]:
    """`mismatch/support_bias`, if top-p or top-k cut what any trained token was drawn from."""
    trajectories = {t.id: t for g in groups for t in g.trajectories}
    masks: list[np.ndarray] = []
    has_truncated = False
    for row in rows:
        trajectory_id, _, leaf = row.id.rpartition("/")
        trajectory = trajectories[trajectory_id]
        segments = [trajectory.segments[i] for i in trajectory.path(int(leaf))]
        is_truncated = [s.sampling is not None and s.sampling.is_truncated for s in segments]
        is_unknown = [s.support is None for s in segments]
        has_truncated |= any(is_truncated)
        is_biased = np.logical_and(is_truncated, is_unknown)
        masks.append(np.repeat(is_biased, [len(s) for s in segments]) & row.loss_mask)
    if not has_truncated or not all("logprobs" in row.columns for row in rows):
        return {}
    rollout, trainer = (
        np.concatenate([row.columns[name] for row in rows])
        for name in ("rollout_logprobs", "logprobs")
    )
    bias = support_bias(rollout, trainer, np.concatenate(masks))
    return {"mismatch/support_bias": float(bias) + 0.0}  # + 0.0: -0.0 is shown as 0.0


LIMITS = ("max_turn_tokens", "max_tokens", "max_turns", "max_seconds")
"""Limits that may cut an episode; the `error` of a truncated trajectory begins with its name."""
MAX_TOOLS = 32
"""Tools with figures of their own: those called most."""


def health_metrics(
    groups: Sequence[Group],
    agent: AgentConfig,
    *,
    compares: bool,
    decode: Callable[[Sequence[int]], str],
) -> tuple[dict[str, float], dict[str, str]]:
    """Figures that `lockstep.observe.alarms.TRIGGERS` reads of a step's episodes beside
    `step_metrics`, and trigger -> an example in words.

    compares: whether the comparison of rewards within a group teaches. decode: ids as text.
    """
    own = [t for g in groups for t in g.trajectories if not t.policy]
    scored = [t.reward for t in _scored(own)]
    cuts = Counter(limit for t in own for limit in _limits_met(t, agent))
    row: dict[str, float] = {f"episodes/cut/{name}": cuts[name] for name in LIMITS}
    row["episodes/same_reward"] = len(scored) if len(set(scored)) == 1 else 0
    if compares and all(s.reward is None for t in own for s in t.segments):
        compared = [g for g in groups if len(g.trajectories) > 1 and not g.trajectories[0].policy]
        row["episodes/groups"] = len(compared)
    failures = Counter(t.error for t in own if t.status == "failed")
    reasons = {"failed": failures.most_common(1)[0][0]} if failures else {}
    tools: dict[str, Counter[str]] = defaultdict(Counter)
    for trajectory in own:
        tools["offered"].update(_offered(trajectory))
        for name, reply in _calls(trajectory):
            is_error = reply is not None and reply.lstrip().lower().startswith("error")
            tools["calls"][name] += 1
            tools["answered"][name] += reply is not None
            tools["failed"][name] += is_error
            if is_error:
                reasons["tool_failing"] = " ".join(str(reply).split())[:200]
    shown = sorted(tools["offered"], key=lambda name: (-tools["calls"][name], name))[:MAX_TOOLS]
    uncalled = {name for name in shown if not tools["calls"][name]}
    for group in groups if uncalled else ():
        begun = [t for t in group.trajectories if t.segments and not t.policy]
        prompt = decode(begun[0].segments[0].token_ids.tolist()) if begun else ""
        for name in uncalled & {name for t in begun for name in _offered(t)}:
            if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", prompt):
                tools["hidden"][name] += len(begun)
    for kind, counts in tools.items():
        row |= {f"tool/{kind}/{name}": counts[name] for name in shown}
    return row, reasons


def _limits_met(trajectory: Trajectory, agent: AgentConfig) -> set[str]:
    """The limits that cut the episode, or a turn of it that an agent went on from."""
    met = {
        "max_turn_tokens"
        for segment in trajectory.segments
        if segment.finish_reason == "length" and len(segment) >= agent.max_turn_tokens
    }
    if agent.continue_cut_turns:  # such a turn goes on
        met.clear()
    limit = trajectory.error.partition(":")[0].replace("harness.run", "max_seconds")
    return met | {limit} if limit in LIMITS and trajectory.status == "truncated" else met


def _offered(trajectory: Trajectory) -> set[str]:
    return {n.removeprefix(OFFERED) for n in trajectory.metrics if n.startswith(OFFERED)}


def _calls(trajectory: Trajectory) -> Iterator[tuple[str, str | None]]:
    """(tool, the text that the model read) of each call; None where the episode ended before."""
    replies: dict[int, list[str]] = {}
    for segment in trajectory.segments:
        if segment.parent is not None and not segment.is_sampled:
            texts = [message.content for message in segment.messages if message.role == "tool"]
            replies.setdefault(segment.parent, texts)
    for index, segment in enumerate(trajectory.segments):
        calls = [call for message in segment.messages for call in message.tool_calls]
        for at, call in enumerate(calls if segment.is_sampled else ()):
            texts = replies.get(index, [])
            yield call.name, texts[at] if at < len(texts) else None


def check_failures(groups: Sequence[Group], max_share: float, *, where: str) -> None:
    """Raises RolloutError if more than `max_share` of the episodes failed: the rest would be a
    biased sample of the policy."""
    every = [t for g in groups for t in g.trajectories]
    failed = [t for t in every if t.status == "failed"]
    if len(failed) > max_share * len(every):
        reasons = Counter(t.error for t in failed).most_common(3)
        listed = "; ".join(f"{count} x {reason}" for reason, count in reasons)
        raise RolloutError(
            f"{where}: {len(failed)} of {len(every)} episodes failed, more than "
            f"max_failed_share={max_share:g}. {listed.rstrip('.')}. The first is {failed[0].id}."
        )


def _means(counters: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """name -> mean over all counters; a missing name counts as 0."""
    sums: dict[str, float] = defaultdict(float)
    for each in counters:
        for name, value in each.items():
            sums[name] += value
    return {name: value / len(counters) for name, value in sorted(sums.items())}


def _version(trajectories: Sequence[Trajectory]) -> int:
    """The newest policy version that sampled any of them; -1 if nothing was sampled."""
    versions = [s.policy_version for t in trajectories for s in t.segments if s.is_sampled]
    return max((v for v in versions if v is not None), default=-1)
