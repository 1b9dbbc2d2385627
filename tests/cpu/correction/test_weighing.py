"""Weights, rejection, normalisation and denominators, on numbers done by hand."""

import math
import re

import pytest
import torch
from quickstarts import quickstart_with

from lockstep.correction import Correction, Layout, Rule, TokenFacts, correct, measure, weigh
from lockstep.correction.weighing import merged
from lockstep.errors import AlignmentError

NAN, INF = math.nan, math.inf

# Without the mean a sequence's weight is its own: what is done by hand here.


def of_ratios(*rows, correction, advantages=None, base=0.05):
    """`correct` on rows of ratios trainer / rollout, each token of probability `base` under the
    trainer; packed. None is a token that is not finite."""
    flat = [NAN if r is None else r for row in rows for r in row]
    new = torch.full((len(flat),), math.log(base), dtype=torch.float64)
    old = new - torch.tensor(flat, dtype=torch.float64).log()
    facts = TokenFacts(advantages=None if advantages is None else torch.tensor(advantages))
    layout = Layout.packed([len(row) for row in rows])
    return correct(new, old, correction, layout=layout, facts=facts)


def weights(*rows, **settings):
    return of_ratios(*rows, correction=Correction(anchor="recomputed", **settings)).weights.tolist()


def kept(*rows, rules, advantages=None, base=0.05):
    correction = Correction(anchor="recomputed", reject=tuple(rules))
    corrected = of_ratios(*rows, correction=correction, advantages=advantages, base=base)
    assert torch.equal(corrected.weights, corrected.keep.float()), "level=none weighs nothing"
    return [int(k) for k in corrected.keep]


# -- level x bound --------------------------------------------------------------------------------

# Two rows: products 0.5 * 4 = 2 and 8 * 8 * 1 = 64, geometric means sqrt(2) and 4.
ROWS = ([0.5, 4.0], [8.0, 8.0, 1.0])


@pytest.mark.parametrize(
    ("level", "bound", "limits", "expected"),
    [
        ("token", "truncate", (0, 3), [0.5, 3, 3, 3, 1]),
        ("token", "clip", (0.75, 3), [0.75, 3, 3, 3, 1]),
        ("token", "mask", (0.75, 5), [0, 4, 0, 0, 1]),
        ("sequence", "truncate", (0, 32), [2, 2, 32, 32, 32]),
        ("sequence", "clip", (0.25, 1.5), [1.5, 1.5, 1.5, 1.5, 1.5]),
        ("sequence", "mask", (0.25, 32), [2, 2, 0, 0, 0]),
        ("geometric", "truncate", (0, 3), [2**0.5, 2**0.5, 3, 3, 3]),
        ("geometric", "clip", (1, 2), [2**0.5, 2**0.5, 2, 2, 2]),
        ("geometric", "mask", (1, 2), [2**0.5, 2**0.5, 0, 0, 0]),
    ],
)
def test_a_weight_is_of_its_level_and_bounded_by_its_bound(level, bound, limits, expected):
    found = weights(
        *ROWS, level=level, bound=bound, limits=limits, normalize=level == "token" and None
    )
    assert found == pytest.approx(expected, rel=1e-6)


def test_clip_lifts_what_is_below_the_lower_limit_at_every_level():
    rows = ([0.5, 0.5], [1.0])
    for level, low in (("token", 0.9), ("sequence", 0.9), ("geometric", 0.9)):
        found = weights(*rows, level=level, bound="clip", limits=(low, 2), normalize=False)
        assert found == pytest.approx([0.9, 0.9, 1.0], rel=1e-6)


def test_a_limit_itself_is_inside():
    equal = torch.tensor([-1.0, -2.0])
    for limits in ((1.0, 2.0), (0.5, 1.0)):
        correction = Correction(anchor="recomputed", level="token", bound="mask", limits=limits)
        assert correct(equal, equal, correction).keep.all()
    for rule in (Rule(stat="ratio", low=1.0), Rule(stat="k3", high=0.0), Rule.veto_ratio(1.0)):
        correction = Correction(anchor="recomputed", reject=(rule,))
        assert correct(equal, equal, correction).keep.all()


def test_a_product_grows_with_length_and_its_geometric_mean_does_not():
    for length in (1, 10, 100):
        row = [1.1] * length
        limits = (0, math.inf)
        product = weights(row, level="sequence", limits=limits, normalize=False)
        assert product == pytest.approx([1.1**length] * length, rel=1e-6)
        mean = weights(row, level="geometric", limits=limits, normalize=False)
        assert mean == pytest.approx([1.1] * length, rel=1e-6)


