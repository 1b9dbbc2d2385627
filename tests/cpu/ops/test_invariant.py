"""The batch-invariant backend: a row's bits in any company, its values, and its gradients.

# T tokens  B sequences of a block  Q new tokens of each  H query heads  G key heads  D head width
"""

import math
from contextlib import nullcontext
from itertools import accumulate, product

import numpy as np
import pytest
import torch
from attention_formula import reference_attention
from full_counts import PROOF

from lockstep.ops import head, invariant, selftest
from lockstep.ops.base import Ops
from lockstep.ops.context import (
    AttentionSpec,
    PackedContext,
    PagedBlock,
    PagedContext,
    ResidentRows,
    Support,
)
from lockstep.ops.invariant import InvariantOps, Rules
from lockstep.types import Ragged

plain = Ops()

DTYPES = (torch.float32, torch.bfloat16)
THREADS = ((1, 1), (2, 1), (1, 2), (2, 2))
MODES = (nullcontext, torch.no_grad, torch.inference_mode)
NUM_ROWS = 300
COUNTS = (*range(1, 41), 63, 64, 65, 127, 200, 299)


pytestmark = pytest.mark.usefixtures("process_settings")


# -- one op, one row ----------------------------------------------------------------------------


def normal(*shape, seed=0, dtype=torch.float32, scale=1.0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def linear_case(outputs, inputs, *, has_bias):
    weights = [normal(outputs, inputs, seed=1, scale=inputs**-0.5)]
    weights += [normal(outputs, seed=2)] if has_bias else []
    return [normal(NUM_ROWS, inputs)], weights, lambda b, rows, w: b.linear(*rows, *w)


def log_probs_case(outputs, inputs, **options):
    ids = torch.randint(outputs, (NUM_ROWS,), generator=torch.Generator().manual_seed(3))
    return (
        [normal(NUM_ROWS, inputs), ids],
        [normal(outputs, inputs, seed=1, scale=inputs**-0.5)],
        lambda b, rows, w: b.log_probs(rows[0], w[0], rows[1], **options),
    )


def log_softmax_case(vocab, *, is_cut=False, temperature=1.0):
    kept = normal(NUM_ROWS, vocab, seed=1) > -0.5
    kept[:, 0] = True
    return (
        [normal(NUM_ROWS, vocab, scale=3.0), kept],
        [],
        lambda b, rows, w: b.log_softmax(
            rows[0], temperature=temperature, kept=rows[1] if is_cut else None
        ),
    )


def rope_case(heads, width):
    angle = normal(NUM_ROWS, 1, width, seed=1, scale=3.0)
    return (
        [normal(NUM_ROWS, heads, width), angle.cos(), angle.sin()],
        [],
        lambda b, rows, w: b.rope(*rows),
    )


def case(rows, weights, function):
    return [normal(NUM_ROWS, *shape, scale=2.0) for shape in rows], weights, function


CASES = {
    # Shapes of one vector and its tail, and of a vocabulary.
    "linear 96 64": lambda: linear_case(96, 64, has_bias=False),
    "linear 97 40 bias": lambda: linear_case(97, 40, has_bias=True),
    "linear 512 128 bias": lambda: linear_case(512, 128, has_bias=True),
    "linear 128 1536": lambda: linear_case(128, 1536, has_bias=False),
    "linear 4096 128": lambda: linear_case(4096, 128, has_bias=False),
    "router 8 256 bias": lambda: linear_case(8, 256, has_bias=True),
    "rms_norm": lambda: case(
        [(72,)], [normal(72, seed=1)], lambda b, rows, w: b.rms_norm(*rows, *w, 1e-6)
    ),
    "rms_norm of heads": lambda: case(
        [(6, 16)], [normal(6, 16, seed=1)], lambda b, rows, w: b.rms_norm(*rows, *w, 1e-6)
    ),
    "swiglu": lambda: case([(86,)], [], lambda b, rows, w: b.swiglu(*rows)),
    "swiglu wide": lambda: case([(1030,)], [], lambda b, rows, w: b.swiglu(*rows)),
    "swiglu_clamped": lambda: case(
        [(86,)], [], lambda b, rows, w: b.swiglu(*rows, alpha=1.702, limit=1.5)
    ),
    "geglu": lambda: case([(86,)], [], lambda b, rows, w: b.geglu(*rows)),
    "geglu wide": lambda: case([(1030,)], [], lambda b, rows, w: b.geglu(*rows)),
    "rms_norm, scaled before it rounds": lambda: case(
        [(72,)], [normal(72, seed=1)], lambda b, rows, w: b.rms_norm(*rows, w[0].float() + 1, 1e-6)
    ),
    "rope": lambda: rope_case(6, 16),
    "route": lambda: case([(8,)], [], lambda b, rows, w: b.route(*rows, 2)),
    "route of 32": lambda: case([(32,)], [], lambda b, rows, w: b.route(*rows, 4)),
    "route, shares of all": lambda: case(
        [(32,)], [], lambda b, rows, w: b.route(*rows, 4, is_normalized=False)
    ),
    "combine": lambda: case([(4, 72), (4,)], [], lambda b, rows, w: b.combine(*rows)),
    "log_probs 560 64": lambda: log_probs_case(560, 64),
    "log_probs 97 32 tempered": lambda: log_probs_case(97, 32, temperature=0.7),
    "log_softmax 560": lambda: log_softmax_case(560),
    "log_softmax 97 cut": lambda: log_softmax_case(97, is_cut=True, temperature=0.7),
}


def make_case(name, dtype=torch.float32):
    rows, weights, function = CASES[name]()
    if dtype != torch.float32:
        is_rope = name == "rope"  # its cos and sin are float32 in every dtype
        rows = [
            r if i and is_rope else r.to(dtype) if r.is_floating_point() else r
            for i, r in enumerate(rows)
        ]
        weights = [w.to(dtype) for w in weights]
    return rows, weights, function


def as_tuple(out):
    return out if isinstance(out, tuple) else (out,)


def assert_equal(found, wanted, what):
    for a, b in zip(as_tuple(found), as_tuple(wanted), strict=True):
        assert torch.equal(a, b), f"{what}: {int((a != b).sum())} of {a.numel()} differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_in_any_company(name, dtype):
    """Alone, among few or many, at any place, in another order, with or without a gradient, and
    with other threads than those of the rows that it is compared with."""
    backend, rng = InvariantOps(), np.random.default_rng(0)
    rows, weights, function = make_case(name, dtype)
    leaves = [w.requires_grad_() for w in weights]
    for threads in THREADS:
        torch.set_num_threads(threads[0])
        whole = tuple(x.detach() for x in as_tuple(function(backend, rows, leaves)))
        order = torch.from_numpy(rng.permutation(NUM_ROWS))
        with torch.no_grad():
            mixed = function(backend, [r[order] for r in rows], leaves)
        assert_equal(mixed, tuple(x[order] for x in whole), "another order")
        torch.set_num_threads(threads[1])
        for i, count in enumerate(COUNTS):
            at = int(rng.integers(NUM_ROWS - count + 1))
            part = slice(at, at + count)
            with MODES[i % 3 if threads[0] == 1 else (i + 1) % 3]():
                found = function(backend, [r[part] for r in rows], leaves)
            wanted = tuple(x[part] for x in whole)
            assert_equal(found, wanted, f"{name}, rows {at}:{at + count}, threads {threads}")


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_plain_backend(name):
    rows, weights, function = make_case(name)
    found = as_tuple(function(InvariantOps(), rows, weights))
    for a, b in zip(found, as_tuple(function(plain, rows, weights)), strict=True):
        # Sums of at most 1536 products whose sum is of order 1: sqrt(1536) * 2^-24 = 2e-6.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_values_are_float32_ones_rounded(name):
    """Each op rounds at most four results on its way, each by 2^-8 of a value of at most some 8."""
    rows, weights, function = make_case(name, torch.bfloat16)
    found = as_tuple(function(InvariantOps(), rows, weights))
    wide_rows = [r.float() if r.is_floating_point() else r for r in rows]
    wanted = as_tuple(function(plain, wide_rows, [w.float() for w in weights]))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=4 * 2**-8, atol=4 * 8 * 2**-8)


