"""Which ids end a turn and which open one: said by the setting, or learnt from the rows.

# N tokens  S spans (sampled turns)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from lockstep.checks.base import Setting
from lockstep.checks.rows import BoolArray, Rows
from lockstep.renderers.base import Renderer
from lockstep.types import Int32Array, Int64Array, Message

MIN_TURNS = 8
"""Turns that must end with an id before it is taken for a stop id: fewer end alike by chance."""
MIN_SHARE = 0.2
"""Share of the turns that a learnt stop id must end. Harmony has two; a reply that is cut off ends
with any id, each of them rarely."""
MIN_PRECISION = 0.9
"""Share of its sampled occurrences at which a learnt stop id must end the turn: the last character
of calls ("}") ends many turns too, and stands within others."""
TOP_OF_VOCABULARY = 0.97
"""Ids above this share of the largest one seen are taken for control tokens where there is no
tokenizer: byte-level vocabularies have theirs at the end."""
MIN_FOLLOWED = 0.95
"""Share of the observed occurrences of an id that one other id must follow, for it to be a part of
the template (ChatML: a line break behind <|im_end|>)."""
OPENING_TOKENS = 2
"""Ids before a turn that a learnt opening has: "assistant" and a line break, or <|start|> and
"assistant". Longer ones are of the message before it."""
MIN_OPENING = 0.05
"""Share of the turns that a learnt opening must precede."""


class TemplateIds:
    """What a check knows of the template. Counts over chunks; holds no rows."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._num_turns = 0
        self._ends: Counter[int] = Counter()
        self._inside: Counter[int] = Counter()
        self._followers: dict[int, Counter[int]] = {}
        self._openings: Counter[tuple[int, ...]] = Counter()
        self._max_id = 0

    def add(self, rows: Rows) -> None:
        """Learns from a chunk; what the setting says is not asked for again."""
        spans, ids = rows.spans, rows.token_ids
        if not len(spans):
            return
        if not self._setting.stop_ids:
            self._num_turns += len(spans)
            self._max_id = max(self._max_id, int(ids.max()))
            self._ends.update(counted(ids[spans.end - 1]))
            for candidate in self._candidates():
                at = np.flatnonzero(ids == candidate)
                is_sampled = rows.sampled[at]
                self._inside[candidate] += int(is_sampled.sum())
                at = at[~is_sampled]
                at = at[at + 1 < rows.num_tokens]
                at = at[rows.row_of[at + 1] == rows.row_of[at]]
                self._followers.setdefault(candidate, Counter()).update(counted(ids[at + 1]))
            self.__dict__.pop("stop_ids", None)
        if self._setting.renderer is None:
            begin = spans.begin
            has_room = rows.position[begin] >= OPENING_TOKENS
            pairs = np.stack(
                [ids[begin[has_room] - back] for back in range(OPENING_TOKENS, 0, -1)], axis=1
            )
            unique, num = np.unique(pairs, axis=0, return_counts=True)
            for opening, count in zip(unique.tolist(), num.tolist(), strict=True):
                self._openings[tuple(opening)] += count
            self.__dict__.pop("openings", None)

    def _candidates(self) -> list[int]:
        least = max(MIN_TURNS, MIN_SHARE * self._num_turns)
        return [id_ for id_, count in self._ends.most_common(4) if count >= least]

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a turn; empty if none is known."""
        if self._setting.stop_ids:
            return self._setting.stop_ids
        return frozenset(
            id_
            for id_ in self._candidates()
            if self._ends[id_] >= MIN_PRECISION * self._inside[id_]
        )

    @property
    def is_sure(self) -> bool:
        """The stop ids are control tokens beyond doubt, and not what replies happen to end with."""
        if self._setting.stop_ids:
            return True
        return bool(self.stop_ids) and all(self._is_control(id_) for id_ in self.stop_ids)

    def _is_control(self, id_: int) -> bool:
        if self._setting.tokenizer is not None:
            return id_ in self._setting.tokenizer.control_ids
        if id_ >= TOP_OF_VOCABULARY * self._max_id:
            return True
        followers = self._followers.get(id_, Counter())
        num = followers.total()
        return num >= MIN_TURNS and followers.most_common(1)[0][1] >= MIN_FOLLOWED * num

    @property
    def is_exact(self) -> bool:
        """The opening is the renderer's, and not what was learnt."""
        return self._setting.renderer is not None

    @cached_property
    def openings(self) -> tuple[tuple[int, ...], ...]:
        """Ids directly before a turn; one of them if the renderer is known, which is then all."""
        if self._setting.renderer is not None:
            return (opening_of(self._setting.renderer),)
        least = max(MIN_TURNS, MIN_OPENING * self._openings.total())
        return tuple(opening for opening, num in self._openings.items() if num >= least)

    def is_stop(self, rows: Rows) -> BoolArray:
        """[N]"""
        return is_one_of(rows.token_ids, self.stop_ids)

    def opening_ends(self, rows: Rows) -> Int64Array:
        """[X] index after each opening in the rows, in order."""
        found = [np.empty(0, np.int64)]
        for opening in self.openings:
            found.append(ends_of(opening, rows))
        return np.unique(np.concatenate(found))


def opening_of(renderer: Renderer) -> tuple[int, ...]:
    """What a renderer writes before each turn, whatever came before it."""
    stop = [renderer.stop_ids[0]]
    user = [Message(role="user", content="a")]
    first = renderer.render(user)
    then = renderer.extend(stop, [Message(role="user", content="b")])
    size = 0
    while size < min(len(first), len(then)) and first[-size - 1] == then[-size - 1]:
        size += 1
    # The close of the user's message is the same in both too: the opening begins with the id that
    # each of the messages begins with.
    opening = first[len(first) - size :]
    starts = [at for at, id_ in enumerate(opening) if id_ == first[0]]
    return tuple(opening[starts[-1] :] if starts else opening)


def ends_of(sequence: Sequence[int], rows: Rows) -> Int64Array:
    """[X] index after each place where `sequence` stands inside of one row."""
    ids, size = rows.token_ids, len(sequence)
    at = np.flatnonzero(ids == sequence[0])
    at = at[at + size <= rows.num_tokens]
    for step, id_ in enumerate(sequence[1:], start=1):
        at = at[ids[at + step] == id_]
    at = at[rows.row_of[at] == rows.row_of[at + size - 1]] if len(at) else at
    return at + size


def is_one_of(ids: Int32Array, wanted: frozenset[int]) -> BoolArray:
    """[N]; one comparison per id wanted, of which there are few."""
    out = np.zeros(len(ids), np.bool_)
    for id_ in wanted:
        out |= ids == id_
    return out


def counted(values: Int32Array) -> dict[int, int]:
    unique, num = np.unique(values, return_counts=True)
    return dict(zip(unique.tolist(), num.tolist(), strict=True))
