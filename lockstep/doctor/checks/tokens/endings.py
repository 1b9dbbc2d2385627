"""How turns end: by their stop id, once, and with nothing behind it.

# N tokens  S spans (sampled turns)  C ways in which a length can be limited
"""

from __future__ import annotations

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.findings import Evidence, Finding
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.doctor.checks.tokens.masks import misplaced, runs_of
from lockstep.doctor.checks.tokens.template_ids import TemplateIds
from lockstep.types import Int64Array

MIN_STOPPED = 0.5
"""Share of the turns that must end with a stop id, where the stop ids are learnt, before the others
are asked why they do not."""
MIN_UNFINISHED = 3
"""Turns without an end before they are more than an engine's failure."""
MIN_UNFINISHED_SHARE = 0.02
"""Of the turns, likewise: requests that were aborted leave as much."""
MIN_AT_CEILING = 2
"""Turns that must be cut at the same count before it is taken for a limit: a single one is the
longest of its kind in any dump."""
MAX_KEPT = 4096
"""Turns without an end whose lengths are kept: memory does not grow with the dump. The share of
them that a limit explains is taken for that of all."""


class MissingFinal(Check):
    """Turns without their stop id, where no limit of length explains it.

    A reply that a limit has cut off ends at the same count as others: tokens of the turn, of the
    row, of the row's response, or sampled in the row so far. What is lost after sampling ends
    anywhere. Where the engine's answers are in the dump, they are the proof.
    """

    name = "tokens/missing_final"
    claim = "each turn ends with its stop id, or at a limit of length"
    cause = "missing_final"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._template = TemplateIds(setting)
        self._turns = 0
        self._open_turns = 0
        self._open_last = 0
        self._stop_behind = 0
        self._kept: list[tuple[int, ...]] = []
        self._largest = np.zeros(4, np.int64)
        self._turns_of_engine = 0
        self._cut_turns = 0
        self._cut_tokens = 0

    def look(self, rows: Rows) -> None:
        self._template.add(rows)
        spans = rows.spans
        if not len(spans):
            return
        is_cut, is_answered = self._compare_with_engine(rows)
        counts = lengths_so_far(rows)
        self._turns += len(spans)
        self._largest = np.maximum(self._largest, counts.max(axis=0))
        stops = self._template.stop_ids
        if not stops:
            return
        follows = np.zeros(len(spans), np.bool_)  # the next turn of the row begins where this ends
        follows[:-1] = (spans.begin[1:] == spans.end[:-1]) & (spans.row[1:] == spans.row[:-1])
        is_last = np.ones(len(spans), np.bool_)
        is_last[:-1] = spans.row[1:] != spans.row[:-1]
        is_stop = self._template.is_stop(rows)
        stops_before = np.concatenate([[0], np.cumsum(is_stop)])
        has_stop = stops_before[spans.end] > stops_before[spans.begin]  # else `AfterStop` has it
        # One that other weights went on with is not open, nor one that the engine ended so.
        is_open = ~has_stop & ~follows & ~is_answered
        has_stop_behind = np.zeros(len(spans), np.bool_)
        has_stop_behind[~is_last] = is_stop[spans.end[~is_last]]
        self._open_turns += int(is_open.sum())
        self._open_last += int((is_open & is_last).sum())
        self._stop_behind += int((is_open & has_stop_behind).sum())
        index = np.flatnonzero(is_open & ~is_cut)
        self._kept += map(tuple, counts[index[: MAX_KEPT - len(self._kept)]].tolist())
        for s in index[:64].tolist():
            row, begin = rows.where(int(spans.begin[s]))
            end = begin + int(spans.size[s])
            at = "the row's last turn" if is_last[s] else "a turn with others behind it"
            tail = ", its stop id stands behind it and is not sampled" if has_stop_behind[s] else ""
            self.show(
                1.0 - float((counts[s] == self._largest).any()),
                Evidence(
                    row=row,
                    begin=end - 1,
                    end=end,
                    note=f"{at} ends with id {int(rows.token_ids[spans.end[s] - 1])} after "
                    f"{int(spans.size[s])} tokens{tail}",
                    expected_ids=tuple(sorted(stops)),
                ),
            )

    def _compare_with_engine(self, rows: Rows) -> tuple[BoolArray, BoolArray]:
        """[S] turns that are a beginning of what the engine answered and not all of it, and [S]
        those that are all of it."""
        spans = rows.spans
        is_cut, is_answered = np.zeros(len(spans), np.bool_), np.zeros(len(spans), np.bool_)
        if rows.engine_ids is None:
            return is_cut, is_answered
        first = np.searchsorted(spans.row, np.arange(len(rows) + 1))
        for number, answers in enumerate(rows.engine_ids):
            if answers is None:
                continue
            turns = range(int(first[number]), int(first[number + 1]))
            for s, answer in zip(turns, answers, strict=False):
                size = int(spans.size[s])
                self._turns_of_engine += 1
                begin = int(spans.begin[s])
                if size >= len(answer):
                    found = rows.token_ids[begin : begin + size]
                    is_answered[s] = np.array_equal(found, answer)
                    continue
                if not np.array_equal(rows.token_ids[begin : begin + size], answer[:size]):
                    continue
                is_cut[s] = True
                self._cut_turns += 1
                self._cut_tokens += len(answer) - size
                row, place = rows.where(begin)
                lost = tuple(np.asarray(answer[size : size + 8]).tolist())
                self.show(
                    2.0 + len(answer) - size,
                    Evidence(
                        row=row,
                        begin=place + size - 1,
                        end=place + size,
                        note=f"the engine answered {len(answer)} tokens, the row has {size}",
                        expected_ids=lost,
                    ),
                )
        return is_cut, is_answered

    def conclude(self) -> Finding:
        kept = np.array(self._kept, np.int64).reshape(-1, 4)
        at_limit = np.zeros(len(kept), np.bool_)
        for kind in range(4):
            is_largest = kept[:, kind] == self._largest[kind]
            if is_largest.sum() >= MIN_AT_CEILING:
                at_limit |= is_largest
        unexplained = float((~at_limit).mean()) if len(kept) else 0.0
        unfinished = round(unexplained * (self._open_turns - self._cut_turns))
        figures = {
            "turns": self._turns,
            "turns_without_stop": self._open_turns,
            "last_turns_without_stop": self._open_last,
            "turns_with_stop_behind": self._stop_behind,
            "unfinished_turns": unfinished,
            "turns_of_engine": self._turns_of_engine,
            "turns_cut_short": self._cut_turns,
            "tokens_cut_off": self._cut_tokens,
        }
        if self._cut_turns:
            return self.found(
                "differs",
                f"{self._cut_turns} of {self._turns_of_engine} turns lack the last tokens that the "
                f"engine answered, {self._cut_tokens} tokens in all",
                **figures,
            )
        template = self._template
        if not template.stop_ids:
            return self.not_checkable(("stop_ids",))
        stopped = self._turns - self._open_turns
        is_many = unfinished >= max(MIN_UNFINISHED, MIN_UNFINISHED_SHARE * self._turns)
        if not is_many:
            limits = self._open_turns - unfinished
            return self.found(
                "consistent",
                f"{stopped} of {self._turns} turns end with a stop id, {limits} at a limit",
                **figures,
            )
        is_proof = template.is_sure and (
            bool(self.setting.stop_ids) or stopped >= MIN_STOPPED * self._turns
        )
        where = "most of them the last of their row" if self._is_of_last() else "in any place"
        return self.found(
            "differs" if is_proof else "information",
            f"{unfinished} of {self._turns} turns end with no stop id and at no limit of length, "
            f"{where}",
            **figures,
        )

    def _is_of_last(self) -> bool:
        return self._open_last > 0.8 * self._open_turns


