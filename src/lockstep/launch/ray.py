"""The processes of a run on a Ray cluster.

Ray chooses the machines through placement groups. An actor in each place starts the ordinary
process of a rank, as torchrun would, and that process starts its own engines. Ranks meet through
torch.distributed. Ray carries the output and the result of rank 0, and ends every process when the
process that started the run ends.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lockstep.children import module_path
from lockstep.errors import ConfigError, LockstepError, RankError, require_package
from lockstep.launch.config import Demand, ParallelConfig, RayPlacement
from lockstep.launch.place import END_SECONDS, end_by_sigterm, free_port, handling_interrupts
from lockstep.launch.workers import Line, WorkerProcess, end_now, portable

T = TypeVar("T")

CARRIED = (
    *("CUDA_", "GLOO_", "HF_", "LOCKSTEP_", "MKL_", "NCCL_", "OMP_", "PYTHON", "TOKENIZERS_"),
    *("TORCH", "TRANSFORMERS_", "TRITON_", "WANDB_"),
)
"""Prefixes of the environment variables that all processes get from this one, apart from
CUDA_VISIBLE_DEVICES, which Ray decides."""

LOOK_SECONDS = 0.5
"""Interval of the checks for an interrupt."""

LAST_WORDS_SECONDS = 5.0
"""Longest wait, after the end of one rank, for the end of another that explains it."""

Event = tuple[str, Any]
"""("stdout" or "stderr", text), or how a rank ended: ("done", result), ("failed", error) or
("lost", why)."""


def on_ray(
    placement: RayPlacement, parallel: ParallelConfig, demand: Demand, call: Callable[[], T]
) -> T:
    """Makes the call on every rank; returns the result of rank 0, whose output appears here.

    Raises RankError with the end of its log if a rank is lost, and what rank 0 raises.
    """
    require_package("ray", extra="ray", needed_for="placement=ray")
    from ray.cloudpickle import dumps  # pyright: ignore

    places = placement.places(parallel, demand)
    with (
        _cluster(placement.address),
        _hosts(placement, places) as hosts,
        _passing_interrupts(hosts),
    ):
        return _run(hosts, dumps(call), has_gpus=bool(demand.trainer_gpus))


@contextlib.contextmanager
def _cluster(address: str) -> Iterator[None]:
    """Connects to the cluster, unless this process has before."""
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"placement.address={address}: no Ray cluster answers: {error}. Start one with `ray "
            "start --head` there and `ray start --address=HOST:PORT` on the others."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _hosts(
    placement: RayPlacement, places: Sequence[Mapping[str, float]]
) -> Iterator[Sequence[Any]]:
    """[rank] An actor in each place. At the end of the block all of their processes are ended, and
    the places given back. Raises ConfigError if the cluster has no room."""
    import ray
    from ray import exceptions
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([dict(place) for place in places], strategy="PACK")
    hosts: list[Any] = []
    try:
        try:
            ray.get(group.ready(), timeout=placement.wait_seconds)
        except exceptions.GetTimeoutError:
            has = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
            raise ConfigError(
                f"placement: the cluster has had no room for {places} in "
                f"{placement.wait_seconds:g} s. All of it has {has}; others may be using it "
                "(`ray status` tells). Lower engine.replicas or parallel.processes."
            ) from None
        environment = {
            name: value
            for name, value in os.environ.items()
            if (name.startswith(CARRIED) or name in placement.env)
            and name != "CUDA_VISIBLE_DEVICES"
        }
        for rank, place in enumerate(places):
            actor = ray.remote(Host).options(
                num_cpus=place["CPU"],
                num_gpus=place.get("GPU", 0),
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                ),
                runtime_env={"env_vars": environment | {"PYTHONPATH": module_path()}},
            )
            hosts.append(actor.remote(rank, os.getcwd()))
        yield hosts
    finally:
        if hosts:
            ending = [host.end.remote() for host in hosts]
            ray.wait(ending, num_returns=len(hosts), timeout=2 * END_SECONDS)
        for host in hosts:
            ray.kill(host)
        remove_placement_group(group)


def _run(hosts: Sequence[Any], payload: bytes, *, has_gpus: bool) -> Any:
    """Runs the process of each rank, and shows the output of rank 0 until it ends. payload: the
    call that each makes (`run_rank`). Returns the result of rank 0."""
    import ray

    nodes, ips, ports = zip(*ray.get([host.node.remote() for host in hosts]), strict=True)
    running: dict[Any, int] = {}
    for rank, host in enumerate(hosts):
        environment = {"MASTER_ADDR": ips[0], "MASTER_PORT": str(ports[0])}
        environment |= _environment(rank, nodes, has_gpus=has_gpus)
        running[host.run.options(num_returns="streaming").remote(payload, environment)] = rank
    ended: dict[int, Event] = {}
    deadline = math.inf
    for rank, events in _batches(running):
        for kind, value in events:
            if kind in ("stdout", "stderr"):
                print(value, end="", file=getattr(sys, kind), flush=True)
            elif rank not in ended:
                ended[rank] = kind, value
                if rank == 0 or kind == "lost":
                    deadline = min(deadline, time.monotonic() + LAST_WORDS_SECONDS)
        if 0 in ended and ended[0][0] == "done":
            return ended[0][1]
        if len(ended) == len(hosts) or time.monotonic() >= deadline:
            break
    lost = {rank: why for rank, (kind, why) in ended.items() if kind == "lost"}
    kind, error = ended.get(0, ("lost", None))
    if kind == "lost" or (lost and isinstance(error, RankError)):
        rank = max(lost)  # rank 0 is seldom why the others ended
        raise RankError(
            f"rank {rank} on {ips[rank]} has stopped: {lost[rank]}\nEverything up to the "
            "last checkpoint is kept; go on with resume=true."
        )
    raise error


def _environment(rank: int, nodes: Sequence[str], *, has_gpus: bool) -> dict[str, str]:
    """Environment variables of a rank's process, as torchrun sets them. nodes: machine of each."""
    size = shutil.get_terminal_size()
    values = {
        "WORLD_SIZE": len(nodes),
        "RANK": rank,
        # If Ray hands out GPUs, each process sees its own alone.
        "LOCAL_RANK": 0 if has_gpus else nodes[:rank].count(nodes[rank]),
        "LOCAL_WORLD_SIZE": 1 if has_gpus else nodes.count(nodes[rank]),
        "TERM": os.environ.get("TERM", "dumb"),
        "COLUMNS": size.columns,
        "LINES": size.lines,
        _IS_TERMINAL: int(sys.stdout.isatty()),
    }
    return {name: str(value) for name, value in values.items()}


