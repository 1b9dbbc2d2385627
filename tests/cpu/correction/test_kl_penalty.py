"""The two forms of the KL penalty: which distribution each moves, and where to."""

import pytest
import torch
from torch.testing import assert_close

from lockstep.correction import kl
from lockstep.objectives.losses import reference_kl

NUM_TOKENS = 12
CLIPS = [None, 1.0]


def divergence(left, right):
    """KL of two distributions, given by their log-probs."""
    return (left.exp() * (left - right)).sum()


@pytest.fixture
def sides():
    """(logits of the sampler, of the trainer), float64; KL(sampler || trainer) is 0.03 nats."""
    g = torch.Generator().manual_seed(0)
    sampler = torch.randn(NUM_TOKENS, generator=g, dtype=torch.float64)
    return sampler, sampler + 0.25 * torch.randn(NUM_TOKENS, generator=g, dtype=torch.float64)


def mean_gradient(loss, sampler, trainer):
    """Gradient in the trainer's logits, in expectation over the sampler's tokens: every one by its
    probability, which is a constant as it is for tokens that were drawn."""
    leaf = trainer.clone().requires_grad_()
    rollout = sampler.log_softmax(-1)
    (rollout.exp() * loss(leaf.log_softmax(-1), rollout)).sum().backward()
    return leaf.grad


def exact_gradient(value, logits):
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(leaf.log_softmax(-1)), leaf)
    return gradient


# float64, 12 terms of size 1
CLOSE = {"rtol": 1e-12, "atol": 1e-14}


def test_the_penalty_in_the_loss_has_the_gradient_of_the_kl_to_the_trainer(sides):
    sampler, trainer = sides
    found = mean_gradient(lambda p, q: kl.pull(p, q, coef=0.3), sampler, trainer)
    rollout = sampler.log_softmax(-1)
    expected = exact_gradient(lambda p: 0.3 * divergence(rollout, p), trainer)
    assert_close(found, expected, **CLOSE)
    assert found.abs().max() > 0.001
    assert_close(mean_gradient(lambda p, q: -0.3 * p, sampler, trainer), expected, **CLOSE)


def test_the_other_direction_has_its_gradient_with_importance_weights(sides):
    sampler, trainer = sides
    rollout = sampler.log_softmax(-1)
    found = mean_gradient(lambda p, q: reference_kl(p, q, old_logprobs=q), sampler, trainer)
    assert_close(found, exact_gradient(lambda p: divergence(p, rollout), trainer), **CLOSE)


def test_the_penalty_in_the_advantages_is_the_gradient_of_the_kl_in_the_sampler(sides):
    sampler, trainer = sides
    logprobs = trainer.log_softmax(-1)
    leaf = sampler.clone().requires_grad_()
    rollout = leaf.log_softmax(-1)
    (rollout.detach().exp() * -kl.penalty(logprobs, rollout, coef=1.0) * rollout).sum().backward()
    assert_close(leaf.grad, exact_gradient(lambda q: divergence(q, logprobs), sampler), **CLOSE)


def test_at_equal_policies_no_single_token_pulls(sides):
    sampler, _ = sides
    leaf = sampler.log_softmax(-1).requires_grad_()
    kl.pull(leaf, sampler.log_softmax(-1), coef=1.0).sum().backward()
    assert not leaf.grad.any()


@pytest.mark.parametrize("clip", CLIPS)
def test_with_a_fixed_sampler_the_loss_pulls_back_and_the_advantages_push_away(sides, clip):
    """Some hundred steps by the penalty alone, of tokens that the sampler draws."""
    sampler, trainer = sides
    rollout = sampler.log_softmax(-1)
    before = divergence(rollout, trainer.log_softmax(-1))

    def after(loss):
        g, leaf = torch.Generator().manual_seed(0), trainer.clone().requires_grad_()
        for _ in range(300):
            drawn = torch.multinomial(rollout.exp(), 64, replacement=True, generator=g)
            found = loss(leaf.log_softmax(-1)[drawn], rollout[drawn]).mean()
            (gradient,) = torch.autograd.grad(found, leaf)
            leaf = (leaf - gradient).detach().requires_grad_()
        return divergence(rollout, leaf.detach().log_softmax(-1))

    assert after(lambda p, q: kl.pull(p, q, coef=1.0, clip=clip)) < before / 50
    assert after(lambda p, q: -kl.penalty(p, q, coef=1.0, clip=clip) * p) > 50 * before


def test_a_clip_bounds_the_pull_of_a_token_and_never_ends_it():
    rollout = torch.tensor([-9.0, -1.0, -2.0])
    logprobs = torch.tensor([-1.0, -9.0, -1.5], requires_grad=True)  # d 8, -8, 0.5
    loss = kl.pull(logprobs, rollout, coef=1.0, clip=1.0)
    loss.sum().backward()
    clipped = torch.tensor([1.0, -1.0, 0.5])
    assert_close(logprobs.grad, torch.expm1(clipped))
    assert_close(loss.detach(), kl.k3(clipped))
