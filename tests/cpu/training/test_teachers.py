"""Teachers: what they fill in, what the trainer makes of it, and what a server that dies leaves."""

import asyncio

import numpy as np
import pytest
import torch
from tiny_training import make_rows, make_trainer

from lockstep.engines.base import Engine, Scores
from lockstep.errors import AlignmentError, ConfigError, EngineError
from lockstep.objectives.config import PPOClip
from lockstep.training.config import DistillConfig, TeacherConfig
from lockstep.training.teachers import Teachers
from lockstep.types import Group, Task

LENGTHS = (12, 20, 9, 16)
OF_ALL = TeacherConfig(model="a")


def parts(tmp_path, config, *, kind="qwen3", seeds=(7,)):
    """(trainer, teachers, rows, groups): the rows of two sources, in turn."""
    trainer = make_trainer(tmp_path, kind)
    models = {
        name: make_trainer(tmp_path / f"teacher{seed}", kind, seed=seed).model.requires_grad_(False)
        for name, seed in zip(config.teachers, seeds, strict=True)
    }
    teachers = Teachers(config=config, models=models, engines={})
    trainer.distill = teachers.in_update
    rows = make_rows(LENGTHS)
    for at, row in enumerate(rows):
        row.group = at % 2
    groups = [Group(task=Task(id=s, source=s), trajectories=[]) for s in ("sums", "words")]
    trainer.forward(rows, column="rollout_logprobs")
    return trainer, teachers, rows, groups


async def at_once(function):
    return function()


def score(trainer, teachers, rows, groups):
    return asyncio.run(teachers.score(rows, groups, trainer, at_once))


def logprobs_of(trainer, model, row):
    """[T, V] by a plain forward of one row."""
    (batch,) = trainer.pack([row])
    with torch.no_grad():
        hidden = model(batch.ids, batch.positions, batch.context)[batch.predictors]
        return torch.log_softmax(model.logits(hidden).double(), -1), batch.targets


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_a_sampled_token_s_advantage_is_what_the_teacher_gives_it_more(tmp_path, kind):
    config = DistillConfig(teacher=OF_ALL, coef=0.5, reward_coef=2.0)
    trainer, teachers, rows, groups = parts(tmp_path, config, kind=kind)
    before = [row.columns["advantages"].copy() for row in rows]
    metrics = score(trainer, teachers, rows, groups)
    gaps = []
    for row, advantages in zip(rows, before, strict=True):
        mine, targets = logprobs_of(trainer, trainer.model, row)
        theirs, _ = logprobs_of(trainer, teachers.models["distill.teacher"], row)
        gap = (theirs - mine).gather(1, targets[:, None])[:, 0].numpy()
        expected = 2 * advantages[row.loss_mask] + 0.5 * gap
        np.testing.assert_allclose(row.columns["advantages"][row.loss_mask], expected, atol=2e-4)
        assert not row.columns["advantages"][~row.loss_mask].any()
        gaps.append(gap)
    assert metrics["distill/kl"] == pytest.approx(-np.concatenate(gaps).mean(), abs=1e-4)


@pytest.mark.parametrize("order", ["reverse", "forward"])
def test_all_ids_listed_and_the_whole_distribution_train_alike(tmp_path, order):
    """Two ways to one gradient: top_k with every id, and the vocabulary in the training forward."""
    found = {}
    for signal in ("top_k", "full"):
        config = DistillConfig(
            teacher=OF_ALL, signal=signal, top_k=60, divergence=order, reward_coef=0.0
        )
        trainer, teachers, rows, groups = parts(tmp_path, config)
        score(trainer, teachers, rows, groups)
        assert all(not row.columns["advantages"].any() for row in rows)
        metrics = trainer.update(rows, PPOClip())
        found[signal] = metrics["train/teacher_kl"], metrics["train/grad_norm"]
    assert found["full"][1] > 0.01
    assert found["top_k"] == pytest.approx(found["full"], rel=1e-3)
    before = make_trainer(tmp_path)
    kls = [kl(before, teachers.models["distill.teacher"], row, order) for row in rows]
    assert found["full"][0] == pytest.approx(np.concatenate(kls).mean(), rel=1e-3)


def kl(trainer, model, row, order):
    (mine, _), (theirs, _) = (logprobs_of(trainer, m, row) for m in (trainer.model, model))
    of, other = (mine, theirs) if order == "reverse" else (theirs, mine)
    return (of.exp() * (of - other)).sum(-1).numpy()


