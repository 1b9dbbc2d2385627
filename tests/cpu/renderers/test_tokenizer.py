import json
import time

import pytest
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece_tokenizers import GEMMA_TOKENS, sentencepiece_json
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from lockstep.errors import RendererError
from lockstep.renderers.harmony import HARMONY_TOKENS
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.tokenizers import CHATML_TOKENS, byte_tokenizer, byte_tokenizer_json

MERGES = [("<", "|"), ("|", ">"), ("e", "n"), ("en", "d"), ("<|", "end"), ("<|end", "|>")]
CONTROL = (*HARMONY_TOKENS, *CHATML_TOKENS)


def trained(**model):
    """A tokenizer as the tokenizers library trains it: the specials are in its vocabulary too."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(["the end of <|end|> and <think> the end"] * 20, trainer)
    # As Llama 3 does: a beginning-of-text token in front of everything.
    fast.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", fast.token_to_id("<|start|>"))]
    )
    spec = json.loads(fast.to_str())
    spec["model"] |= model
    return json.dumps(spec)


TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "a merge that spells <|end|>": byte_tokenizer(merges=MERGES),
    "trained": Tokenizer.from_json(trained()),
    "trained, whole words looked up first": Tokenizer.from_json(trained(ignore_merges=True)),
}
HOSTILE = st.lists(
    st.one_of(st.sampled_from(CONTROL), st.sampled_from(["<|", "|>", " ", "end", "\n"]), st.text()),
    max_size=6,
).map("".join)


UNUSED = ("<unused0>", "<mask>")
SENTENCEPIECE_JSON = sentencepiece_json(
    merges=[("\u2581", "\u2581"), ("a", "b"), ("\u2581", "ab"), ("t", "h")],
    control_tokens=(*GEMMA_TOKENS, *UNUSED),
)
SENTENCEPIECE = Tokenizer.from_json(SENTENCEPIECE_JSON)
SENTENCES = st.lists(
    st.one_of(
        st.sampled_from([*GEMMA_TOKENS, *UNUSED, "<table>", "</table>", "<0x41>", "<", ">"]),
        st.sampled_from([" ", "  ", "\n", "\n\n", "ab", "th"]),
        st.text().map(lambda text: text.replace("\u2581", " ")),
    ),
    max_size=8,
).map("".join)


@settings(max_examples=2000 if PROOF else 150, deadline=None)
@given(text=SENTENCES)
def test_a_sentencepiece_tokenizer_keeps_every_byte_and_gives_no_control_token(text):
    ids = SENTENCEPIECE.encode(text)
    assert not SENTENCEPIECE.control_ids & set(ids)
    assert SENTENCEPIECE.decode_bytes(ids) == text.encode()
    assert SENTENCEPIECE.encode_batch([text]) == [ids]
    assert SENTENCEPIECE.with_dropout(0.0).encode(text) == ids
    dropped = SENTENCEPIECE.with_dropout(0.5, seed=1).encode(text)
    assert SENTENCEPIECE.decode_bytes(dropped) == text.encode()


def test_added_tokens_that_text_is_meant_to_use_are_text_and_all_others_control():
    shipped = FastTokenizer.from_str(SENTENCEPIECE_JSON)
    for text in ("\n\n", "<table>", "</table>"):
        assert len(SENTENCEPIECE.encode(text)) == 1
        assert SENTENCEPIECE.encode(text) == shipped.encode(text).ids
        with pytest.raises(RendererError, match="control tokens"):
            SENTENCEPIECE.control_id(text)
    for name in (*GEMMA_TOKENS, *UNUSED):
        assert shipped.encode(name).ids == [SENTENCEPIECE.control_id(name)]
        assert SENTENCEPIECE.control_id(name) not in SENTENCEPIECE.encode(name)


def test_the_sign_for_a_space_is_a_space():
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode("a\u2581b")) == "a b"
    assert SENTENCEPIECE.encode("a\u2581b") == SENTENCEPIECE.encode("a b")


def test_runs_of_white_space_among_the_added_tokens_are_text_in_byte_level_files_too():
    spec = json.loads(trained())
    run = {"id": 777, "content": "   ", "special": False, "normalized": True}
    spec["added_tokens"].append(run | dict.fromkeys(("lstrip", "rstrip", "single_word"), False))
    tokenizer = Tokenizer.from_json(json.dumps(spec))
    assert tokenizer.encode("   ") == [777] and 777 not in tokenizer.control_ids
    assert tokenizer.decode(tokenizer.encode("the    end")) == "the    end"
    spec["added_tokens"][-1]["lstrip"] = True
    assert 777 in Tokenizer.from_json(json.dumps(spec)).control_ids


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=2000 if PROOF else 80, deadline=None)
@given(text=HOSTILE)
def test_no_text_becomes_a_control_token_and_all_text_comes_back(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    assert not tokenizer.control_ids & set(ids)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_the_shipped_form_of_the_same_file_does_turn_text_into_control_tokens():
    shipped = FastTokenizer.from_str(trained())
    assert shipped.token_to_id("<|end|>") in shipped.encode("the <|end|>").ids


def test_a_post_processor_adds_nothing():
    tokenizer = TOKENIZERS["trained"]
    assert tokenizer.encode("") == []
    assert tokenizer.decode(tokenizer.encode("the end")) == "the end"


def test_every_control_and_added_token_has_an_id_by_name():
    tokenizer = TOKENIZERS["bytes"]
    ids = [tokenizer.control_id(name) for name in CONTROL]
    assert tokenizer.control_ids == frozenset(ids)
    assert [tokenizer.control_name(id_) for id_ in ids] == list(CONTROL)
    assert tokenizer.vocab_size == 256 + len(CONTROL)
    with pytest.raises(KeyError):
        tokenizer.control_name(97)


def test_missing_control_tokens_are_named_all_at_once():
    tokenizer = byte_tokenizer(control_tokens=["<|start|>"])
    with pytest.raises(RendererError, match=r"byte_tokenizer.*<\|a\|>, <\|b\|>"):
        tokenizer.require(["<|start|>", "<|a|>", "<|b|>"])
    with pytest.raises(RendererError, match=r"<\|a\|>"):
        byte_tokenizer(control_tokens=[]).control_id("<|a|>")


def test_decode_shows_control_tokens_and_half_characters_and_nothing_for_unused_ids():
    tokenizer = TOKENIZERS["bytes"]
    half = tokenizer.encode("\u4e2d")[:2]
    ids = [*tokenizer.encode("a"), *half, tokenizer.control_id("<|end|>"), 10**6, -1]
    assert tokenizer.decode(ids) == "a\ufffd<|end|>"
    assert tokenizer.decode_bytes(ids) == b"a\xe4\xb8<|end|>"


def test_token_bytes_join_to_the_text_over_any_borders():
    tokenizer = TOKENIZERS["a merge that spells <|end|>"]
    table = tokenizer.all_token_bytes()
    assert len(table) == tokenizer.vocab_size
    ids = tokenizer.encode("to the <|end|> \u4e2d")
    assert b"<|end|>" in [table[id_] for id_ in ids]
    assert b"".join(table[id_] for id_ in ids) == "to the <|end|> \u4e2d".encode()
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(10**6) == b""


def test_encoding_counts_its_tokens():
    tokenizer = byte_tokenizer()
    before = tokenizer.num_encoded
    tokenizer.encode("abc")
    tokenizer.encode("")
    assert tokenizer.num_encoded - before == 3


def test_half_surrogates_that_json_can_spell_become_replacement_characters():
    tokenizer = TOKENIZERS["bytes"]
    text = json.loads('"a\\ud800b \\ud83d\\ude00"')
    assert tokenizer.decode(tokenizer.encode(text)) == "a\ufffdb \U0001f600"


# -- dropout ----------------------------------------------------------------------------------


def test_dropout_spells_the_same_text_in_many_ways_and_repeats_with_its_seed():
    tokenizer = TOKENIZERS["trained"]
    text = "the end of the end " * 5
    one, again = tokenizer.with_dropout(0.3, seed=1), tokenizer.with_dropout(0.3, seed=1)
    spellings = [one.encode(text) for _ in range(5)]
    assert spellings == [again.encode(text) for _ in range(5)]
    assert spellings != [tokenizer.with_dropout(0.3, seed=2).encode(text) for _ in range(5)]
    assert len({tuple(ids) for ids in spellings}) == 5
    assert {one.decode(ids) for ids in spellings} == {text}
    assert one.control_ids == tokenizer.control_ids
    assert len(tokenizer.with_dropout(1.0).encode(text)) == len(text)


@settings(max_examples=1000 if PROOF else 60, deadline=None)
@given(text=HOSTILE)
def test_dropout_of_zero_encodes_as_the_library_does(text):
    tokenizer = TOKENIZERS["trained"]
    assert tokenizer.with_dropout(0.0).encode(text) == tokenizer.encode(text)


@settings(max_examples=1000 if PROOF else 60, deadline=None)
@given(text=HOSTILE, seed=st.integers(0, 99))
def test_dropout_never_gives_a_control_token(text, seed):
    tokenizer = TOKENIZERS["a merge that spells <|end|>"].with_dropout(0.2, seed=seed)
    assert not tokenizer.control_ids & set(tokenizer.encode(text))


# -- files ------------------------------------------------------------------------------------


def test_a_file_and_its_directory_give_the_same_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text(trained())
    one = Tokenizer.from_file(tmp_path)
    other = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert (
        one.encode("the end") == other.encode("the end") == TOKENIZERS["trained"].encode("the end")
    )
    assert one.where == str(tmp_path / "tokenizer.json")


def test_added_tokens_that_only_the_config_declares_are_control_tokens(tmp_path):
    (tmp_path / "tokenizer.json").write_text(trained())
    config = {"added_tokens_decoder": {"999": {"content": "<|extra|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_file(tmp_path)
    assert tokenizer.control_id("<|extra|>") == 999
    assert tokenizer.vocab_size == 1000
    assert 999 not in tokenizer.encode("<|extra|>")
    assert tokenizer.decode([998]) == ""


def changed(**parts):
    return json.dumps(json.loads(trained()) | parts)


def sentencepiece(**parts):
    """The file of the small SentencePiece tokenizer, with parts of it changed."""
    return json.dumps(json.loads(SENTENCEPIECE_JSON) | parts)


def prefixed(scheme):
    return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}


def without(character):
    """The file of a byte-level tokenizer whose vocabulary lacks a byte."""
    spec = json.loads(byte_tokenizer_json())
    del spec["model"]["vocab"][character]
    return json.dumps(spec)


WORD_LEVEL = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
PREFIX = "changes text"
ADDED = {"content": "<|one|>", "id": 300, "special": True}
REFUSED = {
    "Llama 2's prefix": (
        sentencepiece(
            normalizer={
                "type": "Sequence",
                "normalizers": [{"type": "Prepend", "prepend": "\u2581"}],
            }
        ),
        PREFIX,
    ),
    "Mistral's prefix": (sentencepiece(pre_tokenizer=prefixed("first")), PREFIX),
    "no bytes to fall back to": (
        sentencepiece(
            model={"type": "BPE", "vocab": {"a": 0}, "merges": [], "byte_fallback": True}
        ),
        "lacks tokens for 243 of the 243 bytes of UTF-8, such as 0x00",
    ),
    "no file": (None, "no tokenizer at .*tokenizer.json"),
    "no JSON": ("{", "is not JSON"),
    "JSON that is nested too deep": ("[" * 100_000, "is not JSON .*recursion depth"),
    "two control tokens of one id": (
        changed(added_tokens=[ADDED, ADDED | {"content": "<|other|>"}]),
        r"'<\|other\|>' and '<\|one\|>' have the same id, 300",
    ),
    "an id without end": (
        changed(added_tokens=[ADDED | {"id": 10**30}]), "has the id 1000.* expected 0 to"
    ),
    "a list": ("[]", "expected a JSON object, found list"),
    "something else": ("{}", "found the model None .* expected byte-level BPE"),
    "another model": (changed(model=WORD_LEVEL), "found the model WordLevel"),
    "another decoder": (changed(decoder={"type": "Fuse"}), "with the decoder Fuse"),
    "lower-casing": (changed(normalizer={"type": "Lowercase"}), "changes text"),
    "a prefix space": (
        changed(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True,
                               "trim_offsets": False, "use_regex": True}),
        "changes text",
    ),
    "a character that is no byte": (
        changed(model={"type": "BPE", "vocab": {"\u4e2d": 999}, "merges": []}),
        "is no byte",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_files_that_cannot_be_rendered_exactly_are_refused(what, tmp_path):
    text, message = REFUSED[what]
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(RendererError, match=message):
        Tokenizer.from_file(tmp_path)


def test_a_byte_that_no_token_writes_is_an_error_in_text_and_not_left_out():
    """SmolLM2's vocabulary lacks eight bytes; the tokenizers library drops them silently."""
    tokenizer = Tokenizer.from_json(without("\u0107"))
    assert tokenizer.decode(tokenizer.encode("a bell")) == "a bell"
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["a", text])):
        with pytest.raises(RendererError, match=r"U\+0007"):
            encode("a\x07bell")


