"""The gated delta rule: against its recurrence, over rows that share tokens, and through states."""

import interpreted_kernels  # noqa: F401  before the kernels
import numpy as np
import pytest
import torch

from lockstep.errors import CapabilityError
from lockstep.ops import delta
from lockstep.ops.base import Ops
from lockstep.ops.chunks import States, StateStep
from lockstep.ops.context import PackedContext, PagedContext
from lockstep.ops.contract import CHUNK
from lockstep.ops.cuda import CudaOps
from lockstep.ops.invariant import InvariantOps

G, H, K, V, W = 2, 4, 12, 10, 4
LENGTHS = [1, 63, 64, 65, 130, 200]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # and where a kernel is launched


def inputs(num_tokens, *, seed=0, dtype=torch.float32):
    """(q, k, v, g, beta); decays are large in some places, and nothing in others."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    g = -(draw(num_tokens, H) * 2 - 3).exp()
    parts = draw(num_tokens, G, K), draw(num_tokens, G, K), draw(num_tokens, H, V)
    return [x.to(dtype) for x in (*parts, g, draw(num_tokens, H).sigmoid())]


def recurrence(q, k, v, g, beta):
    """The definition, token by token: equation 10 of arXiv 2412.06464."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(H // G, 1) for x in (q * K**-0.5, k))
    state, out = v.new_zeros(H, K, V), []
    for t in range(len(v)):
        state = g[t].exp()[:, None, None] * state
        wanted = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * wanted[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out)


def gradients(run, parts, weight):
    leaves = [x.clone().requires_grad_() for x in parts]
    out = run(*leaves)
    (out * weight).sum().backward()
    return out.detach(), [x.grad for x in leaves]


