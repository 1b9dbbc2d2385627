"""Ids that should not be in a row, or are missing from it: the tokens after them were sampled after
other ids than they are scored with.

# N tokens  R rows  S spans (sampled turns)
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Finding
from lockstep.doctor.checks.rows import BoolArray, Rows, indices_of
from lockstep.doctor.checks.tokens.template_ids import (
    MIN_FOLLOWED,
    TemplateIds,
    is_one_of,
    opening_of,
)
from lockstep.renderers.base import Renderer
from lockstep.types import Int64Array, Message

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
    "<|endoftext|>",
    "<|finetune_right_pad_id|>",
    "<|pad|>",
    "<pad>",
    "[PAD]",
    "<unused_pad>",
)
"""Control tokens that are taken for padding if the dump does not name its own."""
MIN_PADDED_ROWS = 2
"""Rows that must show it before an unnamed id is taken for padding."""
MIN_DROPPED = 2
"""Turns without their separator before a cause is named."""


class _Context(Check):
    """Base of causes that change the context of everything after them in a row.

    The right log-probs of those tokens are not in the dump, so `repair` removes the trainer's. It
    does so only if they differ more than elsewhere: in rows that are off by other weights, an extra
    line break explains nothing.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._behind = np.zeros(2)
        """Sum of d^2 and number of the compared tokens after the cause."""
        self._elsewhere = np.zeros(2)

    def measure(self, rows: Rows, first: Int64Array) -> None:
        """Counts the rows hit, and sums the gap after the cause and elsewhere.

        first: [R] index of a row's first token after the cause, N without one."""
        self.counts["rows"] += len(rows)
        self.counts["rows_hit"] += int((first < rows.num_tokens).sum())
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

    def without_gap_behind(self, rows: Rows, first: Int64Array) -> Rows:
        """`rows` without the trainer's log-probs from `first` [R] on."""
        if rows.trainer_logprobs is None or not self._explains_gap:
            return rows
        is_behind = np.arange(rows.num_tokens) >= np.repeat(first, rows.sizes)
        if not is_behind.any():
            return rows
        values = np.where(is_behind, np.float32(np.nan), rows.trainer_logprobs)
        return rows.with_(trainer_logprobs=values)


