"""The processes of a run on a Ray cluster.

Ray decides where: it hands out placement groups, and an actor in each place starts the ordinary
process of a rank, as torchrun would, or of an engine (`launch.workers`). Ranks meet through
torch.distributed and reach their engines over TCP; Ray carries the output and the result of rank 0,
and ends every process with the one that started the run.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lockstep import errors
from lockstep.children import how_ended
from lockstep.errors import ConfigError, LockstepError, MissingExtraError, RankError
from lockstep.launch.config import ParallelConfig
from lockstep.launch.place import END_SECONDS, end_by_sigterm
from lockstep.launch.placement import Bundle, RayPlacement
from lockstep.launch.workers import (
    ADDRESSES,
    KEY,
    Batch,
    Line,
    Worker,
    log_tail,
    start_listener,
    start_worker,
)

T = TypeVar("T")

CARRIED = (
    "CUDA_",
    "GLOO_",
    "HF_",
    "LOCKSTEP_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTHON",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
    "TRITON_",
    "WANDB_",
)
"""Prefixes of the environment variables that all processes get from this one."""

OF_A_MACHINE = {"CUDA_VISIBLE_DEVICES"}
"""Exceptions to these: variables that Ray decides."""

OBJECT_STORE_BYTES = 80 << 20  # a run sends nothing through it; Ray's least is 75 MiB

LOOK_SECONDS = 0.5
"""Interval of the checks for an interrupt."""

LAST_WORDS_SECONDS = 5.0
"""Longest wait, after the end of rank 0, for the end of another rank that explains it."""

Event = tuple[str, Any]


def on_ray(
    placement: RayPlacement,
    parallel: ParallelConfig,
    engines: tuple[str, int, int],
    call: Callable[[], T],
) -> T:
    """Makes the call on every rank; returns the result of rank 0, whose output appears here.
    engines: (function, number, restarts of each).

    Raises RankError with the end of its log if a rank is lost, and what rank 0 raises.
    """
    try:
        from ray.cloudpickle import dumps  # pyright: ignore
    except ModuleNotFoundError as error:
        raise MissingExtraError.of("ray", extra="ray", needed_for="placement=ray") from error
    world = placement.num_ranks(parallel, os.environ)
    bundles = placement.bundles(world, engines[1])
    with _cluster(placement, bundles):
        hosts = _Hosts(placement)
        try:
            hosts.place(bundles)
            hosts.start(dumps(call), engines)
            return hosts.watch()
        finally:
            hosts.close()


@contextlib.contextmanager
def _cluster(placement: RayPlacement, bundles: Sequence[Bundle]) -> Iterator[None]:
    """Connects to the cluster, which ends with the block if it was started for it."""
    import ray

    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"address": placement.address}
    if not placement.address:
        options = {
            "address": "local",
            "num_cpus": sum(bundle.cpus for bundle in bundles) // 1 + 1,
            "num_gpus": sum(bundle.gpus for bundle in bundles),
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
    try:
        ray.init(
            **options, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"placement.address={placement.address!r}: no Ray cluster answers: {error}. Start one "
            "with `ray start --head` there and `ray start --address=HOST:PORT` on the others, or "
            "leave placement.address empty."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


class _Hosts:
    """The actors of a run, for the process that started it."""

    def __init__(self, placement: RayPlacement) -> None:
        self._placement = placement
        self._group: Any = None
        self._hosts: dict[tuple[str, int], Any] = {}
        """("rank" or "engine", number) -> actor."""
        self._ips: dict[int, str] = {}
        self._num_interrupts = 0

    def _of(self, kind: str) -> list[Any]:
        return [host for (found, _), host in sorted(self._hosts.items()) if found == kind]

    def place(self, bundles: Sequence[Bundle]) -> None:
        """Starts an actor for each process. Raises ConfigError if the cluster has no room."""
        import ray
        from ray import exceptions
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placement = self._placement
        resources = [bundle.resources for bundle in bundles]
        self._group = placement_group(resources, strategy=placement.strategy.upper())
        try:
            ray.get(self._group.ready(), timeout=placement.wait_seconds)
        except exceptions.GetTimeoutError:
            has = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
            raise ConfigError(
                f"placement: the cluster has had no room for {resources} ({placement.strategy}) in "
                f"{placement.wait_seconds:g} s. All of it has {has}; others may be using it "
                "(`ray status` tells). Lower engine.replicas or parallel.processes."
            ) from None
        make = ray.remote(Host)
        path = os.pathsep.join(dict.fromkeys(os.path.abspath(path) for path in sys.path))
        for index, bundle in enumerate(bundles):
            there = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
            wanted = [("rank", n, placement.trainer_cpus) for n in bundle.ranks]
            wanted += [("engine", n, placement.replica_cpus) for n in bundle.engines]
            for kind, number, cpus in wanted:
                self._hosts[kind, number] = make.options(
                    num_cpus=cpus,
                    num_gpus=bundle.gpus_each,
                    max_concurrency=4,
                    scheduling_strategy=there,
                    runtime_env={"env_vars": {"PYTHONPATH": path}},
                ).remote()

    def start(self, payload: bytes, engines: tuple[str, int, int]) -> None:
        """Starts the engines, then the ranks. payload: the call that a rank makes (`run_rank`)."""
        import ray

        work, _, restarts = engines
        environment = {
            name: value
            for name, value in os.environ.items()
            if (name.startswith(CARRIED) or name in self._placement.env)
            and name not in OF_A_MACHINE
        }
        key = secrets.token_hex(32)
        where = os.getcwd()
        addresses = ray.get(
            [
                host.listen.remote(
                    work, environment | {KEY: key}, where, restarts, f"engine {index}"
                )
                for index, host in enumerate(self._of("engine"))
            ]
        )
        if addresses:
            environment |= {ADDRESSES: ",".join(addresses), KEY: key}
        ranks = self._of("rank")
        found = ray.get([host.node.remote() for host in ranks])
        nodes = [node for node, _, _ in found]
        self._ips = {rank: ip for rank, (_, ip, _) in enumerate(found)}
        environment |= {
            "MASTER_ADDR": found[0][1],
            "MASTER_PORT": str(found[0][2]),
            "WORLD_SIZE": str(len(ranks)),
            **_terminal(),
        }
        starting = []
        for rank, host in enumerate(ranks):
            # If Ray hands out GPUs, each process sees its own alone.
            local = 0 if self._placement.trainer_gpus else nodes[:rank].count(nodes[rank])
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
            }
            starting.append(host.start_rank.remote(payload, environment | own, where, rank))
        ray.get(starting)

    def watch(self) -> Any:
        """Shows the output of rank 0 until it ends. Returns its result."""
        import ray
        from ray import exceptions

        before = None
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGINT, self._interrupt)
        asked = {host.events.remote(): who for who, host in self._hosts.items()}
        ended = _Ended()
        try:
            while not ended.is_over():
                done, _ = ray.wait(list(asked), timeout=LOOK_SECONDS)
                for answer in done:
                    kind, number = who = asked.pop(answer)
                    try:
                        events: list[Event] = ray.get(answer)
                        asked[self._hosts[who].events.remote()] = who
                    except exceptions.RayError as error:
                        text = str(error).strip().split("\n")[0]
                        events = [("lost", f"its Ray actor or its machine is gone: {text}")]
                    for name, value in events:
                        if name == "output":
                            _show(*value)
                        elif kind == "engine":
                            _show("stderr", f"{value}\n")
                        else:
                            ended.take(number, name, value)
            return ended.result(self._ips)
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)

    def _interrupt(self, *_: object) -> None:
        """Ctrl-C goes to rank 0, which stops the others at the next step; a second one to all."""
        self._num_interrupts += 1
        if self._num_interrupts > 2:
            raise KeyboardInterrupt
        for rank, host in enumerate(self._of("rank")):
            if rank == 0 or self._num_interrupts > 1:
                host.signal.remote(int(signal.SIGINT))

    def close(self) -> None:
        """Ends every process and actor, and gives the places back."""
        import ray
        from ray import exceptions
        from ray.util import remove_placement_group

        hosts = list(self._hosts.values())
        if hosts:
            with contextlib.suppress(exceptions.RayError):
                ray.wait(
                    [host.end.remote() for host in hosts],
                    num_returns=len(hosts),
                    timeout=2 * END_SECONDS,
                )
        for host in hosts:
            ray.kill(host)
        if self._group is not None:
            remove_placement_group(self._group)


class _Ended:
    """How ranks have ended, and whether enough is known to report it."""

    def __init__(self) -> None:
        self._told: dict[int, Event] = {}
        """Reports of ranks about their end."""
        self._lost: dict[int, str] = {}
        """Ranks that ended without a report."""
        self._deadline = float("inf")

    def take(self, rank: int, name: str, value: Any) -> None:
        if name != "lost":
            self._told[rank] = name, value
        elif rank not in self._told:
            self._lost[rank] = value
        if self._lost or self._told.get(0, ("done", None))[0] == "failed":
            self._deadline = min(self._deadline, time.monotonic() + LAST_WORDS_SECONDS)

    def is_over(self) -> bool:
        """Whether rank 0 has ended, and it is known which other rank is the cause, if one is."""
        if 0 not in self._told and 0 not in self._lost:
            return time.monotonic() > self._deadline
        name, value = self._told.get(0, ("lost", None))
        if name == "failed" and value[0] == "RankError":
            return bool(self._lost) or time.monotonic() > self._deadline
        return True

    def result(self, ips: dict[int, str]) -> Any:
        name, value = self._told.get(0, ("lost", None))
        if name == "done":
            return value
        if self._lost and (name == "lost" or value[0] == "RankError"):
            rank = max(self._lost)  # rank 0 is seldom why the others ended
            where = ips.get(rank, "a machine that is gone")
            raise RankError(
                f"rank {rank} on {where} has stopped: {self._lost[rank]}\nEverything up to the "
                "last checkpoint is kept; go on with resume=true."
            )
        if name == "lost":
            raise RankError("rank 0 is gone, and nobody knows why.")
        kind, text = value
        if kind == "KeyboardInterrupt":
            raise KeyboardInterrupt
        raise getattr(errors, kind)(text)


_IS_TERMINAL = "LOCKSTEP_IS_TERMINAL"


def _terminal() -> dict[str, str]:
    """Variables that describe, to rank 0, the terminal that it prints to."""
    size = shutil.get_terminal_size()
    return {
        "TERM": os.environ.get("TERM", "dumb"),
        "COLUMNS": str(size.columns),
        "LINES": str(size.lines),
        _IS_TERMINAL: str(int(sys.stdout.isatty())),
    }


def _show(stream: str, text: str) -> None:
    out = sys.stdout if stream == "stdout" else sys.stderr
    out.write(text)
    out.flush()


# -- in an actor ----------------------------------------------------------------------------------


class Host:
    """A place on the cluster: starts one process there, and reports what becomes of it."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._logs = Path(tempfile.mkdtemp(prefix="lockstep-"))
        self._rank: Worker | None = None
        self._engine: subprocess.Popen[bytes] | None = None
        self._is_ended = False

    def node(self) -> tuple[str, str, int]:
        """(id of the machine, its address, a free port)."""
        import ray

        with socket.socket() as found:
            found.bind(("", 0))
            port = found.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port

    def listen(
        self, work: str, environment: dict[str, str], where: str, restarts: int, name: str
    ) -> str:
        """Starts an engine's process, and again each time it dies, up to `restarts` times. Returns
        the address that all of them have."""
        os.chdir(where)
        listening = socket.create_server((self.node()[1], 0))
        host, port = listening.getsockname()
        log = self._logs / "engine.log"
        own = _own(environment)
        engine = self._engine = start_listener(work, listening, log=log, environment=own)

        def keep(engine: subprocess.Popen[bytes]) -> None:
            for left in range(restarts, -1, -1):
                engine.wait()
                if self._is_ended or engine.returncode == 0:
                    break
                end = f"{name} at {host}:{port} {how_ended(engine)}. {log_tail(log)}"
                if left:
                    self._events.put(("note", f"{end}\nIt is started again."))
                    engine = self._engine = start_listener(
                        work, listening, log=log, environment=own
                    )
                else:
                    self._events.put(("lost", f"{end}\nIt is not started again."))
            listening.close()  # a later client is refused, and does not wait

        threading.Thread(target=keep, args=(engine,), daemon=True).start()
        return f"{host}:{port}"

    def start_rank(
        self, payload: bytes, environment: dict[str, str], where: str, rank: int
    ) -> None:
        os.chdir(where)
        worker = self._rank = start_worker(
            "lockstep.launch.ray:run_rank",
            name=f"rank {rank}",
            log=self._logs / "rank.log",
            environment=_own(environment),
        )
        worker.listen(self._take, lambda why: self._events.put(("lost", why)))
        worker.send([payload])

    def _take(self, batch: Batch) -> None:
        for event in batch:
            self._events.put(event)

    def events(self) -> list[Event]:
        """Waits for the next events."""
        found = [self._events.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._events.get_nowait())
        return found

    def signal(self, number: int) -> None:
        if self._rank is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._rank.pid, number)

    def end(self) -> None:
        """Ends its process, by force if necessary."""
        self._is_ended = True
        if self._rank is not None:
            self._rank.end(seconds=END_SECONDS)
        if self._engine is not None:
            self._engine.kill()
            self._engine.wait()
        shutil.rmtree(self._logs, ignore_errors=True)


