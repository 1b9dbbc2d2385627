"""How token losses become one number: by hand, in parts, and with anything outside the mask."""

import math

import numpy as np
import pytest
import torch

from lockstep.correction.layout import Layout
from lockstep.errors import AlignmentError, ConfigError
from lockstep.objectives.aggregation import aggregate, token_weights

HOW = ("token_mean", "sequence_mean", 10)

# rows of 3, 0 and 2 tokens that count
MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]]).bool()
LOSS = torch.tensor([[1.0, 2.0, 9.0, 3.0], [9.0, 9.0, 9.0, 9.0], [9.0, 4.0, 6.0, 9.0]])


@pytest.mark.parametrize(
    ("how", "expected"),
    [("token_mean", 16 / 5), ("sequence_mean", (2 + 5) / 2), (10, (6 + 10) / 10 / 2)],
)
def test_each_way_by_hand(how, expected):
    padded = aggregate(LOSS, MASK, how=how)
    assert torch.equal(padded, aggregate(LOSS, Layout.padded(MASK), how=how))
    packed = aggregate(LOSS[MASK], Layout.packed([3, 0, 2]), how=how)
    assert padded.item() == pytest.approx(expected, rel=1e-6)
    assert packed.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("how", HOW)
def test_a_batch_in_parts_adds_up_to_the_whole(how):
    whole = aggregate(LOSS, Layout.padded(MASK), how=how)
    denominator = {"token_mean": 5.0}.get(how, 2.0)
    parts = [
        aggregate(LOSS[r : r + 1], Layout.padded(MASK[r : r + 1]), how=how, denominator=denominator)
        for r in range(3)
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("filler", [math.nan, math.inf])
def test_what_stands_outside_the_mask_changes_neither_value_nor_gradient(how, filler):
    found = []
    for fill in (0.0, filler):
        leaf = torch.where(MASK, LOSS, fill).requires_grad_()
        value = aggregate(leaf, Layout.padded(MASK), how=how)
        value.backward()
        found.append((value, leaf.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert not found[1][1][~MASK].any()


@pytest.mark.parametrize("how", HOW)
def test_a_batch_of_nothing_is_zero(how):
    empty = aggregate(torch.ones(2, 3), Layout.padded(torch.zeros(2, 3)), how=how)
    none = aggregate(torch.ones(0), Layout.packed([]), how=how)
    assert empty.item() == none.item() == 0.0


def test_the_gradient_of_a_token_is_its_weight():
    leaf = LOSS.clone().requires_grad_()
    aggregate(leaf, Layout.padded(MASK), how="sequence_mean").backward()
    weights = token_weights(Layout.padded(MASK), "sequence_mean")
    assert torch.equal(leaf.grad, weights)
    assert weights.sum().item() == pytest.approx(1.0)


def test_bad_input_is_refused_with_what_was_found():
    layout = Layout.packed([2])
    with pytest.raises(AlignmentError, match=r"\[2\].*token_loss \[3\]"):
        aggregate(torch.zeros(3), layout)
    for how in (0, -4, float("nan"), float("inf"), True, "fixed_length"):
        with pytest.raises(ConfigError, match=rf"aggregate={how!r}"):
            aggregate(torch.zeros(2), layout, how=how)
    for zero in (0, np.float32(0)):
        with pytest.raises(ConfigError, match=r"denominator=0.*\b0\b"):
            aggregate(torch.zeros(2), layout, denominator=zero)
