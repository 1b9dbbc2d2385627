"""Losses, aggregations and advantages against verl's, value and gradient; and where it is wrong.

Equal to 1e-6 of the largest value: both compute in float32, some ten operations of 6e-8 each.
"""

import numpy as np
import pytest
import torch
from verl_modules import load_verl

from lockstep.correction.kl import k2, k3
from lockstep.correction.layout import Layout
from lockstep.objectives import losses
from lockstep.objectives.advantages import leaf_advantages
from lockstep.objectives.aggregation import aggregate
from lockstep.objectives.config import GRPO, RLOO, ReinforcePlusPlus
from lockstep.objectives.losses import reference_kl
from lockstep.objectives.token_advantages import gae, whiten

TOLERANCE = 1e-6
AGGREGATES = {
    "token-mean": {"how": "token_mean"},
    "seq-mean-token-mean": {"how": "sequence_mean"},
    "seq-mean-token-sum-norm": {"how": 24},
}


@pytest.fixture(scope="module")
def verl():
    return load_verl()


def batch(seed=0, spread=0.4):
    """Rows of 24 tokens at most with holes, as after tool calls; one row has nothing to train."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([24, 20, 7, 1, 0, 13, 24, 2])
    mask = torch.arange(24) < lengths[:, None]
    mask &= (torch.arange(24) % 9 < 6) | (torch.arange(24) == 0)
    old = -4 * torch.rand(8, 24, generator=g) - 0.01
    logprobs = (old + spread * torch.randn(8, 24, generator=g)).clamp(max=-1e-3)
    advantages = torch.randn(8, 1, generator=g).expand(8, 24).contiguous()
    return logprobs, old, advantages, mask


def assert_close(ours, theirs):
    scale = max(float(theirs.detach().abs().max()), 1e-3)
    assert float((ours - theirs).detach().abs().max()) <= TOLERANCE * scale


OURS = {
    "vanilla": lambda lp, old, a, layout: losses.ppo_clip(
        lp, old, a, clip=(0.2, 0.28), dual_clip=3.0, mask=layout.mask
    ),
    "dppo_tv": lambda lp, old, a, layout: losses.dppo(
        lp, old, a, max_divergence=(0.2, 0.28), max_ratio=3.0, mask=layout.mask
    ),
    "dppo_kl": lambda lp, old, a, layout: losses.dppo(
        lp, old, a, divergence="kl", max_divergence=(0.2, 0.28), max_ratio=3.0, mask=layout.mask
    ),
    "gspo": lambda lp, old, a, layout: losses.gspo(lp, old, a, layout, clip=(0.2, 0.28)),
    "cispo": lambda lp, old, a, layout: losses.cispo(
        lp, old, a, clip=(0.2, 0.28), mask=layout.mask
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", AGGREGATES)
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("spread", [0.05, 0.4, 1.5])
def test_loss_gradient_and_clip_fractions_equal_verls(verl, name, mode, spread):
    logprobs, old, advantages, mask = batch(spread=spread)
    layout = Layout.padded(mask)
    ours, theirs = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    out = OURS[name](ours, old, advantages, layout)
    value = aggregate(out.loss, layout, **AGGREGATES[mode])
    value.backward()
    config = verl.ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.28)
    expected, metrics = verl.core_algos.get_policy_loss_fn(name)(
        old, theirs, advantages, mask.float(), mode, config
    )
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=TOLERANCE, abs=TOLERANCE)
    assert_close(ours.grad, theirs.grad)

    def share(x):
        return float(x.float().sum() / mask.sum())

    assert share(out.mean["clip_fraction"]) == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6)
    lower = {"vanilla": "dual_clip_fraction", "dppo_tv": "truncated_fraction",
             "dppo_kl": "truncated_fraction"}.get(name)  # fmt: skip
    if lower:
        assert share(out.mean[lower]) == pytest.approx(metrics["actor/pg_clipfrac_lower"], abs=1e-6)


@pytest.mark.parametrize("mode", AGGREGATES)
def test_aggregations_equal_verls(verl, mode):
    loss, _, _, mask = batch()
    ours = aggregate(loss, Layout.padded(mask), **AGGREGATES[mode])
    theirs = verl.core_algos.agg_loss(loss, mask.float(), mode)
    assert ours.item() == pytest.approx(theirs.item(), rel=TOLERANCE)


def test_reinforce_and_its_importance_weights_equal_verls(verl):
    logprobs, old, advantages, mask = batch()
    weights = (logprobs - old).exp().clamp(max=2.0)
    ours = losses.reinforce(logprobs, advantages, mask=mask)
    expected, _ = verl.core_algos.compute_policy_loss_reinforce(
        old, logprobs, advantages, mask.float(), "token-mean", verl.ActorConfig(), weights
    )
    value = aggregate(ours.loss * weights, Layout.padded(mask))
    assert value.item() == pytest.approx(expected.item(), rel=TOLERANCE)


def outcome(seed=0):
    """One reward per row, at its last token, and the rows' groups; every row has some token."""
    rng = np.random.default_rng(seed)
    lengths, groups = np.array([5, 1, 7, 3, 8, 2, 6, 4]), np.repeat([0, 1], 4)
    rewards = rng.normal(size=8)
    mask = torch.from_numpy(np.arange(8) < lengths[:, None]).float()
    token_rewards = torch.zeros(8, 8)
    token_rewards[np.arange(8), lengths - 1] = torch.from_numpy(rewards).float()
    return rewards, groups, token_rewards, mask


