"""Objectives where their tensors are: the host copies nothing, and numpy's arrays give arrays."""

import numpy as np
import pytest
import torch
from remote_tensors import DEVICE, RemoteDevice

from lockstep.correction import Layout
from lockstep.objectives import losses
from lockstep.objectives.advantages import leaf_advantages
from lockstep.objectives.aggregation import aggregate
from lockstep.objectives.config import GRPO, RLOO, ReinforcePlusPlus
from lockstep.objectives.distillation import top_k_kl
from lockstep.objectives.token_advantages import gae, whiten

MASK = torch.arange(9) < torch.tensor([[9], [0], [4], [7]])
LAYOUT = Layout.padded(MASK)


def numbers(seed, *shape):
    return torch.randn(*(shape or MASK.shape), generator=torch.Generator().manual_seed(seed))


NEW, OLD, REFERENCE = (-numbers(seed).abs() for seed in range(3))
ADVANTAGES, REWARDS, VALUES = (numbers(seed) for seed in range(3, 6))
ALL = (NEW, OLD, ADVANTAGES)


def packed(layout, mask):
    return Layout(layout.shape, layout.offsets, mask)


LOSSES = {
    "ppo_clip": lambda mask, *x: losses.ppo_clip(*x, dual_clip=3.0, mask=mask).loss,
    "gspo": lambda mask, *x: losses.gspo(*x, packed(LAYOUT, mask)).loss,
    "cispo": lambda mask, *x: losses.cispo(*x, mask=mask).loss,
    "dppo": lambda mask, *x: losses.dppo(*x, divergence="kl", mask=mask).loss,
    "reinforce": lambda mask, new, _, advantages: losses.reinforce(new, advantages, mask=mask).loss,
    "cross_entropy": lambda mask, new, *_: losses.cross_entropy(new, mask=mask).loss,
    "k2": lambda mask, a, b, _: losses.reference_kl(a, b, estimator="k2", mask=mask),
    "unbiased": lambda mask, a, b, _: losses.reference_kl(a, b, old_logprobs=b, mask=mask),
    "value": lambda mask, *x: losses.value_loss(*x, clip=0.2, mask=mask).loss,
    "top_k_kl": lambda _, a, b, __: top_k_kl(a - 5, b - 5),
    "token_mean": lambda mask, new, *_: aggregate(new, packed(LAYOUT, mask)),
    "sequence_mean": lambda mask, new, *_: aggregate(
        new, packed(LAYOUT, mask), how="sequence_mean"
    ),
    "whiten": lambda mask, new, *_: whiten(new, packed(LAYOUT, mask)),
    "gae": lambda mask, rewards, values, _: gae(
        rewards, values, packed(LAYOUT, mask), gamma=0.9, lam=0.8
    )[0],
    "returns": lambda mask, rewards, values, ends: gae(
        rewards, values, packed(LAYOUT, mask), gamma=0.9, bootstrap=ends[:, 0]
    )[1],
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_device_gives_the_hosts_values_and_the_host_waits_for_nothing(name):
    expected = LOSSES[name](MASK, *ALL)
    with RemoteDevice() as device:
        found = LOSSES[name](device.put(MASK), *(device.put(x) for x in ALL))
        assert found.device == DEVICE and not device.waits
        torch.testing.assert_close(device.numbers(found), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_arrays_give_the_same_numbers_as_arrays(name):
    if name in ("token_mean", "sequence_mean", "gspo", "whiten", "gae", "returns"):
        mask = MASK  # of a layout
    else:
        mask = MASK.numpy()
    found = LOSSES[name](mask, *(x.numpy() for x in ALL))
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, LOSSES[name](MASK, *ALL).numpy())


@pytest.mark.parametrize(
    "config",
    [GRPO(), RLOO(), ReinforcePlusPlus(), ReinforcePlusPlus(baseline="group")],
    ids=lambda config: f"{type(config).__name__} {getattr(config, 'baseline', '')}",
)
def test_advantages_of_episodes_stay_on_the_device_of_their_rewards(config):
    rewards, owners = numbers(0, 12).double().round(), torch.arange(12) // 2 * 5
    groups = torch.arange(12) // 6
    rewards[6:] = 0.1
    host = leaf_advantages(config, rewards, trajectories=owners, groups=groups)
    of_arrays = leaf_advantages(
        config, rewards.numpy(), trajectories=owners.numpy(), groups=groups.numpy()
    )
    assert isinstance(of_arrays, np.ndarray) and of_arrays.tolist() == host.tolist()
    with RemoteDevice() as device:
        found = leaf_advantages(
            config, device.put(rewards), trajectories=device.put(owners), groups=device.put(groups)
        )
        assert found.device == DEVICE and not device.waits
        assert device.numbers(found).tolist() == host.tolist()


def test_explained_variance_is_a_number_of_the_host_and_one_wait():
    expected = losses.explained_variance(VALUES, REWARDS, LAYOUT)
    with RemoteDevice() as device:
        layout = Layout.padded(device.put(MASK))
        found = losses.explained_variance(device.put(VALUES), device.put(REWARDS), layout)
        assert found == pytest.approx(expected) and device.waits.total() == 1
