"""Replayed routes: the identity where they are the trainer's own, other experts where they are not,
and an error wherever they have a gap."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import assert_same_bits, make_rows, make_trainer, set_rollout

from lockstep.errors import AlignmentError, ConfigError, RoutingReplayError
from lockstep.models.moe import Routing
from lockstep.objectives.config import PPOClip
from lockstep.objectives.losses import make_loss
from lockstep.ops.context import PackedContext
from lockstep.training.forest import share_beginnings
from lockstep.training.packing import pack
from lockstep.types import COLUMNS, UNKNOWN_EXPERT

LENGTHS = [9, 30, 14, 22]
LOSS = make_loss(PPOClip())


def chosen(model, row):
    """[T, layers, active] of one row, by a forward of its own."""
    ids, routing = torch.from_numpy(row.token_ids).long(), Routing()
    with torch.no_grad():
        model(ids, torch.arange(len(ids)), PackedContext.of([len(ids)]), routing)
    return routing.stacked().numpy().astype(np.int16)


def set_routes(trainer, rows, *, shift=0):
    """The routes of the trainer's own router, or other ones; the last position has none."""
    for row in rows:
        routes = (chosen(trainer.model, row) + shift) % trainer.model.config.num_experts
        routes[-1] = UNKNOWN_EXPERT
        row.set("routed_experts", routes.astype(np.int16))
    return rows


def make_routed(tmp_path, *, replay="rollout", shift=0, **config):
    trainer = make_trainer(
        tmp_path, "gpt_oss", routing_replay=replay, max_tokens_per_microbatch=40, **config
    )
    rows = set_rollout(make_trainer(tmp_path, "gpt_oss"), make_rows(LENGTHS))
    return trainer, set_routes(trainer, rows, shift=shift)


def gradients(trainer, rows):
    trainer.optimizer.zero_gradients()
    metrics = trainer.forward_backward(rows, LOSS, column="logprobs")
    found = {n: g.clone() for n, g in trainer.optimizer.gradients().items()}
    return metrics, found, np.concatenate([r.columns["logprobs"] for r in rows])


def test_replay_of_the_routers_own_choice_changes_no_bit(tmp_path):
    off, rows = make_routed(tmp_path, replay="none")
    off.forward(rows)
    without = gradients(off, rows)
    on, _ = make_routed(tmp_path)
    replayed = gradients(on, rows)
    assert without[0].items() <= replayed[0].items()
    assert replayed[0]["routing/replayed_share"] == 1
    assert replayed[0]["routing/differing_share"] == 0
    assert without[2].tobytes() == replayed[2].tobytes()
    assert_same_bits(without[1], replayed[1])
    routers = [g for n, g in replayed[1].items() if "router" in n]
    assert routers and all(g.abs().max() > 0 for g in routers)


def test_other_routes_change_the_loss_and_still_train_the_routers(tmp_path):
    trainer, rows = make_routed(tmp_path)
    trainer.forward(rows)
    own = gradients(trainer, rows)
    other = gradients(trainer, set_routes(trainer, rows, shift=1))
    assert other[0]["routing/differing_share"] > 0.5
    assert other[0]["train/loss"] != own[0]["train/loss"]
    for name, gradient in other[1].items():
        if "router" in name:
            assert gradient.abs().max() > 0
            assert not torch.equal(gradient, own[1][name])


def test_every_forward_replays(tmp_path):
    trainer, rows = make_routed(tmp_path, shift=1)
    expected = trainer.forward(rows, column="old_logprobs")
    _, _, found = gradients(trainer, rows)
    assert np.concatenate(expected).tobytes() == found.tobytes()
    report = trainer.measure(rows, column="reference_logprobs")
    measured = np.concatenate([r.columns["reference_logprobs"] for r in rows])
    assert measured.tobytes() == found.tobytes()
    assert report.to_metrics("mismatch")["mismatch/k3"] > 0
    alone = make_trainer(tmp_path, "gpt_oss").forward(rows, column=None)
    assert not np.allclose(np.concatenate(alone), found, equal_nan=True)
    # Another policy has a router of its own.
    assert_equal_rows(trainer.forward(rows, column=None, model=trainer.model), alone)


