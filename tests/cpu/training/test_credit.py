"""Credit of single turns, by hand, and against GiGPO's definition in plain loops."""

from collections import defaultdict

import numpy as np
import pytest
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st
from quickstarts import quickstart_with, run_with

from lockstep.objectives.config import GRPO, RLOO, CreditConfig, ReinforcePlusPlus
from lockstep.training.credit import credit_metrics
from lockstep.training.rows import rows_for_training
from lockstep.types import Group, Task, Trajectory

PLAIN = GRPO(normalize_std=False)


def played(name, turns, reward):
    """An episode of one id per turn and per observation. turns: (sampled id, id of the observation
    after it, its own reward or None)."""
    t = Trajectory(id=name, status="finished")
    at = t.observe([1])
    for token, reply, own in turns:
        turn = t.record([token], logprobs=[-1.0], parent=at, prompt_ids=t.path_ids(at))
        if own is not None:
            t.set_segment_reward(turn, own)
        at = t.observe([reply], parent=turn)
    leaf = t.record([9], logprobs=[-1.0], parent=at, prompt_ids=t.path_ids(at))
    t.rewards[leaf] = reward
    return t


def grouped(*trajectories):
    return [Group(task=Task(id="task"), trajectories=list(trajectories))]


def credited(groups, advantage=PLAIN, **settings):
    """Advantages of the sampled tokens of each row, in order."""
    rows = rows_for_training(groups, advantage, credit=CreditConfig(**settings))
    return [row.columns["advantages"][row.loss_mask].tolist() for row in rows]


A = played("a", [(2, 5, 0.5), (3, 6, 0.0)], 1.0)
B = played("b", [(2, 5, 0.0)], 0.5)
C = played("c", [(4, 5, None)], 0.0)
GROUP = grouped(A, B, C)
"""Outcomes 1, 0.5, 0, whose mean is 0.5. Turns: a has 3, b and c have 2. a and b begin with the
same call; every first call is answered alike."""


def test_the_default_is_the_advantage_of_the_episode_and_each_turns_own_reward():
    assert credited(GROUP) == [[1.0, 0.5, 0.5], [0.0, 0.0], [-0.5, -0.5]]
    assert credited(GROUP, process_weight=0.5) == [[0.75, 0.5, 0.5], [0.0, 0.0], [-0.5, -0.5]]
    assert credited(GROUP, process_weight=0) == [[0.5, 0.5, 0.5], [0.0, 0.0], [-0.5, -0.5]]
    assert credit_metrics(GROUP, CreditConfig()) == {}


def test_returns_are_compared_with_those_of_the_same_turn():
    # gamma 0.5. turn 0: 0.25, 0.25, 0 (mean 1/6); turn 1: 0.5, 0.5, 0 (mean 1/3); turn 2: a alone
    found = credited(
        GROUP, compare="turn", gamma=0.5, episode_weight=0, turn_weight=6, process_weight=0
    )
    assert np.allclose(found[0], [0.5, 1.0, 0.0])
    assert np.allclose(found[1:], [[0.5, 1.0], [-1.0, -2.0]])
    config = CreditConfig(compare="turn")
    assert credit_metrics(GROUP, config) == {"credit/compared_share": pytest.approx(6 / 7)}


def test_returns_are_compared_with_those_of_turns_that_began_alike():
    config = {"turn_weight": 2, "process_weight": 0}
    # path: turn 0 of all (1, 0.5, 0); turn 1 of a and b (1, 0.5), since c called otherwise
    of_path = credited(GROUP, compare="path", **config)
    assert of_path == [[1.5, 1.0, 0.5], [0.0, -0.5], [-1.5, -0.5]]
    # observation: turn 1 of all three, since the answer was the same
    of_observation = credited(GROUP, compare="observation", **config)
    assert of_observation == [[1.5, 1.5, 0.5], [0.0, 0.0], [-1.5, -1.5]]
    for compare, share in (("path", 5 / 7), ("observation", 6 / 7)):
        found = credit_metrics(GROUP, CreditConfig(compare=compare))
        assert found == {"credit/compared_share": pytest.approx(share)}


