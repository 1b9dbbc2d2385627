"""The page trie: what is reused is what was computed; no page is lost, or shared by mistake."""

import resource
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.kv_cache import PagedCache


def make_cache(num_pages=8, page_size=4, is_caching=True, shape=(1, 1, 1), dtype=torch.float32):
    layers, heads, width = shape
    model = SimpleNamespace(
        attention_layers=range(layers), num_kv_heads=heads, key_dim=width, linear=None, latent=None,
        cached_per_token=2 * layers * heads * width, cached_per_sequence=lambda item: 0,
    )  # fmt: skip
    sizes = {"kv_cache_tokens": num_pages * page_size, "page_size": page_size}
    config = EmbeddedConfig(**sizes, prefix_cache=is_caching)
    return PagedCache(model, config, like=torch.empty(0, dtype=dtype))


class Store:
    """Writes ids where keys would stand, so that what a lease holds can be read back."""

    def __init__(self, cache):
        self.cache = cache

    def places(self, lease, n):
        at = np.arange(n)
        return np.array(lease.pages, np.int64)[
            at // self.cache.page_size
        ], at % self.cache.page_size

    def write(self, lease, ids, start, stop):
        pages, offsets = self.places(lease, stop)
        self.flat()[pages[start:], offsets[start:]] = torch.from_numpy(
            ids[start:stop].astype(np.float32)
        )

    def read(self, lease, n):
        pages, offsets = self.places(lease, n)
        return self.flat()[pages, offsets].numpy().astype(np.int32)

    def flat(self):
        return self.cache.keys.flatten()[: self.cache.keys.numel()].view(
            self.cache.num_pages + 1, self.cache.page_size
        )


def run(cache, ids, *, reuse=None):
    """One request from start to end; returns how much was cached."""
    store = Store(cache)
    lease = cache.open(ids, reuse=len(ids) - 1 if reuse is None else reuse)
    cache.run_copies()
    assert (store.read(lease, lease.num_cached) == ids[: lease.num_cached]).all()
    store.write(lease, ids, lease.num_cached, len(ids))
    cache.close(lease, ids)
    return lease.num_cached


def ids_of(text):
    return np.array([ord(c) for c in text], np.int32)


def test_a_path_that_goes_on_is_reused_to_the_token():
    cache = make_cache()
    assert run(cache, ids_of("abcdef")) == 0
    assert run(cache, ids_of("abcdefgh")) == 6
    assert run(cache, ids_of("abcdefghij")) == 8
    assert run(cache, ids_of("abcdefghij")) == 9, "one id is left, to give logits"
    assert cache.num_available == cache.num_pages


def test_a_branch_copies_the_page_where_it_parts():
    cache = make_cache()
    run(cache, ids_of("abcdefg"))
    assert run(cache, ids_of("abcdexy")) == 5
    assert run(cache, ids_of("abcdefgz")) == 7, "the first path is still whole"
    assert run(cache, ids_of("abcdexyz")) == 7


def test_a_page_in_use_is_not_written_by_another_request():
    cache, ids = make_cache(), ids_of("abcde")
    run(cache, ids)
    first = cache.open(ids_of("abcdefg"), reuse=6)
    second = cache.open(ids_of("abcdexy"), reuse=6)
    assert first.num_cached == second.num_cached == 5
    assert first.pages[0] == second.pages[0] and first.pages[1] != second.pages[1]


def test_the_least_recently_used_path_is_given_up_first():
    cache = make_cache(num_pages=4)
    run(cache, ids_of("aaaaaa"))
    run(cache, ids_of("bbbbbb"))
    run(cache, ids_of("aaaaaaa"))
    run(cache, ids_of("cccccc"))
    assert cache.num_known(ids_of("aaaaaaa")) == 7
    assert cache.num_known(ids_of("bbbbbb")) == 0


def test_what_does_not_fit_changes_nothing():
    cache = make_cache(num_pages=3)
    held = cache.open(ids_of("abcdefgh"), reuse=7)
    run(cache, ids_of("xyz"))
    assert cache.open(ids_of("xyzxyzxyz"), reuse=8) is None
    assert cache.num_known(ids_of("xyz")) == 3 and cache.num_available == 1
    cache.close(held, ids_of("abcdefgh"))
    assert cache.num_available == 3


def test_pages_of_a_forgotten_cache_are_not_shared_and_not_lost():
    cache = make_cache()
    run(cache, ids_of("abcdef"))
    held = cache.open(ids_of("abcdefgh"), reuse=7)
    other = cache.open(ids_of("abcdxxxx"), reuse=7)
    cache.forget()
    assert cache.num_known(ids_of("abcdefgh")) == 0
    cache.close(held, ids_of("abcdefgh"))
    assert cache.num_known(ids_of("abcdefgh")) == 0
    cache.close(other, ids_of("abcdxxxx"))
    assert cache.num_available == cache.num_pages == len(set(cache._free))


@settings(max_examples=500 if PROOF else 60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 4, 16]), st.booleans())
def test_any_history_reuses_what_was_computed_and_keeps_every_page(seed, page_size, is_caching):
    """Random requests over two letters, open at once, growing, ending, forgotten."""
    rng = np.random.default_rng(seed)
    cache = make_cache(num_pages=12, page_size=page_size, is_caching=is_caching)
    store, live = Store(cache), []
    for _ in range(60):
        action = rng.integers(10)
        if action < 5:
            ids = rng.integers(1, 3, rng.integers(1, 12)).astype(np.int32)
            lease = cache.open(ids, reuse=len(ids) - 1)
            if lease is not None:
                cache.run_copies()
                assert lease.num_cached < len(ids)
                store.write(lease, ids, lease.num_cached, len(ids))
                cache.commit(lease, ids)
                live.append([lease, ids])
        elif live and action < 7:
            entry = live[rng.integers(len(live))]
            lease, ids = entry
            if len(ids) < len(lease.pages) * page_size or cache.grow(lease) is not None:
                entry[1] = np.append(ids, np.int32(rng.integers(1, 3)))
                store.write(lease, entry[1], len(ids), len(ids) + 1)
        elif live and action < 9:
            lease, ids = live.pop(rng.integers(len(live)))
            cache.close(lease, ids, keep=bool(rng.integers(4)))
        elif action == 9 and rng.random() < 0.2:
            cache.forget()
        for lease, ids in live:
            assert (store.read(lease, len(ids)) == ids).all()
        held = {page for lease, _ in live for page in lease.pages}
        idle = {node.page for node in cache._idle}
        free = set(cache._free)
        assert len(free) == len(cache._free) and not free & idle and not free & held
        assert 0 not in free | idle | held
    for lease, ids in live:
        cache.close(lease, ids)
    assert cache.num_available == cache.num_pages
    if not is_caching:
        assert not cache._below
    # Every page in the trie holds what it is found under.
    for nodes in cache._below.values():
        for node in nodes:
            known = cache._tokens[node.page, : node.length]
            assert (store.flat()[node.page, : node.length].numpy() == known).all()


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_takes_the_memory_of_the_tokens_that_it_has_held(dtype):
    before = resident_bytes()
    cache = make_cache(16_384, 16, shape=(4, 4, 64), dtype=dtype)
    size = 2 * cache.keys.nbytes
    assert cache.keys.dtype == dtype and cache.keys.data_ptr() % 64 == 0
    lease = cache.open(np.arange(64, dtype=np.int32), reuse=0)
    assert not cache.keys[:, :, lease.pages].any() and not cache.values[:, :, lease.pages].any()
    cache.keys[:, :, lease.pages] = 1.0
    assert resident_bytes() - before < size / 4
