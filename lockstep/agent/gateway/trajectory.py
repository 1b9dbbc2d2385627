"""A session's trajectory as it is sent over HTTP: for programs, and for people."""

from __future__ import annotations

import textwrap
from typing import Any

from lockstep.types import Message, Trajectory

SEGMENT_FIELDS = (
    "parent", "turn", "is_sampled", "reason", "policy_version", "finish_reason", "stop",
)  # fmt: skip


def trajectory_to_dict(trajectory: Trajectory) -> dict[str, Any]:
    """JSON-able: every segment with its ids, log-probs and messages. Numbers are finite."""
    names = ("id", "task_id", "status", "error", "reward_parts", "metrics")
    return {
        **{name: getattr(trajectory, name) for name in names},
        "rewards": {str(leaf): reward for leaf, reward in trajectory.rewards.items()},
        "segments": [
            {
                **{name: getattr(segment, name) for name in SEGMENT_FIELDS},
                "token_ids": segment.token_ids.tolist(),
                "logprobs": None if segment.logprobs is None else segment.logprobs.tolist(),
                "messages": [message.to_dict() for message in segment.messages],
            }
            for segment in trajectory.segments
        ],
    }


def describe_trajectory(trajectory: Trajectory) -> str:
    """The tree, a line per segment and its messages below it.

    >>> t = Trajectory(id="demo")
    >>> p = t.observe([1, 2], messages=[Message(role="user", content="hi")])
    >>> a = t.record([3], logprobs=[-0.5], parent=p, prompt_ids=[1, 2])
    >>> print(describe_trajectory(t))
    demo: running, 1 turns, 3 tokens, 1 of them sampled
    0 observed 2 tokens
      user: hi
    1 sampled 1 tokens, stop
    """
    num_tokens = sum(map(len, trajectory.segments))
    lines = [
        f"{trajectory.id}: {trajectory.status}, {trajectory.num_turns} turns, {num_tokens} tokens, "
        f"{trajectory.num_sampled_tokens} of them sampled"
    ]
    if trajectory.error:
        lines.append(f"error: {trajectory.error}")
    for at, segment in enumerate(trajectory.segments):
        words = ["sampled" if segment.is_sampled else "observed", f"{len(segment)} tokens"]
        line = f"{at} {' '.join(words)}"
        if segment.finish_reason:
            line += f", {segment.finish_reason}"
        # A parent in the line above is not named.
        if segment.parent is not None and segment.parent != at - 1:
            line += f", after {segment.parent}"
        if segment.reason:
            line += f", a branch: {segment.reason}"
        if (reward := trajectory.rewards.get(at)) is not None:
            line += f", reward {reward:g}"
        lines.append(line)
        lines += [textwrap.indent(_described(message), "  ") for message in segment.messages]
    return "\n".join(lines)


def _described(message: Message) -> str:
    role = f"{message.role} ({message.name})" if message.name else message.role
    lines = [f"{role}: {message.content}"]
    if message.thinking:
        lines.insert(0, f"{role}, thinking: {message.thinking}")
    lines += [f"{role} calls {call.name}({call.arguments})" for call in message.tool_calls]
    return "\n".join(lines)
