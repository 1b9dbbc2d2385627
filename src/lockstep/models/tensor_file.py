"""safetensors files, read and written a block at a time.

The library maps a file into memory: pages that were read count as the process's own until the file
is closed, so a model in one file is held twice while it is loaded. Here bytes go from the file
straight to their destination; the library tells from the header alone whether a file is whole.

Format: 8 bytes little-endian length, a JSON header name -> dtype, shape, data_offsets, the data.
Source: https://github.com/huggingface/safetensors, README
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lockstep.errors import CheckpointError

Tensor = torch.Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
}
"""Readable dtypes by the format's names; others may occur in headers and are refused by name."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

BLOCK_BYTES = 32 << 20
"""Size of a block that is read or written at once where another dtype or order needs a copy."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in its file, not read yet."""

    path: Path
    dtype_name: str
    """Name in the format: F32, BF16, I8, ..."""
    shape: tuple[int, ...]
    offset: int
    """Place of its first byte in the file."""
    num_bytes: int

    def read(self, rows: slice | None = None) -> Tensor:
        """The tensor, or these rows of its first dim, in memory of its own."""
        shape = self.shape if rows is None else (rows.stop - rows.start, *self.shape[1:])
        out = torch.empty(shape, dtype=DTYPES[self.dtype_name])
        self.read_into(out, first=0 if rows is None else rows.start)
        return out

    def read_into(self, out: Tensor, *, first: int = 0) -> None:
        """Fills `out`, contiguous on the CPU and in this dtype, from row `first` on."""
        row_bytes = self.num_bytes // self.shape[0] if self.shape and self.shape[0] else 0
        place = _bytes_of(out.detach())
        with open(self.path, "rb") as file:
            file.seek(self.offset + first * row_bytes)
            if file.readinto(place) < len(place):
                raise CheckpointError(f"{self.path} ends too early. A torn copy?")

    def copy_to(self, out: Tensor) -> None:
        """Copies into `out`, a view of any strides, dtype and device with the same first dim and
        the same numbers in the same order."""
        dtype = DTYPES[self.dtype_name]
        if out.is_contiguous() and out.dtype == dtype and out.device.type == "cpu" and out.numel():
            self.read_into(out)
            # Torch does not count this as a write: count it, so that ops drop cached results.
            torch.autograd.graph.increment_version(out)
            return
        for rows in blocks_of(len(out), self.num_bytes):
            out[rows].copy_(self.read(rows).view(out[rows].shape))


def rows_of(source: Tensor | StoredTensor, rows: slice) -> Tensor:
    """Rows of a tensor that is in memory or in its file."""
    return source.read(rows) if isinstance(source, StoredTensor) else source[rows]


def _bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return x.view(-1).view(torch.uint8).numpy().data


def blocks_of(num_rows: int, num_bytes: int) -> Iterator[slice]:
    """Slices over `num_rows` rows of `num_bytes` in all, of about BLOCK_BYTES each."""
    step = max(1, BLOCK_BYTES * num_rows // max(num_bytes, 1))
    for first in range(0, num_rows, step):
        yield slice(first, min(first + step, num_rows))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, none of them read. Raises CheckpointError if the file is not whole."""
    try:
        with safe_open(path, framework="np"):
            pass  # the library compares header, shapes and size; nothing is read
        with open(path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(header_bytes))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). A torn copy?") from error
    header.pop("__metadata__", None)
    out: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        out[name] = StoredTensor(
            path, entry["dtype"], tuple(entry["shape"]), 8 + header_bytes + start, stop - start
        )
    return out


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    view: Callable[[], Tensor]
    """Returns the numbers in order, on any device, in any strides and dtype. Called when the tensor
    is written."""

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_tensors(path: Path, tensors: Sequence[Outgoing], *, is_writer: bool = True) -> None:
    """Writes the bytes that the library would write, without all tensors in memory.

    is_writer: False on ranks that only help to gather each tensor.
    Guard: tests/cpu/models/test_tensor_file.py
    """
    # All ranks gather in the order of the file.
    ordered = sorted(tensors, key=lambda t: (-t.dtype.itemsize, DTYPE_NAMES[t.dtype], t.name))
    if not is_writer:
        for tensor in ordered:
            tensor.view()
        return
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            view = tensor.view().detach()
            for rows in blocks_of(len(view), tensor.num_bytes):
                part = view[rows].to("cpu", tensor.dtype).contiguous()
                file.write(_bytes_of(part))
