"""The critic: what a state is worth, learnt from rewards, and the advantages made of it."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
import torch
from command_line import refusal
from run_rows import rows_of
from tiny_training import (
    HF_CONFIGS,
    KINDS,
    assert_same_bits,
    make_critic,
    make_rows,
    make_trainer,
    snapshot,
)

from lockstep.cli import OK, main
from lockstep.correction.layout import Layout
from lockstep.errors import AlignmentError, CheckpointError, ConfigError, DataError, TokenError
from lockstep.models.critic import load_value_model
from lockstep.models.hf_io import load_checkpoint, save_checkpoint
from lockstep.objectives.config import GAE, GRPO
from lockstep.objectives.token_advantages import gae
from lockstep.observe.metrics import find_metric
from lockstep.ops.invariant import InvariantOps
from lockstep.store.run import load_run
from lockstep.training.checkpoint import CheckpointStore, verify
from lockstep.training.config import CriticConfig, TrainerConfig
from lockstep.training.critic import Critic
from lockstep.training.rows import rows_for_training
from lockstep.types import Group, Task, Trajectory

LENGTHS = [9, 31, 14, 22, 40, 12]


def rows_to_learn(critic, lengths=LENGTHS, *, seed=0):
    rows = make_rows(lengths, seed=seed)
    critic.values(rows)
    rng = np.random.default_rng(seed)
    for row in rows:
        row.set("returns", rng.normal(size=len(row)).astype(np.float32))
    return rows


class GivenValues:
    """A critic that says what it is told: `say(ids)` of everything read so far."""

    def __init__(self, say):
        self.say = say

    def values(self, samples):
        out = []
        for sample in samples:
            found = np.full(len(sample), np.nan, np.float32)
            for t in np.flatnonzero(sample.loss_mask):
                found[t] = self.say(sample.token_ids[:t].tolist())
            sample.set("values", found)
            out.append(found)
        return out

    def values_at_end(self, samples):
        return np.array([self.say(s.token_ids.tolist()) for s in samples], np.float32)


def group(*trajectories):
    return Group(task=Task(id="task"), trajectories=list(trajectories))


def play(name, choices, reward, *, replies=(), status="finished"):
    """Prompt [1], then a turn of one token per choice, with a tool's reply of two after each."""
    t = Trajectory(id=name, status=status)
    at = t.observe([1])
    for number, choice in enumerate(choices):
        at = t.record([choice], logprobs=[-0.7], parent=at, prompt_ids=t.path_ids(at))
        if number < len(choices) - 1:
            at = t.observe([5, 6], parent=at)
    t.rewards[at] = reward
    return t


