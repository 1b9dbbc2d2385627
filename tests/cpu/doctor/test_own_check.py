"""A check with its cause from one file outside of the package: that of docs/doctor-causes.md."""

import json
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "doctor-causes.md"


def diagnosed(tmp_path: Path, *options: str) -> dict:
    section = PAGE.read_text().split("## A check of your own")[1]
    (tmp_path / "my_checks.py").write_text(re.search(r"```python\n(.*?)```", section, re.S)[1])
    plugin = str(tmp_path / "my_checks.py")
    command = [sys.executable, "-m", "lockstep.cli", "doctor", "example", "--json"]
    done = subprocess.run(
        [*command, "--plugin", plugin, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    return json.loads(done.stdout)


def test_a_check_in_one_file_names_its_cause_and_repairs_it(tmp_path):
    found = diagnosed(tmp_path)
    own = next(cause for cause in found["causes"] if cause["cause"] == "long_rows")
    assert own["remedy"] == "Lower max_tokens." and own["share_k2"] > 0


def test_it_can_be_made_alone(tmp_path):
    found = diagnosed(tmp_path, "--only", "tokens/long_rows")
    assert [cause["cause"] for cause in found["causes"]] == ["long_rows"]


def test_a_check_whose_cause_is_not_known_is_refused(tmp_path):
    text = """
from lockstep.doctor.checks.base import Check

class Nameless(Check):
    name, claim, cause = "tokens/nameless", "nothing", "nameless"
"""
    (tmp_path / "nameless.py").write_text(text)
    plugin = str(tmp_path / "nameless.py")
    command = [sys.executable, "-m", "lockstep.cli", "doctor", "example", "--plugin", plugin]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "names the cause 'nameless', which is not known. Add it first" in " ".join(
        done.stderr.split()
    )