class Padding(_Context):
    """Runs of the padding token before or between the tokens of a row.

    After the last token, and not trained, padding changes nothing: that is information.
    """

    name = "tokens/padding"
    claim = "no padding is inside a row"
    cause = "padding"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._learnt: Counter[int] = Counter()

    def look(self, rows: Rows) -> None:
        if not self._given and len(rows.spans):
            self._learn(rows)
        begin, end = self._runs(rows)
        self.measure(rows, self._first(rows, begin, end))
        if not len(begin):
            return
        row = rows.row_of[begin]
        is_left = begin == rows.offsets[row]
        trained = np.concatenate([[0], np.cumsum(rows.loss_mask)])
        num_trained = trained[end] - trained[begin]
        # A stop id that also pads is trained once, at its turn's end.
        is_right = (end == rows.offsets[row + 1]) & ~is_left & (num_trained < MIN_RUN)
        for name, chosen in (
            ("pads_before", is_left),
            ("pads_behind", is_right),
            ("pads_inside", ~is_left & ~is_right),
        ):
            self.counts[name] += int((end - begin)[chosen].sum())
        self.counts["pads_trained"] += int(num_trained.sum())

        def note(b: int, e: int) -> str:
            where = "before the row" if rows.position[b] == 0 else "inside the row"
            return f"{e - b} times id {int(rows.token_ids[b])} {where}"

        self.show_runs(rows, begin[~is_right], end[~is_right], note)

    @property
    def _given(self) -> frozenset[int]:
        if self.setting.pad_id is not None:
            return frozenset({self.setting.pad_id})
        tokenizer = self.setting.tokenizer
        if tokenizer is None:
            return frozenset()
        names = {tokenizer.control_name(id_): id_ for id_ in tokenizer.control_ids}
        return frozenset(names[name] for name in PAD_NAMES if name in names)

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
        begin, end = rows.runs(is_one_of(rows.token_ids, self._given or frozenset(learnt)))
        kept = end - begin >= (MIN_RUN if self._given else MIN_LEARNT_RUN)
        return begin[kept], end[kept]

    def _first(self, rows: Rows, begin: Int64Array, end: Int64Array) -> Int64Array:
        row = rows.row_of[begin]
        is_right = (end == rows.offsets[row + 1]) & (begin > rows.offsets[row])
        return rows.firsts(begin[~is_right], end[~is_right])

    def conclude(self) -> Finding:
        c = self.counts
        if c["pads_inside"] or c["pads_before"]:
            return self.differs(
                f"{c['pads_inside']} padding tokens inside of rows and {c['pads_before']} before "
                f"them, in {c['rows_hit']} of {c['rows']} rows; {c['pads_trained']} of them are "
                "trained"
            )
        if c["pads_behind"]:
            return self.information(
                f"{c['pads_behind']} padding tokens after the rows' last token, none trained"
            )
        return self.consistent(f"no padding in {c['rows']} rows")

    def repair(self, rows: Rows) -> Rows:
        """Padding is not trained, and the tokens after it have no right log-prob here."""
        begin, end = self._runs(rows)
        if not len(begin):
            return rows
        is_pad = np.zeros(rows.num_tokens, np.bool_)
        is_pad[indices_of(begin, end)] = True
        rows = rows.untrained(is_pad & ~is_one_of(rows.token_ids, self.setting.stop_ids))
        return self.without_gap_behind(rows, self._first(rows, begin, end))


class DuplicatedPrompt(_Context):
    """The whole prompt, control tokens included, a second time in its row."""

    name = "tokens/duplicated_prompt"
    claim = "the prompt is in its row once"
    cause = "duplicated_prompt"

    def look(self, rows: Rows) -> None:
        found = self._copies(rows)
        certain = [(at, size) for at, size, is_certain in found if is_certain]
        self.counts["restated_prompts"] += len(found) - len(certain)
        for at, size in certain:
            self.counts["duplicated_tokens"] += size
            note = f"the {size} ids that the row begins with, again"
            self.show(size, rows, at, at + size, note)
        self.measure(rows, self._first(rows, certain))

    def _first(self, rows: Rows, copies: list[tuple[int, int]]) -> Int64Array:
        at, size = np.array(copies, np.int64).reshape(-1, 2).T
        return rows.firsts(at, at + size)

    def _copies(self, rows: Rows) -> list[tuple[int, int, bool]]:
        """(index, tokens, is certain) of each copy.

        In doubt is a prompt of one message that comes again as a later message: a user may say the
        same twice.
        """
        ids, spans = rows.token_ids, rows.spans
        prompt = np.zeros(len(rows), np.int64)
        prompt[spans.row[spans.is_first]] = rows.position[spans.begin[spans.is_first]]
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
        out: list[tuple[int, int, bool]] = []
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
            continues = np.array_equal(ids[place - 2 : place], opening)
            messages = int(np.count_nonzero(ids[begin : begin + length] == ids[begin]))
            out.append((place, length, continues or messages >= 3))
        return out

    def conclude(self) -> Finding:
        c = self.counts
        if c["rows_hit"]:
            return self.differs(
                f"{c['rows_hit']} of {c['rows']} rows contain their prompt again, "
                f"{c['duplicated_tokens']} tokens"
            )
        if c["restated_prompts"]:
            return self.information(
                f"{c['restated_prompts']} prompts of one message come again as a later message"
            )
        return self.consistent(f"no prompt of {c['rows']} comes again")

    def repair(self, rows: Rows) -> Rows:
        """The copy is not trained, and the tokens after it have no right log-prob here."""
        certain = [(at, size) for at, size, is_certain in self._copies(rows) if is_certain]
        if not certain:
            return rows
        mask = rows.loss_mask.copy()
        for at, size in certain:
            mask[at : at + size] &= rows.sampled[at : at + size]
        return self.without_gap_behind(rows.with_(loss_mask=mask), self._first(rows, certain))