def gradients(function, leaves):
    """Of what is floating in the output, each element weighed by a normal number."""
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = [x for x in as_tuple(function(*leaves)) if x.is_floating_point()]
    total = torch.stack([(x * normal(*x.shape, seed=9)).sum() for x in out]).sum()
    return torch.autograd.grad(total, leaves)


def relative_error(found, wanted):
    """Of the norms; a gradient that is 0 is held against 1, what comes from above per element."""
    wanted = wanted.double()
    return float((found.double() - wanted).norm() / max(float(wanted.norm()), 1.0))


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("log_softmax")])
def test_gradients_are_those_of_the_plain_backend(name):
    rows, weights, function = make_case(name)
    is_leaf = [r.is_floating_point() and not (name == "rope" and i) for i, r in enumerate(rows)]

    def call(backend):
        def run(*leaves):
            left = iter(leaves)
            inputs = [next(left) if leaf else r for r, leaf in zip(rows, is_leaf, strict=True)]
            return function(backend, inputs, list(left))

        return run

    leaves = [r for r, leaf in zip(rows, is_leaf, strict=True) if leaf] + weights
    found, wanted = gradients(call(InvariantOps()), leaves), gradients(call(plain), leaves)
    for a, b in zip(found, wanted, strict=True):
        # Sums of at most 4096 terms: sqrt(4096) * 2^-24 = 4e-6 of their norm.
        assert relative_error(a, b) < 2e-5