@pytest.mark.parametrize("ops", [Ops(), CudaOps()])
def test_rows_and_all_gradients_are_those_of_the_recurrence(ops):
    parts = inputs(sum(LENGTHS), dtype=torch.float64)
    weight = inputs(sum(LENGTHS), seed=1, dtype=torch.float64)[2]
    context = PackedContext.of(LENGTHS)
    found, grads = gradients(lambda *x: ops.delta_rule(*x, 0, context), parts, weight)

    def by_row(*x):
        rows = zip(*(part.split(LENGTHS) for part in x), strict=True)
        return torch.cat([recurrence(*row) for row in rows])

    wanted, exact = gradients(by_row, parts, weight)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
    for mine, theirs in zip(grads, exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


ROWS = [
    np.arange(150),
    np.concatenate([np.arange(140), np.arange(150, 230)]),  # parts in the third chunk
    np.concatenate([np.arange(64), np.arange(230, 240)]),  # parts at a border
    np.concatenate([np.arange(140), np.arange(150, 160), np.arange(240, 245)]),
    np.arange(100),  # begins the first
]


@pytest.mark.parametrize("ops", [Ops(), InvariantOps(), CudaOps()])
def test_rows_that_begin_alike_compute_what_they_would_alone(ops):
    parts = inputs(245)
    weight = torch.randn(245, H, V, generator=torch.Generator().manual_seed(3))
    shared = PackedContext.of_rows(ROWS)
    found, grads = gradients(lambda *x: ops.delta_rule(*x, 0, shared), parts, weight)

    owner = {}
    for number, row in enumerate(ROWS):
        for place, token in enumerate(row):
            owner.setdefault(int(token), (number, place))

    def alone(*x):
        outs = [
            ops.delta_rule(*(p[row] for p in x), 0, PackedContext.of([len(row)])) for row in ROWS
        ]
        return torch.stack([outs[owner[t][0]][owner[t][1]] for t in range(245)])

    wanted, exact = gradients(alone, parts, weight)
    assert torch.equal(found, wanted) or type(ops) is Ops
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(grads, exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_level_that_is_computed_chunk_by_chunk_is_the_same(monkeypatch):
    """As one of more rows is, for whose products there is no room at once."""
    parts, ops, shared = inputs(245), InvariantOps(), PackedContext.of_rows(ROWS)
    weight = torch.randn(245, H, V, generator=torch.Generator().manual_seed(3))
    whole, exact = gradients(lambda *x: ops.delta_rule(*x, 0, shared), parts, weight)
    monkeypatch.setitem(delta.DELTA_WORK_BYTES, "cpu", 1)
    assert [len(list(delta._pieces(level, parts[2]))) for level in shared.chunks.levels][1] == 3
    found, grads = gradients(lambda *x: ops.delta_rule(*x, 0, shared), parts, weight)
    assert torch.equal(found, whole)
    for mine, theirs in zip(grads, exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_chunk_that_rows_share_is_computed_once():
    chunks = PackedContext.of_rows(ROWS).chunks
    # Two shared chunks; four rows part in the third or at a border; the fifth has its own end.
    assert [level.part.stop - level.part.start for level in chunks.levels] == [1, 3, 3, 1]
    assert len(chunks.is_real) == 8


@pytest.mark.parametrize("seed", range(7))
def test_a_sampler_gives_the_bits_of_the_packed_forward_by_any_cut(seed):
    """Sequences that come and go, prefilled to a border or to their end, then token by token."""
    rng, ops = np.random.default_rng(seed), CudaOps() if seed == 6 else InvariantOps()
    num, longest = (2, 80) if seed == 6 else (5, 260)  # the interpreter is slow
    lengths = rng.integers(3, longest, num)
    parts = inputs(int(lengths.sum()), seed=seed)
    x = torch.randn(int(lengths.sum()), 7, generator=torch.Generator().manual_seed(seed))
    weight = torch.randn(7, W, generator=torch.Generator().manual_seed(seed + 1))
    packed = PackedContext.of(lengths.tolist())
    full, full_x = ops.delta_rule(*parts, 1, packed), ops.short_conv(x, weight, 1, packed)
    states = States.zeros(2, num, heads=(G, H), widths=(K, V), tail=(W - 1, 7), dtype=torch.float32)
    first, at = np.cumsum(lengths) - lengths, np.zeros(num, np.int64)
    slots, empty = rng.permutation(num), torch.empty(0)
    while (at < lengths).any():
        ready = np.flatnonzero((at < lengths) & (rng.random(num) < 0.7))
        is_prompt = (at[ready] % CHUNK == 0) & (rng.random(len(ready)) < 0.5)
        rows, prompts = ready[~is_prompt], ready[is_prompt]
        stops = at[prompts] + rng.integers(1, 3, len(prompts)) * CHUNK
        stops = np.minimum(stops, lengths[prompts] - rng.integers(0, 2, len(prompts)))
        prompts, stops = prompts[stops > at[prompts]], stops[stops > at[prompts]]
        fed = np.concatenate([rows, prompts])
        if not len(fed):
            continue
        ends = np.concatenate([at[rows] + 1, stops])
        step = StateStep.of(states, slots[fed], at[fed], ends, num_rows=len(rows))
        fed_to = zip(fed, ends, strict=True)
        tokens = np.concatenate([first[s] + np.arange(at[s], end) for s, end in fed_to])
        context = PagedContext(empty, empty, empty, states=step)
        with torch.inference_mode():
            assert torch.equal(
                ops.delta_rule(*(p[tokens] for p in parts), 1, context), full[tokens]
            )
            assert torch.equal(ops.short_conv(x[tokens], weight, 1, context), full_x[tokens])
        at[fed] = ends


def test_a_convolution_sees_its_own_row_alone_and_is_torchs():
    x, weight = torch.randn(30, 5), torch.randn(5, W)
    found = Ops().short_conv(x, weight, 0, PackedContext.of([2, 20, 8]))
    for part, row in zip(found.split([2, 20, 8]), x.split([2, 20, 8]), strict=True):
        padded = torch.nn.functional.pad(row.t()[None], (W - 1, 0))
        wanted = torch.nn.functional.conv1d(padded, weight[:, None], groups=5)[0].t()
        torch.testing.assert_close(part, torch.nn.functional.silu(wanted))


def test_memory_grows_with_the_tokens():
    def kept(num_tokens):
        storages = {}

        def keep(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        parts = [x.requires_grad_() for x in inputs(num_tokens)]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            Ops().delta_rule(*parts, 0, PackedContext.of([num_tokens]))
        return sum(t.untyped_storage().nbytes() for t in storages.values())

    once, twice = kept(8 * CHUNK), kept(16 * CHUNK)
    assert twice <= 2.1 * once


def test_without_states_a_sampler_is_refused():
    empty = torch.empty(0)
    with pytest.raises(CapabilityError, match="a sampler's states; found PagedContext without"):
        Ops().delta_rule(*inputs(3), 0, PagedContext(empty, empty, empty))


@pytest.mark.parametrize("ops", [Ops(), InvariantOps()])
def test_sigmoid_and_softplus_are_finite_with_their_gradients_at_any_number(ops):
    x = torch.tensor([-200.0, -90.0, -3.0, 0.0, 2.0, 90.0, 200.0], requires_grad=True)
    for found, stock in (
        (ops.sigmoid, torch.sigmoid),
        (ops.softplus, torch.nn.functional.softplus),
    ):
        (grad,) = torch.autograd.grad(found(x).sum(), x)
        (wanted,) = torch.autograd.grad(stock(x).sum(), x)
        torch.testing.assert_close(found(x), stock(x))
        torch.testing.assert_close(grad, wanted, atol=1e-30, rtol=1e-5)
