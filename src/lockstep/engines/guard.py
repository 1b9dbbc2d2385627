"""Runs a server as long as the process that asked for it lives. Uses the standard library alone: it
is started by its file name, without the package.

    python guard.py ASKING_PROCESS_ID COMMAND [ARGUMENT ...]

It leads a session, so that the server and its processes are one group. The group is killed when
this process gets a signal to end, when the server ends, and when the asking process is gone.
Standard output and error are the server's log.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

LOOK_SECONDS = 0.25
"""Interval of the checks that server and asking process are alive."""

GRACE_SECONDS = 10.0
"""Time that the group has to end by itself."""


def main(asking: int, command: list[str]) -> None:
    is_signalled = False

    def note(*_: object) -> None:
        nonlocal is_signalled
        is_signalled = True

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the asking process's to act on
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while not is_signalled and server.poll() is None and os.getppid() == asking:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=LOOK_SECONDS)
    if server.poll() is None:
        server.terminate()  # it tells its own processes
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=GRACE_SECONDS)
    else:
        code = server.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        print(f"\nlockstep: the server ended with {how}", flush=True)
        time.sleep(LOOK_SECONDS)
    os.killpg(0, signal.SIGKILL)  # itself included: nothing of the session is left


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
