"""The log-prob head against verl's fused one: values and gradients of the same float32 problem."""

import importlib.util
from pathlib import Path

import pytest
import torch

from lockstep.ops import head
from lockstep.ops.base import Ops

TOKENS, WIDTH, VOCAB = 70, 24, 300


def load_fused():
    """`FusedLinearForPPO`; its file alone, since the package brings Ray with it."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("pip install --no-deps verl")
    path = Path(spec.submodule_search_locations[0]) / "utils/experimental/torch_functional.py"
    found = importlib.util.spec_from_file_location("verl_torch_functional", path)
    assert found is not None and found.loader is not None, path
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.FusedLinearForPPO(chunk_size=32)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_verl(monkeypatch, temperature):
    fused = load_fused()
    monkeypatch.setattr(head, "CHUNK_BYTES", 16 * VOCAB * 4)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=g)
    weight = torch.randn(VOCAB, WIDTH, generator=g)
    ids = torch.randint(VOCAB, (TOKENS,), generator=g)
    of_logprobs, of_entropy = torch.randn(2, TOKENS, generator=g)
    results = []
    for is_ours in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if is_ours:
            out = Ops().log_probs(h, w, ids, temperature=temperature)
        else:
            out = [x[0] for x in fused(h[None], w, ids[None], temperature=temperature)]
        torch.autograd.backward(tuple(out), (of_logprobs, of_entropy))
        results.append((*(x.detach() for x in out), h.grad, w.grad))
    for found, wanted in zip(*results, strict=True):
        # float32 logits of size 20: 2e-6 of rounding in each log-prob, and sums of 300 such terms
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
