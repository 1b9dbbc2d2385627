"""The recipes that come with Lockstep: the tables of `shipped.toml`. Importing this file also
registers all kinds of tasks and sandboxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lockstep.agent.judge
import lockstep.agent.sandbox.bubblewrap
import lockstep.agent.sandbox.container
import lockstep.envs.docsearch.config
import lockstep.envs.instructions.config
import lockstep.envs.math.config
import lockstep.envs.mixture
import lockstep.envs.openenv
import lockstep.envs.programs.config
import lockstep.envs.questions
import lockstep.envs.reasoning_gym.config
import lockstep.envs.verifiers.config  # noqa: F401
from lockstep.config import from_settings, merged
from lockstep.recipes.registry import recipe, supervised_recipe
from lockstep.run_config import Config, SupervisedConfig
from lockstep.tables import tables_beside

_TABLES = tables_beside(__file__)
_BY_NAME: dict[str, dict[str, Any]] = {**_TABLES["settings"], **_TABLES["train"], **_TABLES["sft"]}


def _settings_of(name: str) -> dict[str, Any]:
    """The settings of a table, over the ones of the table that it names with `like`."""
    own = {key: value for key, value in _BY_NAME[name].items() if key not in ("about", "like")}
    like = _BY_NAME[name].get("like")
    return merged(_settings_of(like), own) if like else own


def _function_of(name: str, cls: Any) -> Callable[[], Any]:
    def make() -> Any:
        return from_settings(cls, {"name": name, **_settings_of(name)}, ())

    make.__name__ = make.__qualname__ = name
    make.__doc__ = _BY_NAME[name]["about"]
    return make


for _name in _TABLES["train"]:
    recipe(_function_of(_name, Config))
for _name in _TABLES["sft"]:
    supervised_recipe(_function_of(_name, SupervisedConfig))
