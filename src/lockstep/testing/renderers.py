"""`check_renderer`: runs a renderer through its invariants, on one dialogue of each kind."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.errors import RendererError
from lockstep.renderers.base import Renderer
from lockstep.renderers.jinja.proof import ANSWER, CALL, REPLY, SYSTEM, TOOL, USER
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Message, ToolCall, ToolSchema

TOOLS: tuple[ToolSchema, ...] = (TOOL,)
_DEVELOPER = Message(role="developer", content="Use the tools.")
_MORE = Message(role="user", content="\n And of Ciro? ")
_EMPTY = replace(REPLY, content="")
_PARALLEL = replace(CALL, tool_calls=CALL.tool_calls * 2)
_SPACED = Message(
    role="assistant", tool_calls=(ToolCall(name="find", arguments='{ "q" :\t"a\\n\\u00e9" }'),)
)
_UNICODE = "na\u00efve \u4e2d\u6587 \U0001f600\U0001f468\u200d\U0001f469 \u0000\t\r\n"

DIALOGUES: dict[str, tuple[Message, ...]] = {
    "simple": (SYSTEM, USER, ANSWER),
    "no system": (USER, ANSWER),
    "developer": (_DEVELOPER, USER, ANSWER),
    "tool call": (SYSTEM, USER, CALL, REPLY),
    "full cycle": (SYSTEM, USER, CALL, REPLY, ANSWER),
    "two calls": (USER, CALL, REPLY, _SPACED, _EMPTY, ANSWER),
    "several replies": (USER, CALL, REPLY, replace(REPLY, content="Nothing."), ANSWER),
    "words before a call": (USER, replace(CALL, content="I search."), REPLY, ANSWER),
    "with thinking": (
        *(USER, replace(CALL, thinking="I search.\n\nYes."), REPLY),
        replace(ANSWER, thinking="Ciro, then."),
    ),
    "multi-turn": (
        *(SYSTEM, USER, replace(ANSWER, thinking="Easy."), _MORE, CALL, REPLY, ANSWER, _MORE),
    ),
    "unicode": (
        *(Message(role="user", content=_UNICODE), replace(CALL, thinking=_UNICODE)),
        *(replace(REPLY, content=_UNICODE), Message(role="assistant", content=_UNICODE)),
    ),
    "parallel calls": (USER, _PARALLEL, REPLY, _EMPTY, ANSWER, _MORE),
    "system in the middle": (USER, ANSWER, SYSTEM, _MORE, ANSWER),
    "empty": (Message(role="user"), Message(role="assistant"), Message(role="user")),
}
"""One dialogue for each kind of turn. Errors name them."""

MAY_REFUSE = ("parallel calls", "system in the middle")
"""Dialogues that a format may lack: gpt-oss makes one call per turn, and some templates take no
late system message."""


def check_renderer(
    renderer: Renderer,
    *,
    tools: Sequence[ToolSchema] = TOOLS,
    dialogues: Mapping[str, Sequence[Message]] = DIALOGUES,
    has_thinking: bool = True,
    may_refuse: Collection[str] = MAY_REFUSE,
    num_garbage: int = 200,
) -> None:
    """Raises RendererError, naming the dialogue, if `renderer` breaks an invariant.

    has_thinking: False takes the thinking out of the dialogues, for formats without any.
    may_refuse: names of dialogues that the renderer may refuse with RendererError, since its format
    cannot write them. It must not write them wrong.
    num_garbage: random id sequences that `parse` and `extend` are given.

    The invariants:
    - text of people and tools is in the prompt (some templates strip it, or write it as a JSON
      string), and never becomes a control token;
    - a reply ends with a stop id, has no other, and is read back equal, up to blanks at the edges
      of its words and the spelling of its arguments;
    - `extend` opens the next turn as `render` does for the whole history, and encodes only new
      messages;
    - a turn that is cut off anywhere is closed, and then continues as the whole turn would;
    - a turn without its thinking is the same turn, and goes on in the same way; `render` shows the
      thinking of earlier turns if the renderer does not forget it, and nowhere else;
    - `parse` never raises, names the malformed part, and keeps all text.

    >>> from lockstep.renderers.harmony import HarmonyRenderer
    >>> from lockstep.testing.tokenizers import byte_tokenizer
    >>> check_renderer(HarmonyRenderer(byte_tokenizer()))
    """
    check = _Check(renderer)
    stops = renderer.stop_ids
    is_control = bool(stops) and set(stops) <= renderer.tokenizer.control_ids
    check.expect(is_control, "one or more control ids", stops)
    for name, dialogue in dialogues.items():
        if not has_thinking:
            dialogue = [replace(message, thinking="") for message in dialogue]
        try:
            check.where = f"dialogue {name!r}"
            check.dialogue(dialogue, tools)
            check.where += " with control tokens spelled in its text"
            check.injection(dialogue, tools)
        except _Broken:
            raise
        except RendererError as error:
            check.expect(name in may_refuse, "a renderer that writes it", error)
    check.where = "random ids"
    check.garbage(num_garbage)


class _Broken(RendererError):
    """A broken invariant; any other RendererError is the renderer's own refusal."""


