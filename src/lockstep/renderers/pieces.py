"""A prompt as a list of pieces: text, which never becomes a control token, and control ids."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import groupby

from lockstep.errors import RendererError
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Int32Array, Message

Piece = str | int
"""Text to encode, or the id of a control token."""


def encode_pieces(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> list[int]:
    """Returns the ids of `pieces`. Text between two control tokens is encoded in one call: a seam
    inside it would give other tokens than the model was trained on."""
    ids: list[int] = []
    for is_text, run in groupby(pieces, lambda piece: isinstance(piece, str)):
        if is_text:
            ids += tokenizer.encode("".join(map(str, run)))
        else:
            ids += map(int, run)
    return ids


def split_ids(tokenizer: Tokenizer, ids: Sequence[int] | Int32Array) -> list[Piece]:
    """Splits a sampled turn into runs of text and control ids. Incomplete characters become
    U+FFFD."""
    parts: list[Piece] = []
    for is_control, run in groupby(map(int, ids), tokenizer.control_ids.__contains__):
        if is_control:
            parts += run
        else:
            parts.append(tokenizer.decode(run))
    return parts


def split_turn(
    tokenizer: Tokenizer, ids: Sequence[int] | Int32Array, stop_ids: Collection[int]
) -> tuple[list[Piece], str]:
    """Returns the pieces of a sampled turn without its stop id, and the reason, if any, why the
    turn is incomplete."""
    if not len(ids):
        return [], "the turn is empty"
    if int(ids[-1]) in stop_ids:  # it may be a token of text
        return split_ids(tokenizer, ids[:-1]), ""
    return split_ids(tokenizer, ids), "the turn was cut off"


def text_of(tokenizer: Tokenizer, parts: Iterable[Piece]) -> str:
    """Returns `parts` as readable text, with control tokens by name."""
    return "".join(p if isinstance(p, str) else tokenizer.control_name(p) for p in parts)


def cut_at(
    tokenizer: Tokenizer, parts: Sequence[Piece], marker: int
) -> tuple[str, str | None, str]:
    """Returns (text before the control token `marker`, text behind it, ""). If it is not there,
    (all text, None, ""); with other control tokens the last says which is out of place."""
    control = [part for part in parts if not isinstance(part, str)]
    if control == [marker]:
        at = parts.index(marker)
        return text_of(tokenizer, parts[:at]), text_of(tokenizer, parts[at + 1 :]), ""
    problem = f"{tokenizer.control_name(control[0])} is out of place" if control else ""
    return text_of(tokenizer, parts), None, problem


def split_system(messages: Sequence[Message]) -> tuple[str | None, list[Message]]:
    """(words of the system or developer message that comes first, all other messages)."""
    if messages and messages[0].role in ("system", "developer"):
        return messages[0].content, list(messages[1:])
    return None, list(messages)


def refuse_replies(messages: Iterable[Message]) -> None:
    """Raises RendererError if an assistant message is among the messages after a sampled turn."""
    if any(message.role == "assistant" for message in messages):
        raise RendererError(
            "extend was given an assistant message; expected what came after the sampled turn "
            "(tool, user, system or developer). Assistant turns enter a dialogue as sampled ids."
        )


def require_reply(message: Message) -> None:
    """Raises RendererError for a message of another role than the assistant."""
    if message.role != "assistant":
        raise RendererError(f"render_reply writes assistant messages, not a {message.role}'s.")


def cut_front(tokenizer: Tokenizer, ids: Sequence[int], num_bytes: int) -> list[int]:
    """Returns the ids of a text without its first `num_bytes` bytes.

    The token that the cut divides is encoded again, together with the tokens that share its last
    character. If that character is never completed, no text can spell it, and the token stays
    whole.
    """
    size = 0
    for at, id_ in enumerate(ids):
        if size == num_bytes:
            return list(ids[at:])
        size += len(tokenizer.token_bytes(id_))
        if size > num_bytes:
            decoder = codecs.getincrementaldecoder("utf-8")()
            with suppress(UnicodeDecodeError):
                rest = decoder.decode(tokenizer.token_bytes(id_)[num_bytes - size :])
                for end in range(at + 1, len(ids) + 1):
                    if not decoder.getstate()[0]:
                        return [*tokenizer.encode(rest), *ids[end:]]
                    rest += decoder.decode(tokenizer.decode_bytes(ids[end : end + 1]))
            return list(ids[at:])
    return []


def cut_prefix(tokenizer: Tokenizer, ids: Sequence[int], prefix: bytes) -> list[int]:
    """Returns `ids` without `prefix`, if the text before their first control token begins with
    it."""
    end = next((at for at, id_ in enumerate(ids) if id_ in tokenizer.control_ids), len(ids))
    run = ids[:end]
    if tokenizer.decode_bytes(run[: len(prefix)]).startswith(prefix):
        run = cut_front(tokenizer, run, len(prefix))
    return [*run, *ids[end:]]


def first_difference(left: Sequence[object], right: Sequence[object]) -> int:
    """Returns the index of the first entry that differs; the shorter length if one list begins with
    the other."""
    size = min(len(left), len(right))
    return next((at for at in range(size) if left[at] != right[at]), size)
