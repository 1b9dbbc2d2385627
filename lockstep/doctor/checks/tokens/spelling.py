"""The ids that the text of rows is encoded to again.

# N tokens  U runs of sampled text
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from lockstep.doctor.checks.base import Setting
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Int32Array, Int64Array

MAX_KNOWN_TOKENS = 1 << 20
"""Tokens of runs whose spelling is cached: 10 MB, for a dump of any size."""


def control_spelling(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Matches the name of any control token, the longest first."""
    names = sorted((tokenizer.control_name(i) for i in tokenizer.control_ids), key=len)
    return re.compile("|".join(map(re.escape, reversed(names))) or r"(?!)")


def speller_of(setting: Setting) -> Speller:
    """The speller of the setting's tokenizer, shared by all checks."""
    tokenizer = setting.tokenizer
    assert tokenizer is not None, "the check's needs"
    return setting.once("speller", lambda: Speller(tokenizer))


class Speller:
    """Decodes and encodes runs of text, each distinct run once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._bytes = tokenizer.all_token_bytes()
        size = tokenizer.vocab_size
        is_text = np.zeros(size + 1, np.bool_)  # the last one is for ids beyond the vocabulary
        is_text[:size] = [len(piece) > 0 for piece in self._bytes]
        is_text[list(tokenizer.control_ids)] = False
        self._is_text = is_text
        self._known: dict[bytes, Int32Array | None] = {}
        self._num_known = 0

    def is_text(self, ids: Int32Array) -> BoolArray:
        """[N] True for ids of text: in the vocabulary, and no control token."""
        index = np.where((ids < 0) | (ids >= len(self._is_text)), len(self._is_text) - 1, ids)
        return self._is_text[index]

    def runs(self, rows: Rows) -> tuple[Int64Array, Int64Array, list[Int32Array | None]]:
        """(begin, end, ids that their text is encoded to again or None if they are the same) of all
        runs of sampled text in `rows`. A run ends at a control token and with its turn."""
        is_text = rows.sampled & self.is_text(rows.token_ids)
        number = np.full(rows.num_tokens, -1, np.int64)
        spans = rows.spans
        number[rows.sampled] = np.repeat(np.arange(len(spans)), spans.size)
        begins = is_text.copy()
        begins[1:] &= ~is_text[:-1] | (number[1:] != number[:-1])
        ends = is_text.copy()
        ends[:-1] &= ~is_text[1:] | (number[1:] != number[:-1])
        begin, end = np.flatnonzero(begins), np.flatnonzero(ends) + 1
        ids = np.ascontiguousarray(rows.token_ids)
        parts = [ids[b:e] for b, e in zip(begin.tolist(), end.tolist(), strict=True)]
        return begin, end, self.respelt(parts)

    def respelt(self, runs: Sequence[Int32Array]) -> list[Int32Array | None]:
        """The ids that each run of text is encoded to again; None if they are the same."""
        if self._num_known > MAX_KNOWN_TOKENS:
            self._known.clear()
            self._num_known = 0
        keys = [run.tobytes() for run in runs]
        new: dict[bytes, list[int]] = {}
        for key, run in zip(keys, runs, strict=True):
            if key not in self._known and key not in new:
                new[key] = run.tolist()
        of = self._bytes
        texts = [
            b"".join([of[i] for i in ids]).decode("utf-8", errors="replace") for ids in new.values()
        ]
        for (key, ids), again in zip(new.items(), self.tokenizer.encode_batch(texts), strict=True):
            self._known[key] = None if ids == again else np.array(again, np.int32)
            self._num_known += len(ids)
        return [self._known[key] for key in keys]

    def turn(self, ids: Int32Array) -> Int32Array:
        """One turn with all of its text encoded again, and its control tokens kept."""
        is_text = self.is_text(ids)
        at = np.flatnonzero(np.diff(is_text)) + 1
        parts = np.split(np.asarray(ids, np.int32), at)
        texts = [p for p in parts if len(p) and self.is_text(p[:1])[0]]
        again = iter(self.respelt(texts))
        out: list[Int32Array] = []
        for part in parts:
            spelt = next(again) if len(part) and self.is_text(part[:1])[0] else None
            out.append(part if spelt is None else spelt)
        return np.concatenate(out) if out else np.empty(0, np.int32)