def test_a_space_before_every_text_can_be_left_out_to_read_ids(tmp_path):
    spec = json.loads(sentencepiece_json())
    prefix = {"type": "Prepend", "prepend": "\u2581"}
    spec["normalizer"] = {"type": "Sequence", "normalizers": [prefix, spec["normalizer"]]}
    spec["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(RendererError, match="changes text"):
        Tokenizer.from_file(tmp_path)
    tokenizer = Tokenizer.from_file(tmp_path, has_prefix=False)
    assert tokenizer.decode(tokenizer.encode("two words")) == "two words"


def _replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def _in_turn(*parts):
    return {"type": "Sequence", "normalizers": list(parts)}


def _split(pattern):
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    level["trim_offsets"] = True
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {"type": "Sequence", "pretokenizers": [{**split, "invert": False}, level]}


TOO_LARGE, DAMAGED, EXPANDS = "expected 0 to 16777215", "found a damaged one", "times as long"
HOSTILE = {
    # changes of a whole file: the error
    "a vocabulary id": ({"model.vocab": {"ab": 2**31 - 2}}, TOO_LARGE),
    "a negative id": ({"model.vocab": {"ab": -1}}, TOO_LARGE),
    "a name as id": ({"model.vocab": {"ab": "7"}}, TOO_LARGE),
    "a fraction as id": ({"model.vocab": {"ab": 1.5}}, TOO_LARGE),
    "no id": ({"model.vocab": {"ab": None}}, TOO_LARGE),
    "an endless id": ({"model.vocab": {"ab": 10**40}}, TOO_LARGE),
    "an added id": ({"added_tokens": [{"content": "<x>", "id": 2**31 - 2}]}, TOO_LARGE),
    "an added name": ({"added_tokens": [{"content": "<x>", "id": "x"}]}, TOO_LARGE),
    "an added token without an id": ({"added_tokens": [{"content": "<x>"}]}, DAMAGED),
    "an added token without a name": ({"added_tokens": [{"content": 3, "id": 400}]}, DAMAGED),
    "added tokens that are none": ({"added_tokens": 3}, DAMAGED),
    "merges of nothing": ({"model.merges": [["q", "zzz"]]}, DAMAGED),
    "merges of one": ({"model.merges": [["q"]]}, DAMAGED),
    "a vocabulary as a list": ({"model": {"type": "BPE", "vocab": [], "merges": []}}, DAMAGED),
    "one character to many": ({"normalizer": _replace({"String": "a"}, "a" * 65)}, EXPANDS),
    "in steps": ({"normalizer": _in_turn(*[_replace({"String": "e"}, "eee")] * 9)}, EXPANDS),
    "nested": (
        {"normalizer": _in_turn(_in_turn(*[_replace({"String": "e"}, "e" * 9)] * 2))},
        EXPANDS,
    ),
    "nothing to many": ({"normalizer": _replace({"Regex": ""}, "b" * 64)}, EXPANDS),
    "before each text": ({"normalizer": {"type": "Prepend", "prepend": "a" * 65}}, EXPANDS),
    "a normalizer without parts": ({"normalizer": {"type": "Sequence"}}, DAMAGED),
    "a normalizer that is a list": ({"normalizer": [1]}, DAMAGED),
    "an open group": ({"pre_tokenizer": _split("((")}, DAMAGED),
    "an unknown class": ({"pre_tokenizer": _split(r"\p{Foo}")}, DAMAGED),
    "an open group in a normalizer": ({"normalizer": _replace({"Regex": "(?<"}, "b")}, DAMAGED),
    "an unknown step": ({"pre_tokenizer": {"type": "Nope"}}, DAMAGED),
    "a decoder that is a text": ({"decoder": "ByteLevel"}, DAMAGED),
    "a pattern of endless steps": ({"pre_tokenizer": _split(r"(?:a|aa)+!?$")}, "cannot encode"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line_at_once(what):
    changes, message = HOSTILE[what]
    spec = json.loads(byte_tokenizer_json())
    for name, value in changes.items():
        *into, key = name.split(".")
        part = spec[into[0]] if into else spec
        part[key] = {**part[key], **value} if name == "model.vocab" else value
    begun = time.process_time()
    with pytest.raises(RendererError, match=message) as caught:
        Tokenizer.from_json(json.dumps(spec)).encode("a" * 64 + "bc")
    assert time.process_time() - begun < 5 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "declared",
    [{"2147483646": {"content": "<x>"}}, {"x": {"content": "<x>"}}, {"400": {}}, {"400": 1}, [1]],
)
def test_hostile_tokens_of_the_config_are_refused_in_one_line(tmp_path, declared):
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    with pytest.raises(RendererError, match=f"{TOO_LARGE}|{DAMAGED}") as caught:
        Tokenizer.from_file(tmp_path)
    assert "\n" not in str(caught.value)
