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


@pytest.fixture(scope="module")
def files():
    return size.sizes()


def test_every_file_belongs_to_a_room(files):
    assert sum(size.by_room(files).values()) == sum(files.values())


def test_the_library_does_not_grow(files):
    total = sum(files.values())
    assert total <= size.LIMIT, f"{total} code lines; there may be {size.LIMIT}"
