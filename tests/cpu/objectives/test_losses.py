"""Losses on tokens: values by hand, gradients against finite differences, what they report."""

import math

import pytest
import torch
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import from_dict, to_dict
from lockstep.correction.layout import Layout
from lockstep.errors import AlignmentError, ConfigError
from lockstep.objectives import losses
from lockstep.objectives.aggregation import aggregate
from lockstep.objectives.config import CISPO, DPPO, GSPO, ObjectiveConfig, PPOClip, Reinforce
from lockstep.objectives.losses import TokenBatch, TokenLoss, make_loss, make_policy_loss

EXAMPLES = settings(max_examples=1000 if PROOF else 25, deadline=None)

# A central difference of step h is wrong by h^2 / 6 of the third derivative and by 2^-53 / h of the
# value: below 1e-12 and 2e-10 for values and derivatives of up to some ten, with h = 1e-6.
STEP, TOLERANCE = 1e-6, 2e-9


def case(count=40, seed=0):
    """Log-probs, old ones and advantages in float64, away from the corners of any clip."""
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(count, generator=g, dtype=torch.float64) - 0.7
    step = torch.linspace(-0.6, 0.6, count, dtype=torch.float64)
    advantages = torch.randn(count, generator=g, dtype=torch.float64)
    return old + step[torch.randperm(count, generator=g)], old, advantages


def weight_of_cispo(logprobs, old):
    return (logprobs - old).exp().clamp(0.7, 1.3)


def weight_of_dppo(logprobs, old, advantages):
    p, q = logprobs.exp(), old.exp()
    is_outside = ((advantages > 0) & (p - q > 0.1)) | ((advantages < 0) & (q - p > 0.05))
    return torch.where(is_outside, 0.0, (p / q).clamp(max=1.5))


# name -> (the loss, what it is a gradient of: weights that are constants are given the log-probs
# `at`, where the gradient is taken)
LOSSES = {
    "ppo_clip": (
        lambda lp, old, a: losses.ppo_clip(lp, old, a, clip=(0.2, 0.3)),
        lambda lp, at, old, a: (
            -torch.minimum((lp - old).exp() * a, (lp - old).exp().clamp(0.8, 1.3) * a)
        ),
    ),
    "dual_clip": (
        lambda lp, old, a: losses.ppo_clip(lp, old, a, clip=(0.2, 0.3), dual_clip=1.5),
        lambda lp, at, old, a: (
            -torch.where(
                a > 0,
                torch.minimum((lp - old).exp(), torch.tensor(1.3)) * a,
                (lp - old).exp().clamp(0.8, 1.5) * a,
            )
        ),
    ),
    "cispo": (
        lambda lp, old, a: losses.cispo(lp, old, a, clip=(0.3, 0.3)),
        lambda lp, at, old, a: -weight_of_cispo(at, old) * a * lp,
    ),
    "dppo": (
        lambda lp, old, a: losses.dppo(lp, old, a, max_divergence=(0.05, 0.1), max_ratio=1.5),
        lambda lp, at, old, a: -weight_of_dppo(at, old, a) * a * lp,
    ),
    "reinforce": (lambda lp, old, a: losses.reinforce(lp, a), lambda lp, at, old, a: -a * lp),
    "cross_entropy": (lambda lp, old, a: losses.cross_entropy(lp), lambda lp, at, old, a: -lp),
    "weighted_cross_entropy": (
        lambda lp, old, a: losses.cross_entropy(lp, a.abs()),
        lambda lp, at, old, a: -a.abs() * lp,
    ),
}

MASKED = {
    "ppo_clip": lambda lp, old, a, mask: losses.ppo_clip(lp, old, a, dual_clip=3.0, mask=mask),
    "cispo": lambda lp, old, a, mask: losses.cispo(lp, old, a, mask=mask),
    "dppo_tv": lambda lp, old, a, mask: losses.dppo(lp, old, a, mask=mask),
    "dppo_kl": lambda lp, old, a, mask: losses.dppo(lp, old, a, divergence="kl", mask=mask),
    "reinforce": lambda lp, old, a, mask: losses.reinforce(lp, a, mask=mask),
    "cross_entropy": lambda lp, old, a, mask: losses.cross_entropy(lp, a, mask=mask),
    "gspo": lambda lp, old, a, mask: losses.gspo(
        lp, old, a, Layout.padded(mask), clip=(0.1, 0.1)
    ),
}  # fmt: skip


