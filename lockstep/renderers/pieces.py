"""A prompt as a list of pieces: text, which can never control, and control ids."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.renderers.tokenizer import Tokenizer

Piece = str | int
"""Text that is encoded, or the id of a control token."""


def encode_pieces(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> list[int]:
    """The ids of `pieces`. Text between two control tokens is encoded in one go: a seam inside it
    would give other tokens than the model was trained on."""
    ids: list[int] = []
    text = ""
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
            continue
        if text:
            ids += tokenizer.encode(text)
            text = ""
        ids.append(piece)
    return ids + tokenizer.encode(text)
