"""Gradients of the log-prob head that are formed in the forward: when, and that they are the same.

The vocabulary is tiny, so the head is given chunks of a few tokens: with more tokens than a chunk
it would form logits twice, and that is where a known gradient is worth something.
"""

from unittest import mock

import numpy as np
import pytest
import torch
from tiny_training import VOCAB, make_rows, make_trainer, set_rollout
from watched_ops import around_every_op

from lockstep.correction.config import Correction
from lockstep.errors import ContractError
from lockstep.objectives.config import CISPO, DPPO, GSPO, PPOClip, Reinforce
from lockstep.objectives.losses import TokenLoss, make_loss, supervised_loss
from lockstep.ops import head
from lockstep.ops.contract import Fingerprint

LENGTHS = [31, 22, 40]
ON_POLICY = Correction(level="none", anchor="on_policy")


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(head, "CHUNK_BYTES", 16 * VOCAB * 4)


def make_case(tmp_path, **settings):
    """A trainer and rows that its own policy has sampled."""
    trainer = make_trainer(tmp_path, **settings)
    rows = set_rollout(trainer, make_rows(LENGTHS))
    for row in rows:
        row.set("policy_version", np.where(row.loss_mask, trainer.version, -1).astype(np.int32))
    return trainer, rows


def gradients(trainer, rows, loss_fn, **options):
    """(the gradient, how many times logits were formed for it with and without coefficients)."""
    forwards = {True: 0, False: 0}

    def count(op, function, *args, **kwargs):
        if op == "log_probs":
            forwards[kwargs["coefficients"] is not None] += 1
        return function(*args, **kwargs)

    trainer.optimizer.zero_gradients()
    with around_every_op(trainer.model, count):
        trainer.forward_backward(rows, loss_fn, **options)
    found = trainer.optimizer.gradients().values()
    return torch.cat([g.flatten().double() for g in found]), forwards


def agree(left, right):
    # float32: sums over 20 to 60 tokens in another order
    return float((left - right).norm()) < 1e-5 * float(right.norm())


@pytest.mark.parametrize(
    ("objective", "correction"),
    [
        (Reinforce(), None),
        (Reinforce(entropy_coef=0.02), None),
        (Reinforce(aggregate="sequence_mean"), Correction(level="none")),
        (PPOClip(dual_clip=3.0), ON_POLICY),
        (GSPO(), ON_POLICY),
        (CISPO(entropy_coef=0.01), ON_POLICY),
        (DPPO(), ON_POLICY),
    ],
)
def test_a_fixed_gradient_is_formed_in_the_forward_and_is_the_same(
    tmp_path, small_chunks, objective, correction
):
    trainer, rows = make_case(tmp_path)
    options = {"correction": correction, "aggregate": objective.aggregate}
    wanted, forwards = gradients(trainer, rows, make_loss(objective), **options)
    assert forwards == {True: 0, False: 1}
    found, forwards = gradients(trainer, rows, make_loss(objective), is_linear=True, **options)
    assert forwards == {True: 1, False: 0}
    assert agree(found, wanted)


def test_supervised_training_forms_its_gradients_in_the_forward(tmp_path, small_chunks):
    trainer, rows = make_case(tmp_path)
    wanted, _ = gradients(trainer, rows, supervised_loss)
    found, forwards = gradients(trainer, rows, supervised_loss, is_linear=True)
    assert forwards == {True: 1, False: 0} and agree(found, wanted)


def test_update_knows_which_losses_are_fixed(tmp_path, small_chunks):
    cases = [
        (PPOClip(), ON_POLICY, True),
        (Reinforce(), Correction.bypass(), True),
        (PPOClip(), Correction.bypass(), False),  # the ratio is to the sampler
        # weighed by the forward's own log-probs
        (PPOClip(), Correction(level="token", anchor="on_policy"), False),
    ]
    for i, (objective, correction, is_known) in enumerate(cases):
        trainer, rows = make_case(tmp_path / str(i))
        forwards = []

        def note(op, function, *args, forwards=forwards, **kwargs):
            if op == "log_probs":
                forwards.append(kwargs["coefficients"] is not None)
            return function(*args, **kwargs)

        with around_every_op(trainer.model, note):
            trainer.update(rows, objective, correction)
        assert forwards == [is_known], (objective, correction)


