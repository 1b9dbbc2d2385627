"""The assertions for tests of any trainer: silent on what is sound, and clear about what is not."""

import doctest

import numpy as np
import pytest
import torch

from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig
from lockstep.testing import (
    assert_aligned,
    assert_incremental,
    assert_physical,
    assert_prefix,
    assert_token_exact,
    assertions,
)
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message

RNG = np.random.default_rng(0)
TRUE = -RNG.exponential(1.0, (6, 40))


def test_the_examples_in_the_docstrings_hold():
    found = doctest.testmod(assertions, optionflags=doctest.ELLIPSIS)
    assert found.attempted and not found.failed


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_sound_rows_pass_as_lists_arrays_and_tensors(kind):
    ids, mask = [5, 6, 7, 8, 9], [False, True, True, False, True]
    assert_token_exact(kind(ids), [kind([6, 7]), kind([9])], loss_mask=kind(mask))
    assert_aligned(kind(TRUE[0].tolist()), kind((TRUE[0] + 1e-3).tolist()))
    assert_aligned([kind(row.tolist()) for row in TRUE], [kind(row.tolist()) for row in TRUE])


def test_tensors_of_sixteen_bits_with_a_gradient_are_read():
    assert_aligned(TRUE, torch.tensor(TRUE, dtype=torch.bfloat16, requires_grad=True))


def test_a_turn_that_was_encoded_again_is_shown_with_both_ids():
    tokenizer = byte_tokenizer(merges=[("a", "b")])
    merged = tokenizer.encode("ab")
    with pytest.raises(AssertionError, match=r"id 98 \('b'\)"):
        assert_token_exact(
            [1, *b"xa", *merged, 2], [list(b"xab")], tokenizer=tokenizer, name="sample 17"
        )


def test_a_lost_end_and_a_trained_observation_are_named():
    with pytest.raises(AssertionError, match=r"\b2 of 3.*id 9\b"):
        assert_token_exact([1, 7, 8], [[7, 8, 9]])
    with pytest.raises(AssertionError, match=r"position 0\b"):
        assert_token_exact([1, 7, 8], [[7, 8]], loss_mask=[1, 1, 1])
    with pytest.raises(AssertionError, match=r"position 2\b"):
        assert_token_exact([1, 7, 8], [[7, 8]], loss_mask=[0, 1, 0])
    with pytest.raises(AssertionError, match=r"\b3\b.*\b2\b"):
        assert_token_exact([1, 7, 8], [[7, 8]], loss_mask=[0, 1])


def test_ids_that_are_no_list_of_a_row_are_refused():
    for row, turns in (([1, 7, 8], [7, 8]), ([[1, 7], [7, 8]], [[7, 8]]), ("178", ["78"])):
        with pytest.raises(AssertionError, match="expected a list of ids, of one row or turn; fou"):
            assert_token_exact(row, turns)


def test_shifted_logprobs_say_by_how_much():
    with pytest.raises(AssertionError, match=r"(?s)moved.*-1.*position 39"):
        assert_aligned(np.roll(TRUE, 1, axis=1), TRUE)


def test_fillers_and_nan_are_named():
    filled = TRUE.copy()
    filled[:, :4] = 0.0
    with pytest.raises(AssertionError, match=r"0\.0"):
        assert_aligned(filled, TRUE)
    filled = TRUE.copy()
    filled[:, 5:9] = 0.0  # inside of the trained tokens: nobody sampled these
    with pytest.raises(AssertionError, match=r"sample.*\b0\b"):
        assert_aligned(filled, TRUE)
    filled[:, 5:9] = np.nan
    with pytest.raises(AssertionError, match="not finite"):
        assert_aligned(filled, TRUE)


def test_a_gap_that_no_offset_explains_shows_its_worst_token():
    with pytest.raises(AssertionError, match=r"\d+, id 7\b"):
        assert_aligned(
            TRUE,
            np.minimum(TRUE + 0.3 * RNG.standard_normal(TRUE.shape), 0),
            row_ids=[[7] * 40] * 6,
        )


