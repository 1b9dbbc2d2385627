"""Ctrl-C within an update: it is made whole, and only then is it interrupted."""

import signal

import pytest
import torch
from tiny_training import assert_same_bits, make_rows, make_trainer, set_rollout, snapshot

from lockstep.objectives.config import Reinforce
from lockstep.objectives.losses import make_loss
from lockstep.training.learner import uninterrupted


@pytest.mark.parametrize("moment", ["first parameters", "after the weights"])
def test_an_interrupt_within_an_optimizer_step_leaves_a_whole_update(
    tmp_path, plain_interrupts, moment
):
    """What a second Ctrl-C does to a run: KeyboardInterrupt wherever Python stands."""
    trainers = [make_trainer(tmp_path / name, dtype=torch.bfloat16) for name in "ab"]
    rows = set_rollout(trainers[0], make_rows([9, 31, 14]))
    for trainer in trainers:
        trainer.forward_backward(rows, make_loss(Reinforce()))
    whole, broken = trainers
    whole.optim_step()

    name = {"first parameters": "_step", "after the weights": "zero_gradients"}[moment]
    method = getattr(broken.optimizer, name)

    def interrupted(*arguments):
        method(*arguments)
        signal.raise_signal(signal.SIGINT)

    setattr(broken.optimizer, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        broken.optim_step()
    assert (broken.version, broken.num_updates) == (1, 1)
    assert_same_bits(snapshot(whole), snapshot(broken))
    broken.save(tmp_path / "saved")
    again = make_trainer(tmp_path / "c", dtype=torch.bfloat16)
    again.load(tmp_path / "saved")
    assert_same_bits(snapshot(whole), snapshot(again))


def test_the_handler_of_before_is_back_and_hears_what_was_held(plain_interrupts):
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler
