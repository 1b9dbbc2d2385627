"""The CUDA backend's kernels on a CPU, in Triton's interpreter, in float32: indexing, masks, the
order of blocks, gradients. What a tensor core rounds is for tests/gpu."""

from functools import partial

import numpy as np
import pytest
import torch
from attention_formula import reference_attention
from full_counts import PROOF
from interpreted_kernels import cuda
from tiny_configs import tiny_config

from lockstep.errors import ConfigError
from lockstep.models.attention_config import LatentShape
from lockstep.models.decoder import Decoder
from lockstep.ops import head
from lockstep.ops.base import Ops, Rotary
from lockstep.ops.context import AttentionSpec, PackedContext, PagedContext, Support
from lockstep.ops.cuda import CudaOps
from lockstep.types import Ragged

OPS = CudaOps()
plain = Ops()
EPS = 2.0**-24  # float32's unit roundoff

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"  # numpy's, of 0 / 0 in rows of a tile that are not stored
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # and where one is launched


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ROW_OPS = {
    "linear": lambda ops, x: ops.linear(x, rand(37, 70, seed=1), rand(37, seed=2)),
    "rms_norm": lambda ops, x: ops.rms_norm(x, rand(70, seed=1), 1e-5),
    "rms_norm by head": lambda ops, x: ops.rms_norm(x.view(-1, 7, 10), rand(7, 10, seed=1), 1e-5),
    "swiglu": lambda ops, x: ops.swiglu(x),
    "swiglu_clamped": lambda ops, x: ops.swiglu(x, alpha=1.702, limit=1.0),
    "geglu": lambda ops, x: ops.geglu(x),
    "rope": lambda ops, x: ops.rope(x.view(-1, 7, 10), x[:, None, :10], x[:, None, 10:20]),
    "route": lambda ops, x: torch.cat(ops.route(x.round(), 4), -1),  # rounded: with ties
    "route, shares of all": lambda ops, x: ops.route(x, 4, is_normalized=False)[0],
    "combine": lambda ops, x: ops.combine(x.view(-1, 7, 10), x[:, :7]),
    "log_softmax": lambda ops, x: ops.log_softmax(x, temperature=0.7),
    "log_softmax of some": lambda ops, x: ops.log_softmax(x, kept=x > -1),
    "log_softmax of many": lambda ops, x: ops.log_softmax(x.repeat(1, 60)),  # 4200: two blocks
}
NO_PLAIN_ROWS = ("linear", "route", "route, shares of all")
"""Ops that are compared with the plain backend elsewhere: with a bound of their own, or by their
gradients."""


@pytest.mark.parametrize("name", ROW_OPS)
def test_the_bits_of_a_row_depend_on_that_row_alone(name):
    function, x = partial(ROW_OPS[name], OPS), rand(23, 70)
    whole = function(x)
    for part in (slice(0, 1), slice(3, 5), slice(5, 12)):
        assert torch.equal(function(x[part]), whole[part]), part
    order = torch.randperm(23, generator=torch.Generator().manual_seed(3))
    assert torch.equal(function(x[order]), whole[order])


@pytest.mark.parametrize("name", [name for name in ROW_OPS if name not in NO_PLAIN_ROWS])
def test_a_row_has_the_numbers_of_the_plain_backend(name):
    x = rand(9, 70)
    # Sums of at most 70 terms whose rounding errors add up like a random walk, and values to 8:
    # 8 * sqrt(70) * EPS = 4e-6. The 4200 exponentials are summed pairwise on both sides.
    found, wanted = (ROW_OPS[name](ops, x) for ops in (OPS, plain))
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=4e-6, equal_nan=True)


