"""GEMMs over weights in oneDNN's layout: a row's bits in any company, its values, its gradients."""

from itertools import product

import pytest
import torch

from lockstep.ops import selftest
from lockstep.ops.base import Ops
from lockstep.ops.invariant import InvariantOps, Packing, Rules
from lockstep.ops.onednn import can_pack, has_bfloat16

SHAPE = (320, 512)
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16(), reason="this CPU has no bfloat16")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)]
in_both = pytest.mark.parametrize("dtype", DTYPES)
pytestmark = pytest.mark.usefixtures("process_settings")


def ops_of(dtype):
    return InvariantOps(Rules(packed={SHAPE: Packing(dtype)}))


def test_the_order_of_a_sum_shows_where_its_terms_cancel():
    """Two orders of one sum: nearly all results differ, where those of other numbers hardly do."""
    x, weight = selftest._cancelling(64, *SHAPE, torch.bfloat16)
    other = torch.randn(x.shape), torch.randn(weight.shape)
    shares = []
    for a, b in ((x, weight), other):
        a, b = a.bfloat16().float(), b.bfloat16().float()
        whole = (a @ b.t()).bfloat16()
        halves = (a[:, ::2] @ b[:, ::2].t() + a[:, 1::2] @ b[:, 1::2].t()).bfloat16()
        shares.append(float((whole != halves).float().mean()))
    assert shares[0] > 0.5 and shares[1] < 0.01


@in_both
@pytest.mark.parametrize("num_threads", [1, 2])
def test_shapes_that_the_self_test_takes_keep_their_bits_with_other_numbers(num_threads, dtype):
    torch.set_num_threads(num_threads)
    wide = [(320, 512), (256, 2048), (1024, 256), (300, 777)]
    packed = selftest.find_packings([*wide, (16, 512), (512,), (4, 512, 512)], dtype)
    assert set(packed) <= set(wide) and packed
    ops = InvariantOps(Rules(packed=packed))
    for outputs, inputs in packed:
        x, weight = (torch.randn(n, inputs).to(dtype) for n in (300, outputs))
        weight.requires_grad_()  # a trainer packs its own
        with torch.no_grad():
            expected = ops.linear(x, weight)
        for count, threads in product((1, 7, 63, 64, 65, 200), {1, num_threads}):
            torch.set_num_threads(threads)
            with torch.inference_mode():  # as in the engine, which keeps what it packed
                assert torch.equal(ops.linear(x[-count:], weight), expected[-count:])


@in_both
def test_values_and_gradients_are_those_of_float64(dtype):
    leaves = [torch.randn(90, SHAPE[1]), torch.randn(SHAPE) / 16, torch.randn(SHAPE[0])]
    ours = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    exact = [leaf.to(dtype).double().requires_grad_() for leaf in leaves]
    upstream = torch.randn(90, SHAPE[0]).to(dtype)
    out = ops_of(dtype).linear(*ours)
    expected = torch.nn.functional.linear(*exact)
    found = [out, *torch.autograd.grad(out, ours, upstream)]
    wanted = [expected, *torch.autograd.grad(expected, exact, upstream.double())]
    error = 2**-7 if dtype == torch.bfloat16 else 1e-4
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b.detach(), rtol=error, atol=error)


@in_both
def test_a_weight_that_was_updated_is_packed_again(dtype):
    x, weight = torch.randn(8, SHAPE[1]).to(dtype), torch.randn(SHAPE).to(dtype)
    for ops in (ops_of(dtype), Ops()):
        with torch.inference_mode():
            before = ops.linear(x[None], weight)[0]
        weight.mul_(2)
        with torch.inference_mode():
            assert torch.equal(ops.linear(x, weight), before * 2)
        assert ops.linear(x[:0], weight).shape == (0, SHAPE[0])


@in_both
def test_stock_products_of_few_rows_are_those_of_the_rows_alone(dtype):
    parts = torch.randn(5, 1, SHAPE[1]), torch.randn(SHAPE), torch.randn(SHAPE[0])
    x, *rest = (part.to(dtype) for part in parts)
    exact = torch.nn.functional.linear(*(part.double() for part in (x, *rest)))
    for rows in range(1, 6):
        with torch.inference_mode():
            found = Ops().linear(x[:rows], *rest)
        torch.testing.assert_close(found.double(), exact[:rows], rtol=1e-2, atol=0.2)


def test_without_onednn_no_weight_is_packed(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not can_pack(torch.empty(SHAPE))
    assert not selftest.find_packings([SHAPE], torch.float32)


def test_a_weight_is_not_rounded_to_the_dtype_of_its_shapes_packing():
    x, weight = torch.randn(8, SHAPE[1]), torch.randn(SHAPE)
    plain = torch.nn.functional.linear(x, weight)
    torch.testing.assert_close(ops_of(torch.bfloat16).linear(x, weight), plain)


@in_both
def test_experts_follow_a_change_in_place(dtype):
    ops, seen = ops_of(dtype), []
    x, weight = torch.randn(8, SHAPE[1]).to(dtype), torch.randn(3, *SHAPE).to(dtype)
    for expert in ([], 0, 2):
        weight[expert] *= 2.0
        with torch.inference_mode():
            seen.append(ops.expert_linear(x, weight, None, [1, 0, 7]))
        assert torch.equal(seen[-1], ops.expert_linear(x, weight.clone(), None, [1, 0, 7]))
    assert torch.equal(seen[1][:1], seen[0][:1] * 2) and torch.equal(seen[1][1:], seen[0][1:])
    assert torch.equal(seen[2][1:], seen[1][1:] * 2) and torch.equal(seen[2][:1], seen[1][:1])