@pytest.mark.parametrize("ops", [plain, InvariantOps()])
def test_gelu_is_that_of_torch_in_its_tanh_form(ops):
    x = normal(200, 74, scale=6.0)

    def formula(x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.gelu(gate, approximate="tanh") * up

    wanted = formula(x.double()).float()
    # exp of up to 1e3 has an error of a few roundings of its argument, where the result is small.
    torch.testing.assert_close(ops.geglu(x), wanted, rtol=1e-5, atol=2e-5)
    (found,), (wanted,) = gradients(ops.geglu, [x]), gradients(formula, [x.double()])
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("ops", [plain, InvariantOps()])
def test_routes_by_sigmoids_are_finite_with_their_gradients_at_any_logit(ops):
    logits = torch.tensor([[-200.0, -50.0, 0.0, 3.0, 90.0]])
    chosen = torch.tensor([[0, 2, 3]])

    def weights(x):
        return ops.route_by_sigmoid(x, 3, bias=torch.zeros(5), experts=chosen)[0]

    wanted = logits.gather(1, chosen).sigmoid()
    torch.testing.assert_close(weights(logits), wanted / wanted.sum())
    (found,) = gradients(weights, [logits])
    assert found.isfinite().all() and found[0, 2] != 0


def test_a_norm_in_float32_scales_before_it_rounds():
    x, weight = normal(50, 72).bfloat16(), normal(72, seed=1)
    wanted = torch.nn.functional.rms_norm(x.float(), (72,), weight, 1e-6).bfloat16()
    for ops in (plain, InvariantOps()):
        assert torch.equal(ops.rms_norm(x, weight, 1e-6), wanted)


def test_the_clamped_activation_has_the_gradient_of_its_formula():
    limit, alpha, width = 7.0, 1.702, 37
    x = normal(200, 2 * width, scale=6.0)
    gate, up = x.chunk(2, -1)
    regions = (gate > limit, gate < -limit, up > limit, up < -limit, up.abs() < limit)
    assert all(int(r.sum()) > 100 for r in regions)

    def formula(x):
        gate, up = x.chunk(2, -1)
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)

    (found,) = gradients(lambda x: InvariantOps().swiglu(x, alpha=alpha, limit=limit), [x])
    (wanted,) = gradients(formula, [x.double()])
    # A few roundings of 2^-24 on values of up to 8 * 7.
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=2e-5)
    above = gate > limit
    assert not found[:, :width][above].any() and not found[:, width:][up.abs() > limit].any()


# -- small products and experts -----------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4, 8, 16, 64])
def test_small_products_have_the_same_bits_on_any_number_of_threads(num_threads):
    """MKL on AMD's CPUs splits the sums of a small product over threads, unless others are computed
    with it: attention of one sequence with one key head, routers, adapters, gates."""
    widths = {"linear": (1, 2, 5, 8, 9, 16, 23, 32, 40, 96, 200), "matmul": (16, 32, 48, 64)}
    for op, inner in product(widths, (16, 64, 100, 2048)):
        for width in widths[op]:
            ops, x, y = InvariantOps(), normal(300, inner), normal(width, inner, seed=1)
            torch.set_num_threads(num_threads)
            for num_rows in (1, 4, 8, 12, 31, 64, 136, 300):
                found = []
                for threads, rows in ((1, x), (num_threads, x[:num_rows])):
                    torch.set_num_threads(threads)
                    with torch.inference_mode():
                        if op == "linear":
                            found.append(ops.linear(rows, y)[:num_rows])
                        else:
                            found.append(ops.matmul(rows[None], y.t()[None])[0, :num_rows])
                assert torch.equal(*found), (op, num_rows, inner, width)


