"""`check_renderer` runs a renderer through the invariants that every renderer keeps."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from lockstep.errors import RendererError
from lockstep.renderers.base import Renderer
from lockstep.renderers.jinja.proof import ANSWER, CALL, REPLY, SYSTEM, TOOL, USER
from lockstep.types import Message, ToolCall, ToolSchema

TOOLS: tuple[ToolSchema, ...] = (TOOL,)
_DEVELOPER = Message(role="developer", content="Use the tools.")
_MORE = Message(role="user", content="\n And of Ciro? ")
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
    "two calls": (USER, CALL, REPLY, _SPACED, replace(REPLY, content=""), ANSWER),
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
    "parallel calls": (
        *(
            USER,
            replace(CALL, tool_calls=CALL.tool_calls * 2),
            REPLY,
            replace(REPLY, content=""),
        ),
        *(ANSWER, _MORE),
    ),
    "system in the middle": (USER, ANSWER, SYSTEM, _MORE, ANSWER),
    "empty": (Message(role="user"), Message(role="assistant"), Message(role="user")),
}
"""One dialogue for each kind of turn. Errors name them."""

MAY_REFUSE = ("parallel calls", "system in the middle")
"""Dialogues that a format may lack: gpt-oss makes one call per turn, Gemma has no late system
message."""


def check_renderer(
    renderer: Renderer,
    *,
    tools: Sequence[ToolSchema] = TOOLS,
    dialogues: Mapping[str, Sequence[Message]] = DIALOGUES,
    has_thinking: bool = True,
    may_refuse: Collection[str] = MAY_REFUSE,
    num_garbage: int = 200,
    seed: int = 0,
) -> None:
    """Raises RendererError, naming the dialogue, if `renderer` breaks an invariant.

    has_thinking: False takes the thinking out of the dialogues, for formats without any.
    may_refuse: names of dialogues for which the renderer may raise RendererError, since its format
    cannot write them. It must not write them wrong.
    num_garbage: random id sequences that `parse` and `extend` are given.

    The invariants:
    - what people and tools write is in the prompt (some templates strip it, or write it as a JSON
      string), and never becomes a control token;
    - a reply ends with a stop id, has no other, and is read back equal, up to blanks at the edges
      of its words and the spelling of its arguments;
    - `extend` opens the next turn as `render` does for the whole history, and encodes only what is
      new;
    - a turn that is cut off anywhere is closed, and then continues as the whole one would;
    - a turn without its thinking is the same turn, and goes on in the same way; `render` shows the
      thinking of earlier turns where the renderer does not forget it, and nowhere else;
    - `parse` never raises, says what is malformed, and keeps all text.

    >>> from lockstep.renderers.harmony import HarmonyRenderer
    >>> from lockstep.testing.tokenizers import byte_tokenizer
    >>> check_renderer(HarmonyRenderer(byte_tokenizer()))
    """
    check = _Check(renderer)
    check.stop_ids()
    for name, dialogue in dialogues.items():
        if not has_thinking:
            dialogue = [replace(message, thinking="") for message in dialogue]
        check.where = f"dialogue {name!r}"
        try:
            check.dialogue(dialogue, tools)
            check.where = f"dialogue {name!r} with control tokens spelled in its text"
            check.injection(dialogue, tools)
        except _Broken:
            raise
        except RendererError as error:
            if name not in may_refuse:
                check.fail("a renderer that writes it", error)
    check.where = "random ids"
    check.garbage(num_garbage, random.Random(seed))


class _Broken(RendererError):
    """A broken invariant; any other RendererError is the renderer's own refusal."""


