"""The shipped dump: small, read without torch, and both of its defects are found."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from lockstep.doctor.diagnose import diagnose
from lockstep.doctor.inputs.registry import EXAMPLE, open_dump


def test_the_example_is_small_and_has_two_defects_in_two_thirds_of_its_rows():
    dump = open_dump("example")
    (rows,) = dump.chunks()

    assert EXAMPLE.stat().st_size < 200_000 and len(rows) == 96
    assert {"messages", "turn", "policy_version", "trainer_version"} <= dump.has
    trained = [s for s in rows.slices if rows.loss_mask[s].any()]
    mean_gap = np.array([np.nanmean(np.abs(rows.gap[s])) for s in trained])
    assert (mean_gap < 0.05).sum() >= 25 and (mean_gap > 0.3).sum() >= 40


def test_a_file_of_that_name_goes_before_the_example(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("example").write_text('{"token_ids": [1], "loss_mask": [1]}\n')

    assert open_dump("example").path == Path("example")


def test_the_example_is_diagnosed_with_its_own_tokenizer_and_shows_its_defects():
    found = diagnose("example")

    assert found.outcome == "differs" and found.setting.renderer is not None
    assert {cause.name for cause, _ in found.causes} == {"reencoded", "shifted"}
    assert "lockstep doctor example --only" in found.command_for(found.causes[0][1])


def test_the_verdict_on_the_example_needs_no_torch():
    code = (
        "import sys\nfrom lockstep.cli import main\n"
        "assert main(['doctor', 'example', '--json']) == 1\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