# -- the model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_made_from_a_policy_says_0_of_every_state(tmp_path, kind):
    trainer = make_trainer(tmp_path, kind, hf={"tie_word_embeddings": False})
    save_checkpoint(trainer.model, tmp_path / "policy", like=tmp_path)
    model = load_value_model(tmp_path / "policy")
    names = {f"body.{n}" for n, _ in trainer.model.named_parameters()} - {"body.untied_head"}
    assert {n for n, _ in model.named_parameters()} == names | {"value_head"}
    critic = Critic(model, CriticConfig(), TrainerConfig(), like=tmp_path)
    for row, values in zip(rows := make_rows(LENGTHS), critic.values(rows), strict=True):
        assert values.dtype == np.float32 and row.columns["values"] is values
        assert (values[row.loss_mask] == 0).all() and np.isnan(values[~row.loss_mask]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_depends_on_what_stands_before_its_token_and_on_nothing_else(tmp_path, kind):
    """Alone and in company, under the ops that do not see a batch: the same bits."""
    critic = make_critic(tmp_path, kind)
    rows = make_rows(LENGTHS)
    critic.model.body.ops = InvariantOps()
    together = critic.values(rows)
    for row, packed in zip(rows, together, strict=True):
        (alone,) = critic.values([row])
        assert np.array_equal(alone, packed, equal_nan=True)
    row, before = rows[3], together[3]
    at = int(np.flatnonzero(row.loss_mask)[2])
    row.token_ids = row.token_ids.copy()
    row.token_ids[at] = (row.token_ids[at] + 1) % 61
    (after,) = critic.values([row])
    assert np.array_equal(before[: at + 1], after[: at + 1], equal_nan=True)
    later = row.loss_mask.copy()
    later[: at + 1] = False
    assert (before[later] != after[later]).all()
    (ends,) = critic.values_at_end([row])
    longer = dataclasses.replace(
        row, columns={}, token_ids=np.append(row.token_ids, np.int32(7)),
        loss_mask=np.append(row.loss_mask, True),
    )  # fmt: skip
    assert ends == critic.values([longer])[0][-1]


def test_the_value_at_the_end_of_a_row_as_long_as_the_model_can_read(tmp_path):
    critic = make_critic(tmp_path, budget=128)
    (row,) = make_rows([128])
    assert np.isfinite(critic.values_at_end([row])).all()
    with pytest.raises(TokenError, match=r"129.*128"):
        critic.values(make_rows([129]))


def test_values_are_float32_under_a_bfloat16_body(tmp_path):
    critic = make_critic(tmp_path, dtype=torch.bfloat16)
    values = np.concatenate([v[np.isfinite(v)] for v in critic.values(make_rows(LENGTHS))])
    rounded = torch.from_numpy(values).bfloat16().float().numpy()
    assert (values != rounded).mean() > 0.9
    assert critic.model.value_head.dtype == torch.float32


# -- learning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_any_split_into_microbatches_gives_the_same_gradient(tmp_path, kind):
    found = []
    for budget in (4096, 64, 40):
        critic = make_critic(tmp_path, kind, budget=budget, clip=0.0)
        metrics = critic.forward_backward(rows_to_learn(critic))
        parts = critic.optimizer.gradients()
        found.append((metrics["critic/loss"], torch.cat([g.flatten() for g in parts.values()])))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        # float32 sums in another order
        assert (gradient - found[0][1]).norm() < 2e-6 * found[0][1].norm()


def test_the_first_update_begins_from_the_values_themselves_and_clips_nothing(tmp_path):
    critic = make_critic(tmp_path, clip=1e-7)
    rows = rows_to_learn(critic)
    values, returns = (
        np.concatenate([r.columns[n][r.loss_mask] for r in rows]) for n in ("values", "returns")
    )
    metrics = critic.forward_backward(rows)
    assert metrics["critic/clip_fraction"] == 0.0
    assert metrics["critic/loss"] == pytest.approx(0.5 * np.mean((values - returns) ** 2), rel=1e-5)
    critic.optim_step()
    assert critic.forward_backward(rows)["critic/clip_fraction"] > 0.3


@pytest.mark.parametrize("lam", [1.0, 0.0], ids=["from what came", "from the next value"])
def test_the_critic_learns_what_the_states_of_a_two_armed_bandit_are_worth(tmp_path, lam):
    """Two choices with a tool's reply between; only the first decides: arm 2 wins 1, arm 3 nothing.
    So 1/2 before it, and 1 or 0 after; and the second choice has no advantage."""
    won, lost = (
        [play(f"{arm}{second}", [arm, second], reward) for second in (7, 8)]
        for arm, reward in ((2, 1.0), (3, 0.0))
    )
    critic = make_critic(
        tmp_path, lr=1e-2, clip=0.0, updates_per_batch=2, schedule="linear", total=160
    )
    for _ in range(80):
        rows = rows_for_training([group(*won, *lost)], GAE(lam=lam, whiten=False), critic=critic)
        metrics = critic.update(rows)
    for row in rows:
        first, second = row.columns["values"][row.loss_mask]
        reward = 1.0 if row.token_ids[1] == 2 else 0.0
        assert [first, second] == pytest.approx([0.5, reward], abs=0.02)
        advantages = row.columns["advantages"][row.loss_mask]
        assert advantages == pytest.approx([reward - 0.5, 0.0], abs=0.04)
    # All of what the second tokens get, nothing of what the first do: they cannot know.
    assert metrics["critic/explained_variance"] == pytest.approx(0.5, abs=0.04)
    assert metrics["critic/value_mean"] == pytest.approx(0.5, abs=0.02)
    assert all(map(find_metric, {"step": 0, **metrics}))


def test_an_update_that_is_not_finite_is_skipped_and_says_why(tmp_path):
    critic = make_critic(tmp_path)
    rows = rows_to_learn(critic)
    before = snapshot(critic)
    rows[2].columns["returns"][:] = np.nan
    metrics = critic.update(rows)
    assert metrics["critic/skipped_updates"] == 1.0 and "not finite" in critic.last_skip
    assert_same_bits(snapshot(critic), before)
    critic.update(rows_to_learn(critic))
    assert not critic.last_skip


def test_a_frozen_body_keeps_its_bits_and_the_head_learns(tmp_path):
    critic = make_critic(tmp_path, freeze=("body.*",))
    assert list(critic.optimizer.parameters) == ["value_head"]
    before = snapshot(critic)
    critic.update(rows_to_learn(critic))
    changed = {n for n, t in snapshot(critic).items() if not torch.equal(t, before.get(n, t))}
    assert changed == {"value_head"}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers.*", r"critic.freeze=layers.\* matches no parameter.*value_head, body.embed"),
        ("*", r"critic.freeze=\* leaves nothing to train of"),
    ],
)
def test_a_freeze_that_matches_nothing_or_all_is_refused(tmp_path, pattern, message, capsys):
    with pytest.raises(ConfigError, match=message):
        make_critic(tmp_path, freeze=(pattern,))
    words = [f"critic.freeze={pattern}", f"out={tmp_path / 'run'}"]
    assert re.search(message, refusal(*SMALL, *words, capsys=capsys))


