"""Tensors from a trainer to the workers of an inference server, without a disk between.

The tensors are one stream of bytes, cut into buckets. The trainer fills a buffer, announces its
contents, and fills it again once every worker has copied it. On one machine the buffer is shared
memory: of the trainer's GPU (CUDA IPC), or without a GPU a file in the machine's memory. Across
machines, and where a worker cannot open the shared memory, it is broadcast in a process group of
trainer and workers alone (NCCL; gloo without a GPU).

    link = WeightSender(num_workers=2, host="localhost", is_same_host=True)
    # a worker, which gets the invitation, and each load, by the server's own route:
    receiver = WeightReceiver(link.invitation, rank=0, device=...)
    model.load_weights(receiver.tensors(**load))
    # the trainer, with load = link.open_load():
    link.send(tensors.items(), has_failed=call.done)

A delta link sends only the numbers that changed since its last load (`weight_delta.py`). After an
error a link is closed, and the next one begins with whole tensors.

Announcements go through a TCPStore of the trainer. It has no password and listens while the link
lives: keep trainer and server in a network of their own. The cost is linear in bytes, and either
side needs the memory of one bucket.
"""

# torch leaves the storages' and process groups' own functions untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import base64
import contextlib
import json
import mmap
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from lockstep.engines.weight_delta import DeltaDecoder, DeltaEncoder
from lockstep.errors import EngineError
from lockstep.launch.shared_file import SharedFile, mapped

Tensor = torch.Tensor
Way = Literal["cuda_ipc", "file", "broadcast"]

GPU_BUCKET = 256 << 20
"""Bytes of a bucket. A larger one gains nothing on a GPU, and takes from its memory."""
HOST_BUCKET = 32 << 20
"""The same without a GPU."""
LOOK_SECONDS = 0.002
"""Interval of polling for the other side's announcements."""
CONNECT_SECONDS = 30.0
"""Longest that a worker tries to reach the trainer."""
WAIT_SECONDS = 600.0
"""Longest that either side waits for the other's next step."""
LOOPBACK, HOST = "127.0.0.1", torch.device("cpu")


class WeightSender:
    """The trainer's side, for all loads of one server."""

    def __init__(
        self, *, num_workers: int, host: str, is_same_host: bool, is_delta: bool = False
    ) -> None:
        """host: of the server. is_same_host: whether it shares this machine's memory."""
        has_gpu = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else HOST
        self._num_workers, self._number = num_workers, 0
        self._size = GPU_BUCKET if has_gpu else HOST_BUCKET
        shared: Way = "cuda_ipc" if has_gpu else "file"
        self._way: Way = shared if is_same_host else "broadcast"
        self._encoder = DeltaEncoder() if is_delta else None
        self._group: Any = None
        self._buffer: Tensor | None = None
        self._file: SharedFile | None = None
        address = LOOPBACK if is_same_host else _address_towards(host)
        limit = timedelta(seconds=WAIT_SECONDS)
        self._store = dist.TCPStore(
            address, 0, is_master=True, wait_for_workers=False, timeout=limit
        )
        self.invitation: dict[str, Any] = {
            "name": secrets.token_hex(8),
            "address": [address, self._store.port],
            "num_workers": num_workers,
            "backend": "nccl" if has_gpu else "gloo",
            "is_delta": is_delta,
        }
        """Arguments of each `WeightReceiver`, for JSON."""

    def open_load(self) -> dict[str, Any]:
        """Makes the buffer of the next load. Returns the arguments of `WeightReceiver.tensors`,
        for JSON."""
        place: Any = None
        if self._way == "file":
            file = SharedFile(self._size)
            place, self._buffer = file.address, _of_memory(file.memory)
            self._file = file
        else:
            self._buffer = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        if self._way == "cuda_ipc":
            shared: list[Any] = list(self._buffer.untyped_storage()._share_cuda_())
            place = [_as_text(value) for value in shared[1:]]
        return {"number": self._number, "way": self._way, "size": self._size, "place": place}

    def send(self, tensors: Iterable[tuple[str, Tensor]], *, has_failed: Callable[[], bool]) -> int:
        """Sends all tensors of a load; returns when every worker has its copy, the number of bytes
        that travelled. has_failed: whether the server's own answer is there already. Raises
        EngineError if it is before the end."""
        self._agree(has_failed)
        assert self._buffer is not None, "open_load makes it"
        room, names, used, sent = len(self._buffer), list[Any](), 0, 0
        if self._encoder is not None:
            self._encoder.checksum = 0
        bucket = 0
        for name, tensor in tensors:
            changed, left = None, tensor
            if self._encoder is not None:
                changed, left = self._encoder.encode(name, tensor)
            left = _as_bytes(left)
            dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            names.append([name, dtype, shape, changed, len(left)])
            sent += len(left)
            while len(left) > room - used:
                part, left = left.tensor_split([room - used])
                self._buffer[used:].copy_(part)
                self._offer(bucket, {"tensors": names, "size": room}, has_failed)
                names, used, bucket = [], 0, bucket + 1
            self._buffer[used : used + len(left)].copy_(left)
            used += len(left)
        checksum = self._encoder.checksum if self._encoder else None
        end = {"tensors": names, "size": used, "is_last": True, "checksum": checksum}
        self._offer(bucket, end, has_failed)
        self._store.delete_key(f"{self._number}/way")
        self._buffer = self._file = None
        self._number += 1
        return sent

    def _agree(self, has_failed: Callable[[], bool]) -> None:
        """Waits until every worker has tried to open the buffer. It is broadcast, now and from now
        on, if one cannot: a container, say, has a /dev/shm of its own."""
        opened = [self._wait("opened", worker, has_failed) for worker in range(self._num_workers)]
        if not all(map(int, opened)):
            self._way = "broadcast"
        self._set("way", self._way)
        if self._way == "broadcast" and self._group is None:
            self._group = _group(self._store, 0, self.invitation)

    def _offer(
        self, number: int, bucket: Mapping[str, Any], has_failed: Callable[[], bool]
    ) -> None:
        assert self._buffer is not None, "open_load makes it"
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # workers must not read before the write
        self._set(f"bucket/{number}", json.dumps(bucket))
        if self._way == "broadcast":
            for worker in range(self._num_workers):
                self._wait(f"ready/{number}", worker, has_failed)
            self._group.broadcast([self._buffer[: bucket["size"]]], _from_first()).wait()
        for worker in range(self._num_workers):
            self._wait(f"taken/{number}", worker, has_failed)
        self._store.delete_key(f"{self._number}/bucket/{number}")

    def _set(self, step: str, value: str) -> None:
        self._store.set(f"{self._number}/{step}", value)

    def _wait(self, step: str, worker: int, has_failed: Callable[[], bool]) -> bytes:
        """A worker's answer, which is then gone: the store lives as long as the run."""
        key = f"{self._number}/{step}/{worker}"
        found = _wait(self._store, key, has_failed)
        self._store.delete_key(key)
        return found

    def close(self) -> None:
        """Ends the link: a worker that still waits fails."""
        self._store.set("closed", "")
        self._group = self._buffer = self._file = None


class WeightReceiver:
    """The side of a server's worker `rank`, for all loads over one link; the tensors come on
    `device`."""

    def __init__(self, invitation: Mapping[str, Any], *, rank: int, device: torch.device) -> None:
        self.name: str = invitation["name"]
        self._rank, self._device, self._invitation = rank, device, invitation
        self._decoder = DeltaDecoder() if invitation["is_delta"] else None
        self._group: Any = None
        limit = timedelta(seconds=CONNECT_SECONDS)
        self._store = dist.TCPStore(*invitation["address"], is_master=False, timeout=limit)

    def tensors(
        self, *, number: int, way: Way, size: int, place: Any
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of everything that is sent in this load, from what `open_load` returned.
        Raises EngineError if the trainer ends before it has sent all, or if the tensors after
        their changes are not the trainer's."""
        buffer = self._opened(way, place)
        self._store.set(f"{number}/opened/{self._rank}", str(int(buffer is not None)))
        is_broadcast = self._wait(f"{number}/way") == b"broadcast"
        if is_broadcast and self._group is None:
            self._group = _group(self._store, self._rank + 1, self._invitation)
        if is_broadcast or buffer is None:
            # A gloo broadcast needs memory of the host.
            at = self._device if self._invitation["backend"] == "nccl" else HOST
            buffer = torch.empty(size, dtype=torch.uint8, device=at)
        if self._decoder is not None:
            self._decoder.checksum = 0
        waiting: list[_Waiting] = []
        filled = at_bucket = 0
        bucket: dict[str, Any] = {}
        while not bucket.get("is_last"):
            bucket = json.loads(self._wait(f"{number}/bucket/{at_bucket}"))
            if is_broadcast:
                self._store.set(f"{number}/ready/{at_bucket}/{self._rank}", "")
                self._group.broadcast([buffer[: bucket["size"]]], _from_first()).wait()
            at = HOST if self._decoder else self._device
            for name, dtype, shape, changed, num_bytes in bucket["tensors"]:
                data = torch.empty(num_bytes, dtype=torch.uint8, device=at)
                waiting.append(_Waiting(name, dtype, shape, changed, data))
            used, whole = 0, list[_Waiting]()
            while waiting:
                data = waiting[0].data
                count = min(len(data) - filled, bucket["size"] - used)
                data[filled : filled + count].copy_(buffer[used : used + count])
                used, filled = used + count, filled + count
                if filled < len(data):
                    break
                whole.append(waiting.pop(0))
                filled = 0
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._store.set(f"{number}/taken/{at_bucket}/{self._rank}", "")
            at_bucket += 1
            for each in whole:
                yield each.name, each.tensor(self._decoder).to(self._device)
        if self._decoder is not None and self._decoder.checksum != bucket["checksum"]:
            raise EngineError(
                "the weights after their changes are not the trainer's: their checksums differ. "
                "The next load sends all of them."
            )

    def _opened(self, way: Way, place: Any) -> Tensor | None:
        """The trainer's buffer; None if it is broadcast, or not to be opened from here."""
        # Fails between cards without access to each other, and for another container's memory.
        with contextlib.suppress(RuntimeError, EngineError):
            if way == "file":
                return _of_memory(mapped(place))
            if way == "cuda_ipc":
                torch.cuda.set_device(self._device)
                values = map(_from_text, place)
                storage = torch.UntypedStorage._new_shared_cuda(self._device.index, *values)
                return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        return None

    def _wait(self, key: str) -> bytes:
        return _wait(self._store, key, lambda: self._store.check(["closed"]))


class _Waiting(NamedTuple):
    """A tensor whose bytes arrive."""

    name: str
    dtype: str
    shape: Sequence[int]
    changed: int | None
    data: Tensor

    def tensor(self, decoder: DeltaDecoder | None) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.dtype)
        if decoder is None:
            return self.data.view(dtype).reshape(list(self.shape))
        return decoder.decode(self.name, dtype, self.shape, self.changed, self.data)


def is_same_host(host: str) -> bool:
    """True if a server at this host shares the memory of this machine.

    >>> is_same_host("localhost"), is_same_host("203.0.113.7")
    (True, False)
    """
    try:
        return socket.gethostbyname(host).startswith("127.")
    except OSError:
        return False


def _address_towards(host: str) -> str:
    """This machine's address on the way to `host`. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def _wait(store: dist.TCPStore, key: str, has_failed: Callable[[], bool]) -> bytes:
    """Waits for `key` and returns its value."""
    deadline = time.monotonic() + WAIT_SECONDS
    try:
        while not store.check([key]):
            if (has_failed() and not store.check([key])) or time.monotonic() > deadline:
                break
            time.sleep(LOOK_SECONDS)
        else:
            return store.get(key)
    except dist.DistNetworkError:
        pass  # the other side has the store, and is gone
    raise EngineError(
        f"the transfer of weights broke off: the other side never came to {key!r}. Its own message "
        "says why."
    )


def _group(store: dist.TCPStore, rank: int, invitation: Mapping[str, Any]) -> Any:
    """A process group of the trainer (rank 0) and the workers, separate from all others."""
    limit, of_group = timedelta(seconds=WAIT_SECONDS), dist.PrefixStore("group", store)
    size = invitation["num_workers"] + 1
    if invitation["backend"] == "gloo":
        return dist.ProcessGroupGloo(of_group, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(of_group, rank, size, options)


def _from_first() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return options


def _of_memory(memory: mmap.mmap) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _as_text(value: Any) -> Any:
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _from_text(value: Any) -> Any:
    return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
