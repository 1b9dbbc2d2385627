"""Advantages from a critic: the recursion by hand, over turns, and in any layout."""

import math
from dataclasses import replace

import pytest
import torch
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.correction.layout import Layout
from lockstep.errors import AlignmentError, ConfigError
from lockstep.objectives.token_advantages import BLOCK, gae, whiten

EXAMPLES = settings(max_examples=1000 if PROOF else 25, deadline=None)


def by_recursion(rewards, values, mask, *, gamma, lam, bootstrap):
    """The definition, token by token; python floats."""
    advantages = [[0.0] * len(row) for row in mask]
    returns = [[0.0] * len(row) for row in mask]
    for r, row in enumerate(mask):
        ahead, next_value = 0.0, bootstrap[r]
        for t in reversed(range(len(row))):
            if row[t]:
                ahead = rewards[r][t] + gamma * next_value - values[r][t] + gamma * lam * ahead
                next_value = values[r][t]
                advantages[r][t], returns[r][t] = ahead, ahead + values[r][t]
    return torch.tensor([advantages, returns], dtype=torch.float64)


def test_one_row_by_hand():
    advantages, returns = gae(
        torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.2, 0.4, 0.6]), Layout.packed([3]),
        gamma=0.5, lam=0.5,
    )  # fmt: skip
    # deltas: 0.5 * 0.4 - 0.2 = 0, 0.5 * 0.6 - 0.4 = -0.1, 1 - 0.6 = 0.4
    assert advantages.tolist() == pytest.approx([0.25 * 0.0, 0.0, 0.4], abs=1e-7)
    assert returns.tolist() == pytest.approx([0.2, 0.4, 1.0])


def test_without_discount_the_returns_are_what_is_still_to_come():
    rewards = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]])
    values = torch.tensor([[0.3, 0.1, 0.7], [0.2, 0.9, 0.5]])
    layout = Layout.padded(torch.tensor([[1, 1, 1], [1, 1, 0]]))
    advantages, returns = gae(rewards, values, layout)
    torch.testing.assert_close(returns, torch.tensor([[3.0, 2.0, 2.0], [3.0, 3.0, 0.0]]))
    torch.testing.assert_close(advantages, returns - torch.where(layout.mask, values, 0.0))


def test_observed_tokens_are_skipped_and_not_decayed_through():
    """The same choices and rewards, with a tool's output of 0 or 5 tokens between the turns."""
    values, rewards = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.0, 0.5, 0.0, 1.0])
    short = gae(rewards, values, Layout.packed([4]), gamma=0.9, lam=0.8)
    mask = torch.tensor([1, 1, 0, 0, 0, 0, 0, 1, 1]).bool()

    def spread(x):
        return torch.full((9,), math.nan).masked_scatter(mask, x)

    long = gae(spread(rewards), spread(values), Layout.packed([9], mask), gamma=0.9, lam=0.8)
    for with_gap, without in zip(long, short, strict=True):
        assert torch.equal(with_gap[mask], without)
        assert not with_gap[~mask].any()


def test_an_episode_that_was_cut_off_goes_on_in_its_bootstrap_value():
    rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])
    layout = Layout.packed([1, 0, 1])
    advantages, _ = gae(rewards, values, layout, gamma=0.5, bootstrap=torch.tensor([2.0, 7.0, 0.0]))
    assert advantages.tolist() == [0.5 * 2.0 - 0.5, 0.5]


@EXAMPLES
@given(
    st.integers(0, 10_000),
    st.lists(st.sampled_from([0, 1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3]),
             min_size=1, max_size=4),
    st.sampled_from([0.0, 0.5, 0.97, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
)  # fmt: skip
def test_blocks_padding_and_packing_give_the_recursion(seed, lengths, gamma, lam):
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths) + 2) < torch.tensor(lengths)[:, None]
    mask &= torch.rand(mask.shape, generator=g) < 0.7
    rewards, values = torch.randn(2, *mask.shape, generator=g, dtype=torch.float64)
    bootstrap = torch.randn(len(lengths), generator=g, dtype=torch.float64)
    options = {"gamma": gamma, "lam": lam}
    expected = by_recursion(
        rewards.tolist(), values.tolist(), mask.tolist(), bootstrap=bootstrap.tolist(), **options
    )
    filled = [torch.where(mask, x, math.nan) for x in (rewards, values)]
    padded = gae(*filled, Layout.padded(mask), bootstrap=bootstrap, **options)
    flat = [x[mask] for x in (rewards, values)]
    packed = gae(*flat, Layout.packed(mask.sum(1)), bootstrap=bootstrap, **options)
    for exact, of_padded, of_packed in zip(expected, padded, packed, strict=True):
        # a sum of up to 259 terms of size 1: 259 * 2^-53 of their sum, some 1e-11
        torch.testing.assert_close(of_padded, exact, rtol=0, atol=1e-10)
        # The layouts have rows of different widths, whose products may add in another order.
        torch.testing.assert_close(of_padded[mask], of_packed, rtol=0, atol=1e-12)


def test_results_have_no_gradient_and_the_dtype_of_the_values():
    for found in gae(torch.ones(3), torch.zeros(3, requires_grad=True), Layout.packed([3])):
        assert not found.requires_grad and found.dtype == torch.float32
    assert [x.tolist() for x in gae(torch.zeros(0), torch.zeros(0), Layout.packed([]))] == [[], []]


def test_whole_numbers_have_advantages_that_are_none():
    rewards, mask = torch.tensor([[0, 0, 1]]), torch.ones(1, 3)
    assert gae(rewards, 0 * rewards, mask, gamma=0.5)[0].tolist() == [[0.25, 0.5, 1.0]]
    assert whiten(rewards, mask)[0].tolist() == pytest.approx([-(3**-0.5)] * 2 + [2 * 3**-0.5])


def test_whitened_values_have_mean_zero_and_deviation_one_over_all_tokens():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    values = torch.tensor([[1.0, 2.0, 3.0, math.nan], [6.0, math.inf, 0.0, 0.0]])
    found = whiten(values, Layout.padded(mask))
    torch.testing.assert_close(found[mask], (values[mask] - 3.0) / values[mask].std())
    assert not found[~mask].any()
    assert torch.equal(found[mask], whiten(values[mask], Layout.packed([3, 1])))
    assert whiten(torch.ones(1), Layout.packed([1])).tolist() == [0.0]
    assert whiten(torch.full((3,), 0.1), Layout.packed([3])).abs().max() < 1e-8


def test_bad_input_is_refused_with_what_was_found():
    zeros, layout = torch.zeros(3), Layout.packed([1, 2])
    with pytest.raises(AlignmentError, match=r"\[2\]"):
        gae(zeros, torch.zeros(2), layout)
    with pytest.raises(AlignmentError, match=r"\[3\].*\[2\]"):
        gae(zeros, zeros, layout, bootstrap=zeros)
    with pytest.raises(AlignmentError, match=r"row 1, token 1\b"):
        gae(zeros, torch.tensor([0.0, 0.0, math.nan]), layout)
    with pytest.raises(AlignmentError, match=r"bootstrap at row 1 is nan"):
        gae(zeros, zeros, layout, bootstrap=torch.tensor([0.0, math.nan]))
    with pytest.raises(ConfigError, match=r"1\.5"):
        gae(zeros, zeros, layout, gamma=1.5)
    with pytest.raises(AlignmentError, match="gather whole rows first"):
        gae(zeros, zeros, replace(layout, group=object()))
