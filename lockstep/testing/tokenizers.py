"""Small tokenizers made by hand, for tests that need exact ids and no file."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lockstep.renderers.tokenizer import Tokenizer

HARMONY_TOKENS = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>",
)  # fmt: skip
CHATML_TOKENS = (
    "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>",
)  # fmt: skip


def byte_tokenizer(
    *, merges: Sequence[tuple[str, str]] = (), control_tokens: Sequence[str] | None = None
) -> Tokenizer:
    """Ids 0..255 are the bytes, then one per merge, then the control tokens in order.

    merges: pairs of ASCII pieces without spaces that join, best first: `("<", "think>")` needs
    "think>" to exist. control_tokens: those of harmony and ChatML together by default; they are
    declared as added tokens, half of them not "special", as Qwen declares `<tool_call>`.
    """
    names = (*HARMONY_TOKENS, *CHATML_TOKENS) if control_tokens is None else tuple(control_tokens)
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    vocab = {chr(b if b in printable else next(others)): b for b in range(256)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    added = [
        {
            "id": len(vocab) + at,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": "|" in name,
        }
        for at, name in enumerate(names)
    ]
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False,
    }  # fmt: skip
    spec = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [list(m) for m in merges]},
    }
    return Tokenizer.from_json(json.dumps(spec), where="byte_tokenizer")
