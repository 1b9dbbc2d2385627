"""verl's own loss and correction functions, without the training system around them.

    verl = load_verl()            # skips the test that asks, with the reason, where verl is missing
    verl.core_algos.agg_loss(...)
    verl.rollout_corr_helper.compute_rollout_correction_weights(...)

They are read from the installed wheel (`pip install --no-deps verl`). What their modules import and
their numbers do not need (Ray, tensordict, Hydra's configs) is stood in for while they load: the
packages' own `__init__` files are not run, and the stand-ins are gone afterwards.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

VERSION = "0.9.1"
"""The differences that the tests name are those of this version."""

_PACKAGES = ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.trainer.config",
             "verl.workers")  # fmt: skip
_FOREIGN = {
    "omegaconf": ("DictConfig",),
    "tensordict": ("TensorDict",),
    "transformers": ("PreTrainedTokenizer",),
}
"""Package -> the names that are imported from it; their numbers do not depend on any."""


class DataProto:
    """verl's batch, as far as the helper fills one: named tensors."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self.batch = batch

    @classmethod
    def from_dict(cls, tensors: dict[str, Any]) -> DataProto:
        return cls(dict(tensors))


@dataclass
class ActorConfig:
    """The settings that verl's losses read, under its own names and with its own defaults."""

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    policy_loss: dict[str, Any] = field(default_factory=dict)
    global_batch_info: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@dataclass(frozen=True)
class Verl:
    """The modules, and the config type that their losses check for."""

    core_algos: ModuleType
    rollout_corr_helper: ModuleType
    torch_functional: ModuleType
    ActorConfig: type[ActorConfig]


@lru_cache(maxsize=1)
def load_verl() -> Verl:
    """Skips where verl is not installed, or is of another version than `VERSION`."""
    if importlib.util.find_spec("verl") is None:
        pytest.skip(f"pip install --no-deps verl=={VERSION}")
    found = importlib.metadata.version("verl")
    if found != VERSION:
        pytest.skip(f"compared with verl {VERSION}; {found} is installed")
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations, "verl is a package"
    root = Path(next(iter(spec.submodule_search_locations))).parent

    before = {n: m for n, m in sys.modules.items() if n.split(".")[0] in ("verl", *_FOREIGN)}
    for name in before:
        del sys.modules[name]
    try:
        for name in _PACKAGES:
            package = _module(name)
            package.__path__ = [str(root / name.replace(".", "/"))]
        for name, members in _FOREIGN.items():
            _module(name, **{member: type(member, (), {}) for member in members})
        _module("verl.protocol", DataProto=DataProto)
        _module("verl.utils.device", get_device_name=lambda: "cpu", get_torch_device=lambda: None)
        _module("verl.workers.config", ActorConfig=ActorConfig)
        _module("verl.workers.config.actor", PolicyLossConfig=ActorConfig)
        algorithm = importlib.import_module("verl.trainer.config.algorithm")
        sys.modules["verl.trainer.config"].AlgoConfig = algorithm.AlgoConfig
        groupwise = importlib.import_module("verl.utils.groupwise")
        for member in ("as_torch_index", "group_mean_std"):
            setattr(sys.modules["verl.utils"], member, getattr(groupwise, member))
        return Verl(
            core_algos=importlib.import_module("verl.trainer.ppo.core_algos"),
            rollout_corr_helper=importlib.import_module("verl.trainer.ppo.rollout_corr_helper"),
            torch_functional=importlib.import_module("verl.utils.torch_functional"),
            ActorConfig=ActorConfig,
        )
    finally:
        for name in list(sys.modules):
            if name.split(".")[0] in ("verl", *_FOREIGN):
                del sys.modules[name]
        sys.modules.update(before)


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module
    return module