def test_the_listed_ids_are_the_likeliest_of_the_teacher(tmp_path):
    config = DistillConfig(teacher=OF_ALL, signal="top_k", top_k=4)
    trainer, teachers, rows, groups = parts(tmp_path, config)
    score(trainer, teachers, rows, groups)
    for row in rows:
        theirs, _ = logprobs_of(trainer, teachers.models["distill.teacher"], row)
        values, ids = theirs.topk(4)
        assert row.columns["teacher_ids"][row.loss_mask].tolist() == ids.tolist()
        listed = row.columns["teacher_ids_logprobs"]
        np.testing.assert_allclose(listed[row.loss_mask], values.numpy(), atol=1e-4)
        assert np.isnan(listed[~row.loss_mask]).all()


@pytest.mark.parametrize("top_k", [0, 62])
def test_a_list_is_as_long_as_the_vocabulary_at_most(tmp_path, top_k):
    trainer = make_trainer(tmp_path)
    with pytest.raises(ConfigError, match=f"top_k={top_k}.*61"):
        trainer.list_likely(make_rows((9,)), trainer.model, top_k=top_k)


@pytest.mark.parametrize("signal", ["sampled", "top_k", "full"])
def test_each_source_has_the_teacher_of_its_name(tmp_path, signal):
    config = DistillConfig(
        teacher=OF_ALL, by_source={"words": TeacherConfig(model="b")}, signal=signal, top_k=60
    )
    trainer, teachers, rows, groups = parts(tmp_path, config, seeds=(7, 8))
    score(trainer, teachers, rows, groups)
    metrics = trainer.update(rows, PPOClip())
    trainer = make_trainer(tmp_path)  # as before the update
    gaps = []
    for row in rows:
        name = "distill.by_source.words" if row.group else "distill.teacher"
        gaps.append(kl(trainer, teachers.models[name], row, "reverse"))
        if signal == "sampled":
            mine, targets = logprobs_of(trainer, trainer.model, row)
            theirs, _ = logprobs_of(trainer, teachers.models[name], row)
            expected = (theirs - mine).gather(1, targets[:, None])[:, 0].numpy()
            found = row.columns["advantages"][row.loss_mask]
            np.testing.assert_allclose(found, expected, atol=2e-4)
    if signal != "sampled":
        expected = np.concatenate(gaps).mean()
        assert metrics["train/teacher_kl"] == pytest.approx(expected, rel=1e-3)


def test_a_teacher_without_a_number_is_named_and_not_taken_for_agreement(tmp_path):
    trainer, teachers, rows, groups = parts(tmp_path, DistillConfig(teacher=OF_ALL))
    with torch.no_grad():
        teachers.models["distill.teacher"].embedding.fill_(float("nan"))
    with pytest.raises(AlignmentError, match=r"token 0\b"):
        score(trainer, teachers, rows, groups)


class Server(Engine):
    """Scores by a model; or fails from the third row on."""

    def __init__(self, trainer, model, *, is_failing=False):
        self.trainer, self.model, self.is_failing, self.num_asked = trainer, model, is_failing, 0

    async def score(self, token_ids, *, first=1, **how):
        self.num_asked += 1
        if self.is_failing and self.num_asked > 2:
            raise EngineError("connection refused")
        context = make_rows((len(token_ids),))[0]
        context.token_ids, context.loss_mask = token_ids, np.arange(len(token_ids)) >= first
        logprobs, targets = logprobs_of(self.trainer, self.model, context)
        values = np.full(len(token_ids), np.nan, np.float32)
        values[first:] = logprobs.gather(1, targets[:, None])[:, 0].numpy()
        return Scores(logprobs=values, policy_version=0)


def test_a_server_gives_what_a_model_here_gives_and_says_when_it_is_gone(tmp_path):
    config = DistillConfig(teacher=OF_ALL)
    trainer, teachers, rows, groups = parts(tmp_path, config)
    _, _, again, _ = parts(tmp_path, config)
    score(trainer, teachers, rows, groups)
    model = teachers.models["distill.teacher"]
    served = Teachers(config=config, models={}, engines={"distill.teacher": Server(trainer, model)})
    score(trainer, served, again, groups)
    for row, other in zip(rows, again, strict=True):
        for name in ("advantages", "teacher_logprobs"):
            np.testing.assert_allclose(row.columns[name], other.columns[name], atol=2e-4)
    gone = Server(trainer, model, is_failing=True)
    failing = Teachers(config=config, models={}, engines={"distill.teacher": gone})
    with pytest.raises(EngineError, match=r"distill\.teacher"):
        score(trainer, failing, again, groups)
