"""Small hand-made tokenizers for tests that need exact ids and no file."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from lockstep.renderers.harmony import HARMONY_TOKENS
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.renderers.vocabulary import BYTE_OF_CHARACTER

CHATML_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)


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
    "think>" to exist. control_tokens: by default harmony's and ChatML's. They are declared as added
    tokens, half of them not "special", as Qwen declares `<tool_call>`.
    """
    names = (*HARMONY_TOKENS, *CHATML_TOKENS) if control_tokens is None else tuple(control_tokens)
    vocab = dict(BYTE_OF_CHARACTER)
    for left, right in merges:
        vocab[left + right] = len(vocab)
    fast = FastTokenizer(models.BPE(vocab, list(merges)))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    added = {name: len(vocab) + at for at, name in enumerate(names)}
    return tokenizer_json(fast, added, special=[name for name in names if "|" in name])


def tokenizer_json(
    fast: FastTokenizer, added: Mapping[str, int], *, special: Collection[str]
) -> str:
    """The `tokenizer.json` of `fast` with these added tokens, name -> id, also where text of the
    vocabulary has the name of one."""
    spec = json.loads(fast.to_str())
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"] = [
        {"id": id_, "content": name, **off, "special": name in special}
        for name, id_ in added.items()
    ]
    return json.dumps(spec)