def gradients(function, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    (out * rand(*out.shape, seed=9).to(out.dtype)).sum().backward()
    return [leaf.grad for leaf in leaves]


ELEMENTWISE = {
    "rms_norm": (lambda ops, x, w: ops.rms_norm(x, w, 1e-5), [(5, 70), (70,)]),
    "swiglu": (lambda ops, x: ops.swiglu(x), [(5, 70)]),
    "swiglu_clamped": (lambda ops, x: ops.swiglu(x, alpha=1.7, limit=1.0), [(5, 70)]),
    "geglu": (lambda ops, x: ops.geglu(x), [(5, 70)]),
    "rope": (lambda ops, x: ops.rope(x, rand(5, 1, 10), rand(5, 1, 10)), [(5, 7, 10)]),
    "combine": (lambda ops, x, w: ops.combine(x, w), [(5, 4, 10), (5, 4)]),
    "route": (lambda ops, x: ops.route(x, 3)[0], [(5, 8)]),
    "route, shares of all": (lambda ops, x: ops.route(x, 3, is_normalized=False)[0], [(5, 8)]),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_gradients_are_those_of_the_plain_backend(name):
    function, shapes = ELEMENTWISE[name]
    inputs = [rand(*shape, seed=i) for i, shape in enumerate(shapes)]
    found = gradients(lambda *x: function(OPS, *x), *inputs)
    wanted = gradients(lambda *x: function(plain, *x), *(x.double() for x in inputs))
    for ours, theirs in zip(found, wanted, strict=True):
        # sums of at most 70 terms of order 1
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-5)


# -- GEMMs ----------------------------------------------------------------------------------------


def products_bound(x, weight):
    """Of a sum of K products in any order the error is at most about K * EPS * sum |products|, and
    two implementations may err to opposite sides."""
    return 2 * x.shape[-1] * EPS * (x.abs() @ weight.abs().transpose(-1, -2))


def assert_within(found, wanted, bound):
    assert ((found - wanted).abs() <= bound).all(), ((found - wanted).abs() - bound).max()


@pytest.mark.parametrize(("M", "N", "K"), [(1, 1, 1), (3, 70, 200), (130, 64, 32), (0, 5, 8)])
def test_a_product_is_the_sum_in_every_shape(M, N, K):
    x, weight, bias = rand(M, K), rand(N, K, seed=1), rand(N, seed=2)
    bound = products_bound(x, weight)
    assert_within(OPS.linear(x, weight), plain.linear(x, weight), bound)
    # one more rounding each, of a value that is at most |bias| + the sum
    bound = bound + 2 * EPS * (bias.abs() + x.abs() @ weight.abs().t())
    assert_within(OPS.linear(x, weight, bias), plain.linear(x, weight, bias), bound)


def test_the_rows_of_an_expert_are_those_of_its_own_product():
    counts = [0, 3, 65, 1, 0, 2]
    x, weight, bias = rand(sum(counts), 40), rand(6, 33, 40, seed=1), rand(6, 33, seed=2)
    whole = OPS.expert_linear(x, weight, bias, counts)
    at = 0
    for expert, count in enumerate(counts):
        rows = slice(at, at := at + count)
        assert torch.equal(whole[rows], OPS.linear(x[rows], weight[expert], bias[expert]))
    alone = OPS.expert_linear(x[3:4], weight, bias, [0, 0, 1, 0, 0, 0])
    assert torch.equal(alone, whole[3:4])
    without = OPS.expert_linear(x, weight, None, counts)
    torch.testing.assert_close(without, plain.expert_linear(x, weight, None, counts))


def test_gradients_of_products_are_those_of_the_plain_backend():
    x, weight, bias = rand(7, 20), rand(11, 20, seed=1), rand(11, seed=2)
    found, wanted = gradients(OPS.linear, x, weight, bias), gradients(plain.linear, x, weight, bias)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)  # the same stock products
    assert CudaOps.expert_linear_backward is Ops.expert_linear_backward


