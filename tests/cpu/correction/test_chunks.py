"""Batches of several chunks: whatever the threads, and wherever a chunk ends."""

import pytest
import torch

from lockstep.correction import Correction, Layout, Rule, TokenFacts, correct

ROWS, TOKENS = 40, 30000  # more than two chunks on a CPU

CORRECTION = Correction(
    anchor="recomputed",
    level="token",
    limits=(0.0, 2.0),
    normalize=True,
    reject=(Rule(stat="ratio", low=0.5, high=2.0), Rule(stat="k3", aggregation="mean", high=0.02)),
    kl_penalty_coef=0.01,
    kl_penalty_form="advantage",
)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def make_batch():
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(TOKENS) < torch.randint(0, TOKENS, (ROWS, 1), generator=g)
    rollout = -4 * torch.rand(ROWS, TOKENS, generator=g)
    spread = torch.linspace(0.01, 0.4, ROWS)[:, None]
    logprobs = (rollout + spread * torch.randn(ROWS, TOKENS, generator=g)).clamp(max=0)
    rollout[3, 5], logprobs[4, 7] = torch.nan, -torch.inf
    facts = TokenFacts(turns=torch.arange(TOKENS).expand(ROWS, TOKENS) // 1000)
    return logprobs, rollout, mask, facts


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_any_number_of_threads_gives_the_same_weights_to_the_bit(threads, level):
    logprobs, rollout, mask, facts = make_batch()
    correction = CORRECTION if level == "token" else Correction.mis(level="geometric")
    found = []
    for count in (1, 3):
        threads(count)
        found.append(correct(logprobs, rollout, correction, layout=mask, facts=facts))
    one, three = found
    assert torch.equal(one.weights, three.weights) and torch.equal(one.keep, three.keep)
    assert torch.equal(one.report.maxima, three.report.maxima)
    # A dot product that is split among threads differs in its last bits; what is left of a total
    # when it is taken away, in some more.
    torch.testing.assert_close(one.report.sums, three.report.sums, rtol=1e-10, atol=1e-12)


def test_padding_of_many_chunks_changes_no_token():
    """Packed, the same rows fall into other chunks: sums differ in their last bits alone."""
    logprobs, rollout, mask, facts = make_batch()
    padded = correct(logprobs, rollout, CORRECTION, layout=mask, facts=facts)
    packed = correct(
        logprobs[mask], rollout[mask], CORRECTION,
        layout=Layout.packed(mask.sum(1)), facts=TokenFacts(turns=facts.turns[mask]),
    )  # fmt: skip
    assert torch.equal(padded.keep[mask], packed.keep) and not padded.keep[~mask].any()
    torch.testing.assert_close(padded.weights[mask], packed.weights, rtol=1e-6, atol=0)
    left, right = padded.to_metrics(), packed.to_metrics()
    assert left.keys() == right.keys() and any("by_turn" in name for name in left)
    for name, value in left.items():
        assert right[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
