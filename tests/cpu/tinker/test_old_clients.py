"""Programs of older versions of the client, in processes of their own.

They run where LOCKSTEP_TINKER names the Pythons, divided by `:`, of environments that have one:

    python -m venv .venv-tinker-0.24.1
    .venv-tinker-0.24.1/bin/python -m pip install "tinker==0.24.1"
"""

import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from test_recovery import Killed

from lockstep.tinker.server import ROUTES

PYTHONS = list(filter(None, os.environ.get("LOCKSTEP_TINKER", "").split(os.pathsep)))
PROGRAM = Path(__file__).with_name("client_program.py")
SCENARIOS = (
    "trains_saves_samples_and_resumes",
    "samples",
    "refusals_raise_and_the_next_request_goes_through",
    "a_loss_runs_in_the_client",
    "rows_that_were_drawn_are_known_by_their_content",
)

pytestmark = pytest.mark.skipif(
    not PYTHONS, reason="LOCKSTEP_TINKER names no Python with an older tinker client"
)
with_each_client = pytest.mark.parametrize(
    "python", PYTHONS, ids=[Path(each).parents[1].name for each in PYTHONS]
)


def run(python, url, scenario):
    # Packages of this environment come after the client's own: the client finds torch there.
    environment = {**os.environ, "TORCH_PATH": str(Path(torch.__file__).parents[1])}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, PROGRAM, url, scenario],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("done")


@with_each_client
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_program_of_an_older_client_runs(served, python, scenario):
    run(python, served.url, scenario)


@with_each_client
@pytest.mark.parametrize("flags", [{}, {"proto_compress_fwdbwd": True}])
def test_chunks_are_executed_in_order(serve, python, flags, monkeypatch):
    own = ROUTES["served"]["POST client/config"]
    monkeypatch.setitem(ROUTES["served"], "POST client/config", own | flags)
    served = serve()
    run(python, served.url, "chunks_come_in_any_order")
    done = [each for each in served.backend.executed if each[0] != "create"]
    assert done == [*(("backward", first) for first in (11, 12, 13)), ("optim", 0.5)]


@with_each_client
def test_a_slow_and_busy_server_is_asked_again(serve, python):
    served = serve(hold_seconds=0.05, max_pending_samples=1)
    served.backend.seconds = 0.2
    run(python, served.url, "samples")


@with_each_client
def test_a_program_goes_on_after_kill_9(tmp_path, python):
    with Killed(tmp_path / "store", 0.05) as server:
        over = threading.Event()

        def disturb():
            while not over.wait(0.7):
                server.kill()
                server.start()

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            run(python, server.url, "trains_saves_samples_and_resumes")
        finally:
            over.set()
            thread.join()
