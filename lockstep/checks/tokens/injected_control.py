"""Whether text that a tool or a user wrote has become control tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.checks.base import Check, Setting
from lockstep.checks.findings import Evidence, Finding
from lockstep.checks.rows import Rows
from lockstep.checks.tokens.reencoded import without_logprobs
from lockstep.checks.tokens.spelling import control_spelling


class InjectedControl(Check):
    """Messages that spell a control token, looked up in the bytes of their rows: the spelling must
    be tokens of text there."""

    name = "tokens/injected_control"
    claim = "what users and tools wrote stands in the rows as text, never as control tokens"
    cause = "injected_control"
    needs = ("tokenizer", "messages")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        tokenizer = setting.tokenizer
        assert tokenizer is not None, "the check's needs"
        self._bytes = tokenizer.all_token_bytes()
        self._control = np.zeros(tokenizer.vocab_size, np.bool_)
        self._control[list(tokenizer.control_ids)] = True
        self._spelling = control_spelling(tokenizer)
        self._num_spelt = self._num_injected = self._num_rows = 0

    def look(self, rows: Rows) -> None:
        seen: set[int] = set()
        for row, begin, end, name in self._places(rows):
            self._num_spelt += 1
            if begin < 0:
                continue
            self._num_injected += 1
            self._num_rows += row not in seen
            seen.add(row)
            tokenizer = self.setting.tokenizer
            assert tokenizer is not None, "the check's needs"
            self.show(
                1.0,
                Evidence(
                    row=rows.row_ids[row],
                    begin=begin,
                    end=end,
                    note=f"{name} was written by a user or a tool, and is the control token here; "
                    "its spelling as text is beside",
                    expected_ids=tuple(tokenizer.encode(name)),
                ),
            )

    def _places(self, rows: Rows) -> Iterator[tuple[int, int, int, str]]:
        """(row, begin, end, name) of each message that spells a control token: the place in the row
        of the first one that has become it; -1 where all are text."""
        if rows.messages is None:
            return
        for r, messages in enumerate(rows.messages):
            spelt = [
                message.content
                for message in messages or ()
                if message.role != "assistant" and self._spelling.search(message.content)
            ]
            if not spelt:
                continue
            ids = rows.token_ids[int(rows.offsets[r]) : int(rows.offsets[r + 1])]
            known = (ids >= 0) & (ids < len(self._bytes))
            pieces = [
                self._bytes[i] if ok else b""
                for i, ok in zip(ids.tolist(), known.tolist(), strict=True)
            ]
            is_control = known.copy()
            is_control[known] = self._control[ids[known]]
            ends = np.cumsum([len(piece) for piece in pieces])
            whole = b"".join(pieces)
            for content in spelt:
                at = self._injected(content.encode("utf-8", "replace"), whole, ends, is_control)
                if at is None:
                    yield r, -1, -1, ""
                else:
                    yield r, at, at + 1, pieces[at].decode("utf-8", "replace")

    def _injected(
        self, content: bytes, whole: bytes, ends: np.ndarray, is_control: np.ndarray
    ) -> int | None:
        """Place of the first control token inside of `content`, wherever it stands in the row; None
        if it stands there without one, or not at all."""
        found: int | None = None
        begin = whole.find(content)
        while begin >= 0:
            first = int(np.searchsorted(ends, begin, side="right"))
            last = int(np.searchsorted(ends, begin + len(content), side="left")) + 1
            inside = np.flatnonzero(is_control[first:last])
            if not len(inside):
                return None
            found = first + int(inside[0]) if found is None else found
            begin = whole.find(content, begin + 1)
        return found

    def conclude(self) -> Finding:
        figures = {
            "spelt_messages": self._num_spelt,
            "injected_messages": self._num_injected,
            "rows": self._num_rows,
        }
        if self._num_injected:
            return self.found(
                "differs",
                f"{self._num_injected} of {self._num_spelt} messages that spell a control token "
                f"have become it, in {self._num_rows} rows",
                **figures,
            )
        return self.found(
            "consistent",
            f"{self._num_spelt} messages spell a control token, and all are text in their rows",
            **figures,
        )

    def repair(self, rows: Rows) -> Rows:
        """NaN behind a control token that a message has become: the sampler may have read text."""
        if rows.rollout_logprobs is None:
            return rows
        begin = np.full(len(rows), rows.num_tokens, np.int64)
        for row, at, _, _ in self._places(rows):
            if at >= 0:
                begin[row] = min(begin[row], int(rows.offsets[row]) + at)
        return without_logprobs(rows, begin)
