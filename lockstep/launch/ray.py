"""The processes of a run on a Ray cluster.

Ray decides where: it gives out placement groups, and an actor in each place starts the ordinary
process of a rank, as torchrun would, or of an engine (`launch.workers`). Ranks meet through
torch.distributed and reach their engines over TCP; Ray carries what rank 0 prints and how it ended,
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
from lockstep.launch.placement import Bundle, RayPlacement
from lockstep.launch.processes import END_SECONDS, end_by_sigterm, on_all_ranks
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
    "CUDA_", "GLOO_", "HF_", "LOCKSTEP_", "MKL_", "NCCL_", "OMP_", "PYTHON", "TOKENIZERS_",
    "TORCH", "TRANSFORMERS_", "TRITON_", "WANDB_",
)  # fmt: skip
"""Environment variables that begin so are the same in all processes."""

OF_A_MACHINE = {"CUDA_VISIBLE_DEVICES"}
"""Those of them that Ray decides."""

OBJECT_STORE_BYTES = 80 << 20  # nothing of a run goes through it; Ray takes no less than 75 MiB

LOOK_SECONDS = 0.5
"""How often an interrupt is looked for."""

LAST_WORDS_SECONDS = 5.0
"""How long after the end of rank 0 another rank's is waited for, which explains it."""

Event = tuple[str, Any]


def on_ray(
    placement: RayPlacement,
    parallel: ParallelConfig,
    engines: tuple[str, int, int],
    work: Callable[..., T],
    args: Sequence[Any],
    settings: dict[str, Any],
) -> T:
    """`work(ranks, *args, **settings)` on every rank; returns what it did on rank 0, whose output
    appears here. engines: (function, how many, how often each is started again).

    Raises RankError if a rank is lost, with the end of its log, and what rank 0 raises.
    """
    try:
        from ray.cloudpickle import dumps  # pyright: ignore
    except ModuleNotFoundError as error:
        raise MissingExtraError.of("ray", extra="ray", needed_for="placement=ray") from error
    world = placement.num_ranks(parallel, os.environ)
    bundles = placement.bundles(world, engines[1])
    with _cluster(placement, bundles), _Hosts(placement, bundles, world, engines) as hosts:
        payload = dumps(
            (parallel, work, args, settings, "cuda" if placement.trainer_gpus else "cpu")
        )
        hosts.start(payload)
        return hosts.watch()


