"""A small tokenizer like Gemma's, for tests that need exact ids."""

from collections.abc import Sequence

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.tokenizers import tokenizer_json

GEMMA_TOKENS = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")


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
    fast = FastTokenizer(models.BPE(vocab, list(merges), byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Replace(" ", "\u2581")
    fast.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    added = {name: vocab[name] for name in (*control_tokens, *symbols)}
    special = [name for name in control_tokens if not any(map(str.isdigit, name))]
    return tokenizer_json(fast, added, special=special)