def test_blocks_that_are_computed_again_give_the_same_bits(tmp_path):
    found = []
    for trainer in ({}, {"recompute": "blocks"}):
        critic = make_critic(tmp_path, trainer=trainer)
        critic.update(rows_to_learn(critic))
        found.append(snapshot(critic))
    assert critic.model.body.recomputes_blocks
    assert_same_bits(*found)


def test_rows_without_values_or_returns_are_refused(tmp_path):
    critic = make_critic(tmp_path)
    with pytest.raises(AlignmentError, match="sample t0/0"):
        critic.update(make_rows(LENGTHS))


# -- advantages ------------------------------------------------------------------------------------


def test_the_reward_stands_at_the_last_sampled_token_and_a_tools_reply_takes_no_time():
    trajectory = play("a", [2, 3, 4], 1.0)
    critic = GivenValues(lambda ids: 0.1 * len(ids))
    (row,) = rows_for_training(
        [group(trajectory)], GAE(gamma=0.9, lam=0.8, whiten=False), critic=critic
    )
    assert row.loss_mask.tolist() == [False, True, False, False, True, False, False, True]
    values = torch.tensor([0.1, 0.4, 0.7])  # 1, 4 and 7 ids before
    expected, returns = gae(
        torch.tensor([0.0, 0.0, 1.0]), values, Layout.packed([3]), gamma=0.9, lam=0.8
    )
    for name, wanted in (("values", values), ("advantages", expected), ("returns", returns)):
        column = row.columns[name]
        assert column.dtype == np.float32
        assert column[row.loss_mask] == pytest.approx(wanted.tolist(), abs=1e-6)
    assert not row.columns["advantages"][~row.loss_mask].any()


def test_the_critic_can_learn_by_a_lam_of_its_own():
    def rows(**options):
        critic = GivenValues(lambda ids: 0.1 * len(ids))
        config = GAE(gamma=0.9, whiten=False, **options)
        return rows_for_training([group(play("a", [2, 3, 4], 1.0))], config, critic=critic)[0]

    both, short, long = rows(lam=0.5, critic_lam=1.0), rows(lam=0.5), rows(lam=1.0)
    np.testing.assert_array_equal(both.columns["advantages"], short.columns["advantages"])
    np.testing.assert_array_equal(both.columns["returns"], long.columns["returns"])
    assert long.columns["returns"][1] == pytest.approx(0.81)
    assert short.columns["returns"][1] != long.columns["returns"][1]


def test_a_turns_own_reward_is_given_at_its_end_and_counts_for_all_before_it():
    trajectory = play("a", [2, 3], 1.0)
    trajectory.set_segment_reward(1, 0.5)
    (row,) = rows_for_training(
        [group(trajectory)], GAE(whiten=False), critic=GivenValues(lambda ids: 0.0)
    )
    assert row.columns["returns"][row.loss_mask].tolist() == [1.5, 1.0]


