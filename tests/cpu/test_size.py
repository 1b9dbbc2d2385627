"""Each room stays small: its code lines are counted by docs/proof/size.py."""

import importlib.util
import subprocess
import sys
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


@pytest.fixture(scope="module")
def rooms(files):
    return size.by_room(files)


def test_every_file_counts_in_one_room(files, rooms):
    assert sum(rooms.values()) == sum(files.values())


@pytest.mark.parametrize("room", size.CEILINGS)
def test_a_room_only_shrinks(rooms, room):
    ceiling = size.CEILINGS[room]
    assert rooms[room] <= ceiling, f"{room}: {rooms[room]} code lines, at most {ceiling}"
    assert rooms[room] >= ceiling - size.SLACK, f"{room} has {rooms[room]}: lower its ceiling"


def test_no_setting_is_added_without_one_that_goes():
    """In a process of its own: kinds that other tests register have settings too."""
    words = [sys.executable, size.__file__, "--settings"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert int(said.split()[0]) <= size.SETTINGS