def _own(environment: dict[str, str]) -> dict[str, str]:
    """The environment with the GPUs that Ray has given this actor, if any."""
    import ray

    gpus = ",".join(map(str, ray.get_gpu_ids()))
    return environment | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES") or gpus}


# -- in the process of a rank ---------------------------------------------------------------------


class _Forwarded(io.TextIOBase):
    """A stream of rank 0, shown where the run was started."""

    def __init__(self, line: Line, name: str) -> None:
        self._line, self._name = line, name

    def isatty(self) -> bool:
        return os.environ[_IS_TERMINAL] == "1"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._line.send([("output", (self._name, text))])
        return len(text)


def run_rank(line: Line) -> None:
    """The worker's function of a rank, in an environment like torchrun's."""
    (payload,) = line.receive()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_by_sigterm()
    line.listen(lambda batch: None)  # ends this process with its actor
    if os.environ["RANK"] == "0":
        sys.stdout, sys.stderr = _Forwarded(line, "stdout"), _Forwarded(line, "stderr")
    try:
        line.send([("done", pickle.loads(payload)())])
    except KeyboardInterrupt:
        line.send([("failed", ("KeyboardInterrupt", ""))])
    except LockstepError as error:
        kinds = (
            kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__
        )
        line.send([("failed", (next(kinds), str(error)))])
    except BaseException as error:
        traceback.print_exc()
        what = f"rank {os.environ['RANK']} has failed: {type(error).__name__}: {error}"
        line.send([("failed", ("RankError", what))])
