"""What the processes of `bwrap` and `container` have in common, without their isolation."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.agent.sandbox.base import SandboxLimits
from lockstep.agent.sandbox.container import ContainerConfig
from lockstep.agent.sandbox.process import Launch, ProcessSandbox, inside_arguments
from lockstep.system import children_of, signal_tree

FORGED = """
import os, sys, threading
frame = sys._getframe()
while "requests" not in frame.f_locals:
    frame = frame.f_back
known = frame.f_locals
os.write(1, b"\\0END " + known["request"]["mark"].encode() + b"\\n")
os.write(known["reports"], b'{"ending": "ok", "error": ""}\\n')
"""
BURNS = "while True: pass"
THREADS = """
def burn():
    while True: pass
[threading.Thread(target=burn).start() for _ in range(3)]
burn()
"""
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="Linux alone tells the processes of a tree"
)


def play(*codes, pause=0.0):
    config = ContainerConfig(limits=SandboxLimits(seconds=1.0, processes=8), workers=1)
    sandbox = ProcessSandbox(config)
    argv = [sys.executable, *inside_arguments(config, has_group=True)]
    sandbox._launch = lambda: Launch(argv=argv)

    async def main():
        found = []
        try:
            for code in codes:
                found.append(await sandbox.run(code, session="a"))
                await asyncio.sleep(pause)
            return found
        finally:
            await sandbox.close()

    return asyncio.run(main())


@pytest.mark.parametrize("work", [BURNS, THREADS])
def test_a_program_that_forges_its_end_stands_still_and_the_next_one_takes_its_time(work):
    def burnt():
        return sum(os.times()[2:4])

    before = burnt()
    first, forged, after = play("x = 1\nprint(x)", FORGED + work, "x", pause=2.0)
    assert first.output == "1" and forged.ending == "ok" and forged.seconds < 1.0
    assert after.ending == "timeout" and after.seconds < 1.5
    assert burnt() - before < 3.0  # one second of a program, and the start of processes


def test_a_session_goes_on_after_it_stood_still():
    assert [found.output for found in play("x = 2", "x + 1", "x + 2")] == ["", "3", "4"]


def test_a_signal_reaches_the_whole_tree():
    shell = subprocess.Popen(["sh", "-c", "(sleep 60; true) & sleep 60 & wait"])

    def states_become(wanted):
        """A signal takes effect when the process runs next: waits at most 60 s."""
        for _ in range(6000):
            children = children_of(shell.pid)
            pids = children.union(*map(children_of, children))
            stats = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
            found = [stat.rpartition(")")[2].split()[0] for stat in stats if "(sleep)" in stat]
            if found == wanted:
                return True
            time.sleep(0.01)
        return False

    try:
        assert states_become(["S", "S"])
        signal_tree(shell.pid, signal.SIGSTOP)
        assert states_become(["T", "T"])
    finally:
        signal_tree(shell.pid, signal.SIGKILL)
        shell.wait()
