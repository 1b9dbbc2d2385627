"""Tensors to workers of other processes: bit for bit, in any buckets, by either way of a machine
without a GPU; and no side waits for one that is gone."""

import hashlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lockstep.engines import weight_link
from lockstep.engines.weight_delta import DeltaDecoder, DeltaEncoder
from lockstep.engines.weight_link import WeightReceiver, WeightSender
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


def sender(way, num_workers, **options):
    return WeightSender(
        num_workers=num_workers, host="127.0.0.1", is_same_host=WAYS[way], **options
    )


def same(found, sent):
    return list(found) == list(sent) and all(
        found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in sent.items()
    )


def received(rank, invitation, load):
    return dict(WeightReceiver(invitation, rank=rank, device=CPU).tensors(**load))


def send(link, receivers, sent):
    """Bytes that travelled, after each receiver had what was sent."""
    load = link.open_load()
    with ThreadPoolExecutor(len(receivers)) as workers:
        taken = [workers.submit(lambda r=r: dict(r.tensors(**load))) for r in receivers]
        num_bytes = link.send(sent.items(), has_failed=lambda: all(t.done() for t in taken))
        assert all(same(t.result(30), sent) for t in taken)
    return num_bytes


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(weight_link, "HOST_BUCKET", 1000)


@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_tensors_arrive_whole_in_buckets_that_are_smaller(
    way, num_workers, is_delta, small_buckets
):
    link = sender(way, num_workers, is_delta=is_delta)
    receivers = [
        WeightReceiver(link.invitation, rank=rank, device=CPU) for rank in range(num_workers)
    ]
    whole = send(link, receivers, tensors())
    assert whole == sum(x.numel() * x.element_size() for x in tensors().values())
    group, num_keys = link._group, link._store.num_keys()
    changed = tensors()
    changed["embedding"][7:9, 3] += 1.0
    changed["counts"][-1] = 0
    sent = send(link, receivers, changed)
    # Of the small tensors every block has a count of 4 bytes; an item has 2 more for its place.
    assert sent == (5 * 4 + 2 * (2 + 4) + (2 + 1) if is_delta else whole)
    assert link._group is group, "made once"
    assert link._store.num_keys() == num_keys, "a load leaves nothing in the store"
    other = changed | {"norm": torch.zeros(3), "embedding": changed["embedding"] * 2}
    assert send(link, receivers, other) >= whole // 2, "most of it changed"
    link.close()


def test_a_worker_that_cannot_open_the_memory_gets_a_broadcast(small_buckets, monkeypatch):
    link = sender("file", 2)
    here, elsewhere = (WeightReceiver(link.invitation, rank=rank, device=CPU) for rank in range(2))
    monkeypatch.setattr(elsewhere, "_opened", lambda *place: None)  # another container
    for _ in range(2):
        send(link, [here, elsewhere], tensors())
    assert link.open_load()["way"] == "broadcast", "and is not asked again"
    link.close()


def test_memory_of_another_container_is_not_opened():
    link = sender("file", 1)
    path, inode = link.open_load()["place"]
    receiver = WeightReceiver(link.invitation, rank=0, device=CPU)
    assert receiver._opened("file", (path, inode)) is not None
    assert receiver._opened("file", (path, inode + 1)) is None, "another file at this path"
    assert receiver._opened("file", ("/proc/0/fd/0", inode)) is None
    link.close()


def test_a_receiver_with_other_tensors_than_the_trainer_refuses_them(small_buckets):
    link = sender("file", 1, is_delta=True)
    receiver = WeightReceiver(link.invitation, rank=0, device=CPU)
    send(link, [receiver], tensors())
    receiver._decoder._held["counts"][0] ^= 1
    with pytest.raises(EngineError, match="checksums"):
        send(link, [receiver], tensors())
    link.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_changes_have_the_size_of_what_changed_and_are_exact(dtype):
    """Over several blocks, in random places and at the first and last item."""
    seed = torch.Generator().manual_seed(0)
    old = torch.randn(200_001, generator=seed)
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    old[[5, -5]] = torch.tensor([float("nan"), -0.0])
    for num_changed in (0, 1, 2000):
        at = torch.randperm(len(old), generator=seed)[:num_changed]
        old[at] = old[at] + 1 + old[at].abs()
        new = old.to(dtype)
        encoder.checksum = decoder.checksum = 0
        count, data = encoder.encode("w", new)
        found = decoder.decode("w", dtype, new.shape, count, data)
        assert torch.equal(found.view(torch.uint8), new.view(torch.uint8))
        assert encoder.checksum == decoder.checksum
        if count is not None:
            assert count <= num_changed and len(data) == 4 * 4 + count * (2 + dtype.itemsize)
    assert count is not None, "a hundredth is less than half"


def started(program, *arguments):
    """Another process, with pipes for one line in and one out."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


RECEIVER = """
import hashlib, json, sys, torch
from lockstep.engines.weight_link import WeightReceiver, _as_bytes
invitation, load = json.loads(sys.stdin.readline())
found = WeightReceiver(invitation, rank=0, device=torch.device("cpu")).tensors(**load)
print(json.dumps({n: hashlib.sha256(_as_bytes(x).numpy()).hexdigest() for n, x in found}))
"""


@pytest.mark.parametrize("way", WAYS)
def test_tensors_arrive_in_another_process(way):
    link = sender(way, 1)
    with started(RECEIVER) as worker:
        worker.stdin.write(json.dumps([link.invitation, link.open_load()]) + "\n")
        worker.stdin.flush()
        link.send(tensors().items(), has_failed=lambda: worker.poll() is not None)
        found = json.loads(worker.stdout.readline())
    link.close()
    wanted = {name: weight_link._as_bytes(x).numpy() for name, x in tensors().items()}
    assert found == {name: hashlib.sha256(x).hexdigest() for name, x in wanted.items()}


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_fails_ends_the_load(way, small_buckets):
    link = sender(way, 1)

    def take_one(load):
        next(WeightReceiver(link.invitation, rank=0, device=CPU).tensors(**load))
        raise ValueError("shape")

    with ThreadPoolExecutor(1) as workers:
        taken = workers.submit(take_one, link.open_load())
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
        taken = workers.submit(received, 0, link.invitation, link.open_load())
        with pytest.raises(ValueError, match="gone"):
            link.send(two_and_an_error(), has_failed=taken.done)
        link.close()
        with pytest.raises(EngineError, match="other side"):
            taken.result(30)


TRAINER = """
import json, sys
from lockstep.engines.weight_link import WeightSender
link = WeightSender(num_workers=1, host="127.0.0.1", is_same_host=True)
print(json.dumps([link.invitation, link.open_load()]), flush=True)
sys.stdin.readline()
"""


def test_a_trainer_that_ends_without_a_word_ends_the_workers_wait():
    with started(TRAINER) as trainer, ThreadPoolExecutor(1) as workers:
        invitation, load = json.loads(trainer.stdout.readline())
        taken = workers.submit(received, 0, invitation, load)
        time.sleep(0.5)  # it waits for the first bucket
        trainer.kill()
        with pytest.raises(EngineError, match="other side"):
            taken.result(60)