class AfterStop(Check):
    """Sampled or trained tokens behind a stop id of the same turn.

    Where only the loss mask is known, tool replies that are trained join two turns to one run.
    These are the business of `observation_trained`, and are left out here.
    """

    name = "tokens/after_stop"
    claim = "nothing is trained behind the stop id of a turn"
    cause = "after_stop"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._template = TemplateIds(setting)
        self._turns = 0
        self._turns_hit = 0
        self._tokens = 0
        self._knows_sampled = False

    def look(self, rows: Rows) -> None:
        self._template.add(rows)
        self._knows_sampled = rows.is_sampled is not None
        self._turns += len(rows.spans)
        behind = misplaced(rows, self._template).after_stop
        if not behind.any():
            return
        self._tokens += int(behind.sum())
        begins, ends = runs_of(behind, rows)
        self._turns_hit += len(begins)
        for begin, end in zip(begins[:64].tolist(), ends[:64].tolist(), strict=True):
            row, place = rows.where(begin)
            self.show(
                end - begin,
                Evidence(
                    row=row,
                    begin=place,
                    end=place + end - begin,
                    note=f"{end - begin} tokens behind stop id {int(rows.token_ids[begin - 1])}",
                ),
            )

    def conclude(self) -> Finding:
        template = self._template
        if not template.stop_ids:
            return self.not_checkable(("stop_ids",))
        figures = {
            "turns": self._turns,
            "turns_with_tokens_after_stop": self._turns_hit,
            "tokens_after_stop": self._tokens,
        }
        if not self._tokens:
            return self.found(
                "consistent", f"0 of {self._turns} turns go on behind a stop id", **figures
            )
        is_told = bool(template.openings) or self._knows_sampled
        return self.found(
            "differs" if template.is_sure and is_told else "information",
            f"{self._turns_hit} of {self._turns} turns go on behind a stop id, {self._tokens} "
            "tokens that are trained",
            **figures,
        )

    def repair(self, rows: Rows) -> Rows:
        """What follows a stop id is not trained."""
        behind = misplaced(rows, self._template).after_stop
        return rows.with_(loss_mask=rows.loss_mask & ~behind) if behind.any() else rows


def lengths_so_far(rows: Rows) -> Int64Array:
    """[S, 4] at the end of each turn: tokens of the turn, of the row, of its response (all behind
    the first sampled token), and sampled in the row."""
    spans = rows.spans
    is_first = np.ones(len(spans), np.bool_)
    is_first[1:] = spans.row[1:] != spans.row[:-1]
    of_row = spans.end - rows.offsets[spans.row]
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(spans)), 0))
    total = np.cumsum(spans.size)
    sampled = total - (total - spans.size)[first]
    return np.stack([spans.size, of_row, spans.end - spans.begin[first], sampled], axis=1)
