"""The ids that end and open turns: given by the setting, or learnt from the rows.

# N tokens  S spans (sampled turns)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.renderers.base import Renderer
from lockstep.types import Int32Array, Int64Array, Message

MIN_TURNS = 8
"""Turns that must end with an id for it to be a stop id: fewer end alike by chance."""
MIN_SHARE = 0.2
"""Share of the turns that a learnt stop id must end. Harmony has two stop ids; cut replies end with
many ids, each of them rarely."""
MIN_PRECISION = 0.9
"""Share of its sampled occurrences at which a learnt stop id must end the turn: the last character
of calls ("}") ends many turns too, but is also inside of others."""
MIN_CONTROL_PRECISION = 0.2
"""The same for a control token. If tool replies are trained, one run of trained tokens spans
several turns."""
TOP_OF_VOCABULARY = 0.97
"""Ids above this share of the largest one are control tokens where there is no tokenizer:
byte-level vocabularies have theirs at the end."""
MIN_FOLLOWED = 0.95
"""Share of an id's observed occurrences that one other id must follow, for both to be part of the
template (ChatML: a line break after <|im_end|>)."""
MAX_OPENING_TOKENS = 12
"""Ids before a turn among which the one that opens messages is searched: it begins the row too."""
MIN_OPENING_TOKENS = 2
"""Ids of the opening if that one is not among them (rows that begin with a token of their own):
"assistant" and a line break."""
MIN_OPENING = 0.05
"""Share of the turns that a learnt opening must precede."""
MAX_OPENINGS = 4096
"""Openings that are counted at once. If each turn had another one, memory would grow with the dump;
rarer ones are no openings."""


class TemplateCheck(Check):
    """Base of checks that must know which ids end and open a turn."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.template = TemplateIds(setting)


class TemplateIds:
    """Counts over chunks that tell the template's ids; holds no rows."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._num_turns = 0
        self._ends: Counter[int] = Counter()
        self._inside: Counter[int] = Counter()
        self._followers: dict[int, Counter[int]] = {}
        self._openings: Counter[tuple[int, ...]] = Counter()
        self._max_id = 0

    def add(self, rows: Rows) -> None:
        """Learns from a chunk whatever the setting does not say."""
        spans, ids = rows.spans, rows.token_ids
        if not len(spans):
            return
        if not self._setting.stop_ids:
            self._num_turns += len(spans)
            self._max_id = max(self._max_id, int(ids.max()))
            self._ends.update(ids[spans.end - 1].tolist())
            for candidate in self._candidates():
                at = np.flatnonzero(ids == candidate)
                is_sampled = rows.sampled[at]
                self._inside[candidate] += int(is_sampled.sum())
                at = at[~is_sampled]
                at = at[at + 1 < rows.num_tokens]
                at = at[rows.row_of[at + 1] == rows.row_of[at]]
                self._followers.setdefault(candidate, Counter()).update(ids[at + 1].tolist())
            self.__dict__.pop("stop_ids", None)
        if self._setting.renderer is None:
            self._openings.update(openings_before(rows))
            if len(self._openings) > MAX_OPENINGS:
                self._openings = Counter(dict(self._openings.most_common(MAX_OPENINGS // 2)))
            self.__dict__.pop("openings", None)

    def _candidates(self) -> list[int]:
        return [id_ for id_, count in self._ends.most_common(8) if count >= 2]

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a turn; empty if unknown."""
        if self._setting.stop_ids:
            return self._setting.stop_ids
        least = max(MIN_TURNS, MIN_SHARE * self._num_turns)
        common, rare = set[int](), set[int]()
        for id_ in self._candidates():
            ends, inside, is_control = self._ends[id_], self._inside[id_], self._is_control(id_)
            precision = MIN_CONTROL_PRECISION if is_control else MIN_PRECISION
            if ends >= least and ends >= precision * inside:
                common.add(id_)
            elif is_control and ends == inside:  # a second one (harmony), in few turns
                rare.add(id_)
        return frozenset(common | rare if common else common)

    @property
    def is_sure(self) -> bool:
        """True if the stop ids are control tokens, and not ids that replies happen to end with."""
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
        """True if the opening is the renderer's, False if it is learnt."""
        return self._setting.renderer is not None

    @cached_property
    def openings(self) -> tuple[tuple[int, ...], ...]:
        """Ids directly before a turn: the renderer's one opening, or those that were learnt."""
        if self._setting.renderer is not None:
            return (opening_of(self._setting.renderer),)
        least = max(MIN_TURNS, MIN_OPENING * self._openings.total())
        return tuple(opening for opening, num in self._openings.items() if num >= least)

    def is_stop(self, rows: Rows) -> BoolArray:
        """[N] True for stop ids."""
        return np.isin(rows.token_ids, list(self.stop_ids))

    def opening_ends(self, rows: Rows) -> Int64Array:
        """[X] index after each opening, in order."""
        found = [ends_of(opening, rows) for opening in self.openings]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))


def openings_before(rows: Rows) -> Counter[tuple[int, ...]]:
    """Ids before turns, from the id that opens messages on, and how often each occurs."""
    begin, ids = rows.spans.begin, rows.token_ids
    first = ids[rows.offsets[rows.spans.row]]
    room = rows.position[begin]
    size = np.where(room >= MIN_OPENING_TOKENS, MIN_OPENING_TOKENS, 0)
    for back in range(min(MAX_OPENING_TOKENS, int(room.max(initial=0))), 0, -1):
        size[(room >= back) & (ids[begin - np.minimum(back, room)] == first)] = back
    out: Counter[tuple[int, ...]] = Counter()
    for back in np.unique(size[size > 0]).tolist():
        of = begin[size == back]
        tuples = np.stack([ids[of - step] for step in range(back, 0, -1)], axis=1)
        out.update(map(tuple, tuples.tolist()))
    return out


def opening_of(renderer: Renderer) -> tuple[int, ...]:
    """The ids that a renderer writes before each turn, in any context."""
    stop = [renderer.stop_ids[0]]
    user = [Message(role="user", content="a")]
    first = renderer.render(user)
    then = renderer.extend(stop, [Message(role="user", content="b")])
    size = 0
    while size < min(len(first), len(then)) and first[-size - 1] == then[-size - 1]:
        size += 1
    # The close of the user's message is shared too: the opening begins with the id that every
    # message begins with.
    opening = first[len(first) - size :]
    starts = [at for at, id_ in enumerate(opening) if id_ == first[0]]
    return tuple(opening[starts[-1] :] if starts else opening)


def ends_of(sequence: Sequence[int], rows: Rows) -> Int64Array:
    """[X] index after each occurrence of `sequence` inside one row."""
    at, size = first_of(sequence, rows.token_ids), len(sequence)
    return at[rows.row_of[at] == rows.row_of[at + size - 1]] + size


def first_of(sequence: Sequence[int], ids: Int32Array) -> Int64Array:
    """[X] index of each occurrence of `sequence` in `ids`."""
    at = np.flatnonzero(ids[: max(len(ids) - len(sequence) + 1, 0)] == sequence[0])
    for step, id_ in enumerate(sequence):
        at = at[ids[at + step] == id_]
    return at
