"""Does the doctor name the cause of each fault in a run of Lockstep?

    python docs/proof/doctor.py                              `make proof` runs it: 5 minutes
    python docs/proof/doctor.py --causes shifted reencoded   some causes

doctor.toml has faults of several strengths for each cause. Each is injected into a short quickstart
of its own, and `lockstep.diagnose` reads the run with its model. A verdict is right if the first
cause is the injected one, by the classes of causes.toml. doctor_wild.py asks the same of other
programs, and about pairs of faults and healthy dumps. The result is doctor.json.
"""

from __future__ import annotations

import argparse
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import doctor_faults  # noqa: F401  its faults are known to --fault
from run import configured, save, stamp

from lockstep import diagnose
from lockstep.doctor.causes import CAUSES
from lockstep.doctor.monitor import train
from lockstep.testing.faults import injected, split_faults

FAULTS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
"""Cause -> what follows `--fault` in the command line, weakest first."""
MODEL = "tiny-gpt-oss"
SETTINGS = ("steps=1", "contract=none", "evaluation=none", "trainer.warmup_updates=0")
"""A step of 64 episodes, from which faults cannot be told by the checks of the contract."""


def faulty_run(words: Sequence[str], out: Path) -> None:
    """A quickstart with these settings and faults."""
    settings, faults = split_faults(words)
    with injected(*faults):
        train(configured(*settings), out=out, view="json")


def verdict(cause: str, fault: str, out: Path) -> dict[str, Any]:
    """What the doctor says of a run with the fault."""
    faulty_run([*SETTINGS, f"model={MODEL}", *f"--fault={fault}".split()], out)
    diagnosis = diagnose(out, model="own")
    named = [found.name for found, _ in diagnosis.causes]
    return {
        "cause": cause,
        "fault": fault,
        "k2": diagnosis.examination.gap.means()["k2"],
        "named": named,
        "is_right": bool(named) and CAUSES[named[0]].equivalents == CAUSES[cause].equivalents,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--causes", nargs="+", choices=FAULTS, metavar="CAUSE")
    causes = parser.parse_args().causes or FAULTS
    found: list[dict[str, Any]] = []
    for cause in causes:
        for fault in FAULTS[cause]:
            with tempfile.TemporaryDirectory() as scratch:
                found.append(verdict(cause, fault, Path(scratch) / "run"))
            last = found[-1]
            named = "right" if last["is_right"] else f"named: {last['named'][:1] or 'nothing'}"
            print(f"{cause:22}{fault:60} k2 {last['k2']:8.1e}  {named}", flush=True)
    num_right = sum(row["is_right"] for row in found)
    print(f"{num_right} of {len(found)} are right")
    if causes is FAULTS:
        result = {"right": num_right, "runs": found}
        save("doctor", stamp("python docs/proof/doctor.py") | result)


if __name__ == "__main__":
    main()
