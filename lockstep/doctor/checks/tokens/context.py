"""Ids that should not be in a row, or are missing from it: the tokens after them were sampled after
other ids than they are scored with.

The ids that end and open turns are given by the setting, or learnt from the rows.

# N tokens  R rows  S spans (sampled turns)
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from lockstep.doctor.checks.base import MAX_SHOWN, Check, Finding, Setting
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.errors import RendererError
from lockstep.renderers.base import Renderer
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Int32Array, Int64Array, Message

MIN_TURNS = 8
"""Turns that must end with an id for it to be a stop id: fewer end alike by chance."""
MIN_SHARE = 0.2
"""Share of the turns that a learnt stop id must end. Harmony has two stop ids; cut replies end with
many ids, each of them rarely."""
MIN_OTHER_STOPS = 0.05
"""The same for a control token beside stop ids that are given."""
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

    @cached_property
    def template(self) -> TemplateIds:
        return TemplateIds(self.setting)


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
        if not self._setting.stop_ids or self._setting.tokenizer is not None:
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
        """Ids that end a turn: those that are given, and control tokens that end many turns and
        are in none. Empty if unknown."""
        if self._setting.stop_ids:
            return self._setting.stop_ids | self._other_stops
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
    def _other_stops(self) -> frozenset[int]:
        """Stop ids beside the given ones: of a reply that calls a tool (GLM), or of the engine."""
        tokenizer = self._setting.tokenizer
        if tokenizer is None:
            return frozenset()
        least = max(MIN_TURNS, MIN_OTHER_STOPS * self._num_turns)
        return frozenset(
            id_
            for id_ in self._candidates()
            if id_ in tokenizer.control_ids
            and id_ != self._setting.pad_id
            and self._ends[id_] >= max(least, self._inside[id_])
        )

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
        """Ids directly before a turn: the renderer's, or those that were learnt."""
        if self._setting.renderer is not None:
            return openings_of(self._setting.renderer)
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
    """The ids that a renderer writes before each turn, in any context.

    Raises RendererError for a template that refuses two users' messages.
    """
    stop = [renderer.stop_ids[0]]
    user = [Message(role="user", content="a")]
    first = renderer.render(user)
    then = renderer.extend(stop, [Message(role="user", content="b")])
    shared = first[len(first) - first_difference(first[::-1], then[::-1]) :]
    # The close of the user's message is shared too. A turn that follows another one directly has
    # the opening alone, after a separator of white space.
    try:
        at_once = renderer.extend(stop, [])
    except RendererError:
        at_once = shared
    size = first_difference(shared[::-1], at_once[::-1])
    tokenizer = renderer.tokenizer
    opening = list(shared[len(shared) - size :])
    while opening and tokenizer.token_bytes(opening[0]).isspace():
        del opening[0]
    if not opening:  # [/INST] closes the user's message, and nothing opens the reply
        controls = [at for at, id_ in enumerate(shared) if id_ in tokenizer.control_ids]
        opening = list(shared[controls[-1] :]) if controls else list(shared)
    return tuple(opening)


