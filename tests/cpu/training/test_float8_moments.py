"""AdamW's moments in one byte a number."""

import torch

from lockstep.training.config import TrainerConfig
from lockstep.training.moments import BLOCK, PackedMoment
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
