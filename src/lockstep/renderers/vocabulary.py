"""Reads a `tokenizer.json`: the bytes of each text token, and the control tokens.

Two kinds of byte-pair encoding keep every byte of a text:

byte-level (gpt-oss, Qwen, Llama 3, DeepSeek)
    A token is a run of bytes, each written as a printable character.
SentencePiece with byte fallback (Gemma)
    A token is a run of characters, with U+2581 for a space. A character without a token becomes the
    tokens of its bytes, `<0x00>` to `<0xFF>`. U+2581 in a text comes back as a space.

An added token is text if it is not "special", takes no space from its neighbours, and is either
white space only (runs of spaces, tabs and line breaks) or, in a SentencePiece vocabulary, a
markup tag from MARKUP (`<table>`, `</h1>`). Every other added token is a control token, whatever
the file says: Qwen's `<tool_call>` is not "special", nor are Gemma's `<unused0>` and `<mask>`,
and models are trained to obey them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from lockstep.errors import RendererError
from lockstep.tables import tables_beside

_TABLES = tables_beside(__file__)
MARKUP: frozenset[str] = frozenset(_TABLES["markup"])
"""Names of the tags that SentencePiece vocabularies use as text, from Gemma's list."""

MOST_IDS = 1 << 24
"""Ids that a vocabulary may have; a larger one is a damaged file."""

MOST_GROWTH = 64
"""Times that a normalizer may make a text longer; real ones replace a space by one character."""

SPACE = "\u2581"
"""How SentencePiece writes a space."""

Kind = Literal["byte-level", "sentencepiece"]


def read_vocabulary(
    spec: Mapping[str, Any], *, extra: Mapping[str, Mapping[str, Any]], where: str
) -> tuple[dict[int, bytes], dict[str, int], dict[str, Any]]:
    """Reads the content of a `tokenizer.json`: (text token -> its bytes, control token -> id, the
    file as the tokenizers library gets it, without anything that could produce a control token).

    extra: added tokens that another file declares, by id; `spec` wins if both declare one. Raises
    RendererError for a tokenizer that cannot return every byte of a text, and for one that makes
    texts or the list of ids too long.
    """
    model: dict[str, Any] = spec.get("model") or {}
    kind = _kind(spec, where)
    tokens: Sequence[Mapping[str, Any]] = spec.get("added_tokens") or ()
    _check_ids(((token["content"], token["id"]) for token in tokens), where, are_unique=True)
    others = {int(id_): token for id_, token in extra.items()}
    _check_ids(((token["content"], id_) for id_, token in others.items()), where)
    _check_ids(model["vocab"].items(), where)
    if (growth := _growth(spec.get("normalizer"))) > MOST_GROWTH:
        raise RendererError(
            f"{where}: the normalizer can make a text {growth} times as long; expected at most "
            f"{MOST_GROWTH} times."
        )
    added = others | {token["id"]: token for token in tokens}
    symbols = {token["content"]: id_ for id_, token in added.items() if _is_text(token, kind)}
    control = {token["content"]: id_ for id_, token in added.items() if not _is_text(token, kind)}
    control_ids = frozenset(control.values())
    # A control token that is also an entry of the model's vocabulary (trainers put it there)
    # could be reached by merges or by a whole-word look-up: it goes, with the merges to it.
    vocab = {piece: id_ for piece, id_ in model["vocab"].items() if id_ not in control_ids}
    gone = model["vocab"].keys() - vocab.keys()
    merges = model["merges"]
    if gone:
        merges = [merge for merge in merges if gone.isdisjoint(merge_parts(merge))]
    # A symbol that is in no vocabulary would get another id from the tokenizers library: the next
    # one free, and control tokens have left holes.
    vocab |= symbols
    if kind != "byte-level":
        _check_bytes(vocab, where)

    def spelled(piece: str) -> bytes:
        if kind != "byte-level":
            byte = BYTE_OF_TOKEN.get(piece)
            return piece.replace(SPACE, " ").encode() if byte is None else bytes([byte])
        return piece.encode() if piece in symbols else _bytes_of_characters(piece, where)

    text_tokens = {id_: spelled(piece) for piece, id_ in vocab.items()}
    plain: dict[str, Any] = {
        "version": "1.0",
        **spec,
        **dict.fromkeys(("truncation", "padding")),
        "added_tokens": [{**added[id_], "id": id_} for id_ in sorted(symbols.values())],
        "post_processor": None,  # it would add control tokens around the text
        # Every byte has a token, so that nothing is unknown; the token's name may be control.
        "model": {**model, "vocab": vocab, "merges": merges, "dropout": None, "unk_token": None},
    }
    return text_tokens, control, plain


_PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