# -- the head -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [4, 1000])
def test_the_head_has_the_plain_numbers_and_the_samplers_bits(monkeypatch, chunk_rows, temperature):
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 13 * chunk_rows)
    hidden, weight, ids = rand(9, 20), rand(13, 20, seed=1), torch.arange(9) + 2
    chosen = Ragged.of([[], [3, 5], [4], [], [1, 6, 9], [], [8], [9, 0], []])

    def outputs(ops, support, dtype=torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        out = ops.log_probs(*leaves, ids, temperature=temperature, support=support)
        (out[0] * rand(9, seed=5) + 0.1 * out[1]).sum().backward()
        return [*out, *(x.grad for x in leaves)]

    for support in (None, Support.of(chosen)):
        found, wanted = outputs(OPS, support), outputs(plain, support)
        for ours, theirs in zip(found, wanted, strict=True):
            # logits to 20, of sums of 20 terms: 20 * sqrt(20) * EPS = 5e-6
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        logits = OPS.linear(hidden[4:5], weight)
        kept = None if support is None else support.mask(slice(4, 5), 13)
        sampled = OPS.log_softmax(logits, temperature=temperature, kept=kept)
        assert torch.equal(sampled[0, ids[4]], found[0][4])


def test_a_row_of_which_nothing_is_kept_has_no_log_prob():
    kept = torch.tensor([[True, False, True], [False, False, False]])
    found = OPS.log_softmax(torch.ones(2, 3), kept=kept)
    assert found[1].isnan().all()
    assert found[0, 1] == -np.inf
    torch.testing.assert_close(found[0, ::2].exp().sum(), torch.tensor(1.0))


# -- attention ------------------------------------------------------------------------------------

LENGTHS = [70, 1, 37, 16, 66]  # float32 walks 32 keys at a time
SHAPES = [  # heads, key heads, width, window, sinks
    (4, 2, 8, None, True),
    (3, 3, 16, 20, True),
    (6, 2, 24, 33, False),
    (4, 1, 16, None, False),
]


def attention_inputs(heads, key_heads, width, has_sinks, lengths=LENGTHS):
    total = sum(lengths)
    q, k = rand(total, heads, width), rand(total, key_heads, width, seed=1)
    v = rand(total, key_heads, width, seed=2)
    return [q, k, v, *([rand(heads, seed=3)] if has_sinks else [])]


def attention(window, context):
    return lambda q, k, v, sinks=None: OPS.attention(
        q, k, v, AttentionSpec(sinks, window, 0.3), context
    )


@pytest.mark.parametrize(("heads", "key_heads", "width", "window", "has_sinks"), SHAPES)
def test_attention_is_the_formula_forward_and_backward(
    heads, key_heads, width, window, has_sinks, monkeypatch
):
    monkeypatch.setattr(
        "lockstep.ops.cuda_attention.BACKWARD_SCORES", 5 * heads * 70 * 20
    )  # several tiles
    inputs = attention_inputs(heads, key_heads, width, has_sinks)
    ours = attention(window, PackedContext.of(LENGTHS))

    def formula(q, k, v, sinks=None):
        return reference_attention(
            q, k, v, sinks_H=sinks, window=window, scale=0.3, lengths=LENGTHS
        )

    doubles = [x.double() for x in inputs]
    # Weighted means of values of order 1, whose weights come from scores to 10: 10 * EPS = 6e-7
    # relative each; gradients of keys sum up to 70 queries of 3 heads.
    torch.testing.assert_close(ours(*inputs), formula(*doubles).float(), rtol=1e-5, atol=3e-6)
    found, wanted = gradients(ours, *inputs), gradients(formula, *doubles)
    assert len(found) == 3 + has_sinks
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=2e-5)


