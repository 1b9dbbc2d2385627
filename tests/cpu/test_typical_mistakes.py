"""Sixty lines that users of TRL, verl, prime-rl, hydra, wandb and argparse type, and the hint that
each must be answered with. No model is loaded.
"""

import os
import shlex
import tomllib
from pathlib import Path

import pytest

from lockstep.cli import BAD_INPUT, OK, main

PLAN = tomllib.loads(Path(__file__).with_name("typical_mistakes.toml").read_text())
MISTAKES = [
    *((words, hint, BAD_INPUT) for words, hint in PLAN["mistakes"].items()),
    *((words, hint, OK) for words, hint in PLAN["sound"].items()),
]
"""What is typed after `lockstep`, what the answer must name, and the exit code."""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with two empty runs and a module."""
    monkeypatch.chdir(tmp_path)
    make_place()


def make_place():
    for name in ("a", "b"):
        os.makedirs(f"runs/{name}")
        for file in ("config.json", "environment.json"):
            Path(f"runs/{name}/{file}").write_text("{}")
    Path("mine.py").touch()


def answer(words):
    """The exit code of `lockstep WORDS`, that of argparse too."""
    try:
        return main(shlex.split(words))
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(("words", "hint", "code"), MISTAKES, ids=lambda value: str(value))
def test_a_typical_mistake_is_answered_with_the_right_name(place, capsys, words, hint, code):
    found = answer(words)
    captured = capsys.readouterr()
    said = " ".join((captured.out + captured.err).split())
    assert "Traceback" not in said
    assert hint in said
    assert found == code
    assert sorted(os.listdir("runs")) == ["a", "b"]


def test_there_are_sixty_mistakes():
    assert len(MISTAKES) == 60 == len({words for words, _, _ in MISTAKES})
