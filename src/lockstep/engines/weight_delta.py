"""The numbers of tensors that changed, as bytes: what a delta link sends in place of whole tensors.

A tensor is seen as integers of its item size, in blocks of 65,536. Its changes are the number of
changed items in each block, their positions in the block, and their new bits: 2 bytes an item
beside the item itself. Both sides hold the last tensors in the memory of the host.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

Tensor = torch.Tensor

BLOCK = 1 << 16
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Item size -> the dtype whose values are its bits."""


class DeltaEncoder:
    """The sender's tensors of the last load."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self.checksum = 0
        """CRC-32 of all tensors since it was last set to 0."""

    def encode(self, name: str, tensor: Tensor) -> tuple[int | None, Tensor]:
        """(number of changed items, bytes of the changes), uint8 on the host; (None, bytes of the
        tensor) if it is new or its changes take more than half of them."""
        new = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        new = new.copy_(tensor.detach()).flatten().view(INTEGERS[tensor.element_size()])
        whole, held = new.view(torch.uint8), self._held.get(name)
        self.checksum = zlib.crc32(whole.numpy().data, self.checksum)
        self._held[name] = new
        if held is None or held.shape != new.shape or held.dtype != new.dtype:
            return None, whole
        at = (new != held).nonzero().flatten()
        counts = torch.bincount(at // BLOCK, minlength=-(-len(new) // BLOCK)).to(torch.int32)
        changes = [counts, (at % BLOCK).to(torch.uint16), new[at]]
        data = torch.cat([each.view(torch.uint8) for each in changes])
        return (len(at), data) if 2 * len(data) <= len(whole) else (None, whole)


class DeltaDecoder:
    """The receiver's tensors of the last load."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self.checksum = 0

    def decode(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], changed: int | None, data: Tensor
    ) -> Tensor:
        """The tensor, on the host, from what `DeltaEncoder.encode` returned."""
        integers = INTEGERS[dtype.itemsize]
        if changed is None:
            self._held[name] = data.view(integers)
        else:
            held = self._held[name]
            sizes = [4 * -(-len(held) // BLOCK), 2 * changed, held.element_size() * changed]
            counts, offsets, values = data.split(sizes)
            blocks = torch.arange(len(counts) // 4).repeat_interleave(counts.view(torch.int32))
            at = blocks * BLOCK + offsets.clone().view(torch.uint16).to(torch.int64)
            held[at] = values.clone().view(integers)
        held = self._held[name]
        self.checksum = zlib.crc32(held.view(torch.uint8).numpy().data, self.checksum)
        return held.view(dtype).reshape(list(shape)).clone()