def test_rows_that_share_tokens_have_the_bits_and_the_gradients_of_copies():
    rows = [np.arange(0, 40), np.concatenate([np.arange(0, 30), np.arange(40, 50)])]
    copies = np.concatenate(rows)
    inputs = attention_inputs(4, 2, 8, True, [50])
    shared = attention(9, PackedContext.of_rows(rows))
    apart = attention(9, PackedContext.of([40, 40]))

    def of_copies(q, k, v, sinks):
        out = apart(q[copies], k[copies], v[copies], sinks)
        return torch.cat([out[:40], out[70:]])  # each token once

    assert torch.equal(shared(*inputs), of_copies(*inputs))
    for a, b in zip(gradients(shared, *inputs), gradients(of_copies, *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


class Cache:
    """Pages of one layer or several, handed out in random order and full of NaN until written."""

    def __init__(self, lengths, page_size, key_heads, width, layers=1, dtype=None):
        counts = [-(-n // page_size) for n in lengths]
        shape = (layers, key_heads, sum(counts) + 1, page_size, width)
        self.keys = torch.full(shape, np.nan, dtype=dtype)
        self.values = self.keys.clone()
        order = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(7))
        self.pages, self.page_size = list(order.split(counts)), page_size

    def context(self, step, heads):
        """step: the (sequence, start, stop) that run, one after another."""
        tables = np.zeros((len(step), max(len(pages) for pages in self.pages)), np.int64)
        for table, (sequence, _, _) in zip(tables, step, strict=True):
            own = self.pages[sequence]
            table[: len(own)] = own
        _, starts, stops = zip(*step, strict=True)
        return PagedContext.of(self.keys, self.values, tables, starts, stops, num_heads=heads)


STEPS = [  # (sequence, start, stop): prefill whole, in chunks, alone, then decode
    [(0, 0, 33), (1, 0, 5), (2, 0, 1)],
    [(0, 33, 34), (1, 5, 40), (2, 1, 3)],
    [(0, 34, 35), (1, 40, 41), (2, 3, 4)],
    [(1, 41, 43), (0, 35, 70), (2, 4, 5)],
]
STEP_LENGTHS = [70, 43, 5]


def tokens_of(step, first):
    """Where the tokens of a step stand among those of all sequences, packed."""
    return torch.cat([first[i] + torch.arange(a, b) for i, a, b in step])


@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "window", "has_sinks", "page_size"),
    [(*shape, size) for shape in SHAPES[:2] for size in (16, 128, 48)]
    + [(*shape, 16) for shape in SHAPES[2:]],
)
def test_decode_and_chunks_have_the_bits_of_the_packed_forward(
    heads, key_heads, width, window, has_sinks, page_size
):
    q, k, v, *sinks = attention_inputs(heads, key_heads, width, has_sinks, STEP_LENGTHS)
    packed = attention(window, PackedContext.of(STEP_LENGTHS))(q, k, v, *sinks)
    first = np.cumsum([0, *STEP_LENGTHS])
    cache = Cache(STEP_LENGTHS, page_size, key_heads, width)
    for step in STEPS:
        tokens = tokens_of(step, first)
        found = attention(window, cache.context(step, heads))(
            q[tokens], k[tokens], v[tokens], *sinks
        )
        assert torch.equal(found, packed[tokens]), step


@pytest.mark.parametrize(
    ("num_programs", "width"),
    # 136: values in three parts; 320: in more than heads without a latent have
    [(1, 24), (1000, 24), *[(1000, 136), (1000, 320)] * PROOF],
)
def test_one_piece_has_the_bits_of_splits_that_are_combined(num_programs, width, monkeypatch):
    """Every piece whole, or every split of its own and combined by the last program."""
    for module in ("context", "cuda_attention"):
        monkeypatch.setattr(f"lockstep.ops.{module}.SPLIT_KEYS", 32)
    lengths = [75, 31]
    q, k, v, sinks = attention_inputs(6, 2, width, True, lengths)
    for window in (None, 40) if width < 100 else (40,):
        packed = attention(window, PackedContext.of(lengths))(q, k, v, sinks)
        doubles = [x.double() for x in (q, k, v)]
        wanted = reference_attention(
            *doubles, sinks_H=sinks.double(), window=window, scale=0.3, lengths=lengths
        )
        # Scores to 20, from sums of 136 products: 1e-6 relative in each weight.
        torch.testing.assert_close(packed, wanted.float(), rtol=1e-5, atol=1e-5)
        cache = Cache(lengths, 16, 2, width)
        monkeypatch.setattr("lockstep.ops.context.programs_of", lambda _: num_programs)
        for step in ([(0, 0, 72), (1, 0, 30)], [(0, 72, 74), (1, 30, 31)], [(0, 74, 75)]):
            tokens = tokens_of(step, [0, 75])
            context = cache.context(step, 6)
            found = attention(window, context)(q[tokens], k[tokens], v[tokens], sinks)
            assert torch.equal(found, packed[tokens]), (window, step)
            assert not context.work.counters.any()
            assert (len(context.work.counters) > 0) == (num_programs > 1)


# -- ops at once ----------------------------------------------------------------------------------


def test_a_float32_norm_scales_before_the_result_is_rounded():
    x, weight = rand(64, 72).half(), rand(72, seed=1)
    wanted = torch.nn.functional.rms_norm(x.double(), (72,), weight.double(), 1e-5)
    with torch.no_grad():
        found = OPS.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found.double(), wanted, rtol=1.01 * 2**-11, atol=0)  # one rounding


