"""The dialogues of a session as a tree of words. Each request finds its place in it.

A dialogue alternates between batches of messages that are new to the model (`Input`) and replies
(`Answer`, sampled here or written by the agent). Both are found by keys in dicts, so a request
costs the reading of its messages, however long the session is.

An agent may change these without beginning another branch: the order of keys and the spelling of
numbers in a call's arguments, the ids of calls (if the tool's message changes with them), the
model's reasoning (left out, under another name, or put into the content), and anything that a
`Message` does not have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from lockstep.agent.gateway.exchange import Refusal, TurnRequest
from lockstep.agent.json_schema import canonical
from lockstep.agent.turns import Observed
from lockstep.types import Message, ToolCall, ToolSchema

Key = tuple[Any, ...]
"""Key that two equal pieces of a dialogue share."""

Reason = Literal[
    "",
    "concurrent",
    "retry",
    "edited_history",
    "compaction",
    "dropped_thinking",
    "sub_agent",
    "new_dialogue",
    "altered_reply:trimmed",
    "altered_reply:prefixed",
    "altered_reply:completed",
]
"""Why a turn begins a branch: the table in docs/gateway.md."""

MAX_REMEMBERED_CHARS = 1024
"""Longest arguments whose canonical spelling is cached: 8192 of them take at most 16 MiB."""
MIN_QUOTED_CHARS = 24
"""Shortest reply that counts as quoted when another message contains it; shorter ones match by
chance."""


@dataclass(slots=True, eq=False)
class Input:
    """The batch of messages before a turn, or before several turns that were requested at the same
    place."""

    above: Answer | None
    """The reply before this batch; None for a root."""
    parts: list[Observed]
    """Ids that are new after `above`, until they are recorded in the trajectory."""
    num_messages: int
    """Messages of the dialogue up to here, its own included."""
    key: Key
    """Key among the places after `above`, or among the roots."""
    reason: Reason = ""
    """Reason of the first segment that the place adds."""
    why: Reason | None = None
    """Reason of its first turn, whose branch may begin above the place; None if it has none."""
    is_forked: bool = False
    """The path forks before `above`, because thinking was forgotten, and continues from `base`.
    """
    base: int | None = None
    """A segment; None for a new root."""
    segment: int | None = None
    """Segment that ends the place, once it is recorded."""
    answers: dict[Key, list[Answer]] = field(default_factory=dict[Key, "list[Answer]"])
    num_running: int = 0

    @property
    def is_used(self) -> bool:
        return bool(self.answers) or self.num_running > 0

    def add(self, answer: Answer) -> None:
        self.answers.setdefault(reply_key(answer.message), []).append(answer)

    def all_answers(self) -> Iterator[Answer]:
        return (answer for same in self.answers.values() for answer in same)


@dataclass(slots=True, eq=False)
class Answer:
    """One turn of the model as sent to the agent, or a reply that the agent wrote instead."""

    place: Input
    message: Message
    segment: int | None = None
    """Segment that ends the answer, once it is recorded."""
    parts: list[Observed] = field(default_factory=list[Observed])
    """Ids of a reply that was not sampled here, until it is recorded."""
    reason: Reason = ""
    num_reused_tokens: int = 0
    places: dict[Key, Input] = field(default_factory=dict[Key, Input])
    is_retried: bool = False
    """The same was asked and answered anew when this had been given."""
    num_receivers: int = 0
    """Clients that received the turn."""

    @property
    def is_abandoned(self) -> bool:
        """True if a retry replaced the turn or no client received it, and no request continues from
        it."""
        is_left = self.is_retried or self.num_receivers <= 0
        return is_left and not any(place.is_used for place in self.places.values())


@dataclass(frozen=True, slots=True)
class History:
    """The messages of a request: batches that the model reads, and the replies between them."""

    tools: tuple[ToolSchema, ...]
    batches: list[list[Message]]
    """One more than replies."""
    replies: list[Message]
    """Replies that the agent repeats."""
    batch_keys: list[Key]
    """The first is with the tools."""
    reply_keys: list[Key]

    @classmethod
    def of(cls, request: TurnRequest, tree: Tree) -> History:
        """tree: the session's, which knows its turns in the form that clients give them. Raises
        Refusal if the dialogue does not end with something to answer."""
        if not request.messages or request.messages[-1].role == "assistant":
            text = "the last message must be what the model answers (user, tool, system)."
            raise Refusal(400, "nothing_to_answer", text, parameter="messages")
        calls: list[str] = []
        replies: list[Message] = []
        batches: list[list[Message]] = [[]]
        tools = [
            (t.name, t.description, json.dumps(t.parameters, sort_keys=True)) for t in request.tools
        ]
        keys: list[list[Any]] = [[tuple(tools)]]
        for message in request.messages:
            if message.role == "assistant":
                replies.append(tree.unmerged(message))
                calls = [call.id for call in message.tool_calls]
                batches.append([])
                keys.append([])
                continue
            # The call that a tool answers, however the client renames ids: by position if they do
            # not say.
            is_clear = calls.count(message.tool_call_id) == 1
            answers = calls.index(message.tool_call_id) if is_clear else len(batches[-1])
            keys[-1].append((message.role, message.name, message.content, answers))
            batches[-1].append(message)
        batch_keys = [tuple(key) for key in keys]
        return cls(request.tools, batches, replies, batch_keys, list(map(reply_key, replies)))

    def num_messages(self, num_batches: int) -> int:
        """Messages up to the end of that batch."""
        return sum(map(len, self.batches[:num_batches])) + num_batches - 1

    def messages(self, num_batches: int) -> list[Message]:
        out = list(self.batches[0])
        for reply, batch in zip(self.replies[: num_batches - 1], self.batches[1:], strict=False):
            out += [reply, *batch]
        return out

    def root_key(self, num_batches: int) -> Key:
        """Key of a root whose prompt has that many batches, with the replies between them."""
        between = zip(self.reply_keys[: num_batches - 1], self.batch_keys[1:], strict=False)
        return self.batch_keys[0], *(key for pair in between for key in pair)


@dataclass(frozen=True, slots=True)
class Found:
    """The known part of a dialogue: up to a place, or up to an answer at it."""

    place: Input | None = None
    answer: Answer | None = None
    num_batches: int = 0
    """Batches of the dialogue that are known."""

    @property
    def num_replies(self) -> int:
        return self.num_batches if self.answer is not None else max(0, self.num_batches - 1)


class Tree:
    """All dialogues of one session."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        """Sampled answers, in order of recording."""
        self._roots: dict[Key, Input] = {}
        self._root_sizes: set[int] = set()
        """Batches of their prompts: an agent may begin with a history."""
        self._openings: set[Key] = set()
        """Instructions of the roots, and their first questions: see `_opening`."""
        self._quotable: list[str] = []
        self._longest = 0
        """Messages of the longest dialogue."""
        self._by_reply: dict[Key, Answer] = {}
        self._merged: dict[Key, Answer] = {}
        """Key of a reply with the thinking in its content -> the turn."""

    def find(self, dialogue: History) -> Found:
        """The deepest path that the dialogue begins with."""
        best = Found()
        sizes = (size for size in sorted(self._root_sizes) if size <= len(dialogue.replies) + 1)
        roots = ((self._roots.get(dialogue.root_key(size)), size) for size in sizes)
        left = [(root, size) for root, size in roots if root is not None]
        while left:
            place, num_batches = left.pop()
            if num_batches > best.num_batches:
                best = Found(place, None, num_batches)
            if num_batches > len(dialogue.replies):
                break
            same = _same_answers(place, dialogue, num_batches - 1)
            if same and best.answer is None and num_batches == best.num_batches:
                best = Found(place, same[0], num_batches)
            for answer in reversed(same):  # the likeliest is looked into first
                below = answer.places.get(dialogue.batch_keys[num_batches])
                if below is not None:
                    left.append((below, num_batches + 1))
        return best

    def insert_root(self, place: Input) -> None:
        self._roots[place.key] = place
        self._root_sizes.add((len(place.key) + 1) // 2)  # replies are between the batches
        self._openings.update(_opening(place.key[0]))

    def add(self, answer: Answer) -> None:
        """Adds a turn that was just recorded."""
        answer.place.add(answer)
        self.answers.append(answer)
        self._longest = max(self._longest, answer.place.num_messages + 1)
        if len(text := answer.message.content.strip()) >= MIN_QUOTED_CHARS:
            self._quotable.append(text)
        self._by_reply[reply_key(answer.message)] = answer

    def known(self, reply: Message) -> Answer | None:
        """Returns the newest turn that equals `reply`, anywhere in the session."""
        found = self._by_reply.get(reply_key(reply))
        return found if found is not None and _has_same_thinking(found, reply) else None

    def unmerged(self, reply: Message) -> Message:
        """A turn whose thinking a client put into the content, as the model wrote it; any other
        reply as it is. The same turn is looked for once."""
        key = reply_key(reply)
        if key in self._by_reply:
            return reply
        if key not in self._merged:
            turns = (a for a in reversed(self.answers) if _is_merged(reply, a.message))
            if (found := next(turns, None)) is None:
                return reply
            self._merged[key] = found
        was = self._merged[key].message
        return replace(reply, content=was.content, thinking=was.thinking)

    # -- reasons ------------------------------------------------------------------------------

    def reason(self, dialogue: History, found: Found) -> Reason:
        """Says why `dialogue` is not simply the next turn of a path. found: its known part."""
        if found.num_batches > len(dialogue.replies):
            assert found.place is not None
            return _reason_at(found.place)
        if found.answer is not None:
            others = [place for place in found.answer.places.values() if place.is_used]
            if found.num_replies == len(dialogue.replies) and not others:
                return ""
            if others and all(place.num_running and not place.answers for place in others):
                return "concurrent"
            return self._rewritten(dialogue, found)
        if found.place is None:
            return self._reason_of_root(dialogue)
        was = altered_from(found.place, dialogue.replies[found.num_replies])
        return self._rewritten(dialogue, found) if was is None else was[1]

    def _reason_of_root(self, dialogue: History) -> Reason:
        if not any(place.is_used for place in self._roots.values()):
            return ""
        told, asked = _opening(dialogue.batch_keys[0])
        if told not in self._openings:
            return "sub_agent"
        if self._quotes(dialogue.batches[0]):
            return "compaction"
        is_told_on = len(dialogue.replies) > 0 or (asked and asked in self._openings)
        return self._rewritten(dialogue, Found()) if is_told_on else "new_dialogue"

    def _rewritten(self, dialogue: History, found: Found) -> Reason:
        """Classifies a rewritten history: fewer messages than before, some of them kept or summed
        up, are a compaction; anything else was edited."""
        is_shorter = dialogue.num_messages(len(dialogue.batches)) <= self._longest
        is_kept = any(self.known(reply) for reply in dialogue.replies[found.num_replies :])
        new = dialogue.batches[found.num_batches :]
        is_summed_up = any(map(self._quotes, new)) or (found.place is None and len(new[0]) > 2)
        return "compaction" if is_shorter and (is_kept or is_summed_up) else "edited_history"

    def _quotes(self, batch: Sequence[Message]) -> bool:
        """True if the batch contains the text of a turn, as a summary by the model does."""
        return any(text in message.content for text in self._quotable for message in batch)


def altered_from(place: Input, reply: Message) -> tuple[Answer, Reason] | None:
    """The turn at `place` that an agent made `reply` of, the newest first, and how; None if it is
    something else altogether."""
    for answer in reversed(list(place.all_answers())):
        if reason := altered(reply, answer.message):
            return answer, reason
    return None


def altered(reply: Message, original: Message) -> Reason:
    """Names how an agent altered a turn when it repeated it; "" if the reply is another one
    altogether.

    >>> whole = Message(role="assistant", content="The answer is 5. ")
    >>> altered(Message(role="assistant", content="The answer is 5."), whole)
    'altered_reply:trimmed'
    """
    own, was = _calls_key(reply.tool_calls), _calls_key(original.tool_calls)
    text, whole = reply.content, original.content
    if (own == was and text == whole) or not (whole or was):
        return ""
    if own == was[: len(own)] and (text or own) and text in whole:
        return "altered_reply:trimmed"
    if was != own[: len(was)]:
        return ""
    if text.startswith(whole):
        return "altered_reply:completed"
    return "altered_reply:prefixed" if text.endswith(whole) else ""


_WRAPPER = re.compile(
    r"(?:\s|</?[^<>]{1,40}>|\[/?\w{1,20}\]|[*_#`:>|-]|(?:thinking|thoughts?|reasoning|"
    r"analysis|commentary|assistant|final|answer|response)\b)*",
    re.IGNORECASE,
)
"""Text that clients put around thinking: tags, marks of Markdown, a heading."""


def _is_merged(reply: Message, turn: Message) -> bool:
    """True if a reply is a turn with its thinking put before its content.

    >>> turn = Message(role="assistant", thinking="6+6 is 12.", content="12")
    >>> _is_merged(Message(role="assistant", content="<think>6+6 is 12.</think>12"), turn)
    True
    """
    thought, words = turn.thinking.strip(), turn.content.strip()
    text = reply.content.rstrip()
    if not thought or not text.endswith(words) or reply.thinking.strip() not in ("", thought):
        return False
    before, found, behind = text[: len(text) - len(words)].partition(thought)
    if not found or _calls_key(reply.tool_calls) != _calls_key(turn.tool_calls):
        return False
    return all(len(part) <= 200 and _WRAPPER.fullmatch(part) for part in (before, behind))


def _reason_at(place: Input) -> Reason:
    """Why a place that is there already is asked at once more."""
    if place.num_running:
        return "concurrent"
    if place.answers:
        return "retry"
    return "edited_history" if place.why is None else place.why


# -- keys -----------------------------------------------------------------------------------------


def reply_key(message: Message) -> Key:
    return message.content, _calls_key(message.tool_calls)


def _calls_key(calls: Sequence[ToolCall]) -> Key:
    return tuple((call.name, _canonical(call.arguments)) for call in calls)


def _canonical(arguments: str) -> str:
    """Equal for two spellings of one JSON value; other text stays as it is."""
    # Every request repeats all calls of its dialogue.
    is_short = len(arguments) <= MAX_REMEMBERED_CHARS
    return (_read_canonical if is_short else _read_canonical.__wrapped__)(arguments)


@lru_cache(maxsize=8192)
def _read_canonical(arguments: str) -> str:
    try:
        return canonical(json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments


def _opening(first_batch: Key) -> tuple[Key, Key]:
    """(the tools and the instructions, the first message behind them; empty without one)."""
    rest = [key for key in first_batch[1:] if key[0] not in ("system", "developer")]
    told = [key for key in first_batch[1:] if key[0] in ("system", "developer")]
    return (first_batch[0], *told), rest[0] if rest else ()


def _same_answers(place: Input, dialogue: History, at: int) -> list[Answer]:
    """Returns the answers at a place that equal reply `at`, likeliest first: same ids of calls,
    then same reasoning, then the newest."""
    reply = dialogue.replies[at]
    ids = [call.id for call in reply.tool_calls]

    def likeness(answer: Answer) -> tuple[bool, bool]:
        has_ids = bool(ids) and ids == [call.id for call in answer.message.tool_calls]
        return has_ids, answer.message.thinking == reply.thinking

    equal = place.answers.get(dialogue.reply_keys[at], ())
    same = [answer for answer in reversed(equal) if _has_same_thinking(answer, reply)]
    return sorted(same, key=likeness, reverse=True)


def _has_same_thinking(answer: Answer, reply: Message) -> bool:
    return not reply.thinking or reply.thinking.strip() == answer.message.thinking.strip()
