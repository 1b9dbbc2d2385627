"""Fixed texts that engine and trainer both score, to compare their weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from lockstep.engines.base import Engine, Scores
from lockstep.errors import EngineError
from lockstep.models.decoder import Decoder
from lockstep.sync.config import SyncConfig
from lockstep.training.trainer import Trainer
from lockstep.types import Sample, frozen_ids

LogProbs = npt.NDArray[np.float64]
"""[N] Log-probs of all tokens of the probe except the first of each text, in order."""


class Probe:
    """Texts of random ids, with the engine and the trainer that score them."""

    def __init__(
        self,
        config: SyncConfig,
        engine: Engine,
        trainer: Trainer,
        *,
        left_out: frozenset[int] = frozenset(),
        max_tokens: int = 1 << 30,
    ) -> None:
        """left_out: ids that no text has: control tokens, which an engine may treat specially."""
        self.engine, self.trainer = engine, trainer
        vocab_size = min(engine.capabilities.vocab_size, trainer.model.config.vocab_size)
        allowed = np.setdiff1d(np.arange(vocab_size), list(left_out))
        limits = (max_tokens, engine.capabilities.max_tokens, trainer.model.config.max_positions)
        draws = np.random.default_rng([0, 6]).integers(
            0, len(allowed), (config.num_probes, min(config.probe_tokens, *limits))
        )
        self.texts = [frozen_ids(allowed[row], where="probe") for row in draws]
        self._rows = [
            Sample(id=f"probe/{at}", token_ids=ids, loss_mask=np.arange(len(ids)) > 0)
            for at, ids in enumerate(self.texts)
        ]

    def by_trainer(self, model: Decoder | None = None) -> LogProbs:
        """Scores by the trainer's current weights, or by the weights of `model`. Collective over
        the ranks of a run."""
        trainer = self.trainer
        before, trainer.temperature = trainer.temperature, 1.0
        try:
            # Naming the model makes it choose its own experts: the probe has no routes to replay.
            found = trainer.forward(self._rows, column=None, model=model or trainer.model)
        finally:
            trainer.temperature = before
        return np.concatenate([values[1:] for values in found]).astype(np.float64)

    async def by_engines(self, *, version: int) -> dict[str, LogProbs]:
        """Scores by every engine: by the name of each replica of a pool, by "" for a single engine.

        Raises EngineError for scores of another version than was loaded, or that are not finite.
        """
        # Temperature 1, which every engine supports; the comparison of weights needs no other.
        score = partial(self.engine.score_by_each, distribution="model", temperature=1.0)
        by_each = await asyncio.gather(*map(score, self.texts))
        names = [name for name in by_each[0] if all(name in of_text for of_text in by_each)]
        if not names:
            raise EngineError("sync: no replica of the engine has scored the whole probe.")
        return {name: self._values([f[name] for f in by_each], name, version) for name in names}

    def _values(self, found: Sequence[Scores], replica: str, version: int) -> LogProbs:
        name = f"{self.engine.capabilities.name}{f' ({replica})' * bool(replica)}"
        if others := {scores.policy_version for scores in found} - {version}:
            raise EngineError(
                f"sync: version {version} was loaded, and engine {name} scores under version "
                f"{', '.join(map(str, sorted(others)))}: it has not taken the load. Look at its "
                "log."
            )
        values = np.concatenate([scores.logprobs[1:] for scores in found]).astype(np.float64)
        if not np.isfinite(values).all():
            raise EngineError(
                f"sync: {(~np.isfinite(values)).sum()} of {len(values)} log-probs that engine "
                f"{name} gives under version {version} are not finite: a half-loaded or diverged "
                "policy."
            )
        return values
