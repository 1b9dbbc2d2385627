"""The Berkeley leaderboard without its package. With it: tests/parity/test_bfcl.py."""

import importlib.util

import pytest

from lockstep.cli import main
from lockstep.envs.bfcl.config import BFCLConfig
from lockstep.errors import ConfigError, MissingExtraError


@pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is not None, reason="it is installed")
def test_the_package_that_is_not_installed_is_named():
    with pytest.raises(MissingExtraError, match=r"lockstep-rl\[bfcl\]"):
        BFCLConfig().check()


def test_a_category_has_a_name_that_is_known():
    with pytest.raises(ConfigError, match=r"Did you mean 'multi_turn_base'"):
        BFCLConfig(category="multi_turn_bas")
    with pytest.raises(ConfigError, match="simple_java' is not supported"):
        BFCLConfig(category="simple_java")
    with pytest.raises(ConfigError, match="skip=-1"):
        BFCLConfig(skip=-1)


def test_training_on_it_is_refused_from_the_command_line(capsys):
    assert main(["train", "instructions", "task=bfcl", "--dry-run"]) != 0
    assert "bfcl" in capsys.readouterr().err
