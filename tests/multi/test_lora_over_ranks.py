"""An adapter on a model whose own weights two processes share: whole on each, summed over both."""

import numpy as np
import pytest
from lora_ranks import make_adapted, script, work
from processes import assert_close, run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(what one process finds, what each of two finds, where they saved)."""
    directory = tmp_path_factory.mktemp("lora")
    alone = script(make_adapted(directory / "alone"), directory / "alone")
    return alone, run_ranks(work, directory, world=2), directory / "ranks" / "saved"


def test_the_ranks_have_the_adapters_gradient_of_one_process(found):
    alone, ranks, _ = found
    for of_rank in ranks:
        # Sums of some hundred terms in another order.
        assert_close(of_rank["gradients"], alone["gradients"], 2e-5)
        assert of_rank["num_local"] <= 0.55 * alone["num_local"]


def test_the_reference_and_the_update_are_those_of_one_process(found):
    alone, ranks, _ = found
    for of_rank in ranks:
        for left, right in zip(of_rank["reference"], alone["reference"], strict=True):
            np.testing.assert_allclose(left, right, atol=2e-5)
        assert of_rank["metrics"]["train/reference_kl"] > 0
        for name, value in alone["metrics"].items():
            assert of_rank["metrics"][name] == pytest.approx(value, rel=2e-3, abs=2e-5), name


def test_what_the_ranks_saved_goes_on_in_one_process(found, tmp_path):
    _, _, saved = found
    trainer = make_adapted(tmp_path)
    trainer.load(saved)
    assert trainer.version == 1
    assert {p.name for p in (saved / "policy").glob("*.safetensors")} == {
        "adapter_model.safetensors"
    }
