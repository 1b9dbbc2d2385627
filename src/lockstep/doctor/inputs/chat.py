"""Dialogues with the ids that an engine returned: JSON lines of messages, or of responses.

    {"messages": [...]}                  each assistant message with its ids and its prompt's
    {"response": {"output": [...]}}      NeMo-Gym's rollouts: prompt_token_ids,
                                         generation_token_ids, generation_log_probs on the items
    {"prompt_token_ids": ..., "choices"} vLLM's answers to requests with return_token_ids=true

A reply whose prompt begins with all ids of the row so far continues that row. Any other reply
begins a new row, because nothing says that they were trained as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.inputs.assemble import Array, Row, dialogue_of, floats_of, ids_of
from lockstep.doctor.inputs.lines import Line, LineDump
from lockstep.errors import DataError
from lockstep.types import MESSAGE_KEYS, Int32Array

_IDS = ("generation_token_ids", "token_ids")
"""Keys of the ids of a reply: NeMo-Gym's, vLLM's."""
_LOGPROBS = ("generation_log_probs", "logprobs")


class ChatDump(LineDump):
    """A JSONL file of dialogues with ids, or a directory of them."""

    format: ClassVar[str] = "chat"

    @classmethod
    def is_own_line(cls, line: Line) -> bool:
        return any(_has_ids(reply) for reply in _replies(line)[1])

    def rows_of(self, line: Line, path: Path, number: int, where: str) -> Iterator[Row]:
        are_apart, replies = _replies(line)
        said = replies if "messages" in line and replies is line["messages"] else None
        dialogue, unread = dialogue_of(said and [_words(m) for m in said], where)
        chains: list[list[_Reply]] = []
        for reply in _with_ids(replies, where):
            if are_apart or not chains or not chains[-1][-1].is_continued_by(reply):
                chains.append([])
            chains[-1].append(reply)
        prefix = f"{path.stem}:" if len(self.files) > 1 else ""
        for part, chain in enumerate(chains):
            name = f"{prefix}{number - 1}" + (f".{part}" if part else "")
            said = dialogue and dialogue[: chain[-1].number + 1]
            yield replace(_row(chain, line, row_id=name, messages=said), unread=unread)


@dataclass(frozen=True, kw_only=True)
class _Reply:
    """A reply with the ids of the whole prompt before it."""

    number: int
    """Place among the messages or outputs."""
    prompt: Int32Array
    ids: Int32Array
    logprobs: Array | None

    def is_continued_by(self, reply: _Reply) -> bool:
        row = np.concatenate([self.prompt, self.ids])
        return np.array_equal(reply.prompt[: len(row)], row)


def _row(chain: Sequence[_Reply], line: Line, **known: Any) -> Row:
    """The row of replies. Each reply continues the one before. known: further fields of the row."""
    last = chain[-1]
    ids = np.concatenate([last.prompt, last.ids])
    turn = np.full(len(ids), -1, np.int32)
    logprobs = np.full(len(ids), np.nan, np.float32)
    for number, reply in enumerate(chain):
        place = slice(len(reply.prompt), len(reply.prompt) + len(reply.ids))
        turn[place] = number
        logprobs[place] = np.nan if reply.logprobs is None else reply.logprobs
    has_logprobs = any(reply.logprobs is not None for reply in chain)
    return Row.of(
        token_ids=ids,
        loss_mask=turn >= 0,
        turn=turn,
        is_sampled=turn >= 0,
        prompt_lengths=len(chain[0].prompt),
        rollout_logprobs=logprobs if has_logprobs else None,
        rewards=line.get("reward"),
        groups=line.get("_ng_task_index"),  # NeMo-Gym's
        **known,
    )


def _replies(line: Line) -> tuple[bool, list[Any]]:
    """(whether each is a dialogue of its own, candidates for replies) of a line of any form.

    For messages all are returned, so that their places are known.
    """
    response = line.get("response")
    answer = response if isinstance(response, dict) else line
    if isinstance(choices := answer.get("choices"), list):
        shared = {"prompt_token_ids": answer.get("prompt_token_ids")}
        out: list[Any] = []
        for choice in (c for c in choices if isinstance(c, dict)):
            message = choice.get("message")  # has the ids in NeMo-Gym's servers
            sources = (shared, choice, message if isinstance(message, dict) else {})
            out.append({k: v for source in sources for k, v in source.items() if v is not None})
        return True, out
    for name in ("output", "messages"):
        if isinstance(found := answer.get(name, line.get(name)), list):
            return False, found
    return False, []


def _has_ids(reply: Any) -> bool:
    return isinstance(reply, dict) and any(isinstance(reply.get(name), list) for name in _IDS)


def _with_ids(replies: Sequence[Any], where: str) -> Iterator[_Reply]:
    for number, reply in enumerate(replies):
        if not _has_ids(reply) or reply.get("role", "assistant") != "assistant":
            continue
        place = f"{where}: reply {number}"
        if reply.get("prompt_token_ids") is None:
            raise DataError(f"{place} has ids and its prompt has not: give prompt_token_ids.")
        name = next(name for name in _IDS if isinstance(reply.get(name), list))
        ids = ids_of(reply[name], f"{place}: {name}")
        prompt = ids_of(reply["prompt_token_ids"], f"{place}: prompt_token_ids")
        logprobs = _logprobs(reply, len(ids), place)
        yield _Reply(number=number, prompt=prompt, ids=ids, logprobs=logprobs)


def _logprobs(reply: Line, size: int, where: str) -> Array | None:
    """A list of numbers, or OpenAI's content, or the completions endpoint's token_logprobs."""
    name = next((name for name in _LOGPROBS if reply.get(name) is not None), None)
    values = None if name is None else reply[name]
    if isinstance(values, dict):
        values = values.get("content", values.get("token_logprobs"))
    if isinstance(values, list):
        values = [e.get("logprob") if isinstance(e, dict) else e for e in values]
    return None if values is None else floats_of(values, size, f"{where}: {name}")


def _words(message: Any) -> Any:
    """A message without the keys about its tokens."""
    is_object = isinstance(message, dict)
    return {k: v for k, v in message.items() if k in MESSAGE_KEYS} if is_object else message
