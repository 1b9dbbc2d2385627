"""The fast profile leaves full counts and the longest tests to `make proof`.

    python tests/full_counts.py report.xml      chooses the tests anew, from pytest's --junitxml

The tests that are left out are in left_to_proof.json: the longest ones, until the others take SHARE
of the time of all. Of each file the shortest test of LONG seconds and more stays, and every page of
the docs.
"""

import json
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

PROOF = os.environ.get("LOCKSTEP_PROOF") == "1"
"""True under `make proof`."""

FILE = Path(__file__).with_name("left_to_proof.json")
LEFT_TO_PROOF: dict[str, list[str]] = json.loads(FILE.read_text())
"""File -> its tests that `make proof` alone runs."""

SHARE = 0.42
LONG = 4.0  # seconds of a busy machine
PAGES = "cpu/test_docs.py"


def choose(report: str) -> dict[str, list[str]]:
    """As LEFT_TO_PROOF. A test that the report has skipped stays where it is."""
    left = {file: set(names) for file, names in LEFT_TO_PROOF.items()}
    taken: list[tuple[float, str, str]] = []
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].removeprefix("tests.").replace(".", "/") + ".py"
        if case.find("skipped") is None:
            left.get(file, set()).discard(case.attrib["name"])
            taken.append((float(case.attrib["time"]), file, case.attrib["name"]))
    kept: dict[str, str] = {}
    for seconds, file, name in sorted(taken):
        if seconds >= LONG:
            kept.setdefault(file, name)
    rest = total = sum(seconds for seconds, _, _ in taken)
    for seconds, file, name in sorted(taken, reverse=True):
        if rest <= SHARE * total:
            break
        if file != PAGES and kept.get(file) != name:
            left.setdefault(file, set()).add(name)
            rest -= seconds
    return {file: sorted(names) for file, names in sorted(left.items()) if names}


if __name__ == "__main__":
    FILE.write_text(json.dumps(choose(sys.argv[1]), indent=1) + "\n")
