"""Guesses at the next tokens of requests: what followed the same tokens earlier in the text.

A step computes the guessed tokens beside the last sampled one, and draws behind each, with the
uniform number of its own position. A draw counts as long as every guess before it was drawn as
well. So tokens and log-probs equal a run of single steps. Replies that repeat their prompt, as with
tools that return documents, take fewer steps.

Source: prompt lookup decoding (Saxena 2023); speculative sampling keeps a distribution (Leviathan
et al. 2023), one uniform number per position keeps the draws.
Guard: tests/cpu/engines/test_lookup.py
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from lockstep.engines.embedded.batch import BatchRows, PrefillChunk
from lockstep.ops.base import Ops
from lockstep.types import Float32Array, Int32Array

NGRAM = 3
"""Tokens at the end of the text that the earlier place must have too."""
MAX_GUESSED = 32
"""Guessed tokens of one step, over all rows: from about there on, a CPU computes more tokens at
nearly the full cost of each."""


@dataclass(slots=True, eq=False)
class Guess(PrefillChunk):
    """Guessed tokens of a row, at positions [start, stop)."""

    guessed: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    drawn: tuple[Int32Array, Float32Array] | None = None
    """(ids, log-probs) drawn behind each guessed token."""

    @property
    def ids(self) -> Int32Array:
        return self.guessed


def guesses_of(rows: BatchRows, most: int) -> list[Guess]:
    """At most `most` tokens for each row that may guess: within its pages, and within its limit."""
    most = min(most, MAX_GUESSED // max(rows.num, 1))
    if most < 1:  # else a step would loop over its rows for nothing
        return []
    found: list[Guess] = []
    for row, sequence in enumerate(rows.sequences):
        start = int(rows.positions[row]) + 1
        room = int(rows.num_pages[row]) * rows.page_size - start
        left = int(rows.limits[row] - rows.counts[row]) - 1
        size = min(most, room, left)
        if size < 1 or sequence.support is not None or sequence.grammar is not None:
            continue
        ids = following(rows.text(row), size)
        if len(ids):
            found.append(Guess(sequence, start, start + len(ids), guessed=ids))
    return found


def following(text: Int32Array, most: int) -> Int32Array:
    """The tokens after the latest earlier place of the text's last NGRAM tokens, at most `most`.

    >>> following(np.array([1, 2, 3, 4, 5, 6, 1, 2, 3], np.int32), 2).tolist()
    [4, 5]
    """
    if len(text) <= NGRAM:
        return text[:0]
    # Row i: the NGRAM tokens from place i on. The last row is the end itself.
    places = np.lib.stride_tricks.sliding_window_view(text, NGRAM)[:-1]
    found = np.flatnonzero((places == text[-NGRAM:]).all(1))
    if not len(found):
        return text[:0]
    begin = int(found[-1]) + NGRAM
    return text[begin : begin + most]


def draw(guesses: list[Guess], rows: BatchRows, logits: torch.Tensor, ops: Ops) -> None:
    """Draws behind every guessed token. logits: [guessed tokens, V]."""
    lengths = [len(guess.guessed) for guess in guesses]
    row_of = np.repeat([guess.sequence.row for guess in guesses], lengths)
    positions = np.concatenate([np.arange(g.start, g.stop) for g in guesses])
    ids, logprobs, _ = rows.draw(logits, row_of, positions + 1, ops)
    ends = np.cumsum(lengths)[:-1]
    parts = (np.split(drawn.cpu().numpy(), ends) for drawn in (ids.int(), logprobs))
    for guess, *drawn in zip(guesses, *parts, strict=True):
        guess.drawn = drawn[0], drawn[1]