class _Check:
    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.tokenizer = renderer.tokenizer
        self.where = "stop_ids"

    def fail(self, expected: str, found: object) -> NoReturn:
        raise _Broken(
            f"check_renderer({self.renderer.name}), {self.where}: expected {expected}, "
            f"found {found!r}."
        )

    def stop_ids(self) -> None:
        stops = self.renderer.stop_ids
        if not stops or not set(stops) <= self.tokenizer.control_ids:
            self.fail("one or more control ids", stops)

    def dialogue(self, dialogue: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
        prompt, turns = _split(dialogue)
        prompt_ids = self.renderer.render(prompt, tools)
        if prompt_ids != self.renderer.render(prompt, tools):
            self.fail("the same prompt every time", "two prompts")
        self.shows(prompt_ids, prompt)
        if self.renderer.forgets([]):
            self.fail("nothing to be forgotten when nothing follows", "forgets([])")
        history = list(prompt)
        is_forgotten = False
        for message, follow_up in turns:
            sampled_ids = self.reply(message)
            ids = self.extension(sampled_ids, follow_up)
            self.without_thinking(sampled_ids, message, follow_up, ids)
            history += [message, *follow_up]
            is_forgotten = self.renderer.forgets(follow_up)
            if follow_up:
                self.thinking(history, tools, message.thinking, is_forgotten)
            opening = self.opening(self.renderer.render(history, tools))
            if self.opening([*sampled_ids, *ids]) != opening:
                self.fail(
                    f"the next turn to open with {self.show(opening)!r}",
                    self.show(self.opening(ids)),
                )
            for cut in range(len(sampled_ids)):
                self.cut_off(sampled_ids[:cut], follow_up, ids)
        if not turns:
            return
        try:
            self.renderer.extend(sampled_ids, [turns[-1][0]])
        except RendererError:
            return
        self.fail("RendererError from extend with an assistant message", "ids")

    def without_thinking(
        self,
        sampled_ids: Sequence[int],
        message: Message,
        follow_up: Sequence[Message],
        whole: Sequence[int],
    ) -> None:
        ids = self.renderer.without_thinking(sampled_ids)
        words = message.thinking.strip()
        if words and words not in message.content and words in self.show(ids):
            self.fail("a turn without its thinking", self.show(ids))
        if self.renderer.extend(ids, follow_up) != list(whole):
            self.fail("a turn without its thinking to go on as the whole turn", self.show(ids))
        if self.renderer.thinking_opening:
            return  # what is read begins with thinking
        if not _is_read(read := self.renderer.parse(ids), replace(message, thinking="")):
            self.fail(f"{message} without its thinking", read)
        if self.renderer.without_thinking(ids) != ids:
            self.fail("nothing to cut from a turn without thinking", self.show(ids))

    def thinking(
        self,
        history: Sequence[Message],
        tools: Sequence[ToolSchema],
        words: str,
        is_forgotten: bool,
    ) -> None:
        """Checks that a rendered history shows the last turn's thinking unless `forgets` says
        otherwise."""
        words = words.strip()
        if not words or any(words in message.content for message in history):
            return
        text = self.show(self.renderer.render(history, tools))
        if (words in text) == is_forgotten:
            what = "no thinking" if is_forgotten else "the thinking"
            self.fail(f"{what} {words!r} in the history, as forgets() says", text)

    def reply(self, message: Message) -> list[int]:
        ids = self.renderer.render_reply(message)
        stops = [at for at, id_ in enumerate(ids) if id_ in self.renderer.stop_ids]
        if stops != [len(ids) - 1]:
            self.fail("one stop id, the last of the reply", self.show(ids))
        read = self.renderer.parse(ids)
        if not _is_read(read, message):
            self.fail(f"parse(render_reply(m)) to be {message}", read)
        return ids

    def extension(self, sampled_ids: Sequence[int], follow_up: Sequence[Message]) -> list[int]:
        before = self.tokenizer.num_encoded
        ids = self.renderer.extend(sampled_ids, follow_up)
        encoded = self.tokenizer.num_encoded - before
        if encoded > len(ids):
            self.fail(f"at most the {len(ids)} new tokens to be encoded", encoded)
        self.shows(ids, follow_up)
        return ids

    def cut_off(
        self, sampled_ids: Sequence[int], follow_up: Sequence[Message], whole: Sequence[int]
    ) -> None:
        """Checks that a cut-off turn is closed and then continues like the whole turn."""
        ids = self.renderer.extend(sampled_ids, follow_up)
        if ids[len(ids) - len(whole) :] != list(whole):
            self.fail(
                f"the cut-off turn {self.show(sampled_ids)!r} to be closed and then continued with "
                f"{self.show(whole)!r}",
                self.show(ids),
            )
        before = [*sampled_ids, *ids][: len(sampled_ids) + len(ids) - len(whole)]
        if not before or before[-1] not in self.tokenizer.control_ids:
            self.fail(
                f"a control token to close the cut-off turn {self.show(sampled_ids)!r}",
                self.show(ids),
            )
        self.renderer.without_thinking(sampled_ids)
        if not self.renderer.parse(sampled_ids).parse_error:
            self.fail("a parse_error for a turn without its stop id", self.show(sampled_ids))

    def injection(self, dialogue: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
        """Checks that hostile text leaves the control tokens and their order unchanged."""
        names = [self.tokenizer.control_name(id_) for id_ in sorted(self.tokenizer.control_ids)]
        hostile = " ".join(names)
        bad = [_with_text(message, hostile) for message in dialogue]
        bad_tools = [
            replace(tool, description=hostile, name=hostile, parameters={"description": hostile})
            for tool in tools
        ]
        (prompt, turns), (bad_prompt, bad_turns) = _split(dialogue), _split(bad)
        self.same_control(
            self.renderer.render(prompt, tools), self.renderer.render(bad_prompt, bad_tools)
        )
        self.same_control(self.renderer.render(dialogue), self.renderer.render(bad))
        for (message, follow_up), (bad_message, bad_follow_up) in zip(
            turns, bad_turns, strict=True
        ):
            # An empty text may need no message at all: compare replies of the same shape.
            ids = self.renderer.render_reply(_with_text(message, "-"))
            bad_ids = self.reply(bad_message)
            self.same_control(ids, bad_ids)
            self.same_control(
                self.renderer.extend(ids, follow_up), self.renderer.extend(bad_ids, bad_follow_up)
            )

    def garbage(self, num_garbage: int, generator: random.Random) -> None:
        control = sorted(self.tokenizer.control_ids)
        text = self.tokenizer.encode(
            "analysis final commentary assistant to=functions.f {}\n \u4e2d"
        )
        beyond = [-1, self.tokenizer.vocab_size, self.tokenizer.vocab_size + 10**6]
        for _ in range(num_garbage):
            ids: list[int] = []
            for _ in range(generator.randrange(30)):
                any_id = generator.randrange(self.tokenizer.vocab_size)
                kinds = [control, text, text, [any_id], beyond]
                ids.append(generator.choice(generator.choice(kinds)))
            self.survives(ids)
        for words in ("plain words", "to=functions.find {}", "{", "  \n"):
            ids = self.tokenizer.encode(words)
            read = self.renderer.parse(ids)
            if words not in read.content + read.thinking:
                self.fail(f"the text {words!r} to be kept", read)

    def survives(self, ids: Sequence[int]) -> None:
        try:
            read = self.renderer.parse(ids)
        except Exception as error:
            self.fail(f"parse never to raise, for {list(ids)}", error)
        if read.role != "assistant":
            self.fail("a message by the assistant", read)
        self.renderer.extend(self.renderer.without_thinking(ids), [_MORE])
        self.renderer.extend(ids, [_MORE])

    def shows(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Checks that the text of people and tools appears, in order."""
        text = self.show(ids)
        at = 0
        for message in messages:
            words = message.content
            as_json = json.dumps(words, ensure_ascii=False)
            found = next(
                (i for form in (words, words.strip(), as_json) if (i := text.find(form, at)) >= 0),
                -1,
            )
            if found < 0 and message.role != "assistant":
                self.fail(f"the {message.role}'s words {message.content!r}", text)
            at = max(at, found)
        outside = [id_ for id_ in ids if not 0 <= id_ < self.tokenizer.vocab_size]
        if outside:
            self.fail(f"ids below {self.tokenizer.vocab_size}", outside)

    def same_control(self, ids: Sequence[int], bad_ids: Sequence[int]) -> None:
        control, bad_control = self.control(ids), self.control(bad_ids)
        if control != bad_control:
            self.fail(f"only the control tokens {self.show(control)!r}", self.show(bad_control))

    def control(self, ids: Sequence[int]) -> list[int]:
        return [id_ for id_ in ids if id_ in self.tokenizer.control_ids]

    def opening(self, ids: Sequence[int]) -> list[int]:
        """Returns the ids from the last control token to the end."""
        at = max((at for at, id_ in enumerate(ids) if id_ in self.tokenizer.control_ids), default=0)
        return list(ids[at:])

    def show(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)


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
    """Whether `read` equals `message` up to white space at edges and the spelling of arguments."""
    if read.content.strip() != message.content.strip():
        return False
    if read.thinking.strip() != message.thinking.strip() or read.parse_error:
        return False
    return len(read.tool_calls) == len(message.tool_calls) and all(
        left.name == right.name
        and (
            left.arguments == right.arguments
            or json.loads(left.arguments) == json.loads(right.arguments)
        )
        for left, right in zip(read.tool_calls, message.tool_calls, strict=True)
    )


def _with_text(message: Message, text: str) -> Message:
    """Returns the message with `text` in every field that takes free text.

    A call keeps its name, which the reader of a reply must be able to find.
    """
    return replace(
        message,
        content=text if message.content or not message.tool_calls else "",
        thinking=text if message.thinking else "",
        tool_calls=tuple(
            replace(call, arguments=json.dumps({"q": text})) for call in message.tool_calls
        ),
        name=text if message.role == "tool" else message.name,
    )
