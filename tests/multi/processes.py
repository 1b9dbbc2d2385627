"""Starts the gloo processes of a test, once for all of its cases, and gathers what they found."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.launch.place import Rank
from lockstep.launch.ranks import Ranks


def run_ranks(work, directory, *, world, timeout=120):
    """[world] what `work(rank, directory)` returned in each of `world` processes with a group."""
    # A server that has imported torch once forks the ranks: a fresh start costs seconds for each.
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "lockstep.training.trainer"])
    started = [
        context.Process(target=_rank, args=(work, rank, world, str(directory)))
        for rank in range(world)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=timeout)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    said = "\n".join(Path(directory, f"{rank}.stderr").read_text() for rank in range(world))
    assert codes == [0] * world, f"exit codes {codes}:\n{said}"
    return [torch.load(f"{directory}/{r}.pt", weights_only=False) for r in range(world)]


def ranks_maker(rank, directory, *, name="told"):
    """Function of (number of processes that share a row) -> the `Ranks` of this process."""
    world = dist.get_world_size()
    place = Rank(rank=rank, world=world, local_rank=rank, meeting="")
    store = dist.FileStore(f"{directory}/{name}", world)
    return lambda sequence=1: Ranks(place, store, sequence=sequence, device=torch.device("cpu"))


def state_of(trainer):
    """name -> copy of each tensor of the optimizer's state."""
    return {t.name: t.view().clone() for t in trainer.optimizer.state_tensors()}


def assert_close(found, expected, limit, *, smallest=0.0):
    """Both have tensors of the same names. No value may be off by more than `limit` times the
    largest of its tensor, which counts as no less than `smallest`."""
    assert set(found) == set(expected)
    for name, values in expected.items():
        gap = float((found[name] - values).abs().max() / (values.abs().max() + smallest))
        assert gap <= limit, (name, gap)


def _rank(work, rank, world, directory):
    with open(f"{directory}/{rank}.stderr", "wb") as said:
        os.dup2(said.fileno(), sys.stderr.fileno())  # of this rank alone, C++ code's too
    faulthandler.enable()
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.save(work(rank, directory), f"{directory}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's own data at a normal exit