def test_a_ratio_is_cut_at_the_exponential_of_twenty_and_stays_finite():
    new, old = torch.tensor([-1.0, -900.0]), torch.tensor([-900.0, -1.0])
    correction = Correction(anchor="recomputed", level="token", limits=(0, INF))
    found = correct(new, old, correction).weights
    assert found.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-6)
    assert found[1] > 0, "what is kept has a weight above 0"


def test_on_policy_tokens_have_a_weight_of_exactly_one_at_every_level():
    logprobs = -torch.rand(50, generator=torch.Generator().manual_seed(0))
    for level in ("token", "sequence", "geometric"):
        corrected = correct(logprobs, logprobs.clone(), Correction.tis(level=level))
        assert torch.equal(corrected.weights, torch.ones(50))


# -- normalisation --------------------------------------------------------------------------------


def test_weights_are_divided_by_their_mean_over_kept_tokens_after_bounding():
    rule = Rule(stat="ratio", high=10.0)
    found = weights(
        [4.0, 0.5], [100.0, 1.0], level="token", limits=(0, 2), normalize=True, reject=(rule,)
    )
    mean = (2 + 0.5 + 1) / 3  # cut at 2 first, and without the rejected 100
    assert found == pytest.approx([2 / mean, 0.5 / mean, 0, 1 / mean], rel=1e-6)


def test_an_outlier_that_is_masked_does_not_shrink_the_others():
    found = weights(
        [1.0] * 999 + [4.85e8], level="token", bound="mask", limits=(0, 5), normalize=True
    )
    assert found == [1.0] * 999 + [0.0]


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_sequences_weigh_the_same_in_the_mean_whatever_their_length(level):
    # weights 2 (one token), 0.5 per sequence of eight; empty rows are none
    low = 0.5 ** (1 / 8) if level == "sequence" else 0.5
    found = weights([2.0], [], [low] * 8, [], level=level, limits=(0, 4))
    assert found == pytest.approx([2 / 1.25] + [0.5 / 1.25] * 8, rel=1e-6)


def test_sequences_that_are_rejected_are_not_in_the_mean():
    rule = Rule(stat="ratio", aggregation="sum", high=3.0)
    found = weights([4.0], [2.0], [0.5], level="sequence", limits=(0, 8), reject=(rule,))
    assert found == pytest.approx([0, 2 / 1.25, 0.5 / 1.25], rel=1e-6)


def test_sequences_whose_tokens_are_all_rejected_are_not_in_the_mean():
    rule = Rule(stat="ratio", high=3.0)
    found = weights([4.0], [2.0, 4.0], level="geometric", limits=(0, INF), reject=(rule,))
    assert found == pytest.approx([0, 1, 0], rel=1e-6)


def test_a_mean_over_the_batch_is_over_all_of_its_pieces():
    correction = Correction(anchor="recomputed", level="token", limits=(0, 8), normalize=True)
    old = torch.log(torch.tensor([0.1, 0.1, 0.1]))
    new = torch.log(torch.tensor([0.2, 0.1, 0.6]))  # ratios 2, 1, 6: mean 3
    parts = [weigh(new[i], old[i], correction) for i in (slice(0, 2), slice(2, 3))]
    total = merged(part.report for part in parts)
    found = torch.cat([part.finish(total).weights for part in parts])
    assert found.tolist() == pytest.approx([2 / 3, 1 / 3, 2], rel=1e-6)
    alone = torch.cat([part.finish(part.report).weights for part in parts])
    assert alone.tolist() == pytest.approx([4 / 3, 2 / 3, 1], rel=1e-6)


# -- rules ----------------------------------------------------------------------------------------

LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # ratios 0.25, 1, 4 in one row, 2 in the other
        (Rule(stat="ratio", low=0.5), [0, 1, 1, 1]),
        (Rule(stat="ratio", high=3), [1, 1, 0, 1]),
        (Rule(stat="ratio", low=0.5, high=1.5), [0, 1, 0, 0]),
        # k1 = -log ratio: 2 log 2, 0, -2 log 2, -log 2
        (Rule(stat="k1", high=LOG2), [0, 1, 1, 1]),
        (Rule(stat="k1", low=-1.5 * LOG2), [1, 1, 0, 1]),
        # k2 = log^2 / 2: 0.96, 0, 0.96, 0.24
        (Rule(stat="k2", high=0.5), [0, 1, 0, 1]),
        # k3 = ratio - 1 - log ratio: 0.64, 0, 1.61, 0.31
        (Rule(stat="k3", high=1.0), [1, 1, 0, 1]),
        (Rule(stat="k3", high=0.5), [0, 1, 0, 1]),
        # |0.1 - 0.1 / ratio|: 0.3, 0, 0.075, 0.05
        (Rule(stat="prob_diff", high=0.06), [0, 1, 0, 1]),
        (Rule(stat="ratio", aggregation="max", low=0.5), [0, 0, 0, 1]),
        (Rule(stat="ratio", aggregation="max", high=3), [0, 0, 0, 1]),
        (Rule(stat="ratio", aggregation="max", low=0.1, high=5), [1, 1, 1, 1]),
        (Rule(stat="k3", aggregation="max", high=1.0), [0, 0, 0, 1]),
        (Rule(stat="prob_diff", aggregation="max", high=0.06), [0, 0, 0, 1]),
        # the product of row 0 is 1, its geometric mean too; those of row 1 are 2
        (Rule(stat="ratio", aggregation="sum", high=1.5), [1, 1, 1, 0]),
        (Rule(stat="ratio", aggregation="mean", low=0.5, high=1.5), [1, 1, 1, 0]),
        (Rule(stat="ratio", aggregation="mean", low=1.5), [0, 0, 0, 1]),
        (Rule(stat="k1", aggregation="sum", low=-LOG2 / 2), [1, 1, 1, 0]),
        (Rule(stat="k1", aggregation="mean", low=-2, high=-LOG2 / 2), [0, 0, 0, 1]),
        # k2: sum 1.92, mean 0.64 against 0.24; k3: sum 2.25, mean 0.75 against 0.31
        (Rule(stat="k2", aggregation="sum", high=1.0), [0, 0, 0, 1]),
        (Rule(stat="k2", aggregation="mean", high=0.7), [1, 1, 1, 1]),
        (Rule(stat="k2", aggregation="mean", high=0.5), [0, 0, 0, 1]),
        (Rule(stat="k3", aggregation="sum", high=2.0), [0, 0, 0, 1]),
        (Rule(stat="k3", aggregation="mean", high=0.7), [0, 0, 0, 1]),
        (Rule(stat="k3", aggregation="mean", high=0.8), [1, 1, 1, 1]),
        # prob_diff: sum 0.375, mean 0.125 against 0.05
        (Rule(stat="prob_diff", aggregation="sum", high=0.3), [0, 0, 0, 1]),
        (Rule(stat="prob_diff", aggregation="mean", high=0.13), [1, 1, 1, 1]),
        (Rule(stat="prob_diff", aggregation="mean", high=0.12), [0, 0, 0, 1]),
    ],
    ids=lambda value: value.name if isinstance(value, Rule) else None,
)  # fmt: skip
def test_a_rule_rejects_what_lies_outside_of_its_bounds(rule, expected):
    assert kept([0.25, 1.0, 4.0], [2.0], rules=[rule], base=0.1) == expected


@pytest.mark.parametrize("aggregation", ["token", "max"])
def test_a_rule_on_the_old_probability_reads_the_trainers_before_the_update(aggregation):
    new = torch.log(torch.tensor([0.5, 1e-3, 0.5, 0.9]))
    old = torch.log(torch.tensor([1e-3, 0.5, 0.5, 0.5]))
    rule = Rule(stat="old_prob", aggregation=aggregation, low=0.01, high=0.8)
    correction = Correction(anchor="recomputed", reject=(rule,))
    found = correct(new, old, correction, layout=Layout.packed([2, 1, 1])).keep.tolist()
    first = aggregation == "token"
    assert found == [first, False, True, False]


def test_the_two_vetoes_are_of_a_probability_and_of_a_ratio():
    # row 0: improbable to both; row 1: probable to the trainer, its ratio below the floor
    new = torch.log(torch.tensor([0.5, 1e-7, 0.5, 1e-5, 0.5]))
    old = torch.log(torch.tensor([0.5, 1e-7, 0.5, 0.9, 0.5]))
    layout = Layout.packed([2, 2, 1])

    def found(rule):
        return correct(
            new, old, Correction(anchor="recomputed", reject=(rule,)), layout=layout
        ).keep.tolist()

    assert found(Rule.veto_prob()) == [False, False, True, True, True]
    assert found(Rule.veto_ratio()) == [True, True, False, False, True]
    assert found(Rule.veto_prob(1e-8)) == found(Rule.veto_ratio(1e-6)) == [True] * 5


