"""The log-prob head over what each token was drawn from: values, gradients, memory."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import AlignmentError
from lockstep.ops import head
from lockstep.ops.base import Ops
from lockstep.ops.context import Support
from lockstep.types import Ragged

ops = Ops()

TOKENS, WIDTH, VOCAB = 20, 8, 13


def problem(seed=0):
    """hidden, weight, ids and a support of every kind: one id, some, all, and not cut at all."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, WIDTH, generator=g)
    weight = torch.randn(VOCAB, WIDTH, generator=g)
    ids = torch.randint(VOCAB, (TOKENS,), generator=g)
    rng = np.random.default_rng(seed)
    rows = []
    for at, token_id in enumerate(ids.tolist()):
        size = (0, 1, 3, 7, VOCAB)[at % 5]
        others = rng.permutation([i for i in range(VOCAB) if i != token_id])[: max(size - 1, 0)]
        rows.append([*others[: size // 2], token_id, *others[size // 2 :]] if size else [])
    return hidden, weight, ids, Ragged.of(rows)


def by_definition(hidden, weight, ids, support, temperature):
    """Token by token, over the chosen logits alone, in the precision of the inputs."""
    logprobs, entropy = [], []
    for at, token_id in enumerate(ids.tolist()):
        kept = support[at].tolist() or list(range(VOCAB))
        logp = torch.log_softmax((weight[kept] @ hidden[at]) / temperature, -1)
        logprobs.append(logp[kept.index(token_id)])
        entropy.append(-(logp.exp() * logp).sum())
    return torch.stack(logprobs), torch.stack(entropy)


@pytest.mark.parametrize("chunk_bytes", [1, 7 * VOCAB * 4, 1 << 20])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
def test_values_and_gradients_equal_autograd_in_float64(
    monkeypatch, chunk_bytes, temperature, entropy_weight
):
    monkeypatch.setattr(head, "CHUNK_BYTES", chunk_bytes)
    hidden, weight, ids, support = problem()
    upstream = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1))
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found = ops.log_probs(h, w, ids, temperature=temperature, support=Support.of(support))
    H, W = hidden.double().requires_grad_(), weight.double().requires_grad_()
    wanted = by_definition(H, W, ids, support, temperature)
    for logprobs, entropy in (found, wanted):
        weights = upstream.to(logprobs.dtype)
        (logprobs * weights + entropy_weight * entropy * weights).sum().backward()
    for ours, theirs in zip((*found, h.grad, w.grad), (*wanted, H.grad, W.grad), strict=True):
        # float32, sums of 13 and 20 terms of order 1
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_gradient_is_that_of_finite_differences(temperature):
    hidden, weight, ids, support = problem(3)
    upstream = torch.randn(TOKENS, generator=torch.Generator().manual_seed(2))
    h = hidden.clone().requires_grad_()
    logprobs, entropy = ops.log_probs(
        h, weight, ids, temperature=temperature, support=Support.of(support)
    )
    ((logprobs + 0.5 * entropy) * upstream).sum().backward()
    step = 1e-5  # central differences in float64: an error of step^2, and rounding of 1e-16 / step
    for at, place in ((1, 0), (2, 3), (3, 5), (4, 7), (5, 1), (17, 2)):
        values = []
        for sign in (1, -1):
            moved = hidden.double()
            moved[at, place] += sign * step
            lp, e = by_definition(moved, weight.double(), ids, support, temperature)
            values.append(float(((lp + 0.5 * e) * upstream.double()).sum()))
        assert float(h.grad[at, place]) == pytest.approx(
            (values[0] - values[1]) / (2 * step), rel=1e-4, abs=2e-5
        )


def test_a_token_that_was_the_only_choice_has_log_prob_0_and_moves_nothing():
    hidden, weight, ids, _ = problem()
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    alone = Support.of(Ragged.of(ids[:, None].tolist()))
    logprobs, entropy = ops.log_probs(h, w, ids, temperature=0.7, support=alone)
    assert logprobs.tolist() == [0.0] * TOKENS and entropy.abs().max() == 0
    (logprobs.sum() + 3 * entropy.sum()).backward()
    assert not h.grad.any() and not w.grad.any()


def test_the_gradient_can_be_taken_twice():
    hidden, weight, ids, support = problem()
    h = hidden.requires_grad_()
    logprobs, entropy = ops.log_probs(h, weight, ids, support=Support.of(support))
    total = (logprobs + entropy).sum()
    first, second = (torch.autograd.grad(total, h, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and first.any()


def test_where_nothing_was_cut_no_bit_differs():
    hidden, weight, ids, _ = problem()
    upstream = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1))
    results = []
    for support in (None, Ragged.empty(TOKENS), Ragged.of([range(VOCAB)] * TOKENS)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy = ops.log_probs(
            h, w, ids, support=None if support is None else Support.of(support)
        )
        ((logprobs + entropy) * upstream).sum().backward()
        results.append((logprobs, entropy, h.grad, w.grad))
    for others in zip(*results, strict=True):
        assert all(torch.equal(others[0], other) for other in others[1:])


def test_the_samplers_log_softmax_over_what_it_kept_is_the_heads_arithmetic():
    hidden, weight, ids, support = problem()
    found, _ = ops.log_probs(hidden, weight, ids, temperature=0.8, support=Support.of(support))
    kept = Support.of(support).mask(slice(None), VOCAB)
    rows = ops.log_softmax(ops.linear(hidden, weight), temperature=0.8, kept=kept)
    assert torch.equal(found, rows.gather(1, ids[:, None])[:, 0])
    assert (rows.isneginf() == ~kept).all()


def test_an_id_outside_of_its_support_has_no_probability():
    hidden, weight, ids, _ = problem()
    others = Ragged.of([[(i + 1) % VOCAB, (i + 2) % VOCAB] for i in ids.tolist()])
    logprobs, _ = ops.log_probs(hidden, weight, ids, support=Support.of(others))
    assert logprobs.isneginf().all()


def test_a_support_of_another_length_is_refused():
    hidden, weight, ids, support = problem()
    short = Support.of(support.take(range(TOKENS - 1)))
    with pytest.raises(AlignmentError, match=r"20.*19"):
        ops.log_probs(hidden, weight, ids, support=short)


class _Largest(TorchDispatchMode):
    """Remembers the most elements that any result has."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, torch.Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return out


def test_no_tensor_is_larger_than_a_chunk(monkeypatch):
    rows = 4
    monkeypatch.setattr(head, "CHUNK_BYTES", rows * VOCAB * 4)
    hidden, weight, ids, support = problem()
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with _Largest() as largest:
        logprobs, entropy = ops.log_probs(h, w, ids, support=Support.of(support))
        (logprobs + entropy).sum().backward()
    inputs = max(hidden.numel(), weight.numel(), len(support.values))
    assert largest.num_elements <= max(rows * VOCAB, inputs) < TOKENS * VOCAB
