"""What stands in a row and should not, or is missing: the tokens behind it were drawn after other
ids than they are computed with.

# N tokens  R rows  S spans (sampled turns)
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Evidence, Finding
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.doctor.checks.tokens.masks import runs_of
from lockstep.doctor.checks.tokens.template_ids import (
    MIN_FOLLOWED,
    TemplateIds,
    is_one_of,
    opening_of,
)
from lockstep.types import Int64Array, Message

MIN_COMPARED = 100
"""Tokens elsewhere before the gap there is what a sound token of the dump has."""
MIN_RAISED = 2.0
"""Times the mean d^2 elsewhere that the tokens behind a cause must have, for it to be theirs."""
MIN_PROMPT = 16
"""Tokens of a prompt that is looked for again: a short one is said again by people."""
MIN_RUN = 2
"""Padding tokens in a row: one by itself is an end, or a beginning, of a text."""
MIN_LEARNT_RUN = 4
"""The same of an id that only the rows show to pad: a text may well begin with one id twice."""
PAD_NAMES = (
    "<|endoftext|>",
    "<|finetune_right_pad_id|>",
    "<|pad|>",
    "<pad>",
    "[PAD]",
    "<unused_pad>",
)
"""Control tokens that pad where the dump does not say which does."""
MIN_PADDED_ROWS = 2
"""Rows that must show it, for an id to pad where neither the dump nor a tokenizer says so."""
MIN_DROPPED = 2
"""Turns without their separator before a cause is named."""


class _Context(Check):
    """Base of what changes the context of all that follows in a row.

    The right log-probs of those tokens are not in the dump: `repair` takes the trainer's away. Only
    if they differ more than others do: of rows that are off by other weights, an extra line break
    explains nothing.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._template = TemplateIds(setting)
        self._rows = 0
        self._rows_hit = 0
        self._behind = [0.0, 0]
        self._elsewhere = [0.0, 0]

    def measure(self, rows: Rows, first: Int64Array) -> None:
        """Counts the rows hit, and sums the gap behind the cause and elsewhere.

        first: [R] index of a row's first token behind the cause; the number of all tokens where
        there is none."""
        self._rows += len(rows)
        self._rows_hit += int((first < rows.num_tokens).sum())
        gap = rows.gap
        compared = np.flatnonzero(~np.isnan(gap))
        is_behind = compared >= first[rows.row_of[compared]]
        for sums, chosen in (
            (self._behind, compared[is_behind]),
            (self._elsewhere, compared[~is_behind]),
        ):
            sums[0] += float(gap[chosen] @ gap[chosen])
            sums[1] += len(chosen)

    @property
    def explains_gap(self) -> bool:
        if self._elsewhere[1] < MIN_COMPARED or not self._behind[1]:
            return True
        behind = self._behind[0] / self._behind[1]
        return behind > MIN_RAISED * self._elsewhere[0] / self._elsewhere[1]

    def without_gap_behind(self, rows: Rows, first: Int64Array) -> Rows:
        """`rows` without the trainer's log-probs from `first` on."""
        if rows.trainer_logprobs is None or not self.explains_gap:
            return rows
        is_behind = np.arange(rows.num_tokens) >= np.repeat(first, rows.sizes)
        if not is_behind.any():
            return rows
        values = np.where(is_behind, np.float32(np.nan), rows.trainer_logprobs)
        return rows.with_(trainer_logprobs=values)


