"""KL to a reference as a loss: value and gradient in expectation, by adding up every outcome."""

import math

import pytest
import torch

from lockstep.correction import kl
from lockstep.errors import AlignmentError
from lockstep.objectives.losses import reference_kl


@pytest.fixture
def policies():
    """(logits of the policy, of the one that drew, of the reference): 7 outcomes, float64."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=g, dtype=torch.float64)
    old = logits + 0.4 * torch.randn(7, generator=g, dtype=torch.float64)
    return logits, old, torch.randn(7, generator=g, dtype=torch.float64)


def exact(logits, reference):
    """(KL(policy || reference), its gradient, that of KL(reference || policy)) in the logits."""
    leaf = logits.clone().requires_grad_()
    policy, other = leaf.log_softmax(-1), reference.log_softmax(-1)
    value = (policy.exp() * (policy - other)).sum()
    (gradient,) = torch.autograd.grad(value, leaf, retain_graph=True)
    (reverse,) = torch.autograd.grad((other.exp() * (other - policy)).sum(), leaf)
    return value.detach(), gradient, reverse


def expected(estimate, logits, drawn_by):
    """(mean, gradient of the mean) over tokens that `drawn_by` draws: every outcome by its
    probability, which is a constant as it is for tokens that were sampled."""
    leaf = logits.clone().requires_grad_()
    value = (drawn_by.softmax(-1) * estimate(leaf.log_softmax(-1))).sum()
    value.backward()
    return value.detach(), leaf.grad


def close(a, b):
    return torch.allclose(a, b, rtol=1e-12, atol=1e-14)  # float64, 7 terms of size 1


@pytest.mark.parametrize("is_on_policy", [True, False])
def test_the_unbiased_estimate_has_the_kls_value_and_gradient(policies, is_on_policy):
    logits, old, reference = policies
    drawn_by = logits if is_on_policy else old
    value, gradient, _ = exact(logits, reference)
    found = expected(
        lambda lp: reference_kl(
            lp, reference.log_softmax(-1), old_logprobs=drawn_by.log_softmax(-1)
        ),
        logits,
        drawn_by,
    )
    assert close(found[0], value) and close(found[1], gradient)


def test_naive_k3_has_the_kls_value_and_the_gradient_of_the_reverse_kl(policies):
    logits, _, reference = policies
    value, gradient, reverse = exact(logits, reference)
    found = expected(
        lambda lp: reference_kl(lp, reference.log_softmax(-1), estimator="k3"), logits, logits
    )
    assert close(found[0], value) and close(found[1], reverse)
    assert (found[1] - gradient).norm() > 0.3 * gradient.norm()  # biased, and not by a little


def test_k2_has_the_kls_gradient_and_another_value(policies):
    logits, _, reference = policies
    value, gradient, _ = exact(logits, reference)
    found = expected(
        lambda lp: reference_kl(lp, reference.log_softmax(-1), estimator="k2"), logits, logits
    )
    assert close(found[1], gradient) and not torch.isclose(found[0], value, rtol=0.1)


def test_k1_as_a_loss_has_the_kls_value_and_no_gradient(policies):
    logits, _, reference = policies
    value, _, _ = exact(logits, reference)
    found = expected(lambda lp: kl.k1(reference.log_softmax(-1) - lp), logits, logits)
    assert close(found[0], value) and found[1].abs().max() < 1e-15


@pytest.mark.parametrize("estimator", ["unbiased", "k2", "k3"])
def test_gradients_equal_finite_differences_in_float64(estimator):
    g = torch.Generator().manual_seed(1)
    logprobs, old, reference = -3 * torch.rand(3, 50, generator=g, dtype=torch.float64)
    reference[:5] = logprobs[:5] + 1e-5  # on the series' side of k3

    def at(x):
        return reference_kl(x, reference, estimator=estimator, old_logprobs=old)

    leaf = logprobs.clone().requires_grad_()
    at(leaf).sum().backward()
    step = 1e-6  # h^2 / 6 of a third derivative of some hundred, and 2^-53 / h of a value of 20
    numeric = (at(logprobs + step) - at(logprobs - step)) / (2 * step)
    torch.testing.assert_close(leaf.grad, numeric, rtol=0, atol=5e-9)


@pytest.mark.parametrize("estimator", ["unbiased", "k2", "k3"])
@pytest.mark.parametrize("filler", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_outside_the_mask_reaches_neither_value_nor_gradient(estimator, filler):
    mask = torch.tensor([[True, False, True], [False, False, True]])
    given = [-torch.rand(2, 3, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    found = []
    for fill in (-1.0, filler):
        logprobs, old, reference = (torch.where(mask, x, fill) for x in given)
        leaf = logprobs.requires_grad_()
        out = reference_kl(leaf, reference, estimator=estimator, old_logprobs=old, mask=mask)
        out.sum().backward()
        found.append((out, leaf.grad))
        assert not out[~mask].any() and not leaf.grad[~mask].any()
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_log_probs_without_any_bound_stay_finite():
    logprobs = torch.tensor([0.0, -900.0, 0.0], requires_grad=True)
    old, reference = torch.tensor([-900.0, 0.0, 0.0]), torch.tensor([-900.0, 0.0, 0.0])
    for estimator in ("unbiased", "k2", "k3"):
        out = reference_kl(logprobs, reference, estimator=estimator, old_logprobs=old)
        (gradient,) = torch.autograd.grad(out.sum(), logprobs)
        assert torch.isfinite(out).all() and torch.isfinite(gradient).all()


def test_half_precision_is_widened_before_anything_is_subtracted():
    given = [x.bfloat16() for x in -torch.rand(3, 9, generator=torch.Generator().manual_seed(0))]
    wide = [x.float() for x in given]
    for estimator in ("unbiased", "k2", "k3"):
        found, expected = (
            reference_kl(x[0], x[1], estimator=estimator, old_logprobs=x[2]) for x in (given, wide)
        )
        assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_columns_that_differ_or_lack_are_refused():
    good = torch.zeros(3)
    with pytest.raises(AlignmentError, match=r"\[3\].*old_logprobs \[2\]"):
        reference_kl(good, good, old_logprobs=torch.zeros(2))
    with pytest.raises(AlignmentError, match=r"\[3\].*\[2\]"):
        reference_kl(good, good, old_logprobs=good, mask=torch.ones(2))
    with pytest.raises(AlignmentError, match=r"\[3\].*reference_logprobs \[2\]"):
        reference_kl(good, torch.zeros(2), estimator="k3")
    with pytest.raises(AlignmentError, match="old_logprobs"):
        reference_kl(good, good)