class DroppedSeparator(_Context):
    """A stop id directly followed by the next message, where the template has a separator.

    The separator is the renderer's; without one, it is what follows the same id elsewhere in the
    rows. ChatML has a line break after <|im_end|>. Harmony has none, so none can be lost.
    """

    name = "tokens/dropped_separator"
    claim = "the template's separator is between two turns"
    cause = "dropped_separator"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._template = TemplateIds(setting)
        self._followed: dict[int, Counter[tuple[int, int]]] = {}
        self._exact = None if setting.renderer is None else separators_of(setting.renderer)

    def look(self, rows: Rows) -> None:
        self._template.add(rows)
        if self._exact is None:
            self._learn(rows)
        ends = self._ends(rows)
        at = ends[self._is_dropped(rows, ends)]
        self.counts["turns_followed"] += len(ends)
        self.counts["dropped_separators"] += len(at)
        self.measure(rows, rows.firsts(at))
        for index in at[:64].tolist():
            stop = int(rows.token_ids[index - 1])
            note = f"id {int(rows.token_ids[index])} directly follows the stop id {stop}"
            self.show(1.0, rows, index - 1, index + 1, note, self._separators[stop][0])

    def _learn(self, rows: Rows) -> None:
        """Counts which two ids follow each stop id, after turns and in observed messages."""
        stops = self._template.stop_ids
        at = np.flatnonzero(is_one_of(rows.token_ids, stops))
        is_end = ~rows.sampled[at] | np.isin(at, rows.spans.end - 1)
        at = at[is_end & (rows.position[at] + 2 < rows.sizes[rows.row_of[at]])]
        ids = rows.token_ids
        triples = np.stack([ids[at], ids[at + 1], ids[at + 2]], axis=1)
        unique, num = np.unique(triples, axis=0, return_counts=True)
        for (stop, one, two), count in zip(unique.tolist(), num.tolist(), strict=True):
            self._followed.setdefault(stop, Counter())[one, two] += count

    @property
    def _separators(self) -> dict[int, tuple[tuple[int, ...], int]]:
        """Stop id -> (its separator, the id that opens the next message)."""
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
        """Index after each turn that ends with a stop id and is not the end of its row."""
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

    def conclude(self) -> Finding:
        turns, dropped = self.counts["turns_followed"], self.counts["dropped_separators"]
        if dropped >= MIN_DROPPED:
            return self.differs(f"{dropped} of {turns} turns are directly followed by a message")
        if self._separators:
            return self.consistent(
                f"{turns - dropped} of {turns} turns with a message after them have the separator"
            )
        known = "the template has no separator" if self._exact is not None else "none is known"
        return self.consistent(f"{known} between a stop id and the next message")

    def repair(self, rows: Rows) -> Rows:
        """The tokens after a lost separator have no right log-prob here."""
        ends = self._ends(rows)
        at = ends[self._is_dropped(rows, ends)]
        return self.without_gap_behind(rows, rows.firsts(at)) if len(at) else rows


def separators_of(renderer: Renderer) -> dict[int, tuple[tuple[int, ...], int]]:
    """Stop id -> (ids that the renderer writes after it, the id that opens the next message)."""
    opener = opening_of(renderer)[0]
    out: dict[int, tuple[tuple[int, ...], int]] = {}
    for stop in renderer.stop_ids:
        glue = renderer.extend([stop], [Message(role="user", content="a")])
        if opener in glue[1:] and glue[0] != opener:
            out[stop] = (tuple(glue[: glue.index(opener)]), opener)
    return out
