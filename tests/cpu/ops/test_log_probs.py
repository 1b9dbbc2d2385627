"""The log-prob head: chunked forward and hand-written backward against autograd."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import AlignmentError
from lockstep.ops import head
from lockstep.ops.base import Ops
from lockstep.ops.context import Coefficients, Support
from lockstep.types import Ragged

ops = Ops()


def stock(hidden, weight, ids, temperature):
    logp = torch.log_softmax((hidden @ weight.t()) / temperature, -1)
    return logp.gather(1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk_bytes", [1, 7 * 13 * 4, 1 << 20])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
def test_values_and_gradients_equal_autograd(monkeypatch, chunk_bytes, temperature, entropy_weight):
    monkeypatch.setattr(head, "CHUNK_BYTES", chunk_bytes)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 8, generator=g)
    weight = torch.randn(13, 8, generator=g)
    ids = torch.randint(13, (20,), generator=g)
    upstream = torch.randn(20, generator=g)
    results = []
    for function in (
        lambda h, w: ops.log_probs(h, w, ids, temperature=temperature),
        lambda h, w: stock(h, w, ids, temperature),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy = function(h, w)
        (logprobs * upstream + entropy_weight * entropy * upstream).sum().backward()
        results.append((logprobs.detach(), entropy.detach(), h.grad, w.grad))
    for found, wanted in zip(*results, strict=True):
        # float32, sums of 13 and 20 terms of order 1
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def test_the_samplers_log_softmax_is_the_heads_arithmetic():
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(16, 8, generator=g), torch.randn(33, 8, generator=g)
    ids = torch.randint(33, (16,), generator=g)
    logprobs, _ = ops.log_probs(hidden, weight, ids, temperature=0.8)
    rows = ops.log_softmax(ops.linear(hidden, weight), temperature=0.8)
    assert torch.equal(logprobs, rows.gather(1, ids[:, None])[:, 0])


# -- what forward and backward form --------------------------------------------------------------


def problem(tokens=20, vocab=13, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 8, generator=g).to(dtype)
    weight = torch.randn(vocab, 8, generator=g).to(dtype)
    return hidden, weight, torch.randint(vocab, (tokens,), generator=g)


def cut_small(monkeypatch, rows=16, vocab=13):
    """Chunks of forward of `rows` rows; tiles of backward of 7 rows and a few columns."""
    monkeypatch.setattr(head, "CHUNK_BYTES", rows * vocab * 4)
    monkeypatch.setattr(head, "TILE_ROWS", 7)
    monkeypatch.setattr(head, "BLOCK_BYTES", 3 * vocab * 4)


class Products(TorchDispatchMode):
    """Counts products of matrices, and the largest tensor that any operation gives."""

    count = largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return out


def test_tiles_of_rows_and_columns_give_the_gradients_of_one(monkeypatch):
    hidden, weight, ids = problem()
    results = []
    for is_cut in (False, True):
        if is_cut:
            cut_small(monkeypatch)
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy = ops.log_probs(h, w, ids, temperature=0.7)
        (logprobs + 0.3 * entropy).sum().backward()
        results.append((logprobs.detach(), entropy.detach(), h.grad, w.grad))
    for whole, cut in zip(*results, strict=True):
        torch.testing.assert_close(cut, whole, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("has_support", [False, True])
@pytest.mark.parametrize(("entropy_weight", "scale"), [(0.0, 1.0), (0.0, -2.5), (0.3, 0.5)])
def test_a_known_gradient_gives_the_same_gradients_without_a_product_in_backward(
    monkeypatch, is_cut, has_support, entropy_weight, scale
):
    hidden, weight, ids = problem()
    if is_cut:
        cut_small(monkeypatch)
    support = None
    if has_support:
        support = Support.of(Ragged.of([[i, (i + 3) % 13] if i % 2 else [] for i in ids.tolist()]))
    upstream = torch.randn(20, generator=torch.Generator().manual_seed(1))
    known = Coefficients(upstream, entropy_weight * upstream if entropy_weight else None)
    results = []
    for coefficients in (None, known):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = ops.log_probs(h, w, ids, temperature=0.7, support=support, coefficients=coefficients)
        loss = scale * ((out[0] * upstream).sum() + entropy_weight * (out[1] * upstream).sum())
        with Products() as products:
            loss.backward()
        assert (products.count == 0) == (coefficients is not None)
        results.append((*(x.detach() for x in out), h.grad, w.grad))
    (*values, _, _), (*known_values, _, _) = results
    assert all(torch.equal(a, b) for a, b in zip(values, known_values, strict=True))
    for plain_way, known_way in zip(*results, strict=True):
        torch.testing.assert_close(known_way, plain_way, rtol=2e-5, atol=2e-5)


def test_another_gradient_than_the_known_one_is_refused_with_both():
    hidden, weight, ids = problem()
    logprobs, _ = ops.log_probs(
        hidden.requires_grad_(), weight, ids, coefficients=Coefficients(torch.ones(20))
    )
    loss = logprobs.sum() + 0.5 * logprobs[7]
    with pytest.raises(AlignmentError, match=r"log-prob of token .*, and the coefficient is 1"):
        loss.backward()
    _, entropy = ops.log_probs(
        hidden, weight, ids, coefficients=Coefficients(torch.ones(20), torch.zeros(20))
    )
    with pytest.raises(AlignmentError, match="at the entropy of token 0 it is 1"):
        entropy[0].backward()


def test_a_known_gradient_is_taken_once():
    hidden, weight, ids = problem()
    known = Coefficients(torch.ones(20))
    logprobs, _ = ops.log_probs(hidden.requires_grad_(), weight, ids, coefficients=known)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has run already"):
        logprobs.sum().backward()


def test_coefficients_of_another_length_are_refused():
    hidden, weight, ids = problem()
    with pytest.raises(AlignmentError, match="20 ids, and coefficients of 19 tokens"):
        ops.log_probs(hidden, weight, ids, coefficients=Coefficients(torch.ones(19)))


def test_a_gradient_that_is_not_finite_arrives_as_such():
    hidden, weight, ids = problem()
    known = Coefficients(torch.ones(20))
    logprobs, _ = ops.log_probs(hidden.requires_grad_(), weight, ids, coefficients=known)
    (logprobs.sum() * float("nan")).backward()
    assert hidden.grad.isnan().all()


@pytest.mark.parametrize("is_known", [False, True])
def test_a_frozen_head_has_no_gradient_formed(monkeypatch, is_known):
    """As under LoRA: of the products that a chunk or tile takes, none is for the weight."""
    tokens, vocab = 40, 1000
    cut_small(monkeypatch, rows=4, vocab=vocab)
    monkeypatch.setattr(head, "TILE_ROWS", tokens)
    hidden, weight, ids = problem(tokens, vocab)
    known = Coefficients(torch.ones(tokens)) if is_known else None
    with Products() as products:
        logprobs, _ = ops.log_probs(hidden.requires_grad_(), weight, ids, coefficients=known)
        logprobs.sum().backward()
    assert weight.grad is None and hidden.grad is not None
    num_chunks, num_tiles = 10, 10
    assert products.count == (2 * num_chunks if is_known else num_chunks + 2 * num_tiles)


@pytest.mark.parametrize("is_known", [False, True])
def test_bfloat16_weight_gradients_are_summed_in_float32(monkeypatch, is_known):
    """5000 rows in chunks of 16: summed in bfloat16, all but the first few would be lost."""
    cut_small(monkeypatch)
    hidden, weight, ids = problem(5000, dtype=torch.bfloat16)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    known = Coefficients(torch.ones(5000)) if is_known else None
    logprobs, _ = ops.log_probs(h, w, ids, coefficients=known)
    logprobs.sum().backward()
    exact_h, exact_w = (x.double().requires_grad_() for x in (hidden, weight))
    rounded = (exact_h @ exact_w.t()).detach().bfloat16().double()
    product = exact_h @ exact_w.t()
    logits = product + (rounded - product).detach()  # rounded as the head's are
    torch.log_softmax(logits, -1).gather(1, ids[:, None]).sum().backward()
    # one rounding of the result to 8 bits, and those of 5000 gradients, which average out
    assert (w.grad.double() - exact_w.grad).norm() < 0.004 * exact_w.grad.norm()
    assert (h.grad.double() - exact_h.grad).norm() < 0.01 * exact_h.grad.norm()


@pytest.mark.parametrize("is_known", [False, True])
def test_no_tensor_is_larger_than_a_chunk(monkeypatch, is_known):
    tokens, vocab = 64, 500
    cut_small(monkeypatch, rows=16, vocab=vocab)
    hidden, weight, ids = problem(tokens, vocab)
    known = Coefficients(torch.ones(tokens)) if is_known else None
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    with Products() as products:
        ops.log_probs(h, w, ids, coefficients=known)[0].sum().backward()
    assert products.largest == 16 * vocab < tokens * vocab


@pytest.mark.parametrize("is_known", [False, True])
def test_no_tokens_give_no_gradient(is_known):
    """As on a rank whose share of the tokens has none that is trained."""
    hidden, weight, ids = (x[:0] if i != 1 else x for i, x in enumerate(problem()))
    known = Coefficients(torch.ones(0)) if is_known else None
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    ops.log_probs(h, w, ids, coefficients=known)[0].sum().backward()
    assert h.grad.shape == (0, 8) and not w.grad.any()
