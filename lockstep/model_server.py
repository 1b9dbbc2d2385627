"""`lockstep serve`: a model behind the gateway, for any agent that speaks HTTP.

With `out`, the agents' trajectories are stored in a run directory, which `lockstep report` and
`lockstep doctor` read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.agent.gateway.exchange import Refusal
from lockstep.agent.tasks import derive_seed
from lockstep.config import from_dict, resolve, to_dict
from lockstep.engines.config import EmbeddedConfig
from lockstep.errors import ConfigError, RunError
from lockstep.models import peft_format
from lockstep.models.config import FallbackConfig, ModelConfig
from lockstep.models.locate import locate_model
from lockstep.run.build import checkpoint_of, load_model
from lockstep.run.preflight import ModelFiles, check_fallback, read_model_files
from lockstep.run_config import ServeConfig
from lockstep.store.run import RunDirectory, load_run
from lockstep.types import Group, SamplingParams, Task, Trajectory

if TYPE_CHECKING:
    from lockstep.agent.gateway.server import GatewayServer
    from lockstep.agent.gateway.session import GatewaySession
    from lockstep.engines.base import Engine

T = TypeVar("T")

DEFAULT_MAX_TOKENS = 8192
"""Tokens of a dialogue if the setting is not given and the model takes as many."""
PART_SECONDS = 10.0
"""Interval in which finished sessions are written that no client waits for, as one part."""
GATHER_SECONDS = 0.2
"""Seconds that a client who finished its session waits for others, to write one part for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Settings of a server, and the checkpoint whose weights it serves."""

    config: ServeConfig
    weights: Path | None = None
    """Weights of a run's checkpoint; None are the model's own."""
    version: int = 0
    """Version of the weights, which an engine in this process records with each turn."""


def find_served(target: str, settings: Sequence[str]) -> Served:
    """Reads `lockstep serve TARGET key=value ...`; TARGET is `RUN`, `RUN@STEP` or a model.

    Raises ConfigError, and what reading a run raises.
    """
    path, _, step = target.rpartition("@")
    if not (path and step.isdigit()):
        path, step = target, ""
    if (Path(path) / "environment.json").is_file():
        return _of_run(Path(path), int(step) if step else None, settings)
    config = resolve(ServeConfig(model=target), settings)
    if not any(setting.partition("=")[0].strip() == "max_tokens" for setting in settings):
        kind = FallbackConfig if config.fallback else ModelConfig
        limit = kind.from_directory(locate_model(config.model)).max_positions
        config = replace(config, max_tokens=min(limit, DEFAULT_MAX_TOKENS))
    return Served(config=config)


def _of_run(path: Path, step: int | None, settings: Sequence[str]) -> Served:
    run = load_run(path)
    checkpoint = checkpoint_of(run, step)
    own = {one.name for one in fields(ServeConfig)} - {"parallel"}  # one process is enough to play
    stored = run.config | (run.config.get("agent") or {})
    kept = {name: value for name, value in stored.items() if name in own}
    return Served(
        config=resolve(from_dict(ServeConfig, kept), settings),
        weights=checkpoint / "policy",
        version=int(checkpoint.name.rpartition("-")[2]),
    )


def open_served(
    served: Served, *, scratch: Path | None, on_wait: Callable[[str], None] = lambda text: None
) -> tuple[ModelFiles, Engine]:
    """Opens the engine. Returns it with the files of its model."""
    from lockstep.engines.base import EngineContext
    from lockstep.engines.registry import check_capabilities, open_engine

    config = served.config
    check_fallback(config)
    model_files = read_model_files(config)
    directory, model = model_files.directory, None
    if isinstance(config.engine, EmbeddedConfig):
        model = load_model(config, model_files, weights=served.weights)
    elif served.weights is not None:
        if (served.weights / peft_format.CONFIG).is_file():
            raise ConfigError(
                "the run trained an adapter, and only engine=embedded serves one. Merge it first: "
                "lockstep export RUN --hf DIR --merged, then lockstep serve DIR."
            )
        directory = served.weights
    context = EngineContext(
        model=model,
        token_bytes=model_files.renderer.tokenizer.all_token_bytes(),
        directory=directory,
        vocab_size=model_files.model.vocab_size,
        max_tokens=config.max_tokens,
        dtype=config.dtype,
        seed=config.seed,
        run=config.name,
        scratch=scratch,
        on_wait=on_wait,
    )
    engine = open_engine(config.engine.for_rank(0, 1), context)
    check_capabilities(
        engine, vocab_size=model_files.model.vocab_size, max_tokens=config.max_tokens
    )
    return model_files, engine


class SessionStore:
    """Writes finished sessions into a run directory, several as one part with a row of metrics.
    Sessions that cannot be written are kept and tried again."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._waiting: list[Group] = []
        self._step = 0
        self.num_stored = 0
        self._storing = asyncio.Lock()

    def add(self, session: GatewaySession) -> None:
        """Takes in a finished session, unless it asked for no turn."""
        trajectory = session.trajectory
        if trajectory.num_turns:
            task = Task(id=trajectory.task_id or trajectory.id)
            self._waiting.append(Group(task=task, trajectories=[trajectory]))

    async def store(self) -> None:
        """Writes what waits, together with what others finish in the next moment. Raises Refusal
        (503) if the disk does not take it."""
        async with self._storing:
            if not self._waiting:  # written with another's
                return
            await asyncio.sleep(GATHER_SECONDS)
            try:
                self.write()
            except RunError as error:
                raise Refusal(
                    503, "not_stored", f"{error} They are kept, and tried again."
                ) from error

    def write(self) -> None:
        """Raises RunError if the disk does not take them."""
        if not self._waiting:
            return
        groups = list(self._waiting)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        row: dict[str, Any] = {
            "step": self._step,
            "tokens/sampled": sum(t.num_sampled_tokens for t in trajectories),
        }
        rewards = [t.reward for t in trajectories if t.rewards]
        if rewards:
            row["reward/mean"] = sum(rewards) / len(rewards)
        try:
            self._run.write_trajectories(self._step, groups)
            self._run.log(row)
        except OSError as error:
            raise RunError(
                f"{self._run.path}: {len(groups)} finished sessions could not be written: {error}."
            ) from error
        del self._waiting[: len(groups)]
        self._step += 1
        self.num_stored += len(groups)