@pytest.mark.parametrize(
    ("rule", "is_vetoed"),
    [
        (Rule.veto_prob(1e-6), True),
        (Rule.veto_ratio(1e-4), True),
        (Rule(stat="k3", aggregation="max", high=1e3), True),
        (Rule(stat="ratio", aggregation="max", high=9.0), False),
        (Rule(stat="prob_diff", aggregation="max", high=0.9), False),
    ],
)
def test_a_token_of_probability_zero_vetoes_its_sequence_and_one_that_is_not_a_number_does_not(
    rule, is_vetoed
):
    trainer = torch.tensor([[-1.0, -math.inf], [-1.0, math.nan], [-1.0, -1.0]])
    rollout = torch.tensor([[-1.0, -2.0], [-1.0, -2.0], [-1.0, -1.0]])
    found = correct(trainer, rollout, Correction(anchor="recomputed", reject=(rule,)))
    assert found.keep.tolist() == [[not is_vetoed, False], [True, False], [True, True]]
    masked = torch.tensor([[True, False], [True, True], [True, True]])
    found = correct(
        trainer, rollout, Correction(anchor="recomputed", reject=(rule,)), layout=masked
    )
    assert found.keep[0].tolist() == [True, False], "outside the mask it is nothing"


def test_opsm_masks_negative_advantages_of_sequences_that_have_drifted():
    # k1 of row 0 is +log 2 per token (the trainer finds it less likely), of row 1 -log 2
    rows, advantages = ([0.5, 0.5], [2.0, 2.0]), [-1.0, 1.0, -1.0, 1.0]
    assert kept(*rows, rules=[Rule.opsm()], advantages=advantages) == [0, 1, 1, 1]
    assert kept(*rows, rules=[Rule.opsm(1.0)], advantages=advantages) == [1, 1, 1, 1]


def test_a_token_rule_can_be_for_negative_advantages_alone():
    rule = Rule(stat="ratio", high=3, only_negative_advantage=True)
    found = kept([4.0, 4.0, 1.0], rules=[rule], advantages=[-1.0, 0.0, -1.0])
    assert found == [0, 1, 1]


def test_a_rule_for_negative_advantages_and_one_for_all_add_up():
    rules = [Rule.opsm(), Rule(stat="ratio", aggregation="max", high=5)]
    found = kept([0.5, 0.5], [0.1, 10.0], rules=rules, advantages=[-1.0, 1.0, 1.0, 1.0])
    assert found == [0, 1, 0, 0]


def test_rules_are_evaluated_on_the_original_mask_and_their_order_does_not_matter():
    # The token rule takes the 4, and the mean is over the row with it.
    token = Rule(stat="ratio", high=3)
    row = Rule(stat="ratio", aggregation="mean", low=0.9, high=1.1)
    rows = ([0.25, 1.0, 4.0], [1.5, 1.5])
    assert kept(*rows, rules=[token, row]) == kept(*rows, rules=[row, token]) == [1, 1, 0, 0, 0]
    # Level and rules do not depend on each other either: the product has the rejected token in it.
    found = weights([0.5, 4.0], level="sequence", limits=(0, 3), normalize=False, reject=(token,))
    assert found == [2.0, 0.0]


@pytest.mark.parametrize("label", ["d", "valid", "active", "kept", "negative", "kept_negative"])
def test_a_label_is_a_name_and_nothing_else(label):
    rule = Rule(stat="k3", aggregation="mean", high=0.5, label=label)
    plain = Rule(stat="k3", aggregation="mean", high=0.5)
    rows = ([0.25, 1.0, 4.0], [2.0])
    found, expected = (
        of_ratios(*rows, correction=Correction(
            anchor="recomputed", level="sequence", limits=(0, 8), reject=(r,)
        ))
        for r in (rule, plain)
    )  # fmt: skip
    assert torch.equal(found.weights, expected.weights)
    metrics = found.to_metrics()
    assert metrics.pop(f"correction/rejected_by/{label}") == 0.75
    left = expected.to_metrics()
    assert left.pop("correction/rejected_by/sequence_mean_k3") == 0.75
    assert metrics == left