@pytest.mark.parametrize("num_threads", [1, 2, 4, 16])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_one_sequence_with_one_key_head_decodes_to_the_bits_of_the_prefill(num_threads, head_dim):
    """A product that is alone in its batch: float32, since bfloat16 rounds the difference away in
    all but a few of a thousand tokens."""
    ops, length = InvariantOps(), 200
    q = normal(length, 8, head_dim)
    k, v = normal(length, 1, head_dim, seed=1), normal(length, 1, head_dim, seed=2)
    spec = AttentionSpec(None, None, head_dim**-0.5)
    torch.set_num_threads(1)
    full = ops.attention(q, k, v, spec, PackedContext.of([length]))
    torch.set_num_threads(num_threads)
    keys, values = k.new_zeros(2, 1, 1, 13, 16, head_dim)
    for at in range(length):
        here = slice(at, at + 1)
        context = PagedContext.of(keys, values, np.arange(13)[None], [at], [at + 1])
        with torch.inference_mode():
            out = ops.attention(q[here], k[here], v[here], spec, context)
        assert torch.equal(out, full[here]), at


EXPERT_COUNTS = (
    [0, 1, 37, 2],
    [3, 0, 0, 0],
    [0, 0, 0, 70],
    [1, 1, 1, 1],
    [2, 2, 2, 2],
    [5, 5, 5, 5],
    [64, 64, 64, 64],
    [65, 65, 65, 65],
    [4, 8, 1, 16],
    [70, 1, 3, 66],
    [0, 0, 0, 0],
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(48, 32), (128, 128), (96, 512)])
def test_an_experts_rows_have_the_bits_of_linear_whatever_the_others_get(shape, has_bias, dtype):
    """Experts one by one, all at once where they get the same number of rows, and packed."""
    backend, (N, K) = InvariantOps(), shape
    weight = normal(4, N, K, dtype=dtype, scale=K**-0.5).requires_grad_()
    bias = normal(4, N, seed=1, dtype=dtype) if has_bias else None
    x = normal(4, 80, K, seed=2, dtype=dtype)
    for threads in THREADS:
        torch.set_num_threads(threads[0])
        whole = [
            backend.linear(x[e], weight[e], None if bias is None else bias[e]) for e in range(4)
        ]
        torch.set_num_threads(threads[1])
        for counts in EXPERT_COUNTS:
            starts = [min(7 * e, 80 - n) for e, n in enumerate(counts)]
            parts = [slice(s, s + n) for s, n in zip(starts, counts, strict=True)]
            rows = torch.cat([x[e, part] for e, part in enumerate(parts)])
            wanted = torch.cat([whole[e][part] for e, part in enumerate(parts)])
            for mode in MODES:
                with mode():
                    found = backend.expert_linear(rows, weight, bias, counts)
                assert_equal(found, wanted, f"{counts}, {mode.__name__}, threads {threads}")


@pytest.mark.parametrize("counts", [c for c in EXPERT_COUNTS if sum(c)])
def test_experts_have_the_plain_values(counts):
    x, weight, bias = normal(sum(counts), 32), normal(4, 48, 32, seed=1), normal(4, 48, seed=2)
    a, b = (o.expert_linear(x, weight, bias, counts) for o in (InvariantOps(), plain))
    assert relative_error(a, b) < 1e-5  # sums of 32 terms: 3e-7


# -- the log-prob head --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_cut", [True, False])
def test_the_samplers_log_softmax_is_the_heads_number(monkeypatch, dtype, is_cut):
    """What a decode step records, over packed weights, and the trainer's in chunks of rows."""
    backend, vocab = InvariantOps(), 560
    hidden, weight = normal(90, 64, dtype=dtype), normal(vocab, 64, seed=1, dtype=dtype, scale=0.3)
    ids = torch.randint(vocab, (90,), generator=torch.Generator().manual_seed(2))
    kept, support = None, None
    if is_cut:
        kept = normal(90, vocab, seed=3) > 0.0
        kept[torch.arange(90), ids] = True
        support = Support.of(Ragged.of([row.nonzero()[:, 0].numpy() for row in kept]))
    for rows in (1, 16, 48, 1000):
        monkeypatch.setattr(head, "CHUNK_BYTES", rows * 4 * vocab)
        found, _ = backend.log_probs(
            hidden.requires_grad_(), weight, ids, temperature=0.8, support=support
        )
        for count in (1, 2, 3, 7, 64):
            with torch.inference_mode():
                logits = backend.linear(hidden[:count], weight)
                part = None if kept is None else kept[:count]
                logp = backend.log_softmax(logits, temperature=0.8, kept=part)
            wanted = logp.gather(1, ids[:count, None])[:, 0]
            assert torch.equal(found[:count], wanted)