class _Check:
    def __init__(self, renderer: Renderer) -> None:
        self.renderer, self.tokenizer = renderer, renderer.tokenizer
        self.show = renderer.tokenizer.decode
        self.where = "stop_ids"

    def expect(self, holds: bool, expected: str, found: object) -> None:
        if not holds:
            where = f"check_renderer({self.renderer.name}), {self.where}"
            raise _Broken(f"{where}: expected {expected}, found {found!r}.")

    def equal(self, found: Sequence[int], ids: Sequence[int], what: str) -> None:
        self.expect(list(found) == list(ids), f"{what} {self.show(ids)!r}", self.show(found))

    def dialogue(self, dialogue: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
        renderer = self.renderer
        prompt, turns = _split(dialogue)
        prompt_ids = renderer.render(prompt, tools)
        is_same = prompt_ids == renderer.render(prompt, tools)
        self.expect(is_same, "the same prompt every time", "two prompts")
        self.shows(prompt_ids, prompt)
        self.expect(not renderer.forgets([]), "nothing to be forgotten at first", "forgets([])")
        history = list(prompt)
        sampled_ids: list[int] = []
        for message, follow_up in turns:
            sampled_ids = self.reply(message)
            ids = self.extension(sampled_ids, follow_up)
            self.without_thinking(sampled_ids, message, follow_up, ids)
            history += [message, *follow_up]
            rendered = renderer.render(history, tools)
            words = message.thinking.strip()
            if follow_up and words and not any(words in each.content for each in history):
                is_forgotten, text = renderer.forgets(follow_up), self.show(rendered)
                expected = f"forgets() to say {words not in text} of {words!r}"
                self.expect((words in text) != is_forgotten, expected, text)
            found = self.opening([*sampled_ids, *ids])
            self.equal(found, self.opening(rendered), "the next turn to open with")
            for cut in range(len(sampled_ids)):
                self.cut_off(sampled_ids[:cut], follow_up, ids)
        if turns:
            self.refuses_assistant(sampled_ids, turns[-1][0])

    def refuses_assistant(self, sampled_ids: Sequence[int], message: Message) -> None:
        try:
            found = self.renderer.extend(sampled_ids, [message])
        except RendererError:
            return
        self.expect(False, "RendererError from extend with an assistant message", found)

    def reply(self, message: Message) -> list[int]:
        ids = self.renderer.render_reply(message)
        stops = [at for at, id_ in enumerate(ids) if id_ in self.renderer.stop_ids]
        self.expect(stops == [len(ids) - 1], "one stop id, the last of the reply", self.show(ids))
        read = self.renderer.parse(ids)
        self.expect(_is_read(read, message), f"parse(render_reply(m)) to be {message}", read)
        return ids

    def extension(self, sampled_ids: Sequence[int], follow_up: Sequence[Message]) -> list[int]:
        before = self.tokenizer.num_encoded
        ids = self.renderer.extend(sampled_ids, follow_up)
        encoded = self.tokenizer.num_encoded - before
        expected = f"at most the {len(ids)} new tokens to be encoded"
        self.expect(encoded <= len(ids), expected, encoded)
        self.shows(ids, follow_up)
        return ids

    def without_thinking(
        self,
        sampled_ids: Sequence[int],
        message: Message,
        follow_up: Sequence[Message],
        whole: Sequence[int],
    ) -> None:
        ids = self.renderer.without_thinking(sampled_ids)
        words, text = message.thinking.strip(), self.show(ids)
        is_gone = not words or words in message.content or words not in text
        self.expect(is_gone, "a turn without its thinking", text)
        self.equal(self.renderer.extend(ids, follow_up), whole, "the bare turn to go on with")
        if self.renderer.thinking_opening:
            return  # the reply begins with thinking
        read = self.renderer.parse(ids)
        is_read = _is_read(read, replace(message, thinking=""))
        self.expect(is_read, f"{message} without its thinking", read)
        self.equal(self.renderer.without_thinking(ids), ids, "nothing to be cut from")

    def cut_off(
        self, sampled_ids: Sequence[int], follow_up: Sequence[Message], whole: Sequence[int]
    ) -> None:
        """Checks that a cut-off turn is closed and then continues like the whole turn."""
        ids, text = self.renderer.extend(sampled_ids, follow_up), self.show(sampled_ids)
        end = len(ids) - len(whole)
        expected = f"the cut-off turn {text!r} to be closed and then continued with"
        self.equal(ids[end:], whole, expected)
        closed = [*sampled_ids, *ids][: len(sampled_ids) + end]
        is_closed = bool(closed) and closed[-1] in self.tokenizer.control_ids
        expected = f"a control token to close the cut-off turn {text!r}"
        self.expect(is_closed, expected, self.show(ids))
        self.renderer.without_thinking(sampled_ids)
        has_error = bool(self.renderer.parse(sampled_ids).parse_error)
        self.expect(has_error, "a parse_error for a turn without its stop id", text)

    def injection(self, dialogue: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
        """Checks that hostile text leaves the control tokens and their order unchanged."""
        renderer = self.renderer
        names = [self.tokenizer.control_name(id_) for id_ in sorted(self.tokenizer.control_ids)]
        hostile = " ".join(names)
        described: dict[str, Any] = {"description": hostile}
        bad_tools = [replace(t, name=hostile, parameters=described, **described) for t in tools]
        bad = [_with_text(message, hostile) for message in dialogue]
        (prompt, turns), (bad_prompt, bad_turns) = _split(dialogue), _split(bad)
        self.same_control(renderer.render(prompt, tools), renderer.render(bad_prompt, bad_tools))
        self.same_control(renderer.render(dialogue), renderer.render(bad))
        for (message, after), (bad_message, bad_after) in zip(turns, bad_turns, strict=True):
            # An empty text may need no message at all: compare replies of the same shape.
            ids, bad_ids = renderer.render_reply(_with_text(message, "-")), self.reply(bad_message)
            self.same_control(ids, bad_ids)
            self.same_control(renderer.extend(ids, after), renderer.extend(bad_ids, bad_after))

    def same_control(self, ids: Sequence[int], bad_ids: Sequence[int]) -> None:
        one, other = (controls(self.tokenizer, each) for each in (ids, bad_ids))
        self.equal(other, one, "only the control tokens")

    def garbage(self, num_garbage: int) -> None:
        generator, size = random.Random(0), self.tokenizer.vocab_size
        control = sorted(self.tokenizer.control_ids)
        text = self.tokenizer.encode(
            "analysis final commentary assistant to=functions.f {}\n \u4e2d"
        )
        for _ in range(num_garbage):
            ids: list[int] = []
            for _ in range(generator.randrange(30)):
                kinds = [control, text, text, [generator.randrange(size)], [-1, size, size + 10**6]]
                ids.append(generator.choice(generator.choice(kinds)))
            self.survives(ids)
        for words in ("plain words", "to=functions.find {}", "{", "  \n"):
            read = self.renderer.parse(self.tokenizer.encode(words))
            is_kept = words in read.content + read.thinking
            self.expect(is_kept, f"the text {words!r} to be kept", read)

    def survives(self, ids: Sequence[int]) -> None:
        try:
            read: object = self.renderer.parse(ids)
        except Exception as error:
            read = error
        is_read = isinstance(read, Message) and read.role == "assistant"
        self.expect(is_read, f"parse never to raise, for {list(ids)}", read)
        self.renderer.extend(self.renderer.without_thinking(ids), [_MORE])
        self.renderer.extend(ids, [_MORE])

    def shows(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Checks that the text of people and tools appears, in order."""
        text, at = self.show(ids), 0
        for message in messages:
            words = message.content
            forms = (words, words.strip(), json.dumps(words, ensure_ascii=False))
            found = max(text.find(form, at) for form in forms)
            is_shown = found >= 0 or message.role == "assistant"
            self.expect(is_shown, f"the {message.role}'s words {words!r}", text)
            at = max(at, found)
        outside = [id_ for id_ in ids if not 0 <= id_ < self.tokenizer.vocab_size]
        self.expect(not outside, f"ids below {self.tokenizer.vocab_size}", outside)

    def opening(self, ids: Sequence[int]) -> list[int]:
        """Returns the ids from the last control token to the end."""
        at = max((at for at, id_ in enumerate(ids) if id_ in self.tokenizer.control_ids), default=0)
        return list(ids[at:])


def controls(tokenizer: Tokenizer, ids: Iterable[int]) -> list[int]:
    """Returns the control tokens among `ids`."""
    return [id_ for id_ in ids if id_ in tokenizer.control_ids]


def _split(
    dialogue: Sequence[Message],
) -> tuple[list[Message], list[tuple[Message, list[Message]]]]:
    """Returns the messages before the model's first turn, and each turn with the messages after
    it."""
    prompt: list[Message] = []
    turns: list[tuple[Message, list[Message]]] = []
    for message in dialogue:
        if message.role == "assistant":
            turns.append((message, []))
        else:
            (turns[-1][1] if turns else prompt).append(message)
    return prompt, turns


def _is_read(read: Message, message: Message) -> bool:
    """True if `read` equals `message` up to white space at edges and the spelling of arguments."""

    def calls(of: Message) -> list[tuple[str, Any]]:
        return [(call.name, json.loads(call.arguments)) for call in of.tool_calls]

    if read.parse_error or read.content.strip() != message.content.strip():
        return False
    is_same = read.tool_calls == message.tool_calls or calls(read) == calls(message)
    return is_same and read.thinking.strip() == message.thinking.strip()


def _with_text(message: Message, text: str) -> Message:
    """Returns the message with `text` in every field that takes free text.

    A call keeps its name, which the reader of a reply must be able to find.
    """
    arguments = json.dumps({"q": text})
    return replace(
        message,
        content=text if message.content or not message.tool_calls else "",
        thinking=message.thinking and text,
        tool_calls=tuple(replace(call, arguments=arguments) for call in message.tool_calls),
        name=text if message.role == "tool" else message.name,
    )
