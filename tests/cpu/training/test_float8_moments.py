"""AdamW's moments in one byte a number."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.training.config import TrainerConfig
from lockstep.training.moments import BLOCK, PackedMoment, PackedSquare
from lockstep.training.optimizer import Optimizer


def test_a_number_is_kept_to_four_bits_and_a_packed_one_exactly():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 1000)
    packed = PackedMoment.of(x)
    found = packed.unpacked()
    largest = torch.stack([block.abs().max() for block in x.split(BLOCK)]).repeat_interleave(BLOCK)
    # Half of the last of four bits; numbers below a 14th power of two are a fixed step apart.
    allowed = (x.abs() / 16).clamp(min=1e-9) + largest[:1000] * 2.0**-17
    assert ((found - x).abs() <= allowed).all()
    assert torch.equal(PackedMoment.of(found).unpacked(), found)
    assert packed.codes.element_size() == 1


def test_a_block_of_zeros_and_powers_of_two_are_exact():
    for x in (torch.zeros(3), torch.tensor([448.0]), torch.tensor([2.0**-100, -(2.0**-101)])):
        assert torch.equal(PackedMoment.of(x).unpacked(), x)


def trained(moments, *, updates=60, stop=None):
    """Weights that fit a plane, and the optimizer that found them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 20, generator=generator)
    wanted = x @ torch.randn(20, generator=generator)
    weight = torch.nn.Parameter(torch.zeros(20))
    config = TrainerConfig(moments=moments, weight_decay=0.0)
    optimizer = Optimizer([("weight", weight)], config)
    for update in range(updates):
        if update == stop:  # another process, which has the checkpoint alone
            state = {t.name: t.view().clone() for t in optimizer.state_tensors()}
            optimizer = Optimizer([("weight", weight)], config)
            optimizer.load_state_tensors(state, where="here")
        (x @ weight - wanted).square().mean().backward()
        optimizer.step(lr=0.1)
    return weight.detach(), float((x @ weight - wanted).square().mean())


def test_it_fits_as_well_and_a_resumed_run_has_the_same_bits():
    exact, loss = trained("float32")
    packed, loss_packed = trained("float8")
    assert not torch.equal(exact, packed)
    assert loss_packed < 2 * loss + 0.05
    assert torch.equal(packed, trained("float8", stop=23)[0])


GRADIENTS = {
    "normal": lambda g, n, t: torch.randn(n, generator=g),
    "over 30 decades": lambda g, n, t: torch.randn(n, generator=g) * torch.logspace(-15, 15, n),
    "one large in a block": lambda g, n, t: torch.randn(n, generator=g) * (
        1 + 1e6 * (torch.arange(n) % 97 == 0)
    ),
    "rare": lambda g, n, t: torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.02),
    "each row now and then": lambda g, n, t: torch.randn(n, generator=g) * (
        torch.arange(n) // 40 % 7 == t % 7
    ),
    "once": lambda g, n, t: torch.randn(n, generator=g) * (t == 0),
    "shrinking": lambda g, n, t: torch.randn(n, generator=g) * 0.2**t,
    "growing": lambda g, n, t: torch.randn(n, generator=g) * 5.0**t,
    "one sign": lambda g, n, t: torch.rand(n, generator=g) * torch.logspace(-6, 0, n),
    "tiny": lambda g, n, t: torch.randn(n, generator=g) * 1e-20,
    "huge": lambda g, n, t: torch.randn(n, generator=g) * 1e15,
}  # fmt: skip


@settings(deadline=None)
@given(
    kind=st.sampled_from(sorted(GRADIENTS)),
    betas=st.sampled_from([(0.9, 0.95), (0.9, 0.999), (0.0, 0.9), (0.5, 0.99), (0.95, 0.98)]),
    size=st.sampled_from([1, 255, 256, 1000]),
    seed=st.integers(0, 1000),
)
def test_no_update_moves_a_weight_by_more_than_exact_moments_could(kind, betas, size, seed):
    """The bound of exact AdamW, with a second moment's root that may be a 16th too small."""
    share, first = betas[0] ** 2 / betas[1], (1 - betas[0]) ** 2 / (1 - betas[1])
    bound = math.sqrt(1.13 * share * first / (1 - share) + first)
    weight = torch.nn.Parameter(torch.zeros(size, dtype=torch.float32))
    optimizer = Optimizer([("weight", weight)], TrainerConfig(moments="float8", weight_decay=0.0))
    optimizer.configure(betas=betas, eps=1e-8, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    for update in range(12):
        weight.grad = GRADIENTS[kind](generator, size, update).float()
        before = weight.detach().clone()
        optimizer.step(lr=1.0)
        unbiased = math.sqrt(1 - betas[1] ** (update + 1)) / (1 - betas[0] ** (update + 1))
        step = float((weight.detach() - before).abs().max())
        assert step <= 1.01 * bound * unbiased, f"update {update}"


@pytest.mark.parametrize("beta", [0.95, 0.999])
def test_a_second_moment_follows_gradients_that_become_smaller(beta):
    """Rounding to the nearest would keep it: 0.999 of a number of four bits is that number."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.zeros(20_000), torch.rand(20_000, generator=generator) + 1
    expected = second.mean()
    for update in range(200):
        step = torch.tensor(float(update))
        first, second = (
            0.9 * first + 1e-9 * torch.randn(20_000, generator=generator),
            beta * second,
        )
        packed = PackedMoment.of(first)
        second = PackedSquare.bounded_by(packed, second, betas=(0.9, beta), step=step).unpacked()
        first = packed.unpacked()
        expected = beta * expected
        assert torch.equal(PackedSquare.of(second).unpacked(), second)
    assert float(second.mean() / expected) == pytest.approx(1, abs=0.1)


def test_a_gradient_leaves_its_parameter_while_backward_runs():
    first, second = (torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = Optimizer([("first", first), ("second", second)], TrainerConfig())
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(second.grad is None and "second" in optimizer.gradients())
            return grad

    (Look.apply(first) * 2 * second).sum().backward()
    ((Look.apply(first * 1) + 0).sum() + second.sum()).backward()
    assert seen and first.grad is None and second.grad is None
    assert optimizer.gradients()["first"].tolist() == [3.0] * 4
    assert optimizer.gradients()["second"].tolist() == [3.0] * 4
