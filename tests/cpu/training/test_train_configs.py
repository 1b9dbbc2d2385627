"""Settings are read by the command line before torch is."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["lockstep.training.config", "lockstep.objectives.config"])
def test_settings_import_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
