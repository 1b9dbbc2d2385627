"""Renormalising over a recorded support, and the bias without it."""

import numpy as np
import pytest
import torch
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.correction.kl import support_bias
from lockstep.ops.base import Ops
from lockstep.ops.context import Support
from lockstep.types import Ragged


def kept_tokens(logits, support):
    kept = torch.zeros(logits.shape, dtype=torch.bool)
    for row, ids in zip(kept, support, strict=True):
        row[ids if len(ids) else slice(None)] = True
    return kept


def renormalized_logprobs(logits, ids, support, *, temperature=1.0):
    over = (logits / temperature).masked_fill(~kept_tokens(logits, support), -torch.inf)
    return torch.log_softmax(over, -1).gather(1, ids[:, None])[:, 0]


def kept_log_mass(logits, ids, support, *, temperature=1.0):
    whole = torch.log_softmax(logits / temperature, -1)
    return whole.masked_fill(~kept_tokens(logits, support), -torch.inf).logsumexp(-1).clamp(max=0.0)


@st.composite
def drawn_tokens(draw):
    """(logits [T, V] float32, ids [T], support): each id in its support, some not cut at all."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_tokens, vocab = draw(st.integers(1, 12)), draw(st.integers(1, 20))
    logits = torch.from_numpy(rng.normal(0, 3, (num_tokens, vocab)).astype(np.float32))
    rows, ids = [], []
    for _ in range(num_tokens):
        kept = rng.permutation(vocab)[: rng.integers(0, vocab + 1)]
        rows.append(kept)
        ids.append(int(rng.choice(kept)) if len(kept) else int(rng.integers(vocab)))
    return logits, torch.tensor(ids), Ragged.of(rows)


@settings(max_examples=1000 if PROOF else 60, deadline=None)
@given(drawn_tokens(), st.sampled_from([0.5, 1.0, 1.6]))
def test_the_log_prob_heads_values_and_gradient_are_these(drawn, temperature):
    logits, ids, support = drawn
    vocab = logits.shape[1]
    ours, hidden = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = renormalized_logprobs(ours, ids, support, temperature=temperature)
    # With the identity as weights, hidden states are logits.
    wanted, _ = Ops().log_probs(
        hidden, torch.eye(vocab), ids, temperature=temperature, support=Support.of(support)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    found.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(ours.grad, hidden.grad, rtol=1e-5, atol=1e-6)


@settings(max_examples=1000 if PROOF else 60, deadline=None)
@given(drawn_tokens(), st.sampled_from([0.5, 1.0, 1.6]))
def test_the_kept_mass_is_what_the_two_log_probs_differ_by(drawn, temperature):
    logits, ids, support = drawn
    logits = logits.double()
    whole = torch.log_softmax(logits / temperature, -1).gather(1, ids[:, None])[:, 0]
    over_support = renormalized_logprobs(logits, ids, support, temperature=temperature)
    log_mass = kept_log_mass(logits, ids, support, temperature=temperature)
    assert (log_mass <= 0).all()
    torch.testing.assert_close(over_support + log_mass, whole, rtol=0, atol=1e-12)
    assert float(support_bias(over_support, whole)) == pytest.approx(float(-log_mass.mean()))


def test_the_bias_by_hand():
    """Kept: half of the mass, a quarter of it, all of it; a fourth token was not truncated."""
    rollout = torch.tensor([-1.0, -2.0, -0.5, -9.0])
    trainer = rollout + torch.tensor([0.5, 0.25, 1.0, 0.1]).log()
    mask = torch.tensor([True, True, True, False])
    wanted = (np.log(2) + np.log(4)) / 3
    assert float(support_bias(rollout, trainer, mask)) == pytest.approx(wanted, rel=1e-6)


def test_tokens_that_are_no_number_and_empty_batches_do_not_reach_the_bias():
    rollout = torch.tensor([-1.0, float("nan"), -1.0])
    trainer = torch.tensor([-1.5, -1.0, float("-inf")])
    assert float(support_bias(rollout, trainer)) == 0.5
    assert float(support_bias(torch.empty(0), torch.empty(0))) == 0.0


def test_renormalising_has_no_gradient_towards_more_mass_for_what_was_kept():
    """With all advantages 1 the expected gradient of a policy is 0. That of the log-prob over the
    whole vocabulary is the gradient of log S; over the support it is 0 again."""
    logits = torch.tensor([[1.0, 0.5, 0.0, -0.5, 2.0]], dtype=torch.float64)
    kept = [0, 1, 4]
    support = Ragged.of([kept] * len(kept))
    rows, ids = logits.expand(len(kept), -1), torch.tensor(kept)
    q = renormalized_logprobs(rows, ids, support).exp()

    def expected_gradient(logprobs_of):
        leaf = logits.clone().requires_grad_()
        (q * logprobs_of(leaf.expand(len(kept), -1))).sum().backward()
        return leaf.grad

    over_support = expected_gradient(lambda x: renormalized_logprobs(x, ids, support))
    assert over_support.abs().max() < 1e-15
    whole = expected_gradient(lambda x: torch.log_softmax(x, -1).gather(1, ids[:, None])[:, 0])
    leaf = logits.clone().requires_grad_()
    kept_log_mass(leaf, ids[:1], support.take([0])).sum().backward()
    torch.testing.assert_close(whole, leaf.grad)
    assert (whole[0, kept] > 0).all()
