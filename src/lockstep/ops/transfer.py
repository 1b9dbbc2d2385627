"""Arrays of the host on their way to a device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """`array` on the device; on a GPU by way of pinned memory, so that the host does not wait."""
    tensor, device = torch.from_numpy(array), torch.device(device)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
