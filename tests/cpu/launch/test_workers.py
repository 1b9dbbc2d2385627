"""Workers: messages both ways, ends that are told, and none left behind."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
from running import is_running

from lockstep.engines.config import VllmConfig
from lockstep.errors import ConfigError, EngineError, ServerRefusedError
from lockstep.launch.workers import WorkerProcess, portable


@pytest.fixture
def start(tmp_path):
    started = []

    def start(work):
        log = tmp_path / "worker.log"
        started.append(WorkerProcess(f"worker_functions:{work}", name="worker 3", log=log))
        return started[-1]

    yield start
    for worker in started:
        worker.end(seconds=0)


def test_messages_come_back_in_order_and_a_worker_that_is_told_to_stop_ends(start):
    worker = start("echo")
    found, lost, known = [], [], threading.Event()
    worker.listen(found.append, lambda: (lost.append(worker.why_ended()), known.set()))
    for number in range(3):
        worker.send([number, "x" * 1_000_000])
    worker.send(["stop"])
    assert known.wait(60)
    assert [batch[:2] for batch in found] == [[worker.pid, number] for number in range(3)]
    assert "exit code 0" in lost[0]


def test_a_worker_that_fails_is_told_of_with_the_end_of_its_log(start, tmp_path):
    worker = start("fail")
    lost, known = [], threading.Event()
    worker.listen(lambda batch: None, lambda: (lost.append(worker.why_ended()), known.set()))
    assert known.wait(60)
    assert f"worker 3 (pid {worker.pid}) ended with exit code 1" in lost[0]
    assert f"The end of its log {tmp_path / 'worker.log'}" in lost[0]
    assert "  | about to fail" in lost[0] and "  | ValueError: a reason" in lost[0]


def test_a_worker_that_is_killed_is_told_of_at_once(start):
    worker = start("echo")
    worker.send([1])
    worker.receive(seconds=60)
    lost, known = [], threading.Event()
    worker.listen(lambda batch: None, lambda: (lost.append(worker.why_ended()), known.set()))
    os.kill(worker.pid, signal.SIGKILL)
    assert known.wait(60)
    assert "SIGKILL (by hand, or by the system for want of memory)" in lost[0]
    worker.send([2])  # to nobody: no error of its own


def test_a_worker_ignores_ctrl_c_and_ends_with_the_process_that_started_it(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from lockstep.launch.workers import WorkerProcess\n"
        "worker = WorkerProcess('worker_functions:echo', name='w', log=Path(sys.argv[1]))\n"
        "worker.send([1]); worker.receive(seconds=60)\n"
        "print(worker.pid, flush=True); time.sleep(100)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    trainer = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "log"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(trainer.stdout.readline())
    os.kill(pid, signal.SIGINT)
    assert is_running(pid)
    trainer.kill()
    trainer.communicate()
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)


def test_workers_take_the_gpus_that_no_trainer_of_their_machine_has():
    def places(count, world, local_world, gpus, is_shared=False, each=1):
        engine = VllmConfig(replicas=count, tensor_parallel=each, share_device=is_shared)
        local = {"local_world": local_world, "gpus": [str(gpu) for gpu in range(gpus)]}
        return [
            engine.gpus_of_rank(rank, world, local_rank=rank % local_world, **local)
            for rank in range(world)
        ]

    assert places(4, 4, 4, 8) == [["4"], ["5"], ["6"], ["7"]]
    assert places(12, 4, 2, 8) == [["2", "3", "4"], ["5", "6", "7"]] * 2  # of two machines
    assert places(5, 2, 2, 8) == [["2", "3"], ["4", "5", "6"]]
    assert places(2, 2, 2, 6, each=2) == [["2,3"], ["4,5"]]
    assert places(2, 2, 2, 2, is_shared=True) == [["0"], ["1"]]
    with pytest.raises(ConfigError, match=r"\b6\b.*GPU"):
        places(12, 4, 2, 7)
    with pytest.raises(ConfigError, match=r"engine\.replicas.*\b3\b.*\b4\b"):
        places(3, 4, 4, 8)


def test_an_error_travels_as_its_own_kind_and_a_foreign_one_with_its_name():
    class OwnError(ServerRefusedError):
        """A kind that only this process knows."""

    travelled = pickle.loads(pickle.dumps(portable(OwnError("refused", status=503))))
    assert type(travelled) is ServerRefusedError and str(travelled) == "refused"
    assert str(portable(KeyError("x"), kind=EngineError)) == "KeyError: 'x'"
