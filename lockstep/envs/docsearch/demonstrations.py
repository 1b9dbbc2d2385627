"""Demonstrations of document search as a supervised training's data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.agent.task_config import DialogueConfig, DialogueStage
from lockstep.envs.docsearch.demonstrator import demonstration
from lockstep.envs.docsearch.worlds import ENTITY_WORDS, World
from lockstep.errors import ConfigError
from lockstep.types import Message


@dataclass(frozen=True, kw_only=True)
class SearchDemonstrationsConfig(DialogueConfig):
    """First a demonstrator without fault, so that copying from results is learnt at all; then one
    that errs on purpose, so that there is something left for reinforcement learning to find."""

    num_dialogues: int = 16000
    """Dialogues over both stages, each about a world of its own."""
    clean_share: float = 0.75
    """Of the steps and dialogues."""
    entity_weight: float = 3.0
    """Loss weight of names and values in the clean stage."""

    def __post_init__(self) -> None:
        if self.num_dialogues < 2 or not 0 < self.clean_share < 1:
            raise ConfigError(
                f"num_dialogues={self.num_dialogues} must be at least 2 and clean_share="
                f"{self.clean_share} in (0, 1)."
            )

    def stages(self, seed: int) -> Sequence[DialogueStage]:
        rng = random.Random(seed)
        num_clean = round(self.num_dialogues * self.clean_share)

        def play(count: int, *, noisy: bool) -> list[list[Message]]:
            return [demonstration(World.generate(rng), rng, noisy) for _ in range(count)]

        weights = dict.fromkeys(sorted(ENTITY_WORDS), self.entity_weight)
        return (
            DialogueStage(
                share=self.clean_share,
                dialogues=play(num_clean, noisy=False),
                word_weights=weights,
            ),
            DialogueStage(
                share=1 - self.clean_share,
                dialogues=play(self.num_dialogues - num_clean, noisy=True),
                word_weights={},
            ),
        )
