"""Packed attention on a GPU against the formula."""

import importlib.util

import numpy as np
import pytest
import torch
from attention_formula import reference_attention

from lockstep.ops.base import Ops
from lockstep.ops.context import AttentionSpec, PackedContext

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("pip install 'lockstep-rl[cuda]'", allow_module_level=True)
from lockstep.ops.cuda import CudaOps

LENGTHS = [200, 1, 77, 330]


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize(
    ("ops", "dtype", "limit"),
    [(Ops, torch.float32, 1e-4), (Ops, torch.bfloat16, 0.02), (CudaOps, torch.bfloat16, 0.02)],
)
def test_output_and_all_gradients_equal_the_formula(ops, width, window, dtype, limit):
    g = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, width) for heads in (8, 2, 2)]
    shapes += [(8,), (sum(LENGTHS), 8, width)]
    q, k, v, sinks, grad = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    leaves = [x.cuda().requires_grad_() for x in (q, k, v, sinks)]
    context = PackedContext.of(LENGTHS, device="cuda")
    out = ops().attention(*leaves[:3], AttentionSpec(leaves[3], window, 0.125), context)
    out.backward(grad.cuda())
    exact = [x.double().requires_grad_() for x in (q, k, v, sinks)]
    wanted = reference_attention(
        *exact[:3], sinks_H=exact[3], window=window, scale=0.125, lengths=LENGTHS
    )
    wanted.backward(grad.double())
    for ours, theirs in zip(
        [out, *(x.grad for x in leaves)], [wanted, *(x.grad for x in exact)], strict=True
    ):
        # float32 may be multiplied in 10 bits (tf32 is off by default); bfloat16 has 8
        assert (ours.cpu().double() - theirs).norm() < limit * theirs.norm()


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_rows_that_begin_alike_equal_rows_that_share_nothing(window, dtype, limit):
    """bfloat16 goes through the flash backward, whose rows have fewer queries than keys."""
    rows = [np.arange(200), np.r_[0:150, 200:300], np.arange(170)]
    flat = torch.from_numpy(np.concatenate(rows))
    place = torch.from_numpy(np.unique(flat.numpy(), return_index=True)[1])
    g = torch.Generator().manual_seed(0)
    shapes = [(300, heads, 64) for heads in (8, 2, 2)] + [(8,), (300, 8, 64)]
    q, k, v, sinks, grad = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    leaves = [x.cuda().requires_grad_() for x in (q, k, v, sinks)]
    context = PackedContext.of_rows(rows, device="cuda")
    out = Ops().attention(*leaves[:3], AttentionSpec(leaves[3], window, 0.125), context)
    out.backward(grad.cuda())
    exact = [x.double().requires_grad_() for x in (q, k, v, sinks)]
    lengths = [len(row) for row in rows]
    of_rows = reference_attention(
        *(x[flat] for x in exact[:3]), sinks_H=exact[3], window=window, scale=0.125, lengths=lengths
    )
    wanted = of_rows[place]
    wanted.backward(grad.double())
    for ours, theirs in zip(
        [out, *(x.grad for x in leaves)], [wanted, *(x.grad for x in exact)], strict=True
    ):
        assert (ours.cpu().double() - theirs).norm() < limit * theirs.norm()
