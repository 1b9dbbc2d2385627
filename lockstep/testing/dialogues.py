"""`check_dialogues` plays random dialogues through the agent loop and checks every token."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np

from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.loop import run_episode
from lockstep.agent.turns import Budget, is_copy
from lockstep.errors import RendererError
from lockstep.renderers.base import Renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.engines import FakeEngine, fake_logprob
from lockstep.testing.renderers import TOOLS
from lockstep.types import (
    Message,
    Request,
    Role,
    SamplingParams,
    Segment,
    Task,
    ToolCall,
    ToolSchema,
    Trajectory,
)

_HARMLESS = "-"
_WORDS = (
    *("the ", "friend", " of Bela", "\n", "\n\n", "  ", "\t", "123", "'s", '{"a": [1]}', "```"),
    *("na\u00efve", "e\u0301", "\u4e2d\u6587", "\u0416", "\u0627", "\u0905\u093f", "\uac00"),
    *("\U0001f600", "\U0001f468\u200d\U0001f469", "\u2581", "\uff5c", "\u0000", "\ud800", "<", ">"),
    *("system", "assistant", "<tool_call>", "</think>", "<0x0A>", "<table>", "to=functions.f"),
)


@dataclass(slots=True, kw_only=True)
class DialogueCounts:
    """Counts of dialogues, turns and tokens."""

    dialogues: int = 0
    turns: int = 0
    cut_turns: int = 0
    """Turns without a stop id."""
    malformed_turns: int = 0
    """Turns with a `parse_error`, cut turns included."""
    forks: int = 0
    """Dialogues that continued without earlier thinking."""
    sampled_tokens: int = 0
    trained_tokens: int = 0
    observed_tokens: int = 0
    injected_control_tokens: int = 0

    def __iadd__(self, other: DialogueCounts) -> DialogueCounts:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


def check_dialogues(renderer: Renderer, *, num_dialogues: int, seed: int = 0) -> DialogueCounts:
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

    >>> from lockstep.renderers.harmony import HarmonyRenderer
    >>> from lockstep.testing.tokenizers import byte_tokenizer
    >>> counts = check_dialogues(HarmonyRenderer(byte_tokenizer()), num_dialogues=5)
    >>> counts.dialogues, counts.sampled_tokens == counts.trained_tokens
    (5, True)
    """
    total = DialogueCounts()
    script = _Script(renderer)

    async def play_all() -> None:
        for number in range(num_dialogues):
            total.__iadd__(await _play(renderer, script, seed, number))

    asyncio.run(play_all())
    return total


def hostile_text(tokenizer: Tokenizer, generator: random.Random) -> str:
    """Returns a text that spells control tokens: whole, in pieces, nested, and between words."""
    return _text(control_names(tokenizer), generator, hostility=0.7)


def control_names(tokenizer: Tokenizer) -> list[list[str]]:
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


# -- scripts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Dialogue:
    tools: tuple[ToolSchema, ...]
    begun: list[Message]
    turns: list[list[int]]
    follow_ups: list[list[Message]]
    """Messages after each turn but the last."""


