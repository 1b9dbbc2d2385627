"""GEMMs in the CPU's own bfloat16: a row's bits in any company, its values, and its gradients."""

from itertools import product

import pytest
import torch

from lockstep.ops import selftest
from lockstep.ops.invariant import InvariantOps, Rules, has_bfloat16

SHAPE = (320, 512)
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16(), reason="this CPU has no bfloat16")
pytestmark = pytest.mark.usefixtures("process_settings")


def test_the_order_of_a_sum_shows_where_its_terms_cancel():
    """Two orders of one sum: nearly all results differ, where those of other numbers hardly do."""
    x, weight = selftest._cancelling(64, *SHAPE)
    other = torch.randn(x.shape), torch.randn(weight.shape)
    shares = []
    for a, b in ((x, weight), other):
        a, b = a.bfloat16().float(), b.bfloat16().float()
        whole = (a @ b.t()).bfloat16()
        halves = (a[:, ::2] @ b[:, ::2].t() + a[:, 1::2] @ b[:, 1::2].t()).bfloat16()
        shares.append(float((whole != halves).float().mean()))
    assert shares[0] > 0.5 and shares[1] < 0.01


@needs_bfloat16
@pytest.mark.parametrize("num_threads", [1, 2])
def test_shapes_that_the_self_test_takes_keep_their_bits_with_other_numbers(num_threads):
    torch.set_num_threads(num_threads)
    wide = [(320, 512), (256, 2048), (1024, 256), (300, 777)]
    native = selftest.native_shapes([*wide, (16, 512), (512,), (4, 512, 512)])
    assert native <= set(wide) and native
    ops = InvariantOps(Rules(native=native))
    for outputs, inputs in native:
        x, weight = (torch.randn(n, inputs).bfloat16() for n in (300, outputs))
        assert ops.is_native(weight) and not ops.is_native(weight.float())
        expected = ops.linear(x, weight)
        for count, threads in product((1, 7, 63, 64, 65, 200), {1, num_threads}):
            torch.set_num_threads(threads)
            with torch.inference_mode():  # as in the engine, over packed weights
                assert torch.equal(ops.linear(x[-count:], weight), expected[-count:])


@needs_bfloat16
def test_values_and_gradients_are_those_of_float64_within_bfloat16():
    ops = InvariantOps(Rules(native=frozenset([SHAPE])))
    leaves = [torch.randn(90, SHAPE[1]), torch.randn(SHAPE) / 16, torch.randn(SHAPE[0])]
    ours = [leaf.bfloat16().requires_grad_() for leaf in leaves]
    exact = [leaf.bfloat16().double().requires_grad_() for leaf in leaves]
    upstream = torch.randn(90, SHAPE[0]).bfloat16()
    out = ops.linear(*ours)
    expected = torch.nn.functional.linear(*exact)
    found = [out, *torch.autograd.grad(out, ours, upstream)]
    wanted = [expected, *torch.autograd.grad(expected, exact, upstream.double())]
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b.detach(), rtol=2**-7, atol=2**-7)


@needs_bfloat16
def test_a_weight_that_was_updated_is_packed_again():
    ops = InvariantOps(Rules(native=frozenset([SHAPE])))
    x, weight = torch.randn(8, SHAPE[1]).bfloat16(), torch.randn(SHAPE).bfloat16()
    with torch.inference_mode():
        before = ops.linear(x, weight)
    weight.mul_(2)
    with torch.inference_mode():
        assert torch.equal(ops.linear(x, weight), before * 2)
    assert ops.linear(x[:0], weight).shape == (0, SHAPE[0])
