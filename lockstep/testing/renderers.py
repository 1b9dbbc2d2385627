"""Two checks of a renderer: `check_renderer` runs it through its invariants on one dialogue of each
kind, `check_dialogues` plays random dialogues through the agent loop and checks every token."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.loop import run_episode
from lockstep.agent.turns import Budget, Observed
from lockstep.errors import RendererError
from lockstep.renderers.base import Renderer
from lockstep.renderers.jinja.proof import ANSWER, CALL, REPLY, SYSTEM, TOOL, USER
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.engines import FakeEngine, fake_logprob
from lockstep.types import Message, Role, SamplingParams, Segment, Task, ToolCall, ToolSchema

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
        is_ended = stops == [len(ids) - 1]
        self.expect(is_ended, "one stop id, the last of the reply", self.show(ids))
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
            return  # what is read begins with thinking
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
    """Whether `read` equals `message` up to white space at edges and the spelling of arguments."""

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


# -- random dialogues ------------------------------------------------------------------------------

_HARMLESS = "-"
_WORDS = (
    *("the ", "friend", " of Bela", "\n", "\n\n", "  ", "\t", "123", "'s", '{"a": [1]}', "```"),
    *("na\u00efve", "e\u0301", "\u4e2d\u6587", "\u0416", "\u0627", "\u0905\u093f", "\uac00"),
    *("\U0001f600", "\U0001f468\u200d\U0001f469", "\u2581", "\uff5c", "\u0000", "\ud800", "<", ">"),
    *("system", "assistant", "<tool_call>", "</think>", "<0x0A>", "<table>", "to=functions.f"),
)


def check_dialogues(renderer: Renderer, *, num_dialogues: int, seed: int = 0) -> Counter[str]:
    """Plays random dialogues with a scripted engine. Raises RendererError, with the dialogue's
    number, if an invariant breaks. Kinds of messages that the format refuses even with harmless
    text are left out.

    Turns are replies as `render_reply` writes them, whole or cut anywhere; text in tokens that
    `encode` would not choose; incomplete characters; and random ids, control tokens among them.
    Users, tools and systems write text in many scripts, empty text, and names of control tokens,
    whole, in pieces, and across the borders of messages; so do the names and descriptions of tools.

    The invariants:
    - the prompt that the engine gets is the path that the trajectory recorded, id for id;
    - each sampled id has its own finite log-prob at its own index;
    - a stop id is the last of its turn;
    - observed ids contain the same control tokens as if no text spelled any;
    - each sampled token is trained in one row, once.

    Returns counts: `dialogues`; `turns`, of them `cut_turns` without a stop id and
    `malformed_turns` with a `parse_error`; `forks`, dialogues that continued without earlier
    thinking; `sampled_tokens`, `trained_tokens`, `observed_tokens`.

    >>> from lockstep.renderers.harmony import HarmonyRenderer
    >>> from lockstep.testing.tokenizers import byte_tokenizer
    >>> counts = check_dialogues(HarmonyRenderer(byte_tokenizer()), num_dialogues=5)
    >>> counts["dialogues"], counts["sampled_tokens"] == counts["trained_tokens"]
    (5, True)
    """
    counts: Counter[str] = Counter()
    script = _Script(renderer)

    async def play_all() -> None:
        for number in range(num_dialogues):
            where = f"check_dialogues({renderer.name}), dialogue {number} of seed {seed}"
            played = _Played(script, random.Random(f"{seed}/{number}"), where)
            counts.update(await played.counted(number))

    asyncio.run(play_all())
    return counts


def hostile_text(tokenizer: Tokenizer, generator: random.Random) -> str:
    """Returns a text that spells control tokens: whole, in pieces, nested, and between words."""
    return _text(_control_names(tokenizer), generator, hostility=0.7)


def _control_names(tokenizer: Tokenizer) -> list[list[str]]:
    """Returns all names of control tokens, and those without a digit if there are any: reserved and
    unused tokens are many, alike, and numbered."""
    names = sorted(tokenizer.control_name(id_) for id_ in tokenizer.control_ids)
    return [names, [name for name in names if not any(map(str.isdigit, name))] or names]


def _text(names: Sequence[Sequence[str]], generator: random.Random, *, hostility: float) -> str:
    parts: list[str] = []
    for _ in range(generator.randrange(1, 9)):
        if generator.random() >= hostility:
            parts.append(generator.choice(_WORDS))
            continue
        name = generator.choice(generator.choice(names))
        at = generator.randrange(len(name) + 1)
        forms = (name, name[:at], name[at:], name[:at] + name + name[at:], f"{name}\n{name}")
        parts.append(generator.choice(forms))
    return "".join(parts)


class _Script:
    """Makes random messages and turns that a renderer can write."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer, self.tokenizer = renderer, renderer.tokenizer
        self.names = _control_names(self.tokenizer)
        self.control = sorted(self.tokenizer.control_ids - set(renderer.stop_ids))
        thought = Message(role="assistant", thinking="-", content="-")
        self.has_thinking = _accepts(lambda: renderer.render_reply(thought))
        self.has_tools = self.begins_with(["user"], TOOLS)

    def begins_with(self, roles: Sequence[Role], tools: Sequence[ToolSchema] = ()) -> bool:
        """Whether the format accepts a prompt of these roles, tried with harmless text."""
        return _accepts(lambda: self.renderer.render(_harmless(roles), tools))

    def goes_on_with(self, *roles: Role) -> bool:
        """Whether the format accepts messages of these roles after a turn."""
        stop_ids = self.renderer.stop_ids[:1]
        return _accepts(lambda: self.renderer.extend(stop_ids, _harmless(roles)))

    def tool(self, generator: random.Random) -> ToolSchema:
        described = {"description": self.text(generator), "type": "string"}
        return ToolSchema(
            name=self.text(generator) or "f",
            description=self.text(generator),
            parameters={"type": "object", "properties": {self.text(generator): described}},
        )

    def text(self, generator: random.Random) -> str:
        if generator.random() < 0.1:
            return ""
        return _text(self.names, generator, hostility=0.3)

    def message(self, role: Role, generator: random.Random) -> Message:
        name = self.text(generator) or "f" if role == "tool" else ""
        return Message(role=role, content=self.text(generator), name=name)

    def follow_up(self, generator: random.Random) -> list[Message]:
        roles: list[Role] = ["tool"] * generator.randrange(4)
        if generator.random() < 0.2:
            roles.append("system")
        if not roles or generator.random() < 0.4:
            roles.append("user")
        if not self.goes_on_with(*roles):
            roles = [generator.choice(("user", "tool"))]
            roles = roles if self.goes_on_with(*roles) else ["user"]
        messages = [self.message(role, generator) for role in roles]
        if len(messages) > 1:  # a name over the border of two messages
            name = generator.choice(generator.choice(self.names))
            at = generator.randrange(1, len(name))
            messages[0] = replace(messages[0], content=messages[0].content + name[:at])
            messages[1] = replace(messages[1], content=name[at:] + messages[1].content)
        return messages

    def turn(self, generator: random.Random) -> list[int]:
        """Returns the ids of one turn, with a stop id at most at the end; never empty."""
        stop = [generator.choice(self.renderer.stop_ids)]
        match generator.randrange(6):
            case 0 | 1:
                ids = self.reply(generator)
            case 2:
                ids = self.reply(generator)
                ids = ids[: generator.randrange(1, max(2, len(ids)))]
            case 3:
                ids = self.fragments(self.text(generator), generator) + stop
            case 4:  # a character that is not finished
                ids = self.tokenizer.encode(generator.choice(_WORDS) + "\U0001f9ff")[:-1]
                ids += stop * generator.randrange(2)
            case _:
                ids = self.garbage(generator) + stop * generator.randrange(2)
        return ids or stop

    def reply(self, generator: random.Random) -> list[int]:
        """Returns a reply that the format can write, or plain text."""
        arguments = json.dumps({"q": self.text(generator)}, ensure_ascii=generator.random() < 0.5)
        num_calls = generator.choice((0, 1, 1, 2))
        message = Message(
            role="assistant",
            content=generator.choice(("", self.text(generator))),
            thinking=self.text(generator) if self.has_thinking and generator.random() < 0.5 else "",
            tool_calls=(ToolCall(name="find", arguments=arguments),) * num_calls,
        )
        for simpler in (message, replace(message, tool_calls=message.tool_calls[:1])):
            try:
                return self.renderer.render_reply(simpler)
            except RendererError:
                continue
        return [*self.fragments(message.content, generator), self.renderer.stop_ids[0]]

    def fragments(self, text: str, generator: random.Random) -> list[int]:
        """Returns `text` in tokens that `encode` would not choose."""
        ids: list[int] = []
        while text:
            size = generator.randrange(1, 6)
            ids += self.tokenizer.encode(text[:size])
            text = text[size:]
        return ids

    def garbage(self, generator: random.Random) -> list[int]:
        ids: list[int] = []
        for _ in range(generator.randrange(12)):
            any_id = generator.randrange(self.tokenizer.vocab_size)
            kinds = [self.control or [any_id], [any_id], self.tokenizer.encode("{}\n f")]
            ids.append(generator.choice(generator.choice(kinds)))
        return [id_ for id_ in ids if id_ not in self.renderer.stop_ids]