def assert_equal_rows(left, right):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_layers_that_are_run_again_find_the_same_routes(tmp_path):
    trainer, rows = make_routed(tmp_path, shift=1)
    trainer.forward(rows)
    without = gradients(trainer, rows)
    again, _ = make_routed(tmp_path, recompute="blocks")
    checkpointed = gradients(again, rows)
    assert again.model.recomputes_blocks and without[0] == checkpointed[0]
    assert_same_bits(without[1], checkpointed[1])


# -- packing --------------------------------------------------------------------------------------


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 1)), min_size=1, max_size=6),
        min_size=1,
        max_size=10,
    )
)
@settings(max_examples=200, deadline=None)
def test_a_token_is_shared_only_where_ids_and_routes_agree(rows):
    ids = [np.array([i for i, _ in r], np.int32) for r in rows]
    routes = [np.array([[[e, e + 7]] for _, e in r], np.int16) for r in rows]
    index, distinct, positions = share_beginnings(ids, routes)
    beginnings = {tuple(r[: n + 1]) for r in rows for n in range(len(r))}
    assert len(distinct) == len(positions) == len(beginnings)
    for a, at in zip(rows, index, strict=True):
        for b, bt in zip(rows, index, strict=True):
            for n in range(min(len(a), len(b))):
                assert (at[n] == bt[n]) == (a[: n + 1] == b[: n + 1])


def test_rows_with_one_prompt_share_it_until_their_routes_part(tmp_path):
    trainer, (row, *_) = make_routed(tmp_path)
    twin, other = (make_rows(LENGTHS)[0] for _ in range(2))
    for each in (twin, other):
        for name, column in row.columns.items():
            each.set(name, column.copy())
    other.columns["routed_experts"][2] = other.columns["routed_experts"][2, :, ::-1]
    (batch,) = trainer.pack([row, twin])
    assert len(batch.ids) == len(row) - 1
    (batch,) = trainer.pack([row, other])
    assert len(batch.ids) == 2 * (len(row) - 1) - 2
    for sample, fed in zip([row, other], batch.inputs, strict=True):
        assert (batch.ids[fed].numpy() == sample.token_ids[:-1]).all()
        assert (batch.routes[fed].numpy() == sample.columns["routed_experts"][:-1]).all()
    both = np.concatenate(trainer.forward([row, other], column=None))
    apart = [trainer.forward([r], column=None)[0] for r in (row, other)]
    np.testing.assert_allclose(both, np.concatenate(apart), atol=1e-5)


def test_routes_are_no_column_of_trained_tokens(tmp_path):
    _, rows = make_routed(tmp_path)
    del rows[1].columns["routed_experts"]
    (batch, *_) = pack(rows, [[0], [1], [2], [3]])
    assert "routed_experts" not in batch.columns and batch.routes is None
    assert all(COLUMNS[n].fill == UNKNOWN_EXPERT for n in COLUMNS if COLUMNS[n].is_of_inputs)


def test_a_column_whose_shape_is_the_models_is_checked_in_its_number_of_dims(tmp_path):
    (row,) = make_rows([8])
    row.set("routed_experts", np.zeros((8, 5, 3), np.int16))
    for wrong in (np.zeros((8, 5), np.int16), np.zeros((7, 5, 3), np.int16), np.zeros((8, 5, 3))):
        with pytest.raises(AlignmentError, match=r"int16 \[8.*active\]"):
            row.set("routed_experts", wrong)


# -- gaps -----------------------------------------------------------------------------------------


def test_rows_without_routes_are_allowed_only_where_that_is_declared(tmp_path):
    trainer, rows = make_routed(tmp_path)
    del rows[2].columns["routed_experts"]
    with pytest.raises(RoutingReplayError, match=r"sample t2/0.*\b0\b.*13"):
        trainer.forward(rows)
    trainer, _ = make_routed(tmp_path, partial_routes=True, shift=1)
    set_routes(trainer, [r for i, r in enumerate(rows) if i != 2], shift=1)
    rows[1].columns["routed_experts"][5:9] = UNKNOWN_EXPERT
    trainer.forward(rows)
    metrics, *_ = gradients(trainer, rows)
    fed = sum(n - 1 for n in LENGTHS)
    assert metrics["routing/replayed_share"] == pytest.approx((fed - 13 - 4) / fed)
    assert metrics["routing/differing_share"] > 0.5
    own = make_trainer(tmp_path, "gpt_oss").forward([rows[2]], column=None)[0]
    mine = rows[2].columns["logprobs"]
    np.testing.assert_allclose(mine, own, atol=1e-5)


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ([11], "27.*28.*30.*token 11"),
        ([3, 4], r"26.*token 3\b"),
        ([27], "27.*token 27"),
        (range(30), r"\b0\b.*routes\? trainer.partial_routes=true"),
    ],
)
def test_a_gap_is_named_by_its_first_token_with_the_likely_cause(tmp_path, missing, text):
    trainer, rows = make_routed(tmp_path)
    row = rows[1]
    turn = np.full(30, -1, np.int32)
    turn[8:12], turn[20:30] = 0, 1
    row.set("turn", turn)
    row.loss_mask[:] = False
    row.loss_mask[8:12] = row.loss_mask[20:29] = True  # the last token is not trained
    row.columns["routed_experts"][list(missing)] = UNKNOWN_EXPERT
    for r in rows:
        if r is not row:
            r.set("turn", np.full(len(r), -1, np.int32))
    with pytest.raises(RoutingReplayError, match=text):
        trainer.forward_backward(rows, LOSS)