def test_what_each_rule_rejects_is_counted_by_itself():
    rules = (Rule(stat="ratio", high=3), Rule(stat="ratio", aggregation="max", low=0.5),
             Rule.opsm())  # fmt: skip
    corrected = of_ratios(
        [0.25, 1.0, 4.0], [4.0, 0.9],
        correction=Correction(anchor="recomputed", reject=rules),
        advantages=[-1.0] * 3 + [-1.0, 1.0],
    )  # fmt: skip
    metrics = corrected.to_metrics()
    assert metrics["correction/rejected_by/token_ratio"] == 2 / 5
    assert metrics["correction/rejected_by/sequence_max_ratio"] == 3 / 5
    assert metrics["correction/rejected_by/opsm"] == 0.0
    assert metrics["correction/rejected_share"] == 4 / 5
    assert metrics["correction/rejected_sequences_share"] == 1 / 2
    assert metrics["correction/kept_tokens"] == 1


def test_of_two_rules_the_weights_are_zero_where_either_rejects():
    rules = (Rule(stat="ratio", high=3), Rule.veto_ratio(0.5))
    found = weights([0.25, 1.0], [4.0, 1.0], [1.0], level="token", limits=(0, 8), reject=rules)
    assert found == [0, 0, 0, 1, 1]


# -- what is not finite ---------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [(NAN, -1.0), (-1.0, NAN), (-INF, -INF), (-1.0, -INF), (INF, -1.0)])
@pytest.mark.parametrize("level", ["none", "token", "sequence", "geometric"])
def test_a_token_that_is_not_finite_goes_and_leaves_its_row_as_if_it_were_not_there(bad, level):
    new, old = torch.tensor([-1.0, bad[0], -2.0, -1.0]), torch.tensor([-1.5, bad[1], -1.5, -1.0])
    correction = Correction(anchor="recomputed", level=level, limits=(0, 8))
    corrected = correct(new, old, correction, layout=Layout.packed([3, 1]))
    without = [0, 2, 3]
    left = correct(new[without], old[without], correction, layout=Layout.packed([2, 1]))
    assert torch.equal(corrected.weights[without], left.weights)
    assert corrected.weights[1] == 0 and not corrected.keep[1]
    assert float(corrected.denominator_tokens) == 4, "it stays in the original denominator"
    metrics = corrected.to_metrics()
    assert metrics["mismatch/nonfinite_tokens"] == 1
    if level != "none":
        assert metrics["correction/rejected_share"] == 1 / 4
    assert all(math.isfinite(v) for v in metrics.values())


def test_a_row_of_nothing_finite_is_rejected_and_no_rule_is_to_blame():
    rules = (Rule.veto_prob(), Rule(stat="ratio", aggregation="mean", low=2.0))
    corrected = of_ratios(
        [None, None], [4.0], correction=Correction(anchor="recomputed", reject=rules)
    )
    assert corrected.keep.tolist() == [False, False, True]
    metrics = corrected.to_metrics()
    assert metrics["correction/rejected_by/veto_prob"] == 0
    assert metrics["correction/rejected_by/sequence_mean_ratio"] == 0
    assert metrics["correction/rejected_sequences_share"] == 1 / 2


def test_all_rejected_gives_zeros_and_no_error():
    correction = Correction(
        anchor="recomputed", level="token", bound="mask", limits=(0.5, 2), normalize=True,
        kl_penalty_coef=0.1, kl_penalty_form="advantage", denominator="kept",
    )  # fmt: skip
    corrected = of_ratios([4.0, 8.0], [0.1], correction=correction)
    assert not corrected.weights.any() and not corrected.keep.any()
    assert float(corrected.denominator_tokens) == float(corrected.denominator_rows) == 0
    assert all(math.isfinite(v) for v in corrected.to_metrics().values())


def test_an_empty_batch_is_empty_and_no_error():
    nothing = torch.zeros(0)
    for layout in (Layout.packed([]), Layout.packed([0, 0])):
        corrected = correct(nothing, nothing, Correction.mis(level="sequence"), layout=layout)
        assert corrected.weights.shape == (0,)
        assert all(math.isfinite(v) for v in corrected.to_metrics().values())
    none = torch.zeros(0, 4)
    assert correct(none, none, Correction.tis()).weights.shape == (0, 4)
    flat = torch.zeros(3, 0)
    assert correct(flat, flat, Correction.tis(level="geometric")).weights.shape == (3, 0)