def without_prefix_space(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a `tokenizer.json` that writes no space before a text (Llama 2 and its like do).

    Every byte of a text then comes back, and ids of a text in the middle of a row are the same; at
    the beginning of one, the file's own tokenizer writes another id.
    """

    def cleaned(part: dict[str, Any] | None, inner: str) -> dict[str, Any] | None:
        if part is None:
            return None
        kind = part["type"]
        if kind == "Sequence":
            kept = [cleaned(one, inner) for one in part[inner]]
            return {**part, inner: [one for one in kept if one is not None]}
        if kind == "Prepend" or (kind == "Strip" and inner == "decoders"):
            return None
        if kind == "Metaspace":
            return {**part, "prepend_scheme": "never", "add_prefix_space": False}
        return part

    return {**spec, **{name: cleaned(spec.get(name), inner) for name, inner in _PARTS.items()}}


def _check_ids(tokens: Iterable[tuple[str, Any]], where: str, *, are_unique: bool = False) -> None:
    """Raises RendererError for a value that is no id, and for two tokens with one id."""
    names: dict[int, str] = {}
    for name, id_ in tokens:
        if type(id_) is not int or not 0 <= id_ < MOST_IDS:
            raise RendererError(
                f"{where}: {name!r:.80} has the id {id_}: expected 0 to {MOST_IDS - 1}."
            )
        if are_unique and (other := names.setdefault(id_, name)) != name:
            raise RendererError(f"{where}: {name!r} and {other!r} have the same id, {id_}.")


def _growth(normalizer: Mapping[str, Any] | None) -> int:
    """The factor by which a normalizer can lengthen a text."""
    found = normalizer or {}
    match found.get("type"):
        case "Sequence":
            return math.prod(_growth(part) for part in found["normalizers"])
        case "Replace":
            size = len(found["pattern"].get("String", ""))  # a Regex may match nothing
            return -(-len(found["content"]) // size) if size else 1 + len(found["content"])
        case "Prepend":
            return len(found["prepend"])
        case _:
            return 1


def merge_parts(merge: str | Sequence[str]) -> list[str]:
    """Returns left, right and product of a merge, which files write as "a b" or as ["a", "b"]."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return [left, right, left + right]


def characters_of(word: str, vocab: Mapping[str, int]) -> list[str]:
    """Returns the units that a word's merges begin with: characters, or the tokens of their
    bytes."""
    pieces: list[str] = []
    for character in word:
        if character in vocab:
            pieces.append(character)
        else:
            pieces += [f"<0x{byte:02X}>" for byte in character.encode()]
    return pieces


def _is_text(token: Mapping[str, Any], kind: Kind) -> bool:
    """Applies the rule in the module's docstring."""
    takes_space = any(token.get(key) for key in ("lstrip", "rstrip", "single_word"))
    if token.get("special") or takes_space:
        return False
    content: str = token["content"]
    if kind == "byte-level":
        return content.isspace()
    tag = re.fullmatch(r"</?(\w+)>", content)
    return content.replace(SPACE, " ").isspace() or bool(tag and tag[1] in MARKUP)


def _kind(spec: Mapping[str, Any], where: str) -> Kind:
    model: dict[str, Any] = spec.get("model") or {}
    decoder: dict[str, Any] = spec.get("decoder") or {}
    steps: list[dict[str, Any]] = [decoder, *(decoder.get("decoders") or ())]
    if {"vocab", "merges"} <= set(model) and model.get("type", "BPE") == "BPE":
        if any(step.get("type") == "ByteLevel" for step in steps):
            return "byte-level"
        if model.get("byte_fallback"):
            return "sentencepiece"
    raise RendererError(
        f"{where}: found the model {model.get('type')} with the decoder {decoder.get('type')}; "
        "expected byte-level BPE, or SentencePiece's BPE with byte fallback: exact runs of bytes."
    )


# -- bytes of tokens ------------------------------------------------------------------------------


def _byte_of_character() -> dict[str, int]:
    """Maps the printable characters of byte-level BPE files to bytes.

    Source: GPT-2's encoder. Printable Latin-1 represents itself; the other 68 bytes are the
    characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return {chr(b if b in printable else next(others)): b for b in range(256)}


BYTE_OF_CHARACTER = _byte_of_character()
BYTE_OF_TOKEN = {f"<0x{byte:02X}>": byte for byte in range(256)}
"""SentencePiece's token -> its byte."""

_NOT_IN_TEXT = (0xC0, 0xC1, *range(0xF5, 0x100))
"""Bytes that UTF-8 never writes."""


def _bytes_of_characters(piece: str, where: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError as error:
        raise RendererError(
            f"{where}: the vocabulary has a token with the character {error}, which is "
            "no byte; expected byte-level BPE."
        ) from error


def unwritable_bytes(text_tokens: Mapping[int, bytes]) -> bytes:
    """The bytes of UTF-8 that no token writes alone: a byte-level vocabulary learned from text
    without them may lack some, as SmolLM2's lacks U+0004."""
    written = set(text_tokens.values())
    every = (bytes([byte]) for byte in range(256) if byte not in _NOT_IN_TEXT)
    return b"".join(byte for byte in every if byte not in written)


def _check_bytes(vocab: Mapping[str, int], where: str) -> None:
    """Raises RendererError for a vocabulary that lacks the token of a byte to fall back to."""
    every = BYTE_OF_TOKEN.items()
    missing = [b for name, b in every if name not in vocab and b not in _NOT_IN_TEXT]
    if missing:
        raise RendererError(
            f"{where}: the vocabulary lacks tokens for {len(missing)} of the 243 bytes "
            f"of UTF-8, such as 0x{missing[0]:02X}: there is text that it cannot write."
        )
