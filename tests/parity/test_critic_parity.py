"""The critic against verl's value loss, advantages and metrics, and against Hugging Face's models.

verl's clipped value loss and GAE say of themselves that they are TRL's.
"""

import json

import numpy as np
import pytest
import torch
from verl_modules import load_verl

from lockstep.correction.layout import Layout
from lockstep.models.critic import load_value_model
from lockstep.objectives.config import GAE
from lockstep.objectives.losses import explained_variance, value_loss
from lockstep.ops.context import PackedContext
from lockstep.training.config import CriticConfig, TrainerConfig
from lockstep.training.critic import Critic
from lockstep.training.rows import rows_for_training
from lockstep.types import Group, Task, Trajectory

TOLERANCE = 2e-6  # float32 sums of some dozen terms of order 1, added in another order
SHAPE = {
    "vocab_size": 99, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
    "initializer_range": 0.2, "num_labels": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def verl():
    return load_verl()


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = (torch.randn(4, 9, generator=generator) for _ in range(3))
    mask = torch.rand(4, 9, generator=generator) < 0.6
    mask[:, 0] = True
    return values.requires_grad_(), old, returns, mask


@pytest.mark.parametrize("clip", [0.2, 0.5, 100.0])
def test_the_value_loss_its_gradient_and_its_clip_fraction_equal_verls(verl, clip):
    values, old, returns, mask = batch()
    ours = value_loss(values, old, returns, clip=clip, mask=mask)
    loss = ours.loss.sum() / mask.sum()
    gradient = torch.autograd.grad(loss, values)[0]
    theirs, their_fraction = verl.core_algos.compute_value_loss(
        values, returns, old, mask.float(), clip
    )
    assert loss.item() == pytest.approx(theirs.item(), rel=TOLERANCE)
    torch.testing.assert_close(
        gradient, torch.autograd.grad(theirs, values)[0], rtol=TOLERANCE, atol=1e-8
    )
    fraction = ours.mean["clip_fraction"].sum() / mask.sum()
    assert float(fraction) == pytest.approx(float(their_fraction), abs=1e-6)


def make_hf(kind):
    transformers = pytest.importorskip(
        "transformers", reason="pip install 'lockstep-rl[transformers]'"
    )
    torch.manual_seed(0)
    if kind == "gpt_oss":
        config = transformers.GptOssConfig(
            **SHAPE, intermediate_size=40, num_local_experts=4, num_experts_per_tok=2,
            sliding_window=8, layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )  # fmt: skip
        kind_of_model = transformers.GptOssForSequenceClassification
    else:
        config = transformers.Qwen3Config(
            **SHAPE, intermediate_size=96,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )  # fmt: skip
        kind_of_model = transformers.Qwen3ForSequenceClassification
    return kind_of_model._from_config(config, attn_implementation="eager").float().eval()


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_a_reward_models_scores_are_the_critics_values_and_go_back(tmp_path, kind):
    theirs = make_hf(kind)
    theirs.save_pretrained(tmp_path / "hf")
    ours = load_value_model(tmp_path / "hf")
    ids = torch.randint(0, 99, (1, 31), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs.score(theirs.model(ids).last_hidden_state)[0, :, 0]
        places = torch.arange(31)
        found = ours(ids[0], places, PackedContext.of_rows([places.numpy()]), states_N=places)
    # as the decoder's logits against theirs: 1e-5 relative of the largest
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    critic = Critic(ours, CriticConfig(), TrainerConfig(), like=tmp_path / "hf")
    critic.save(tmp_path / "critic")
    saved = tmp_path / "critic" / "model"
    again = type(theirs).from_pretrained(saved, attn_implementation="eager").eval()
    assert again.config.num_labels == 1
    assert json.loads((saved / "config.json").read_text())["architectures"] == [
        type(theirs).__name__
    ]
    with torch.no_grad():
        returned = again.score(again.model(ids).last_hidden_state)[0, :, 0]
    assert torch.equal(returned, expected)


def play(name, sizes, reward, rng):
    """Turns of these many tokens, a tool's reply after each but the last."""
    t = Trajectory(id=name, status="finished")
    at = t.observe(rng.integers(0, 99, 4))
    for number, size in enumerate(sizes):
        at = t.record(
            rng.integers(0, 99, size), logprobs=-rng.random(size), parent=at,
            prompt_ids=t.path_ids(at),
        )  # fmt: skip
        if number < len(sizes) - 1:
            at = t.observe(rng.integers(0, 99, 3), parent=at)
    t.rewards[at] = reward
    return t


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.9), (0.9, 0.0)])
def test_the_rows_of_a_step_have_verls_advantages_returns_and_explained_variance(
    verl, tmp_path, gamma, lam
):
    """Values by the critic, rewards from the episodes, over turns; whitened as verl does."""
    make_hf("qwen3").save_pretrained(tmp_path / "hf")
    model = load_value_model(tmp_path / "hf")
    critic = Critic(model, CriticConfig(), TrainerConfig(), like=tmp_path / "hf")
    rng = np.random.default_rng(0)
    turns = [[3, 2], [5], [1, 4, 2], [6, 1]]
    plays = [play(f"p{i}", sizes, float(rng.normal()), rng) for i, sizes in enumerate(turns)]
    groups = [Group(task=Task(id=t.id), trajectories=[t]) for t in plays]
    rows = rows_for_training(groups, GAE(gamma=gamma, lam=lam), critic=critic)
    assert [row.id.split("/")[0] for row in rows] == [t.id for t in plays]

    width = max(len(row) for row in rows)
    rewards, values, mask, advantages, returns = (torch.zeros(4, width) for _ in range(5))
    for i, (row, trajectory) in enumerate(zip(rows, plays, strict=True)):
        inside = torch.from_numpy(row.loss_mask)
        mask[i, : len(row)] = inside.float()
        values[i, : len(row)] = torch.from_numpy(row.columns["values"]).nan_to_num()
        advantages[i, : len(row)] = torch.from_numpy(row.columns["advantages"])
        returns[i, : len(row)] = torch.from_numpy(row.columns["returns"])
        rewards[i, int(inside.nonzero()[-1])] = trajectory.reward
    theirs, their_returns = verl.core_algos.compute_gae_advantage_return(
        rewards, values, mask, gamma, lam
    )
    torch.testing.assert_close(returns, their_returns * mask, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(advantages, theirs * mask, rtol=1e-5, atol=1e-5)

    # verl's metric adds 1e-5 to the variance that it divides by
    inside = mask.bool()
    left, spread = (their_returns - values)[inside].var(), their_returns[inside].var()
    expected = 1 - left / (spread + 1e-5)
    found = explained_variance(values, returns, Layout.padded(inside))
    assert found == pytest.approx(float(expected), abs=1e-4)