def test_a_shared_segment_has_the_mean_over_its_leaves_in_the_row_that_trains_it():
    t = Trajectory(id="tree", status="finished")
    prompt = t.observe([1])
    shared = t.record([2, 3], logprobs=[-1.0] * 2, parent=prompt, prompt_ids=[1])
    for size, reward in ((1, 1.0), (3, 0.0)):
        reply = t.observe([9, size], parent=shared, reason="retry" if size > 1 else "")
        ids = t.path_ids(reply)
        leaf = t.record(list(range(10, 10 + size)), logprobs=[-1.0] * size, parent=reply,
                        prompt_ids=ids)  # fmt: skip
        t.rewards[leaf] = reward
    critic = GivenValues(lambda ids: 0.1 * len(ids))
    config = GAE(gamma=0.9, lam=0.7, whiten=False)
    rows = rows_for_training([group(t)], config, critic=critic)

    def alone(lengths, reward):
        values = torch.tensor([0.1 * n for n in lengths])
        rewards = torch.tensor([0.0] * (len(lengths) - 1) + [reward])
        return gae(rewards, values, Layout.packed([len(lengths)]), gamma=0.9, lam=0.7)

    short, long = alone([1, 2, 5], 1.0), alone([1, 2, 5, 6, 7], 0.0)
    assert [r.num_trained for r in rows] == [3, 3]
    for name, a, b in zip(("advantages", "returns"), short, long, strict=True):
        first, second = (r.columns[name][r.loss_mask].tolist() for r in rows)
        assert first == pytest.approx([*((a[:2] + b[:2]) / 2).tolist(), float(a[2])], abs=1e-6)
        assert second == pytest.approx(b[2:].tolist(), abs=1e-6)


def test_two_observed_leaves_of_one_turn_are_its_mean_reward():
    t = Trajectory(id="tree", status="finished")
    turn = t.record([2], logprobs=[-1.0], parent=t.observe([1]), prompt_ids=[1])
    for i, reward in enumerate((1.0, 0.0)):
        t.rewards[t.observe([8 + i], parent=turn)] = reward
    (row,) = rows_for_training([group(t)], GAE(whiten=False), critic=GivenValues(lambda _: 0.0))
    assert row.columns["returns"][row.loss_mask].tolist() == [0.5]


@pytest.mark.parametrize("bootstraps", [False, True])
def test_an_episode_that_was_cut_goes_on_with_the_critics_word_only_if_asked(bootstraps):
    config = GAE(gamma=0.5, whiten=False, bootstrap_truncated=bootstraps)
    rows = rows_for_training(
        [group(play("cut", [2, 3], 1.0, status="truncated"), play("done", [2, 3], 1.0))],
        config, critic=GivenValues(lambda ids: float(len(ids))),
    )  # fmt: skip
    behind = 5 if bootstraps else 0  # all ids of the row are read
    assert [r.columns["returns"][r.loss_mask].tolist() for r in rows] == [
        [0.5 * (1 + 0.5 * behind), 1 + 0.5 * behind], [0.5, 1.0],
    ]  # fmt: skip


def test_whitened_advantages_have_mean_0_and_deviation_1_over_trained_tokens():
    plays = [play(f"p{i}", [2] * (1 + i), float(i % 2)) for i in range(5)]
    critic = GivenValues(lambda ids: 0.1 * len(ids))
    rows = rows_for_training([group(*plays)], GAE(), critic=critic)
    plain_rows = rows_for_training([group(*plays)], GAE(whiten=False), critic=critic)
    found, given = (
        np.concatenate([r.columns["advantages"][r.loss_mask] for r in each])
        for each in (rows, plain_rows)
    )
    assert found.mean() == pytest.approx(0, abs=1e-6)
    assert found.std(ddof=1) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(found, (given - given.mean()) / given.std(ddof=1), atol=1e-6)
    for row, other in zip(rows, plain_rows, strict=True):
        np.testing.assert_array_equal(row.columns["returns"], other.columns["returns"])