@contextlib.contextmanager
def _cluster(placement: RayPlacement, bundles: Sequence[Bundle]) -> Iterator[None]:
    """Connected to the cluster, which ends with the block if it was started for it."""
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
            **options,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
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
    """The actors of a run, as the process that started it sees them."""

    def __init__(
        self,
        placement: RayPlacement,
        bundles: Sequence[Bundle],
        world: int,
        engines: tuple[str, int, int],
    ) -> None:
        self._placement, self._bundles, self._world = placement, bundles, world
        self._work, self._num_engines, self._restarts = engines
        self._group: Any = None
        self._ranks: dict[int, Any] = {}
        self._engines: dict[int, Any] = {}
        self._ips: dict[int, str] = {}
        self._num_interrupts = 0

    def __enter__(self) -> _Hosts:
        try:
            self._place()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _place(self) -> None:
        import ray
        from ray import exceptions
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placement = self._placement
        resources = [bundle.resources for bundle in self._bundles]
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
        found = os.pathsep.join(dict.fromkeys(os.path.abspath(path) for path in sys.path))
        for index, bundle in enumerate(self._bundles):
            there = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
            for is_rank, numbers in ((True, bundle.ranks), (False, bundle.engines)):
                cpus = placement.trainer_cpus if is_rank else placement.replica_cpus
                for number in numbers:
                    host = make.options(
                        num_cpus=cpus, num_gpus=bundle.gpus_each, max_concurrency=4,
                        scheduling_strategy=there,
                        runtime_env={"env_vars": {"PYTHONPATH": found}},
                    ).remote()  # fmt: skip
                    (self._ranks if is_rank else self._engines)[number] = host

    def start(self, payload: bytes) -> None:
        """Starts the engines, then the ranks. payload: what a rank does (`run_rank`)."""
        import ray

        environment = _carried(self._placement)
        key = secrets.token_hex(32)
        where = os.getcwd()
        engines = [
            host.listen.remote(
                self._work, environment | {KEY: key}, where, self._restarts, f"engine {index}"
            )
            for index, host in sorted(self._engines.items())
        ]
        if engines:
            environment |= {ADDRESSES: ",".join(ray.get(engines)), KEY: key}
        ranks = [host for _, host in sorted(self._ranks.items())]
        found = ray.get([host.node.remote() for host in ranks])
        nodes = [node for node, _ in found]
        self._ips = {rank: ip for rank, (_, ip) in enumerate(found)}
        environment |= {
            "MASTER_ADDR": found[0][1],
            "MASTER_PORT": str(ray.get(ranks[0].free_port.remote())),
            "WORLD_SIZE": str(self._world),
            **_terminal(),
        }
        starting = []
        for rank, host in enumerate(ranks):
            # Where Ray gives GPUs out, each process sees its own alone.
            local = 0 if self._placement.trainer_gpus else nodes[:rank].count(nodes[rank])
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
            }
            starting.append(host.start_rank.remote(payload, environment | own, where, rank))
        ray.get(starting)

    def watch(self) -> Any:
        """Shows what rank 0 prints until it ends. Returns its result."""
        import ray
        from ray import exceptions

        before = None
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGINT, self._interrupt)
        hosts = {("rank", r): h for r, h in self._ranks.items()}
        hosts |= {("engine", i): h for i, h in self._engines.items()}
        asked = {host.events.remote(): (who, host) for who, host in hosts.items()}
        ended = _Ended()
        try:
            while not ended.is_over():
                done, _ = ray.wait(list(asked), timeout=LOOK_SECONDS)
                for answer in done:
                    (kind, number), host = who = asked.pop(answer)
                    try:
                        events: list[Event] = ray.get(answer)
                        asked[host.events.remote()] = who
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
        for rank, host in self._ranks.items():
            if rank == 0 or self._num_interrupts > 1:
                host.signal.remote(int(signal.SIGINT))

    def __exit__(self, *_: object) -> None:
        import ray
        from ray import exceptions
        from ray.util import remove_placement_group

        hosts = [*self._ranks.values(), *self._engines.values()]
        with contextlib.suppress(exceptions.RayError):
            ray.wait([host.end.remote() for host in hosts], num_returns=len(hosts),
                     timeout=2 * END_SECONDS)  # fmt: skip
        for host in hosts:
            ray.kill(host)
        if self._group is not None:
            remove_placement_group(self._group)


class _Ended:
    """How ranks have ended, and when enough is known to say it."""

    def __init__(self) -> None:
        self._told: dict[int, Event] = {}
        """What ranks said of their end."""
        self._lost: dict[int, str] = {}
        """Those that ended without a word."""
        self._deadline = float("inf")

    def take(self, rank: int, name: str, value: Any) -> None:
        if name != "lost":
            self._told[rank] = name, value
        elif rank not in self._told:
            self._lost[rank] = value
        if self._lost or self._told.get(0, ("done", None))[0] == "failed":
            self._deadline = min(self._deadline, time.monotonic() + LAST_WORDS_SECONDS)

    def is_over(self) -> bool:
        """Rank 0 has ended, and if another one is why, that is known."""
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
            rank = max(self._lost)  # rank 0 alone is seldom why the others ended
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


def _carried(placement: RayPlacement) -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(CARRIED) or name in placement.env) and name not in OF_A_MACHINE
    }


def _terminal() -> dict[str, str]:
    """What rank 0 is told of the terminal that it prints to."""
    size = shutil.get_terminal_size()
    return {
        "TERM": os.environ.get("TERM", "dumb"),
        "COLUMNS": str(size.columns),
        "LINES": str(size.lines),
        _IS_TERMINAL: str(int(sys.stdout.isatty())),
    }


