"""Published methods by name. Their settings replace a recipe's; the user's settings replace
both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config import did_you_mean, overlaid
from lockstep.errors import ConfigError
from lockstep.run_config import Config

BATCHES_PER_STEP = 10
"""Batches that DAPO draws at most for one step, the first included (verl's recipe of it)."""
PENALISED_SHARE = 5
"""DAPO punishes the last 4,096 of 20,480 tokens: a fifth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Settings of a paper. Learning rate, batch size and number of updates are left out: they
    follow the model and the task."""

    source: str
    settings: Callable[[Config], Mapping[str, Any]]
    """config -> its settings, by their paths."""


METHODS = {
    "grpo": Method(
        source="Shao et al. 2024, arXiv 2402.03300",
        settings=lambda _: {
            "objective": {
                "type": "ppo_clip",
                "clip": [0.2, 0.2],
                "aggregate": "sequence_mean",
                "kl_coef": 0.04,
                "kl_estimator": "k3",
            },
            "advantage": {"type": "grpo", "normalize_std": True},
        },
    ),
    "dr_grpo": Method(
        source="Liu et al. 2025, arXiv 2503.20783",
        settings=lambda config: {
            "objective": {
                "type": "ppo_clip",
                "clip": [0.2, 0.2],
                "aggregate": "fixed_length",
                "fixed_length": config.max_tokens,
            },
            "advantage": {"type": "grpo", "normalize_std": False},
        },
    ),
    "dapo": Method(
        source="Yu et al. 2025, arXiv 2503.14476",
        settings=lambda config: {
            "objective": {"type": "ppo_clip", "clip": [0.2, 0.28], "aggregate": "token_mean"},
            "advantage": {"type": "grpo", "normalize_std": True},
            "signal.max_extra_tasks": (BATCHES_PER_STEP - 1) * config.groups_per_step,
            "signal.length_penalty_tokens": config.max_tokens // PENALISED_SHARE,
        },
    ),
    "gspo": Method(
        source="Zheng et al. 2025, arXiv 2507.18071",
        settings=lambda _: {
            "objective": {"type": "gspo", "clip": [3e-4, 4e-4], "aggregate": "sequence_mean"},
            "advantage": {"type": "grpo", "normalize_std": True},
        },
    ),
    "cispo": Method(
        source="MiniMax 2025, arXiv 2506.13585",
        settings=lambda _: {
            "objective": {"type": "cispo", "clip": [1.0, 1.0], "aggregate": "token_mean"},
            "advantage": {"type": "grpo", "normalize_std": True},
        },
    ),
}


def with_method(config: Config, name: str) -> Config:
    """`config` with what the paper of this name sets. Raises ConfigError with the nearest name if
    there is no such method.

    >>> from lockstep.recipes import find_recipe
    >>> config = with_method(find_recipe("quickstart"), "dapo")
    >>> config.objective.clip, config.signal.max_extra_tasks, config.signal.length_penalty_tokens
    ((0.2, 0.28), 72, 51)
    """
    if name not in METHODS:
        raise ConfigError(f"method={name}: no such method.{did_you_mean(name, METHODS)}")
    return overlaid(config, METHODS[name].settings(config))
