"""The suite of hostile programs on every sandbox that this machine has, under its usual limits.

    python docs/proof/sandbox.py      writes sandbox.json, for docs/sandbox.md

`check_sandbox` raises at the first promise that is broken, so what is written was kept: how each
program ended, how long the longest took, for how long the event loop stood still at most, and by
how much the process grew.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from run import save, stamp

from lockstep.agent.sandbox.base import SandboxConfig, SandboxLimits
from lockstep.agent.sandbox.bubblewrap import BubblewrapConfig
from lockstep.agent.sandbox.container import ContainerConfig
from lockstep.agent.sandbox.monty import MontyConfig
from lockstep.errors import LockstepError
from lockstep.testing.check_sandbox import check_sandbox

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/cpu/agent/sandbox"))
from hostile import HOSTILE

LIMITS = SandboxLimits(seconds=2.0)


def proof_of(config: SandboxConfig) -> dict[str, Any]:
    began = time.monotonic()
    report = asyncio.run(check_sandbox(config.open(), limits=config.limits, programs=HOSTILE))
    return {
        "endings": report.endings,
        "seconds": round(time.monotonic() - began, 1),
        "max_seconds": round(report.max_seconds, 3),
        "max_stall_seconds": round(report.max_stall_seconds, 3),
        "host_growth_mib": round(report.host_growth_mib),
    }


def main() -> None:
    kinds: dict[str, SandboxConfig] = {
        "monty": MontyConfig(limits=LIMITS),
        "bwrap": BubblewrapConfig(limits=LIMITS),
        "container": ContainerConfig(limits=LIMITS),
    }
    found: dict[str, Any] = {}
    for name, config in kinds.items():
        try:
            config.check()
        except LockstepError as error:
            print(f"{name}: left out: {error}")
            continue
        found[name] = proof_of(config)
        print(f"{name}:", {k: v for k, v in found[name].items() if k != "endings"})
    limits = {"seconds": LIMITS.seconds, "memory_mib": LIMITS.memory_mib}
    save("sandbox", {**stamp("python docs/proof/sandbox.py"), "limits": limits, "kinds": found})


if __name__ == "__main__":
    main()
