"""`check_dialogues`: every renderer keeps the invariants of tokens, and broken ones are told apart.
The full counts on real tokenizers: docs/proof/dialogues.py."""

import random

import pytest
from full_counts import PROOF
from random_dialogues import check_dialogues, hostile_text
from sentencepiece_tokenizers import sentencepiece_tokenizer

from lockstep.errors import RendererError
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig, HarmonyConfig, Llama3Config, MistralConfig
from lockstep.renderers.llama3 import LLAMA3_TOKENS
from lockstep.renderers.mistral import MISTRAL_TOKENS, V7_TOKENS
from lockstep.renderers.registry import make_renderer
from lockstep.testing.tokenizers import CHATML_TOKENS, byte_tokenizer

BYTES = byte_tokenizer()
QWEN25 = byte_tokenizer(control_tokens=CHATML_TOKENS[:2] + CHATML_TOKENS[4:6])
SENTENCEPIECE = sentencepiece_tokenizer(control_tokens=CHATML_TOKENS)
MADE = {
    "harmony": (HarmonyConfig(), BYTES),
    "harmony, thinking=drop": (HarmonyConfig(thinking="drop"), BYTES),
    "chatml": (ChatMLConfig(), BYTES),
    "chatml, thinking=drop": (ChatMLConfig(thinking="drop"), BYTES),
    "chatml, variant=qwen2.5": (ChatMLConfig(variant="qwen2.5"), QWEN25),
    "chatml on sentencepiece": (ChatMLConfig(), SENTENCEPIECE),
    "llama3": (Llama3Config(), byte_tokenizer(control_tokens=LLAMA3_TOKENS)),
    "mistral, v3": (MistralConfig(), byte_tokenizer(control_tokens=MISTRAL_TOKENS)),
    "mistral, v7": (MistralConfig(), byte_tokenizer(control_tokens=(*MISTRAL_TOKENS, *V7_TOKENS))),
}
NUM_DIALOGUES = 1000 if PROOF else 60


@pytest.mark.parametrize("kind", MADE)
def test_random_dialogues_keep_every_invariant(kind):
    counts = check_dialogues(make_renderer(*MADE[kind]), num_dialogues=NUM_DIALOGUES)
    assert counts["dialogues"] == NUM_DIALOGUES
    assert counts["trained_tokens"] == counts["sampled_tokens"] > counts["turns"]
    assert counts["turns"] > counts["cut_turns"] > 0
    assert (counts["forks"] > 0) == kind.endswith("drop")


def test_no_hostile_text_gives_a_control_token():
    for _, tokenizer in MADE.values():
        generator = random.Random(1)
        texts = [hostile_text(tokenizer, generator) for _ in range(NUM_DIALOGUES)]
        for ids in tokenizer.encode_batch(texts):
            assert not tokenizer.control_ids & set(ids)


class Injectable(ChatMLRenderer):
    """Takes the names of control tokens in what tools say for the tokens."""

    def extend(self, sampled_ids, messages):
        ids = super().extend(sampled_ids, messages)
        end = self.tokenizer.control_id("<|im_end|>")
        return [*([end] * sum("<|im_end|>" in message.content for message in messages)), *ids]


class Rewriting(ChatMLRenderer):
    """Writes a turn that was cut off once more."""

    def extend(self, sampled_ids, messages):
        again = [] if sampled_ids[-1] in self.stop_ids else self.tokenizer.encode("x") * 2
        return [*again, -1, *super().extend(sampled_ids, messages)]


class Raising(ChatMLRenderer):
    """Cannot read what a model writes."""

    def parse(self, sampled_ids):
        raise ValueError("half a character")


BROKEN = {
    Injectable: r"dialogue \d+ of seed 0: expected the control tokens \[.*\], found",
    Rewriting: r"dialogue \d+ of seed 0: failed: .*",
    Raising: r"dialogue 0 of seed 0: failed: renderer\.parse: ValueError: half a character",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_renderer_is_refused_and_the_dialogue_named(broken):
    with pytest.raises(RendererError, match=BROKEN[broken]):
        check_dialogues(broken(BYTES), num_dialogues=100)