@contextlib.asynccontextmanager
async def opened(
    served: Served,
    *,
    key: str = "",
    out: str | Path | None = None,
    on_wait: Callable[[str], None] = lambda text: None,
) -> AsyncIterator[tuple[GatewayServer, SessionStore | None]]:
    """Runs the server inside the block. At its end all sessions are ended, stored if there is an
    `out`, and the engine is closed."""
    from lockstep.agent.gateway.registry import SessionRegistry
    from lockstep.agent.gateway.server import GatewayServer

    served.config.gateway.check_key(key)
    async with contextlib.AsyncExitStack() as stack:
        store = None
        if out is not None:
            directory = RunDirectory.create(out, to_dict(served.config))
            store = SessionStore(stack.enter_context(directory))
            stack.callback(store.write)
        scratch = None if out is None else Path(out)
        model_files, engine = open_served(served, scratch=scratch, on_wait=on_wait)
        stack.push_async_callback(engine.close)
        sessions = SessionRegistry(
            lambda task: _session(served, model_files, engine, task),
            max_sessions=served.config.max_sessions,
            idle_seconds=served.config.idle_seconds,
            on_finished=lambda session: None if store is None else store.add(session),
        )
        stack.push_async_callback(sessions.close)
        if served.version and engine.capabilities.shares_weights:
            await engine.load_weights(None, version=served.version)
        config = served.config
        server = GatewayServer(
            sessions,
            renderer=model_files.renderer,
            model=config.model.rstrip("/").rpartition("/")[2],
            config=config.gateway,
            key=key,
            store=None if store is None else store.store,
        )
        stack.push_async_callback(server.close)
        await server.start()
        yield server, store


