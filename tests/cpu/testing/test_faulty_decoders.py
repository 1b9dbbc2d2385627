"""The faults of the trainer's attention: what they get wrong, and nothing beside it."""

import pytest
import torch

from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.ops.context import PackedContext
from lockstep.testing.faults.sides import DetachedSinks, IgnoredSinks

LENGTHS = [90, 40]  # longer than the window of 64


@pytest.fixture
def model():
    return load_checkpoint(locate_model("tiny-gpt-oss"))


def gradients(model, trained):
    """(log-probs, gradient by name) of the rows, by `trained` in the place of `model`."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (sum(LENGTHS),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    predictors = torch.arange(len(ids))[positions > 0] - 1
    model.zero_grad()
    logprobs, _ = trained.score(
        ids, positions, PackedContext.of(LENGTHS),
        predictors_N=predictors, targets_N=ids[predictors + 1],
    )  # fmt: skip
    logprobs.sum().backward()
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters()}


def test_ignored_sinks_give_the_log_probs_of_sinks_that_hold_nothing(model):
    broken, grads = gradients(model, IgnoredSinks().make_trained(model))
    sound, _ = gradients(model, model)
    with torch.no_grad():
        for block in model.layers:
            block.attention.sinks.fill_(-1e4)
    without, expected = gradients(model, model)
    torch.testing.assert_close(broken, without, rtol=0, atol=1e-5)
    assert (broken - sound).abs().max() > 0.05
    for name, grad in grads.items():
        if name.endswith("sinks"):
            assert grad is None
        else:
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-5)


def test_detached_sinks_change_the_sinks_gradient_alone(model):
    sound, expected = gradients(model, model)
    broken, grads = gradients(model, DetachedSinks().make_trained(model))
    assert torch.equal(broken, sound)
    for name, grad in grads.items():
        if name.endswith("sinks"):
            assert grad is None
            assert expected[name].abs().max() > 0
        else:
            assert torch.equal(grad, expected[name])


@pytest.mark.parametrize("fault", [IgnoredSinks(), DetachedSinks()])
def test_the_trainers_parameters_are_the_models_own(model, fault):
    trained = dict(fault.make_trained(model).named_parameters())
    assert all(trained[name] is parameter for name, parameter in model.named_parameters())
