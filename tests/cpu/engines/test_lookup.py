"""Guessed tokens: the same tokens and the same bits as without, in fewer steps."""

import asyncio

import numpy as np
import pytest
from engine_models import ask, deltas_of, make_engine, make_model, prompt, request

from lockstep.engines.embedded import lookup
from lockstep.engines.embedded.lookup import following
from lockstep.errors import ConfigError
from lockstep.ops.invariant import InvariantOps

KINDS = ("qwen3", "gpt_oss", "latent")


def echoing(number):
    """A text in which each token has been followed by the same one: guesses are frequent."""
    return np.tile(prompt(7, number), 6)


@pytest.fixture
def told(monkeypatch):
    """told(texts): guesses come from these texts from now on, every fifth of their tokens wrong."""

    def tell(texts):
        def after(text, most):
            (whole,) = {
                t.tobytes(): t for t in texts if np.array_equal(t[: len(text)], text)
            }.values()
            found = whole[len(text) : len(text) + most].copy()
            found[(np.arange(len(found)) + len(text)) % 5 == 0] ^= 1
            return found

        monkeypatch.setattr(lookup, "following", after)

    return tell


def compare(requests, model, told=None, **settings):
    """Engines without and with guesses; asserts that they sample the same."""
    plain, guessing = (
        make_engine(model, **settings),
        make_engine(model, **settings, lookup_tokens=5),
    )
    wanted = ask(plain, *requests)
    if told is not None:
        pairs = zip(requests, wanted, strict=True)
        told([np.concatenate([asked.prompt_ids, reply.token_ids]) for asked, reply in pairs])
    found = ask(guessing, *requests)
    for a, b in zip(wanted, found, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert np.array_equal(a.logprobs.view(np.int32), b.logprobs.view(np.int32))
        assert (a.finish_reason, a.stop) == (b.finish_reason, b.stop)
    assert guessing.stats["sampled_tokens"] == plain.stats["sampled_tokens"]
    return plain, guessing


@pytest.mark.parametrize("resident_rows", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_replies_have_the_same_bits_in_fewer_steps(kind, resident_rows, told):
    model = make_model(kind)
    model.ops = InvariantOps()
    requests = [
        request(f"r{i}", prompt(20 + i, i), seed=i, max_tokens=60, temperature=t)
        for i, t in enumerate((0.0, 0.7, 1.0))
    ]
    plain, guessing = compare(requests, model, told, resident_rows=resident_rows)
    assert guessing.stats["guessed_tokens"] > 90
    assert guessing.stats["steps"] < 0.5 * plain.stats["steps"]


def test_replies_of_all_rules_have_the_same_bits(told):
    model = make_model("gpt_oss")
    model.ops = InvariantOps()
    rules = [
        {"temperature": 0.3, "top_k": 2},
        {"temperature": 0.2, "top_p": 0.5, "distribution": "sampled"},
        {"temperature": 0.2, "top_p": 0.5, "distribution": "sampled", "record_support": True},
        {"temperature": 0.0, "stop_ids": tuple(range(0, 60, 2))},
        {"temperature": 1.0},
    ]
    requests = [
        request(f"r{i}", prompt(9 + i, i), seed=i, max_tokens=50, **rules[i % len(rules)])
        for i in range(15)
    ]
    _, guessing = compare(requests, model, told, max_num_sequences=5)
    assert guessing.stats["guessed_tokens"] > 200


def test_a_greedy_reply_guesses_from_its_own_text():
    model = make_model("qwen3")
    model.ops = InvariantOps()
    asked = [request("r", echoing(1), max_tokens=60, temperature=0.0)]
    plain, guessing = compare(asked, model)
    assert guessing.stats["steps"] < plain.stats["steps"]


def test_a_preempted_request_and_the_next_turn_go_on_from_guessed_tokens():
    model = make_model("qwen3")
    model.ops = InvariantOps()
    requests = [
        request(f"r{i}", echoing(i), seed=i, max_tokens=70, temperature=0.0) for i in range(4)
    ]
    plain, guessing = compare(requests, model, max_num_sequences=4, kv_cache_tokens=208)
    assert guessing.stats["preemptions"] and guessing.stats["guessed_tokens"]
    path = np.concatenate([echoing(0), ask(guessing, requests[0])[0].token_ids, prompt(3)])
    wanted, found = (
        ask(engine, request("next", path, max_tokens=20, temperature=0.0))[0]
        for engine in (plain, guessing)
    )
    assert wanted.token_ids.tolist() == found.token_ids.tolist()
    assert np.array_equal(wanted.logprobs, found.logprobs)


def test_a_streamed_reply_comes_token_by_token():
    model = make_model("qwen3")
    asked = request("s", echoing(1), max_tokens=30, temperature=0.0, stream=True)
    engine = make_engine(model, lookup_tokens=4)
    deltas = asyncio.run(deltas_of(engine, asked))
    assert [len(delta.token_ids) for delta in deltas if delta.finish_reason is None] == [1] * 29
    assert engine.stats["guessed_tokens"]


def test_a_guess_is_what_followed_last():
    text = np.array([1, 2, 3, 9, 9, 1, 2, 3, 4, 5, 1, 2, 3], np.int32)
    assert following(text, 9).tolist() == [4, 5, 1, 2, 3]
    assert following(text[:-1], 9).tolist() == [], "5, 1, 2 is new"
    assert following(text[:3], 9).tolist() == []


def test_a_model_with_states_is_refused():
    with pytest.raises(ConfigError, match="lookup_tokens=3"):
        make_engine(make_model("hybrid"), lookup_tokens=3)