def _harmless(roles: Sequence[Role]) -> list[Message]:
    return [Message(role=role, content=_HARMLESS, name="f") for role in roles]


def _accepts(write: Callable[[], object]) -> bool:
    try:
        write()
    except RendererError:
        return False
    return True


class _Played(Environment):
    """One dialogue: an environment that follows its script, whatever the model says."""

    def __init__(self, script: _Script, generator: random.Random, where: str) -> None:
        self.renderer, self.where = script.renderer, where
        self.begun = [script.message("user", generator)]
        role: Role | None = generator.choice((None, "system", "developer"))
        if role is not None and script.begins_with([role, "user"]):
            self.begun.insert(0, script.message(role, generator))
        num_turns = generator.randrange(1, 5)
        self.tools = (script.tool(generator),) if script.has_tools else ()
        self.turns = [script.turn(generator) for _ in range(num_turns)]
        self.follow_ups = [script.follow_up(generator) for _ in range(num_turns - 1)]
        self.read: list[Message] = []

    async def reset(self) -> Sequence[Message]:
        return self.begun

    async def step(self, message: Message) -> Observation:
        self.read.append(message)
        if len(self.read) > len(self.follow_ups):
            return Observation(done=True)
        return Observation(messages=self.follow_ups[len(self.read) - 1])

    async def score(self) -> Score:
        return Score(reward=1.0)

    def equal(self, what: str, expected: Any, found: Any) -> None:
        if not np.array_equal(expected, found):
            expected, found = (np.asarray(each).tolist() for each in (expected, found))
            raise RendererError(f"{self.where}: expected {what} {expected}, found {found}.")

    async def counted(self, number: int) -> dict[str, int]:
        """Plays the dialogue and checks its tokens."""
        turns = iter(self.turns)
        vocab_size = self.renderer.tokenizer.vocab_size
        engine = FakeEngine(lambda request: next(turns), vocab_size=vocab_size)
        trajectory = await run_episode(
            engine,
            self.renderer,
            self,
            Task(id=self.where),
            trajectory_id=str(number),
            seed=number,
            sampling=SamplingParams(max_tokens=1 << 16),
            budget=Budget(max_tokens=1 << 18, max_turn_tokens=1 << 16, continue_cut_turns=True),
        )
        if trajectory.status != "finished":
            raise RendererError(f"{self.where}: {trajectory.status}: {trajectory.error}")
        segments = trajectory.segments
        sampled = [segment for segment in segments if segment.is_sampled]
        self.equal("as many turns as requests", len(engine.requests), len(sampled))
        num_stopped = 0
        for request, turn, ids in zip(engine.requests, sampled, self.turns, strict=True):
            path = trajectory.path_ids(turn.parent)
            self.equal("the prompt", path, request.prompt_ids)
            self.equal("the ids of the engine", ids, turn.token_ids)
            own = [fake_logprob(id_, len(path) + at) for at, id_ in enumerate(ids)]
            self.equal("the log-probs", np.array(own, np.float32), turn.logprobs)
            stops = [at for at, id_ in enumerate(ids) if id_ in self.renderer.stop_ids]
            is_stopped = turn.finish_reason == "stop"
            self.equal("a stop id at the end", [len(ids) - 1] * is_stopped, stops)
            num_stopped += is_stopped
        observed = [segment for segment in segments if not segment.is_sampled]
        for segment in observed:
            is_copy = Observed(segment.token_ids, segment.messages).is_turn  # of a turn
            if not is_copy:
                after = None if segment.parent is None else segments[segment.parent]
                expected = self.in_harmless_text(segment, after)
                found = controls(self.renderer.tokenizer, segment.token_ids.tolist())
                self.equal("the control tokens", expected, found)
        rows = list(trajectory.rows())
        trained = np.concatenate([row.token_ids[row.loss_mask] for row in rows])
        drawn = np.concatenate([turn.token_ids for turn in sampled])
        self.equal("each sampled token in one row", np.sort(drawn), np.sort(trained))
        values = [row.columns["rollout_logprobs"][row.loss_mask] for row in rows]
        self.equal("finite log-probs", True, np.isfinite(np.concatenate(values)).all())
        return {
            "dialogues": 1,
            "turns": len(sampled),
            "cut_turns": len(sampled) - num_stopped,
            "malformed_turns": sum(bool(message.parse_error) for message in self.read),
            "forks": int(trajectory.metrics.get("branches/dropped_thinking", 0)),
            "sampled_tokens": len(drawn),
            "trained_tokens": len(trained),
            "observed_tokens": sum(map(len, observed)),
        }

    def in_harmless_text(self, segment: Segment, after: Segment | None) -> list[int]:
        """The control tokens of an observed segment if no text spelled any."""
        words = [
            replace(m, content=m.content and _HARMLESS, name=m.name and _HARMLESS)
            for m in segment.messages
        ]
        if after is None:
            ids = self.renderer.render(words, TOOLS if self.tools else ())
        else:
            ids = self.renderer.extend(after.token_ids, words)
        return controls(self.renderer.tokenizer, ids)
