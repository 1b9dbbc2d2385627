"""States of linear attention in the engine: what is reused, what is kept, and what makes room."""

import asyncio

import numpy as np
import pytest
from engine_models import ask, make_engine, make_model, packed_logprobs, prompt, request

from lockstep.ops.contract import CHUNK


def replies_of(engine, path, turns, *, seed=0, new=5):
    """[(reply, whole path before it)] of turns that each add `new` ids of the environment."""
    out = []
    for turn in range(turns):
        delta = ask(engine, request(f"{seed}/{turn}", path, seed=seed + turn, max_tokens=30))[0]
        out.append((delta, path))
        path = np.concatenate([path, delta.token_ids, prompt(new, 100 + turn)])
    return out


@pytest.mark.parametrize("page_size", [16, 48, 128])
def test_a_turn_goes_on_from_the_last_border_and_gives_the_same_bits(page_size):
    model = make_model("hybrid", max_positions=512)
    found = replies_of(make_engine(model, page_size=page_size), prompt(70), 5)
    plain = replies_of(make_engine(model, prefix_cache=False), prompt(70), 5)
    for (delta, path), (other, _) in zip(found, plain, strict=True):
        assert delta.token_ids.tolist() == other.token_ids.tolist()
        assert delta.logprobs.tolist() == other.logprobs.tolist()
        wanted = packed_logprobs(model, [*path, *delta.token_ids])[len(path) :]
        np.testing.assert_allclose(delta.logprobs, wanted, atol=1e-6)
    # A reply's last id was never fed, and five of the environment follow.
    borders = [0] + [(len(path) - 6) // CHUNK * CHUNK for _, path in found[1:]]
    assert [delta.num_cached_tokens for delta, _ in found] == borders
    assert all(delta.num_cached_tokens == 0 for delta, _ in plain)


@pytest.mark.parametrize(("length", "border"), [(150, 128), (128, 64), (129, 128), (64, 0)])
def test_samples_of_one_prompt_share_its_last_border_before_its_last_token(length, border):
    engine = make_engine(make_model("hybrid"))
    ids = prompt(length)
    replies = ask(engine, *(request(f"s{i}", ids, seed=i) for i in range(6)))
    assert [d.num_cached_tokens for d in replies] == [0] + [border] * 5
    assert engine.stats["prefilled_tokens"] == length + 5 * (length - border)


def test_a_branch_goes_on_from_the_border_before_it():
    engine = make_engine(make_model("hybrid", max_positions=512))
    ids = prompt(100)
    ask(engine, request("a", ids, max_tokens=60))
    branch = np.concatenate([ids[:90], prompt(30, 7)])
    assert ask(engine, request("b", branch))[0].num_cached_tokens == 64


def test_the_least_recently_used_state_makes_room():
    engine = make_engine(make_model("hybrid"), max_num_sequences=2)  # as many states are kept
    first, second, third = (prompt(100, seed) for seed in (1, 2, 3))
    for name, ids in (("a", first), ("b", second), ("a again", first), ("c", third)):
        cached = ask(engine, request(name, ids, max_tokens=2))[0].num_cached_tokens
        assert cached == (64 if name == "a again" else 0)
    assert ask(engine, request("d", first, max_tokens=2))[0].num_cached_tokens == 64
    assert ask(engine, request("e", second, max_tokens=2))[0].num_cached_tokens == 0


def test_new_weights_drop_every_state():
    engine = make_engine(make_model("hybrid"))
    ask(engine, request("a", prompt(100)))
    asyncio.run(engine.load_weights(None, version=1))
    assert ask(engine, request("b", prompt(100)))[0].num_cached_tokens == 0


def test_a_state_is_read_before_its_last_page_is_taken():
    """A request whose border lies inside a page copies it, and may take that very page."""
    model = make_model("hybrid")
    engine = make_engine(model, page_size=48, kv_cache_tokens=48 * 3, max_num_sequences=1)
    path = prompt(66)
    ask(engine, request("a", path, max_tokens=10))
    longer = np.concatenate([path, prompt(60, 9)])  # all three pages, of which two are cached
    found = ask(engine, request("b", longer, max_tokens=5))[0]
    assert found.num_cached_tokens == CHUNK
    other = ask(make_engine(model), request("b", longer, max_tokens=5))[0]
    assert found.token_ids.tolist() == other.token_ids.tolist()
    assert found.logprobs.tolist() == other.logprobs.tolist()
