"""Attention with sinks against the formula: output and all four gradients."""

import numpy as np
import pytest
import torch
from attention_formula import reference_attention
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.ops import packed
from lockstep.ops.base import Ops
from lockstep.ops.context import AttentionSpec, PackedContext, PagedBlock, PagedContext
from lockstep.ops.invariant import InvariantOps

ops = Ops()

LENGTHS = [5, 1, 37, 16, 38]


def make_inputs(heads=4, kv_heads=2, width=8, dtype=torch.float64, has_sinks=True, lengths=LENGTHS):
    g = torch.Generator().manual_seed(0)
    total = sum(lengths)
    q = torch.randn(total, heads, width, generator=g, dtype=dtype)
    k, v = torch.randn(2, total, kv_heads, width, generator=g, dtype=dtype)
    sinks = torch.randn(heads, generator=g, dtype=dtype) if has_sinks else None
    return [q, k, v, sinks]


def upstream(shape, dtype):
    """The same numbers in every dtype."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=g, dtype=torch.bfloat16).to(dtype)


def gradients(function, inputs):
    leaves = [x.clone().requires_grad_() if x is not None else None for x in inputs]
    out = function(*leaves)
    out.backward(upstream(out.shape, out.dtype))
    return out.detach(), [x.grad for x in leaves if x is not None]


def attend_packed(window, lengths=LENGTHS):
    context = PackedContext.of(lengths)
    return lambda q, k, v, s: ops.attention(q, k, v, AttentionSpec(s, window, 0.3), context)


def formula(window, lengths=LENGTHS):
    return lambda q, k, v, s: reference_attention(
        q, k, v, sinks_H=s, window=window, scale=0.3, lengths=lengths
    )


@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4, 16, 37, 64])
def test_packed_attention_equals_the_formula_forward_and_backward(window, has_sinks):
    inputs = make_inputs(has_sinks=has_sinks)
    out, grads = gradients(attend_packed(window), inputs)
    expected, expected_grads = gradients(formula(window), inputs)
    # float64: sums of at most 38 terms of order 1, so 1e-12 leaves a factor of 100 over rounding
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert len(grads) == 3 + has_sinks
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_tempting_shortcut_gets_only_dq_and_dk_wrong():
    """Rescaling by sigmoid(lse - sink) with a detached lse: why all four gradients are tested."""

    def shortcut(q, k, v, s):
        plain = ops.attention(q, k, v, AttentionSpec(None, None, 0.3), PackedContext.of([len(q)]))
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.3
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf"))
        return plain * torch.sigmoid(scores.logsumexp(-1).detach() - s[:, None]).t()[..., None]

    inputs = make_inputs(lengths=[40])
    out, (dq, dk, dv, dsinks) = gradients(shortcut, inputs)
    expected, (eq, ek, ev, esinks) = gradients(formula(None, [40]), inputs)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(dv, ev)
    torch.testing.assert_close(dsinks, esinks)
    assert (dq - eq).norm() > 0.05 * eq.norm()
    assert (dk - ek).norm() > 0.05 * ek.norm()


# Rows that begin alike, two levels deep, and one that shares nothing.
BRANCHES = [np.arange(90), np.r_[0:50, 90:130], np.r_[0:50, 90:100, 130:171], np.r_[171:175]]


def formula_over_rows(rows, window):
    """Every row by itself; a token that several have is read in the first of them."""
    lengths = [len(row) for row in rows]
    flat = torch.from_numpy(np.concatenate(rows))
    place = torch.from_numpy(np.unique(flat.numpy(), return_index=True)[1])

    def run(q, k, v, s):
        out = reference_attention(
            q[flat], k[flat], v[flat], sinks_H=s, window=window, scale=0.3, lengths=lengths
        )
        return out[place]

    return run


@pytest.mark.parametrize("window", [None, 1, 5, 32, 33, 70, 90])
def test_rows_that_begin_alike_equal_the_formula_row_by_row(window):
    inputs = make_inputs(lengths=[175])
    context = PackedContext.of_rows(BRANCHES)

    def branches(q, k, v, s):
        return ops.attention(q, k, v, AttentionSpec(s, window, 0.3), context)

    out, grads = gradients(branches, inputs)
    expected, expected_grads = gradients(formula_over_rows(BRANCHES, window), inputs)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


# Symbols stand for 70 tokens each. A stem needs 128.
FORESTS = {
    "a group": ["aaab", "aaac", "aaad"],
    "a tree": ["aabbcc", "aabbdd", "aabe", "aabf", "ghi", "ghj"],
    "a session whose turns are rows": ["aa", "aabb", "aabbcc", "aabbccd"],
    "equal rows": ["aab", "aab", "aab"],
    "a short beginning of all": ["abbx", "abby", "accx", "accy"],
    "no common beginning": ["aaa", "bbb"],
}


def rows_of(forest, size=70):
    """Each row's tokens: symbol n of a row is the tokens of its beginning up to n."""
    beginnings = {}
    for row in forest:
        for n in range(len(row)):
            beginnings.setdefault(row[: n + 1], len(beginnings))
    places = [[beginnings[row[: n + 1]] for n in range(len(row))] for row in forest]
    return [np.concatenate([np.arange(p * size, (p + 1) * size) for p in of]) for of in places]