@pytest.mark.parametrize(
    ("name", "config", "options"),
    [
        ("grpo", GRPO(), {}),
        ("grpo_vectorized", GRPO(), {}),
        ("grpo", GRPO(normalize_std=False), {"norm_adv_by_std_in_grpo": False}),
        ("rloo", RLOO(), {}),
    ],
)
def test_advantages_of_groups_equal_verls(verl, name, config, options):
    rewards, groups, token_rewards, mask = outcome()
    theirs, _ = verl.core_algos.get_adv_estimator_fn(name)(token_rewards, mask, groups, **options)
    ours = leaf_advantages(config, rewards, trajectories=np.arange(8), groups=groups)
    assert_close(torch.from_numpy(ours)[:, None] * mask, theirs)


@pytest.mark.parametrize("baseline", ["batch", "group"])
def test_reinforce_plus_plus_equals_verls_where_every_row_has_one_token(verl, baseline):
    """Then verl's statistics over tokens are over trajectories; 1e-5: it adds 1e-8 to the variance
    where we add 1e-6 to the deviation."""
    rewards, groups, _, _ = outcome()
    column, ones = torch.from_numpy(rewards).float()[:, None], torch.ones(8, 1)
    name = {"batch": "reinforce_plus_plus", "group": "reinforce_plus_plus_baseline"}[baseline]
    theirs, _ = verl.core_algos.get_adv_estimator_fn(name)(
        column, response_mask=ones, index=groups,
        config=verl.core_algos.AlgoConfig(gamma=1.0),
    )  # fmt: skip
    ours = leaf_advantages(
        ReinforcePlusPlus(baseline=baseline), rewards, trajectories=np.arange(8), groups=groups
    )
    assert float((torch.from_numpy(ours)[:, None] - theirs).abs().max()) < 1e-5


def test_whitened_tokens_equal_verls(verl):
    values, _, _, mask = batch()
    theirs = verl.torch_functional.masked_whiten(values, mask.float())
    assert_close(whiten(values, Layout.padded(mask)), theirs * mask)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_over_turns_equals_verls(verl, gamma, lam):
    rewards, values, _, mask = batch()
    layout = Layout.padded(mask)
    advantages, returns = gae(rewards, values, layout, gamma=gamma, lam=lam)
    theirs, their_returns = verl.core_algos.compute_gae_advantage_return(
        rewards, values, mask.float(), gamma, lam
    )
    assert_close(returns, their_returns * mask)
    assert_close(whiten(advantages, layout), theirs * mask)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_to_a_reference_equals_verls(verl, estimator):
    logprobs, reference, _, _ = batch()
    ours, theirs = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    value = reference_kl(ours, reference, estimator=estimator)
    expected = verl.core_algos.kl_penalty(theirs, reference, estimator)
    assert_close(value, expected)
    value.sum().backward()
    expected.sum().backward()
    assert_close(ours.grad, theirs.grad)