def _batches(running: dict[Any, int]) -> Iterator[tuple[int, Sequence[Event]]]:
    """(rank, its next events), until every stream has ended; (0, ()) after LOOK_SECONDS without."""
    import ray
    from ray import exceptions

    while running:
        ready: list[Any] = ray.wait(list(running), timeout=LOOK_SECONDS)[0]
        for stream in ready:
            rank = running[stream]
            try:
                yield rank, ray.get(next(stream))
            except StopIteration:
                del running[stream]
            except exceptions.RayError as error:
                del running[stream]
                text = str(error).strip().split("\n")[0]
                yield rank, [("lost", f"its Ray actor or its machine is gone: {text}")]
        yield 0, ()


def _passing_interrupts(hosts: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Ctrl-C goes to rank 0, which stops the others at the next step; a second one to all."""
    num_interrupts = 0

    def pass_on() -> None:
        nonlocal num_interrupts
        num_interrupts += 1
        if num_interrupts > 2:
            raise KeyboardInterrupt
        for host in hosts[: 1 if num_interrupts == 1 else None]:
            host.signal.remote(int(signal.SIGINT))

    return handling_interrupts(pass_on)


# -- in an actor ----------------------------------------------------------------------------------


class Host:
    """A place on the cluster: runs the process of a rank there, and reports its end."""

    def __init__(self, rank: int, directory: str) -> None:
        os.chdir(directory)
        self._name = f"rank {rank}"
        self._logs = Path(tempfile.mkdtemp(prefix="lockstep-"))
        self._worker: WorkerProcess | None = None

    def node(self) -> tuple[str, str, int]:
        """(id of the machine, its address, a free port)."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free_port()

    def run(self, payload: bytes, environment: Mapping[str, str]) -> Iterator[Sequence[Event]]:
        """Starts the process, and yields its events until it has ended."""
        work, log = "lockstep.launch.ray:run_rank", self._logs / "rank.log"
        self._worker = WorkerProcess(work, name=self._name, log=log, environment=environment)
        self._worker.send([payload])
        with contextlib.suppress(EOFError, OSError):
            while (events := self._worker.receive()) is not None:
                yield events
        yield [("lost", self._worker.why_ended())]

    def signal(self, number: int) -> None:
        if self._worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._worker.pid, number)

    def end(self) -> None:
        """Ends its process, by force if necessary."""
        if self._worker is not None:
            self._worker.end(seconds=END_SECONDS)
        shutil.rmtree(self._logs, ignore_errors=True)


# -- in the process of a rank ---------------------------------------------------------------------

_IS_TERMINAL = "LOCKSTEP_IS_TERMINAL"


class _Forwarded(io.TextIOBase):
    """A stream of rank 0, shown where the run was started."""

    def __init__(self, line: Line, name: str) -> None:
        self._line, self._name = line, name

    def isatty(self) -> bool:
        return os.environ[_IS_TERMINAL] == "1"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._line.send([(self._name, text)])
        return len(text)


def run_rank(line: Line) -> None:
    """The worker's function of a rank, in an environment like torchrun's."""
    payload = line.receive()
    assert payload is not None, "it waits"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_by_sigterm()
    line.listen(lambda batch: None, end_now)
    if os.environ["RANK"] == "0":
        sys.stdout, sys.stderr = _Forwarded(line, "stdout"), _Forwarded(line, "stderr")
    try:
        event = "done", pickle.loads(payload[0])()
    except KeyboardInterrupt:
        event = "failed", KeyboardInterrupt()
    except LockstepError as error:  # as a class of `errors`, which can be pickled
        event = "failed", portable(error)
    except BaseException as error:
        traceback.print_exc()
        what = f"rank {os.environ['RANK']} has failed: {type(error).__name__}: {error}"
        event = "failed", RankError(what)
    line.send([event])