def tokens_of(logprobs, old, advantages, lengths, **columns):
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return TokenBatch(
        logprobs=logprobs, entropy=0.1 * logprobs.square(),
        columns={"old_logprobs": old, "advantages": advantages, **columns},
        row=row, num_rows=len(lengths),
    )  # fmt: skip


# -- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_finite_differences_in_float64(name):
    loss, surrogate = LOSSES[name]
    logprobs, old, advantages = case()
    leaf = logprobs.clone().requires_grad_()
    out = loss(leaf, old, advantages)
    out.loss.sum().backward()
    torch.testing.assert_close(out.loss, surrogate(logprobs, logprobs, old, advantages))

    def at(shift):
        return surrogate(logprobs + shift, logprobs, old, advantages)

    numeric = (at(STEP) - at(-STEP)) / (2 * STEP)  # tokens do not mix: one difference gives all
    torch.testing.assert_close(leaf.grad, numeric, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("clip", "is_cut"), [((0.5, 0.5), False), ((0.1, 0.1), True)])
def test_the_gradient_of_gspo_is_that_of_the_rows_own_ratio(clip, is_cut):
    """Of the sequence objective itself, with nothing held constant."""
    logprobs, old, _ = case(12, seed=5)  # the rows' ratios are 0.88, 0.95 and 1.18
    lengths = [3, 5, 4]
    row = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    of_row = torch.tensor([1.5, -0.5, 0.25], dtype=torch.float64)

    def objective(lp):
        total = 0.0
        for r, a in enumerate(of_row):
            s = (lp - old)[row == r].mean().exp()
            total = total - torch.minimum(s * a, s.clamp(1 - clip[0], 1 + clip[1]) * a) / 3
        return total

    leaf = logprobs.clone().requires_grad_()
    layout = Layout.packed(lengths)
    out = losses.gspo(leaf, old, of_row[row], layout, clip=clip)
    value = aggregate(out.loss, layout, how="sequence_mean")
    value.backward()
    assert value.item() == pytest.approx(objective(logprobs).item(), rel=1e-6)  # float32 weights
    numeric = torch.stack(
        [
            (objective(logprobs + e) - objective(logprobs - e)) / (2 * STEP)
            for e in STEP * torch.eye(12, dtype=torch.float64)
        ]
    )
    torch.testing.assert_close(leaf.grad, numeric, rtol=1e-6, atol=TOLERANCE)
    assert (leaf.grad == 0).tolist() == [False] * 8 + [is_cut] * 4


def test_unbounded_cispo_and_dppo_have_the_gradient_of_ratio_times_advantage():
    logprobs, old, advantages = case()
    expected = -(logprobs - old).exp() * advantages
    for loss in (
        lambda lp: losses.cispo(lp, old, advantages, clip=(1.0, 1e9)),
        lambda lp: losses.dppo(lp, old, advantages, max_divergence=(1.0, 1.0), max_ratio=1e9),
    ):
        leaf = logprobs.clone().requires_grad_()
        loss(leaf).loss.sum().backward()
        torch.testing.assert_close(leaf.grad, expected)


def test_equal_policies_give_the_policy_gradient_whatever_the_loss():
    logprobs, _, advantages = case()
    leaf = logprobs.clone().requires_grad_()
    losses.reinforce(leaf, advantages).loss.sum().backward()
    for loss in (
        lambda lp: losses.ppo_clip(lp, logprobs, advantages, dual_clip=3.0),
        lambda lp: losses.gspo(lp, logprobs, advantages, Layout.packed([10, 30])),
        lambda lp: losses.cispo(lp, logprobs, advantages),
        lambda lp: losses.dppo(lp, logprobs, advantages),
        lambda lp: losses.dppo(lp, logprobs, advantages, divergence="kl"),
    ):
        other = logprobs.clone().requires_grad_()
        loss(other).loss.sum().backward()
        assert torch.equal(other.grad, leaf.grad)