class Padding(_Context):
    """Runs of the padding token before or between the tokens of a row.

    Behind the last token, and not trained, it changes nothing: that is said, and is no defect.
    """

    name = "tokens/padding"
    claim = "no padding stands in a row"
    cause = "padding"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._inside = self._left = self._right = self._trained = 0
        self._learnt: Counter[int] = Counter()

    def look(self, rows: Rows) -> None:
        if not self._given and len(rows.spans):
            self._learn(rows)
        begin, end = self._runs(rows)
        first = self._first(rows, begin, end)
        self.measure(rows, first)
        if not len(begin):
            return
        row = rows.row_of[begin]
        is_left = begin == rows.offsets[row]
        is_trained = self._has_trained(rows, begin, end)
        is_right = (end == rows.offsets[row + 1]) & ~is_left & ~is_trained
        self._left += int((end - begin)[is_left].sum())
        self._right += int((end - begin)[is_right].sum())
        self._inside += int((end - begin)[~is_left & ~is_right].sum())
        trained = np.concatenate([[0], np.cumsum(rows.loss_mask)])
        self._trained += int((trained[end] - trained[begin]).sum())
        for b, e in zip(begin[~is_right][:64].tolist(), end[~is_right][:64].tolist(), strict=True):
            name, place = rows.where(b)
            where = "before the row" if place == 0 else "inside of the row"
            note = f"{e - b} times id {int(rows.token_ids[b])} {where}"
            self.show(e - b, Evidence(row=name, begin=place, end=place + e - b, note=note))

    @property
    def _given(self) -> frozenset[int]:
        if self.setting.pad_id is not None:
            return frozenset({self.setting.pad_id})
        tokenizer = self.setting.tokenizer
        if tokenizer is None:
            return frozenset()
        names = {tokenizer.control_name(id_): id_ for id_ in tokenizer.control_ids}
        return frozenset(names[name] for name in PAD_NAMES if name in names)

    @property
    def _pads(self) -> frozenset[int]:
        """Ids that pad."""
        learnt = (id_ for id_, num in self._learnt.items() if num >= MIN_PADDED_ROWS)
        return self._given or frozenset(learnt)

    def _learn(self, rows: Rows) -> None:
        """An id that rows begin with again and again, or that so stands before their replies."""
        ids, spans = rows.token_ids, rows.spans
        starts = rows.offsets[:-1][rows.sizes >= MIN_LEARNT_RUN]
        is_first = np.diff(spans.row, prepend=-1) > 0
        replies = spans.begin[is_first & (rows.position[spans.begin] >= MIN_LEARNT_RUN)]
        for at in (starts, replies - MIN_LEARNT_RUN):
            for step in range(1, MIN_LEARNT_RUN):
                at = at[ids[at] == ids[at + step]]
            self._learnt.update(ids[at].tolist())

    def _runs(self, rows: Rows) -> tuple[Int64Array, Int64Array]:
        begin, end = runs_of(is_one_of(rows.token_ids, self._pads), rows)
        kept = end - begin >= (MIN_RUN if self._given else MIN_LEARNT_RUN)
        return begin[kept], end[kept]

    def _has_trained(self, rows: Rows, begin: Int64Array, end: Int64Array) -> BoolArray:
        """A stop id that also pads is trained once, at its turn's end."""
        total = np.concatenate([[0], np.cumsum(rows.loss_mask)])
        return total[end] - total[begin] >= MIN_RUN

    def _first(self, rows: Rows, begin: Int64Array, end: Int64Array) -> Int64Array:
        first = np.full(len(rows), rows.num_tokens, np.int64)
        row = rows.row_of[begin]
        is_right = (end == rows.offsets[row + 1]) & (begin > rows.offsets[row])
        np.minimum.at(first, row[~is_right], end[~is_right])
        return first

    def conclude(self) -> Finding:
        figures = {
            "rows": self._rows,
            "rows_hit": self._rows_hit,
            "pads_inside": self._inside,
            "pads_before": self._left,
            "pads_behind": self._right,
            "pads_trained": self._trained,
        }
        if self._inside or self._left:
            return self.found(
                "differs",
                f"{self._inside} padding tokens inside of rows and {self._left} before them, in "
                f"{self._rows_hit} of {self._rows} rows; {self._trained} of them are trained",
                **figures,
            )
        if self._right:
            return self.found(
                "information",
                f"{self._right} padding tokens behind the rows' last, none of them trained",
                **figures,
            )
        return self.found("consistent", f"no padding in {self._rows} rows", **figures)

    def repair(self, rows: Rows) -> Rows:
        """Padding is not trained, and what stands behind it has no right log-prob here."""
        begin, end = self._runs(rows)
        if not len(begin):
            return rows
        is_pad = np.zeros(rows.num_tokens, np.bool_)
        for b, e in zip(begin.tolist(), end.tolist(), strict=True):
            is_pad[b:e] = True
        is_pad &= ~is_one_of(rows.token_ids, self.setting.stop_ids)
        rows = rows.with_(loss_mask=rows.loss_mask & ~is_pad)
        return self.without_gap_behind(rows, self._first(rows, begin, end))


