"""Small hand-made tokenizers for tests that need exact ids and no file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lockstep.renderers.tokenizer import Tokenizer

HARMONY_TOKENS = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
)
CHATML_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

LLAMA3_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
GEMMA_TOKENS = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")


def _added_token(id_: int, name: str, *, special: bool) -> dict[str, Any]:
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id_, "content": name, **off, "special": special}


def byte_tokenizer(
    *, merges: Sequence[tuple[str, str]] = (), control_tokens: Sequence[str] | None = None
) -> Tokenizer:
    """Returns the tokenizer of `byte_tokenizer_json`."""
    text = byte_tokenizer_json(merges=merges, control_tokens=control_tokens)
    return Tokenizer.from_json(text, where="byte_tokenizer")


def byte_tokenizer_json(
    *, merges: Sequence[tuple[str, str]] = (), control_tokens: Sequence[str] | None = None
) -> str:
    """Returns a `tokenizer.json`: ids 0..255 are the bytes, followed by one id per merge and by the
    control tokens in order.

    merges: pairs of ASCII pieces without spaces that join, best first; `("<", "think>")` needs
    "think>" to exist. control_tokens: by default those of harmony and ChatML. They are declared as
    added tokens, half of them not "special", as Qwen declares `<tool_call>`.
    """
    names = (*HARMONY_TOKENS, *CHATML_TOKENS) if control_tokens is None else tuple(control_tokens)
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    vocab = {chr(b if b in printable else next(others)): b for b in range(256)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    added = [
        _added_token(len(vocab) + at, name, special="|" in name) for at, name in enumerate(names)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    spec = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [list(m) for m in merges]},
    }
    return json.dumps(spec)


def sentencepiece_tokenizer(
    *, merges: Sequence[tuple[str, str]] = (), control_tokens: Sequence[str] = GEMMA_TOKENS
) -> Tokenizer:
    """Returns the tokenizer of `sentencepiece_json`."""
    text = sentencepiece_json(merges=merges, control_tokens=control_tokens)
    return Tokenizer.from_json(text, where="sentencepiece_tokenizer")


def sentencepiece_json(
    *, merges: Sequence[tuple[str, str]] = (), control_tokens: Sequence[str] = GEMMA_TOKENS
) -> str:
    """Returns a `tokenizer.json` like Gemma's: in this order the control tokens, the text symbols,
    the bytes, the characters of ASCII, and one token per merge.

    merges: pairs of pieces that join, best first, with U+2581 for a space. The text symbols, added
    tokens that are text, are runs of line breaks and spaces, and `<table>`. A control token is
    "special" if its name has no digit: `<unused0>` is not.
    """
    symbols = ("\n", "\n\n", "\u2581\u2581", "<table>", "</table>")
    printable = [chr(code) for code in range(0x21, 0x7F)]
    pieces = [
        *control_tokens,
        *symbols,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *printable,
        *(left + right for left, right in merges),
    ]
    vocab = {piece: id_ for id_, piece in enumerate(dict.fromkeys(pieces))}
    has_digit = {name for name in control_tokens if any(map(str.isdigit, name))}
    added = [
        _added_token(vocab[name], name, special=name not in symbols and name not in has_digit)
        for name in (*control_tokens, *symbols)
    ]
    space = {"pattern": {"String": "\u2581"}, "content": " "}
    spec = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Replace"} | space, {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [list(m) for m in merges],
            "byte_fallback": True,
            "fuse_unk": True,
        },
    }
    return json.dumps(spec)