def around_words(
    message: Message, render: Callable[[Message], list[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The ids that a template writes before and after the words of a message, found by rendering it
    with two of them; None if it refuses the message."""
    try:
        one, two = (render(replace(message, content=words)) for words in ("a", "b"))
    except RendererError:
        return None
    after = len(one) - first_difference(one[::-1], two[::-1])
    return tuple(one[: first_difference(one, two)]), tuple(one[after:])


def openings_of(renderer: Renderer) -> tuple[tuple[int, ...], ...]:
    """The opening of a reply, and the ends of messages that it follows without one: DeepSeek writes
    none after a tool's reply. Raises RendererError as `opening_of` does."""
    out = [opening_of(renderer)]
    for message in NEXT:
        around = around_words(message, lambda m: renderer.extend([renderer.stop_ids[0]], [m]))
        close = () if around is None else around[1]
        if not close or close[-len(out[0]) :] == out[0]:
            continue
        # Before its last control token may be what the message says besides, such as a call's id.
        controls = [at for at, id_ in enumerate(close) if id_ in renderer.tokenizer.control_ids]
        out.append(close[controls[-1] :] if controls else close)
    if renderer.tokenizer.lacks_prefix:
        out += [with_prefix(opening, renderer.tokenizer) for opening in out]
    return tuple(out)


def with_prefix(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    """`ids` as a tokenizer writes them that puts a space before each text."""
    out: list[int] = []
    for is_control, run in groupby(ids, key=tokenizer.control_ids.__contains__):
        same = list(run)
        out += same if is_control else tokenizer.encode(f" {tokenizer.decode(same)}")
    return tuple(out)


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


MIN_COMPARED = 100
"""Tokens elsewhere, before their gap is taken for that of sound tokens."""
MIN_RAISED = 2.0
"""Ratio of the mean d^2 after a cause to that elsewhere, for the gap to be the cause's."""
MIN_PROMPT = 16
"""Tokens of a prompt that is searched for again: people repeat short ones."""
MIN_RUN = 2
"""Padding tokens in a row: a single one may end or begin a text."""
MIN_LEARNT_RUN = 4
"""The same for an id that only the rows show to pad: a text may begin with one id twice."""
PAD_NAMES = (
    *("<|endoftext|>", "<|finetune_right_pad_id|>", "<|pad|>"),
    *("<pad>", "[PAD]", "<unused_pad>"),
)
"""Control tokens that are taken for padding if the dump does not name its own."""
MIN_PADDED_ROWS = 2
"""Rows that must show it before an unnamed id is taken for padding."""
MAX_OPENERS = 4
"""Ids that may follow a separator, for these to open messages: system, user, tool, assistant."""
MIN_DROPPED = 2
"""Turns without their separator before a cause is named."""


class _Context(Check):
    """Base of causes that change the context of everything after them in a row.

    The right log-probs of those tokens are not in the dump, so `repair` removes the trainer's. It
    does so only if they differ more than elsewhere: in rows that are off by other weights, an extra
    line break explains nothing.
    """

    def begin(self) -> None:
        self._behind, self._elsewhere = np.zeros(2), np.zeros(2)
        """Sum of d^2 and number of the compared tokens after the cause, and of the others."""

    @abstractmethod
    def extent(self, rows: Rows) -> tuple[Int64Array, Int64Array]:
        """(begin, end) of each occurrence of the cause, in order; those of ids that are missing are
        empty."""

    def measure(self, rows: Rows) -> None:
        """Counts the rows hit, and sums the gap after the cause and elsewhere."""
        first = rows.firsts(*self.extent(rows))
        self.count(rows=len(rows), rows_hit=first < rows.num_tokens)
        is_behind = rows.compared >= first[rows.row_of[rows.compared]]
        for sums, chosen in ((self._behind, is_behind), (self._elsewhere, ~is_behind)):
            gap = rows.gap[rows.compared[chosen]]
            sums += [float(gap @ gap), len(gap)]

    @property
    def _explains_gap(self) -> bool:
        if self._elsewhere[1] < MIN_COMPARED or not self._behind[1]:
            return True
        behind = self._behind[0] / self._behind[1]
        return bool(behind > MIN_RAISED * self._elsewhere[0] / self._elsewhere[1])

    def repair(self, rows: Rows) -> Rows:
        """Ids of the cause that nobody sampled are not trained, and the tokens after them have no
        right log-prob here."""
        begin, end = self.extent(rows)
        repaired = rows.untrained(rows.within(begin, end) & ~self.is_own(rows))
        if rows.trainer_logprobs is None or not len(begin) or not self._explains_gap:
            return repaired
        is_behind = np.arange(rows.num_tokens) >= np.repeat(rows.firsts(begin, end), rows.sizes)
        values = np.where(is_behind, np.float32(np.nan), rows.trainer_logprobs)
        return repaired.with_(trainer_logprobs=values)

    def is_own(self, rows: Rows) -> BoolArray:
        """[N] True for tokens that may be trained although they are part of the cause."""
        return rows.sampled


class Padding(_Context):
    """Runs of the padding token before or between the tokens of a row.

    After the last token, and not trained, padding changes nothing: that is information.
    """

    name = "tokens/padding"
    claim = "no padding is inside a row"
    cause = "padding"

    def begin(self) -> None:
        super().begin()
        self._learnt: Counter[int] = Counter()

    def look(self, rows: Rows) -> None:
        if not self._given and len(rows.spans):
            self._learn(rows)
        self.measure(rows)
        begin, end = self._runs(rows)
        row = rows.row_of[begin]
        num_trained = rows.num_in(rows.loss_mask, begin, end)
        is_left = begin == rows.offsets[row]
        # A stop id that also pads is trained once, at its turn's end.
        is_right = (end == rows.offsets[row + 1]) & ~is_left & (num_trained < MIN_RUN)
        size = end - begin
        self.count(
            pads_before=size[is_left].sum(),
            pads_behind=size[is_right].sum(),
            pads_inside=size[~is_left & ~is_right].sum(),
            pads_trained=num_trained.sum(),
        )

        def note(b: int, e: int) -> str:
            where = "before the row" if rows.position[b] == 0 else "inside the row"
            return f"{e - b} times id {int(rows.token_ids[b])} {where}"

        self.show_runs(rows, begin[~is_right], end[~is_right], note)

    @cached_property
    def _given(self) -> frozenset[int]:
        if self.setting.pad_id is not None:
            return frozenset({self.setting.pad_id})
        tokenizer = self.setting.tokenizer
        if tokenizer is None:
            return frozenset()
        return frozenset(i for i in tokenizer.control_ids if tokenizer.control_name(i) in PAD_NAMES)

    def _learn(self, rows: Rows) -> None:
        """Counts ids that repeat at the beginning of rows or directly before the first reply."""
        ids, spans = rows.token_ids, rows.spans
        starts = rows.offsets[:-1][rows.sizes >= MIN_LEARNT_RUN]
        replies = spans.begin[spans.is_first & (rows.position[spans.begin] >= MIN_LEARNT_RUN)]
        for at in (starts, replies - MIN_LEARNT_RUN):
            for step in range(1, MIN_LEARNT_RUN):
                at = at[ids[at] == ids[at + step]]
            self._learnt.update(ids[at].tolist())

    def _runs(self, rows: Rows) -> tuple[Int64Array, Int64Array]:
        learnt = (id_ for id_, num in self._learnt.items() if num >= MIN_PADDED_ROWS)
        begin, end = rows.runs(np.isin(rows.token_ids, list(self._given or learnt)))
        kept = end - begin >= (MIN_RUN if self._given else MIN_LEARNT_RUN)
        return begin[kept], end[kept]

    def extent(self, rows: Rows) -> tuple[Int64Array, Int64Array]:
        begin, end = self._runs(rows)
        row = rows.row_of[begin]
        is_right = (end == rows.offsets[row + 1]) & (begin > rows.offsets[row])
        return begin[~is_right], end[~is_right]

    def is_own(self, rows: Rows) -> BoolArray:
        return np.isin(rows.token_ids, list(self.setting.stop_ids))

    def conclude(self) -> Finding:
        c = self.counts
        if c["pads_inside"] or c["pads_before"]:
            return self.differs(
                f"{c['pads_inside']} padding tokens inside of rows and {c['pads_before']} before "
                f"them, in {c['rows_hit']} of {c['rows']} rows"
            )
        if c["pads_behind"]:
            return self.information(
                f"{c['pads_behind']} padding tokens after the rows' last token, none trained"
            )
        return self.consistent(f"no padding in {c['rows']} rows")

    def repair(self, rows: Rows) -> Rows:
        is_pad = rows.within(*self._runs(rows))
        return super().repair(rows.untrained(is_pad & ~self.is_own(rows)))


class DuplicatedPrompt(_Context):
    """The whole prompt, control tokens included, a second time in its row."""

    name = "tokens/duplicated_prompt"
    claim = "the prompt is in its row once"
    cause = "duplicated_prompt"

    def look(self, rows: Rows) -> None:
        self.measure(rows)
        begin, end = self.extent(rows)
        self.count(duplicated_tokens=(end - begin).sum())
        for b, e in zip(begin.tolist(), end.tolist(), strict=True):
            self.show(e - b, rows, b, e, f"the {e - b} ids that the row begins with, again")

    def extent(self, rows: Rows) -> tuple[Int64Array, Int64Array]:
        """A prompt of one message that comes again as a later message is none: a user may say the
        same twice."""
        ids, spans, start = rows.token_ids, rows.spans, rows.offsets[:-1]
        prompt = np.zeros(len(rows), np.int64)
        prompt[spans.row[spans.is_first]] = rows.position[spans.begin[spans.is_first]]
        opener = np.full(len(rows), -1, np.int64)
        least = MIN_PROMPT // 2
        asked = np.flatnonzero(prompt >= MIN_PROMPT)
        head = ids[start[asked, None] + np.arange(least)]
        asked = asked[(head != head[:, :1]).any(axis=1)]  # a run of padding comes again in itself
        opener[asked] = ids[start[asked]]
        at = np.flatnonzero(ids == np.repeat(opener, rows.sizes))
        row = rows.row_of[at]
        kept = (at - start[row] >= least) & (at + least <= rows.offsets[row + 1])
        at, row = at[kept], row[kept]
        for step in range(1, least):
            same = ids[at + step] == ids[start[row] + step]
            at, row = at[same], row[same]
        out: list[tuple[int, int]] = []
        for r, place in zip(row.tolist(), at.tolist(), strict=True):
            own, size = int(start[r]), int(prompt[r])
            before = place - own
            whole = size if before >= size else min(before, size - before)
            is_inside = least <= whole <= int(rows.offsets[r + 1]) - place
            if not is_inside or (ids[place : place + whole] != ids[own : own + whole]).any():
                continue
            opening = ids[own + size - 2 : own + size]
            continues = np.array_equal(ids[place - 2 : place], opening)
            messages = int(np.count_nonzero(ids[own : own + whole] == ids[own]))
            if continues or messages >= 3:
                out.append((place, place + whole))
        begin, end = np.array(out, np.int64).reshape(-1, 2).T
        return begin, end

    def conclude(self) -> Finding:
        c = self.counts
        if c["rows_hit"]:
            return self.differs(
                f"{c['rows_hit']} of {c['rows']} rows contain their prompt again, "
                f"{c['duplicated_tokens']} tokens",
                "shown",
            )
        return self.consistent(f"no prompt of {c['rows']} comes again")


class DroppedSeparator(_Context, TemplateCheck):
    """A stop id directly followed by the next message, where the template has a separator.

    The separator is the renderer's; without one, it is what follows the same id elsewhere in the
    rows. ChatML has a line break after <|im_end|>. Harmony has none, so none can be lost.
    """

    name = "tokens/dropped_separator"
    claim = "the template's separator is between two turns"
    cause = "dropped_separator"

    def begin(self) -> None:
        super().begin()
        self._followed: dict[int, Counter[tuple[int, int]]] = {}
        self._exact = (
            None if self.setting.renderer is None else separators_of(self.setting.renderer)
        )

    def look(self, rows: Rows) -> None:
        self.template.add(rows)
        if self._exact is None:
            self._learn(rows)
        self.measure(rows)
        at, _ = self.extent(rows)
        self.count(turns_followed=len(self._ends(rows)), dropped_separators=len(at))
        for index in at[:MAX_SHOWN].tolist():
            stop = int(rows.token_ids[index - 1])
            note = f"id {int(rows.token_ids[index])} directly follows the stop id {stop}"
            self.show(1.0, rows, index - 1, index + 1, note, self._separators[stop].ids)

    def _learn(self, rows: Rows) -> None:
        """Counts which two ids follow each stop id, after turns and in observed messages."""
        ids = rows.token_ids
        at = np.flatnonzero(self.template.is_stop(rows))
        is_end = ~rows.sampled[at] | np.isin(at, rows.spans.end - 1)
        at = at[is_end & (rows.position[at] + 2 < rows.sizes[rows.row_of[at]])]
        triples = np.stack([ids[at], ids[at + 1], ids[at + 2]], axis=1)
        for stop, one, two in triples.tolist():
            self._followed.setdefault(stop, Counter())[one, two] += 1

    @property
    def _separators(self) -> dict[int, Separator]:
        """Stop id -> its separator."""
        if self._exact is not None:
            return self._exact
        out: dict[int, Separator] = {}
        for stop, counts in self._followed.items():
            firsts = Counter[int]()
            for (one, _), num in counts.items():
                firsts[one] += num
            one, num = firsts.most_common(1)[0]
            openers = frozenset(second for first, second in counts if first == one)
            at_once = sum(n for first, n in firsts.items() if first in openers)
            if one in openers or num <= at_once:
                continue
            if num + at_once >= MIN_FOLLOWED * counts.total() and len(openers) <= MAX_OPENERS:
                out[stop] = Separator((one,), frozenset((id_,) for id_ in openers))
        return out

    def _ends(self, rows: Rows) -> Int64Array:
        """Index after each turn that ends with a stop id and is not the end of its row."""
        spans = rows.spans
        is_stop = np.isin(rows.token_ids[spans.end - 1], list(self.template.stop_ids))
        return spans.end[is_stop & (spans.end < rows.offsets[spans.row + 1])]

    def extent(self, rows: Rows) -> tuple[Int64Array, Int64Array]:
        ends, ids = self._ends(rows), rows.token_ids
        is_dropped = np.zeros(len(ends), np.bool_)
        for stop, separator in self._separators.items():
            for opener in separator.openers:
                is_next = (ids[ends - 1] == stop) & (ends + len(opener) <= rows.num_tokens)
                for step, id_ in enumerate(opener):
                    is_next &= ids[np.minimum(ends + step, rows.num_tokens - 1)] == id_
                is_dropped |= is_next
        return ends[is_dropped], ends[is_dropped]

    def conclude(self) -> Finding:
        turns, dropped = self.counts["turns_followed"], self.counts["dropped_separators"]
        if dropped >= MIN_DROPPED:
            return self.differs(
                f"{dropped} of {turns} turns are directly followed by a message",
                "repair" if self._exact is not None else "fit",
            )
        if self._separators:
            return self.consistent(
                f"{turns - dropped} of {turns} turns with a message after them have the separator"
            )
        known = "the template has no separator" if self._exact is not None else "none is known"
        return self.consistent(f"{known} between a stop id and the next message")


@dataclass(frozen=True, slots=True)
class Separator:
    """Ids between a turn and the next message, in a template."""

    ids: tuple[int, ...]
    openers: frozenset[tuple[int, ...]]
    """Ids that open the next message: those of each role, in many formats."""


def separators_of(renderer: Renderer) -> dict[int, Separator]:
    """Stop id -> its separator; without stop ids that have none. A message begins with its first
    control token or, where the format has none, with its first text that is not white space."""
    control = renderer.tokenizer.control_ids
    out: dict[int, Separator] = {}
    for stop in renderer.stop_ids:
        found = dict[tuple[int, ...], set[tuple[int, ...]]]()
        for message in NEXT:
            try:
                glue = renderer.extend([stop], [message])
                other = renderer.extend([stop], [replace(message, content="b")])
            except RendererError:
                continue
            header = glue[: first_difference(glue, other)]
            first = next((at for at, id_ in enumerate(header) if id_ in control), -1)
            if first > 0:
                found.setdefault(tuple(glue[:first]), set()).add((glue[first],))
            elif first < 0:
                text = renderer.tokenizer.decode(header)
                bare = text.lstrip()
                # The last id may be another one before the message's own text.
                opener = tuple(renderer.tokenizer.encode(bare)[:-1])
                if opener and bare != text:
                    separator = renderer.tokenizer.encode(text[: -len(bare)])
                    found.setdefault(tuple(separator), set()).add(opener)
        for ids, openers in found.items():
            out.setdefault(stop, Separator(ids, frozenset(openers)))
    return out


NEXT = (
    Message(role="user", content="a"),
    Message(role="tool", name="a", content="a"),
    Message(role="system", content="a"),
)
"""Messages that may follow a turn."""