# -- attention ----------------------------------------------------------------------------------

LENGTHS = (1, 127, 300, 128, 2, 129, 256, 40)
WINDOWS = (None, 1, 40, 128, 130)
HEADS = ((4, 4, 16), (4, 2, 8), (8, 1, 64))
PAGE_SIZES = (16, 48, 128)


def proved_ops(heads, dtype, has_sinks, window):
    """Ops with the rules that the self-test finds on this machine, where two threads may compute:
    attention in other schedules than its own must keep its bits under them."""
    ops, lengths = InvariantOps(), selftest.ROW_LENGTHS
    q, k, v, sinks = attention_inputs(heads, dtype, lengths, has_sinks)
    args = (q, k, v, AttentionSpec(sinks, window, heads[2] ** -0.5), PackedContext.of(lengths))
    torch.set_num_threads(2)
    while failed := selftest._first_failure(ops, [selftest._Call("attention", args, {})])[0]:
        if not selftest._change_rules(ops, failed):
            pytest.skip("this machine cannot keep the contract")
    return ops


def attention_inputs(heads, dtype=torch.float32, lengths=LENGTHS, has_sinks=True):
    H, G, D = heads
    T = sum(lengths)
    q = normal(T, H, D, dtype=dtype, scale=2.0)
    k, v = normal(T, G, D, seed=1, dtype=dtype), normal(T, G, D, seed=2, dtype=dtype)
    return q, k, v, normal(H, seed=3, dtype=dtype) if has_sinks else None


def attend(backend, inputs, context, window):
    q, k, v, sinks = inputs
    return backend.attention(q, k, v, AttentionSpec(sinks, window, q.shape[-1] ** -0.5), context)


def starts_of(lengths):
    return [0, *accumulate(lengths)][:-1]


