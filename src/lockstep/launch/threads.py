"""Blocking work in a thread, while the event loop continues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")


async def in_thread(work: Callable[[], T], *, device: torch.device) -> T:
    """The result of `work()`, done in a thread. device: of its tensors.

    An interrupt does not cut the work off, which would leave weights or an optimizer half changed:
    the work ends, its result is returned, and the interrupt is raised at the next await.
    """
    ended = asyncio.ensure_future(asyncio.to_thread(partial(_on_device, work, device)))
    num_interrupts = 0
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            num_interrupts += 1
    current = asyncio.current_task()
    assert current is not None, "a coroutine runs in a task"
    for _ in range(num_interrupts):
        current.uncancel()  # its count separates Ctrl-C from other ends: see asyncio.Runner.run
    if num_interrupts:
        current.cancel()
    return ended.result()


def _on_device(work: Callable[[], T], device: torch.device) -> T:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has its own; a new one begins at the first GPU
    return work()
