"""What the shells complete, asked of the shells themselves where they are installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import OK, main

CASES = {
    "tr": ["train"],
    "train quickstart-": ["quickstart-ppo"],
    "train quickstart trainer.sched": ["trainer.schedule="],
    "train quickstart objective=d": ["objective=dppo"],
    "train quickstart trainer.partial_routes=": [
        "trainer.partial_routes=true",
        "trainer.partial_routes=false",
    ],
    "sft --dr": ["--dry-run"],
    "train no-such": [],
}
SHELLS = {
    "bash": 'COMP_LINE="$1" COMP_POINT=${#1}; _lockstep; printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": 'words=(${=1}); [[ $1 == *" " ]] && words+=(""); CURRENT=$#words; _lockstep',
    "fish": 'complete -C "$argv[1]"',
}


@pytest.mark.parametrize("words", CASES)
def test_the_last_word_is_completed(words, capsys):
    assert main(["completion", "bash", *words.split()]) == OK
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines() if line] == CASES[words]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_asks_and_shows_what_it_is_told(shell, tmp_path):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    program = tmp_path / "lockstep"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lockstep.cli "$@"\n')
    program.chmod(0o755)
    root = str(Path(__file__).parents[2] / "src")
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": root,
        "HOME": str(tmp_path),
    }
    begin = {
        "bash": 'eval "$(lockstep completion bash)"',
        "zsh": 'compdef() { : }; compadd() { print -l -- "${@[5,-1]}" }; _files() { : }; '
        'eval "$(lockstep completion zsh)"',
        "fish": "lockstep completion fish | source",
    }[shell]
    no_settings = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    for words in ("tr", "train quickstart trainer.sched", "train quickstart objective=d"):
        arguments = [f"lockstep {words}"] if shell == "fish" else ["_", f"lockstep {words}"]
        done = subprocess.run(
            [shell, *no_settings, "-c", f"{begin}; {SHELLS[shell]}", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        expected = CASES[words][0]
        if shell == "bash":  # which replaces what follows the =
            expected = expected.removeprefix("objective=")
        assert done.stdout.split() == [expected], done.stderr