def sharing(rows):
    """(context of rows that share their beginnings, number of distinct tokens)."""
    return PackedContext.of_rows(rows), int(max(row.max() for row in rows)) + 1


@pytest.mark.parametrize("window", [None, 100, 1000])
@pytest.mark.parametrize("name", FORESTS)
def test_long_beginnings_are_read_once_and_equal_the_formula_row_by_row(name, window):
    rows = rows_of(FORESTS[name])
    context, size = sharing(rows)
    inputs = make_inputs(lengths=[size])
    out, grads = gradients(
        lambda q, k, v, s: ops.attention(q, k, v, AttentionSpec(s, window, 0.3), context), inputs
    )
    expected, expected_grads = gradients(formula_over_rows(rows, window), inputs)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=6))
@settings(max_examples=300 if PROOF else 40, deadline=None)
def test_a_token_reads_each_one_before_it_once(forest):
    rows = rows_of(forest)
    stems, runs = packed.stems_of(rows)
    size = int(max(row.max() for row in rows)) + 1
    wanted, found = np.zeros((size, size), int), np.zeros((size, size), int)
    for row in rows:
        wanted[np.ix_(row, row)] |= np.tri(len(row), dtype=int)
    owned = np.zeros(size, bool)
    for run in runs:  # a token of several runs asks in one of them
        asking = ~owned[run]
        found[np.ix_(run[asking], run)] += np.tri(len(run), dtype=int)[asking]
        owned[run] = True
    for keys, queries in stems:
        found[np.ix_(queries, keys)] += 1
    assert owned.all()
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORESTS)
def test_invariant_attention_gives_shared_rows_the_bits_of_rows_by_themselves(name, dtype, window):
    rows = rows_of(FORESTS[name])
    context, size = sharing(rows)
    q, k, v, sinks = make_inputs(lengths=[size], dtype=dtype)
    invariant, spec = InvariantOps(), AttentionSpec(sinks, window, 0.3)
    out = invariant.attention(q, k, v, spec, context)
    for row in rows:
        at = torch.from_numpy(row)
        alone = invariant.attention(q[at], k[at], v[at], spec, PackedContext.of([len(row)]))
        assert torch.equal(out[at], alone)


def test_bfloat16_over_stems_is_as_close_to_the_formula_as_over_whole_rows():
    rows = rows_of(FORESTS["a tree"])
    context, size = sharing(rows)
    inputs = make_inputs(lengths=[size], dtype=torch.bfloat16)
    exact = [x.double() for x in inputs]

    def run(q, k, v, s):
        return ops.attention(q, k, v, AttentionSpec(s, None, 0.3), context)

    out, grads = gradients(run, inputs)
    expected, expected_grads = gradients(formula_over_rows(rows, None), exact)
    for found, wanted in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (found.double() - wanted).norm() < 0.01 * wanted.norm()


def test_a_window_longer_than_a_key_block_of_the_kernel_equals_the_formula():
    """The kernel takes 512 keys at once: some of its blocks are hidden as a whole."""
    lengths, window = [1300, 900], 700
    inputs = make_inputs(heads=2, kv_heads=1, lengths=lengths)
    out, grads = gradients(attend_packed(window, lengths), inputs)
    expected, expected_grads = gradients(formula(window, lengths), inputs)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("window", [None, 16])
def test_bfloat16_is_as_close_to_the_formula_as_its_roundings_are(window):
    inputs = make_inputs(dtype=torch.bfloat16)
    exact = [x.double() for x in inputs]
    out, grads = gradients(attend_packed(window), inputs)
    expected, expected_grads = gradients(formula(window), exact)
    # 8 bits: 2^-9 for each of the few roundings on the way, relative to the largest entries
    for found, wanted in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (found.double() - wanted).norm() < 0.01 * wanted.norm()