class DuplicatedPrompt(_Context):
    """The whole prompt, control tokens included, a second time in its row."""

    name = "tokens/duplicated_prompt"
    claim = "the prompt stands in its row once"
    cause = "duplicated_prompt"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._restated = 0
        self._tokens = 0

    def look(self, rows: Rows) -> None:
        found = self._copies(rows)
        first = np.full(len(rows), rows.num_tokens, np.int64)
        for row, at, size, is_certain in found:
            if not is_certain:
                self._restated += 1
                continue
            first[row] = min(int(first[row]), at + size)
            self._tokens += size
            name, place = rows.where(at)
            note = f"the {size} ids that the row begins with, again"
            self.show(size, Evidence(row=name, begin=place, end=place + size, note=note))
        self.measure(rows, first)

    def _copies(self, rows: Rows) -> list[tuple[int, int, int, bool]]:
        """(row, index, tokens, beyond doubt) of each copy.

        In doubt is a prompt of one message that comes again as a message should: a user may say
        the same twice.
        """
        ids, spans = rows.token_ids, rows.spans
        prompt = np.zeros(len(rows), np.int64)
        is_first = np.diff(spans.row, prepend=-1) > 0
        prompt[spans.row[is_first]] = rows.position[spans.begin[is_first]]
        start = rows.offsets[:-1]
        opener = np.full(len(rows), -1, np.int64)
        asked = prompt >= MIN_PROMPT
        opener[asked] = ids[start[asked]]
        at = np.flatnonzero(ids == np.repeat(opener, rows.sizes))
        row = rows.row_of[at]
        least = MIN_PROMPT // 2
        kept = (at - start[row] >= least) & (at + least <= start[row] + rows.sizes[row])
        at, row = at[kept], row[kept]
        for step in range(1, least):
            same = ids[at + step] == ids[start[row] + step]
            at, row = at[same], row[same]
            if not len(at):
                break
        out: list[tuple[int, int, int, bool]] = []
        for r, place in zip(row.tolist(), at.tolist(), strict=True):
            begin, size = int(start[r]), int(prompt[r])
            before = place - begin
            length = min(size, before) if before >= size else min(before, size - before)
            length = min(length, begin + int(rows.sizes[r]) - place)
            whole = size if before >= size else length
            if length < max(whole, least):
                continue
            if not np.array_equal(ids[place : place + length], ids[begin : begin + length]):
                continue
            opening = ids[begin + size - 2 : begin + size]
            goes_on = np.array_equal(ids[place - 2 : place], opening)
            messages = int(np.count_nonzero(ids[begin : begin + length] == ids[begin]))
            out.append((r, place, length, goes_on or messages >= 3))
        return out

    def conclude(self) -> Finding:
        figures = {
            "rows": self._rows,
            "rows_hit": self._rows_hit,
            "duplicated_tokens": self._tokens,
            "restated_prompts": self._restated,
        }
        if self._rows_hit:
            return self.found(
                "differs",
                f"{self._rows_hit} of {self._rows} rows hold their prompt again, "
                f"{self._tokens} tokens",
                **figures,
            )
        if self._restated:
            return self.found(
                "information",
                f"{self._restated} prompts of one message come again as a later message",
                **figures,
            )
        return self.found("consistent", f"no prompt of {self._rows} comes again", **figures)

    def repair(self, rows: Rows) -> Rows:
        """The copy is not trained, and what stands behind it has no right log-prob here."""
        first = np.full(len(rows), rows.num_tokens, np.int64)
        mask = rows.loss_mask.copy()
        for row, at, size, is_certain in self._copies(rows):
            if is_certain:
                first[row] = min(int(first[row]), at + size)
                mask[at : at + size] &= rows.sampled[at : at + size]
        if (first == rows.num_tokens).all():
            return rows
        return self.without_gap_behind(rows.with_(loss_mask=mask), first)


