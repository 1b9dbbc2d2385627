"""Our tokenizers against the tokenizers library, on the real files: equal for all text that spells
no control token."""

import random
import unicodedata

import pytest
from full_counts import PROOF
from real_tokenizers import NAMES, shipped_tokenizer_of, tokenizer_of

SCRIPTS = (
    *((0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x52F)),
    *((0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F), (0x1100, 0x11FF)),
    *((0x2000, 0x206F), (0x2580, 0x25FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3)),
    *((0xE000, 0xE010), (0x10000, 0x10100), (0x1D400, 0x1D7FF), (0x1F300, 0x1F6FF), (0, 0x1F)),
)
"""Latin, combining marks, Greek, Cyrillic, Hebrew, Arabic, Devanagari, Thai, Jamo, spaces, blocks,
Kana, Han, Hangul, private use, Linear B, mathematics, emoji, control characters."""
PIECES = (
    *("the ", "hello", " world", "'s", "123", "4567", "def f(x):\n    return x", '{"a": 1}'),
    *("\n", "\n\n", "\r\n", "  ", "    ", "\t", "\t\t", "\u3000", "\u2028", "\ufeff", "\u200d"),
    *("<table>", "</td>", "<b>", "</s>", "\u2581", "\u2581\u2581", "<0x41>", "e\u0301", "\u00e9"),
    *("<unk", "<|", "|>", "<start_of_", "<think", "\uff5c", "\u4e2d\u6587"),
)


def random_text(generator):
    parts = []
    for _ in range(generator.randrange(1, 30)):
        low, high = generator.choice(SCRIPTS)
        run = (chr(generator.randint(low, high)) for _ in range(generator.randrange(1, 6)))
        parts.append(generator.choice(PIECES) if generator.random() < 0.5 else "".join(run))
    return "".join(parts)


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_the_shipped_tokenizer_and_give_every_byte_back(name):
    ours, shipped = tokenizer_of(name), shipped_tokenizer_of(name)
    generator = random.Random(0)
    texts = [random_text(generator) for _ in range(10_000 if PROOF else 500)]
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ids == shipped.encode(text, add_special_tokens=False).ids
        # Qwen composes characters; to SentencePiece U+2581 is a space.
        exact = unicodedata.normalize("NFC", text) if name.startswith("qwen") else text
        exact = exact.replace("\u2581", " ") if name == "gemma3" else exact
        assert ours.decode_bytes(ids) == exact.encode()
        assert ours.decode(ids) == shipped.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_no_control_token_gives_one(name):
    ours, shipped = tokenizer_of(name), shipped_tokenizer_of(name)
    names = [ours.control_name(id_) for id_ in sorted(ours.control_ids)]
    assert [shipped.token_to_id(name) for name in names] == sorted(ours.control_ids)
    for text, ids in zip(names, ours.encode_batch(names), strict=True):
        assert not ours.control_ids & set(ids)
        assert ours.decode(ids) == text.replace("\u2581", " " if name == "gemma3" else "\u2581")
    whole = " ".join(names)
    assert not ours.control_ids & set(ours.encode(whole))


def test_added_tokens_of_gemma_that_are_text_are_white_space_and_markup():
    ours, shipped = tokenizer_of("gemma3"), shipped_tokenizer_of("gemma3")
    added = shipped.get_added_tokens_decoder()
    text = [token.content for id_, token in added.items() if id_ not in ours.control_ids]
    control = [token.content for id_, token in added.items() if id_ in ours.control_ids]
    assert len(text) == 162
    for kind, count in (("<", 70), ("\n", 31), ("\t", 31), ("\u2581", 30)):
        assert sum(name.startswith(kind) for name in text) == count
    unused = [name for name in control if name.startswith("<unused")]
    assert len(unused) == 6242 and len(control) - len(unused) == 11