def test_failed_and_unscored_episodes_are_left_out_and_a_bad_reward_is_named():
    critic = GivenValues(lambda _: 0.0)
    unscored = play("b", [2], 0.0)
    unscored.rewards.clear()
    episodes = [play("a", [2], 1.0), unscored, play("c", [3], 9.0, status="failed")]
    assert [r.id for r in rows_for_training([group(*episodes)], GAE(), critic=critic)] == ["a/1"]
    assert rows_for_training([group(unscored)], GAE(), critic=critic) == []
    with pytest.raises(DataError, match=r"trajectory d, leaf 1.*nan"):
        rows_for_training([group(play("d", [2], float("nan")))], GAE(), critic=critic)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_critic_goes_on_with_the_same_bits(tmp_path, kind, dtype):
    settings = {"schedule": "cosine", "warmup_updates": 2, "updates_per_batch": 2}
    trainer = make_trainer(tmp_path / "policy", kind)
    straight = make_critic(tmp_path / "model", kind, dtype=dtype, **settings)
    straight.update(rows_to_learn(straight))
    store = CheckpointStore(tmp_path / "checkpoints")
    path = store.save(1, trainer, {}, critic=straight)
    resumed = make_critic(tmp_path / "model", kind, seed=9, dtype=dtype, **settings)
    store.load(path, trainer, critic=resumed)
    assert_same_bits(snapshot(resumed), snapshot(straight))
    assert resumed.num_updates == 2
    ours, theirs = (c.update(rows_to_learn(c, seed=3)) for c in (resumed, straight))
    assert ours == theirs
    assert_same_bits(snapshot(resumed), snapshot(straight))


