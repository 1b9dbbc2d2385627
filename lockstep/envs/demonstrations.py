"""Demonstrations for supervised training in two stages: without mistakes, then with some.

The first stage teaches the format and the skill. The second leaves something to improve for
reinforcement learning.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.agent.task_config import DialogueConfig, DialogueStage
from lockstep.config import check_numbers, require
from lockstep.types import Message


@dataclass(frozen=True, kw_only=True)
class _Demonstrations(DialogueConfig):
    """Base of demonstrations that a program writes. A subclass gives `demonstrate`."""

    num_dialogues: int = 40000
    """Dialogues in both stages, each about a task of its own."""
    clean_share: float = 0.75
    """Share of the steps and dialogues that the stage without mistakes has."""

    def __post_init__(self) -> None:
        check_numbers(self, "", "num_dialogues", least=2)
        require(self, "", clean_share=(0 < self.clean_share < 1, "in (0, 1)"))

    def demonstrate(self, rng: random.Random, *, is_noisy: bool) -> list[Message]:
        """One dialogue about a task drawn from `rng`. is_noisy: with mistakes."""
        raise NotImplementedError

    def clean_word_weights(self) -> dict[str, float]:
        """Loss weights of words in the stage without mistakes."""
        return {}

    def stages(self, seed: int) -> Sequence[DialogueStage]:
        rng = random.Random(seed)
        num_clean = round(self.num_dialogues * self.clean_share)
        stages: list[DialogueStage] = []
        for share, count, is_noisy in (
            (self.clean_share, num_clean, False),
            (1 - self.clean_share, self.num_dialogues - num_clean, True),
        ):
            dialogues = [self.demonstrate(rng, is_noisy=is_noisy) for _ in range(count)]
            weights = {} if is_noisy else self.clean_word_weights()
            stages.append(DialogueStage(share=share, dialogues=dialogues, word_weights=weights))
        return tuple(stages)
