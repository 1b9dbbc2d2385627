"""Settings of where the processes of a run are started. No torch, no ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from lockstep.config import check_numbers
from lockstep.errors import ConfigError
from lockstep.launch.config import ParallelConfig, share_of


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Base of the kinds of the setting `placement`, which says where processes are started."""

    def is_elsewhere(self) -> bool:
        """Whether this process only starts and watches the run, which is elsewhere."""
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
class Bundle:
    """Resources of one machine that are handed out together, and the processes that share them."""

    cpus: float
    gpus: float
    ranks: tuple[int, ...] = ()
    engines: tuple[int, ...] = ()

    @property
    def resources(self) -> dict[str, float]:
        """The resources, as Ray reads them."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})

    @property
    def gpus_each(self) -> float:
        """GPUs of each process in it."""
        return self.gpus / (len(self.ranks) + len(self.engines))


@dataclass(frozen=True, kw_only=True)
class RayPlacement(PlacementConfig):
    """A Ray cluster: each process that trains and each engine of engine.replicas is an actor with
    resources of its own. Needs the extra `ray`, and the same files on all machines."""

    TAG: ClassVar[str] = "ray"

    address: str = ""
    """Address of the cluster: auto for the one that this machine belongs to, or HOST:PORT. Empty
    starts one on this machine, and ends it with the run."""
    trainer_gpus: int = 0
    """GPUs of each training process: 1 or 0."""
    trainer_cpus: float = 1.0
    """Cores that Ray sets aside for each of them."""
    replica_gpus: int = 0
    """GPUs of each engine: 1 or 0."""
    replica_cpus: float = 1.0
    """Cores that Ray sets aside for each of them."""
    colocate: bool = False
    """Run engines on the machine and the GPU of the process that they sample for;
    engine.share_device=true then makes them take turns. False gives them GPUs of their own."""
    strategy: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    """pack: as few machines as possible; spread: as many as possible. strict_...: or not at all."""
    wait_seconds: float = 300.0
    """Longest wait for room in the cluster."""
    env: tuple[str, ...] = ()
    """Names of environment variables that the processes get from this one, on top of those known
    to matter (docs/scale.md)."""

    def __post_init__(self) -> None:
        for name in ("trainer_gpus", "replica_gpus"):
            if getattr(self, name) not in (0, 1):
                raise ConfigError(f"placement.{name}={getattr(self, name)} must be 0 or 1.")
        check_numbers(self, "placement.", "trainer_cpus", "replica_cpus", "wait_seconds")
        if self.colocate and self.replica_gpus:
            raise ConfigError(
                "placement.colocate=true puts engines on the GPUs of the trainer's processes: "
                "leave placement.replica_gpus at 0."
            )

    def is_elsewhere(self) -> bool:
        return "RANK" not in os.environ

    def check(self, parallel: ParallelConfig, *, num_engines: int, is_shared: bool) -> None:
        self.bundles(self.num_ranks(parallel, os.environ), num_engines)
        if self.colocate and self.trainer_gpus and num_engines and not is_shared:
            raise ConfigError(
                "placement.colocate=true: engines and trainer have one GPU, and would both hold "
                "their memory. Set engine.share_device=true: they then take turns."
            )
        if bool(self.trainer_gpus) != bool(self.replica_gpus) and num_engines and not self.colocate:
            raise ConfigError(
                f"placement.trainer_gpus={self.trainer_gpus} and placement.replica_gpus="
                f"{self.replica_gpus}: engine and trainer run one decoder on one kind of device. "
                "Give both GPUs, or neither."
            )

    def num_ranks(self, parallel: ParallelConfig, environment: Mapping[str, str]) -> int:
        """Number of processes that train."""
        return parallel.num_processes(environment)

    def bundles(self, num_ranks: int, num_engines: int) -> list[Bundle]:
        """The resources to request from the cluster."""
        if not self.colocate or not num_engines:
            trainer = Bundle(cpus=self.trainer_cpus, gpus=self.trainer_gpus)
            engine = Bundle(cpus=self.replica_cpus, gpus=self.replica_gpus)
            return [
                *(_with(trainer, ranks=(rank,)) for rank in range(num_ranks)),
                *(_with(engine, engines=(index,)) for index in range(num_engines)),
            ]
        out = []
        for rank in range(num_ranks):
            own = tuple(share_of(num_engines, rank, num_ranks, "engine.replicas"))
            cpus = self.trainer_cpus + len(own) * self.replica_cpus
            out.append(Bundle(cpus=cpus, gpus=self.trainer_gpus, ranks=(rank,), engines=own))
        return out

    def describe(self, parallel: ParallelConfig, *, num_engines: int) -> list[str]:
        where = {"": "a Ray of this machine alone", "auto": "the Ray cluster of this machine"}
        lines = [f"placement  {where.get(self.address, f'Ray at {self.address}')}, {self.strategy}"]
        for bundle in self.bundles(self.num_ranks(parallel, os.environ), num_engines):
            who = [f"rank {rank}" for rank in bundle.ranks]
            who += [f"engine {index}" for index in bundle.engines]
            what = f"{bundle.cpus:g} CPUs" + (f", {bundle.gpus:g} GPU" if bundle.gpus else "")
            lines.append(f"           {' and '.join(who)}: {what}")
        return lines


def _with(bundle: Bundle, **who: tuple[int, ...]) -> Bundle:
    return Bundle(cpus=bundle.cpus, gpus=bundle.gpus, **who)
