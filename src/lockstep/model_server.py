"""`lockstep serve`: a model behind HTTP, for any agent, for programs of the tinker client, or both.

With `out`, the agents' trajectories are stored in a run directory, which `lockstep report` and
`lockstep doctor` read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.agent.gateway.exchange import Refusal
from lockstep.agent.tasks import derive_seed
from lockstep.config import check_conflicts, to_dict
from lockstep.engines.config import EmbeddedConfig
from lockstep.errors import ConfigError, RunError
from lockstep.launch.event_loop import run_to_end
from lockstep.run.build import (
    Numerics,
    choose_numerics,
    engine_context,
    gpus_here,
    load_model,
    with_engine,
)
from lockstep.run.preflight import ModelFiles, read_model_files
from lockstep.run.served import Served, find_served, open_served
from lockstep.run_config import CONFLICTS, ServeConfig
from lockstep.store.run import RunDirectory, check_place, default_run_path
from lockstep.tinker_config import client_key
from lockstep.types import Group, Task, Trajectory

if TYPE_CHECKING:
    from lockstep.agent.gateway.listener import Listener
    from lockstep.agent.gateway.server import GatewayServer
    from lockstep.agent.gateway.session import GatewaySession
    from lockstep.engines.base import Engine, EngineContext
    from lockstep.tinker.embedded import Base, OutsideEngine

T = TypeVar("T")

PART_SECONDS = 10.0
"""Finished sessions that no client waits for are written at this interval, as one part."""
GATHER_SECONDS = 0.2
"""Seconds that a client who finished its session waits for others, to write one part for all."""


class SessionStore:
    """Writes finished sessions into a run directory, several as one part with a row of metrics.
    Sessions that cannot be written are kept and tried again."""

    def __init__(self, path: Path) -> None:
        """Raises RunError if `open` could not make the directory."""
        check_place(path)
        self.path = path
        self._run: RunDirectory | None = None
        self._waiting: list[Group] = []
        self._step = 0
        self.num_stored = 0
        self._storing = asyncio.Lock()

    def open(self, config: Mapping[str, Any]) -> None:
        self._run = RunDirectory.create(self.path, config)

    def close(self) -> None:
        with self._run or contextlib.nullcontext():
            self.write()

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
                text = f"{error} They are kept, and tried again."
                raise Refusal(503, "not_stored", text) from error

    def write(self) -> None:
        """Raises RunError if the disk does not take them."""
        if not self._waiting or self._run is None:
            return
        groups = list(self._waiting)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        num_sampled = sum(t.num_sampled_tokens for t in trajectories)
        row: dict[str, Any] = {"step": self._step, "tokens/sampled": num_sampled}
        if rewards := [t.reward for t in trajectories if t.rewards]:
            row["reward/mean"] = sum(rewards) / len(rewards)
        try:
            self._run.write_trajectories(self._step, groups)
            self._run.log(row)
        except OSError as error:
            text = f"{len(groups)} finished sessions could not be written: {error}."
            raise RunError(f"{self._run.path}: {text}") from error
        del self._waiting[: len(groups)]
        self._step += 1
        self.num_stored += len(groups)


class ModelServer:
    """A model behind one address, with an API or both, while it is `running`."""

    listener: Listener
    agents: GatewayServer | None = None
    """OpenAI's and Anthropic's APIs."""
    store: SessionStore | None = None
    """Stores what the agents did."""
    tinker_out: Path | None = None

    def __init__(
        self,
        served: Served,
        *,
        key: str = "",
        out: str | Path | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """note: gets lines for a person."""
        self.served, self.config, self.key, self._note = served, served.config, key, note
        self.config.gateway.check_key(key)
        self._out = None if out is None else Path(out)
        self.bases: dict[str, Base] = {}
        """Models of Tinker's API by their names; none without it."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ModelServer]:
        """Serves inside the block. At its end all sessions are ended, stored if there is an `out`,
        and the engines are closed."""
        from lockstep.agent.gateway.listener import Listener

        async with contextlib.AsyncExitStack() as stack:
            self.listener = Listener(self.config.gateway)
            if "tinker" in self.config.api:
                await self._open_tinker(stack)
            if "agents" in self.config.api:
                await self._open_agents(stack)
            stack.push_async_callback(self.listener.close)
            await self.listener.start()
            if self.store is not None:  # last: a start that was refused leaves no run
                self.store.open(to_dict(self.config))
            yield self

    async def _open_tinker(self, stack: contextlib.AsyncExitStack) -> None:
        """Journal, checkpoints and run directories are in `out`; another server over the same
        directory goes on with what this one has accepted."""
        from lockstep.tinker.embedded import EmbeddedBackend
        from lockstep.tinker.record import ModelRecord
        from lockstep.tinker.server import TinkerServer
        from lockstep.tinker.service import TinkerService

        config, note = self.config, self._note
        _check_bases(self.served)
        self.tinker_out = out = self._out or default_run_path("tinker")
        for name, model in base_names(config).items():
            base = await open_base(config, name, model, place=out / "engine" / name, note=note)
            stack.push_async_callback(base.engine.close)
            note(f"{name}: {base.facts['numerics']}")
            self.bases[name] = base
        backend = EmbeddedBackend([*self.bases.values()], config.trainer)
        stack.push_async_callback(backend.close)
        records = partial(ModelRecord, root=out / "runs", bases=self.bases, write=note)
        service = TinkerService(backend, out, config.tinker, open_record=records)
        stack.push_async_callback(service.close)
        await service.start()
        TinkerServer(service, key=self.key, listener=self.listener)

    async def _open_agents(self, stack: contextlib.AsyncExitStack) -> None:
        from lockstep.agent.gateway.registry import SessionRegistry
        from lockstep.agent.gateway.server import GatewayServer

        served, config, out, store = self.served, self.config, self._out, None
        if out is not None and self.tinker_out is not None:
            out = default_run_path("agents", root=out / "runs")
        if out is not None:
            self.store = store = SessionStore(out)
            stack.callback(store.close)
        shared = next((b for b in self.bases.values() if b.config.model == config.model), None)
        if shared is None:
            model_files, engine = open_served(served, scratch=out, on_wait=self._note)
            stack.push_async_callback(engine.close)
        else:  # one engine and one set of weights under both
            model_files, engine = shared.model_files, shared.engine
        if served.version and engine.capabilities.shares_weights:
            await engine.load_weights(None, version=served.version)
        sessions = SessionRegistry(
            lambda task: _session(served, model_files, engine, task),
            idle_seconds=config.idle_seconds,
            on_finished=lambda session: None if store is None else store.add(session),
        )
        self.agents = GatewayServer(
            sessions,
            renderer=model_files.renderer,
            model=config.model.rstrip("/").rpartition("/")[2],
            key=self.key,
            store=None if store is None else store.store,
            listener=self.listener,
        )
        stack.push_async_callback(sessions.close)
        stack.push_async_callback(self.agents.close)

    async def store_until(self, stop: asyncio.Event) -> None:
        """Writes finished sessions every PART_SECONDS, until `stop` is set."""
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), PART_SECONDS)
            try:
                if self.store is not None:
                    self.store.write()
            except RunError as error:
                self._note(f"{error} They are kept, and tried again.")

    @property
    def url(self) -> str:
        return self.listener.url

    def counts(self) -> dict[str, int]:
        """The work that was done for agents; empty without their APIs."""
        if self.agents is None:
            return {}
        names = ("requests", "refused", "failed", "sampled_tokens", "encoded_tokens")
        counts = {name: self.agents.counts[name] for name in names}
        num_stored = 0 if self.store is None else self.store.num_stored
        return {"sessions": len(self.agents.sessions.all()), **counts, "stored": num_stored}

    def facts(self) -> dict[str, Any]:
        """How to reach the server, for programs."""
        out = self.tinker_out or (self.store and self.store.path)
        found: dict[str, Any] = {"url": self.url, "needs_key": bool(self.key)}
        found |= {"max_tokens": self.config.max_tokens, "out": None if out is None else str(out)}
        if self.agents is not None:
            found |= {"openai_base_url": f"{self.url}/v1", "model": self.agents.model}
        if self.tinker_out is not None:
            found |= {"tinker_base_url": self.url, "models": list(self.bases)}
        return found

    def lines(self) -> list[str]:
        """How to reach the server, as lines that a shell takes."""
        from lockstep.agent.gateway.listener import ANY_ADDRESS

        url, key, host = self.url, self.key, self.config.gateway.host
        names = list(self.bases)
        if self.agents is not None and self.agents.model not in names:
            names.insert(0, self.agents.model)
        lines = [f"{url} serves {', '.join(names)}; Ctrl-C ends it"]
        if key and key != os.environ.get("LOCKSTEP_KEY"):
            lines.append(f"  export LOCKSTEP_KEY={shlex.quote(key)}")
        if self.agents is not None:
            shown = "$LOCKSTEP_KEY" if key else "none"
            lines.append(f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={shown}")
            lines.append(f"  export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={shown}")
        if self.tinker_out is not None:
            # The client refuses keys that do not begin with tml-.
            prefix = client_key(key).removesuffix(key)
            shown = f"{prefix}$LOCKSTEP_KEY" if key else "tml-local"
            lines.append(f"  export TINKER_BASE_URL={url} TINKER_API_KEY={shown}")
        if (own := ANY_ADDRESS.get(host)) is not None:
            lines.append(f"  on other machines, with the name of this one in place of {own}")
        lines.append(f"  a dialogue may have {self.config.max_tokens} tokens (max_tokens)")
        if self.store is not None:
            lines.append(f"  finished sessions go to {self.store.path}")
        if self.tinker_out is not None:
            lines.append(f"  runs, checkpoints and the journal are in {self.tinker_out}")
        return lines


def _check_bases(served: Served) -> None:
    """Raises ConfigError for what Tinker's API cannot serve."""
    config = served.config
    if served.weights is not None:
        raise ConfigError(
            f"api=tinker serves models, and {served.weights} is a run's checkpoint. Write it as a "
            "model first: lockstep export RUN --hf DIR, with --merged if it has an adapter."
        )
    if "agents" not in config.api:
        return
    if config.model not in (models := base_names(config).values()):
        raise ConfigError(
            f"tinker.models has {', '.join(models)}, and api=agents serves {config.model}; both "
            f"must have it in memory once. Add NAME={config.model} to tinker.models."
        )
    check_conflicts(config, CONFLICTS["both_apis"])


def serve(
    target: Served | str | os.PathLike[str],
    *,
    key: str = "",
    out: str | Path | None = None,
    is_json: bool = False,
    **settings: Any,
) -> None:
    """Serves a model or a run until Ctrl-C, which is its ordinary end. settings: as in a file, for
    example `gateway={"port": 8000}` or `api="tinker"`. `BackgroundServer` returns at once."""
    served = target
    if not isinstance(served, Served):
        served = find_served(os.fspath(served), (), tree=settings)

    def note(text: str) -> None:
        if not is_json:
            print(text, file=sys.stderr, flush=True)

    server = ModelServer(served, key=key, out=out, note=note)

    async def run() -> None:
        is_up = False
        try:
            async with server.running():
                is_up = True
                shown = json.dumps(server.facts()) if is_json else "\n".join(server.lines())
                print(shown, flush=True)
                await server.store_until(_stop_on_sigint(note))
        finally:
            if is_up and (found := server.counts()):
                text = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in found.items())
                print(json.dumps(found) if is_json else text, flush=True)

    run_to_end(run())


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

    # loop.add_signal_handler would end with the loop: a late Ctrl-C would end the process.
    signal.signal(signal.SIGINT, hear)
    return stop


