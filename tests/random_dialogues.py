"""`check_dialogues`: plays random dialogues through the agent loop and checks every token."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.loop import run_episode
from lockstep.agent.turns import Budget, Observed
from lockstep.errors import RendererError
from lockstep.renderers.base import Renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.engines import FakeEngine, fake_logprob
from lockstep.testing.renderers import TOOLS, controls
from lockstep.types import Message, Role, SamplingParams, Segment, Task, ToolCall, ToolSchema

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
