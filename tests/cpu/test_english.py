"""Docstrings, comments, messages and pages stay readable: docs/proof/english.py counts phrases."""

import gc
import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "docs" / "proof" / "english.py"
_spec = importlib.util.spec_from_file_location("english", PATH)
english = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(english)

UNFINISHED = tuple(f"src/lockstep/{room}/" for room in ("doctor", "renderers"))
"""Folders with files above the limit of a file. They count in the total."""


def test_docstrings_comments_and_messages_are_counted_and_code_is_not(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        '"""Whether it runs."""\n'
        "those_of = 1  # the rows, of which one is trained\n"
        'print("weights are those of the sampler", those_of)\n'
    )
    assert [line for line, _ in english.phrases(file)] == [1, 2, 3]
    page = tmp_path / "a.md"
    page.write_text("| those of a table |\n\nEngines, of which one runs.\n```\nthose of\n```\n")
    assert english.phrases(page) == [(3, "of which")]


@pytest.fixture(scope="module")
def counts():
    # CPython 3.11 ends ast.parse with a SystemError if another test's task is collected within it.
    gc.collect()
    return english.counts()


def test_all_files_together_stay_below_the_limit(counts):
    number, lines = (sum(column) for column in zip(*counts.values(), strict=True))
    assert english.share(number, lines) <= english.MAX_PER_1000


def test_no_file_is_above_the_limit_of_a_file(counts):
    above = {
        name: found
        for name, found in counts.items()
        if found[0] > 2 and english.share(*found) > english.MAX_OF_A_FILE
    }
    assert [name for name in above if not name.startswith(UNFINISHED)] == []
