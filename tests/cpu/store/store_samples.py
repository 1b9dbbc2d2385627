"""Trajectories with every field set, and a comparison that looks at every field."""

from __future__ import annotations

import dataclasses

import numpy as np

from lockstep.types import Group, Message, Ragged, SamplingParams, Task, ToolCall, Trajectory

HOSTILE = "</script><b>\u2028 \ud800 \x00 caf\u00e9"
"""Half a surrogate pair, a NUL and markup: what a tool's output may hold."""


def trajectory(name: str = "t0", *, seed: int = 0, is_rich: bool = True) -> Trajectory:
    """Prompt, call, tool reply, then two branches below it: a finished answer and a retry."""
    rng = np.random.default_rng(seed)
    out = Trajectory(id=name, task_id="task-a", status="finished")
    prompt = out.observe([1, 2, 3], messages=[Message(role="user", content="Who? " + HOSTILE)])
    routes = rng.integers(0, 4, (9, 2, 2)).astype(np.uint8) if is_rich else None
    call = out.record(
        [4, 5, 6, 7],
        logprobs=-rng.random(4),
        parent=prompt,
        prompt_ids=out.path_ids(prompt),
        policy_version=3,
        stop=7,
        sampling=SamplingParams(max_tokens=9, stop_ids=(7,), stop_strings=("\n\n",), top_k=5),
        messages=[Message(role="assistant", tool_calls=(ToolCall(name="f", arguments="{"),))],
        fingerprint="fp",
        routed_experts=None if routes is None else routes[:6],
        support=Ragged.of([[4, 1], [5], [], [2, 7, 9]]) if is_rich else None,
    )
    reply = out.observe([8], parent=call, messages=[Message(role="tool", name="f", content="{}")])
    for attempt in range(2):
        leaf = out.record(
            [9, 10 + attempt],
            logprobs=-rng.random(2),
            parent=reply,
            prompt_ids=out.path_ids(reply),
            finish_reason="length",
            stop="\ud83d" if attempt else None,
            reason="retry" if attempt else "",
            routed_experts=None if routes is None else routes[6:],  # the first is the call's last
            routes_from=6 if is_rich else 0,
        )
        out.rewards[leaf] = float(rng.random())
    out.set_segment_reward(call, 0.25)
    out.reward_parts.update(correctness=1.0, retrieval=1 / 3)
    out.metrics.update(tool_errors=2.0, nothing=float("nan"))
    return out


def failed_trajectory(name: str = "broken") -> Trajectory:
    out = Trajectory(id=name, status="failed", error="tool raised: " + "x" * 50)
    out.observe([1])
    return out


def groups(num_groups: int = 2, group_size: int = 2) -> list[Group]:
    return [
        Group(
            task=Task(id=f"task-{g}", payload={"question": HOSTILE, "n": [1, None]}, source="mix"),
            trajectories=[trajectory(f"{g}-{i}", seed=10 * g + i) for i in range(group_size)],
        )
        for g in range(num_groups)
    ]


def rows_with_trainer_values(some_groups: list[Group], *, gap: float = 1e-3) -> list:
    """Training rows whose trainer log-probs lie `gap` above the sampler's."""
    out = []
    for group_index, group in enumerate(some_groups):
        for t in group.trajectories:
            for sample in t.rows():
                rollout = sample.columns["rollout_logprobs"]
                sample.set("old_logprobs", (rollout + gap).astype(np.float32))
                sample.set("advantages", np.full(len(sample), t.rewards[sample.leaf], np.float32))
                sample.set("importance_weights", np.full(len(sample), 1.5, np.float32))
                sample.group = group_index
                out.append(sample)
    return out


def assert_same(ours: object, theirs: object, where: str = "") -> None:
    """Field by field; NaN equals NaN, and arrays must agree in dtype and every bit."""
    if isinstance(ours, np.ndarray):
        assert isinstance(theirs, np.ndarray), where
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, where
        assert ours.tobytes() == theirs.tobytes(), where
    elif dataclasses.is_dataclass(ours):
        assert type(ours) is type(theirs), where
        for spec in dataclasses.fields(ours):
            assert_same(
                getattr(ours, spec.name), getattr(theirs, spec.name), f"{where}.{spec.name}"
            )
    elif isinstance(ours, dict):
        assert isinstance(theirs, dict) and list(ours) == list(theirs), where
        for key in ours:
            assert_same(ours[key], theirs[key], f"{where}[{key}]")
    elif isinstance(ours, list | tuple):
        assert type(ours) is type(theirs) and len(ours) == len(theirs), where
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    elif isinstance(ours, float) and ours != ours:
        assert isinstance(theirs, float) and theirs != theirs, where
    else:
        assert ours == theirs, where