class OneCache:
    """The pages of some sequences, dealt out in no order, and their resident rows: an engine's
    memory by hand, full of numbers that nobody may read."""

    def __init__(self, inputs, lengths, page_size):
        self.inputs, self.lengths, self.size = inputs, lengths, page_size
        _, G, D = inputs[1].shape
        wide = math.ceil(max(lengths) / page_size) + 1
        order = np.random.default_rng(page_size).permutation(len(lengths) * wide)
        self.table = torch.from_numpy(order).view(len(lengths), wide)
        self.caches = [
            torch.full((1, G, len(order), page_size, D), 1e4, dtype=inputs[1].dtype) for _ in "kv"
        ]
        room = math.ceil((max(lengths) + 1) / 384) * 384
        shape, dtype = (1, len(lengths), G, room, D), inputs[1].dtype
        self.resident = [torch.full(shape, -1e4, dtype=dtype) for _ in "kv"]
        self.done = [0] * len(lengths)

    def step(self, backend, sizes, window, *, is_resident):
        """Runs `sizes[row]` more tokens of each row; (their indices among all tokens, outputs).

        Rows of one new token are a block, resident or not, and go first; others are padded to the
        longest by repeating their last query, as the engine does it.
        """
        singles = [r for r, n in enumerate(sizes) if n == 1]
        chunks = [r for r, n in enumerate(sizes) if n > 1]
        begin = starts_of(self.lengths)
        order, written, blocks, places = [], [], [], []
        for rows in (singles, chunks):
            if not rows:
                continue
            longest = max(sizes[r] for r in rows)
            steps = [torch.arange(longest).clamp(max=sizes[r] - 1) for r in rows]
            positions = torch.stack([self.done[r] + s for r, s in zip(rows, steps, strict=True)])
            first = sum(len(o) for o in order)
            tokens = []
            for r, s in zip(rows, steps, strict=True):
                tokens.append(sum(len(o) for o in order) + s)
                at = torch.arange(self.done[r], self.done[r] + sizes[r])
                order.append(begin[r] + at)
                written.append(self.table[r, at // self.size] * self.size + at % self.size)
            index = torch.stack(tokens)
            num_keys = math.ceil((int(positions.max()) + 1) / 16) * 16
            pages = self.table[rows, : math.ceil(num_keys / self.size)]
            resident = None
            if rows is singles and is_resident:
                resident = self._resident_rows(rows)
            blocks.append(
                PagedBlock(
                    None if rows is singles else index,
                    positions,
                    pages,
                    min(num_keys, pages.shape[1] * self.size),
                    first_token=first,
                    resident=resident,
                )
            )
            places.append(index.flatten())
        tokens = torch.cat(places).numpy()
        place = np.empty(sum(len(o) for o in order), np.int64)
        place[tokens[::-1]] = np.arange(len(tokens))[::-1]
        index = torch.cat(order)
        context = PagedContext(
            self.caches[0],
            self.caches[1],
            torch.cat(written),
            tuple(blocks),
            torch.from_numpy(place),
        )
        q, k, v, sinks = self.inputs
        with torch.inference_mode():
            out = attend(backend, (q[index], k[index], v[index], sinks), context, window)
        for r in (*singles, *chunks):
            self.done[r] += sizes[r]
        return index, out

    def _resident_rows(self, rows):
        """Copied anew from the pages: the row of a sequence changes from step to step."""
        keys, values = self.resident
        for rank, r in enumerate(rows):
            for cache, room in zip(self.caches, self.resident, strict=True):
                at = torch.arange(self.done[r])
                flat = cache[0].flatten(1, 2)
                places = self.table[r, at // self.size] * self.size + at % self.size
                room[0, rank, :, : self.done[r]] = flat[:, places]
        G, room = keys.shape[2:4]
        first = (torch.arange(len(rows))[:, None] * G + torch.arange(G)) * room
        write = first + torch.tensor([self.done[r] for r in rows])[:, None]
        return ResidentRows(keys, values, write.flatten())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", HEADS)
def test_a_token_attends_with_the_same_bits_decoded_chunked_prefilled_or_packed(
    heads, window, has_sinks, dtype
):
    # In the fast profile each combination meets one kind of cache, and each kind ten of them.
    seed = [heads[2], window or 0, has_sinks, dtype.itemsize]
    backend, rng = proved_ops(heads, dtype, has_sinks, window), np.random.default_rng(seed)
    inputs = attention_inputs(heads, dtype, has_sinks=has_sinks)
    whole = attend(backend, inputs, PackedContext.of(LENGTHS), window)
    q, k, v, sinks = inputs
    for row, (start, length) in enumerate(zip(starts_of(LENGTHS), LENGTHS, strict=True)):
        part = slice(start, start + length)
        torch.set_num_threads(1 + row % 2)
        alone = attend(
            backend, (q[part], k[part], v[part], sinks), PackedContext.of([length]), window
        )
        assert_equal(alone, whole[part], f"row {row} alone")
    caches = list(product(PAGE_SIZES, (True, False)))
    if not PROOF:
        caches = [caches[int(rng.integers(len(caches)))]]
    for page_size, is_resident in caches:
        torch.set_num_threads(int(rng.integers(1, 3)))
        cache = OneCache(inputs, LENGTHS, page_size)
        while cache.done != list(LENGTHS):
            left = [n - d for n, d in zip(LENGTHS, cache.done, strict=True)]
            wanted = rng.choice([0, 1, 1, 2, 17, 100, 300], len(LENGTHS))
            sizes = [min(n, int(s)) for n, s in zip(left, wanted, strict=True)]
            if not any(sizes):
                continue
            index, out = cache.step(backend, sizes, window, is_resident=is_resident)
            what = f"pages of {page_size}, resident {is_resident}, after {cache.done}"
            assert_equal(out, whole[index], what)


@pytest.mark.parametrize(("window", "is_resident"), [(None, True), (40, False), (130, True)])
def test_every_position_decodes_to_the_bits_of_the_prefill(window, is_resident):
    """One token at a time, across two borders of a key block, beside a row 40 tokens behind."""
    backend, lengths = InvariantOps(), (300, 260)
    inputs = attention_inputs((4, 2, 16), lengths=lengths)
    whole = attend(backend, inputs, PackedContext.of(lengths), window)
    cache = OneCache(inputs, lengths, 48)
    for position in range(300):
        index, out = cache.step(backend, [1, int(position >= 40)], window, is_resident=is_resident)
        assert_equal(out, whole[index], f"position {position}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 40])
def test_rows_that_share_their_beginning_attend_as_if_each_stood_alone(window, dtype):
    backend = InvariantOps()
    q, k, v, sinks = attention_inputs((4, 2, 16), dtype, lengths=(330,))
    stem = np.arange(150)
    rows = [
        np.concatenate([stem, np.arange(150, 290)]),
        stem[:127],
        np.concatenate([stem[:129], np.arange(290, 330)]),
        stem,
    ]
    out = attend(backend, (q, k, v, sinks), PackedContext.of_rows(rows), window)
    for row in rows:
        alone = attend(
            backend, (q[row], k[row], v[row], sinks), PackedContext.of([len(row)]), window
        )
        assert_equal(alone, out[row], f"the row of {len(row)}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize(
    ("heads", "window"),
    [(HEADS[1], w) for w in (None, 1, 7, 40, 128, 129, 300)]
    + [(h, w) for h in (HEADS[0], HEADS[2]) for w in (None, 40)],
)
def test_attention_has_the_values_and_gradients_of_the_formula(heads, window, has_sinks, dtype):
    """Against float64 autograd: rows shorter than the window, longer, and no multiple of it."""
    lengths = [300, 128, 41, 5]
    inputs = [x for x in attention_inputs(heads, dtype, lengths, has_sinks) if x is not None]
    scale, context = heads[2] ** -0.5, PackedContext.of(lengths)

    def ours(q, k, v, sinks=None):
        return attend(InvariantOps(), (q, k, v, sinks), context, window)

    def formula(q, k, v, sinks=None):
        return reference_attention(
            q, k, v, sinks_H=sinks, window=window, scale=scale, lengths=lengths
        )

    wide = [x.double() for x in inputs]
    # float32: scores of up to some 30, off by 30 * 2^-24 = 2e-6, which the softmax multiplies by;
    # bfloat16: the kernel behind the gradients rounds probabilities, scores and results to 2^-8.
    bound = 2e-5 if dtype == torch.float32 else 4 * 2**-8
    assert relative_error(ours(*inputs), formula(*wide)) < bound
    found, wanted = gradients(ours, inputs), gradients(formula, wide)
    assert len(found) == 3 + has_sinks
    for a, b in zip(found, wanted, strict=True):
        assert relative_error(a, b) < bound


@pytest.mark.parametrize("window", [None, 40])
def test_how_many_queries_attend_together_changes_no_bit(monkeypatch, window):
    """Fewer do where their keys are many: what they score must stay in a cache."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(370, heads, 16, generator=g) for heads in (8, 2, 2))
    sinks = torch.randn(8, generator=g)
    found = []
    for scores in (1 << 20, 8 * 370 * 48, 1):  # tiles of 128, 48 and 16 queries
        monkeypatch.setattr(invariant, "TILE_SCORES", scores)
        found.append(
            InvariantOps().attention(
                q, k, v, AttentionSpec(sinks, window, 0.25), PackedContext.of([300, 70])
            )
        )
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_shared_beginnings_gather_the_gradients_of_all_their_rows():
    rows = [np.arange(200), np.concatenate([np.arange(130), np.arange(200, 290)]), np.arange(60)]
    lengths = [len(r) for r in rows]
    index = torch.from_numpy(np.concatenate(rows))

    def ours(q, k, v, sinks):  # the output of a shared token stands once
        return attend(InvariantOps(), (q, k, v, sinks), PackedContext.of_rows(rows), 40)[index]

    def formula(q, k, v, sinks):
        return reference_attention(
            q[index], k[index], v[index], sinks_H=sinks, window=40, scale=0.25, lengths=lengths
        )

    inputs = [x for x in attention_inputs((4, 2, 16), lengths=(290,)) if x is not None]
    found, wanted = gradients(ours, inputs), gradients(formula, [x.double() for x in inputs])
    for a, b in zip(found, wanted, strict=True):
        assert relative_error(a, b) < 2e-5


def test_a_larger_quantum_of_rows_gives_the_same_bits():
    inputs = attention_inputs((8, 1, 64))
    x, weight = normal(37, 128), normal(96, 128, seed=1)
    results = []
    for quantum in (4, 8, 32):
        backend = InvariantOps(Rules(row_quantum=quantum, head_quantum=quantum))
        out = attend(backend, inputs, PackedContext.of(LENGTHS), 40)
        results.append((backend.linear(x, weight), out))
    for other in results[1:]:
        assert_equal(other, results[0], "another quantum")
