"""The decoder as a model of transformers, spread over two processes by FSDP2."""

import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'lockstep-rl[transformers]'")
pytest.importorskip("peft", reason="pip install peft")

from causal_ranks import WORLD, make_model, script, work
from processes import assert_close, run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(work, tmp_path_factory.mktemp("causal"), world=WORLD, timeout=600)


@pytest.mark.parametrize("has_adapter", [False, True])
def test_log_probs_keep_their_bits_and_gradients_are_those_of_one_process(ranks, has_adapter):
    alone = script(make_model(has_adapter=has_adapter))
    found = [of_rank[has_adapter] for of_rank in ranks]
    assert torch.equal(torch.cat([f["log_probs"] for f in found]), alone["log_probs"])
    for of_rank in found:
        # Sums of some hundred terms in another order.
        assert_close(of_rank["gradients"], alone["gradients"], 2e-5)
        assert of_rank["num_local"] <= 0.55 * alone["num_local"]
        assert "spread over processes" in of_rank["refused"]
