"""The log-prob head: chunked forward and hand-written backward against autograd."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.ops import head
from lockstep.ops.base import Ops

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


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
def test_a_frozen_head_forms_its_logits_once_and_no_gradient(monkeypatch, entropy_coef):
    """As under LoRA: of the products that a chunk or tile takes, none is for the weight. Through
    the entropy they are formed again in backward."""
    tokens, vocab = 40, 1000
    cut_small(monkeypatch, rows=4, vocab=vocab)
    monkeypatch.setattr(head, "TILE_ROWS", tokens)
    hidden, weight, ids = problem(tokens, vocab)
    found = []
    for is_frozen in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(not is_frozen)
        with Products() as products:
            logprobs, entropy = ops.log_probs(h, w, ids, temperature=0.7)
            (logprobs * torch.linspace(-1, 1, tokens) + entropy_coef * entropy).sum().backward()
        found.append((products.count, h.grad, w.grad))
    (count, grad, of_weight), (_, expected, _) = found
    num_chunks, num_tiles = 10, 10
    assert count == num_chunks * (1 + 2) + 2 * num_tiles * bool(entropy_coef) and of_weight is None
    torch.testing.assert_close(grad, expected, rtol=2e-5, atol=2e-5)


def test_bfloat16_weight_gradients_are_summed_in_float32(monkeypatch):
    """5000 rows in chunks of 16: summed in bfloat16, all but the first few would be lost."""
    cut_small(monkeypatch)
    hidden, weight, ids = problem(5000, dtype=torch.bfloat16)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, _ = ops.log_probs(h, w, ids)
    logprobs.sum().backward()
    exact_h, exact_w = (x.double().requires_grad_() for x in (hidden, weight))
    rounded = (exact_h @ exact_w.t()).detach().bfloat16().double()
    product = exact_h @ exact_w.t()
    logits = product + (rounded - product).detach()  # rounded as the head's are
    torch.log_softmax(logits, -1).gather(1, ids[:, None]).sum().backward()
    # one rounding of the result to 8 bits, and those of 5000 gradients, which average out
    assert (w.grad.double() - exact_w.grad).norm() < 0.004 * exact_w.grad.norm()
    assert (h.grad.double() - exact_h.grad).norm() < 0.01 * exact_h.grad.norm()


def test_no_tensor_is_larger_than_a_chunk(monkeypatch):
    tokens, vocab = 64, 500
    cut_small(monkeypatch, rows=16, vocab=vocab)
    hidden, weight, ids = problem(tokens, vocab)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    with Products() as products:
        ops.log_probs(h, w, ids)[0].sum().backward()
    assert products.largest == 16 * vocab < tokens * vocab


def test_no_tokens_give_no_gradient():
    """As on a rank whose share of the tokens has none that is trained."""
    hidden, weight, ids = (x[:0] if i != 1 else x for i, x in enumerate(problem()))
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    ops.log_probs(h, w, ids)[0].sum().backward()
    assert h.grad.shape == (0, 8) and not w.grad.any()
