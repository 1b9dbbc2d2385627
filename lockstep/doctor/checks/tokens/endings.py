"""Do turns end with their stop id, once, with nothing after it?

# N tokens  S spans (sampled turns)
"""

from __future__ import annotations

import numpy as np

from lockstep.doctor.checks.base import MAX_SHOWN, Finding, Setting
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.doctor.checks.tokens.context import TemplateCheck
from lockstep.doctor.checks.tokens.masks import misplaced
from lockstep.types import Int64Array

MIN_STOPPED = 0.5
"""Share of the turns that must end with a stop id, where stop ids are learnt, before the others
count."""
MIN_UNFINISHED = 3
"""Turns without an end that are more than an engine's failure."""
MIN_UNFINISHED_SHARE = 0.02
"""The same as a share of the turns: aborted requests leave as many."""
MIN_AT_CEILING = 2
"""Turns that must be cut at the same count before it is a limit: one turn is always the longest."""
MAX_KEPT = 4096
"""Turns without an end whose lengths are kept. The share of them that a limit explains is taken for
the share of all."""


class MissingFinal(TemplateCheck):
    """Turns without their stop id that no limit of length explains.

    Replies that a limit cuts off end at a common count: tokens of the turn, of the row, of the
    response, or sampled in the row so far. Replies that lost tokens after sampling end anywhere.
    The engine's answers are the proof, where the dump has them.
    """

    name = "tokens/missing_final"
    claim = "each turn ends with its stop id, or at a limit of length"
    cause = "missing_final"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._kept: list[tuple[int, ...]] = []
        self._largest = np.zeros(4, np.int64)

    def look(self, rows: Rows) -> None:
        self.template.add(rows)
        spans = rows.spans
        if not len(spans):
            return
        is_cut, is_answered = self._compare_with_engine(rows)
        counts = lengths_so_far(rows)
        self.count(turns=len(spans))
        self._largest = np.maximum(self._largest, counts.max(axis=0))
        stops = self.template.stop_ids
        if not stops:
            return
        follows = np.zeros(len(spans), np.bool_)  # the row's next turn begins where this one ends
        follows[:-1] = (spans.begin[1:] == spans.end[:-1]) & ~spans.is_last[:-1]
        stops_before = np.concatenate([[0], np.cumsum(self.template.is_stop(rows))])
        has_stop = stops_before[spans.end] > stops_before[spans.begin]  # else `AfterStop` has it
        # A turn that other weights continued is not open, nor one that the engine ended so.
        is_open = ~has_stop & ~follows & ~is_answered
        self.count(turns_without_stop=is_open)
        index = np.flatnonzero(is_open & ~is_cut)
        self._kept += map(tuple, counts[index[: MAX_KEPT - len(self._kept)]].tolist())
        for s in index[:MAX_SHOWN].tolist():
            end = int(spans.end[s])
            id_, size = int(rows.token_ids[end - 1]), int(spans.size[s])
            note = f"the turn ends with id {id_} after {size} tokens"
            weight = 1.0 - float((counts[s] == self._largest).any())
            self.show(weight, rows, end - 1, end, note, sorted(stops))

    def _compare_with_engine(self, rows: Rows) -> tuple[BoolArray, BoolArray]:
        """([S] turns that are a strict prefix of the engine's answer, [S] turns that are all of
        it)."""
        spans = rows.spans
        is_cut, is_answered = np.zeros(len(spans), np.bool_), np.zeros(len(spans), np.bool_)
        first = spans.of_rows(len(rows))
        for r, answers in enumerate(rows.engine_ids or ()):
            turns = range(int(first[r]), int(first[r + 1]))
            for s, answer in zip(turns, answers or (), strict=False):
                begin, size = int(spans.begin[s]), int(spans.size[s])
                found = rows.token_ids[begin : begin + size]
                self.count(turns_of_engine=1)
                if size >= len(answer):
                    is_answered[s] = np.array_equal(found, answer)
                elif np.array_equal(found, answer[:size]):
                    is_cut[s] = True
                    num_lost = len(answer) - size
                    self.count(turns_cut_short=1, tokens_cut_off=num_lost)
                    note = f"the engine answered {len(answer)} tokens, the row has {size}"
                    end, lost = begin + size, np.asarray(answer[size : size + 8]).tolist()
                    self.show(2.0 + num_lost, rows, end - 1, end, note, lost)
        return is_cut, is_answered

    def conclude(self) -> Finding:
        kept = np.array(self._kept, np.int64).reshape(-1, 4)
        at_limit = np.zeros(len(kept), np.bool_)
        for kind in range(4):
            is_largest = kept[:, kind] == self._largest[kind]
            if is_largest.sum() >= MIN_AT_CEILING:
                at_limit |= is_largest
        unexplained = float((~at_limit).mean()) if len(kept) else 0.0
        c = self.counts
        num_open = c["turns_without_stop"]
        unfinished = round(unexplained * (num_open - c["turns_cut_short"]))
        if c["turns_cut_short"]:
            return self.differs(
                f"{c['turns_cut_short']} of {c['turns_of_engine']} turns lack the last tokens that "
                f"the engine answered, {c['tokens_cut_off']} tokens in all",
                unfinished_turns=unfinished,
            )
        template = self.template
        if not template.stop_ids:
            return self.not_checkable("stop_ids")
        stopped = c["turns"] - num_open
        if unfinished < max(MIN_UNFINISHED, MIN_UNFINISHED_SHARE * c["turns"]):
            told = f"{stopped} of {c['turns']} turns end with a stop id, the others at a limit"
            return self.consistent(told, unfinished_turns=unfinished)
        is_proof = template.is_sure and (
            bool(self.setting.stop_ids) or stopped >= MIN_STOPPED * c["turns"]
        )
        return self.found(
            "differs" if is_proof else "information",
            f"{unfinished} of {c['turns']} turns end with no stop id and at no limit of length",
            unfinished_turns=unfinished,
        )