# -- denominators ---------------------------------------------------------------------------------


def test_a_mean_divides_by_all_tokens_or_by_those_that_are_kept():
    rows = ([4.0, 1.0], [], [4.0], [1.0, 1.0, None])
    rule = Rule(stat="ratio", high=3)
    for denominator, tokens, of_rows in (("original", 6, 3), ("kept", 3, 2)):
        correction = Correction(anchor="recomputed", reject=(rule,), denominator=denominator)
        corrected = of_ratios(*rows, correction=correction)
        assert float(corrected.denominator_tokens) == tokens
        assert float(corrected.denominator_rows) == of_rows


def test_the_denominator_changes_no_weight():
    for preset in (Correction.mis, Correction.icepop):
        original = preset()
        settings = {f: getattr(original, f) for f in ("anchor", "level", "bound", "limits",
                                                      "normalize", "reject")}  # fmt: skip
        left = of_ratios(*ROWS, correction=original)
        right = of_ratios(*ROWS, correction=Correction(**settings, denominator="kept"))
        assert torch.equal(left.weights, right.weights)


# -- the KL penalty -------------------------------------------------------------------------------


def test_the_penalty_of_pieces_is_centred_over_the_whole_batch():
    correction = Correction(
        anchor="recomputed", kl_penalty_coef=0.5, kl_penalty_form="advantage", kl_penalty_clip=1.0
    )
    old = torch.tensor([-1.0, -1.0, -1.0, -4.0])
    new = torch.tensor([-1.5, -1.0, -0.75, -1.0])  # diff 0.5, 0, -0.25, -3 cut at -1
    whole = correct(new, old, correction)
    mean = (0.5 + 0 - 0.25 - 1) / 4
    expected = [0.5 * (mean - x) for x in (0.5, 0, -0.25, -1)]
    assert whole.penalty.tolist() == pytest.approx(expected, rel=1e-6)
    assert float(whole.penalty.sum()) == pytest.approx(0, abs=1e-7)
    parts = [weigh(new[i], old[i], correction) for i in (slice(0, 3), slice(3, 4))]
    total = merged(part.report for part in parts)
    found = torch.cat([part.finish(total).penalty for part in parts])
    assert torch.equal(found, whole.penalty)


def test_without_a_coefficient_there_is_no_penalty():
    assert of_ratios([2.0], correction=Correction.tis()).penalty is None
    in_loss = Correction(kl_penalty_coef=0.1, kl_penalty_form="loss")
    assert of_ratios([2.0], correction=in_loss).penalty is None


# -- layouts --------------------------------------------------------------------------------------


def test_nothing_but_the_tensors_is_one_row_per_line():
    new, old = (
        torch.tensor([[-1.0, -1.0], [-2.0, -1.0]]),
        torch.tensor([[-1.0, -2.0], [-1.0, -1.0]]),
    )
    correction = Correction(anchor="recomputed", level="sequence", limits=(0, 8), normalize=False)
    found = correct(new, old, correction).weights
    e = math.e
    assert found.flatten().tolist() == pytest.approx([e, e, 1 / e, 1 / e], rel=1e-6)
    flat = correct(new.flatten(), old.flatten(), correction).weights
    assert flat.tolist() == pytest.approx([1.0] * 4, rel=1e-6)


def test_any_mask_of_numbers_is_a_padded_layout():
    new, old = torch.tensor([[-1.0, 5.0]]), torch.tensor([[-2.0, NAN]])
    for dtype in (torch.bool, torch.int64, torch.float32):
        found = correct(new, old, Correction.tis(8.0), layout=torch.tensor([[1, 0]]).to(dtype))
        assert found.weights.tolist() == [[pytest.approx(math.e), 0.0]]


def test_ages_are_whole_numbers_of_any_dtype():
    new, old = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0])
    for dtype in (torch.uint8, torch.int16, torch.float32):
        facts = TokenFacts(ages=torch.tensor([0, 1]).to(dtype))
        assert measure(new, old, facts=facts).to_metrics()["mismatch/by_age/1/k1"] == -1.0


