"""Decoders that differ from a model in one thing."""

import sys
from pathlib import Path

import numpy as np
import torch

from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.models.variants import without_sinks, without_windows
from lockstep.ops.context import PackedContext

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "proof"))

from doctor_faults import with_dropout

IDS = torch.from_numpy(np.random.default_rng(0).integers(0, 200, 96))


def hidden(model):
    context = PackedContext.of([len(IDS)])
    with torch.no_grad():
        return model(IDS, torch.arange(len(IDS)), context)


def test_a_variant_shares_the_parameters_and_computes_something_else():
    model = load_checkpoint(locate_model("tiny-gpt-oss"))
    for twin in (without_sinks(model), without_windows(model), with_dropout(model, 0.1, seed=0)):
        assert all(a is b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        assert not torch.equal(hidden(twin), hidden(model))


def test_without_windows_nothing_changes_within_the_window():
    model = load_checkpoint(locate_model("tiny-gpt-oss"))
    window = min(w for w in model.config.windows if w)
    twin = without_windows(model)
    assert torch.allclose(hidden(twin)[:window], hidden(model)[:window], atol=1e-5)


def test_dropout_is_another_one_in_each_forward_and_repeats_with_its_seed():
    model = load_checkpoint(locate_model("tiny-qwen3"))
    twin, again = (with_dropout(model, 0.1, seed=3) for _ in range(2))
    first, second = hidden(twin), hidden(twin)
    assert not torch.equal(first, second)
    assert torch.equal(first, hidden(again))