@pytest.mark.parametrize("objective", [PPOClip(entropy_coef=0.01), DPPO(), GSPO()])
def test_under_the_contract_the_recorded_log_probs_tell_every_losses_gradient(
    tmp_path, small_chunks, objective
):
    trainer, rows = make_case(tmp_path)
    for row in rows:
        row.set("old_logprobs", row.columns["rollout_logprobs"])
    wanted, _ = gradients(trainer, rows, make_loss(objective))
    trainer.contract = Fingerprint(ops="plain", dtype="float32", device="cpu")
    found, forwards = gradients(trainer, rows, make_loss(objective))
    assert forwards == {True: 1, False: 0} and agree(found, wanted)
    for row in rows:
        row.columns["policy_version"][row.loss_mask] = trainer.version - 1
    _, forwards = gradients(trainer, rows, make_loss(objective))
    assert forwards == {True: 0, False: 1}, "rows of an older version are known of nothing"


def test_a_broken_contract_is_told_as_one_before_anything_is_updated(tmp_path, small_chunks):
    trainer, rows = make_case(tmp_path)
    trainer.contract = Fingerprint(ops="plain", dtype="float32", device="cpu")
    before = [p.detach().clone() for p in trainer.model.parameters()]
    place = int(np.flatnonzero(rows[1].loss_mask)[2])
    rows[1].columns["rollout_logprobs"][place] += 1e-3
    for row in rows:
        row.set("old_logprobs", row.columns["rollout_logprobs"])
    with pytest.raises(ContractError, match=f"token {place} of sample t1/0"):
        trainer.forward_backward(rows, make_loss(PPOClip()))
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_a_loss_that_was_wrongly_called_fixed_has_its_gradient_all_the_same(tmp_path, small_chunks):
    """Its first micro-batch costs a second forward, and no other is tried."""

    def square(tokens):
        return TokenLoss(tokens.logprobs.square() * tokens.column("advantages"))

    trainer, rows = make_case(tmp_path, max_tokens_per_microbatch=60)
    wanted, forwards = gradients(trainer, rows, square)
    assert forwards == {True: 0, False: 2}
    found, forwards = gradients(trainer, rows, square, is_linear=True)
    assert forwards == {True: 1, False: 2}
    assert torch.equal(found, wanted)


def test_a_loss_that_weighs_by_the_entropy_is_found_out(tmp_path, small_chunks):
    def weighed(tokens):
        return TokenLoss(-tokens.entropy.detach() * tokens.logprobs)

    trainer, rows = make_case(tmp_path)
    wanted, _ = gradients(trainer, rows, weighed)
    found, _ = gradients(trainer, rows, weighed, is_linear=True)
    assert torch.equal(found, wanted)


def test_where_logits_are_formed_once_anyway_nothing_is_tried(tmp_path):
    trainer, rows = make_case(tmp_path)
    loss_fn = mock.Mock(side_effect=make_loss(Reinforce()))
    _, forwards = gradients(trainer, rows, loss_fn, is_linear=True)
    assert forwards == {True: 0, False: 1} and loss_fn.call_count == 1


def test_a_frozen_head_under_an_adapter_has_the_same_gradient(tmp_path, small_chunks):
    trainer, rows = make_case(tmp_path, lora={"rank": 2})
    wanted, _ = gradients(trainer, rows, make_loss(Reinforce()))
    found, forwards = gradients(trainer, rows, make_loss(Reinforce()), is_linear=True)
    assert forwards == {True: 1, False: 0} and agree(found, wanted)
