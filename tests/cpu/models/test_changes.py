"""A defect's change of a model: made in any architecture, at widths of real models, and undone."""

import pytest
import torch
from tiny_configs import KINDS, tiny_config

from lockstep.models.changes import changes
from lockstep.models.decoder import Decoder
from lockstep.ops.context import PackedContext


@pytest.mark.parametrize("kind", KINDS)
def test_every_change_is_scored_and_undone(kind):
    model = Decoder(tiny_config(kind, hidden_size=512, intermediate_size=256))
    model.init_weights(std=0.2, seed=0)
    places = torch.arange(12)

    def score():
        with torch.inference_mode():
            return model(places, places, PackedContext.of([12]))

    plain, kinds = score(), set()
    for change in changes(model):
        kinds.add(change.kind)
        with change.made():
            assert score().isfinite().all(), change.text
            assert change.kind != "quantised" or not torch.equal(score(), plain), change.text
        assert torch.equal(score(), plain), change.text
    assert "quantised" in kinds
