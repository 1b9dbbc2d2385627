"""Dialogues with the ids that an engine returned: JSON lines of messages, or of responses.

    {"messages": [...]}                  each assistant message with its ids (and its prompt's)
    {"response": {"output": [...]}}      NeMo-Gym's rollouts: prompt_token_ids,
                                         generation_token_ids, generation_log_probs on the items
    {"prompt_token_ids": ..., "choices"} vLLM's answers to requests with return_token_ids=true

A reply whose prompt goes on where the reply before it ended stands in the same row; one whose
prompt reads otherwise begins a new row, since nothing says that they were trained as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.inputs.assemble import (
    Array,
    Row,
    floats_of,
    ids_of,
    real,
    whole,
)
from lockstep.doctor.inputs.lines import LineDump, by_number
from lockstep.doctor.inputs.messages import read_messages
from lockstep.errors import DataError
from lockstep.types import Int32Array, Message

_IDS = ("generation_token_ids", "token_ids")
"""What the ids of a reply are called: by NeMo-Gym, by vLLM."""
_LOGPROBS = ("generation_log_probs", "logprobs")
_OF_MESSAGES = frozenset(
    {"role", "content", "thinking", "reasoning_content", "tool_calls", "name", "tool_call_id"}
)
"""Keys of a message that are words; what else it has is of its tokens."""


@dataclass(kw_only=True)
class _Turn:
    """One reply of the engine."""

    prompt: Int32Array
    ids: Int32Array
    logprobs: Array | None
    last_message: int = 0
    """Messages up to and with the reply."""


@dataclass(kw_only=True)
class _Chain:
    """Replies of which each continues the one before."""

    prompt_length: int
    parts: list[tuple[Int32Array, Array | None, int]] = field(default_factory=list)
    """(ids, their log-probs if they have any, turn or -1 if they were not sampled)."""
    size: int = 0
    last_message: int = 0

    def ids(self) -> Int32Array:
        return np.concatenate([part[0] for part in self.parts])


class ChatDump(LineDump):
    """A JSONL file of dialogues with ids, or a directory of them."""

    format: ClassVar[str] = "chat"
    no_row: ClassVar[str] = (
        ": no reply with ids is in it. Expected assistant messages (or choices) with "
        f"{' or '.join(_IDS)}, as vLLM gives them with return_token_ids=true."
    )
    why: ClassVar[Mapping[str, str]] = {
        "rollout_logprobs": "ask the engine for them: logprobs=true.",
        "trainer_logprobs": "an engine's answers have the sampler's log-probs only; write the "
        "trainer's beside them in the doctor's own columns (docs/doctor-inputs.md).",
        "messages": "the lines have no `messages`, or parts in them that are not text.",
        "advantages": "an engine's answers have none.",
        "policy_version": "an engine's answers have none.",
    }

    @staticmethod
    def files_of(path: Path) -> list[Path]:
        if path.is_file():
            return [path] if path.suffix in (".jsonl", ".json") else []
        return sorted(path.glob("*.jsonl"), key=by_number)

    @staticmethod
    def is_own(line: Mapping[str, Any]) -> bool:
        _, replies = _replies(line)
        return any(_has_ids(reply) for reply in replies)

    def rows_of(self, line: Mapping[str, Any], path: Path, number: int) -> Iterator[Row]:
        prefix = f"{path.stem}:" if len(self._files) > 1 else ""
        for part, row in enumerate(_rows(line, f"{path}:{number}")):
            row.row_id = f"{prefix}{number - 1}" + (f".{part}" if part else "")
            yield row


def _replies(line: Mapping[str, Any]) -> tuple[bool, list[Any]]:
    """(whether each is a dialogue of its own, what may be replies) of a line of any of the forms.

    Of messages all are given, so that their places are known.
    """
    response = line.get("response")
    answer = response if isinstance(response, dict) else line
    if isinstance(choices := answer.get("choices"), list):
        shared = {"prompt_token_ids": answer.get("prompt_token_ids")}
        return True, [
            shared | {k: v for k, v in choice.items() if v is not None}
            | _of_message(choice.get("message"))
            for choice in choices if isinstance(choice, dict)
        ]  # fmt: skip
    for name in ("output", "messages"):
        if isinstance(found := answer.get(name, line.get(name)), list):
            return False, found
    return False, []


def _of_message(message: Any) -> dict[str, Any]:
    """What NeMo-Gym's servers put into the message of a choice."""
    if not isinstance(message, dict):
        return {}
    names = (*_IDS, *_LOGPROBS, "prompt_token_ids")
    return {name: message[name] for name in names if message.get(name) is not None}


