"""The replies of rows: as messages, as text encoded again, and as the engine gave them.

# N tokens  U runs of sampled text
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import ClassVar, Literal

import numpy as np

from lockstep.doctor.checks.base import Check, Setting
from lockstep.doctor.checks.rows import BoolArray, Rows
from lockstep.errors import RendererError
from lockstep.renderers.base import Renderer
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Int32Array, Int64Array, Message

MIN_SHARED = 0.5
"""Share of a reply's characters that must be left in order, for a turn to be that reply after a
change. Two replies to one task share less."""
MIN_FORM_TOKENS = 3
"""Tokens that a turn and a rendering must share to be the same."""

Change = Literal["reencoded", "rerendered", "post_processed"]

_WORDS = Message(role="user", content="?")
"""Message before the one whose rendering is wanted; its content does not matter."""


MAX_KNOWN_TOKENS = 1 << 20
"""Tokens of runs whose spelling is cached: 10 MB, for a dump of any size."""


def control_spelling(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Matches the name of any control token, the longest first."""
    names = sorted((tokenizer.control_name(i) for i in tokenizer.control_ids), key=len)
    return re.compile("|".join(map(re.escape, reversed(names))) or r"(?!)")


REPLACEMENT = "\ufffd".encode()
"""Bytes of the sign that stands for what could not be decoded."""


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
        number = np.where(is_text, rows.span_of, -1)
        is_edge = np.diff(number, prepend=-1, append=-1) != 0
        begin = np.flatnonzero(is_edge[:-1] & is_text)
        end = np.flatnonzero(is_edge[1:] & is_text) + 1
        ids = np.ascontiguousarray(rows.token_ids)
        parts = [ids[b:e] for b, e in zip(begin.tolist(), end.tolist(), strict=True)]
        return begin, end, self.respelt(parts)

    def respelt(self, runs: Sequence[Int32Array]) -> list[Int32Array | None]:
        """The ids that each run of text is encoded to again; None if they are the same."""
        if self._num_known > MAX_KNOWN_TOKENS:
            self._known.clear()
            self._num_known = 0
        keys = [run.tobytes() for run in runs]
        pairs = zip(keys, runs, strict=True)
        new = {key: run.tolist() for key, run in pairs if key not in self._known}
        texts = [self._text(ids) for ids in new.values()]
        for (key, ids), again in zip(new.items(), self.tokenizer.encode_batch(texts), strict=True):
            self._known[key] = None if ids == again[: len(ids)] else np.array(again, np.int32)
            self._num_known += len(ids)
        return [self._known[key] for key in keys]

    def _text(self, ids: Sequence[int]) -> str:
        """The text that these ids spell. The sign for what could not be decoded, which only a text
        holds, is completed: a limit of length may have cut it."""
        data = b"".join([self._bytes[i] for i in ids])
        cut = next((n for n in (2, 1) if data.endswith(REPLACEMENT[:n])), len(REPLACEMENT))
        return (data + REPLACEMENT[cut:]).decode("utf-8", errors="replace")

    def turn(self, ids: Int32Array) -> Int32Array:
        """One turn with all of its text encoded again, and its control tokens kept."""
        is_text = self.is_text(ids)
        parts = np.split(np.asarray(ids, np.int32), np.flatnonzero(np.diff(is_text)) + 1)
        first = 0 if is_text[:1].any() else 1  # runs of text and of control tokens alternate
        for at, spelt in enumerate(self.respelt(parts[first::2])):
            if spelt is not None:
                parts[first + 2 * at] = spelt
        return np.concatenate(parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dialogue:
    """One row with its messages."""

    row: int
    ids: Int32Array
    """[T]"""
    offset: int
    """Index of the row's first token."""
    begin: Int64Array
    """[S] position of the first token of each sampled turn."""
    end: Int64Array
    """[S] position after its last token."""
    messages: tuple[Message, ...]
    replies: list[int]
    """Indices of the assistant's messages."""

    @property
    def is_paired(self) -> bool:
        """True if each assistant message is a sampled turn of this row."""
        return len(self.replies) == len(self.begin)

    def between(self, turn: int) -> Sequence[Message]:
        """The messages after sampled turn `turn`, before the next one."""
        return self.messages[self.replies[turn] + 1 : self.replies[turn + 1]]


def dialogues(rows: Rows) -> list[Dialogue]:
    """The rows that have messages and a reply."""
    if rows.messages is None:
        return []
    spans = rows.spans
    out: list[Dialogue] = []
    for r, turns in enumerate(spans.of_rows(len(rows))):
        tokens, messages = rows.slices[r], rows.messages[r]
        if not messages or not turns:
            continue
        dialogue = Dialogue(
            row=r,
            ids=rows.token_ids[tokens],
            offset=tokens.start,
            begin=spans.begin[turns] - tokens.start,
            end=spans.end[turns] - tokens.start,
            messages=messages,
            replies=[i for i, message in enumerate(messages) if message.role == "assistant"],
        )
        out.append(dialogue)
    return out


def is_extended(dialogue: Dialogue, renderer: Renderer) -> bool:
    """True if the row is its turns, extended: between them is what the renderer writes after the
    sampled turn. Also where it cannot write that.

    Only for a paired dialogue. The first prompt is not compared: it declares tools, which a row
    does not record.
    """
    for turn in range(len(dialogue.begin) - 1):
        begin, end = int(dialogue.end[turn]), int(dialogue.begin[turn + 1])
        sampled = dialogue.ids[int(dialogue.begin[turn]) : begin]
        try:
            glue = renderer.extend(sampled.tolist(), dialogue.between(turn))
        except RendererError:
            return True
        if not np.array_equal(dialogue.ids[begin:end], glue):
            return False
    return True


def rendered_whole(dialogue: Dialogue, renderer: Renderer) -> Int32Array | None:
    """The row's first prompt, then the ids that the renderer writes for all messages before the
    last reply; None without an earlier reply, or if the first prompt is no prefix of it."""
    if len(dialogue.replies) < 2:
        return None
    try:
        first = renderer.render(dialogue.messages[: dialogue.replies[0]])
        whole = renderer.render(dialogue.messages[: dialogue.replies[-1]])
    except RendererError:
        return None
    if whole[: len(first)] != first:
        return None
    prompt = dialogue.ids[: int(dialogue.begin[0])]
    return np.concatenate([prompt, np.asarray(whole[len(first) :], np.int32)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedReply:
    """A turn of a row that is not the engine's reply, and how it was changed."""

    change: Change
    what: str
    """The change, in words."""
    begin: int
    """Index of the turn's first token."""
    end: int
    first: int
    """Index of the first different token."""
    engine_ids: Int32Array
    match_rate: float
    """Share of the engine's ids that are at their position in the turn."""


class ReplyCheck(Check):
    """Base of checks that compare turns with the engine's replies."""

    change: ClassVar[Change]

    @cached_property
    def speller(self) -> Speller:
        """The speller of the setting's tokenizer, shared by all checks."""
        return self.setting.once("speller", lambda: Speller(self.tokenizer))

    def changed(self, rows: Rows) -> list[ChangedReply]:
        """The turns that were changed in this check's way."""
        found = rows.once(
            "changed replies", lambda: list(changed_replies(rows, self.speller, self.setting))
        )
        return [reply for reply in found if reply.change == self.change]

    def look_at_replies(self, rows: Rows) -> None:
        self.count(engine_turns=sum(len(turns or ()) for turns in rows.engine_ids or ()))
        for reply in self.changed(rows):
            self.count(changed_turns=1)
            note = f"{reply.what}; {reply.match_rate:.1%} of the engine's ids are at their place"
            weight = 1e6 + reply.end - reply.first
            self.show(weight, rows, reply.begin, reply.end, note, reply.engine_ids.tolist())


def changed_replies(rows: Rows, speller: Speller, setting: Setting) -> Iterator[ChangedReply]:
    """The turns that differ from the engine's ids, where the change can be told.

    Rows with another number of turns than the engine's replies are skipped: matching them would be
    a guess. So are turns that are a prefix of their reply, or that have tokens of their neighbours:
    their border is wrong, and nobody rewrote them. A stop id that a program added is a change.

    If a rendering is also the tokenizer's spelling, the row decides: by another turn that is a
    rendering for sure, or by a last turn that kept a spelling of its own.
    """
    spans = rows.spans
    for turns, answered in zip(spans.of_rows(len(rows)), rows.engine_ids or (), strict=False):
        if answered is None or len(answered) != len(turns):
            continue
        of_row: list[ChangedReply] = []
        for s, engine in zip(turns, answered, strict=True):
            begin, end = int(spans.begin[s]), int(spans.end[s])
            found = rows.token_ids[begin:end]
            if np.array_equal(found, engine):
                continue
            told = _change(found, np.asarray(engine, np.int32), speller, setting)
            if told is None:
                continue
            size = min(len(found), len(engine))
            same = found[:size] == engine[:size]
            first = size if same.all() else int(np.argmin(same))
            reply = ChangedReply(
                change=told[0],
                what=told[1],
                begin=begin,
                end=end,
                first=min(begin + first, end - 1),
                engine_ids=engine,
                match_rate=float(same.sum()) / max(len(engine), 1),
            )
            of_row.append(reply)
        if not of_row:
            continue
        last_begin, last_end = int(spans.begin[turns[-1]]), int(spans.end[turns[-1]])
        last = rows.token_ids[last_begin:last_end]
        is_rendered = any(reply.change == "rerendered" for reply in of_row) or (
            np.array_equal(last, answered[-1]) and not np.array_equal(last, speller.turn(last))
        )
        for reply in of_row:
            is_other = reply.change == "reencoded" and reply.begin < last_begin and is_rendered
            yield replace(reply, change="rerendered") if is_other else reply


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
    if len(found) in (len(engine), len(again)) and np.array_equal(found, again[: len(found)]):
        return "reencoded", "the reply, decoded and encoded again"
    decode, text = speller.tokenizer.decode, speller.tokenizer.decode(engine.tolist())
    if decode(found.tolist()) == text:
        return "reencoded", "the same text, encoded with its control tokens"
    if is_same_without_prefix(found, engine, speller.tokenizer):
        return "reencoded", "the same text, encoded with a space before it"
    if found[-1] in setting.stop_ids and decode(found[:-1].tolist()) == text:
        return "rerendered", "the same text, encoded again and closed by a stop id"
    if setting.renderer is not None:
        for form, what in renderings(engine, setting.renderer):
            shared = min(len(form), len(found))
            # What begins as it was sampled shows no rendering.
            is_other = not np.array_equal(form[:shared], engine[:shared])
            is_form = bool((found[:shared] == form[:shared]).all())
            is_form |= is_same_without_prefix(found, form, speller.tokenizer)
            if shared >= MIN_FORM_TOKENS and is_other and is_form:
                return "rerendered", what
    one, other = (ids[speller.is_text(ids) & (ids != setting.pad_id)] for ids in (engine, found))
    if np.array_equal(one, other):
        return None  # only control tokens or padding differ
    what = rewriting(text, decode(found.tolist()))
    if what == JSON_AGAIN:
        return "rerendered", what
    return None if what is None else ("post_processed", what)


def is_same_without_prefix(one: Iterable[int], other: Iterable[int], tokenizer: Tokenizer) -> bool:
    """Whether ids are the same text but for spaces that the file's own tokenizer writes before one:
    at its beginning, and behind each control token."""

    def bare(ids: Iterable[int]) -> str:
        runs = groupby(map(int, ids), key=tokenizer.control_ids.__contains__)
        texts = (tokenizer.decode(run).lstrip(" ") for _, run in runs)
        return "".join(texts)

    return tokenizer.lacks_prefix and bare(one) == bare(other)


def renderings(sampled_ids: Int32Array, renderer: Renderer) -> Iterator[tuple[list[int], str]]:
    """The ids that a program may write for a turn that it kept as a message: (ids, in words). They
    begin where the sampled ids would."""
    tokenizer = renderer.tokenizer
    plain = replace(renderer.parse(sampled_ids), parse_error="")
    text = tokenizer.decode(sampled_ids)
    words = tokenizer.decode(i for i in sampled_ids.tolist() if i not in tokenizer.control_ids)
    written = {
        "parsed to a message and rendered again": plain,
        "rendered again without its thinking": replace(plain, thinking=""),
        **_written_again(plain),
        "its whole text, rendered as a message's content": Message(role="assistant", content=text),
        "its words, rendered as a message's content": Message(role="assistant", content=words),
    }
    for what, kept in written.items():
        with suppress(RendererError):
            yield as_history(kept, renderer), what
        with suppress(RendererError):
            yield renderer.render_reply(kept), what


def _written_again(message: Message) -> dict[str, Message]:
    """The message with the JSON of its calls read and written again, as a program that keeps
    objects does; empty if that is the same."""
    try:
        read = [json.loads(call.arguments) for call in message.tool_calls]
    except ValueError:
        return {}
    texts = [json.dumps(arguments, ensure_ascii=False) for arguments in read]
    if texts == [call.arguments for call in message.tool_calls]:
        return {}
    calls = tuple(replace(c, arguments=t) for c, t in zip(message.tool_calls, texts, strict=True))
    new = replace(message, tool_calls=calls)
    stripped = replace(new, content=new.content.strip())
    return {
        "rendered again with the JSON of its calls written again": new,
        "stripped, and rendered again with the JSON of its calls written again": stripped,
    }


def as_history(message: Message, renderer: Renderer) -> list[int]:
    """The ids of an assistant message in a history, from where a sampled turn would begin up to the
    close that every message has. Raises RendererError if the format cannot write it."""
    before = renderer.render([_WORDS])
    whole = renderer.render([_WORDS, message])
    close = first_difference(before[::-1], whole[::-1])  # and opening of the next
    if whole[: len(before)] == before:
        return whole[len(before) : len(whole) - close]
    # One token spans the end of the opening and the message's beginning: cut by bytes.
    size = len(renderer.tokenizer.decode_bytes(before))
    at, seen = 0, 0
    while at < len(whole) and seen < size:
        seen += len(renderer.tokenizer.token_bytes(whole[at]))
        at += 1
    return whole[at : len(whole) - close]


JSON_AGAIN = "its JSON was written again"
"""As a template does that is given objects."""


def rewriting(before: str, after: str) -> str | None:
    """How one text became another; None if they are equal, or too different for a change."""
    if before == after:
        return None
    if before.strip() == after.strip():
        return "white space around it was stripped or added"
    if "".join(before.split()) == "".join(after.split()):
        return "its white space was changed"
    if after.startswith(before):
        return f"completed by {_short(after[len(before) :])}"
    if before.startswith(after):
        return f"cut before {_short(before[len(after) :])}"
    before, after = before.strip(), after.strip()
    head = first_difference(before, after)
    tail = first_difference(before[head:][::-1], after[head:][::-1])
    if head + tail < MIN_SHARED * len(before):
        return None
    was, now = before[head : len(before) - tail], after[head : len(after) - tail]
    with suppress(ValueError):
        if json.loads(was) == json.loads(now):
            return JSON_AGAIN
    return f"{_short(was)} became {_short(now)}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...") if text else "nothing"
