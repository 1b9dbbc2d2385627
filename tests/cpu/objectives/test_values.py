"""The loss of values and what they explain: formulas, masks, where the clip stops a gradient."""

import math

import pytest
import torch

from lockstep.correction.layout import Layout
from lockstep.errors import AlignmentError
from lockstep.objectives.losses import explained_variance, value_loss


def batch(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_without_a_clip_it_is_half_the_squared_error():
    values, returns = batch(2, 5).requires_grad_(), batch(2, 5, seed=1)
    out = value_loss(values, torch.full((2, 5), math.nan), returns)
    out.loss.sum().backward()
    torch.testing.assert_close(out.loss, 0.5 * (values - returns) ** 2)
    torch.testing.assert_close(values.grad, (values - returns).detach())
    assert not out.mean["clip_fraction"].any()


def test_a_value_that_went_beyond_the_clip_towards_its_return_learns_no_more():
    """From 0, with clip 0.5: one inside, one beyond on the way, one that passed, one that went the
    other way; only the last may come back."""
    values = torch.tensor([0.4, 0.7, 0.7, -0.7], requires_grad=True)
    out = value_loss(values, torch.zeros(4), torch.tensor([1.0, 1.0, 0.45, 1.0]), clip=0.5)
    out.loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([-0.6, 0.0, 0.25, -1.7])
    assert out.mean["clip_fraction"].tolist() == [False, True, False, False]
    assert out.loss.tolist() == pytest.approx([0.18, 0.125, 0.03125, 1.445])


def test_what_is_masked_adds_nothing_whatever_stands_there():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    values = torch.where(mask, batch(2, 3), math.nan).requires_grad_()
    old, returns = (torch.where(mask, batch(2, 3, seed=i), math.nan) for i in (1, 2))
    out = value_loss(values, old, returns, clip=0.2, mask=mask)
    out.loss.sum().backward()
    assert (out.loss[~mask] == 0).all() and (values.grad[~mask] == 0).all()
    flat = value_loss(values[mask], old[mask], returns[mask], clip=0.2)
    assert torch.equal(out.loss[mask], flat.loss)


def test_explained_variance_is_1_for_the_returns_0_for_their_mean_and_below_for_noise():
    returns = batch(1, 6)
    layout = Layout.padded(torch.ones(1, 6, dtype=torch.bool))
    assert explained_variance(returns + 3.0, returns, layout) == pytest.approx(1.0)
    assert explained_variance(0 * returns + 3.0, returns, layout) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, layout) == pytest.approx(-3.0)
    assert explained_variance(returns, 0 * returns, layout) is None
    masked = Layout.padded(torch.tensor([[True, True, True, False, False, False]]))
    values = torch.where(masked.mask, returns, math.nan)
    assert explained_variance(values, values, masked) == 1.0


def test_bad_input_is_refused():
    three = torch.zeros(3)
    with pytest.raises(AlignmentError, match=r"\[3\].*\[2\]"):
        value_loss(three, three, torch.zeros(2))
