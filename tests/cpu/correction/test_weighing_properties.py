"""What no correction may depend on: padding, empty rows, how a batch is cut, laid out, ordered."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_batches import (
    EXAMPLES,
    Batch,
    batches,
    broken,
    corrections,
    defined,
    each_fact,
    finite,
    garbage,
)

from lockstep.correction import Layout, TokenFacts, correct, weigh
from lockstep.correction.weighing import merged

# float32 weights divided by a float64 mean whose terms were added in another order: one last bit
ONE_BIT = 2e-7


def assert_same_metrics(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert math.isfinite(value), name
        # float64 sums in another order; a deviation is the root of a difference of two of them
        slack = 1e-4 if name.endswith("weight_std") else 1e-9
        assert value == pytest.approx(right[name], rel=1e-9, abs=slack), name


def assert_same(left, right, index=slice(None)):
    """left is right, but for the order of sums; `right`'s tokens are at `index` of left's."""
    assert torch.equal(left.keep[index], right.keep)
    torch.testing.assert_close(left.weights[index], right.weights, rtol=ONE_BIT, atol=0)
    assert (left.penalty is None) == (right.penalty is None)
    if left.penalty is not None:
        # a difference of float32 numbers of up to 30
        torch.testing.assert_close(left.penalty[index], right.penalty, rtol=1e-6, atol=1e-6)
    assert torch.equal(left.denominator_tokens, right.denominator_tokens)
    assert torch.equal(left.denominator_rows, right.denominator_rows)
    assert_same_metrics(left.to_metrics(), right.to_metrics())


def pad(batch, width, filler):
    """(padded tensors, facts, mask): rows at the left of `width`, `filler` [R, width] elsewhere."""
    mask = torch.arange(width)[None] < torch.tensor(batch.lengths).reshape(len(batch.lengths), 1)

    def fill(values):
        # Integers hold the largest of either sign where a float holds what is not finite.
        limits = torch.iinfo(values.dtype) if not values.is_floating_point() else None
        other = filler if limits is None else filler.nan_to_num(-1).clamp(limits.min, limits.max)
        out = other.to(values.dtype, copy=True)
        out[mask] = values
        return out

    return fill(batch.new), fill(batch.old), each_fact(batch.facts, fill), mask


@EXAMPLES
@given(batches(logprobs=st.one_of(finite, broken)), corrections())
def test_a_weight_is_what_its_definition_says(batch, correction):
    wide = replace(batch, new=batch.new.double(), old=batch.old.double())
    found = wide.correct(correction)
    weights, keep = defined(wide, correction)
    assert found.keep.tolist() == keep
    assert found.weights.tolist() == pytest.approx(weights, rel=1e-6)


@EXAMPLES
@given(batches(), corrections(), st.integers(0, 3), st.data())
def test_what_stands_in_the_padding_changes_no_bit(batch, correction, extra, data):
    rows, width = len(batch.lengths), max(batch.lengths, default=0) + extra
    size = rows * width
    drawn = data.draw(st.lists(garbage, min_size=size, max_size=size))
    filler = torch.tensor(drawn, dtype=torch.float32).reshape(rows, width)
    found = []
    for content in (torch.full((rows, width), -1.0), filler):
        new, old, facts, mask = pad(batch, width, content)
        found.append(correct(new, old, correction, layout=mask, facts=facts))
    left, right = found
    for name in ("weights", "keep", "denominator_tokens", "denominator_rows"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    if left.penalty is not None:
        assert torch.equal(left.penalty, right.penalty)
        assert not right.penalty[~mask].any()
    assert torch.equal(left.report.sums, right.report.sums)
    assert torch.equal(left.report.maxima, right.report.maxima)
    assert not right.weights[~mask].any() and not right.keep[~mask].any()


@EXAMPLES
@given(batches(logprobs=st.one_of(finite, broken)), corrections(), st.integers(0, 3))
def test_padded_rows_are_packed_rows(batch, correction, extra):
    width = max(batch.lengths, default=0) + extra
    new, old, facts, mask = pad(batch, width, torch.full((len(batch.lengths), width), math.nan))
    padded = correct(new, old, correction, layout=mask, facts=facts)
    assert_same(padded, batch.correct(correction), index=mask)


@EXAMPLES
@given(batches(), corrections(), st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_empty_rows_anywhere_change_nothing(batch, correction, places):
    lengths = list(batch.lengths)
    for place in places:
        lengths.insert(min(place, len(lengths)), 0)
    found = replace(batch, lengths=lengths).correct(correction)
    expected = batch.correct(correction)
    assert torch.equal(found.weights, expected.weights)
    assert_same(found, expected)


@EXAMPLES
@given(batches(), corrections())
def test_rows_that_are_masked_as_a_whole_are_empty_rows(batch, correction):
    doubled = batch.rows([*range(len(batch.lengths)), *range(len(batch.lengths))])
    size = len(batch.new)
    mask = torch.arange(2 * size) < size
    found = correct(
        doubled.new, doubled.old, correction,
        layout=Layout.packed(doubled.lengths, mask), facts=doubled.facts,
    )  # fmt: skip
    assert_same(found, batch.correct(correction), index=mask)


@EXAMPLES
@given(batches(logprobs=st.one_of(finite, broken)), corrections())
def test_nothing_that_counts_is_nothing_at_all(batch, correction):
    layout = Layout.packed(batch.lengths, torch.zeros(len(batch.new), dtype=torch.bool))
    found = correct(batch.new, batch.old, correction, layout=layout, facts=batch.facts)
    assert not found.weights.any() and not found.keep.any()
    assert float(found.denominator_tokens) == float(found.denominator_rows) == 0
    nothing = torch.zeros(0)
    empty = TokenFacts(advantages=nothing)
    expected = correct(nothing, nothing, correction, layout=Layout.packed([]), facts=empty)
    assert_same_metrics(found.to_metrics(), expected.to_metrics())


@EXAMPLES
@given(batches(logprobs=st.one_of(finite, broken)), corrections(), st.data())
def test_any_cut_into_micro_batches_gives_the_whole(batch, correction, data):
    rows = list(range(len(batch.lengths)))
    owner = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    chosen = [[r for r in rows if owner[r] == part] for part in range(4)]
    parts = [batch.rows(c) for c in chosen]
    weighed = [
        weigh(p.new, p.old, correction, layout=p.layout, facts=p.facts) for p in parts
    ]  # fmt: skip
    total = merged(w.report for w in weighed)
    whole = batch.correct(correction)
    row_of = torch.tensor(batch.row_of(), dtype=torch.int64)
    for part, pieces in zip(chosen, weighed, strict=True):
        index = torch.cat([(row_of == r).nonzero()[:, 0] for r in [*part, -1]])
        assert_same(whole, pieces.finish(total), index=index)


@EXAMPLES
@given(batches(), corrections(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(batch, correction, rng):
    order = list(range(len(batch.lengths)))
    rng.shuffle(order)
    row_of = torch.tensor(batch.row_of(), dtype=torch.int64)
    index = torch.cat([(row_of == r).nonzero()[:, 0] for r in [*order, -1]])
    assert_same(batch.correct(correction), batch.rows(order).correct(correction), index=index)


@EXAMPLES
@given(batches(), corrections(), st.randoms(use_true_random=False))
def test_the_order_of_rules_does_not_matter(batch, correction, rng):
    shuffled = list(correction.reject)
    rng.shuffle(shuffled)
    found = batch.correct(replace(correction, reject=tuple(shuffled)))
    assert_same(found, batch.correct(correction))


@EXAMPLES
@given(batches(logprobs=st.one_of(finite, broken)), corrections())
def test_tokens_that_are_not_finite_are_rejected_and_counted_and_change_no_other(batch, correction):
    if any(rule.rejects_impossible for rule in correction.reject):
        no_zero = torch.where(batch.new == -math.inf, math.nan, batch.new)
        batch = replace(batch, new=no_zero)  # a probability of 0 does veto its sequence
    is_finite = torch.isfinite(batch.new) & torch.isfinite(batch.old)
    found = batch.correct(correction)
    assert not (found.keep & ~is_finite).any()
    for values in (found.weights, found.penalty):
        if values is not None:
            assert torch.isfinite(values).all() and not values[~is_finite].any()
    metrics = found.to_metrics()
    assert all(math.isfinite(v) for v in metrics.values())
    assert metrics["mismatch/nonfinite_tokens"] == int((~is_finite).sum())
    index = is_finite.nonzero()[:, 0].tolist()
    lengths = [int(part.sum()) for part in is_finite.split(batch.lengths)] if batch.lengths else []
    left = batch.tokens(index, lengths).correct(correction)
    assert torch.equal(found.weights[is_finite], left.weights)
    assert torch.equal(found.keep[is_finite], left.keep)
    if correction.denominator == "original":
        assert float(found.denominator_tokens) == len(batch.new)
    else:
        assert torch.equal(found.denominator_tokens, left.denominator_tokens)
        assert torch.equal(found.denominator_rows, left.denominator_rows)


@EXAMPLES
@given(batches(logprobs=st.one_of(finite, broken)), corrections())
def test_a_weight_is_above_zero_exactly_where_a_token_is_kept(batch, correction):
    found = batch.correct(correction)
    assert torch.equal(found.weights > 0, found.keep)
    counts = [int(part.any()) for part in found.keep.split(batch.lengths)] if batch.lengths else []
    if correction.denominator == "kept":
        assert float(found.denominator_tokens) == int(found.keep.sum())
        assert float(found.denominator_rows) == sum(counts)
    low, high = correction.limits
    if correction.level == "none":
        assert torch.equal(found.weights, found.keep.float())
    elif not correction.is_normalized:
        kept = found.weights[found.keep].double()
        assert bool(((kept >= low * (1 - 1e-6)) & (kept <= high * (1 + 1e-6))).all())


@EXAMPLES
@given(batches(), corrections())
def test_normalised_weights_have_the_mean_one_over_what_is_kept(batch, correction):
    found = batch.correct(correction)
    if not correction.is_normalized or not found.keep.any():
        return
    if correction.level == "token":
        counted = found.weights[found.keep].double()
    else:
        rows = [p[k] for p, k in zip(found.weights.split(batch.lengths),
                                     found.keep.split(batch.lengths), strict=True)]  # fmt: skip
        counted = torch.stack([row[0] for row in rows if len(row)]).double()
    assert float(counted.mean()) == pytest.approx(1, rel=1e-6)


@EXAMPLES
@given(batches(), corrections())
def test_the_penalty_moves_nothing_on_average(batch, correction):
    found = batch.correct(replace(correction, kl_penalty_coef=0.1, kl_penalty_form="advantage"))
    size = max(len(batch.new), 1)
    # of each term: half a float32 step of up to 30 x 0.1
    assert abs(float(found.penalty.double().sum())) <= size * 3 * 2**-23


def test_random_corrections_do_reject_and_keep():
    """The properties above are of something: such batches keep none, some and all of a batch."""
    seen = {"some": 0, "all": 0, "none": 0}

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(batches(), corrections())
    def count(batch: Batch, correction):
        kept = batch.correct(correction).keep
        if len(kept):
            seen["all" if kept.all() else "some" if kept.any() else "none"] += 1

    count()
    assert seen["some"] and seen["all"] and seen["none"], seen
