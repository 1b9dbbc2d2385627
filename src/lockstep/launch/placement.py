"""Settings of where the processes of a run are started. No torch, no ray."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar, Literal

from lockstep.config import check_numbers
from lockstep.errors import ConfigError
from lockstep.launch.config import ParallelConfig, share_of


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Base of the kinds of the setting `placement`, which says where processes are started."""

    def is_elsewhere(self) -> bool:
        """True if this process only starts and watches a run on other machines."""
        return False

    def check(self, parallel: ParallelConfig, *, num_engines: int, is_shared: bool) -> None:
        """Raises ConfigError if a run cannot be placed like this. num_engines: number of processes
        that sample. is_shared: they take turns with the trainer on one device."""

    def describe(self, parallel: ParallelConfig, *, num_engines: int) -> list[str]:
        """Lines about the placement for the plan of a run."""
        return []


@dataclass(frozen=True, kw_only=True)
class LocalPlacement(PlacementConfig):
    """This machine; or the machines of torchrun, if it has started this process."""

    TAG: ClassVar[str] = "local"


@dataclass(frozen=True, kw_only=True)
class RayPlacement(PlacementConfig):
    """A Ray cluster: each process that trains is an actor, with the resources of its engines. Needs
    the extra `ray`, and the same files on all machines."""

    TAG: ClassVar[str] = "ray"

    address: str = "auto"
    """Address of the cluster: HOST:PORT, or auto for this machine's own cluster."""
    trainer_gpus: int = 0
    """GPUs of each training process: 1 or 0."""
    trainer_cpus: float = 1.0
    """Cores that Ray sets aside for each of them."""
    replica_gpus: int = 0
    """GPUs of each engine of engine.replicas: 1, or vLLM's engine.tensor_parallel. 0 without GPUs,
    and with engine.share_device=true, where they take turns with the trainer on its own."""
    replica_cpus: float = 1.0
    """Cores that Ray sets aside for each of them."""
    strategy: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    """pack: the fewest machines possible; spread: the most. strict_...: exactly so, else an
    error."""
    wait_seconds: ClassVar[float] = 300.0
    """Longest wait for room in the cluster."""
    env: tuple[str, ...] = ()
    """Names of environment variables that the processes get from this one, on top of those known
    to matter (documentation: Scale)."""

    def __post_init__(self) -> None:
        if self.trainer_gpus not in (0, 1):
            raise ConfigError(f"placement.trainer_gpus={self.trainer_gpus} must be 0 or 1.")
        check_numbers(self, "placement.", "replica_gpus", least=0)
        check_numbers(self, "placement.", "trainer_cpus", "replica_cpus")

    def is_elsewhere(self) -> bool:
        return "RANK" not in os.environ

    def check(self, parallel: ParallelConfig, *, num_engines: int, is_shared: bool) -> None:
        self.places(parallel, num_engines=num_engines)
        if num_engines and bool(self.replica_gpus) != (self.trainer_gpus and not is_shared):
            raise ConfigError(
                f"placement.trainer_gpus={self.trainer_gpus} placement.replica_gpus="
                f"{self.replica_gpus}: engine and trainer run on one kind of device. Give both "
                "GPUs, or neither; or the trainer alone, with engine.share_device=true."
            )

    def places(self, parallel: ParallelConfig, *, num_engines: int) -> list[dict[str, float]]:
        """[rank] The resources of a process that trains and of its engines, as Ray reads them."""
        world, out = parallel.num_processes(os.environ), []
        for rank in range(world):
            own = len(share_of(num_engines, rank, world, "engine.replicas")) if num_engines else 0
            cpus = self.trainer_cpus + own * self.replica_cpus
            gpus = self.trainer_gpus + own * self.replica_gpus
            out.append({"CPU": cpus} | ({"GPU": gpus} if gpus else {}))
        return out

    def describe(self, parallel: ParallelConfig, *, num_engines: int) -> list[str]:
        where = "cluster of this machine" if self.address == "auto" else f"at {self.address}"
        lines = [f"placement  the Ray {where}, {self.strategy}"]
        for rank, place in enumerate(self.places(parallel, num_engines=num_engines)):
            what = ", ".join(f"{count:g} {name}" for name, count in place.items())
            lines.append(f"           rank {rank}{' and its engines' * bool(num_engines)}: {what}")
        return lines
