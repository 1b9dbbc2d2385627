"""The fast profile leaves full counts to `make proof`, and the longest tests to `make test-long`.

    export PYTHONPATH=tests                     chooses the tests anew, from what `make test` runs
    python -m pytest -n 2 --dist loadfile -p full_counts --junitxml=report.xml
    python tests/full_counts.py report.xml

With `-p full_counts` the report has processor time, which does not depend on what else the machine
does: of a test's other seconds, in which it waits, the share WAITING counts. To choose from all
tests, set LOCKSTEP_LONG_TESTS=1 for pytest.

The tests that are left out are in left_out.json:

- Cases of SHORT seconds and more of a test whose cases take MANY seconds together, if each of their
  parameters' values stands in a shorter case that stays: `make test-long` tries all combinations.
- The longest tests, until the others take SECONDS. Of each file the shortest test of LONG seconds
  and more stays, and every page of the docs and every example.
"""

import json
import os
import resource
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

PROOF = os.environ.get("LOCKSTEP_PROOF") == "1"
"""True under `make proof`."""
LONG_TOO = PROOF or os.environ.get("LOCKSTEP_LONG_TESTS") == "1"
"""True where the longest tests run too: under `make test-long` with the fast profile's counts."""

FILE = Path(__file__).with_name("left_out.json")
LEFT_OUT: dict[str, list[str]] = json.loads(FILE.read_text())
"""File -> its tests that the fast profile leaves out."""

SHORT = 0.5
MANY = 1.0
LONG = 4.0
SECONDS = 1200.0
"""Of work in the fast profile, on the machine that made the report."""
PAGES = ("cpu/test_docs.py", "cpu/test_examples.py")
WAITING = 0.2

_counted = 0.0  # processor seconds of this process and its children, up to the last report


def _used() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def pytest_collection_finish():
    """Of `-p full_counts`, as the next: imports belong to no test."""
    global _counted
    _counted = _used()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Durations in processor time."""
    global _counted
    report = yield
    before, _counted = _counted, _used()
    working = _counted - before
    report.duration = working + WAITING * max(0.0, report.duration - working)
    return report


def choose(report: str) -> dict[str, list[str]]:
    """As LEFT_OUT. A test that the report has skipped stays where it is."""
    left = {file: set(names) for file, names in LEFT_OUT.items()}
    tests: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].removeprefix("tests.").replace(".", "/") + ".py"
        name = case.attrib["name"]
        if case.find("skipped") is None:
            left.get(file, set()).discard(name)
            test = name.partition("[")[0]
            tests.setdefault((file, test), []).append((float(case.attrib["time"]), name))

    taken: list[tuple[float, str, str]] = []
    for (file, _), cases in tests.items():
        seen: set[tuple[int, str]] = set()
        is_long = sum(seconds for seconds, _ in cases) >= MANY
        for seconds, name in sorted(cases):
            values = set(enumerate(name.partition("[")[2].removesuffix("]").split("-")))
            if is_long and seconds >= SHORT and values <= seen:
                left.setdefault(file, set()).add(name)
            else:
                taken.append((seconds, file, name))
            seen |= values

    kept: dict[str, str] = {}
    for seconds, file, name in sorted(taken):
        if seconds >= LONG:
            kept.setdefault(file, name)
    rest = sum(seconds for seconds, _, _ in taken)
    for seconds, file, name in sorted(taken, reverse=True):
        if rest <= SECONDS:
            break
        if file not in PAGES and kept.get(file) != name:
            left.setdefault(file, set()).add(name)
            rest -= seconds
    return {file: sorted(names) for file, names in sorted(left.items()) if names}


if __name__ == "__main__":
    FILE.write_text(json.dumps(choose(sys.argv[1]), indent=1) + "\n")