def _has_ids(reply: Any) -> bool:
    return isinstance(reply, dict) and any(isinstance(reply.get(name), list) for name in _IDS)


def _rows(line: Mapping[str, Any], where: str) -> list[Row]:
    are_apart, replies = _replies(line)
    is_dialogue = "messages" in line and replies is line["messages"]
    turns = list(_turns(replies, where, is_dialogue))
    chains: list[_Chain] = []
    for turn in turns:
        chain = None if are_apart or not chains else chains[-1]
        if chain is not None:
            before = chain.ids()
            if len(turn.prompt) < len(before) or (turn.prompt[: len(before)] != before).any():
                chain = None
        if chain is None:
            chain = _Chain(prompt_length=len(turn.prompt))
            chains.append(chain)
        number = sum(1 for part in chain.parts if part[2] >= 0)
        chain.parts.append((turn.prompt[chain.size :], None, -1))
        chain.parts.append((turn.ids, turn.logprobs, number))
        chain.size = len(turn.prompt) + len(turn.ids)
        chain.last_message = turn.last_message
    dialogue = _messages(line["messages"], where) if is_dialogue else None
    return [_row(chain, line, dialogue) for chain in chains]


def _turns(replies: Sequence[Any], where: str, is_dialogue: bool) -> Iterator[_Turn]:
    """Each reply with its whole prompt: as it says, or as the messages before it have ids."""
    known: list[Int32Array] | None = []  # ids of the messages so far, while all have them
    for number, reply in enumerate(replies):
        place = f"{where}: {'message' if is_dialogue else 'reply'} {number}"
        is_reply = isinstance(reply, dict) and reply.get("role", "assistant") == "assistant"
        if not _has_ids(reply):
            known = None
            continue
        ids = _ids(reply, place)
        if is_reply:
            prompt = reply.get("prompt_token_ids")
            if prompt is None and (known is None or not known):
                raise DataError(
                    f"{place} has ids and its prompt has not: give prompt_token_ids with it, or "
                    "token_ids with every message before it. What stood before the reply cannot "
                    "be made of the words again."
                )
            yield _Turn(
                prompt=np.concatenate(known or [])
                if prompt is None
                else ids_of(_numbered(prompt), f"{place}: prompt_token_ids"),
                ids=ids,
                logprobs=_logprobs(reply, len(ids), place),
                last_message=number + 1,
            )
        if known is not None:
            known.append(ids)


def _ids(reply: Mapping[str, Any], where: str) -> Int32Array:
    name = next(name for name in _IDS if isinstance(reply.get(name), list))
    return ids_of(_numbered(reply[name]), f"{where}: {name}")


def _numbered(values: Any) -> Any:
    """Ids as numbers where they are written `token_id:7` (vLLM's return_tokens_as_token_ids)."""
    if not isinstance(values, list) or str not in set(map(type, values)):
        return values
    found = [re.fullmatch(r"token_id:(\d+)", v) if isinstance(v, str) else None for v in values]
    return [int(m[1]) for m in found if m] if all(found) else values


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
    """The dialogue; None if it has images or sounds in it, which no message here can hold."""
    words = [
        {k: v for k, v in m.items() if k in _OF_MESSAGES} if isinstance(m, dict) else m
        for m in source
    ]
    if any(isinstance(m, dict) and isinstance(m.get("content"), list) for m in words):
        return None
    return read_messages(words, where=where)


def _row(chain: _Chain, line: Mapping[str, Any], dialogue: tuple[Message, ...] | None) -> Row:
    turn = np.concatenate([np.full(len(ids), number) for ids, _, number in chain.parts])
    sampled = turn >= 0
    columns: dict[str, Any] = {
        "turn": turn.astype(np.int32),
        "is_sampled": sampled,
        "prompt_lengths": chain.prompt_length,
    }
    if any(logprobs is not None for _, logprobs, _ in chain.parts):
        columns["rollout_logprobs"] = np.concatenate(
            [
                np.full(len(ids), np.nan, np.float32) if logprobs is None else logprobs
                for ids, logprobs, _ in chain.parts
            ]
        )
    if (reward := real(line.get("reward"))) is not None:
        columns["rewards"] = reward
    task = whole(line.get("_ng_task_index"))
    if task is not None:  # NeMo-Gym's
        columns["groups"] = task
    if dialogue is not None:
        columns["messages"] = dialogue[: chain.last_message]
    return Row(row_id="", token_ids=chain.ids(), loss_mask=sampled, columns=columns)
