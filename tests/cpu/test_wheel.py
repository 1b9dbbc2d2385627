"""The package as it is published: an sdist, the wheel built from it, and what runs from the wheel.

The wheel is unpacked into a folder of its own, in front of the checkout on Python's path; the
packages that it needs are this environment's. `make test-wheel` installs it into an empty one.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "pyproject.toml", "README.md", "LICENSE")
pytestmark = pytest.mark.skipif(find_spec("build") is None, reason="pip install build")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the sdist and the wheel that is built from it."""
    place = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(ROOT / name, place / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, place / name)
    words = ["-m", "build", "--no-isolation", "--outdir", str(place / "dist"), str(place)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return place / "dist"


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The folder that the wheel is unpacked to."""
    place = tmp_path_factory.mktemp("site")
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    return place


@pytest.fixture
def run(installed, tmp_path):
    """Runs `python ...` on the wheel, outside of the checkout."""

    def run(*words):
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_wheel_and_sdist_hold_every_file_of_the_package(built, installed):
    wanted = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "lockstep").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = {path.relative_to(installed).as_posix() for path in installed.rglob("*")}
    assert wanted - found == set()
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in wanted} <= names
    assert {"README.md", "LICENSE", "pyproject.toml"} <= names


def test_the_metadata_say_who_can_use_it(installed):
    (info,) = installed.glob("*.dist-info")
    text = (info / "METADATA").read_text()
    assert "Requires-Python: >=3.11" in text and "License-Expression: Apache-2.0" in text
    assert "Classifier: Programming Language :: Python :: 3.11" in text
    assert "Description-Content-Type: text/markdown" in text
    assert "lockstep = lockstep.cli:command" in (info / "entry_points.txt").read_text()


def test_the_quickstart_its_report_and_the_doctor_run_from_the_wheel(run, installed, tmp_path):
    code, out, _ = run("-c", "import lockstep; print(lockstep.__file__)")
    assert code == 0 and Path(out.strip()).is_relative_to(installed)
    small = ["steps=1", "groups_per_step=2", "group_size=2", "evaluation.num_tasks=2"]
    words = ["-m", "lockstep.cli", "train", "quickstart", *small, "out=run"]
    code, _, errors = run(*words)
    assert code == 0, errors
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert run("-m", "lockstep.cli", "doctor", "run")[0] == 0
    assert run("-m", "lockstep.cli", "doctor", "example")[0] == 1


def test_no_message_names_a_file_that_the_wheel_lacks():
    """Docstrings may: their reader has the sources."""
    named = re.compile(r"\b(?:docs|examples|tests|benchmarks)/[\w/-]+\.(?:md|py)\b")
    found = []
    for path in (ROOT / "src" / "lockstep").rglob("*.py"):
        tree = ast.parse(path.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            f"{path.name}:{node.lineno}: {node.value:.80}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if id(node) not in prose and named.search(node.value)
        ]
    assert found == []