class _Script:
    """Makes random dialogues that a renderer can write."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        tokenizer = self.tokenizer = renderer.tokenizer
        self.names = control_names(tokenizer)
        self.control = sorted(tokenizer.control_ids - set(renderer.stop_ids))
        thought = Message(role="assistant", thinking="-", content="-")
        self.has_thinking = _accepts(lambda: renderer.render_reply(thought))
        self._shapes: dict[tuple[str, ...], bool] = {}

    def dialogue(self, generator: random.Random) -> _Dialogue:
        begun = [self.message("user", generator)]
        role: Role | None = generator.choice((None, "system", "developer"))
        if role is not None and self.takes([role, "user"], is_begun=True):
            begun.insert(0, self.message(role, generator))
        has_tools = self.takes(["user"], is_begun=True, tools=TOOLS)
        num_turns = generator.randrange(1, 5)
        return _Dialogue(
            (self.tool(generator),) if has_tools else (),
            begun,
            [self.turn(generator) for _ in range(num_turns)],
            [self.follow_up(generator) for _ in range(num_turns - 1)],
        )

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

    def takes(
        self, roles: Sequence[Role], *, is_begun: bool = False, tools: Sequence[ToolSchema] = ()
    ) -> bool:
        """Whether the format accepts messages of these roles, tried with harmless text."""
        key = (*roles, str(is_begun), str(bool(tools)))
        if key not in self._shapes:
            words = [Message(role=role, content="-", name="f") for role in roles]
            write = partial(self.renderer.extend, self.renderer.stop_ids[:1], words)
            if is_begun:
                write = partial(self.renderer.render, words, tools)
            self._shapes[key] = _accepts(write)
        return self._shapes[key]

    def message(self, role: Role, generator: random.Random) -> Message:
        name = self.text(generator) or "f" if role == "tool" else ""
        return Message(role=role, content=self.text(generator), name=name)

    def follow_up(self, generator: random.Random) -> list[Message]:
        roles: list[Role] = ["tool"] * generator.randrange(4)
        if generator.random() < 0.2:
            roles.append("system")
        if not roles or generator.random() < 0.4:
            roles.append("user")
        if not self.takes(roles):
            roles = [generator.choice(("user", "tool"))]
            roles = roles if self.takes(roles) else ["user"]
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


def _accepts(write: Callable[[], object]) -> bool:
    try:
        write()
    except RendererError:
        return False
    return True


# -- playing --------------------------------------------------------------------------------------


class _Scripted(Environment):
    """Follows the script, whatever the model says."""

    def __init__(self, dialogue: _Dialogue) -> None:
        self._dialogue = dialogue
        self.tools = dialogue.tools
        self.read: list[Message] = []

    async def reset(self) -> Sequence[Message]:
        return self._dialogue.begun

    async def step(self, message: Message) -> Observation:
        self.read.append(message)
        at = len(self.read) - 1
        if at == len(self._dialogue.follow_ups):
            return Observation(done=True)
        return Observation(messages=self._dialogue.follow_ups[at])

    async def score(self) -> Score:
        return Score(reward=1.0)


async def _play(renderer: Renderer, script: _Script, seed: int, number: int) -> DialogueCounts:
    where = f"check_dialogues({renderer.name}), dialogue {number} of seed {seed}"
    generator = random.Random(f"{seed}/{number}")
    dialogue = script.dialogue(generator)
    turns = iter(dialogue.turns)
    engine = FakeEngine(lambda request: next(turns), vocab_size=renderer.tokenizer.vocab_size)
    environment = _Scripted(dialogue)
    trajectory = await run_episode(
        engine,
        renderer,
        environment,
        Task(id=where),
        trajectory_id=str(number),
        seed=number,
        sampling=SamplingParams(max_tokens=1 << 16),
        budget=Budget(max_tokens=1 << 18, max_turn_tokens=1 << 16, continue_cut_turns=True),
    )
    if trajectory.status != "finished":
        raise RendererError(f"{where}: {trajectory.status}: {trajectory.error}")
    checked = _Checked(renderer, trajectory, engine.requests, where, has_tools=bool(dialogue.tools))
    checked.prompts()
    checked.sampled(dialogue.turns)
    checked.observed()
    counts = checked.counts
    counts.trained_tokens = checked.trained()
    counts.dialogues = 1
    counts.malformed_turns = sum(bool(message.parse_error) for message in environment.read)
    counts.forks = int(trajectory.metrics.get("branches/dropped_thinking", 0))
    return counts


class _Checked:
    def __init__(
        self,
        renderer: Renderer,
        trajectory: Trajectory,
        requests: Sequence[Request],
        where: str,
        *,
        has_tools: bool,
    ) -> None:
        self.renderer, self.trajectory = renderer, trajectory
        self.has_tools = has_tools
        self.requests, self.where = requests, where
        self.turns = [segment for segment in trajectory.segments if segment.is_sampled]
        self.counts = DialogueCounts()

    def fail(self, expected: str, found: object) -> NoReturn:
        raise RendererError(f"{self.where}: expected {expected}, found {found!r}.")

    def equal(self, what: str, expected: Any, found: Any) -> None:
        if not np.array_equal(expected, found):
            self.fail(f"{what} {np.asarray(expected).tolist()}", np.asarray(found).tolist())

    def prompts(self) -> None:
        self.equal("as many turns as requests", len(self.requests), len(self.turns))
        for request, turn in zip(self.requests, self.turns, strict=True):
            self.equal("the prompt", self.trajectory.path_ids(turn.parent), request.prompt_ids)

    def sampled(self, scripted: Sequence[Sequence[int]]) -> None:
        for turn, ids in zip(self.turns, scripted, strict=True):
            self.equal("the ids of the engine", ids, turn.token_ids)
            begin = len(self.trajectory.path_ids(turn.parent))
            own = [fake_logprob(int(id_), begin + at) for at, id_ in enumerate(ids)]
            self.equal("the log-probs", np.array(own, np.float32), turn.logprobs)
            stops = [at for at, id_ in enumerate(ids) if id_ in self.renderer.stop_ids]
            if stops not in ([], [len(ids) - 1]):
                self.fail("a stop id only at the end", stops)
            self.equal("a stop where there is one", bool(stops), turn.finish_reason == "stop")
            self.counts.turns += 1
            self.counts.cut_turns += not stops
            self.counts.sampled_tokens += len(ids)

    def observed(self) -> None:
        """Compares every observed segment with the same one in harmless text."""
        control = self.renderer.tokenizer.control_ids
        for segment in self.trajectory.segments:
            if segment.is_sampled:
                continue
            self.counts.observed_tokens += len(segment)
            if is_copy(segment.messages):  # of a turn, without its thinking
                continue
            expected = [id_ for id_ in self._harmless(segment) if id_ in control]
            found = [id_ for id_ in segment.token_ids.tolist() if id_ in control]
            self.counts.injected_control_tokens += abs(len(found) - len(expected))
            self.equal("the control tokens", expected, found)

    def _harmless(self, segment: Segment) -> list[int]:
        words = [
            replace(m, content=m.content and _HARMLESS, name=m.name and _HARMLESS)
            for m in segment.messages
        ]
        if segment.parent is None:
            return self.renderer.render(words, TOOLS if self.has_tools else ())
        return self.renderer.extend(self.trajectory.segments[segment.parent].token_ids, words)

    def trained(self) -> int:
        rows = list(self.trajectory.rows())
        trained = np.concatenate([row.token_ids[row.loss_mask] for row in rows])
        of_turns = np.concatenate([turn.token_ids for turn in self.turns])
        self.equal("each sampled token in one row", np.sort(of_turns), np.sort(trained))
        for row in rows:
            values = row.columns["rollout_logprobs"]
            if not np.isfinite(values[row.loss_mask]).all():
                self.fail("finite log-probs of what is trained", values[row.loss_mask].tolist())
        return len(trained)