def test_constants_carry_no_gradient():
    for loss in MASKED.values():
        logprobs, old, advantages = (x.reshape(4, 10).requires_grad_() for x in case())
        loss(logprobs, old, advantages, torch.ones(4, 10, dtype=torch.bool)).loss.sum().backward()
        assert old.grad is None and advantages.grad is None


# -- values by hand -------------------------------------------------------------------------------


def test_the_clip_cuts_off_only_what_would_go_further_away():
    logprobs = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.1], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    out = losses.ppo_clip(logprobs, torch.zeros(5), advantages, clip=(0.2, 0.28))
    out.loss.sum().backward()
    assert out.mean["clip_fraction"].tolist() == [True, False, False, True, False]
    assert (logprobs.grad == 0).tolist() == [True, False, False, True, False]
    assert out.loss[0].item() == pytest.approx(-1.28)
    assert out.loss[3].item() == pytest.approx(0.8)
    assert float(out.maximum["ratio_max"].max()) == pytest.approx(math.exp(0.5))
    assert "dual_clip_fraction" not in out.mean


def test_the_dual_clip_bounds_only_negative_advantages():
    logprobs = torch.tensor([2.0, 2.0, 1.0], requires_grad=True)
    advantages = torch.tensor([-2.0, 2.0, -2.0])
    out = losses.ppo_clip(logprobs, torch.zeros(3), advantages, dual_clip=3.0)
    out.loss.sum().backward()
    assert out.loss.tolist() == pytest.approx([6.0, -2.4, 2 * math.e])
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, 2 * math.e])
    assert out.mean["dual_clip_fraction"].tolist() == [True, False, False]
    assert out.mean["clip_fraction"].tolist() == [False, True, False]


def test_gspo_has_one_ratio_per_row():
    old = torch.zeros(5)
    logprobs = torch.tensor([0.1, 0.3, -0.4, 0.0, -0.2], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0])
    out = losses.gspo(logprobs, old, advantages, Layout.packed([2, 3]), clip=(0.1, 0.1))
    out.loss.sum().backward()
    # means 0.2 and -0.2: e^0.2 = 1.22 is cut at 1.1 as A > 0; e^-0.2 = 0.82 still pushes up
    assert out.loss.tolist() == pytest.approx([-1.1, -1.1, *[-2 * math.exp(-0.2)] * 3])
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, *[-2 * math.exp(-0.2)] * 3])
    assert out.mean["clip_fraction"].tolist() == [True, True, False, False, False]
    assert out.mean["ratio_mean"].tolist() == pytest.approx(
        [*[math.exp(0.2)] * 2, *[math.exp(-0.2)] * 3]
    )


def test_cispo_bounds_the_weight_and_keeps_the_gradient():
    logprobs = torch.tensor([1.0, -1.0, 0.1], requires_grad=True)
    out = losses.cispo(logprobs, torch.zeros(3), torch.tensor([1.0, 2.0, -1.0]), clip=(0.4, 0.5))
    out.loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.5, -1.2, math.exp(0.1)])
    assert out.loss.tolist() == pytest.approx([-1.5, 1.2, 0.1 * math.exp(0.1)])
    assert out.mean["clip_fraction"].tolist() == [True, True, False]


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_stops_only_what_has_gone_too_far_and_goes_on(divergence):
    old = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.001]).log()
    prob = torch.tensor([0.8, 0.8, 0.2, 0.2, 0.02])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    logprobs = prob.log().requires_grad_()
    bound = 0.25 if divergence == "tv" else 0.1  # KL(0.5 || 0.8) = 0.5 log(0.25 / 0.16) = 0.22
    out = losses.dppo(
        logprobs, old, advantages, divergence=divergence, max_divergence=(bound, bound),
        max_ratio=10.0,
    )  # fmt: skip
    out.loss.sum().backward()
    # the last went from 1/1000 to 2/100: a ratio of 20 that PPO would stop, and no distance at all
    assert out.mean["clip_fraction"].tolist() == [True, False, False, True, False]
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1.6, -0.4, 0.0, -10.0])
    assert out.mean["truncated_fraction"].tolist() == [False, False, False, False, True]


