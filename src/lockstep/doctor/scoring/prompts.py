"""Other prompts that a side may have read before the same replies.

The rows say which prompt the trainer scored after. Where the sampler's log-probs are not the
model's after that prompt, they may be its after another one: each is written, scored on a few rows,
and believed only if it gives the side's very numbers. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from lockstep.doctor.rows import Rows
from lockstep.doctor.scoring.layouts import Laid, Layout
from lockstep.doctor.tokenization import control_spelling
from lockstep.errors import RendererError
from lockstep.renderers.base import Renderer
from lockstep.renderers.pieces import encode_pieces, first_difference
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.tables import tables_beside
from lockstep.types import Int64Array, Message, ToolSchema

Ids = list[int]
_Edit = Callable[[Ids, bool], Ids | None]
"""(ids before a reply, whether they begin the row) -> other ids; None leaves them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A published chat format: the text that it writes around each role's words."""

    before: Mapping[str, str]
    """Role -> text before its words."""
    after: Mapping[str, str]
    """Role -> text after its words; "" is for every other role."""
    first: str = ""
    """Text at the beginning of a dialogue."""
    opening: str = ""
    """Text before the model's words; empty: the text before an assistant's."""

    def close(self, role: str) -> str:
        return self.after.get(role, self.after.get("", ""))

    @property
    def openers(self) -> dict[str, str]:
        """Text that opens a message -> its role."""
        return {text.strip(): role for role, text in self.before.items() if text.strip()}

    @property
    def reply_opening(self) -> str:
        return self.opening or self.before["assistant"]

    def write(self, messages: Sequence[Message], *, is_first: bool) -> str:
        """Messages, none of them the model's, as the format writes them before a reply."""
        text = self.first if is_first else ""
        kept = ""
        for message in messages:
            role = message.role if message.role in self.before else "user"
            if message.role in ("system", "developer") and "system" not in self.before:
                kept += f"{message.content}\n\n"  # the format has none: before the user's words
                continue
            text += self.before[role] + kept + message.content + self.close(role)
            kept = ""
        return text + self.reply_opening


