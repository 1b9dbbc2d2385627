"""A format from one file outside of the package."""

import json
import subprocess
import sys
from pathlib import Path

from lockstep.cli import main

PLUGIN = '''
import numpy as np

from lockstep.doctor.inputs.assemble import Row, floats_of, ids_of
from lockstep.doctor.inputs.lines import LineDump


class AcmeDump(LineDump):
    """One JSON object per rollout, as acme-rl writes them."""

    format = "acme"
    keys = frozenset({"prompt", "reply", "sampler_lp"})
    why = {"trainer_logprobs": "acme-rl writes them with --trainer-lp."}

    def rows_of(self, line, path, number, where):
        prompt = ids_of(line["prompt"], f"{where}: prompt")
        reply = ids_of(line["reply"], f"{where}: reply")
        size = len(prompt) + len(reply)
        yield Row(
            row_id=f"rollout {number}",
            token_ids=np.concatenate([prompt, reply]),
            loss_mask=np.arange(size) >= len(prompt),
            columns={
                "rollout_logprobs": floats_of(line["sampler_lp"], size, f"{where}: sampler_lp"),
                "rewards": line.get("score"),
            },
        )
'''
LINE = {"prompt": [5, 6], "reply": [7, 8, 9], "sampler_lp": [0, 0, -0.5, 1.5, -1.0], "score": 1}


def diagnosed(tmp_path: Path, *options: str) -> dict:
    dump = tmp_path / "rollouts.jsonl"
    dump.write_text((json.dumps(LINE) + "\n") * 20)
    (tmp_path / "acme_format.py").write_text(PLUGIN)
    plugin = str(tmp_path / "acme_format.py")
    command = [sys.executable, "-m", "lockstep.cli", "doctor", str(dump), "--json"]
    done = subprocess.run(
        [*command, "--plugin", plugin, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    return json.loads(done.stdout)


def test_a_format_in_one_file_is_recognised_and_examined(tmp_path: Path):
    found = diagnosed(tmp_path)

    assert (found["format"], found["trainer"], found["rows"]) == ("acme", "acme", 20)
    assert found["causes"][0]["cause"] == "positive"
    assert "--trainer-lp" in found["not_in_input"]["trainer_logprobs"]


def test_it_can_be_named_too(tmp_path: Path):
    assert diagnosed(tmp_path, "--format", "acme")["format"] == "acme"


def test_a_plugin_that_is_not_there_or_has_a_taken_name_is_refused(tmp_path: Path, capsys):
    (tmp_path / "json.py").write_text("")

    assert main(["doctor", "example", "--plugin", str(tmp_path / "no_such_plugin.py")]) == 2
    assert "there is no such file" in " ".join(capsys.readouterr().err.split())
    assert main(["doctor", "example", "--plugin", str(tmp_path / "json.py")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "another module is called json. Rename the file." in said
    # Child processes inherit the path: a neighbour of a plugin must not shadow a module.
    assert sys.path[-1] == str(tmp_path)