class BackgroundServer:
    """`lockstep serve` in a thread of this process, for notebooks and tests, until `close`.

    >>> server = BackgroundServer("tiny-qwen3", "agent.max_turn_tokens=64")      # doctest: +SKIP
    >>> client = OpenAI(base_url=f"{server.url}/v1", api_key="none")       # doctest: +SKIP
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *overrides: str,
        key: str = "",
        out: str | Path | None = None,
        note: Callable[[str], None] = lambda text: None,
        **settings: Any,
    ) -> None:
        """target, overrides: as on the command line. settings: as in a file. note: gets lines for a
        person. Returns when the server answers."""
        served = find_served(os.fspath(target), overrides, tree=settings)
        self._loop, self._stack = asyncio.new_event_loop(), contextlib.AsyncExitStack()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            server = ModelServer(served, key=key, out=out, note=note)
            self.url = self._wait(self._stack.enter_async_context(server.running())).url
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
                self._wait(self._loop.shutdown_default_executor())
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
    from lockstep.agent.loop import sampling_of
    from lockstep.agent.turns import Budget, TurnSampler

    config, drawn = served.config, served.config.agent
    id_ = secrets.token_hex(8)
    sampler = TurnSampler(
        engine,
        model_files.renderer,
        Trajectory(id=id_, task_id=task.id if task else ""),
        sampling=sampling_of(drawn),
        budget=Budget(
            max_tokens=config.max_tokens,
            max_turns=sys.maxsize,  # the agent decides when it ends
            max_turn_tokens=drawn.max_turn_tokens,
            max_seconds=config.turn_seconds,
        ),
    )
    return GatewaySession(sampler, id=id_, seed=derive_seed(config.seed, id_), rule="client")


# -- Tinker's API ---------------------------------------------------------------------------------

CACHE_SHARE = 0.25
"""Share of a GPU's free memory for the cache of an engine in this process: training and samplers of
whole models need the rest (a guess until measured)."""


def base_names(config: ServeConfig) -> dict[str, str]:
    """Name that clients use -> model, from the settings."""
    if config.tinker.models:
        return dict(entry.split("=", 1) for entry in config.tinker.models)
    return {config.model.rstrip("/").rpartition("/")[2]: config.model}


async def open_base(
    config: ServeConfig, name: str, model: str, *, place: Path, note: Callable[[str], None]
) -> Base:
    """Loads a base model, and opens its engine. place: for logs of the engine, and weights on their
    way. note: receives lines about what the engine waits for."""
    from lockstep.engines.embedded.engine import EmbeddedEngine, sized
    from lockstep.ops.invariant import ask_for_reproducible_gemm
    from lockstep.tinker.embedded import Base
    from lockstep.tinker.requests import BaseModel

    if config.contract != "none":
        ask_for_reproducible_gemm()
    own = replace(config, model=model)
    model_files = read_model_files(own)
    decoder = load_model(own, model_files).requires_grad_(False)
    numerics = choose_numerics(config.contract, decoder)
    tokenizer = model_files.renderer.tokenizer
    info = BaseModel(
        name=name,
        architecture=model_files.model.architecture,
        vocab_size=model_files.model.vocab_size,
        max_tokens=config.max_tokens,
        stop_ids=model_files.renderer.stop_ids,
    )
    make_engine = outside = None
    if isinstance(config.engine, EmbeddedConfig) and not config.engine.replicas:
        make = partial(
            EmbeddedEngine,
            config=sized(config.engine, decoder, share=CACHE_SHARE, longest=info.max_tokens),
            token_bytes=tokenizer.all_token_bytes(),
            control_ids=tokenizer.control_ids,
        )
        engine, make_engine = make(decoder), partial(make, is_shared=False)
    else:
        context = engine_context(
            own,
            model_files,
            decoder,
            run=f"{config.name}-{name}",
            scratch=place,
            on_wait=note,
            gpus=gpus_here(config.engine, 0, 1, decoder.embedding.device),
        )
        opened = await _open_outside(config, context, model_files, numerics)
        engine, outside, numerics, line = opened
        note(f"{name}: {line}")
    facts = {"is_one_process": outside is None, "processes": 1, **numerics.facts()}
    return Base(
        info=info,
        config=own,
        model_files=model_files,
        decoder=decoder,
        engine=engine,
        facts=model_files.facts() | facts,
        make_engine=make_engine,
        outside=outside,
    )


async def _open_outside(
    config: ServeConfig, context: EngineContext, model_files: ModelFiles, numerics: Numerics
) -> tuple[Engine, OutsideEngine, Numerics, str]:
    """An engine with weights of its own, tested with an adapter; the numerics of both sides; and a
    line for a person."""
    from lockstep.engines.registry import check_capabilities, open_engine
    from lockstep.tinker.embedded import OutsideEngine

    engine = await asyncio.to_thread(open_engine, config.engine, context)
    try:
        assert context.scratch is not None, "weights need a place on their way"
        check_capabilities(engine, context, needs=["adapters"])
        if numerics.is_kept:
            numerics = with_engine(config.contract, engine, numerics, context.model)
        outside = OutsideEngine(engine, context.model, model_files, max_tokens=context.max_tokens)
        how = await outside.qualify(context.scratch / "sent")
    except BaseException:
        await engine.close()
        raise
    return engine, outside, numerics, f"{engine.capabilities.name} samples: {how}"