def test_weights_are_float32_constants_of_the_inputs_shape():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        new = torch.full((2, 3), -1.0, dtype=dtype)
        found = correct(new, new, Correction.mis(level="sequence"))
        assert found.weights.shape == found.keep.shape == (2, 3)
        assert found.weights.dtype == torch.float32 and found.keep.dtype == torch.bool
        assert not found.weights.requires_grad


def test_the_inputs_are_left_as_they_were():
    new, old = torch.tensor([-1.0, NAN, -3.0]), torch.tensor([-1.0, -1.0, -9.0])
    before = new.clone(), old.clone()
    correct(new, old, Correction.mis(level="sequence"))
    assert torch.equal(new.nan_to_num(7), before[0].nan_to_num(7)) and torch.equal(old, before[1])


# -- what is refused ------------------------------------------------------------------------------


def test_shapes_that_differ_are_refused_with_both():
    with pytest.raises(AlignmentError, match=r"\[3\].*rollout_logprobs \[2\]"):
        correct(torch.zeros(3), torch.zeros(2), Correction.tis())
    mask = torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(AlignmentError, match=r"\[2, 4\].*\[2, 3\]"):
        correct(torch.zeros(2, 3), torch.zeros(2, 3), Correction.tis(), layout=mask)


@pytest.mark.parametrize("value", [0.5, 1e30, 2e-6])
@pytest.mark.parametrize("name", ["logprobs", "rollout_logprobs"])
def test_log_probs_above_zero_are_refused_with_value_row_and_token(name, value):
    given = {"logprobs": torch.full((7,), -1.0), "rollout_logprobs": torch.full((7,), -1.0)}
    given[name][5] = value
    with pytest.raises(
        AlignmentError, match=rf"^{name} at row 2, token 1 is {re.escape(f'{value:g}')}"
    ):
        correct(*given.values(), Correction.tis(), layout=Layout.packed([4, 0, 3]))
    mask = torch.arange(7) != 5
    correct(*given.values(), Correction.tis(), layout=Layout.packed([4, 0, 3], mask))


def test_what_rounding_leaves_above_zero_is_a_log_prob():
    assert correct(torch.tensor([5e-7]), torch.tensor([0.0]), Correction.tis()).keep.all()


def test_log_probs_that_carry_gradient_are_refused_with_what_to_do():
    live = torch.tensor([-1.0], requires_grad=True)
    constant = torch.tensor([-1.0])
    with pytest.raises(AlignmentError, match=r"^logprobs.*\.detach\(\)"):
        correct(live, constant, Correction.tis())
    with pytest.raises(AlignmentError, match=r"^rollout_logprobs"):
        correct(constant, live, Correction.mis())


def test_rules_that_read_advantages_name_them_where_none_are_given():
    correction = Correction(anchor="recomputed", reject=(Rule.opsm(),))
    with pytest.raises(AlignmentError, match=r"\['opsm'\]"):
        correct(torch.zeros(1), torch.zeros(1), correction)


def test_the_largest_weight_of_a_sequence_is_told_though_all_are_rejected():
    correction = Correction(anchor="recomputed", level="sequence", bound="mask", limits=(0.9, 1.1))
    found = correct(torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -3.0]), correction)
    assert not found.keep.any()
    metrics = found.to_metrics()
    assert metrics["correction/sequence_log_ratio_max"] == 3.0
    assert "correction/sequence_weight_mean" not in metrics


@pytest.mark.parametrize(
    ("level", "aggregation", "low", "high"),
    [
        ("token", "token", 0.5, 2.0),
        ("sequence", "sum", 0.5, 2.0),
        ("geometric", "mean", 0.999, 1.001),
    ],
)
def test_the_rejection_of_mis_follows_its_level(level, aggregation, low, high):
    by_name = quickstart_with("correction=mis", f"correction.level={level}").correction
    assert by_name == Correction.mis(level=level)
    rule = by_name.rules[0]
    assert (rule.aggregation, rule.low, rule.high) == (aggregation, low, high)
    assert Correction.mis(0.9, 1.1, level=level).rules[0].low == 0.9


def test_vetoes_have_names_on_the_command_line():
    rules = 'correction.reject=["veto_ratio", {"stat": "ratio", "aggregation": "level"}]'
    words = ["correction=tis", "correction.level=geometric", rules]
    veto, ratio = quickstart_with(*words).correction.rules
    assert veto == Rule.veto_ratio()
    assert (ratio.low, ratio.high) == (0.999, 1.001)
