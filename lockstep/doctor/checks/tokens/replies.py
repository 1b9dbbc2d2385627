"""How replies were changed between engine and row, where the engine's ids were kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lockstep.doctor.checks.base import Setting
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.tokens.spelling import Speller
from lockstep.errors import RendererError
from lockstep.renderers.base import Renderer
from lockstep.types import Int32Array, Message

MIN_SHARED = 0.5
"""Share of a reply's characters that must be left in order, for a turn to be that reply after a
change. Two replies to one task share less."""
MIN_FORM_TOKENS = 3
"""Tokens that a turn and a rendering must share to be the same."""

Change = Literal["reencoded", "rerendered", "post_processed"]

_WORDS = Message(role="user", content="?")
"""Message before the one whose rendering is wanted; its content does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedReply:
    """A turn of a row that is not the engine's reply, and how it was changed."""

    change: Change
    row: int
    begin: int
    """Index of the turn's first token."""
    end: int
    first: int
    """Index of the first different token."""
    engine_ids: Int32Array
    match_rate: float
    """Share of the engine's ids that are at their position in the turn."""
    what: str
    """The change, in words."""
    is_last: bool
    """True for the last turn of its row."""
    is_last_own: bool
    """True if the row's last turn is the engine's reply in a spelling that is not the tokenizer's:
    then nothing encoded the row again."""


def changed_replies(rows: Rows, speller: Speller, setting: Setting) -> Iterator[ChangedReply]:
    """The turns that differ from the engine's ids, where the change can be told.

    Rows with another number of turns than the engine's replies are skipped: matching them would be
    a guess. So are turns that are a prefix of their reply, or that have tokens of their neighbours:
    their border is wrong, and nobody rewrote them. A stop id that a program added is a change.
    """
    if rows.engine_ids is None:
        return
    spans = rows.spans
    first_span = spans.of_rows(len(rows))
    for r, answered in enumerate(rows.engine_ids):
        low, high = int(first_span[r]), int(first_span[r + 1])
        if answered is None or len(answered) != high - low:
            continue
        last = rows.token_ids[int(spans.begin[high - 1]) : int(spans.end[high - 1])]
        is_last_own: bool | None = None
        for s, engine in zip(range(low, high), answered, strict=True):
            begin, end = int(spans.begin[s]), int(spans.end[s])
            found = rows.token_ids[begin:end]
            if len(found) == len(engine) and np.array_equal(found, engine):
                continue
            told = _change(found, np.asarray(engine, np.int32), speller, setting)
            if told is None:
                continue
            if is_last_own is None:
                is_last_own = np.array_equal(last, answered[-1]) and not np.array_equal(
                    last, speller.turn(last)
                )
            size = min(len(found), len(engine))
            same = found[:size] == engine[:size]
            first = int(np.argmin(same)) if not same.all() else size
            yield ChangedReply(
                change=told[0],
                row=r,
                begin=begin,
                end=end,
                first=min(begin + first, end - 1),
                engine_ids=engine,
                match_rate=float(same.sum()) / max(len(engine), 1),
                what=told[1],
                is_last=s == high - 1,
                is_last_own=is_last_own,
            )


def _change(
    found: Int32Array, engine: Int32Array, speller: Speller, setting: Setting
) -> tuple[Change, str] | None:
    size = min(len(found), len(engine))
    if np.array_equal(found[:size], engine[:size]):
        stops = setting.stop_ids
        if len(found) == size + 1 and found[-1] in stops and not set(engine[-1:].tolist()) & stops:
            return "post_processed", f"completed by {speller.tokenizer.decode(found[-1:])}"
        return None  # one is a prefix of the other
    again = speller.turn(engine)
    if np.array_equal(found, again) or (
        len(found) == len(engine) and np.array_equal(found, again[: len(found)])
    ):
        return "reencoded", "the reply, decoded and encoded again"
    if setting.renderer is not None:
        for form, what in renderings(engine, setting.renderer):
            shared = min(len(form), len(found))
            if shared >= MIN_FORM_TOKENS and np.array_equal(found[:shared], form[:shared]):
                return "rerendered", what
    if np.array_equal(_words_of(found, speller, setting), _words_of(engine, speller, setting)):
        return None  # only control tokens or padding differ
    before, after = (speller.tokenizer.decode(ids.tolist()) for ids in (engine, found))
    return rewriting(before, after)


