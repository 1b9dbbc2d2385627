"""The products of experts and their gradients, against one matrix after the other.

# R token-expert pairs, sorted by expert  E experts  K inner width  N outputs
"""

import pytest
import torch

from lockstep.ops.base import Ops
from lockstep.ops.invariant import InvariantOps, Rules

BACKENDS = {"plain": Ops(), "invariant": InvariantOps(Rules())}
COUNTS = ([3, 0, 5, 1], [0, 0, 0, 9], [2, 2, 2, 2], [0, 0, 0, 0])


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(x, weight, bias, counts):
    parts = zip(x.split(counts), weight, bias, strict=True)
    return torch.cat([rows @ matrix.t() + b for rows, matrix, b in parts])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", COUNTS)
def test_each_row_meets_the_matrix_of_its_expert(backend, counts):
    x, weight, bias = normal(sum(counts), 8), normal(4, 16, 8, seed=1), normal(4, 16, seed=2)
    ops = BACKENDS[backend]
    wanted = reference(x, weight, bias, counts)
    torch.testing.assert_close(ops.expert_linear(x, weight, bias, counts), wanted)
    wanted = reference(x, weight, 0 * bias, counts)
    torch.testing.assert_close(ops.expert_linear(x, weight, None, counts), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counts", COUNTS)
def test_gradients_are_those_of_a_loop_under_autograd(backend, counts):
    x, weight = normal(sum(counts), 8).requires_grad_(), normal(4, 16, 8, seed=1).requires_grad_()
    grad = normal(sum(counts), 16, seed=3)
    out = reference(x, weight, torch.zeros(4, 16), counts)
    wanted_x, wanted_weight = torch.autograd.grad(out, (x, weight), grad)
    found_weight = torch.ones_like(weight)
    with torch.no_grad():
        found_x = BACKENDS[backend].expert_linear_backward(
            grad, x, weight, counts, grad_weight=found_weight
        )
    torch.testing.assert_close(found_x, wanted_x)
    torch.testing.assert_close(found_weight, wanted_weight + 1)  # added to what was there


def test_gradients_of_bfloat16_can_be_summed_in_float32():
    counts = [3, 0, 5, 1]
    x, weight = normal(9, 8, dtype=torch.bfloat16), normal(4, 16, 8, seed=1, dtype=torch.bfloat16)
    grad = normal(9, 16, seed=3, dtype=torch.bfloat16)
    for backend in BACKENDS.values():
        found = torch.zeros(weight.shape)
        backend.expert_linear_backward(grad, x, weight, counts, grad_weight=found)
        wanted = torch.stack(
            [
                g.float().t() @ r.float()
                for g, r in zip(grad.split(counts), x.split(counts), strict=True)
            ]
        )
        # Each of at most 5 products of order 1 is exact; one rounding to 8 bits where emulated.
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 9], [0, 8, 1, 0]])
def test_the_grouped_kernel_gives_what_the_loop_gives(monkeypatch, counts, dtype):
    """torch runs it on a CPU too; the ops take it on CUDA alone."""
    ops = Ops()
    x, weight, bias = (
        normal(9, 8, dtype=dtype),
        normal(4, 16, 8, seed=1, dtype=dtype),
        normal(4, 16, seed=2, dtype=dtype),
    )
    grad = normal(9, 16, seed=3, dtype=dtype)
    # bfloat16: products of order 3 are rounded to 8 bits, once or, with the bias, twice.
    close = {"rtol": 2**-6, "atol": 2**-5} if dtype == torch.bfloat16 else {}
    runs = []
    for is_grouped in (True, False):
        monkeypatch.setattr("lockstep.ops.base._is_grouped", lambda *_, found=is_grouped: found)
        grad_weight = torch.zeros_like(weight)
        runs.append(
            [
                ops.expert_linear(x, weight, bias, counts),
                ops.expert_linear(x, weight, None, counts),
                ops.expert_linear_backward(grad, x, weight, counts, grad_weight=grad_weight),
                grad_weight,
            ]
        )
    for found, wanted in zip(*runs, strict=True):
        torch.testing.assert_close(found, wanted, **close)
