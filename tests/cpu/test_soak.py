"""`make soak` in three minutes: some hooks and kills, and that its table of faults names tests."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
from full_counts import PROOF

PATH = Path(__file__).parents[2] / "docs" / "proof" / "soak.py"
_spec = importlib.util.spec_from_file_location("soak", PATH)
soak = importlib.util.module_from_spec(_spec)
sys.modules["soak"] = soak
_spec.loader.exec_module(soak)


@pytest.mark.parametrize("fault", soak.FAULTS)
def test_each_fault_has_tests(fault):
    for named in soak.FAULTS[fault]:
        file, _, test = named.partition("::")
        tree = ast.parse((soak.TESTS / file).read_text())
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        names = {node.name for node in tree.body if isinstance(node, kinds)}
        assert test in names if test else names


@pytest.mark.parametrize("hook", ["harness", *["async_tool", "step", "score"] * PROOF])
def test_nothing_that_a_hook_does_ends_or_hangs_a_run(hook, tmp_path):
    assert soak.of_hook(hook, (), tmp_path / hook) == []


@pytest.mark.parametrize("name", ["head", *["full"] * PROOF])
def test_a_run_goes_on_without_its_console(name, tmp_path):
    assert soak.of_console(name, tmp_path / name) == []


@pytest.mark.parametrize("share", [0.35, *[0.6, 0.95] * PROOF])
def test_a_run_that_is_killed_ends_as_one_that_is_not(share, tmp_path, tmp_path_factory):
    assert soak.of_kill(share, tmp_path_factory.getbasetemp(), tmp_path / "run") == []