_TEXTS = tables_beside(__file__, "families.toml")
FAMILIES = {name: Family(**told) for name, told in _TEXTS["formats"].items()}
DEFAULT_SYSTEMS: list[str] = _TEXTS["default_systems"]
MAX_HEADER = 24
"""Characters around a message's words that mark it where there is no control token."""
_MARK = "Qz7"
"""Words that no template writes."""
_TOOL = ToolSchema(name="qz", description="q", parameters={"type": "object", "properties": {}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A row as observed and sampled ids, in turn."""

    observed: list[Ids]
    """The prompt, and what stands before each further reply."""
    replies: list[Ids]
    messages: tuple[Message, ...] | None = None

    @classmethod
    def of(cls, rows: Rows, row: int) -> Parts | None:
        """The parts of one row; None without a reply."""
        tokens, mine = rows.slices[row], rows.replies[row]
        if not mine:
            return None
        borders = np.ravel(mine) - tokens.start
        parts = [part.tolist() for part in np.split(rows.token_ids[tokens], borders)]
        messages = None if rows.messages is None else rows.messages[row]
        return cls(observed=parts[:-1:2], replies=parts[1::2], messages=messages)

    def with_observed(self, observed: list[Ids]) -> Parts | None:
        """None if these are the ids of the row."""
        return None if observed == self.observed else replace(self, observed=observed)


Write = Callable[[Parts], Parts | None]
"""A row's parts with another prompt; None where it changes nothing or cannot be written."""


def _edited(ways: Sequence[_Edit], parts: Parts) -> Parts | None:
    """The parts by the first edit that changes them."""
    for edit in ways:
        changed = [edit(ids, not at) for at, ids in enumerate(parts.observed)]
        pairs = zip(changed, parts.observed, strict=True)
        other = parts.with_observed([old if new is None else new for new, old in pairs])
        if other is not None:
            return other
    return None


class Prompts:
    """The prompts that are tried for the rows of one tokenizer and renderer."""

    def __init__(
        self, tokenizer: Tokenizer, renderer: Renderer | None, tools: Sequence[ToolSchema]
    ) -> None:
        self.tokenizer, self.renderer, self.tools = tokenizer, renderer, tuple(tools)
        self._spelling = control_spelling(tokenizer)

    def all(self) -> Iterator[tuple[str, Write]]:
        """(prompt in words, after "the prompt": "without its first token"; how it is written) of
        every other prompt, the likely mistakes first. Each text occurs once."""
        edits: dict[str, list[_Edit]] = {}
        for text, edit in (*self._edits(), *self._text_edits()):
            edits.setdefault(text, []).append(edit)
        for text, ways in edits.items():
            yield text, partial(_edited, ways)
        if self.renderer is not None:
            for text, change in _CHANGES.items():
                told = f"as the model's own template writes it{text}"
                yield told, partial(self._by_renderer, self.renderer, change)
        for name, family in FAMILIES.items():
            for text, change in islice(_CHANGES.items(), 2):
                yield f"in the format of {name}{text}", partial(self._by_family, family, change)

    # -- edits of the ids ---------------------------------------------------------------------

    def _edits(self) -> Iterator[tuple[str, _Edit]]:
        def at_begin(edit: Callable[[Ids], Ids]) -> _Edit:
            return lambda ids, is_first: edit(ids) if is_first and ids else None

        def without(end: Ids) -> _Edit:
            return lambda ids, _: ids[: -len(end)] if ids[-len(end) :] == end else None

        yield "without its first token", at_begin(lambda ids: ids[1:])
        yield "with its first token twice", at_begin(lambda ids: [ids[0], *ids])
        for id_ in self._beginnings():
            name = self.tokenizer.control_name(id_)
            yield f"with {name} before it", at_begin(lambda ids, id_=id_: [id_, *ids])
        opening: Ids = []
        with suppress(RendererError):
            opening = [] if self.renderer is None else [*opening_of(self.renderer)]
        if opening:
            yield "without the opening of the reply", without(opening)
            yield (
                "with the opening of the reply",
                lambda ids, _: None if ids[-len(opening) :] == opening else [*ids, *opening],
            )
        for text in (*_TEXTS["thinking"], "\n", "\n\n", " "):
            added = self.encode(text)
            yield f"with {text!r} before the reply", lambda ids, _, more=added: [*ids, *more]
            yield f"without {text!r} before the reply", without(added)

    def _text_edits(self) -> Iterator[tuple[str, _Edit]]:
        """Edits of the text around the words of a system's or user's message, by the renderer's
        own way to write one. All else of the prompt, such as its tools, stays as it is."""

        def replaced(form: str, new: Any, *, is_first: bool = True) -> _Edit:
            def edit(ids: Ids, is_prompt: bool) -> Ids | None:
                if is_first and not is_prompt:
                    return None
                text = self.tokenizer.decode(ids)
                other = re.sub(form, new, text, count=int(is_first), flags=re.DOTALL)
                return None if other == text else self.encode(other)

            return edit

        for head, before, after in self._system_frames():
            first, begin, end = map(re.escape, (head, before, after))
            if after:
                form = f"\\A({first}){begin}.*?{end}"
                yield "without its system message", replaced(form, r"\1")
            form = f"\\A{first}" + (f"(?!{begin})" if before else "")  # it may have one already
            for words in DEFAULT_SYSTEMS:
                text = head + before + words + after
                told = f"with the system message {words!r}"
                yield told, replaced(form, lambda _, text=text: text)
        for family in FAMILIES.values():
            if (system := family.before.get("system", "")).strip():
                openers = "|".join(map(re.escape, family.openers))
                form = f"\\A(.*){re.escape(system)}.*?(?={openers})"
                yield "without its last system message", replaced(form, r"\1")
        if (user := self._user_frame()) is not None:
            form = "({})(.*?)({})".format(*map(re.escape, user))
            edit = replaced(form, lambda m: m[1] + m[2].strip() + m[3], is_first=False)
            yield "with the white space around the user's words stripped", edit

    def _system_frames(self) -> list[tuple[str, str, str]]:
        """(all text before a system message, the text directly before and after its words) as the
        renderer writes them without tools and beside them."""
        out: list[tuple[str, str, str]] = []
        user, system = Message(role="user", content="a"), Message(role="system", content=_MARK)
        for tools in ((), (_TOOL,)):
            plain, more = self._text([user], tools), self._text([system, user], tools)
            if more.count(_MARK) == 1:
                head = first_difference(plain, more)
                tail = first_difference(plain[head:][::-1], more[head:][::-1])
                before, _, after = more[head : len(more) - tail].partition(_MARK)
                out += [(plain[:head], before, after)] if before or after else []
        return list(dict.fromkeys(out))

    def _user_frame(self) -> tuple[str, str] | None:
        """The text that the renderer writes directly around the words of a user."""
        before, _, after = self._text([Message(role="user", content=_MARK)], ()).partition(_MARK)
        begins = [found.start() for found in self._spelling.finditer(before)]
        ends = [found.end() for found in self._spelling.finditer(after)]
        before = before[begins[-1] :] if begins else before[-MAX_HEADER:]
        after = after[: ends[0]] if ends else after[:MAX_HEADER]
        return (before, after) if before and after and _MARK not in after else None

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """The text that the renderer writes; empty if it refuses, and without a renderer."""
        with suppress(RendererError):
            if self.renderer is not None:
                return self.tokenizer.decode(self.renderer.render(messages, tools))
        return ""

    def _beginnings(self) -> list[int]:
        tokenizer = self.tokenizer
        known = {*_TEXTS["beginnings"], *(family.first for family in FAMILIES.values())}
        found = {id_ for id_ in tokenizer.control_ids if tokenizer.control_name(id_) in known}
        with suppress(RendererError):
            if self.renderer is not None:
                found.update(self.renderer.render([Message(role="user", content="a")])[:1])
        return sorted(found & tokenizer.control_ids)

    # -- messages, written otherwise ----------------------------------------------------------

    def _by_renderer(self, renderer: Renderer, change: _Change, parts: Parts) -> Parts | None:
        if (read := self._asked(change, parts)) is None:
            return None
        (first, *later), tools = read
        try:
            observed = [renderer.render(first, tools)]
        except RendererError:
            try:
                observed = [renderer.render(first)]
            except RendererError:
                return None
        for reply, old, messages in zip(parts.replies, parts.observed[1:], later, strict=False):
            try:
                observed.append(renderer.extend(reply, messages))
            except RendererError:
                observed.append(old)
        return parts.with_observed(observed)

    def by_messages(self, parts: Parts) -> Parts | None:
        """The dialogue as the model's own template writes it around these replies."""
        if self.renderer is None or parts.messages is None:
            return None
        return self._by_renderer(self.renderer, list, parts)

    def _by_family(self, family: Family, change: _Change, parts: Parts) -> Parts | None:
        if (read := self._asked(change, parts)) is None:
            return None
        (first, *later), _ = read
        observed = [self.encode(family.write(first, is_first=True))]
        close = family.close("assistant")
        for reply, messages in zip(parts.replies, later, strict=False):
            glue = close.removeprefix(close.rstrip("\n"))
            glue += family.write(messages, is_first=False)
            observed.append(self.encode(glue.removeprefix(self.tokenizer.decode(reply[-1:]))))
        return parts.with_observed(observed)

    def _asked(self, change: _Change, parts: Parts) -> _Asked | None:
        """As `_read`, with a change to the messages before the first reply; None where it changes
        nothing."""
        if (read := self._read(parts)) is None:
            return None
        (said, *later), tools = read
        first = change(said)
        return None if change is not list and first == said else ([first, *later], tools)

    def _read(self, parts: Parts) -> _Asked | None:
        """None if the messages are not known and the prompt is of no known format."""
        texts = [self.tokenizer.decode(ids) for ids in parts.observed]
        ends = ["", *(self.tokenizer.decode(reply[-1:]) for reply in parts.replies)]
        tools = self.tools or tuple(tools_in(texts[0]))
        if parts.messages is not None:
            said: list[list[Message]] = [[]]
            for message in parts.messages:
                if message.role == "assistant":
                    said.append([])
                else:
                    said[-1].append(message)
            if len(said) - 1 >= len(parts.observed):
                return said[: len(parts.observed)], tools
        for family in FAMILIES.values():
            # GLM's replies end with the token that opens the next message.
            heads = [end if end.strip() in family.openers else "" for end in ends]
            found = [
                read_messages_of(head + said, family)
                for head, said in zip(heads, texts, strict=False)
            ]
            if found[0] and all(messages is not None for messages in found):
                return [messages or [] for messages in found], tools
        return None

    def encode(self, text: str) -> Ids:
        """The ids of a text. Names of control tokens become these tokens, as in a template."""
        pieces: list[str | int] = []
        at = 0
        for found in self._spelling.finditer(text):
            pieces += [text[at : found.start()], self.tokenizer.control_id(found[0])]
            at = found.end()
        return encode_pieces(self.tokenizer, [p for p in [*pieces, text[at:]] if p != ""])


_Asked = tuple[list[list[Message]], tuple[ToolSchema, ...]]
"""(the messages before each reply, the tools that the prompt declares)."""
_Change = Callable[[list[Message]], list[Message]]


def _with_system(words: str, messages: list[Message]) -> list[Message]:
    has_one = bool(messages) and messages[0].role == "system"
    return messages if has_one else [Message(role="system", content=words), *messages]


def _without_system(messages: list[Message]) -> list[Message]:
    return [m for m in messages if m.role != "system"] or messages


def _stripped(messages: list[Message]) -> list[Message]:
    return [replace(m, content=m.content.strip()) for m in messages]


_CHANGES: Mapping[str, _Change] = {
    "": list,
    ", without the system message": _without_system,
    ", with white space around the words stripped": _stripped,
    **{f", with the system message {w!r}": partial(_with_system, w) for w in DEFAULT_SYSTEMS},
}
"""Change of the messages in words -> the change; the same messages where it does not apply."""


def read_messages_of(text: str, family: Family) -> list[Message] | None:
    """The messages that a format's text is, without the opening at its end; None if it is not of
    that format.

    >>> family = FAMILIES["chatml"]
    >>> text = "<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n"
    >>> [message.content for message in read_messages_of(text, family)]
    ['hi']
    """
    openers = family.openers
    if not openers:
        return None
    if family.reply_opening.strip():
        text = text.rstrip("\n ").removesuffix(family.reply_opening.strip())
    longest = sorted(openers, key=len, reverse=True)
    head, *rest = re.split(f"({'|'.join(map(re.escape, longest))})", text)
    out: list[Message] = []
    head = head.replace(family.first, "").strip()
    closes = {"", *(family.close(role).strip() for role in openers.values())}
    if not rest or (head not in closes and family.before.get("system", "").strip()):
        return None
    if head not in closes:
        out.append(Message(role="system", content=head))
    pairs = list(zip(rest[::2], rest[1::2], strict=True))
    for at, (opener, words) in enumerate(pairs):
        role, is_last = openers[opener], at + 1 == len(pairs)
        if role == "assistant" and is_last:
            break
        if role == "assistant":
            return None  # a reply that nobody sampled
        close = family.close(role).strip()
        words, closed, _ = words.partition(close) if close else (words, "", "")
        if close and not closed and not is_last:
            return None
        words = words.rstrip("\n ") if close != family.close(role) else words
        words = words.removeprefix(family.before[role][len(opener) :])
        if role == "user" and "<tool_response>" in words:
            role, words = "tool", re.sub(r"\n?</?tool_response>\n?", "", words)
        out.append(Message(role=role, name="tool" if role == "tool" else "", content=words))  # pyright: ignore[reportArgumentType]
    return out


def laid(parts: Parts, other: Parts, at: int, stops: frozenset[int]) -> Laid:
    """The ids of `other` as a layout of the row that begins at `at`. A reply's log-probs were laid
    onto the row's ids in order; the end of a reply kept its own."""
    ids: Ids = []
    place: list[Int64Array] = []
    for before, after, reply, drawn in zip(
        parts.observed, other.observed, parts.replies, other.replies, strict=True
    ):
        at += len(before)
        ids += [*after, *drawn]
        own = np.full(len(drawn), -1)
        size = min(len(reply), len(drawn))
        own[:size] = np.arange(at, at + size)
        if drawn and reply and drawn[-1] == reply[-1] and drawn[-1] in stops:
            own[own == at + len(reply) - 1] = -1
            own[-1] = at + len(reply) - 1
        place += [np.full(len(after), -1), own]
        at += len(reply)
    return ids, np.arange(len(ids)), np.concatenate(place)


def with_prompt(
    write: Write, rows: Rows, chosen: Sequence[int], stops: frozenset[int]
) -> Layout | None:
    """The chosen rows as a prompt writes them; None if it can be written for none of them."""
    known = {row: parts for row in chosen if (parts := Parts.of(rows, row)) is not None}
    others = [(row, parts, other) for row, parts in known.items() if (other := write(parts))]
    at = rows.offsets.tolist()
    return Layout.of([laid(parts, other, at[row], stops) for row, parts, other in others], rows)


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


def tools_in(text: str) -> Iterator[ToolSchema]:
    """The tools that a prompt declares as JSON objects, in whatever form."""
    at = 0
    while (at := text.find("{", at)) >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            at += 1
            continue
        at = end
        declared: Any = found.get("function", found) if isinstance(found, dict) else {}
        if not isinstance(declared, dict):
            continue
        name, parameters = declared.get("name"), declared.get("parameters")
        if isinstance(name, str) and isinstance(parameters, dict):
            about = str(declared.get("description", ""))
            yield ToolSchema(name=name, description=about, parameters=parameters)
