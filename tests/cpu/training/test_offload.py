"""AdamW's state in the host's memory."""

import dataclasses

import pytest
import torch
from tiny_training import assert_same_bits, make_trainer

from lockstep.errors import ConfigError
from lockstep.training.config import TrainerConfig
from lockstep.training.optimizer import Optimizer


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_in_another_place_gives_the_same_bits(tmp_path, dtype):
    """Both places are the CPU here: what is tested is that gradients, masters and weights find each
    other; copies between devices are not."""
    model = make_trainer(tmp_path, "gpt_oss", dtype=dtype).model
    config = TrainerConfig(lr=1e-2, weight_decay=0.1)
    found = []
    for offload in ("none", "optimizer"):
        parameters = {
            n: torch.nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()
        }
        optimizer = Optimizer(parameters.items(), dataclasses.replace(config, offload=offload))
        for update in range(3):
            for _ in range(2):  # micro-batches
                for name, parameter in parameters.items():
                    parameter.grad = randn(*parameter.shape, seed=update + len(name)).to(dtype)
                optimizer.collect_gradients()
            norm = float(optimizer.gradient_norm())
            optimizer.step(lr=1e-2, gradient_scale=1 / norm)
        state = {t.name: t.view() for t in optimizer.state_tensors()}
        found.append({n: p.detach() for n, p in parameters.items()} | state)
        is_apart = [optimizer.masters[n] is not p for n, p in parameters.items()]
        assert all(is_apart) == (offload == "optimizer" or dtype == torch.bfloat16)
    assert_same_bits(*found)


def test_masters_elsewhere_follow_weights_that_are_loaded(tmp_path):
    model = make_trainer(tmp_path).model
    optimizer = Optimizer(model.named_parameters(), TrainerConfig(offload="optimizer"))
    with torch.no_grad():
        model.final_norm.fill_(3.0)
    optimizer.read_parameters()
    assert (optimizer.masters["final_norm"] == 3.0).all()


def test_offloading_what_is_on_the_cpu_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"offload=optimizer.*CPU"):
        make_trainer(tmp_path, offload="optimizer")