def test_what_follows_the_last_trained_token_needs_no_routes(tmp_path):
    trainer, rows = make_routed(tmp_path)
    rows[0].loss_mask[5:] = False
    rows[0].columns["routed_experts"][4:] = UNKNOWN_EXPERT
    assert trainer.forward(rows)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda r: np.repeat(r, 2, 1), r"\b4\b.*\b2\b.*\b2\b"),
        (lambda r: np.repeat(r, 2, 2), r"\b2\b.*\b4\b.*\b2\b"),
        (lambda r: r + 4 * (r >= 0), r"token 0: layer 0\b.*\d.*0\.\.3"),
        (lambda r: r * 0, r"token 0: layer 0\b.*\[0, 0\]"),
        (lambda r: np.where(np.arange(2) == 1, -1, r), r"token 0: layer 0\b.*-1"),
    ],
)
def test_routes_of_another_model_are_refused(tmp_path, change, text):
    trainer, rows = make_routed(tmp_path)
    rows[3].set("routed_experts", change(rows[3].columns["routed_experts"]).astype(np.int16))
    with pytest.raises(RoutingReplayError, match=f"sample t3/0.*{text}"):
        trainer.forward_backward(rows, LOSS)


def test_settings_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"\(qwen3\)"):
        make_trainer(tmp_path, "qwen3", routing_replay="rollout")
    with pytest.raises(ConfigError, match=r"partial_routes=true.*routing_replay=none"):
        make_trainer(tmp_path, "gpt_oss", partial_routes=True)


# -- recomputed routes ----------------------------------------------------------------------------


def test_recomputed_routes_are_those_before_the_first_update_in_all_of_them(tmp_path):
    trainer, rows = make_routed(tmp_path, replay="recompute", updates_per_batch=2, lr=0.3)
    rows[0].set("old_routed_experts", np.zeros((9, 2, 2), np.int16))  # of an earlier update
    before = [chosen(trainer.model, row) for row in rows]
    metrics = trainer.update(rows, PPOClip())
    for row, routes in zip(rows, before, strict=True):
        assert np.array_equal(row.columns["old_routed_experts"][:-1], routes[:-1])
        assert (row.columns["old_routed_experts"][-1] == UNKNOWN_EXPERT).all()
    assert metrics["routing/replayed_share"] == 1
    assert metrics["routing/differing_share"] > 0, "the second update's router chooses otherwise"
    assert metrics["tokens/recomputed"] == sum(r.num_trained for r in rows)


def test_one_update_by_recomputed_routes_is_the_update_without(tmp_path):
    on, rows = make_routed(tmp_path, replay="recompute")
    metrics = on.update(rows, PPOClip())
    off, rows = make_routed(tmp_path, replay="none")
    without = off.update(rows, PPOClip())
    for name in ("train/loss", "train/grad_norm"):
        assert metrics[name] == without[name]
    left = {n: p.detach() for n, p in on.model.named_parameters()}
    assert_same_bits(left, {n: p.detach() for n, p in off.model.named_parameters()})


def test_an_update_without_recomputed_routes_says_where_they_come_from(tmp_path):
    trainer, rows = make_routed(tmp_path, replay="recompute")
    with pytest.raises(RoutingReplayError, match=r"Trainer\.update"):
        trainer.forward_backward(rows, LOSS)
    trainer.forward(rows)
    assert trainer.forward_backward(rows, LOSS)["routing/replayed_share"] == 1
