"""The functions for verl's registries, beside verl's own (tests/parity/verl_modules.py)."""

import inspect
import sys

import numpy as np
import pytest
import torch
from verl_modules import DataProto, load_verl

from lockstep.integrations import verl


@pytest.fixture
def peer(monkeypatch):
    """verl, with its module of algorithms where `verl` looks for it."""
    found = load_verl()
    monkeypatch.setitem(sys.modules, verl.ALGORITHMS, found.core_algos)
    return found


def set_words(monkeypatch, words):
    monkeypatch.setenv("LOCKSTEP", words)


def batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(30) < torch.tensor([[30], [12], [1], [25]])
    old = -2 * torch.rand(4, 30, generator=g) - 0.1
    rollout = (old + 0.3 * torch.randn(4, 30, generator=g)).clamp(max=0)
    new = (old + 0.3 * torch.randn(4, 30, generator=g)).clamp(max=0)
    return new, old, rollout, torch.randn(4, 30, generator=g), mask


def test_registered_by_name_they_are_found_by_verl(peer):
    algorithms = peer.core_algos
    algorithms.register_policy_loss(verl.NAME)(verl.policy_loss)
    algorithms.register_adv_est(verl.NAME)(verl.advantages)
    assert algorithms.get_policy_loss_fn("lockstep") is verl.policy_loss
    assert algorithms.get_adv_estimator_fn("lockstep") is verl.advantages
    theirs = inspect.signature(algorithms.compute_policy_loss_vanilla).parameters
    assert list(inspect.signature(verl.policy_loss).parameters) == list(theirs)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_ppo_with_the_drivers_weights_is_verls_vanilla_loss(peer, monkeypatch, mode):
    set_words(monkeypatch, "correction=tis objective.dual_clip=3")
    new, old, _, advantages, mask = batch()
    batch_info = {"dp_size": 2, "batch_num_tokens": 80, "global_batch_size": 5}
    config = peer.ActorConfig(global_batch_info=batch_info)
    weights = torch.rand(4, 30)
    results = []
    for function in (verl.policy_loss, peer.core_algos.compute_policy_loss_vanilla):
        logprobs = new.clone().requires_grad_()
        loss, metrics = function(
            old_log_prob=old, log_prob=logprobs, advantages=advantages, response_mask=mask,
            loss_agg_mode=mode, config=config, rollout_is_weights=weights,
        )  # fmt: skip
        loss.backward()
        results.append((loss.detach(), logprobs.grad, metrics))
    (ours, our_grad, our_metrics), (theirs, their_grad, their_metrics) = results
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(our_grad, their_grad)
    assert our_metrics["actor/approx_kl"] == pytest.approx(their_metrics["actor/ppo_kl"], abs=1e-6)


def test_the_drivers_correction_gives_verls_weights(peer, monkeypatch):
    set_words(monkeypatch, "correction=tis correction.limits=0,2")
    _, old, rollout, _, mask = batch()
    columns = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask.long()}
    ours, metrics = verl.correct_batch(DataProto.from_dict(columns), None)
    theirs, _, _ = peer.rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        old, rollout, mask.float(), rollout_is="token", rollout_is_threshold=2.0
    )
    expected = theirs.batch["rollout_is_weights"] * mask
    torch.testing.assert_close(ours.batch["rollout_is_weights"], expected)
    assert metrics["mismatch/compared_tokens"] == int(mask.sum())


def test_the_estimator_gives_verls_advantages(peer, monkeypatch):
    set_words(monkeypatch, "advantage=grpo")
    *_, mask = batch()
    rewards = torch.where(mask, torch.rand(4, 30), 0.0)
    index = np.array(["a", "a", "b", "b"], object)
    theirs, _ = peer.core_algos.compute_grpo_outcome_advantage(
        rewards.clone(), mask.float(), index=index
    )
    ours, _ = verl.advantages(rewards, mask.float(), config=None, index=index)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