def test_other_lengths_and_no_tokens_are_said():
    with pytest.raises(AssertionError, match=r"40.*39"):
        assert_aligned(TRUE[0], TRUE[0][1:])
    with pytest.raises(AssertionError, match="both sides"):
        assert_aligned(TRUE[0], TRUE[0], np.zeros(40, bool))


def test_a_prefix_is_held_against_what_follows():
    with pytest.raises(AssertionError, match=r"\b1 of 2.*id 2\b.*position 1\b"):
        assert_prefix([1, 2], [1, 3, 4])


def test_a_template_that_drops_thinking_is_not_incremental():
    dialogue = [
        Message(role="user", content="one"),
        Message(role="assistant", content="1", thinking="so"),
        Message(role="user", content="two"),
        Message(role="assistant", content="2"),
        Message(role="user", content="three"),
        Message(role="assistant", content="3"),
    ]
    tokenizer = byte_tokenizer()
    assert_incremental(ChatMLRenderer(tokenizer, ChatMLConfig(has_empty_thinking=False)), dialogue)
    with pytest.raises(AssertionError, match="reply 1"):
        assert_incremental(ChatMLRenderer(tokenizer, ChatMLConfig(thinking="drop")), dialogue)
    with pytest.raises(AssertionError, match="two replies"):
        assert_incremental(ChatMLRenderer(tokenizer), dialogue[:2])


def test_a_tokenizer_of_transformers_is_asked_through_its_template():
    class Template:
        def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize):
            assert tokenize and add_generation_prompt == (conversation[-1]["role"] == "user")
            return {"input_ids": [len(m["content"]) for m in conversation]}

    assert_incremental(
        Template(), [{"role": role, "content": "a"} for role in ("user", "assistant") * 2]
    )


def test_statistics_by_names_that_nobody_knows_are_not_passed_over():
    with pytest.raises(AssertionError, match="my/kl"):
        assert_physical([{"my/kl": 2.0}] * 40)
    with pytest.raises(AssertionError, match="Found: none"):
        assert_physical([])
    assert_physical({"mismatch/k1": 0.02})
    with pytest.raises(AssertionError, match="nearly all tokens are clipped"):
        assert_physical([{"actor/ppo_kl": 2, "actor/pg_clipfrac": 0.99}] * 40)


@pytest.mark.parametrize("name", ["mismatch/k2", "kl_v2", "optim/kl_sample_train_v2"])
def test_rows_of_other_ids_are_refused_by_their_k2(name):
    """Re-encoded rows have a k2 of 12 to 69; the noisiest mixtures that learn stay below 0.1."""
    assert_physical([{name: 0.1, "mismatch/k1": 0.02}] * 40)
    with pytest.raises(AssertionError, match="k2 is beyond any two kernels"):
        assert_physical([{name: 12.0, "mismatch/k1": 3.0}] * 5)


def test_rows_of_other_ids_are_refused_by_their_perplexity():
    with pytest.raises(AssertionError, match="the perplexity is a guess's"):
        assert_physical([{"rollout_corr/training_ppl": 55_000.0}] * 5)
    assert_physical([{"rollout_corr/training_ppl": 12.0}] * 5)


@pytest.mark.parametrize(
    "sign", [{"approx_kl": 0.8}, {"clipfrac": 0.4}, {"losses/clipfrac": 0.4}, {"kl_v2": 0.5}]
)
def test_a_reward_that_does_not_rise_needs_no_equal_means(sign):
    noise = np.random.default_rng(0).normal(0, 0.05, 24)
    flat = [{**sign, "reward": 0.1 + float(each)} for each in noise]
    with pytest.raises(AssertionError, match="the mean reward does not rise in 20 steps"):
        assert_physical(flat)
    assert_physical([{**row, "reward": row["reward"] + 0.05 * i} for i, row in enumerate(flat)])
    calm = dict.fromkeys(sign, 0.01)
    assert_physical([{**row, **calm} for row in flat])  # a task may be too hard


def test_statistics_that_cannot_be_are_named():
    assert_physical([{"step": 0, "mismatch/k3": 0.01, "mismatch/k2": 0.01}])
    with pytest.raises(AssertionError, match="k3"):
        assert_physical([{"step": s, "mismatch/k3": -0.5, "mismatch/k2": 0.01} for s in range(5)])
