"""The teachers of a run: models and servers that score what the student sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.engines.base import Engine
from lockstep.errors import AlignmentError, EngineError, LockstepError, named
from lockstep.training.config import DistillConfig
from lockstep.training.trainer import Distillation, Metrics, Trainer
from lockstep.types import Group, Sample

if TYPE_CHECKING:
    from lockstep.models.decoder import Decoder

MAX_IN_FLIGHT = 64  # rows that a server scores at the same time

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function of the trainer, beside the event loop where others go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teachers:
    """Teachers by the setting that names them; each is a model in this process, or an engine."""

    config: DistillConfig
    models: Mapping[str, Decoder]
    engines: Mapping[str, Engine]

    @property
    def in_update(self) -> Distillation:
        """The distillation that the trainer's own forward makes."""
        is_full = self.config.signal == "full"
        return Distillation(self.config, [*self.models.values()] if is_full else ())

    async def score(
        self, rows: Sequence[Sample], groups: Sequence[Group], trainer: Trainer, in_thread: InThread
    ) -> Metrics:
        """Fills the columns that the trainer reads, `teacher_logprobs` or other signals' columns,
        and adds the teachers' part to `advantages`. Returns `distill/...`.

        groups: of the rows, by `Sample.group`; the source of their tasks chooses the teacher.
        Raises EngineError naming the teacher whose server failed. Collective over ranks.
        """
        config = self.config
        names = [*self.models, *self.engines]
        settings = [config.setting_of(groups[row.group].task.source) for row in rows]
        for number, name in enumerate(names):
            own = [row for row, of in zip(rows, settings, strict=True) if of == name]
            if not own:
                continue
            if name in self.engines:
                await self._ask(name, own, trainer)
                continue
            model = self.models[name]
            if config.signal == "full":
                for row in own:
                    row.set("teacher", np.full(len(row), number, np.int32))
                continue
            if config.signal == "top_k":
                await in_thread(partial(trainer.list_likely, own, model, top_k=config.top_k))
            await in_thread(partial(trainer.forward, own, column="teacher_logprobs", model=model))
        for row in rows:
            row.set("advantages", row.columns["advantages"] * np.float32(config.reward_coef))
        if config.signal == "full":
            return {}
        gaps = [gap_to_teacher(row) for row in rows]
        if config.signal == "sampled":
            for row, gap in zip(rows, gaps, strict=True):
                row.columns["advantages"][row.loss_mask] += np.float32(config.coef) * gap
        every = np.concatenate([np.empty(0, np.float32), *gaps])
        return {"distill/kl": float(-every.mean(dtype=np.float64))} if every.size else {}

    async def _ask(self, name: str, rows: Sequence[Sample], trainer: Trainer) -> None:
        """Each rank asks for its share of the rows, and all get all of them."""
        engine, ranks = self.engines[name], trainer.ranks
        rank, world = (0, 1) if ranks is None else (ranks.rank, ranks.world)
        room = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def of_row(number: int) -> tuple[int, Any]:
            row = rows[number]
            first = int(row.loss_mask.argmax())
            async with room:
                found = await engine.score(row.token_ids, first=first, affinity=row.id)
            return number, found.logprobs

        mine: list[tuple[int, Any]] = []
        failure = ""
        try:
            mine = await asyncio.gather(*map(of_row, range(rank, len(rows), world)))
        except LockstepError as error:
            failure = named(error)
        found = [(mine, failure)] if ranks is None else ranks.gather((mine, failure))
        if failure := next((text for _, text in found if text), ""):
            raise EngineError(
                f"{name}: the teacher did not score the rows ({failure}). Nothing was updated. "
                "Start its server again, and resume the run."
            )
        for number, logprobs in (each for scored, _ in found for each in scored):
            row = rows[number]
            row.set("teacher_logprobs", np.where(row.loss_mask, logprobs, np.float32("nan")))

    async def close(self) -> None:
        """Ends the connections to the servers."""
        await asyncio.gather(*(engine.close() for engine in self.engines.values()))


def gap_to_teacher(row: Sample) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[trained tokens] float32: log teacher - log student of each, 0.0 where the sampler recorded
    nothing. Raises AlignmentError where the teacher's is no finite number.

    The advantage of on-policy distillation: its negative mean estimates KL(student || teacher). A
    token's gap is its own alone: later ones are not added to it (discount 0). Source: Lu et al.,
    On-Policy Distillation, Thinking Machines 2025.
    """
    theirs, recorded = (
        row.columns[name][row.loss_mask] for name in ("teacher_logprobs", "rollout_logprobs")
    )
    if not np.isfinite(theirs).all():
        at = int(np.flatnonzero(~np.isfinite(theirs))[0])
        raise AlignmentError(
            f"sample {row.id}: the teacher's log-prob of trained token {at} is {theirs[at]}; it "
            "must be a finite number. Are the teacher's weights whole?"
        )
    return np.where(np.isnan(recorded), np.float32(0), theirs - recorded)
