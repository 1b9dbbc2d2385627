"""8-bit AdamW beside that of bitsandbytes: how far each strays from float32, gradients alike."""

import pytest
import torch

from lockstep.training.config import TrainerConfig
from lockstep.training.optimizer import Optimizer

bitsandbytes = pytest.importorskip(
    "bitsandbytes", reason="the peer bitsandbytes is not installed: pip install bitsandbytes"
)

SHAPE = (256, 512)
NUM_UPDATES = 30


def moved(make_step, betas):
    """Where the weights are after the updates. Gradients differ in size by column and by row, as
    those of a projection do."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(0.02 * torch.randn(SHAPE, generator=generator))
    sizes = torch.exp(torch.randn(1, SHAPE[1], generator=generator))
    sizes = 1e-3 * sizes * torch.exp(torch.randn(SHAPE[0], 1, generator=generator))
    start, step = weight.detach().clone(), make_step(weight, betas)
    for _ in range(NUM_UPDATES):
        weight.grad = sizes * (0.3 + torch.randn(SHAPE, generator=generator))
        step()
    return weight.detach() - start


def stock(weight, betas):
    return torch.optim.AdamW([weight], lr=1e-3, betas=betas, weight_decay=0.1).step


def peer(weight, betas):
    return bitsandbytes.optim.AdamW8bit([weight], lr=1e-3, betas=betas, weight_decay=0.1).step


def ours(weight, betas):
    config = TrainerConfig(lr=1e-3, betas=betas, weight_decay=0.1, optimizer_bits=8)
    optimizer = Optimizer([("weight", weight)], config)
    return lambda: optimizer.step(lr=1e-3)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_eight_bits_stray_from_float32_no_further_than_those_of_bitsandbytes(betas):
    wanted = moved(stock, betas)
    strays = [float((moved(make, betas) - wanted).norm() / wanted.norm()) for make in (ours, peer)]
    assert 0 < strays[0] < 0.05 and strays[0] < strays[1], strays
