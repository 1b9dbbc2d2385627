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


SIZES = [0.0, 1e-16, 1e-12, 1e-9, 1e-6, 9.99e-5, 1e-4, 1.01e-4, 0.1, 0.2499, 0.2501, 3.0, 20.0]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", SIZES)
def test_k3_keeps_its_digits_near_zero(size, sign):
    d = sign * size
    found = float(kl.k3(torch.tensor([d], dtype=torch.float64)))
    assert found >= 0
    # below 1e-4 the series is cut: d^3 / 60 of it; above, expm1 minus d loses 4 of 16 digits
    assert found == pytest.approx(exact_k3(d), rel=1e-11, abs=0)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", SIZES)
def test_k3_keeps_its_digits_in_float32(size, sign):
    d = torch.tensor([sign * size], dtype=torch.float32)
    found = float(kl.k3(d))
    assert found >= 0
    # at 0.25 the series is cut (d^5 / 2520 of it: 4e-7), and the subtraction loses 3 of 24 bits;
    # the smallest value that is not 0 is that of a d whose square float32 holds
    assert found == pytest.approx(exact_k3(float(d)), rel=1e-6, abs=1e-45)


def test_k3_is_exact_over_the_whole_range_of_float32_log_ratios():
    size = torch.logspace(-18, math.log10(20), 20_000)
    for d in (size, -size):
        # float64 is checked against 80 digits above
        wide = kl.k3(d.double())
        assert float(((kl.k3(d).double() - wide).abs() / wide).max()) < 1.5e-6


def test_k3_is_never_negative_where_exp_minus_one_minus_d_is():
    d = 1e-4 * torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    direct = d.exp() - 1 - d
    assert float((direct < 0).float().mean()) > 0.05, "as the formula is written down"
    found = kl.k3(d)
    assert float(found.min()) >= 0
    exact = 0.5 * float(d.double().square().mean())  # the next term is d^3 / 6: 1e-4 of it
    assert float(found.double().mean()) == pytest.approx(exact, rel=1e-4)
    off = (direct.double() - found.double()).abs().mean()  # how far its sum is off depends on exp
    assert float(off) > exact, "of each token, as the formula is written down"


def test_k3_is_never_negative_for_any_two_float32_log_probs():
    g = torch.Generator().manual_seed(0)
    trainer = -torch.rand(200_000, generator=g) * 20
    for scale in (1e-8, 1e-6, 1e-3, 1.0):
        d, _ = kl.log_ratio(trainer + scale * torch.randn(200_000, generator=g), trainer)
        assert float(kl.k3(d).min()) >= 0


def test_k3_stays_finite_and_does_not_fall_beyond_the_limit():
    d = torch.tensor([19.9, 20.0, 21.0, 900.0, 1e9, 1e30, torch.finfo(torch.float32).max])
    found = kl.k3(d)
    assert bool(torch.isfinite(found).all())
    assert bool((found.diff() >= 0).all()), found
    assert found[1:].tolist() == [pytest.approx(math.exp(20) - 21, rel=1e-6)] * 6
    below = kl.k3(-d)  # the exponential is gone: -1 - d
    assert below.tolist() == pytest.approx((d - 1).tolist(), rel=1e-6)


def test_the_gradient_of_k3_is_that_of_its_formula():
    d = torch.tensor([-3.0, -0.25, -0.1, 0.0, 1e-3, 0.2, 0.25, 2.0], dtype=torch.float64)
    d.requires_grad_(True)
    kl.k3(d).sum().backward()
    # the series is exact to its own length; float64 takes it below 1e-4 only
    assert d.grad.tolist() == pytest.approx(torch.expm1(d.detach()).tolist(), rel=1e-9, abs=1e-16)
    narrow = d.detach().float().requires_grad_(True)
    kl.k3(narrow).sum().backward()
    # the derivative of a series that is right to 4e-7 at 0.25: d^6 / 720 of it there, 1.4e-6
    expected = torch.expm1(narrow.detach()).tolist()
    assert narrow.grad.tolist() == pytest.approx(expected, rel=2e-6, abs=1e-12)