def test_a_checkpoint_is_torn_if_its_critic_is(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    critic = make_critic(tmp_path / "model")
    path = store.save(1, make_trainer(tmp_path / "policy"), {}, critic=critic)
    (path / "critic" / "model" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"critic/model/model.safetensors.*\b4\b"):
        verify(path)


def test_a_critic_of_another_shape_or_none_is_refused_before_anything_changes(tmp_path):
    trainer = make_trainer(tmp_path / "policy")
    store = CheckpointStore(tmp_path / "checkpoints")
    path = store.save(1, trainer, {}, critic=make_critic(tmp_path / "model"))
    other = make_critic(tmp_path / "other", hf={"num_hidden_layers": 1})
    before = snapshot(other)
    with pytest.raises(CheckpointError, match=r"num_layers.*\b2\b.*\b1\b"):
        store.load(path, trainer, critic=other)
    assert_same_bits(snapshot(other), before)
    bare = store.save(2, trainer, {})
    with pytest.raises(CheckpointError, match="step-000002"):
        store.load(bare, trainer, critic=make_critic(tmp_path / "model"))


def test_a_critics_checkpoint_begins_a_critic_with_its_head_and_a_policy_without(tmp_path):
    critic = make_critic(tmp_path / "model")
    critic.save(tmp_path / "critic")
    rows = make_rows([9, 14])
    again = load_value_model(tmp_path / "critic" / "model")
    assert torch.equal(again.value_head, critic.model.value_head)
    copy = Critic(again, CriticConfig(), TrainerConfig(), like=tmp_path / "critic" / "model")
    for a, b in zip(critic.values(rows), copy.values(rows), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(CheckpointError, match=r"\(1\): score\.weight"):
        load_checkpoint(tmp_path / "critic" / "model")


def test_a_classifier_is_no_critic(tmp_path):
    critic = make_critic(tmp_path / "model")
    critic.model.value_head = torch.nn.Parameter(torch.zeros(3, 32))
    critic.save(tmp_path / "critic")
    with pytest.raises(CheckpointError, match=r"score.weight.*\[3, 32\]"):
        load_value_model(tmp_path / "critic" / "model")


# -- runs ------------------------------------------------------------------------------------------

SMALL = [
    "train", "quickstart", "model=tiny-qwen3", "advantage=gae", "group_size=1", "groups_per_step=4",
    "critic.lr=1e-3", "critic.clip=0.1", "evaluation.num_tasks=4", "evaluation.at_start=false",
    "checkpoint.every=2",
]  # fmt: skip


def run(path, *words):
    assert main([*SMALL, *words, f"out={path}"]) == OK
    return path


def state_of(path):
    last = max((path / "checkpoints").iterdir())
    return {str(p.relative_to(last)): p.read_bytes() for p in last.rglob("*.safetensors")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("critic") / "run", "steps=4", "critic.updates_per_batch=2")


def test_a_run_with_a_critic_reports_it_and_keeps_it(whole, tmp_path, capsys):
    rows = [row for row in rows_of(whole) if "train/loss" in row]
    assert len(rows) == 4
    for row in rows:
        assert all(map(find_metric, row))
        assert row["critic/loss"] > 0 and row["critic/grad_norm"] > 0
        assert row["mismatch/unequal_tokens"] == 0
        assert row["episodes/without_signal"] == 0  # none is compared with another
    assert set(state_of(whole)) == {
        "policy/model.safetensors", "optimizer.safetensors", "critic/model/model.safetensors",
        "critic/optimizer.safetensors",
    }  # fmt: skip
    assert main(["eval", str(whole)]) == OK


def test_a_run_with_a_critic_that_was_cut_resumes_to_the_same_bits(whole, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    for checkpoint in load_run(cut).path.glob("checkpoints/*"):
        if checkpoint.name != "step-000002":
            shutil.rmtree(checkpoint)
    assert main(["train", str(cut), "resume=true"]) == OK
    assert rows_of(cut) == rows_of(whole)
    assert state_of(cut) == state_of(whole)


def test_the_critic_can_have_steps_of_its_own_before_the_policy(tmp_path):
    path = run(tmp_path / "run", "steps=3", "critic.steps_before_policy=2", "checkpoint.every=1",
               "checkpoint.keep_last=9")  # fmt: skip
    rows = [row for row in rows_of(path) if "critic/loss" in row]
    assert ["train/loss" in row for row in rows] == [False, False, True]
    assert all(row["mismatch/compared_tokens"] > 0 for row in rows)
    for row in rows:
        assert all(map(find_metric, row))
    assert [row["policy_version"] for row in rows] == [0, 0, 0]
    policies, critics = (
        [(path / "checkpoints" / f"step-00000{i}" / name).read_bytes() for i in (1, 2, 3)]
        for name in ("policy/model.safetensors", "critic/model/model.safetensors")
    )
    assert policies[0] == policies[1] != policies[2]
    assert critics[0] != critics[1]


def test_a_fork_of_a_run_without_critic_begins_one_and_says_so(whole, tmp_path, capsys):
    first = [word for word in SMALL if not word.startswith(("critic", "advantage", "group_size"))]
    parent = tmp_path / "parent"
    assert main([*first, "steps=1", "group_size=2", f"out={parent}"]) == OK
    child = tmp_path / "child"
    words = ["train", f"from={parent}@1", "advantage=gae", "steps=2", f"out={child}"]
    assert main(words) == OK
    assert "has no critic: this run's begins anew" in "".join(capsys.readouterr())
    assert "critic/model/model.safetensors" in state_of(child)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["advantage.gamma=1.5"], r"advantage.gamma=1.5 must be in \[0, 1\]"),
        (["advantage.lam=-0.1"], r"advantage.lam=-0.1 must be in \[0, 1\]"),
        (["advantage.critic_lam=2"], r"advantage.critic_lam=2.0 must be in \[0, 1\]"),
        (["critic.lr=0"], r"critic.lr=0.0 must be a finite number above 0"),
        (["critic.clip=-1"], r"critic.clip=-1.0 must be a finite number of at least 0"),
        (["critic.updates_per_batch=0"], r"critic.updates_per_batch=0 must be at least 1"),
        (["critic.steps_before_policy=150"], r"=150 and steps=150: the policy would never"),
        (["advantage=grpo", "group_size=4"], r"critic.\* with advantage=grpo: .* has no critic"),
        (["critic.model=tiny-gpt-oss"], r"critic.model=tiny-gpt-oss has another tokenizer than"),
        (["critic.model=nowhere"], r"^ConfigError: critic.model='nowhere' is neither a shipped"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_error_before_a_model_is_loaded(words, message, tmp_path, capsys):
    shown = refusal(*SMALL, *words, f"out={tmp_path / 'run'}", capsys=capsys)
    assert re.search(message, shown), shown
    assert not (tmp_path / "run").exists()


def test_a_critic_that_reads_fewer_positions_or_ids_is_refused(tmp_path, capsys):
    for key, value, message in (
        ("max_position_embeddings", 128, "has 128 positions, and max_tokens=256"),
        ("vocab_size", 99, "has a vocabulary of 99, and the policy's tokenizer ids up to"),
    ):
        source = {**HF_CONFIGS["qwen3"], "max_position_embeddings": 512, "vocab_size": 9999}
        (tmp_path / "config.json").write_text(json.dumps({**source, key: value}))
        words = [f"critic.model={tmp_path}", f"out={tmp_path / 'run'}"]
        assert message in refusal(*SMALL, *words, capsys=capsys)


def test_without_gae_there_is_no_critic():
    with pytest.raises(ConfigError, match="advantage=gae"):
        rows_for_training([group(play("a", [2], 1.0))], GAE())
    assert not GRPO().needs_critic and GAE().needs_critic