def test_the_two_bounds_of_dppo_are_for_tokens_that_fell_and_tokens_that_rose():
    old, logprobs = torch.full((3,), 0.5).log(), torch.tensor([0.7, 0.3, 0.1]).log()
    for bounds, is_stopped in (((0.3, 0.1), [True, False]), ((0.1, 0.3), [False, True])):
        out = losses.dppo(logprobs, old, torch.tensor([1.0, -1.0, 0.0]), max_divergence=bounds)
        assert out.mean["clip_fraction"].tolist() == [*is_stopped, False]


def test_the_binary_divergences_are_those_of_a_two_way_choice():
    p, q = torch.tensor([[0.3, 0.9], [0.6, 0.9]], dtype=torch.float64)
    tv = losses.binary_divergence(p.log(), q.log(), "tv")
    assert tv.tolist() == pytest.approx([0.3, 0.0], abs=1e-15)
    kl = losses.binary_divergence(p.log(), q.log(), "kl")
    expected = 0.6 * math.log(2) + 0.4 * math.log(0.4 / 0.7)
    assert kl.tolist() == pytest.approx([expected, 0.0], abs=1e-15)
    half = losses.binary_divergence(p.log().bfloat16(), q.log().bfloat16(), "kl")
    assert half.dtype == torch.float32 and half.tolist() == pytest.approx([expected, 0.0], rel=0.03)


def test_a_kind_that_is_none_is_refused_and_one_clip_is_for_both_sides():
    p = torch.tensor([-0.5])
    with pytest.raises(ConfigError, match="estimator='k1' must be one of k2, k3, unbiased"):
        losses.reference_kl(p, p, estimator="k1")
    for clip in (-0.2, math.nan, (0.2, -1)):
        with pytest.raises(ConfigError, match="clip="):
            losses.ppo_clip(p, p, p, clip=clip)
    with pytest.raises(ConfigError, match="divergence='js' must be one of tv, kl"):
        losses.dppo(p, p, p, divergence="js")
    given = torch.tensor([0.5, -0.5]), torch.zeros(2), torch.tensor([1.0, -1.0])
    one, two = (losses.ppo_clip(*given, clip=clip) for clip in (0.2, (0.2, 0.2)))
    assert torch.equal(one.loss, two.loss)


def test_tokens_that_are_all_but_certain_are_near_each_other():
    """A float32 log-prob of 0 is a probability within 6e-8 of 1, and not certainty."""
    logprobs = torch.tensor([0.0, -1e-6, 0.0])
    old = torch.tensor([-1e-6, 0.0, 0.0])
    kl = losses.binary_divergence(logprobs, old, "kl")
    assert torch.isfinite(kl).all() and float(kl.max()) < 1e-5 and float(kl.min()) >= 0
    # and a sure token that became a coin is far
    far = losses.binary_divergence(torch.tensor([0.5]).log(), torch.tensor([0.0]), "kl")
    assert float(far) == pytest.approx(math.log(2), rel=1e-5)


def test_a_ratio_beyond_all_bounds_stays_finite_and_is_reported():
    for loss in MASKED.values():
        logprobs = torch.tensor([[0.0, 0.0]], requires_grad=True)
        old = torch.tensor([[-500.0, -600.0]])
        out = loss(logprobs, old, torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2).bool())
        out.loss.sum().backward()
        assert torch.isfinite(out.loss).all() and torch.isfinite(logprobs.grad).all()
        if out.maximum:
            assert out.maximum["log_ratio_abs_max"].tolist() == [[500.0, 600.0]]