_IS_TERMINAL = "LOCKSTEP_IS_TERMINAL"


def _show(stream: str, text: str) -> None:
    out = sys.stdout if stream == "stdout" else sys.stderr
    out.write(text)
    out.flush()


# -- in an actor ----------------------------------------------------------------------------------


class Host:
    """A place on the cluster: starts one process there, and says what becomes of it."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._logs = Path(tempfile.mkdtemp(prefix="lockstep-"))
        self._rank: Worker | None = None
        self._engine: subprocess.Popen[bytes] | None = None
        self._is_ended = False

    def node(self) -> tuple[str, str]:
        """(the machine's id, its address)."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def free_port(self) -> int:
        with socket.socket() as found:
            found.bind(("", 0))
            return found.getsockname()[1]

    def listen(
        self, work: str, environment: dict[str, str], where: str, restarts: int, name: str
    ) -> str:
        """Starts an engine's process, and again as often as it dies up to `restarts`. Returns the
        address that all of them have."""
        os.chdir(where)
        listening = socket.create_server((self.node()[1], 0))
        address = f"{self.node()[1]}:{listening.getsockname()[1]}"
        log = self._logs / "engine.log"
        own = _own(environment)

        def start() -> subprocess.Popen[bytes]:
            return start_listener(work, listening, log=log, environment=own)

        def keep() -> None:
            for left in range(restarts, -1, -1):
                assert self._engine is not None, "it is started before it is kept"
                self._engine.wait()
                if self._is_ended or self._engine.returncode == 0:
                    listening.close()
                    return
                what = f"{name} at {address} {how_ended(self._engine)}. {log_tail(log)}"
                if not left:
                    listening.close()  # who comes now is refused, and does not wait
                    self._events.put(("lost", f"{what}\nIt is not started again."))
                    return
                self._events.put(("note", f"{what}\nIt is started again."))
                self._engine = start()

        self._engine = start()
        threading.Thread(target=keep, daemon=True).start()
        return address

    def start_rank(
        self, payload: bytes, environment: dict[str, str], where: str, rank: int
    ) -> None:
        os.chdir(where)
        worker = self._rank = start_worker(
            "lockstep.launch.ray:run_rank", name=f"rank {rank}", log=self._logs / "rank.log",
            environment=_own(environment),
        )  # fmt: skip
        worker.listen(self._take, lambda why: self._events.put(("lost", why)))
        worker.send([payload])

    def _take(self, batch: Batch) -> None:
        for event in batch:
            self._events.put(event)

    def events(self) -> list[Event]:
        """What has happened, as soon as something has."""
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
        """Its process has ended after this, killed if it goes on."""
        self._is_ended = True
        if self._rank is not None:
            self._rank.end(seconds=END_SECONDS)
        if self._engine is not None:
            self._engine.kill()
            self._engine.wait()
        shutil.rmtree(self._logs, ignore_errors=True)


def _own(environment: dict[str, str]) -> dict[str, str]:
    """With the GPUs that Ray has given this actor; none if it has given none."""
    import ray

    gpus = ",".join(map(str, ray.get_gpu_ids()))
    return environment | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES") or gpus}


# -- in the process of a rank ---------------------------------------------------------------------


class _Forwarded(io.TextIOBase):
    """A stream of rank 0, which appears where the run was started."""

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
    """The worker's function of a rank: what torchrun would have started."""
    (payload,) = line.receive()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_by_sigterm()
    line.listen(lambda batch: None)  # ends this process with its actor
    is_leader = os.environ["RANK"] == "0"
    if is_leader:
        sys.stdout, sys.stderr = _Forwarded(line, "stdout"), _Forwarded(line, "stderr")
    try:
        parallel, work, args, settings, device = pickle.loads(payload)
        line.send([("done", on_all_ranks(parallel, work, *args, device=device, **settings))])
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
