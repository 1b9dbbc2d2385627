"""The examples in the docstrings of everything that a token passes through, run as they stand."""

import doctest
import importlib

import pytest

MODULES = (
    "types", "training.rows", "training.packing", "training.expert_load",
    "correction.layout", "correction.metrics", "correction.weighing", "correction.averaging",
    "correction.kl", "correction.config", "objectives.advantages", "objectives.aggregation",
    "objectives.losses", "objectives.token_advantages",
)  # fmt: skip
CONTAINERS = {
    "types": ("Delta", "Segment", "Trajectory", "Sample", "Ragged"),
    "training.packing": ("PackedBatch",),
    "objectives.losses": ("TokenBatch", "TokenLoss"),
    "correction.weighing": ("Corrected",),
    "correction.metrics": ("MismatchReport",),
    "training.rows": ("rows_for_training",),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_print_what_they_say(name):
    found = doctest.testmod(importlib.import_module(f"lockstep.{name}"))
    assert found.attempted and not found.failed


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_of_tokens_has_an_example(name):
    module = importlib.import_module(f"lockstep.{name}")
    for container in CONTAINERS[name]:
        assert ">>> " in getattr(module, container).__doc__, container
