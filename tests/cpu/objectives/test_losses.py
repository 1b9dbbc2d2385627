"""Losses on tokens: values, gradients against finite differences, what they report."""

import math

import pytest
import torch

from lockstep.config import from_dict, to_dict
from lockstep.errors import AlignmentError, ConfigError
from lockstep.objectives import losses
from lockstep.objectives.config import (
    ImportanceSampling,
    ObjectiveConfig,
    PPOClip,
    Reinforce,
)
from lockstep.objectives.losses import TokenBatch, make_loss


def case(count=40, seed=0):
    """Log-probs, old ones and advantages in float64, away from the corners of the clip."""
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(count, generator=g, dtype=torch.float64)
    step = torch.linspace(-0.6, 0.6, count, dtype=torch.float64)
    advantages = torch.randn(count, generator=g, dtype=torch.float64)
    return old + step, old, advantages


LOSSES = {
    "ppo_clip": lambda lp, old, a: losses.ppo_clip(lp, old, a, clip=(0.2, 0.3)),
    "reinforce": lambda lp, old, a: losses.reinforce(lp, a),
    "cross_entropy": lambda lp, old, a: losses.cross_entropy(lp),
    "weighted_cross_entropy": lambda lp, old, a: losses.cross_entropy(lp, a.abs()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_finite_differences_in_float64(name):
    logprobs, old, advantages = case()
    leaf = logprobs.clone().requires_grad_()
    LOSSES[name](leaf, old, advantages).loss.sum().backward()
    eps = 1e-6

    def at(shift):
        return LOSSES[name](logprobs + shift, old, advantages).loss

    numeric = (at(eps) - at(-eps)) / (2 * eps)  # tokens do not mix: one difference gives them all
    torch.testing.assert_close(leaf.grad, numeric, rtol=1e-7, atol=1e-8)


def test_importance_sampling_has_the_gradient_of_the_weighted_log_prob():
    logprobs, old, advantages = case()
    leaf = logprobs.clone().requires_grad_()
    out = losses.importance_sampling(leaf, old, advantages, max_ratio=1.3)
    out.loss.sum().backward()
    weight = (logprobs - old).exp().clamp(max=1.3)
    torch.testing.assert_close(leaf.grad, -weight * advantages)
    assert out.mean["clip_fraction"].tolist() == (weight == 1.3).tolist()
    # uncut, it is the gradient of ratio * advantage
    leaf.grad = None
    losses.importance_sampling(leaf, old, advantages, max_ratio=1e9).loss.sum().backward()
    other = logprobs.clone().requires_grad_()
    (-(other - old).exp() * advantages).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


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


def test_equal_policies_give_the_policy_gradient():
    logprobs, _, advantages = case()
    gradients = []
    for loss in (
        lambda lp: losses.ppo_clip(lp, logprobs, advantages),
        lambda lp: losses.reinforce(lp, advantages),
        lambda lp: losses.importance_sampling(lp, logprobs, advantages, max_ratio=2.0),
    ):
        leaf = logprobs.clone().requires_grad_()
        loss(leaf).loss.sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[1], gradients[2])


def test_a_ratio_beyond_all_bounds_stays_finite_and_is_reported():
    logprobs = torch.tensor([0.0], requires_grad=True)
    out = losses.ppo_clip(logprobs, torch.tensor([-500.0]), torch.tensor([-1.0]))
    out.loss.sum().backward()
    assert torch.isfinite(out.loss).all() and torch.isfinite(logprobs.grad).all()
    assert out.maximum["log_ratio_abs_max"].item() == 500.0


def test_constants_carry_no_gradient():
    logprobs, old, advantages = (x.requires_grad_() for x in case())
    losses.ppo_clip(logprobs, old, advantages).loss.sum().backward()
    assert old.grad is None and advantages.grad is None


@pytest.mark.parametrize("objective", [PPOClip(), Reinforce(), ImportanceSampling()])
def test_a_config_makes_its_loss(objective):
    logprobs, old, advantages = case()
    tokens = TokenBatch(
        logprobs=logprobs, entropy=torch.zeros_like(logprobs),
        columns={"old_logprobs": old, "advantages": advantages},
        row=torch.zeros(len(old), dtype=torch.int64), num_rows=1,
    )  # fmt: skip
    assert make_loss(objective)(tokens).loss.shape == logprobs.shape


def test_a_loss_of_ones_own_joins_by_its_config():
    class Mine(ObjectiveConfig):
        pass

    with pytest.raises(ConfigError, match="no loss for a Mine"):
        make_loss(Mine())
    make_loss.register(Mine, lambda config: losses.supervised_loss)
    assert make_loss(Mine()) is losses.supervised_loss


@pytest.mark.parametrize("name", ["old_logprobs", "advantages"])
def test_lengths_that_differ_are_refused(name):
    good = {"old_logprobs": torch.zeros(3), "advantages": torch.zeros(3)}
    with pytest.raises(AlignmentError, match=rf"\[3\] and {name} \[2\]"):
        losses.ppo_clip(torch.zeros(3), **{**good, name: torch.zeros(2)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPOClip(clip=(0.0, 0.2)), "objective.clip=0.0,0.2"),
        (lambda: PPOClip(clip=(1.2, 0.2)), "objective.clip=1.2,0.2"),
        (lambda: ImportanceSampling(max_ratio=0.5), "objective.max_ratio=0.5 must be at least 1"),
        (lambda: Reinforce(aggregate="fixed_length"), "fixed_length=0"),
        (lambda: Reinforce(fixed_length=9), "aggregate=token_mean with fixed_length=9"),
    ],
)
def test_settings_that_contradict_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_configs_go_through_json():
    config = PPOClip(clip=(0.2, 0.28), aggregate="fixed_length", fixed_length=64)
    assert from_dict(PPOClip, to_dict(config)) == config