def test_a_state_that_an_episode_is_in_twice_counts_twice():
    """As in GiGPO: with a discount, the later visit is the better one."""
    again = played("a", [(2, 5, None), (3, 5, None)], 1.0)
    (found,) = credited(grouped(again), compare="observation", gamma=0.5, episode_weight=0)
    assert found == [0.0, -0.25, 0.25]  # the two turns after the id 5: 0.5 and 1


def test_turns_own_rewards_are_compared_alone_summed_up_or_part_of_the_return():
    # MT-GRPO: turn 0 has 0.5, 0, 0 (mean 1/6), turn 1 has 0, 0, 0, in addition to 0.5, 0, -0.5
    of_turn = credited(GROUP, process="turn", process_weight=6)
    assert np.allclose(of_turn[0], [2.5, 0.5, 0.5])
    assert np.allclose(of_turn[1:], [[-1.0, 0.0], [-1.5, -0.5]])
    # GRPO's process supervision: the mean over all 7 turns is 1/14; sums of what follows
    of_group = credited(GROUP, process="group", process_weight=14)
    assert np.allclose(of_group[0], [0.5 + 4, 0.5 - 2, 0.5 - 1])
    assert np.allclose(of_group[1:], [[-2, -1], [-2.5, -1.5]])
    summed = credited(GROUP, process="group", process_weight=14, gamma=0.5)
    assert np.allclose(summed[0], [0.5 + 5.25, 0.5 - 1.5, 0.5 - 1])
    # the return: episodes have 2.5, 0.5 and 0 (mean 1); from turn 1 on 1, 0.5 and 0 are left
    of_return = credited(GROUP, process="return", process_weight=3)
    assert of_return == [[1.5] * 3, [-0.5] * 2, [-1.0] * 2]
    left = credited(GROUP, process="return", process_weight=3, compare="turn", episode_weight=0)
    assert left == [[1.5, 0.5, 0.0], [-0.5, 0.0], [-1.0, -0.5]]
    found = credit_metrics(GROUP, CreditConfig(process="return"))
    assert found == {"credit/rewarded_share": pytest.approx(3 / 7)}


def branched(name, rewards):
    """A turn, and another one after it for each reward."""
    t = Trajectory(id=name, status="finished")
    shared = t.record([2], logprobs=[-1.0], parent=t.observe([1]), prompt_ids=[1])
    for token, reward in enumerate(rewards, start=3):
        reply = t.observe([9], parent=shared)
        leaf = t.record([token], logprobs=[-1.0], parent=reply, prompt_ids=[1, 2, 9])
        t.rewards[leaf] = reward
    return t


def test_a_branch_is_worth_what_it_adds_to_the_turn_where_it_began():
    groups = grouped(branched("a", [1.0, 0.0]), branched("b", [0.0]))
    # the baseline is (0.5 + 0) / 2; leaves 0.75, -0.25 and -0.25; at the fork 0.25
    assert credited(groups) == [[0.25, 0.75], [-0.25], [-0.25, -0.25]]
    parted = credited(groups, branch_weight=2)
    assert parted == [[0.25, 0.75 + 2 * 0.5], [-0.25 - 2 * 0.5], [-0.25, -0.25]]
    # among siblings: 1, 0, and the 0 of b, which began after the same tokens
    siblings = credited(groups, compare="path", episode_weight=0)
    assert np.allclose([each[-1] for each in siblings], [2 / 3, -1 / 3, -1 / 3])
    assert siblings[0][0] == 0.25 and siblings[2][0] == -0.25  # 0.5 and 0 below the first turn


