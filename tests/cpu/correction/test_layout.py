"""Rows of tokens, padded and packed: one way through, whatever the chunks cut."""

import numpy as np
import pytest
import torch

from lockstep.correction import Layout
from lockstep.correction.tokens import CHUNK_TOKENS, chunks_of
from lockstep.errors import AlignmentError


def test_padded_and_packed_rows_have_the_same_sums():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    values = torch.tensor([[1.0, 2.0, 99.0], [99.0] * 3, [99.0, 3.0, 4.0]])
    padded = Layout.padded(mask)
    assert padded.row_sums(values).tolist() == [3, 0, 7]
    assert padded.row_counts().tolist() == [2, 0, 2]
    packed = Layout.packed([2, 0, 2])
    assert torch.equal(packed.row_sums(values[mask != 0]), padded.row_sums(values))
    assert torch.equal(packed.row_counts(), padded.row_counts())


@pytest.mark.parametrize("label", [-100, float("nan")])
def test_labels_are_no_mask(label):
    with pytest.raises(AlignmentError, match=f"{label}"):
        Layout.padded(torch.tensor([[1, label]]))


def test_what_is_masked_may_be_anything():
    layout = Layout.packed([3, 2], torch.tensor([True, False, True, False, False]))
    values = torch.tensor([1.0, float("nan"), 2.0, float("inf"), float("-inf")])
    assert layout.row_sums(values).tolist() == [3.0, 0.0]


def test_sums_are_float64_and_carry_no_gradient():
    found = Layout.packed([10_001]).row_sums(torch.full((10_001,), 0.1, requires_grad=True))
    assert found.dtype == torch.float64 and not found.requires_grad
    assert found.item() == pytest.approx(10_001 * float(torch.tensor(0.1)), rel=1e-12)


def test_values_of_rows_are_given_to_all_of_their_tokens():
    values = torch.tensor([5.0, 6.0, 7.0])
    assert Layout.packed([2, 0, 1]).expand(values).tolist() == [5, 5, 7]
    mask = torch.tensor([[True, False]] * 3)
    assert Layout.padded(mask).expand(values).tolist() == [[5, 5], [6, 6], [7, 7]]


@pytest.mark.parametrize("lengths", [torch.tensor([2, 3]), np.array([2, 3], np.int32), [2, 3]])
def test_lengths_are_any_integers(lengths):
    layout = Layout.packed(lengths)
    assert layout.offsets.tolist() == [0, 2, 5] and layout.num_rows == 2
    assert layout.num_tokens == 5 and layout.shape == (5,)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_rows_without_tokens_are_rows(lengths):
    layout = Layout.packed(lengths)
    assert layout.num_rows == len(lengths) and layout.num_tokens == 0
    assert layout.row_sums(torch.zeros(0)).tolist() == [0.0] * len(lengths)
    assert chunks_of(layout) == [slice(0, len(lengths))]


def test_chunks_are_whole_rows_in_order():
    size = CHUNK_TOKENS
    lengths = [0, 3, size - 3, 0, 0, 2 * size + 5, 1, size - 7, 0]
    layout = Layout.packed(lengths)
    values = torch.arange(layout.num_tokens, dtype=torch.float64)
    expected = [float(part.sum()) for part in values.split(lengths)]
    assert layout.row_sums(values).tolist() == expected
    assert [(c.start, c.stop) for c in chunks_of(layout)] == [(0, 3), (3, 6), (6, 9)]


def test_a_token_is_located_by_row_and_place():
    layout = Layout.packed([2, 0, 3])
    assert [layout.locate(i) for i in (0, 1, 2, 4)] == [
        "row 0, token 0", "row 0, token 1", "row 2, token 0", "row 2, token 2",
    ]  # fmt: skip


def test_layouts_that_cannot_be_are_refused():
    with pytest.raises(AlignmentError, match=r"\[3\].*\[rows, tokens\]"):
        Layout.padded(torch.ones(3))
    with pytest.raises(AlignmentError, match=r"row 1\b.*-2"):
        Layout.packed([1, -2])
    with pytest.raises(AlignmentError, match=r"\b3\b.*\[4\]"):
        Layout.packed([1, 2], torch.ones(4))
    with pytest.raises(AlignmentError, match=r"\[3\].*\[3, 1\]"):
        Layout.packed([1, 2]).row_sums(torch.zeros(3, 1))
