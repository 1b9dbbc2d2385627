"""Settings of training with several processes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.config import check_numbers
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
class ParallelConfig:
    """Number of processes that train one model together, and how they divide the work.

    Tokens are divided `sequence` ways and rows over the rest. With 8 processes and sequence=2, four
    pairs of processes each take a quarter of the micro-batches, each process half of their tokens.
    """

    processes: int = 0
    """Processes to start on this machine, one per GPU if there are any. 0: the processes that
    torchrun has started, or this one alone."""
    sequence: int = 1
    """Processes that share each micro-batch, each with a part of the tokens (Ulysses): for rows
    whose activations do not fit one device. Must divide the processes and the model's heads."""
    shard: bool = True
    """Shard weights, gradients and optimizer state over all processes (FSDP2); the embedded engine
    then samples from a copy of its own. False keeps everything on each, and shares the weights."""
    timeout_seconds: float = 1800.0
    """Seconds that a process waits for another one; then the run ends with an error on all. After a
    step the limit falls to 20 times the longest step so far plus agent.max_seconds, if that is
    less."""

    def __post_init__(self) -> None:
        check_numbers(self, "parallel.", "processes", least=0)
        check_numbers(self, "parallel.", "sequence", least=1)
        check_numbers(self, "parallel.", "timeout_seconds")

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
        size, possible = self.sequence, []
        for ways in range(1, num_heads + 1):
            is_dealt = num_kv_heads % ways == 0 or ways % num_kv_heads == 0
            if num_heads % ways == 0 and is_dealt:
                possible.append(ways)
        if size not in possible:
            raise ConfigError(
                f"parallel.sequence={size} cannot split the model's {num_heads} query heads and "
                f"{num_kv_heads} key heads: each process computes whole ones. Possible are "
                f"{', '.join(map(str, possible))}."
            )
