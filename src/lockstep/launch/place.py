"""The place of this process in its run. No torch."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

END_SECONDS = 10.0
"""Time that other processes have to end after rank 0; they have nothing left to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Rank of a process in a group that trains together."""

    rank: int
    world: int
    local_rank: int
    """Rank on its machine: the number of its GPU."""
    meeting: str
    """Address where the ranks meet, as torch.distributed takes it."""

    @classmethod
    def from_torchrun(cls) -> Rank | None:
        """The place that torchrun gave this process; None if it is alone."""
        found = os.environ
        if int(found.get("WORLD_SIZE", "0")) < 2:
            return None
        has_store = found.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = f"tcp://{found.get('MASTER_ADDR')}:{found.get('MASTER_PORT')}"
        return cls(
            rank=int(found["RANK"]),
            world=int(found["WORLD_SIZE"]),
            local_rank=int(found.get("LOCAL_RANK", "0")),
            meeting="env://" if has_store else address,
        )


def failed_call(text: str) -> str:
    """The rank and the collective call that NCCL's watchdog names before it ends a process; empty
    if the text names none.

    >>> failed_call("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    ...             "OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600029")
    'rank 3 in NCCL ALLREDUCE'
    """
    found = re.search(r"\[Rank (\d+)\].*?OpType=(\w+)", text, re.DOTALL)
    return "" if found is None else f"rank {found[1]} in NCCL {found[2]}"


def free_port() -> int:
    """A port of this machine that nothing listens on now. It may be taken before it is used, which
    is rare."""
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


def is_follower() -> bool:
    """True if another process of the run prints for this one."""
    return int(os.environ.get("RANK", "0")) > 0


@contextmanager
def handling_interrupts(on_interrupt: Callable[[], object]) -> Generator[None]:
    """Calls `on_interrupt` at each Ctrl-C within the block, in place of the handler of before.

    Python calls handlers in the main thread alone; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: on_interrupt())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_by_sigterm() -> None:
    """Makes SIGTERM and SIGHUP act like Ctrl-C: they leave the same checkpoint. A cluster's
    scheduler ends jobs with SIGTERM, a closed terminal with SIGHUP. `nohup` keeps its meaning.

    A script starts its background jobs with SIGINT ignored, and SIGTERM would be ignored with it.
    This call turns both on in such a job.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    for number in filter(None, (signal.SIGTERM, hangup)):
        if number != hangup or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