class AfterStop(TemplateCheck):
    """Sampled or trained tokens after a stop id of the same turn.

    Where only the loss mask is known, trained tool replies join two turns into one run. These are
    left to `observation_trained`.
    """

    name = "tokens/after_stop"
    claim = "nothing is trained after the stop id of a turn"
    cause = "after_stop"

    def look(self, rows: Rows) -> None:
        self.template.add(rows)
        behind = misplaced(rows, self.template).after_stop
        begin, end = rows.runs(behind)
        self.count(
            turns=len(rows.spans),
            tokens_after_stop=behind,
            turns_with_tokens_after_stop=len(begin),
            rows_that_tell_turns=0 if rows.is_sampled is None else len(rows),
        )

        def note(b: int, e: int) -> str:
            return f"{e - b} tokens after stop id {int(rows.token_ids[b - 1])}"

        self.show_runs(rows, begin, end, note)

    def conclude(self) -> Finding:
        template, c = self.template, self.counts
        if not template.stop_ids:
            return self.not_checkable("stop_ids")
        if not c["tokens_after_stop"]:
            return self.consistent(f"0 of {c['turns']} turns continue after a stop id")
        is_told = bool(template.openings) or c["rows_that_tell_turns"] > 0
        return self.found(
            "differs" if template.is_sure and is_told else "information",
            f"{c['turns_with_tokens_after_stop']} of {c['turns']} turns continue after a stop id, "
            f"with {c['tokens_after_stop']} trained tokens",
        )

    def repair(self, rows: Rows) -> Rows:
        """Tokens after a stop id are not trained."""
        return rows.untrained(misplaced(rows, self.template).after_stop)


def lengths_so_far(rows: Rows) -> Int64Array:
    """[S, 4] at the end of each turn: tokens of the turn, of the row, of the response (from the
    first sampled token on), and sampled in the row."""
    spans = rows.spans
    of_row = spans.end - rows.offsets[spans.row]
    first = np.maximum.accumulate(np.where(spans.is_first, np.arange(len(spans)), 0))
    total = np.cumsum(spans.size)
    sampled = total - (total - spans.size)[first]
    return np.stack([spans.size, of_row, spans.end - spans.begin[first], sampled], axis=1)
