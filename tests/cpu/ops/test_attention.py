"""Attention with sinks against the formula: output and all four gradients."""

import pytest
import torch

from lockstep.models.reference import reference_attention
from lockstep.ops import api as ops
from lockstep.ops import trace
from lockstep.ops.context import PackedBlock, PackedContext, PagedBlock, PagedContext

LENGTHS = [5, 1, 37, 16, 38]


def make_inputs(heads=4, kv_heads=2, width=8, dtype=torch.float64, has_sinks=True, lengths=LENGTHS):
    g = torch.Generator().manual_seed(0)
    total = sum(lengths)
    q = torch.randn(total, heads, width, generator=g, dtype=dtype)
    k, v = torch.randn(2, total, kv_heads, width, generator=g, dtype=dtype)
    sinks = torch.randn(heads, generator=g, dtype=dtype) if has_sinks else None
    return [q, k, v, sinks]


def gradients(function, inputs):
    leaves = [x.clone().requires_grad_() if x is not None else None for x in inputs]
    out = function(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    (out * weight).sum().backward()
    return out.detach(), [x.grad for x in leaves if x is not None]


def packed(window, lengths=LENGTHS):
    context = PackedContext.of(lengths)
    return lambda q, k, v, s: ops.attention(
        q, k, v, sinks=s, window=window, scale=0.3, layer=0, context=context
    )


def formula(window, lengths=LENGTHS):
    return lambda q, k, v, s: reference_attention(
        q, k, v, sinks_H=s, window=window, scale=0.3, lengths=lengths
    )


@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4, 16, 37, 64])
def test_packed_attention_equals_the_formula_forward_and_backward(window, has_sinks):
    inputs = make_inputs(has_sinks=has_sinks)
    out, grads = gradients(packed(window), inputs)
    expected, expected_grads = gradients(formula(window), inputs)
    # float64: sums of at most 38 terms of order 1, so 1e-12 leaves a factor of 100 over rounding
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert len(grads) == 3 + has_sinks
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_tempting_shortcut_gets_only_dq_and_dk_wrong():
    """Rescaling by sigmoid(lse - sink) with a detached lse: why all four gradients are tested."""

    def shortcut(q, k, v, s):
        context = PackedContext.of([len(q)])
        plain = ops.attention(q, k, v, sinks=None, window=None, scale=0.3, layer=0, context=context)
        keys = k.repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * 0.3
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf"))
        lse = scores.logsumexp(-1).detach()
        return plain * torch.sigmoid(lse - s[:, None]).t()[..., None]

    inputs = make_inputs(lengths=[40])
    out, (dq, dk, dv, dsinks) = gradients(shortcut, inputs)
    expected, (eq, ek, ev, esinks) = gradients(formula(None, [40]), inputs)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(dv, ev)
    torch.testing.assert_close(dsinks, esinks)
    assert (dq - eq).norm() > 0.05 * eq.norm()
    assert (dk - ek).norm() > 0.05 * ek.norm()


def test_a_row_never_attends_to_its_neighbour():
    inputs = make_inputs(dtype=torch.float32)
    out = packed(16)(*inputs)
    changed = [x.clone() for x in inputs]
    for x in changed[:3]:
        x[:6] = 7.0  # rows 0 and 1
    after = packed(16)(*changed)
    assert torch.equal(out[6:], after[6:])
    assert not torch.equal(out[:6], after[:6])


@pytest.mark.parametrize("lengths", [[3], [3, 3], [1, 2, 3], [100, 1, 99, 2], LENGTHS])
def test_every_token_has_one_place_in_the_blocks(lengths):
    context = PackedContext.of(lengths)
    order = torch.cat([b.token_index.flatten() for b in context.blocks])
    found = order if context.place_index is None else order[context.place_index]
    assert torch.equal(found, torch.arange(sum(lengths)))
    assert sum(b.num_rows for b in context.blocks) == len(lengths)
    assert all(isinstance(b, PackedBlock) for b in context.blocks)


@pytest.mark.parametrize("window", [None, 4, 16])
def test_paged_attention_equals_packed_attention(window):
    """Chunks of new tokens over pages, in ragged groups, against one packed forward."""
    lengths, page, dtype = [9, 23], 8, torch.float64
    q, k, v, sinks = make_inputs(lengths=lengths, dtype=dtype)
    expected = packed(window, lengths)(q, k, v, sinks)
    cache = torch.zeros(2, 1, 2, 8, page, 8, dtype=dtype)
    tables = torch.tensor([[1, 4, 0], [2, 7, 3]])
    starts, done, out = [0, 9], [0, 0], torch.zeros_like(expected)
    for chunk in ([4, 10], [1, 1], [4, 12]):
        tokens, slots, blocks, base = [], [], [], 0
        for row, size in enumerate(chunk):
            at = torch.arange(done[row], done[row] + size)
            tokens.append(starts[row] + at)
            slots.append(tables[row, at // page] * page + at % page)
            index = torch.arange(base, base + size)[None]
            longest = done[row] + size
            blocks.append(PagedBlock(index, at[None], tables[row : row + 1], longest))
            base += size
            done[row] += size
        order = torch.cat(tokens)
        context = PagedContext(cache[0], cache[1], torch.cat(slots), tuple(blocks), None)
        out[order] = ops.attention(
            q[order], k[order], v[order], sinks=sinks, window=window, scale=0.3, layer=0,
            context=context,
        )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_the_sinks_share_of_attention_can_be_traced():
    inputs = make_inputs(lengths=[4])
    inputs[3] = torch.full((4,), 50.0, dtype=torch.float64)
    with trace.tracing() as values:
        packed(None, [4])(*inputs)
    assert values["sink_share"][0] > 0.99