# -- where verl is wrong --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "cispo"])
def test_verl_lets_a_nan_at_padding_into_the_gradient(verl, name):
    """The mask comes after the product with the NaN: the value is kept clean, the gradient not."""
    logprobs, old, advantages, mask = batch()
    ours, theirs = (torch.where(mask, logprobs, torch.nan).requires_grad_() for _ in range(2))
    aggregate(OURS[name](ours, old, advantages, Layout.padded(mask)).loss,
              Layout.padded(mask)).backward()  # fmt: skip
    loss, _ = verl.core_algos.get_policy_loss_fn(name)(
        old, theirs, advantages, mask.float(), "token-mean", verl.ActorConfig()
    )
    loss.backward()
    assert torch.isfinite(ours.grad).all() and not ours.grad[~mask].any()
    assert torch.isnan(theirs.grad[~mask]).any()


@pytest.mark.parametrize(("name", "config"), [("grpo", GRPO()), ("rloo", RLOO())])
def test_verl_gives_a_row_without_peers_its_reward_as_its_advantage(verl, name, config):
    rewards, groups = np.array([0.9]), np.array([0])
    theirs, _ = verl.core_algos.get_adv_estimator_fn(name)(
        torch.tensor([[0.9]]), torch.ones(1, 1), groups
    )
    assert theirs.item() == pytest.approx(0.9, rel=1e-5)  # nothing was compared
    ours = leaf_advantages(config, rewards, trajectories=np.arange(1), groups=groups)
    assert ours.tolist() == [0.0]


def test_verl_makes_an_advantage_of_the_rounding_of_equal_rewards(verl):
    rewards, groups = np.full(8, 0.9), np.zeros(8, np.int64)
    theirs, _ = verl.core_algos.compute_grpo_outcome_advantage(
        torch.full((8, 1), 0.9), torch.ones(8, 1), groups
    )
    assert float(theirs.abs().max()) > 0.05  # 6e-8 divided by itself and 1e-6
    ours = leaf_advantages(GRPO(), rewards, trajectories=np.arange(8), groups=groups)
    assert ours.tolist() == [0.0] * 8


def test_verls_reinforce_plus_plus_weighs_a_row_by_its_length(verl):
    """Over trajectories its advantages have another mean than 0: one long row moves all."""
    token_rewards, mask = torch.zeros(4, 100), torch.zeros(4, 100)
    mask[:, 0], mask[0] = 1, 1
    token_rewards[0, 99] = 1.0
    theirs, _ = verl.core_algos.compute_reinforce_plus_plus_outcome_advantage(
        token_rewards, mask, verl.core_algos.AlgoConfig(gamma=1.0)
    )
    assert float(theirs[:, 0].mean()) < -1
    ours = leaf_advantages(
        ReinforcePlusPlus(), np.array([1.0, 0, 0, 0]),
        trajectories=np.arange(4), groups=np.zeros(4, np.int64),
    )  # fmt: skip
    assert abs(ours.mean()) < 1e-12


def test_verls_k3_is_negative_for_policies_that_are_near(verl):
    g = torch.Generator().manual_seed(0)
    reference = -4 * torch.rand(10_000, generator=g)
    logprobs = reference + 1e-4 * torch.randn(10_000, generator=g)
    theirs = verl.core_algos.kl_penalty(logprobs, reference, "k3")
    d = reference - logprobs
    exact = k3(d.double()).mean()
    assert (theirs < 0).any() and abs(float(theirs.mean() / exact) - 1) > 0.1
    ours = reference_kl(logprobs, reference, estimator="k3")
    assert (ours >= 0).all() and float(ours.mean()) == pytest.approx(float(exact), rel=1e-5)


def test_verls_k3_plus_is_not_the_unbiased_kl_off_policy(verl):
    """Its gradient is that of k2, right for tokens that the policy itself drew; here another did:
    every outcome is added up by the probability with which it was drawn."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=g, dtype=torch.float64)
    old = (logits + torch.randn(7, generator=g, dtype=torch.float64)).log_softmax(-1)
    reference = torch.randn(7, generator=g, dtype=torch.float64).log_softmax(-1)

    def gradient(estimate):
        leaf = logits.clone().requires_grad_()
        return torch.autograd.grad((old.exp() * estimate(leaf.log_softmax(-1))).sum(), leaf)[0]

    leaf = logits.clone().requires_grad_()
    policy = leaf.log_softmax(-1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), leaf)
    theirs = gradient(lambda lp: verl.core_algos.kl_penalty(lp, reference, "k3+"))
    ours = gradient(lambda lp: reference_kl(lp, reference, old_logprobs=old))
    torch.testing.assert_close(theirs, gradient(lambda lp: k2(reference - lp)))
    assert (theirs - exact).norm() > 0.1 * exact.norm()
    torch.testing.assert_close(ours, exact)
