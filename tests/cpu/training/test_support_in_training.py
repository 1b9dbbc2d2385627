"""The support of truncated tokens on its way through packing and the trainer."""

import numpy as np
import pytest
import torch
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import VOCAB, make_rows, make_trainer

from lockstep.errors import AlignmentError, TokenError
from lockstep.objectives.config import Reinforce
from lockstep.ops.context import PackedContext
from lockstep.training.config import DistillConfig, TeacherConfig
from lockstep.training.packing import pack, plan_microbatches, split_updates
from lockstep.training.trainer import Distillation
from lockstep.types import Ragged, Sample


@st.composite
def samples(draw):
    """Rows in which the support of token i of row r is [100 r + i] * (how many it has)."""
    out = []
    for r in range(draw(st.integers(0, 6))):
        sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
        mask = [False, *draw(st.lists(st.booleans(), min_size=11, max_size=11))][: len(sizes)]
        # Rows begin alike, so that packing shares their beginnings.
        ids = np.where(np.arange(len(sizes)) < 3, 0, 100 * r) + np.arange(len(sizes))
        support = [[100 * r + i] * size for i, size in enumerate(sizes)]
        out.append(
            Sample(
                id=f"s{r}/0",
                token_ids=ids.astype(np.int32),
                loss_mask=np.array(mask),
                columns={"turn": (100 * r + np.arange(len(sizes))).astype(np.int32)},
                ragged={"support": Ragged.of(support)},
            )
        )
    return out


@settings(max_examples=1000 if PROOF else 60, deadline=None)
@given(samples(), st.integers(12, 40), st.integers(1, 3))
def test_every_trained_token_keeps_its_own_support(rows, budget, num_updates):
    for part in split_updates(rows, num_updates):
        seen = 0
        for batch in pack(part, plan_microbatches(part, budget)):
            found = batch.ragged["support"]
            places = np.concatenate(batch.places)
            names = batch.columns["turn"].tolist()
            of_row = [part[r].ragged["support"].sizes for r in batch.rows]
            sizes = [of_row[r][p] for r, p in zip(batch.row.tolist(), places, strict=True)]
            assert [ids.tolist() for ids in found] == [
                [name] * size for name, size in zip(names, sizes, strict=True)
            ]
            assert len(batch.support) == len(batch.targets)
            seen += len(found)
        assert seen == sum(s.num_trained for s in part)


def test_rows_with_and_without_a_support_are_not_one_batch():
    rows = make_rows([10, 12])
    rows[1].set("support", Ragged.empty(12))
    with pytest.raises(AlignmentError, match=r"t1/0.*'support'"):
        pack(rows, [[0, 1]])


def with_support(rows, *, size=5, seed=0):
    """Gives each sampled token `size` ids that it could have been, itself among them."""
    rng = np.random.default_rng(seed)
    for row in rows:
        kept = [
            [int(i), *(int(i) + 1 + rng.permutation(VOCAB - 1)[: size - 1]) % VOCAB]
            if trained
            else []
            for i, trained in zip(row.token_ids, row.loss_mask, strict=True)
        ]
        row.set("support", Ragged.of(kept))
    return rows


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_the_trainers_log_probs_are_those_over_the_support(tmp_path, kind):
    trainer = make_trainer(tmp_path, kind)
    trainer.temperature = 0.8
    rows = with_support(make_rows([20, 31, 9]))
    for row, found in zip(rows, trainer.forward(rows, column=None), strict=True):
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        with torch.no_grad():
            hidden = trainer.model(ids, torch.arange(len(ids)), PackedContext.of([len(ids)]))
            logits = trainer.model.logits(hidden)[:-1]
        support = row.ragged["support"].take(np.flatnonzero(row.loss_mask))
        over = torch.full((len(support), VOCAB), -torch.inf)
        for place, kept in enumerate(support):
            chosen = logits[row.loss_mask[1:]][place] / 0.8
            over[place, kept if len(kept) else slice(None)] = chosen[kept] if len(kept) else chosen
        wanted = torch.log_softmax(over, -1).gather(1, ids[row.loss_mask][:, None])[:, 0]
        np.testing.assert_allclose(found[row.loss_mask], wanted, atol=2e-5)


def test_an_update_moves_nothing_where_every_token_was_the_only_choice(tmp_path):
    trainer = make_trainer(tmp_path)
    rows = with_support(make_rows([20, 31, 9]), size=1)
    for row in rows:
        row.set("rollout_logprobs", np.where(row.loss_mask, 0, np.nan).astype(np.float32))
    metrics = trainer.update(rows, Reinforce())
    assert metrics["train/grad_norm"] == 0 and metrics["train/entropy"] == 0
    assert metrics["mismatch/unequal_tokens"] == 0


def test_a_teachers_ids_are_scored_over_the_vocabulary_and_tokens_over_their_support(tmp_path):
    """A listed id outside of a token's support had log-prob -inf, and the loss was NaN."""
    plain, trainer = make_trainer(tmp_path / "a"), make_trainer(tmp_path / "b")
    found, teacher = [], make_trainer(tmp_path / "c", seed=7).model
    for one, rows in ((plain, make_rows([20, 31])), (trainer, with_support(make_rows([20, 31])))):
        config = DistillConfig(teacher=TeacherConfig(model="a"), signal="top_k", top_k=5)
        one.distill = Distillation(config)
        one.list_likely(rows, teacher, top_k=5)
        for row in rows:
            row.columns["advantages"][:] = 0
        found.append(one.update(rows, Reinforce()))
    assert found[1]["train/loss"] == pytest.approx(found[0]["train/loss"], abs=1e-6)
    assert found[1]["train/grad_norm"] == pytest.approx(found[0]["train/grad_norm"], abs=1e-5)
    assert found[0]["train/loss"] > 0.01 and found[1]["train/skipped_updates"] == 0


def test_a_support_of_another_vocabulary_is_named(tmp_path):
    rows = with_support(make_rows([20, 31]))
    entries = [ids.tolist() for ids in rows[1].ragged["support"]]
    entries[-1].append(VOCAB + 7)
    rows[1].set("support", Ragged.of(entries))
    with pytest.raises(TokenError, match=r"60.*id 68.*60"):
        make_trainer(tmp_path).pack(rows)
