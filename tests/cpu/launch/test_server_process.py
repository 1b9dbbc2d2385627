"""A server that the run starts is gone when the run is, in whichever way it went."""

import os
import signal
import subprocess
import sys
import time

from running import is_running

from lockstep.launch.workers import ServerProcess

# A server with a process of its own, as vLLM has; it writes both ids once both run.
SERVER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def ids_in(log):
    wait_for(lambda: log.exists() and len(log.read_text().split()) >= 2)
    return [int(i) for i in log.read_text().split()[:2]]


def test_a_stopped_server_takes_its_own_processes_with_it(tmp_path):
    server = ServerProcess([sys.executable, "-c", SERVER], log=tmp_path / "server.log")
    ids = ids_in(server.log)
    assert server.is_running and server.why_ended() == ""
    server.stop()
    server.stop()
    assert not server.is_running
    wait_for(lambda: not any(map(is_running, ids)))


def test_a_server_ends_when_the_process_that_asked_for_it_is_killed(tmp_path):
    log = tmp_path / "server.log"
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from lockstep.launch.workers import ServerProcess\n"
        f"ServerProcess([sys.executable, '-c', {SERVER!r}], log=Path({str(log)!r}))\n"
        "time.sleep(600)\n"
    )
    asking = subprocess.Popen([sys.executable, "-c", script])
    try:
        ids = ids_in(log)
        assert all(map(is_running, ids))
    finally:
        os.kill(asking.pid, signal.SIGKILL)
        asking.wait()
    wait_for(lambda: not any(map(is_running, ids)))


def test_a_server_that_ends_says_why_with_its_log(tmp_path):
    code = "import sys; print('no such model'); sys.exit(3)"
    server = ServerProcess([sys.executable, "-c", code], log=tmp_path / "server.log")
    reason = server.why_ended(20.0)
    assert "no such model" in reason
    assert "the server ended with exit code 3" in reason
    assert str(tmp_path / "server.log") in reason
