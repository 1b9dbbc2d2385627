"""Runs of the quickstart, for the benchmarks that train."""

from __future__ import annotations

import asyncio
import json
import math
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.agent.tasks import derive_seed
from lockstep.envs.docsearch.config import DocSearchConfig

QUIET = ("evaluation.at_start=false", "checkpoint.every=0")


@dataclass(frozen=True, kw_only=True)
class SlowSearchConfig(DocSearchConfig):
    """Document search whose tool takes a while."""

    seconds: float
    """Mean time of a call with a tail, longest time without."""
    has_tail: bool
    """The time is distributed exponentially, as tools' times are; else uniformly."""

    def environment(self, task: Any, *given: Any) -> Any:
        environment = super().environment(task, *given)
        step, num_calls = environment.step, 0

        async def slow(message: Any) -> Any:
            nonlocal num_calls
            if message.tool_calls:
                num_calls += 1
                drawn = derive_seed("tool", task.id, num_calls) / 2**63
                share = -math.log(max(drawn, 1e-9)) if self.has_tail else drawn
                await asyncio.sleep(self.seconds * share)
            return await step(message)

        environment.step = slow
        return environment


def train_quickstart(
    settings: Sequence[str], out: str, tool_seconds: float = 0.0, has_tail: bool = True
) -> dict[str, float]:
    """A run into `out`: processor seconds of this process, and of the sampler's processes."""
    from lockstep.config import resolve
    from lockstep.recipes import find_recipe
    from lockstep.run.train import train

    config = resolve(find_recipe("quickstart"), [*QUIET, *settings])
    if tool_seconds:
        slow = SlowSearchConfig(seconds=tool_seconds, has_tail=has_tail)
        config = replace(config, task=slow)
    train(config, out=Path(out), view="json")
    own, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "trainer_cpu": own.ru_utime + own.ru_stime,
        "sampler_cpu": children.ru_utime + children.ru_stime,
    }


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of each training step."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "train/loss" in row]