def test_the_signs_are_those_of_kl_from_the_rollout():
    rollout, trainer = torch.tensor([-1.0]), torch.tensor([-1.5])
    d, _ = kl.log_ratio(trainer, rollout)
    assert d.item() == -0.5 and d.dtype == torch.float32
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
    d, is_valid = kl.log_ratio(trainer, rollout, torch.tensor([True, True, True, True, False]))
    assert d.tolist() == [0.5, 0, 0, 0, 0]
    assert is_valid.tolist() == [True, False, False, False, False]


def test_the_ratio_is_float32_unless_both_sides_are_wider():
    for left in (torch.bfloat16, torch.float32, torch.float64):
        for right in (torch.bfloat16, torch.float32, torch.float64):
            d, _ = kl.log_ratio(torch.tensor([-1.0], dtype=left), torch.tensor([-1.0], dtype=right))
            is_wide = left == right == torch.float64
            assert d.dtype == (torch.float64 if is_wide else torch.float32)


def test_equal_half_precision_log_probs_have_a_ratio_of_exactly_one():
    logprobs = -torch.rand(100, generator=torch.Generator().manual_seed(0)).bfloat16()
    d, _ = kl.log_ratio(logprobs, logprobs.clone())
    assert not d.any()
    narrow, _ = kl.log_ratio(torch.tensor([-3.0]).bfloat16(), torch.tensor([-3.001]))
    assert narrow.item() == pytest.approx(0.001, rel=1e-3), "widened before it is subtracted"
    assert torch.equal(kl.k3(narrow.bfloat16()), kl.k3(narrow.bfloat16().float()))


def test_log_probs_of_different_lengths_are_refused_with_their_shapes():
    with pytest.raises(AlignmentError, match=r"\[\[3\], \[2\]\].*Shifted"):
        kl.log_ratio(torch.zeros(3), torch.zeros(2))
    with pytest.raises(AlignmentError, match=r"\[\[3\], \[3\], \[1\]\]"):
        kl.log_ratio(torch.zeros(3), torch.zeros(3), torch.ones(1, dtype=torch.bool))


# -- the penalty ----------------------------------------------------------------------------------


def test_the_penalty_takes_from_what_the_sampler_found_likelier_and_moves_nothing_on_average():
    rollout = torch.tensor([-1.0, -1.0, -1.0])
    trainer = torch.tensor([-1.5, -1.25, -0.75])
    # diff = rollout - trainer = 0.5, 0.25, -0.25; its mean is 1/6
    found = kl.penalty(trainer, rollout, coef=0.1)
    assert found.tolist() == pytest.approx([0.1 * (1 / 6 - x) for x in (0.5, 0.25, -0.25)])
    assert float(found.sum()) == pytest.approx(0, abs=1e-8)
    assert found[0] < 0 < found[2] and found.dtype == torch.float32


def test_the_penalty_is_centred_over_what_is_compared_and_zero_elsewhere():
    nan = float("nan")
    trainer = torch.tensor([-1.5, nan, -1.0, -9.0])
    rollout = torch.tensor([-1.0, -1.0, -1.0, nan])
    mask = torch.tensor([True, True, True, False])
    found = kl.penalty(trainer, rollout, mask=mask, coef=1.0)
    assert found.tolist() == [-0.25, 0.0, 0.25, 0.0]
    assert kl.penalty(trainer, rollout, mask=~mask & False).tolist() == [0.0] * 4


def test_the_penalty_is_cut_token_by_token_before_it_is_centred():
    rollout = torch.tensor([-1.0, -1.0, -5.0])
    trainer = torch.tensor([-4.0, -1.0, -1.0])  # diff 3, 0, -4
    found = kl.penalty(trainer, rollout, coef=1.0, clip=2.0)
    assert found.tolist() == [-2.0, 0.0, 2.0]
    assert kl.penalty(trainer, rollout, coef=1.0, mean=1.0).tolist() == [-2.0, 1.0, 5.0]


def test_the_penalty_carries_no_gradient():
    trainer = torch.tensor([-1.0, -2.0], requires_grad=True)
    assert not kl.penalty(trainer, torch.tensor([-1.5, -1.5])).requires_grad
