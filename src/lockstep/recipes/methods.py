"""Published methods by name. Their settings replace a recipe's; the user's settings replace
both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.config import did_you_mean, nested, overlaid
from lockstep.errors import ConfigError
from lockstep.run_config import Config
from lockstep.tables import tables_beside

BATCHES_PER_STEP = 10
"""Batches that DAPO draws at most for one step, the first included (verl's recipe of it)."""
PENALISED_SHARE = 5
"""DAPO punishes the last 4,096 of 20,480 tokens: a fifth."""


_BY_SIZE: dict[str, Callable[[Config], Mapping[str, Any]]] = {
    "dr_grpo": lambda config: {"objective.aggregate": config.max_tokens},
    "dapo": lambda config: {
        "signal.max_extra_tasks": (BATCHES_PER_STEP - 1) * config.groups_per_step,
        "signal.length_penalty_tokens": config.max_tokens // PENALISED_SHARE,
    },
}
"""Method -> the settings that follow the size of a run."""
METHODS: dict[str, Mapping[str, Any]] = tables_beside(__file__)
"""Method -> its `source`, and what its paper sets. Learning rate, batch size and number of updates
are left out: they follow the model and the task."""


def settings_of(name: str, config: Config) -> dict[str, Any]:
    """The settings of a method for a run, as a tree."""
    fixed = {path: value for path, value in METHODS[name].items() if path != "source"}
    by_size = _BY_SIZE[name](config) if name in _BY_SIZE else {}
    return nested({**fixed, **by_size})


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
    return overlaid(config, settings_of(name, config))
