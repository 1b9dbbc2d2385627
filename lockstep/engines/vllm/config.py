"""Settings of vLLM: servers that are reached, servers that the run starts, or in this process."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

from lockstep.engines.config import EngineConfig, ServedConfig
from lockstep.errors import ConfigError
from lockstep.launch.config import share_of

OF_ATTACHED = (
    "urls", "start_seconds", "request_seconds", "api_key_env", "share_device", "pool", "take_over",
)  # fmt: skip
"""The settings that say something of servers that others have started."""


@dataclass(frozen=True, kw_only=True)
class VllmConfig(ServedConfig):
    """vLLM. With engine.urls on servers that are up; without, on servers that the run starts and
    ends; with engine.in_process=true in this process. See docs/vllm.md."""

    can_record_routes: ClassVar[bool] = True

    in_process: bool = False
    """Run vLLM inside the training process, which then must have it installed."""
    python: str = ""
    """Interpreter of the environment that has vLLM, for servers that the run starts; empty is
    this one."""
    replicas: int = 1
    """Servers that the run starts."""
    dtype: Literal["same", "float32", "bfloat16", "float16"] = "same"
    """What the engine computes in; same is what the trainer computes in."""
    max_num_sequences: int = 64
    """Requests that one replica runs at the same time; more wait."""
    kv_cache_gib: float = 0.0
    """GiB of keys and values that a replica holds; 0 is vLLM's share of the GPU's memory, and 1
    where there is no GPU."""
    prefix_cache: bool = True
    """Keep the keys and values of finished requests, so that the next turn computes only what is
    new."""
    deterministic: bool = False
    """VLLM_BATCH_INVARIANT=1: kernels whose result does not depend on the batch. vLLM has them for
    GPUs; slower."""
    eager: bool | None = None
    """No compilation and no CUDA graphs: slower steps, a quicker start. none: only where there is
    no GPU."""
    tensor_parallel: int = 1
    """GPUs that one replica is spread over."""
    max_adapter_rank: int = 0
    """Take the weights of a run with lora as an adapter of at most this rank; 0 takes them merged
    into the model."""
    args: tuple[str, ...] = ()
    """More arguments of vLLM's server, as --NAME=VALUE; in process, of its LLM class."""
    env: tuple[str, ...] = ()
    """Environment variables of the engine's processes, as NAME=VALUE."""

    def __post_init__(self) -> None:
        ServedConfig.__post_init__(self)
        if self.urls and self.in_process:
            raise ConfigError(
                "engine.urls and engine.in_process=true: the engine is behind one or inside the "
                "other. Leave one out."
            )
        if self.in_process and (self.python or self.replicas != 1):
            raise ConfigError(
                "engine.in_process=true runs one engine, with this interpreter: leave engine."
                "python and engine.replicas out."
            )
        if self.urls:
            self._check_attached()
        for name in ("replicas", "max_num_sequences", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name}={getattr(self, name)} must be at least 1.")
        if self.max_adapter_rank < 0:
            raise ConfigError(
                f"engine.max_adapter_rank={self.max_adapter_rank} must be at least 0."
            )
        if not 0 <= self.kv_cache_gib < math.inf:
            raise ConfigError(
                f"engine.kv_cache_gib={self.kv_cache_gib} must be at least 0; 0 is vLLM's choice."
            )
        for value in self.args:
            if not value.startswith("--"):
                raise ConfigError(f"engine.args: {value!r} must read --NAME or --NAME=VALUE.")
        for value in self.env:
            if not value.partition("=")[0].isidentifier() or "=" not in value:
                raise ConfigError(f"engine.env: {value!r} must read NAME=VALUE.")

    def for_rank(self, rank: int, world: int) -> EngineConfig:
        if self.urls or self.in_process:
            return ServedConfig.for_rank(self, rank, world)
        return replace(self, replicas=len(share_of(self.replicas, rank, world, "engine.replicas")))

    def replica_configs(self) -> tuple[EngineConfig, ...]:
        if self.replicas == 1:
            return ServedConfig.replica_configs(self)
        return (replace(self, replicas=1),) * self.replicas

    def _check_attached(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in OF_ATTACHED and value != field.default:
                raise ConfigError(
                    f"engine.{field.name}={value} with engine.urls: those servers run already, "
                    f"and it would do nothing. Start them with it, or leave one of the two out."
                )
