"""Experts on a GPU: the grouped kernel in bfloat16, and the loop in float32, against the CPU."""

import pytest
import torch

from lockstep.models.experts import ExpertProjection, mix_experts
from lockstep.ops.base import Ops

ops = Ops()

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

T, D, E, F, A = 700, 64, 8, 48, 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_skewed", [False, True])
@pytest.mark.parametrize("num_chunk_tokens", [256, 1024])
def test_experts_on_a_gpu_have_the_values_and_gradients_of_the_cpu(
    num_chunk_tokens, is_skewed, dtype
):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    logits = normal(T, E)
    if is_skewed:
        logits[:, :A] += 100
    weights, chosen = ops.route(logits, A)
    leaves = [
        normal(T, D),
        weights,
        normal(E, 2 * F, D) / 8,
        normal(E, 2 * F),
        normal(E, D, F) / 8,
        normal(E, D),
    ]
    grad, results = normal(T, D), []
    for device, as_dtype in (("cuda", dtype), ("cpu", torch.float64)):
        mine = [x.to(device, as_dtype).requires_grad_() for x in leaves]
        out = mix_experts(
            mine[0],
            mine[1],
            chosen.to(device),
            gate_up=ExpertProjection(mine[2], mine[3]),
            down=ExpertProjection(mine[4], mine[5]),
            activation=ops.swiglu,
            ops=ops,
            num_chunk_tokens=num_chunk_tokens,
        )
        grads = torch.autograd.grad(out, mine, grad.to(device, as_dtype))
        results.append([x.double().cpu() for x in (out.detach(), *grads)])
    # bfloat16 rounds each of three products and their inputs to 8 bits.
    limit = 0.03 if dtype == torch.bfloat16 else 1e-5
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).norm() <= limit * wanted.norm()
