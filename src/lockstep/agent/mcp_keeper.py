"""Runs the command of an MCP server, and ends whatever it started, daemons included.

    python -I -S mcp_keeper.py COMMAND...       (started by `lockstep.agent.mcp`, on Linux)

A process that leaves its session and loses its parent becomes a child of this one, and can be found
among its descendants. They are killed at SIGTERM, which comes also when Lockstep is gone.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36
END_SECONDS = 1.5
"""Seconds to find and kill processes that go on starting others; after 2, SIGKILL follows."""


def descendants():
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def reap(options):
    """Takes the exit status of a child. Returns (pid, status); pid -1 if there is no child."""
    try:
        return os.waitpid(-1, options)
    except ChildProcessError:
        return -1, 0


def end_all(*_):
    until = time.monotonic() + END_SECONDS
    while (left := descendants()) and time.monotonic() < until:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it has ended
                continue
        while reap(os.WNOHANG)[0] > 0:
            pass
    os._exit(143)


def main():
    prctl = ctypes.CDLL(None).prctl
    prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, end_all)
    server = subprocess.Popen(sys.argv[1:])
    os.close(0)
    os.close(1)  # its end must be seen
    code = 1
    while (ended := reap(0))[0] > 0:
        if ended[0] == server.pid:
            code = os.waitstatus_to_exitcode(ended[1])
    os._exit(code if code >= 0 else 128 - code)


main()
