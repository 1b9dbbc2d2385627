"""Runs a command as long as the process that asked for it lives, and ends whatever it started. Uses
the standard library alone: it is started by its file name, without the package.

    python -I -S keeper.py ASKING_PROCESS_ID GRACE_SECONDS COMMAND [ARGUMENT ...]

It is started in a session of its own. On Linux a process that leaves the session and loses its
parent becomes a child of this one, and is found among its descendants. All are killed when this
process gets a signal to end, when the asking process is gone, and when the command fails. A command
that exits with 0 may have left a server of its own behind, which is kept as long as it runs.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

SET_CHILD_SUBREAPER = 36
LOOK_SECONDS = 0.1
"""Interval of the checks that the command and the asking process are alive."""
END_SECONDS = 1.5
"""Longest search for processes that go on starting others."""


def descendants():
    """Ids of the processes that this one has started, and of theirs; none without /proc."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                parents[int(name)] = int(parent)
    found = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def main(asking, grace_seconds, command):
    ends = []
    signal.signal(signal.SIGTERM, lambda *_: ends.append(True))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(command)
    os.close(0)
    os.close(1)  # its end must be seen
    status = None

    def goes_on():
        """Takes the status of a child that has ended, or waits a little. False if the command has
        failed, or no child is left."""
        nonlocal status
        try:
            pid, found = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == server.pid:
            status = found
        elif pid == 0:
            time.sleep(LOOK_SECONDS)
        return not status

    while goes_on() and not ends and os.getppid() == asking:
        pass
    if status is None:
        os.kill(server.pid, signal.SIGTERM)  # it tells its own processes
        until = time.monotonic() + grace_seconds
        while status is None and time.monotonic() < until:
            goes_on()
    else:
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        print(f"\nlockstep: the server ended with {how}", file=sys.stderr, flush=True)
        time.sleep(LOOK_SECONDS)  # for the last words of its processes
    until = time.monotonic() + END_SECONDS
    while (left := descendants()) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(OSError):  # it has ended
                os.kill(pid, signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)  # itself included: nothing of the session is left


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
