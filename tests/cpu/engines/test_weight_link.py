"""Tensors to workers of other processes: bit for bit, in any buckets, by either way of a machine
without a GPU; and no side waits for one that is gone."""

import hashlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lockstep.engines import weight_link
from lockstep.engines.weight_link import WeightSender, receive
from lockstep.errors import EngineError

CPU = torch.device("cpu")
WAYS = {"file": True, "broadcast": False}
"""The way -> whether trainer and server are on one host."""


def tensors():
    seed = torch.Generator().manual_seed(0)  # one of its own: workers here are threads
    return {
        "embedding": torch.randn(301, 7, generator=seed),
        "norm": torch.randn(7, generator=seed).bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "nothing": torch.empty(0, 3),
        "turned": torch.randn(5, 11, generator=seed).T,
        "counts": torch.arange(1000, dtype=torch.int8),
    }


def sender(way, num_workers):
    return WeightSender(num_workers=num_workers, host="127.0.0.1", is_same_host=WAYS[way])


def same(found):
    return list(found) == list(tensors()) and all(
        found[name].dtype == x.dtype and torch.equal(found[name], x)
        for name, x in tensors().items()
    )


def take(rank, invitation):
    return same(dict(receive(rank=rank, device=CPU, **invitation)))


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(weight_link, "HOST_BUCKET", 1000)


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_tensors_arrive_whole_in_buckets_that_are_smaller(way, num_workers, small_buckets):
    link = sender(way, num_workers)
    assert link.invitation["way"] == way and link.invitation["size"] == 1000
    with ThreadPoolExecutor(num_workers) as workers:
        taken = [workers.submit(take, rank, link.invitation) for rank in range(num_workers)]
        link.send(tensors().items(), has_failed=lambda: all(t.done() for t in taken))
        assert all(t.result(30) for t in taken)
    link.close()


def started(program, *arguments):
    """Another process, with pipes for one line in and one out."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


RECEIVER = """
import hashlib, json, sys, torch
from lockstep.engines.weight_link import _as_bytes, receive
found = receive(rank=0, device=torch.device("cpu"), **json.loads(sys.stdin.readline()))
print(json.dumps({n: hashlib.sha256(_as_bytes(x).numpy()).hexdigest() for n, x in found}))
"""


@pytest.mark.parametrize("way", WAYS)
def test_tensors_arrive_in_another_process(way):
    link = sender(way, 1)
    with started(RECEIVER) as worker:
        worker.stdin.write(json.dumps(link.invitation) + "\n")
        worker.stdin.flush()
        link.send(tensors().items(), has_failed=lambda: worker.poll() is not None)
        found = json.loads(worker.stdout.readline())
    link.close()
    wanted = {name: weight_link._as_bytes(x).numpy() for name, x in tensors().items()}
    assert found == {name: hashlib.sha256(x).hexdigest() for name, x in wanted.items()}


def test_the_file_is_for_this_user_alone_and_goes_with_the_load():
    link = sender("file", 1)
    assert link._file.stat().st_mode & 0o777 == 0o600
    link.close()
    assert not link._file.exists()


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_fails_ends_the_load(way, small_buckets):
    link = sender(way, 1)

    def take_one(invitation):
        next(iter(receive(rank=0, device=CPU, **invitation)))
        raise ValueError("shape")

    with ThreadPoolExecutor(1) as workers:
        taken = workers.submit(take_one, link.invitation)
        with pytest.raises(EngineError, match="broke off"):
            link.send(tensors().items(), has_failed=taken.done)
        with pytest.raises(ValueError, match="shape"):
            taken.result()
    link.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_that_stops_in_the_middle_ends_the_workers_wait(way, small_buckets):
    link = sender(way, 1)

    def two_and_an_error():
        yield from list(tensors().items())[:2]
        raise ValueError("a rank is gone")

    with ThreadPoolExecutor(1) as workers:
        taken = workers.submit(take, 0, link.invitation)
        with pytest.raises(ValueError, match="gone"):
            link.send(two_and_an_error(), has_failed=taken.done)
        link.close()
        with pytest.raises(EngineError, match="other side"):
            taken.result(30)


TRAINER = """
import json, sys
from lockstep.engines.weight_link import WeightSender
link = WeightSender(num_workers=1, host="127.0.0.1", is_same_host=True)
print(json.dumps(link.invitation), flush=True)
sys.stdin.readline()
"""


def test_a_trainer_that_ends_without_a_word_ends_the_workers_wait():
    with started(TRAINER) as trainer, ThreadPoolExecutor(1) as workers:
        invitation = json.loads(trainer.stdout.readline())
        taken = workers.submit(take, 0, invitation)
        time.sleep(0.5)  # it waits for the first bucket
        trainer.kill()
        with pytest.raises(EngineError, match="other side"):
            taken.result(60)
    Path(invitation["path"]).unlink()