def serve(served: Served, *, key: str, out: str | Path | None, is_json: bool) -> None:
    """Serves until Ctrl-C, which is its ordinary end."""

    def note(text: str) -> None:
        if not is_json:
            print(text, file=sys.stderr, flush=True)

    async def run() -> None:
        server, store = None, None
        try:
            async with opened(served, key=key, out=out, on_wait=note) as (server, store):
                print(_access(server, served, key, out, is_json=is_json), flush=True)
                stop = _stop_on_sigint(note)
                while not stop.is_set():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(stop.wait(), PART_SECONDS)
                    try:
                        if store is not None:
                            store.write()
                    except RunError as error:
                        note(f"{error} They are kept, and tried again.")
        finally:
            if server is not None:
                names = ("requests", "refused", "failed", "sampled_tokens", "encoded_tokens")
                found = {"sessions": len(server.sessions.all())}
                found |= {name: server.counts[name] for name in names}
                found["stored"] = 0 if store is None else store.num_stored
                text = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in found.items())
                print(json.dumps(found) if is_json else text, flush=True)

    asyncio.run(run())


def _access(
    server: GatewayServer, served: Served, key: str, out: str | Path | None, *, is_json: bool
) -> str:
    """Says how to reach the server."""
    if is_json:
        return json.dumps(
            {
                "url": server.url,
                "openai_base_url": f"{server.url}/v1",
                "model": server.model,
                "max_tokens": served.config.max_tokens,
                "needs_key": bool(key),
                "out": None if out is None else str(out),
            }
        )
    shown = "$LOCKSTEP_KEY" if key else "none"
    lines = [
        f"{server.url} serves {server.model}; Ctrl-C ends it",
        f"  export OPENAI_BASE_URL={server.url}/v1 OPENAI_API_KEY={shown}",
        f"  export ANTHROPIC_BASE_URL={server.url} ANTHROPIC_API_KEY={shown}",
        f"  a dialogue may have {served.config.max_tokens} tokens (max_tokens)",
        *([] if out is None else [f"  finished sessions go to {out}"]),
    ]
    return "\n".join(lines)


def _stop_on_sigint(note: Callable[[str], None]) -> asyncio.Event:
    """Returns an event that the first Ctrl-C sets. Sessions are then ended and stored; the second
    one warns, and only the third one interrupts that."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def hear(*_: object) -> None:
        if stop.is_set():
            signal.signal(signal.SIGINT, signal.default_int_handler)
            note("sessions are being ended and stored; Ctrl-C once more gives them up.")
        with contextlib.suppress(RuntimeError):  # the loop is closed: everything is stored
            loop.call_soon_threadsafe(stop.set)

    # Not loop.add_signal_handler, which ends with the loop: a late Ctrl-C would end the process.
    signal.signal(signal.SIGINT, hear)
    return stop


class BackgroundServer:
    """`lockstep serve` in a thread of this process, for notebooks and tests, until `close`.

    >>> server = BackgroundServer("tiny-qwen3", "max_turn_tokens=64")      # doctest: +SKIP
    >>> client = OpenAI(base_url=f"{server.url}/v1", api_key="none")       # doctest: +SKIP
    """

    def __init__(
        self, target: str, *settings: str, key: str = "", out: str | Path | None = None
    ) -> None:
        """target, settings: as on the command line. Returns when the server answers."""
        served = find_served(target, settings)
        self._loop, self._stack = asyncio.new_event_loop(), contextlib.AsyncExitStack()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            opening = self._stack.enter_async_context(opened(served, key=key, out=out))
            self.url = self._wait(opening)[0].url
        except BaseException:
            self.close()
            raise

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Ends all sessions, stores them, and stops. May be called twice."""
        if self._thread.is_alive():
            try:
                self._wait(self._stack.aclose())
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    def __enter__(self) -> BackgroundServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _session(
    served: Served, model_files: ModelFiles, engine: Engine, task: Task | None
) -> GatewaySession:
    from lockstep.agent.gateway.session import GatewaySession
    from lockstep.agent.turns import Budget, TurnSampler

    config = served.config
    id_ = secrets.token_hex(8)
    sampler = TurnSampler(
        engine,
        model_files.renderer,
        Trajectory(id=id_, task_id=task.id if task else ""),
        sampling=SamplingParams(
            max_tokens=config.max_turn_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
        ),
        budget=Budget(
            max_tokens=config.max_tokens,
            max_turns=sys.maxsize,  # the agent decides when it ends
            max_turn_tokens=config.max_turn_tokens,
            max_seconds=config.turn_seconds,
            continue_cut_turns=True,
        ),
    )
    return GatewaySession(sampler, id=id_, seed=derive_seed(config.seed, id_), rule="client")