def test_a_turn_that_new_weights_cut_in_two_is_one_turn():
    t = Trajectory(id="a", status="finished")
    cut = {"logprobs": [-1.0], "finish_reason": "weight_update"}
    begun = t.record([2], parent=t.observe([1]), prompt_ids=[1], **cut)
    ended = t.record([3], logprobs=[-1.0], parent=begun, prompt_ids=[1, 2])
    leaf = t.record(
        [4], logprobs=[-1.0], parent=t.observe([5], parent=ended), prompt_ids=[1, 2, 3, 5]
    )
    t.rewards[leaf] = 1.0
    groups = grouped(t, played("b", [(2, 5, None)], 0.0))
    found = credited(groups, compare="turn", gamma=0.5, episode_weight=0)
    assert found == [[0.25, 0.25, 0.5], [-0.25, -0.5]]


def test_without_branches_nothing_is_added():
    for advantage in (PLAIN, GRPO(), RLOO(), ReinforcePlusPlus()):
        assert credited(GROUP, advantage, branch_weight=1) == credited(GROUP, advantage)


def gigpo(episodes, *, gamma, omega, remove_std, eps=1e-6):
    """compute_gigpo_outcome_advantage of verl-agent (gigpo/core_gigpo.py) for one group, in plain
    loops, with compute_mean_std_cross_steps=False: an episode counts once in its own baseline.

    episodes: lists of (anchor, reward of the step). Returns [episode][step].
    """

    def normed(value, values, alone):
        center = alone if len(values) == 1 else float(np.mean(values))
        spread = 1.0 if len(values) == 1 else float(np.std(values, ddof=1))
        return (value - center) / (1.0 if remove_std else spread + eps)

    totals = [sum(reward for _, reward in steps) for steps in episodes]
    returns, clusters = [], defaultdict(list)
    for steps in episodes:
        running, found = 0.0, []
        for _, reward in reversed(steps):
            running = reward + gamma * running
            found.insert(0, running)
        returns.append(found)
        for (anchor, _), value in zip(steps, found, strict=True):
            clusters[anchor].append(value)
    return [
        [
            normed(total, totals, 0.0) + omega * normed(value, clusters[anchor], value)
            for (anchor, _), value in zip(steps, found, strict=True)
        ]
        for steps, found, total in zip(episodes, returns, totals, strict=True)
    ]


turns = st.tuples(st.integers(2, 3), st.integers(5, 6), st.sampled_from([None, 0.25, -0.5]))
plays = st.tuples(st.lists(turns, max_size=3), st.sampled_from([0.0, 0.5, 1.0]))


@settings(max_examples=2000 if PROOF else 200, deadline=None)
@given(
    st.lists(plays, min_size=2, max_size=5),
    st.sampled_from([1.0, 0.95, 0.5]),
    st.sampled_from([0.5, 1.0]),
    st.booleans(),
)
def test_equal_observations_give_the_advantages_of_gigpo(episodes, gamma, omega, remove_std):
    trajectories = [played(f"{i}", *play) for i, play in enumerate(episodes)]
    found = credited(
        grouped(*trajectories), GRPO(normalize_std=not remove_std),
        compare="observation", process="return", gamma=gamma, turn_weight=omega,
    )  # fmt: skip
    steps = [
        [*zip([1, *(t[1] for t in of)], [*(t[2] or 0.0 for t in of), reward], strict=True)]
        for of, reward in episodes
    ]
    expected = gigpo(steps, gamma=gamma, omega=omega, remove_std=remove_std)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_run_says_how_many_turns_had_a_peer_and_a_reward(tmp_path):
    settings = [
        "steps=1", "groups_per_step=2", "group_size=4", "evaluation=none", "checkpoint.every=0",
        "task.turn_rewards=true", "credit.process=turn", "credit.compare=path",
    ]  # fmt: skip
    run = run_with(tmp_path / "run", *settings)
    (row,) = run.metrics
    told = {name: value for name, value in row.items() if name.startswith("credit/")}
    assert told == credit_metrics(run.groups(0), quickstart_with(*settings).credit)
    assert 0 < told["credit/compared_share"] < 1 and 0 < told["credit/rewarded_share"] < 1