def _words_of(ids: Int32Array, speller: Speller, setting: Setting) -> Int32Array:
    is_word = speller.is_text(ids)
    if setting.pad_id is not None:
        is_word &= ids != setting.pad_id
    return ids[is_word]


def renderings(sampled_ids: Int32Array, renderer: Renderer) -> Iterator[tuple[list[int], str]]:
    """The ids that a program may write for a turn that it kept as a message: (ids, in words). They
    begin where the sampled ids would."""
    tokenizer = renderer.tokenizer
    message = renderer.parse(sampled_ids)
    plain = replace(message, parse_error="")
    text = tokenizer.decode(sampled_ids)
    words = tokenizer.decode(i for i in sampled_ids.tolist() if i not in tokenizer.control_ids)
    written = [
        (plain, "parsed to a message and rendered again"),
        (replace(plain, thinking=""), "rendered again without its thinking"),
        (
            Message(role="assistant", content=text),
            "its whole text, rendered as a message's content",
        ),
        (Message(role="assistant", content=words), "its words, rendered as a message's content"),
    ]
    for kept, what in written:
        with suppress(RendererError):
            yield as_history(kept, renderer), what
        with suppress(RendererError):
            yield renderer.render_reply(kept), what


def as_history(message: Message, renderer: Renderer) -> list[int]:
    """The ids of an assistant message in a history, from where a sampled turn would begin up to the
    close that every message has. Raises RendererError if the format cannot write it."""
    before = renderer.render([_WORDS])
    whole = renderer.render([_WORDS, message])
    close = 0  # close of any message, and opening of the next
    while close < len(before) and before[-1 - close] == whole[-1 - close]:
        close += 1
    body = whole[len(before) : len(whole) - close]
    if whole[: len(before)] == before:
        return body
    # One token spans the end of the opening and the message's beginning: cut by bytes.
    size = len(renderer.tokenizer.decode_bytes(before))
    at, seen = 0, 0
    while at < len(whole) and seen < size:
        seen += len(renderer.tokenizer.token_bytes(whole[at]))
        at += 1
    return whole[at : len(whole) - close]


def rewriting(before: str, after: str) -> tuple[Change, str] | None:
    """How one text became another; None if they are equal, or too different for a change."""
    if before == after:
        return None
    if before.strip() == after.strip():
        return "post_processed", "white space around it was stripped or added"
    if "".join(before.split()) == "".join(after.split()):
        return "post_processed", "its white space was changed"
    if after.startswith(before):
        return "post_processed", f"completed by {_short(after[len(before) :])}"
    if before.startswith(after):
        return "post_processed", f"cut before {_short(before[len(after) :])}"
    before, after = before.strip(), after.strip()
    head, tail = _shared(before, after)
    if head + tail < MIN_SHARED * len(before):
        return None
    was, now = before[head : len(before) - tail], after[head : len(after) - tail]
    if _is_same_json(was, now):
        return "post_processed", "its JSON was written again"
    return "post_processed", f"{_short(was)} became {_short(now)}"


def _shared(one: str, other: str) -> tuple[int, int]:
    """Numbers of characters that two texts share at the beginning, and at the end after these."""
    size = min(len(one), len(other))
    head = 0
    while head < size and one[head] == other[head]:
        head += 1
    tail = 0
    while tail < size - head and one[-1 - tail] == other[-1 - tail]:
        tail += 1
    return head, tail


def _is_same_json(one: str, other: str) -> bool:
    with suppress(ValueError):
        return json.loads(one) == json.loads(other)
    return False


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...") if text else "nothing"
