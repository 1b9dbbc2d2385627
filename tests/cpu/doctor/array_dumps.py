"""Dumps in memory: rows of two turns whose two sides agree to 1e-3, and ways to break them."""

from pathlib import Path

import numpy as np

from lockstep.doctor.inputs.base import Dump, Facts
from lockstep.doctor.rows import Rows
from lockstep.types import Message

TURNS = ((10, 50), (70, 110))
NUM_TOKENS = 120


class ArrayDump(Dump):
    format = "arrays"

    def __init__(self, rows, *, name="dump.parquet", chunk=7, lacks=None, **facts):
        super().__init__(Path(name))
        self.rows, self.chunk = rows, chunk
        self._facts, self._lacks = Facts(**facts), lacks or {}
        self.num_read = 0

    @classmethod
    def recognises(cls, path):
        return False

    @property
    def facts(self):
        return self._facts

    @property
    def has(self):
        names = ("rollout_logprobs", "trainer_logprobs", "turn", "steps", "messages", "rewards")
        return frozenset(n for n in names if getattr(self.rows, n) is not None)

    @property
    def lacks(self):
        return self._lacks

    def chunks(self, *, max_tokens=0):
        self.num_read += 1
        for first in range(0, len(self.rows), self.chunk):
            yield self.rows.take(range(first, min(first + self.chunk, len(self.rows))))


def make_rows(num_rows=20, *, seed=0, shifted=(), ids=None):
    """The log-probs of the rows `shifted` stand one place too late."""
    rng = np.random.default_rng(seed)
    turn = np.full(NUM_TOKENS, -1, np.int32)
    for number, (a, b) in enumerate(TURNS):
        turn[a:b] = number
    sampled = np.tile(turn >= 0, num_rows)
    trainer = -rng.exponential(1.0, num_rows * NUM_TOKENS)
    rollout = np.minimum(trainer + rng.normal(0, 1e-3, len(trainer)), 0.0)
    for row in shifted:
        for a, b in TURNS:
            place = slice(row * NUM_TOKENS + a, row * NUM_TOKENS + b)
            rollout[place] = np.roll(rollout[place], 1)
    ids = rng.integers(32, 127, num_rows * NUM_TOKENS) if ids is None else ids
    dialogue = (
        Message(role="user", content="How far?"),
        Message(role="assistant", content="I look."),
        Message(role="tool", name="search", content="nothing"),
        Message(role="assistant", content="Far."),
    )
    return Rows(
        row_ids=tuple(f"row-{i}" for i in range(num_rows)),
        offsets=np.arange(num_rows + 1) * NUM_TOKENS,
        token_ids=ids.astype(np.int32),
        loss_mask=sampled,
        rollout_logprobs=np.where(sampled, rollout, np.nan).astype(np.float32),
        trainer_logprobs=np.where(sampled, trainer, np.nan).astype(np.float32),
        turn=np.tile(turn, num_rows),
        steps=np.arange(num_rows) // 5,
        rewards=rng.random(num_rows),
        messages=(dialogue,) * num_rows,
    )
