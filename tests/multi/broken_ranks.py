"""A run of two processes, rank 1 of which ends or hangs in a way that is asked for: WHERE HOW.

python broken_ranks.py init kill 8      # the limit of waits, in seconds
"""

import os
import signal
import sys
import time

import torch.distributed as dist

from lockstep.errors import LockstepError
from lockstep.launch.config import ParallelConfig
from lockstep.launch.place import end_by_sigterm
from lockstep.launch.processes import on_all_ranks

WATCHDOG = "[rank1]:[E1129] [Rank 1] Watchdog caught collective operation timeout: " + (
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600029"
)


def end_by_watchdog():
    """As NCCL's watchdog ends a process: with this line, and many of C++."""
    print(WATCHDOG, *["frame of C++"] * 99, sep="\n", flush=True)
    os.kill(os.getpid(), signal.SIGABRT)


WAYS = {
    "watchdog": end_by_watchdog,
    "exit": lambda: os._exit(3),
    "exit_0": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": lambda: os.kill(os.getpid(), signal.SIGABRT),
    "hang": lambda: time.sleep(3600),
    "raise": lambda: [][0],
    "system_exit": lambda: sys.exit("no more"),
}


def work(ranks, where, how):
    if where == "first" and ranks.rank == 1:
        print("rank 1 was here", flush=True)
        WAYS[how]()
    ranks.gather(ranks.rank)
    if where == "later" and ranks.rank == 1:
        WAYS[how]()
    ranks.gather(ranks.rank)
    return "done"


def main():
    where, how, seconds = sys.argv[1:]
    parallel = ParallelConfig(processes=2, timeout_seconds=float(seconds))
    end_by_sigterm()
    try:
        print(on_all_ranks(parallel, work, where, how, device="cpu"))
    except (LockstepError, KeyboardInterrupt) as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(2)


if __name__ == "__mp_main__":
    if sys.argv[1] == "import":
        WAYS[sys.argv[2]]()
    elif sys.argv[1] == "init":
        dist.init_process_group = lambda *_, **__: WAYS[sys.argv[2]]()
elif __name__ == "__main__":
    main()
