"""Draws: exact against the definition of each filter, uniform where they claim to be."""

import numpy as np
import pytest
import torch
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engines.sampling import DrawRule, sample, stream_of, uniforms
from lockstep.ops.base import Ops

OPS = Ops()


def by_definition(logits, u, *, temperature, top_p=1.0, top_k=0):
    """(id, probability of it after the filters) of one row, in float64, token by token."""
    logits = np.asarray(logits, np.float64)
    probs = np.exp((logits - logits.max()) / temperature)
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if top_k:
        order = order[:top_k]
    total = sum(probs[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass >= top_p * total:
            break
        kept.append(i)
        mass += probs[i]
    is_filtered = top_k > 0 or top_p < 1
    at, below = 0.0, u * mass
    for i in kept if is_filtered else range(len(probs)):
        at += probs[i]
        if at > below:
            return i, probs[i] / mass
    raise AssertionError("u was not below 1")


@settings(max_examples=400 if PROOF else 60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    st.sampled_from([0, 1, 3, 10, 500]),
)
def test_a_draw_is_the_inverse_of_the_filtered_distribution(seed, temperature, top_p, top_k):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (6, 40)).astype(np.float32)
    u = rng.integers(0, 2**24, 6).astype(np.float32) / np.float32(2**24)
    filters = {"top_p": torch.full((6,), top_p), "top_k": torch.full((6,), top_k)}
    rule = DrawRule(temperature, top_p < 1 or top_k > 0, "sampled")
    ids, logprobs, _ = sample(torch.from_numpy(logits), torch.from_numpy(u), rule, OPS, **filters)
    for row in range(6):
        # A filter decides at a sum of probabilities, which float32 rounds: ask also beside it.
        wanted = {
            by_definition(logits[row], v, temperature=temperature, top_p=p, top_k=top_k)[0]
            for v in np.clip([u[row] - 1e-5, u[row], u[row] + 1e-5], 0, 1 - 1e-7)
            for p in (top_p, max(top_p - 1e-5, 0), min(top_p + 1e-5, 1))
        }
        assert int(ids[row]) in wanted
        _, prob = by_definition(
            logits[row], u[row], temperature=temperature, top_p=top_p, top_k=top_k
        )
        if len(wanted) == 1:
            assert abs(float(logprobs[row]) - np.log(prob)) < 1e-4


def test_rows_of_different_filters_do_not_disturb_each_other():
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2, (5, 30)).astype(np.float32))
    u = torch.from_numpy(rng.random(5).astype(np.float32))
    top_p = torch.tensor([1.0, 0.5, 0.9, 0.1, 1.0])
    top_k = torch.tensor([3, 0, 4, 0, 1])
    rule = DrawRule(0.8, True, "sampled")
    ids, logprobs, _ = sample(logits, u, rule, OPS, top_p=top_p, top_k=top_k)
    for i in range(5):
        alone = sample(
            logits[i : i + 1],
            u[i : i + 1],
            rule,
            OPS,
            top_p=top_p[i : i + 1],
            top_k=top_k[i : i + 1],
        )
        assert ids[i] == alone[0][0] and torch.allclose(logprobs[i], alone[1][0])
    assert ids[4] == logits[4].argmax() and logprobs[4] == 0


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((4, 10), -200.0)
    logits[:, 3] = 0.0
    u = torch.tensor([0.0, 2.0**-24, 0.5, 1 - 2.0**-24])
    for rule in (DrawRule(1.0, False, "tempered"), DrawRule(1.0, True, "sampled")):
        filters = {"top_p": torch.full((4,), 0.9), "top_k": torch.zeros(4, dtype=torch.int64)}
        ids, logprobs, _ = sample(logits, u, rule, OPS, **(filters if rule.is_filtered else {}))
        assert ids.tolist() == [3] * 4 and logprobs.abs().max() == 0


def test_greedy_takes_the_largest_logit_and_ignores_the_uniform():
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, 1.0]])
    ids, logprobs, _ = sample(logits, torch.rand(2), DrawRule(0.0, False, "tempered"), OPS)
    assert ids.tolist() == [1, 0]
    assert torch.allclose(logprobs, logits.log_softmax(-1).amax(-1))


def test_a_logit_that_is_no_number_shows_in_the_log_prob():
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, float("inf"), 1.0], [0.0, 1.0, 2.0]])
    for rule in (
        DrawRule(1.0, False, "tempered"),
        DrawRule(0.0, False, "tempered"),
        DrawRule(1.0, True, "sampled"),
    ):
        filters = {"top_p": torch.full((3,), 0.9), "top_k": torch.zeros(3, dtype=torch.int64)}
        ids, logprobs, _ = sample(
            logits, torch.full((3,), 0.5), rule, OPS, **(filters if rule.is_filtered else {})
        )
        assert ((ids >= 0) & (ids < 3)).all()
        assert logprobs.isfinite().tolist() == [False, False, True]


def test_draws_follow_the_distribution():
    """Chi-square over 40,000 draws of one seed each: 9 degrees of freedom, 99.99 % below 33.7."""
    probs = np.array([0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.03, 0.015, 0.005])
    n = 40_000
    streams = np.array([stream_of(seed) for seed in range(n)])
    u = uniforms(streams, np.full(n, 17))
    logits = torch.from_numpy(np.log(probs).astype(np.float32)).expand(n, -1)
    ids, _, _ = sample(logits, torch.from_numpy(u), DrawRule(1.0, False, "tempered"), OPS)
    counts = np.bincount(ids.numpy(), minlength=10)
    assert ((counts - n * probs) ** 2 / (n * probs)).sum() < 33.7


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_uniforms_are_uniform_and_independent_along(along):
    n = 50_000
    if along == "seeds":
        u = uniforms(np.array([stream_of(s) for s in range(n)]), np.full(n, 3))
    else:
        u = uniforms(np.full(n, stream_of(5)), np.arange(n))
    assert u.min() >= 0 and u.max() < 1
    # Kolmogorov-Smirnov: 99.99 % below 2.23 / sqrt(n). Serial correlation: 4 / sqrt(n).
    gap = np.abs(np.sort(u) - (np.arange(n) + 0.5) / n).max()
    assert gap < 2.23 / np.sqrt(n)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / np.sqrt(n)


def test_any_integer_is_a_seed():
    seeds = (0, -1, 2**64 - 1, 2**70 + 3, 3)
    streams = [int(stream_of(seed)) for seed in seeds]
    assert streams[1] == streams[2] and streams[3] == streams[4], "seeds count modulo 2^64"
    assert len(set(streams)) == 3