class DroppedSeparator(_Context):
    """A stop id that the next message follows at once, where the template writes something between.

    The template's word is the renderer's; without one, what follows the same id elsewhere in the
    rows. ChatML: a line break behind <|im_end|>. Harmony writes nothing, and nothing can be lost.
    """

    name = "tokens/dropped_separator"
    claim = "what the template writes between two turns stands there"
    cause = "dropped_separator"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._turns = 0
        self._dropped = 0
        self._followed: dict[int, Counter[tuple[int, int]]] = {}
        self._exact = None if setting.renderer is None else separators_of(setting)

    def look(self, rows: Rows) -> None:
        self._template.add(rows)
        if self._exact is None:
            self._learn(rows)
        ends = self._ends(rows)
        self._turns += len(ends)
        hit = self._is_dropped(rows, ends)
        at = ends[hit]
        self._dropped += len(at)
        self.measure(rows, self._first(rows, at))
        for index in at[:64].tolist():
            name, place = rows.where(index)
            stop = int(rows.token_ids[index - 1])
            expected = self._separators[stop][0]
            note = f"id {int(rows.token_ids[index])} follows the stop id {stop} at once"
            self.show(
                1.0,
                Evidence(
                    row=name, begin=place - 1, end=place + 1, note=note, expected_ids=expected
                ),
            )

    def _learn(self, rows: Rows) -> None:
        """Which two ids follow each stop id: behind turns, and in messages that were given."""
        stops = self._template.stop_ids
        at = np.flatnonzero(is_one_of(rows.token_ids, stops))
        is_end = ~rows.sampled[at]
        last = rows.spans.end - 1
        is_end |= np.isin(at, last)
        at = at[is_end & (rows.position[at] + 2 < rows.sizes[rows.row_of[at]])]
        ids = rows.token_ids
        triples = np.stack([ids[at], ids[at + 1], ids[at + 2]], axis=1)
        unique, num = np.unique(triples, axis=0, return_counts=True)
        for (stop, one, two), count in zip(unique.tolist(), num.tolist(), strict=True):
            self._followed.setdefault(stop, Counter())[one, two] += count

    @property
    def _separators(self) -> dict[int, tuple[tuple[int, ...], int]]:
        """Stop id -> (what stands behind it, the id that opens the next message)."""
        if self._exact is not None:
            return self._exact
        out: dict[int, tuple[tuple[int, ...], int]] = {}
        for stop, counts in self._followed.items():
            (one, two), num = counts.most_common(1)[0]
            at_once = sum(n for (first, _), n in counts.items() if first == two)
            if one != two and num + at_once >= MIN_FOLLOWED * counts.total() and num > at_once:
                out[stop] = ((one,), two)
        return out

    def _ends(self, rows: Rows) -> Int64Array:
        """Index behind each turn that ends with a stop id and that something follows."""
        spans = rows.spans
        if not len(spans):
            return spans.end
        is_stop = is_one_of(rows.token_ids[spans.end - 1], self._template.stop_ids)
        return spans.end[is_stop & (spans.end < rows.offsets[spans.row + 1])]

    def _is_dropped(self, rows: Rows, ends: Int64Array) -> BoolArray:
        out = np.zeros(len(ends), np.bool_)
        for stop, (_, opener) in self._separators.items():
            out |= (rows.token_ids[ends - 1] == stop) & (rows.token_ids[ends] == opener)
        return out

    def _first(self, rows: Rows, at: Int64Array) -> Int64Array:
        first = np.full(len(rows), rows.num_tokens, np.int64)
        np.minimum.at(first, rows.row_of[at], at)
        return first

    def conclude(self) -> Finding:
        figures = {
            "turns_followed": self._turns,
            "dropped_separators": self._dropped,
            "rows": self._rows,
            "rows_hit": self._rows_hit,
        }
        if self._dropped >= MIN_DROPPED:
            return self.found(
                "differs",
                f"{self._dropped} of {self._turns} turns are followed by the next message at once",
                **figures,
            )
        what = (
            f"{self._turns - self._dropped} of {self._turns} turns that something follows have "
            "what the template writes between"
            if self._separators
            else "the template writes nothing between a stop id and the next message"
            if self._exact is not None
            else "no separator is known"
        )
        return self.found("consistent", what, **figures)

    def repair(self, rows: Rows) -> Rows:
        """What stands behind the lost separator has no right log-prob here."""
        ends = self._ends(rows)
        at = ends[self._is_dropped(rows, ends)]
        return self.without_gap_behind(rows, self._first(rows, at)) if len(at) else rows


def separators_of(setting: Setting) -> dict[int, tuple[tuple[int, ...], int]]:
    """Stop id -> (what the renderer writes behind it, the id that opens the next message)."""
    renderer = setting.renderer
    assert renderer is not None, "asked only where there is one"
    opener = opening_of(renderer)[0]
    out: dict[int, tuple[tuple[int, ...], int]] = {}
    for stop in renderer.stop_ids:
        glue = renderer.extend([stop], [Message(role="user", content="a")])
        if opener in glue[1:] and glue[0] != opener:
            out[stop] = (tuple(glue[: glue.index(opener)]), opener)
    return out
