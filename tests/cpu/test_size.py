"""The library stays small: its code lines are counted by docs/proof/size.py."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "docs" / "proof" / "size.py"
_spec = importlib.util.spec_from_file_location("size", PATH)
size = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(size)


def test_blanks_comments_and_docstrings_are_no_code():
    lines = ['"""A file."""', "", "# a comment", 'x = """two', 'lines"""  # code', "class A:"]
    lines += ["    y: int", '    """A field."""', ""]
    assert size.code_lines("\n".join(lines)) == 4


def test_every_file_belongs_to_a_room():
    files = size.sizes()
    assert sum(size.by_room(files).values()) == sum(files.values())


# The house is being made smaller; strict once it holds.
@pytest.mark.xfail(strict=False, reason="the limit is not reached yet")
def test_the_library_is_at_most_45000_lines_of_code():
    assert sum(size.sizes().values()) <= size.LIMIT
