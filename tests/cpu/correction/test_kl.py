"""The estimators of KL, token by token."""

import math
from decimal import Decimal, localcontext

import pytest
import torch

from lockstep.correction import kl
from lockstep.errors import AlignmentError


def exact_k3(d):
    with localcontext() as context:
        context.prec = 80
        x = Decimal(d)
        return float(x.exp() - 1 - x)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "size", [0.0, 1e-16, 1e-12, 1e-9, 1e-6, 9.99e-5, 1e-4, 1.01e-4, 0.1, 3.0, 30.0]
)
def test_k3_keeps_its_digits_near_zero(size, sign):
    d = sign * size
    found = float(kl.k3(torch.tensor([d], dtype=torch.float64)))
    assert found >= 0
    # below 1e-4 the series is cut: d^3 / 60 of it; above, expm1 minus d loses 4 of 16 digits
    assert found == pytest.approx(exact_k3(d), rel=1e-11, abs=0)


def test_k3_is_never_negative_for_any_two_float32_log_probs():
    g = torch.Generator().manual_seed(0)
    trainer = -torch.rand(200_000, generator=g) * 20
    for scale in (1e-8, 1e-6, 1e-3, 1.0):
        d, _ = kl.log_ratio(trainer + scale * torch.randn(200_000, generator=g), trainer)
        assert float(kl.k3(d).min()) >= 0


def test_the_signs_are_those_of_kl_from_the_rollout():
    rollout, trainer = torch.tensor([-1.0]), torch.tensor([-1.5])
    d, _ = kl.log_ratio(trainer, rollout)
    assert d.item() == -0.5
    assert kl.k1(d).item() == 0.5  # rollout - trainer
    assert kl.k2(d).item() == 0.125
    assert kl.k3(d).item() == pytest.approx(math.exp(-0.5) - 0.5)


def test_all_three_estimate_the_kl_between_two_distributions():
    g = torch.Generator().manual_seed(0)
    rollout = torch.log_softmax(torch.randn(8, generator=g).double(), -1)
    trainer = torch.log_softmax(rollout + 0.1 * torch.randn(8, generator=g), -1)
    exact = float((rollout.exp() * (rollout - trainer)).sum())
    d, _ = kl.log_ratio(trainer, rollout)
    for estimate, tolerance in ((kl.k1, 1e-12), (kl.k3, 1e-12), (kl.k2, 0.1 * exact)):
        assert float((rollout.exp() * estimate(d)).sum()) == pytest.approx(exact, abs=tolerance)


def test_what_is_not_compared_is_zero_whatever_stands_there():
    nan, inf = float("nan"), float("inf")
    trainer = torch.tensor([-1.0, nan, -inf, -1.0, nan])
    rollout = torch.tensor([-1.5, -1.0, -inf, nan, nan])
    mask = torch.tensor([True, True, True, True, False])
    d, is_valid = kl.log_ratio(trainer, rollout, mask)
    assert d.tolist() == [0.5, 0, 0, 0, 0]
    assert is_valid.tolist() == [True, False, False, False, False]


def test_log_probs_of_different_lengths_are_refused_with_their_shapes():
    with pytest.raises(AlignmentError, match=r"\[\[3\], \[2\]\].*Shifted"):
        kl.log_ratio(torch.zeros(3), torch.zeros(2))
    with pytest.raises(AlignmentError, match=r"\[\[3\], \[3\], \[1\]\]"):
        kl.log_ratio(torch.zeros(3), torch.zeros(3), torch.ones(1, dtype=torch.bool))
