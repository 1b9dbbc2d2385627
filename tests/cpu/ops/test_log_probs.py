"""The log-prob head: chunked forward and hand-written backward against autograd."""

import pytest
import torch

from lockstep.ops import api as ops
from lockstep.ops import head


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
