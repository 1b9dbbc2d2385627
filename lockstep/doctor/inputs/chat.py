"""Dialogues with the ids that an engine returned: JSON lines of messages, or of responses.

    {"messages": [...]}                  each assistant message with its ids and its prompt's
    {"response": {"output": [...]}}      NeMo-Gym's rollouts: prompt_token_ids,
                                         generation_token_ids, generation_log_probs on the items
    {"prompt_token_ids": ..., "choices"} vLLM's answers to requests with return_token_ids=true

A reply whose prompt begins with all ids of the row so far continues that row. Any other reply
begins a new row, because nothing says that they were trained as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.inputs.assemble import Array, Row, floats_of, ids_of
from lockstep.doctor.inputs.lines import LineDump
from lockstep.doctor.inputs.messages import read_messages
from lockstep.errors import DataError
from lockstep.types import Int32Array, Message

_IDS = ("generation_token_ids", "token_ids")
"""Keys of the ids of a reply: NeMo-Gym's, vLLM's."""
_LOGPROBS = ("generation_log_probs", "logprobs")
_OF_MESSAGES = frozenset(
    {"role", "content", "thinking", "reasoning_content", "tool_calls", "name", "tool_call_id"}
)
"""Keys of a message that are text; its other keys are about its tokens."""


class ChatDump(LineDump):
    """A JSONL file of dialogues with ids, or a directory of them."""

    format: ClassVar[str] = "chat"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json")
    keys: ClassVar[frozenset[str]] = frozenset()
    no_row: ClassVar[str] = (
        ": no reply with ids is in it. Expected assistant messages (or choices) with "
        f"{' or '.join(_IDS)}, as vLLM gives them with return_token_ids=true."
    )
    why: ClassVar[Mapping[str, str]] = {
        "rollout_logprobs": "ask the engine for them: logprobs=true.",
        "trainer_logprobs": "an engine's answers have the sampler's log-probs only; write the "
        "trainer's beside them in the doctor's own columns (docs/doctor-dumps.md).",
        "messages": "the lines have no `messages`, or parts in them that are not text.",
        "advantages": "an engine's answers have none.",
        "policy_version": "an engine's answers have none.",
    }

    @classmethod
    def is_own_line(cls, line: Mapping[str, Any]) -> bool:
        return any(_has_ids(reply) for reply in _replies(line)[1])

    def rows_of(
        self, line: Mapping[str, Any], path: Path, number: int, where: str
    ) -> Iterator[Row]:
        prefix = f"{path.stem}:" if len(self.files) > 1 else ""
        are_apart, replies = _replies(line)
        is_dialogue = "messages" in line and replies is line["messages"]
        chains: list[_Chain] = []
        for prompt, ids, logprobs, last_message in _turns(replies, where, is_dialogue):
            if are_apart or not chains or not chains[-1].is_prefix_of(prompt):
                chains.append(_Chain(prompt_length=len(prompt)))
            chains[-1].extend(prompt, ids, logprobs, last_message)
        dialogue = _messages(line["messages"], where) if is_dialogue else None
        for part, chain in enumerate(chains):
            name = f"{prefix}{number - 1}" + (f".{part}" if part else "")
            yield chain.row(name, line, dialogue)


@dataclass(kw_only=True)
class _Chain:
    """Replies, each of which continues the one before."""

    prompt_length: int
    ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    turn: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """Number of the reply of each token; -1 for tokens that were not sampled."""
    logprobs: Array = field(default_factory=lambda: np.empty(0, np.float32))
    last_message: int = 0
    has_logprobs: bool = False

    def is_prefix_of(self, prompt: Int32Array) -> bool:
        return np.array_equal(prompt[: len(self.ids)], self.ids)

    def extend(
        self, prompt: Int32Array, ids: Int32Array, logprobs: Array | None, last_message: int
    ) -> None:
        observed = prompt[len(self.ids) :]
        number = int(self.turn.max(initial=-1)) + 1
        nan = np.full(len(observed) + len(ids), np.nan, np.float32)
        if logprobs is not None:
            nan[len(observed) :] = logprobs
            self.has_logprobs = True
        self.ids = np.concatenate([self.ids, observed, ids])
        turns = np.repeat(np.array([-1, number], np.int32), [len(observed), len(ids)])
        self.turn = np.concatenate([self.turn, turns])
        self.logprobs = np.concatenate([self.logprobs, nan])
        self.last_message = last_message

    def row(self, name: str, line: Mapping[str, Any], dialogue: tuple[Message, ...] | None) -> Row:
        return Row(
            row_id=name,
            token_ids=self.ids,
            loss_mask=self.turn >= 0,
            columns={
                "turn": self.turn,
                "is_sampled": self.turn >= 0,
                "prompt_lengths": self.prompt_length,
                "rollout_logprobs": self.logprobs if self.has_logprobs else None,
                "rewards": line.get("reward"),
                "groups": line.get("_ng_task_index"),  # NeMo-Gym's
                "messages": None if dialogue is None else dialogue[: self.last_message],
            },
        )


def _replies(line: Mapping[str, Any]) -> tuple[bool, list[Any]]:
    """(whether each is a dialogue of its own, candidates for replies) of a line of any form.

    For messages all are returned, so that their places are known.
    """
    response = line.get("response")
    answer = response if isinstance(response, dict) else line
    if isinstance(choices := answer.get("choices"), list):
        shared = {"prompt_token_ids": answer.get("prompt_token_ids")}
        names = (*_IDS, *_LOGPROBS, "prompt_token_ids")
        out: list[Any] = []
        for choice in (c for c in choices if isinstance(c, dict)):
            reply = shared | {k: v for k, v in choice.items() if v is not None}
            if isinstance(message := choice.get("message"), dict):  # NeMo-Gym's servers
                reply |= {name: message[name] for name in names if message.get(name) is not None}
            out.append(reply)
        return True, out
    for name in ("output", "messages"):
        if isinstance(found := answer.get(name, line.get(name)), list):
            return False, found
    return False, []


def _has_ids(reply: Any) -> bool:
    return isinstance(reply, dict) and any(isinstance(reply.get(name), list) for name in _IDS)


def _turns(
    replies: Sequence[Any], where: str, is_dialogue: bool
) -> Iterator[tuple[Int32Array, Int32Array, Array | None, int]]:
    """(whole prompt, ids, log-probs, number of messages so far) of each reply."""
    for number, reply in enumerate(replies):
        if not _has_ids(reply) or reply.get("role", "assistant") != "assistant":
            continue
        place = f"{where}: {'message' if is_dialogue else 'reply'} {number}"
        if reply.get("prompt_token_ids") is None:
            raise DataError(
                f"{place} has ids and its prompt has not: give prompt_token_ids with it. The "
                "prompt cannot be made again from its text."
            )
        name = next(name for name in _IDS if isinstance(reply.get(name), list))
        ids = ids_of(reply[name], f"{place}: {name}")
        prompt = ids_of(reply["prompt_token_ids"], f"{place}: prompt_token_ids")
        yield prompt, ids, _logprobs(reply, len(ids), place), number + 1


def _logprobs(reply: Mapping[str, Any], size: int, where: str) -> Array | None:
    """A list of numbers, or OpenAI's content, or the completions endpoint's token_logprobs."""
    name = next((name for name in _LOGPROBS if reply.get(name) is not None), None)
    if name is None:
        return None
    values = reply[name]
    if isinstance(values, dict):
        content = values.get("content", values.get("token_logprobs"))
        if content is None:
            return None
        if isinstance(content, list):
            values = [e.get("logprob") if isinstance(e, dict) else e for e in content]
    return floats_of(values, size, f"{where}: {name}")


def _messages(source: Any, where: str) -> tuple[Message, ...] | None:
    """The dialogue; None if it has images or audio, which no `Message` can hold."""
    words = [
        {k: v for k, v in m.items() if k in _OF_MESSAGES} if isinstance(m, dict) else m
        for m in source
    ]
    if any(isinstance(m, dict) and isinstance(m.get("content"), list) for m in words):
        return None
    return read_messages(words, where=where)