# -- what is not counted --------------------------------------------------------------------------


def rows_of(seed, lengths, width):
    """[B, T] log-probs, old ones, advantages and mask, float32; the mask has holes."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    mask &= torch.rand(mask.shape, generator=g) < 0.8
    old = -3 * torch.rand(mask.shape, generator=g)
    logprobs = old + 0.5 * torch.randn(mask.shape, generator=g)
    return logprobs, old, torch.randn(mask.shape, generator=g), mask


rows = st.tuples(
    st.integers(0, 10_000), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.just(6)
)


@pytest.mark.parametrize("name", MASKED)
@EXAMPLES
@given(rows, st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0]))
def test_what_stands_outside_the_mask_reaches_nothing(name, rows, filler):
    logprobs, old, advantages, mask = rows_of(*rows)

    def found(fill):
        given = [torch.where(mask, x, fill) for x in (logprobs, old, advantages)]
        leaf = given[0].requires_grad_()
        out = MASKED[name](leaf, *given[1:], mask)
        out.loss.sum().backward()
        return [out.loss, leaf.grad, *out.mean.values(), *out.maximum.values()]

    for filled, plain in zip(found(filler), found(-1.0), strict=True):
        assert torch.equal(filled, plain)
        assert not filled[~mask].any()


@pytest.mark.parametrize("name", MASKED)
@EXAMPLES
@given(rows, st.randoms(use_true_random=False))
def test_padded_packed_and_permuted_rows_give_the_same(name, rows, random):
    logprobs, old, advantages, mask = rows_of(*rows)

    def found(loss, *given):
        leaf = given[0].clone().requires_grad_()
        out = loss(leaf, *given[1:])
        out.loss.sum().backward()
        return [out.loss, leaf.grad, *out.mean.values(), *out.maximum.values()]

    padded = found(lambda *x: MASKED[name](*x, mask), logprobs, old, advantages)
    order = list(range(len(mask)))
    random.shuffle(order)
    moved = [x[order] for x in (logprobs, old, advantages)]
    permuted = found(lambda *x: MASKED[name](*x, mask[order]), *moved)
    lengths = mask.sum(1).tolist()

    def on_packed(lp, old, a):
        if name == "gspo":
            return losses.gspo(lp, old, a, Layout.packed(lengths), clip=(0.1, 0.1))
        return MASKED[name](lp, old, a, torch.ones_like(lp, dtype=torch.bool))

    packed = found(on_packed, logprobs[mask], old[mask], advantages[mask])
    for whole, other, flat in zip(padded, permuted, packed, strict=True):
        assert torch.equal(whole[order], other)
        assert torch.equal(whole[mask].float(), flat.float())


def test_half_precision_is_widened_before_anything_is_subtracted():
    logprobs, old, advantages = (x.bfloat16() for x in case())
    for loss, _ in LOSSES.values():
        leaf = logprobs.clone().requires_grad_()
        out = loss(leaf, old, advantages)
        exact = loss(logprobs.float(), old.float(), advantages.float())
        assert out.loss.dtype == torch.float32 and torch.equal(out.loss, exact.loss)
        out.loss.sum().backward()
        assert leaf.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["old_logprobs", "advantages", "mask"])
def test_lengths_that_differ_are_refused(name):
    good = {"old_logprobs": torch.zeros(3), "advantages": torch.zeros(3)}
    for loss in (losses.ppo_clip, losses.cispo, losses.dppo):
        with pytest.raises(AlignmentError, match=rf"\[3\] and {name} \[2\]"):
            loss(torch.zeros(3), **{**good, name: torch.zeros(2)})
    with pytest.raises(AlignmentError, match=r"\[2\].*\[3\]"):
        losses.gspo(torch.zeros(3), **good, layout=Layout.packed([2]))


# -- settings -------------------------------------------------------------------------------------

OBJECTIVES = [
    PPOClip(), PPOClip(dual_clip=3.0), GSPO(), CISPO(), DPPO(), DPPO(divergence="kl"), Reinforce(),
]  # fmt: skip


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_config_makes_its_loss(objective):
    logprobs, old, advantages = case()
    tokens = tokens_of(logprobs, old, advantages, [10, 30])
    expected = {
        PPOClip: lambda c: losses.ppo_clip(
            logprobs, old, advantages, clip=(0.2, 0.2), dual_clip=c.dual_clip
        ),
        GSPO: lambda c: losses.gspo(logprobs, old, advantages, Layout.packed([10, 30])),
        CISPO: lambda c: losses.cispo(logprobs, old, advantages),
        DPPO: lambda c: losses.dppo(
            logprobs, old, advantages, divergence=c.divergence,
            max_divergence={"tv": (0.2, 0.2), "kl": (0.05, 0.05)}[c.divergence],
        ),
        Reinforce: lambda c: losses.reinforce(logprobs, advantages),
    }  # fmt: skip
    out, direct = make_loss(objective)(tokens), expected[type(objective)](objective)
    assert torch.equal(out.loss, direct.loss) and out.regularizer is None
    assert set(out.mean) == set(direct.mean) and set(out.maximum) == set(direct.maximum)
    assert objective.has_ratio == (not isinstance(objective, Reinforce))
    assert objective.reads_old_logprobs == objective.has_ratio


def test_regularizers_come_apart_from_the_policy_loss_but_for_a_kl_with_a_ratio_to_weigh():
    logprobs, old, advantages = case()
    reference = old - 0.3
    tokens = tokens_of(logprobs, old, advantages, [10, 30], reference_logprobs=reference)
    ratio, d = (logprobs - old).exp(), reference - logprobs
    k3 = torch.expm1(d) - d
    estimates = {"unbiased": ratio * k3, "k3": k3, "k2": d.square() / 2}
    for estimator, kl in estimates.items():
        objective = Reinforce(entropy_coef=0.5, kl_coef=0.25, kl_estimator=estimator)
        assert objective.reads_reference_logprobs
        assert objective.reads_old_logprobs == (estimator == "unbiased")
        out = make_loss(objective)(tokens)
        weighed, apart = (0.25 * kl, 0.0) if estimator == "unbiased" else (0.0, 0.25 * kl)
        policy = losses.reinforce(logprobs, advantages).loss
        torch.testing.assert_close(out.loss, policy + weighed)
        torch.testing.assert_close(out.regularizer, apart - 0.5 * tokens.entropy)
        torch.testing.assert_close(out.mean["reference_kl"], kl)
    alone = make_loss(PPOClip(entropy_coef=0.5))(tokens)
    assert torch.equal(alone.regularizer, -0.5 * tokens.entropy)
    assert "reference_kl" not in alone.mean


def test_a_reference_that_is_not_there_is_named():
    tokens = tokens_of(*case(4), [4])
    with pytest.raises(AlignmentError, match="'reference_logprobs'"):
        make_loss(PPOClip(kl_coef=0.1))(tokens)


def test_a_loss_of_ones_own_joins_by_its_config_and_keeps_its_own_regularizer():
    class Mine(ObjectiveConfig):
        pass

    with pytest.raises(ConfigError, match="no loss for a Mine"):
        make_loss(Mine())

    def mine(tokens):
        return TokenLoss(-tokens.logprobs, regularizer=tokens.logprobs.square())

    make_policy_loss.register(Mine, lambda config: mine)
    assert make_loss(Mine()) is mine
    tokens = tokens_of(*case(4), [4])
    out = make_loss(Mine(entropy_coef=1.0))(tokens)
    torch.testing.assert_close(out.regularizer, tokens.logprobs.square() - tokens.entropy)


@pytest.mark.parametrize(
    "config",
    [
        PPOClip(clip=(0.2, 0.28), dual_clip=3.0, aggregate=64),
        DPPO(divergence="kl", max_divergence=(0.05, 0.1)),
        GSPO(kl_coef=0.01, kl_estimator="k2"),
    ],
)
def test_configs_go_through_json(config):
    assert from_dict(type(config), to_dict(config)) == config