def sink_gradients(q, k, v, sinks, grad_out):
    """The sink's gradient by the two formulas, and by one that reads alike, from whole matrices.

    (-sum_i P_ih (dO_i . O_i), -sum_i P_ih sum_j P_ij dL/dP_ij, the second with dL/dS_ij in place of
    dL/dP_ij), P_ih the share of head h's sink.
    """
    keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * 0.3
    scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf"))
    whole = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1).softmax(-1)
    probs, share = whole[..., :-1], whole[..., -1]
    through = (grad_out * torch.einsum("hqk,khd->qhd", probs, values)).sum(-1).t()
    grad_probs = torch.einsum("qhd,khd->hqk", grad_out, values)
    return (
        -(share * through).sum(-1),
        -(share * (probs * grad_probs).sum(-1)).sum(-1),
        -(share * (probs * (probs * (grad_probs - through[..., None]))).sum(-1)).sum(-1),
    )


def test_a_sinks_gradient_is_that_of_both_formulas_and_not_of_the_literal_reading():
    """dL/dS_h = -sum_i P_ih (dO_i . O_i) = -sum_i P_ih sum_j P_ij dL/dP_ij. With the gradient of
    the scores, dL/dS_ij, in place of that of the probabilities, it is another number."""
    inputs = make_inputs(lengths=[40])
    _, (_, _, _, dsinks) = gradients(attend_packed(None, [40]), inputs)
    by_outputs, by_probs, by_scores = sink_gradients(*inputs, upstream((40, 4, 8), torch.double))
    torch.testing.assert_close(dsinks, by_outputs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dsinks, by_probs, rtol=1e-12, atol=1e-12)
    assert (dsinks - by_scores).norm() > 0.5 * dsinks.norm()


class Largest(TorchDispatchMode):
    """The most numbers of any tensor that an operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("lengths", [[2000], [700, 600, 500, 100, 100]])
def test_with_a_window_no_tensor_is_larger_than_the_queries(lengths):
    inputs = make_inputs(dtype=torch.float32, lengths=lengths)
    with Largest() as largest:
        gradients(attend_packed(32, lengths), inputs)
    assert largest.numbers == inputs[0].numel()


def test_a_shared_beginning_is_attended_from_once():
    """Chunks of queries whose outputs are all read in another row are left out."""
    shared, own, num_rows = 10 * packed.CHUNK, 2 * packed.CHUNK, 4
    rows = [np.r_[0:shared, shared + own * i : shared + own * (i + 1)] for i in range(num_rows)]
    layout = packed.layout_of(PackedContext.of_rows(rows), 16)
    assert sum(piece.shape[0] for piece in layout.pieces) == 10 + 2 * num_rows


def test_a_row_never_attends_to_its_neighbour():
    inputs = make_inputs(dtype=torch.float32)
    out = attend_packed(16)(*inputs)
    changed = [x.clone() for x in inputs]
    for x in changed[:3]:
        x[:6] = 7.0  # rows 0 and 1
    after = attend_packed(16)(*changed)
    assert torch.equal(out[6:], after[6:])
    assert not torch.equal(out[:6], after[:6])


@pytest.mark.parametrize("lengths", [[3], [3, 3], [1, 2, 3], [100, 1, 99, 2], LENGTHS])
def test_every_token_has_one_place_in_the_blocks(lengths):
    context = PackedContext.of(lengths)
    order = torch.cat([b.flatten() for b in context.blocks])
    found = order if context.place_index is None else order[context.place_index]
    assert torch.equal(found, torch.arange(sum(lengths)))
    assert sum(len(b) for b in context.blocks) == len(lengths)


@pytest.mark.parametrize("window", [None, 4, 16])
def test_paged_attention_equals_packed_attention(window):
    """Chunks of new tokens over pages, in ragged groups, against one packed forward."""
    lengths, page, dtype = [9, 23], 8, torch.float64
    q, k, v, sinks = make_inputs(lengths=lengths, dtype=dtype)
    expected = attend_packed(window, lengths)(q, k, v, sinks)
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
            blocks.append(PagedBlock(index, at[None], tables[row : row + 1], done[row] + size))
            base += size
            done[row] += size
        order = torch.cat(tokens)
        context = PagedContext(cache[0], cache[1], torch.cat(slots), tuple(blocks), None)
        out[order] = ops.attention(
            q[order], k[order], v[order], AttentionSpec(sinks, window, 0.3), context
        )
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
