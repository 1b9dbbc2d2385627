"""Settings of the processes of a run: how they divide the work, and where they start. No torch,
no ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from lockstep.config import ABOVE_0, Checked, at_least
from lockstep.errors import ConfigError


def share_of(count: int, rank: int, world: int, setting: str) -> range:
    """A rank's share of the `count` things that a setting names: neighbours, with shares that
    differ by at most one. Raises ConfigError if there is not one for each rank.

    >>> [list(share_of(5, rank, 2, "engine.urls")) for rank in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    if count < world:
        raise ConfigError(
            f"{setting} has {count} for {world} processes that train: each samples its share of "
            f"the tasks with at least one engine of its own, which no other one loads weights "
            f"into. Give {world} or more, or train with fewer processes."
        )
    return range(count * rank // world, count * (rank + 1) // world)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Checked):
    """Number of processes that train one model together, and how they divide the work.

    Tokens are divided `sequence` ways and rows over the rest. With 8 processes and sequence=2, four
    pairs of processes each take a quarter of the micro-batches, each process half of their tokens.
    """

    processes: Annotated[int, at_least(0)] = 0
    """Processes to start on this machine, one per GPU if there are any. 0: the processes that
    torchrun has started, or this one alone."""
    sequence: Annotated[int, at_least(1)] = 1
    """Processes that share each micro-batch, each with a part of the tokens (Ulysses): for rows
    whose activations do not fit one device. Must divide the processes and the model's heads."""
    shard: bool = True
    """Shard weights, gradients and optimizer state over all processes (FSDP2); the embedded engine
    then samples from a copy of its own. False keeps everything on each, and shares the weights."""
    timeout_seconds: Annotated[float, ABOVE_0] = 1800.0
    """Seconds that a process waits for another one; then the run ends with an error on all. After a
    step the limit falls to 20 times the longest step so far plus agent.max_seconds, if that is
    less."""

    def num_processes(self, environment: Mapping[str, str]) -> int:
        """Number of processes that train, by these settings and torchrun's environment.

        Raises ConfigError if the two disagree, or cannot be divided as asked.
        """
        started = int(environment.get("WORLD_SIZE", "0"))
        if started and self.processes not in (0, started):
            raise ConfigError(
                f"parallel.processes={self.processes}, but torchrun has started {started} "
                "processes. Leave parallel.processes=0 under torchrun."
            )
        world = started or self.processes or 1
        if world % self.sequence:
            raise ConfigError(
                f"parallel.sequence={self.sequence} does not divide the {world} process(es) of the "
                "run. Set parallel.processes (or torchrun's --nproc-per-node) to a multiple of it."
            )
        return world

    def check_heads(self, *, num_heads: int, num_kv_heads: int) -> None:
        """Raises ConfigError if a model's heads cannot be divided among `sequence` processes."""
        divisors = [ways for ways in range(1, num_heads + 1) if num_heads % ways == 0]
        possible = [n for n in divisors if num_kv_heads % n == 0 or n % num_kv_heads == 0]
        if self.sequence not in possible:
            raise ConfigError(
                f"parallel.sequence={self.sequence} cannot split the model's {num_heads} query "
                f"heads and {num_kv_heads} key heads: each process computes whole ones. Possible "
                f"are {', '.join(map(str, possible))}."
            )


class Demand(NamedTuple):
    """The needs of a run's processes: engines, ranks and GPUs."""

    num_engines: int = 0
    """Processes that sample."""
    cores: int = 1
    """Cores of each process."""
    trainer_gpus: int = 0
    """GPUs of each process that trains."""
    engine_gpus: int = 0
    """GPUs of each engine; none of its own where it takes turns with the trainer."""


@dataclass(frozen=True, kw_only=True)
class PlacementConfig(Checked):
    """Base of the kinds of the setting `placement`, which says where processes are started."""

    def is_elsewhere(self) -> bool:
        """True if this process only starts and watches a run on other machines."""
        return False

    def check(self, parallel: ParallelConfig, demand: Demand) -> None:
        """Raises ConfigError if a run cannot be placed like this."""

    def describe(self, parallel: ParallelConfig, demand: Demand) -> list[str]:
        """Lines about the placement for the plan of a run."""
        return []


@dataclass(frozen=True, kw_only=True)
class LocalPlacement(PlacementConfig):
    """This machine; or the machines of torchrun, if it has started this process."""

    TAG: ClassVar[str] = "local"


@dataclass(frozen=True, kw_only=True)
class RayPlacement(PlacementConfig):
    """A Ray cluster: each process that trains is an actor, with the resources of its engines: cores
    by `threads`, GPUs by `device` and the engine. As few machines are used as possible. Needs the
    extra `ray`, and the same files on all machines."""

    TAG: ClassVar[str] = "ray"

    address: str = "auto"
    """Address of the cluster: HOST:PORT, or auto for this machine's own cluster."""
    wait_seconds: ClassVar[float] = 300.0
    """Longest wait for room in the cluster."""
    env: tuple[str, ...] = ()
    """Names of environment variables that the processes get from this one, on top of those known
    to matter (documentation: Scale)."""

    def is_elsewhere(self) -> bool:
        return "RANK" not in os.environ

    def check(self, parallel: ParallelConfig, demand: Demand) -> None:
        self.places(parallel, demand)

    def places(self, parallel: ParallelConfig, demand: Demand) -> list[dict[str, int]]:
        """[rank] The resources of a process that trains and of its engines, as Ray reads them."""
        world, out = parallel.num_processes(os.environ), []
        count, cores, trainer_gpus, engine_gpus = demand
        for rank in range(world):
            own = len(share_of(count, rank, world, "engine.replicas")) if count else 0
            gpus = trainer_gpus + own * engine_gpus
            out.append({"CPU": (1 + own) * cores} | ({"GPU": gpus} if gpus else {}))
        return out

    def describe(self, parallel: ParallelConfig, demand: Demand) -> list[str]:
        where = "cluster of this machine" if self.address == "auto" else f"at {self.address}"
        whose = " and its engines" * bool(demand.num_engines)
        lines = [f"placement  the Ray {where}"]
        for rank, place in enumerate(self.places(parallel, demand)):
            what = ", ".join(f"{count} {name}" for name, count in place.items())
            lines.append(f"           rank {rank}{whose}: {what}")
        return lines