@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.float32), (70, torch.float32), (70, torch.float16)]
)
def test_a_layers_ops_at_once_have_the_bits_of_their_parts(rows, dtype):
    shapes = [(rows, 72), (rows, 72), (96, 72), (72, 72), (96,), (72,)]
    x, residual, weight, out_weight, bias, out_bias = (
        rand(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)
    )
    norm = rand(72, seed=6)
    with torch.no_grad():
        stream = OPS.add_linear(residual, x, out_weight, out_bias)
        assert torch.equal(stream, residual + OPS.linear(x, out_weight, out_bias))
        # The squares come from the product before, and are summed anew for another tensor.
        for found in (stream, stream.clone()):
            normed = OPS.rms_norm(found, norm, 1e-5)
            expected = OPS.linear(normed, weight, bias)
            assert torch.equal(OPS.norm_linear(found, norm, 1e-5, weight, bias), expected)
            expected = OPS.swiglu(OPS.linear(normed, weight))
            assert torch.equal(OPS.norm_swiglu(found, norm, 1e-5, weight), expected)


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_queries_and_keys_are_rotated_and_written_as_by_their_parts(has_norms, dtype):
    H, G, D, lengths = 6, 2, 24, [33, 5]
    qkv = rand(38, H + 2 * G, D).to(dtype)
    cos, sin = rand(38, 1, D, seed=1), rand(38, 1, D, seed=2)
    rotary = Rotary(cos, sin, H, (rand(D, seed=3), rand(D, seed=4)) if has_norms else None, 1e-5)
    found = []
    for ops_class in (Ops, type(OPS)):
        cache = Cache(lengths, 16, G, D, dtype=dtype)
        context = cache.context([(0, 0, 33), (1, 0, 5)], H)
        spec = AttentionSpec(rand(H, seed=5), 20, 0.3)
        with torch.no_grad():
            out = ops_class.rotary_attention(OPS, qkv, rotary, spec, context)
        found.append([out, cache.keys.nan_to_num(7.0), cache.values.nan_to_num(7.0)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_blocks_of_the_copy_engine_have_the_bits_of_those_that_threads_read(monkeypatch):
    x, weight = rand(200, 72), rand(3, 40, 72, seed=1)  # no multiple of any side of a tile
    counts = [130, 0, 70]
    dense, by_expert = OPS.linear(x, weight[0]), OPS.expert_linear(x, weight, None, counts)
    monkeypatch.setattr(cuda.kernels, "FLOAT32_TILE", cuda.kernels.GemmTile(128, 32, 32, 4, 2))
    blocks = []
    made = cuda.kernels._blocks_of
    monkeypatch.setattr(
        cuda.kernels, "_blocks_of", lambda *a, **k: blocks.append(made(*a, **k)) or blocks[-1]
    )
    assert torch.equal(OPS.linear(x, weight[0]), dense)
    assert torch.equal(OPS.expert_linear(x, weight, None, counts), by_expert)
    assert len(blocks) == 2 and None not in (*blocks[0], *blocks[1])


@pytest.mark.parametrize("tokens", [1, 50])
def test_pairs_are_sorted_as_by_a_stable_sort(tokens):
    experts = torch.rand(tokens, 70, generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :3]
    order, place, counts = OPS.sort_pairs(experts, 70)
    assert torch.equal(order, experts.flatten().argsort(stable=True))
    assert torch.equal(order[place.flatten()], torch.arange(3 * tokens))
    assert counts.tolist() == experts.flatten().bincount(minlength=70).tolist()


# -- products by cuBLAS ---------------------------------------------------------------------------


def test_cublas_computes_only_the_numbers_of_rows_for_which_it_has_the_kernels_bits(monkeypatch):
    """A stand-in for cuBLAS that takes another order for 32 rows: those go to the others."""
    calls = []

    def library(x, weight_t, out=None):
        calls.append(len(x))
        found = cuda.kernels.gemm(x, weight_t.t().contiguous(), None, OPS.tiles)
        found = found + 1e-3 if len(x) == 32 else found
        return found if out is None else out.copy_(found)

    ops = CudaOps()
    weight = rand(24, 40, seed=1)
    monkeypatch.setattr(cuda, "LIBRARY_ROWS", (64, 32, 16))
    monkeypatch.setattr(cuda.torch, "mm", library)
    ops.learn_library(weight)
    assert list(ops.library.values()) == [(64, 16)]
    calls.clear()
    x = rand(163, 40)
    found = ops.linear(x, weight)
    assert calls == [64, 64, 16, 16]
    assert torch.equal(found, OPS.linear(x, weight))


# -- a whole model --------------------------------------------------------------------------------


def tiny_decoder(kind):
    shared = {"hidden_size": 64, "head_dim": 16, "max_positions": 128}
    if kind == "qwen3":
        config = tiny_config("qwen3", intermediate_size=96, **shared)
    elif kind == "latent":
        latent = LatentShape(
            query_rank=0, kv_rank=20, nope_dim=12, rope_dim=4, value_dim=18, is_interleaved=True
        )
        shared |= {"intermediate_size": 96, "tie_embeddings": False}
        config = tiny_config("deepseek_v3", latent=latent, **shared)
    else:
        shared |= {"intermediate_size": 48, "tie_embeddings": False}
        config = tiny_config("gpt_oss", windows=(20, None), **shared)
    model = Decoder(config, ops=OPS)
    model.init_weights(std=0.2, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm", "bias", "sinks")):
                parameter.add_(0.3 * rand(*parameter.shape, seed=len(name)))
    return model


MODEL_STEPS = [
    [(0, 0, 33), (1, 0, 5)],
    [(0, 33, 34), (1, 5, 9)],
    [(0, 34, 35), (1, 9, 10)],
    [(0, 35, 40)],
]
MODEL_LENGTHS = [40, 10]


@pytest.mark.parametrize(
    ("kind", "most_wasted"),
    # Every expert runs on every token, or pairs are sorted by expert.
    [("qwen3", 0), ("gpt_oss", 1 << 30), ("gpt_oss", 0), ("latent", 0)],
)
def test_a_models_log_probs_are_the_same_bits_in_steps_and_packed(kind, most_wasted, monkeypatch):
    monkeypatch.setattr("lockstep.models.experts.ALL_EXPERTS_MULTIPLIES", most_wasted)
    model = tiny_decoder(kind)
    ids = torch.randint(97, (sum(MODEL_LENGTHS),), generator=torch.Generator().manual_seed(4))
    targets = ids.roll(-1)
    positions = torch.cat([torch.arange(n) for n in MODEL_LENGTHS])
    hidden = model(ids, positions, PackedContext.of(MODEL_LENGTHS))
    packed, _ = model.log_probs(hidden, targets)
    first = np.cumsum([0, *MODEL_LENGTHS])
    cache = Cache(MODEL_LENGTHS, 16, model.config.num_kv_heads, model.config.key_dim, layers=2)
    if kind == "latent":
        cache.values = cache.keys
    with torch.inference_mode():
        for step in MODEL_STEPS:
            tokens = tokens_of(step, first)
            hidden = model(ids[tokens], positions[tokens], cache.context(step, 4))
            found = OPS.log_softmax(model.logits(hidden)).gather(1, targets[tokens, None])[:, 0]
            assert torch.equal(found, packed[tokens]), step
    model.ops = plain
    hidden = model(ids, positions, PackedContext.of(MODEL_LENGTHS))
    theirs, _ = model.log_probs(hidden, targets)
    torch.testing.assert_close(packed, theirs, rtol=1e-4, atol=1e-4)  # two layers of roundings


@pytest.mark.parametrize("kind", ["gpt_oss", "latent"])
def test_a_models_gradients_are_those_of_the_plain_backend(kind):
    model = tiny_decoder(kind)
    ids = torch.randint(97, (40,), generator=torch.Generator().manual_seed(4))
    found = {}
    for backend in (OPS, plain):
        model.ops = backend
        model.zero_grad()
        hidden = model(ids, torch.arange(40), PackedContext.of([40]))
        model.log_probs(hidden[:-1], ids[1:])[0].sum().backward()
        found[backend.name] = {n: p.grad.clone() for n, p in model.named_parameters()}
    for name, theirs in found["plain"].items():
        error = (found["cuda"][name] - theirs).norm() / theirs.norm()
        assert error < 1e-4, (name, error)  # float32 through two layers


# -- what it refuses ------------------------------------------------------------------------------


def test_tf32_is_refused_and_reduced_sums_are_turned_off():
    matmul = torch.backends.cuda.matmul
    matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(ConfigError, match=r"fp32_precision.*'tf32'.*'ieee'"):
            CudaOps()
    finally:
        matmul.fp32_precision = "none"
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction
