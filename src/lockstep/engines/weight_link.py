"""Tensors from a trainer to the workers of an inference server, without a disk between.

The tensors are one stream of bytes, cut into buckets. The trainer fills a buffer, announces its
contents, and fills it again once every worker has copied it. On one machine the buffer is shared
memory: of the trainer's GPU (CUDA IPC), or without a GPU a file in the machine's memory. Across
machines it is broadcast in a process group of trainer and workers alone (NCCL; gloo without a GPU).

    link = WeightSender(num_workers=2, host="localhost", is_same_host=True)
    # a worker, which gets link.invitation by the server's own route:
    model.load_weights(receive(rank=0, device=..., **link.invitation))
    # the trainer, meanwhile:
    link.send(tensors.items(), has_failed=call.done)

Announcements go through a TCPStore of the trainer. It has no password and listens during a load:
keep trainer and server in a network of their own. The cost is linear in bytes, and either side
needs the memory of one bucket.
"""

# torch leaves the storages' and process groups' own functions untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import base64
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from lockstep.errors import EngineError

Tensor = torch.Tensor
Way = Literal["cuda_ipc", "file", "broadcast"]

GPU_BUCKET = 256 << 20
"""Bytes of a bucket. A larger one gains nothing on a GPU, and takes from its memory."""
HOST_BUCKET = 32 << 20
"""The same without a GPU: half of what containers have as memory files by default."""
LOOK_SECONDS = 0.002
"""Interval of polling for the other side's announcements."""
CONNECT_SECONDS = 30.0
"""Longest that a worker tries to reach the trainer."""
WAIT_SECONDS = 600.0
"""Longest that either side waits for the other's next step."""
LOOPBACK = "127.0.0.1"


class WeightSender:
    """The trainer's side, for one load."""

    def __init__(self, *, num_workers: int, host: str, is_same_host: bool) -> None:
        """host: of the server. is_same_host: whether it shares this machine's memory."""
        has_gpu, device = torch.cuda.is_available(), torch.device("cpu")
        if has_gpu:
            device = torch.device("cuda", torch.cuda.current_device())
        self._num_workers, self._device = num_workers, device
        self._file: Path | None = None
        self._group: Any = None
        size = GPU_BUCKET if has_gpu else HOST_BUCKET
        address = LOOPBACK if is_same_host else _address_towards(host)
        self._store = dist.TCPStore(
            address,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=WAIT_SECONDS),
        )
        here: Way = "cuda_ipc" if has_gpu else "file"
        self._way = way = here if is_same_host else "broadcast"
        place: Any = None
        if way == "file":
            room = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
            self._file = room / f"lockstep-weights-{secrets.token_hex(8)}"
            self._file.touch(mode=0o600)
            os.truncate(self._file, size)
            place = str(self._file)
            self._buffer = _of_file(self._file, size)
        else:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        if way == "cuda_ipc":
            shared: list[Any] = list(self._buffer.untyped_storage()._share_cuda_())
            place = [_as_text(value) for value in shared[1:]]
        self.invitation: dict[str, Any] = {
            "way": way,
            "address": [address, self._store.port],
            "num_workers": num_workers,
            "size": size,
            "backend": "nccl" if has_gpu else "gloo",
            "place": place,
        }
        """Arguments of `receive`, for JSON."""

    def send(
        self, tensors: Iterable[tuple[str, Tensor]], *, has_failed: Callable[[], bool]
    ) -> None:
        """Sends all tensors; returns when every worker has its copy. has_failed: whether the
        server's own answer is there already. Raises EngineError if it is before the end."""
        names: list[Any] = []
        used = number = 0
        for name, tensor in tensors:
            names.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
            left = _as_bytes(tensor)
            while len(left) > len(self._buffer) - used:
                part, left = left.tensor_split([len(self._buffer) - used])
                self._buffer[used:].copy_(part)
                self._offer_bucket(number, names, len(self._buffer), has_failed=has_failed)
                names, used, number = [], 0, number + 1
            self._buffer[used : used + len(left)].copy_(left)
            used += len(left)
        self._offer_bucket(number, names, used, is_last=True, has_failed=has_failed)

    def _offer_bucket(
        self,
        number: int,
        names: list[Any],
        size: int,
        *,
        has_failed: Callable[[], bool],
        is_last: bool = False,
    ) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # workers must not read before the write
        bucket = {"tensors": names, "size": size, "is_last": is_last}
        self._store.set(f"bucket/{number}", json.dumps(bucket))
        if self._way == "broadcast":
            self._wait_for(f"ready/{number}", has_failed)
            if self._group is None:
                self._group = _group(self._store, 0, self._num_workers, self.invitation["backend"])
            self._group.broadcast([self._buffer[:size]], _from_first()).wait()
        self._wait_for(f"taken/{number}", has_failed)
        if self._file is not None:  # every worker has it open: nothing of it stays after a kill
            self._file.unlink(missing_ok=True)

    def _wait_for(self, step: str, has_failed: Callable[[], bool]) -> None:
        for worker in range(self._num_workers):
            _wait(self._store, f"{step}/{worker}", has_failed)

    def close(self) -> None:
        """Ends the load, finished or not: a worker that still waits fails."""
        self._store.set("closed", "")
        self._group = None
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def receive(
    *,
    rank: int,
    device: torch.device,
    way: Way,
    address: Sequence[Any],
    num_workers: int,
    size: int,
    backend: str,
    place: Any,
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything that is sent, for worker `rank` of a server, on `device`. The
    other arguments are the invitation. Raises EngineError if the trainer ends before it has sent
    all."""
    limit = timedelta(seconds=CONNECT_SECONDS)
    store = dist.TCPStore(*address, is_master=False, timeout=limit)
    # A gloo broadcast needs memory of the host.
    at = device if way == "cuda_ipc" or backend == "nccl" else torch.device("cpu")
    if way == "file":
        buffer = _of_file(Path(place), size)
    elif way == "cuda_ipc":
        torch.cuda.set_device(device)
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *map(_from_text, place))
        buffer = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    else:
        buffer = torch.empty(size, dtype=torch.uint8, device=at)
    group: Any = None
    waiting: list[tuple[str, Tensor, Tensor]] = []
    number = filled = 0
    is_last = False
    while not is_last:
        bucket = json.loads(_wait(store, f"bucket/{number}", lambda: store.check(["closed"])))
        if way == "broadcast":
            store.set(f"ready/{number}/{rank}", "")
            if group is None:
                group = _group(store, rank + 1, num_workers, backend)
            group.broadcast([buffer[: bucket["size"]]], _from_first()).wait()
        for name, dtype, shape in bucket["tensors"]:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            waiting.append((name, tensor, _as_bytes(tensor)))
        used, whole = 0, list[tuple[str, Tensor]]()
        while waiting:
            name, tensor, flat = waiting[0]
            count = min(len(flat) - filled, bucket["size"] - used)
            flat[filled : filled + count].copy_(buffer[used : used + count])
            used, filled = used + count, filled + count
            if filled < len(flat):
                break
            whole.append((name, tensor))
            waiting, filled = waiting[1:], 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        store.set(f"taken/{number}/{rank}", "")
        number, is_last = number + 1, bucket["is_last"]
        yield from whole


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


def _group(store: dist.TCPStore, rank: int, num_workers: int, backend: str) -> Any:
    """A process group of the trainer (rank 0) and the workers, separate from all others."""
    limit, of_group = timedelta(seconds=WAIT_SECONDS), dist.PrefixStore("group", store)
    if backend == "gloo":
        return dist.ProcessGroupGloo(of_group, rank, num_workers + 1, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(of_group, rank, num_workers + 1, options)


def _from_first() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return options


def _of_file(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _as_text(value: Any) -> Any:
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _from_text(value: Any) -> Any:
    return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
