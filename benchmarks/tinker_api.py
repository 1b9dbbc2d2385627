"""Cost of training through Tinker's API, against the same work of `lockstep train`.

1. A training step of examples/tinker_docsearch.py, which is one forward_backward and one
   optim_step, against the training of a step of `lockstep train quickstart` with the same adapter:
   seconds for 1,000 sampled tokens, as the rows of each are its own.
2. A whole step of both: 64 episodes of several turns, each turn a request, and the training.
3. A future: processor time of the server for one sample of a backend that computes nothing.
4. The journal: share of a step's time that the server spends in its database.

Server, client and run are processes of their own with one thread each; runs and client take turns,
and the median step counts. The client costs time of its own, on another core: about as much
processor time a request as the server.

    python benchmarks/tinker_api.py [--steps 12] [--rounds 3] [--model tiny-gpt-oss]
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from measuring import ROOT, CannotRun, Row, Side, alone, command_of, main, note, row
from measuring.runs import steps_of, train_quickstart

os.environ |= {"MKL_NUM_THREADS": "1", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}

WARMUP_STEPS = 2
NUM_FUTURES, PROMPT_TOKENS = 2000, 300
RANK = 32
GOALS = {"future": 3.0, "journal": 2.0}


class TimedDatabase(sqlite3.Connection):
    """A connection that adds up the seconds of its statements."""

    seconds = 0.0

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        began = time.perf_counter()
        try:
            return super().execute(*arguments)
        finally:
            TimedDatabase.seconds += time.perf_counter() - began


def serve(arguments: list[str]) -> None:
    """The command itself, with its database timed: the seconds are written on SIGUSR1."""
    from lockstep.cli import main as lockstep

    connect = sqlite3.connect
    sqlite3.connect = lambda *a, **k: connect(*a, **{**k, "factory": TimedDatabase})  # type: ignore[assignment]
    place = Path(os.environ["JOURNAL_SECONDS"])
    signal.signal(signal.SIGUSR1, lambda *_: place.write_text(str(TimedDatabase.seconds)))
    lockstep(["serve", *arguments])


class Idle:
    """A backend that samples one token of nothing."""

    def __init__(self) -> None:
        from lockstep.tinker.requests import BaseModel

        self.base_models = [
            BaseModel(
                name="idle", architecture="idle", vocab_size=1000, max_tokens=1000, stop_ids=()
            )
        ]

    async def open_sampler(self, *_: object, **__: object) -> None:
        return None

    async def close_sampler(self, _: str) -> None:
        return None

    async def sample(self, sampler_id: str, request: Any, **_: object) -> Any:
        import numpy as np

        from lockstep.tinker.requests import SampledSequence, SamplingResult

        reply = SampledSequence(
            token_ids=np.zeros(1, np.int32),
            logprobs=np.zeros(1, np.float32),
            versions=np.zeros(1, np.int32),
            stop_reason="length",
        )
        return SamplingResult(sequences=(reply,))


def serve_idle(directory: str) -> None:
    from lockstep.agent.gateway.config import GatewayConfig
    from lockstep.agent.gateway.listener import Listener
    from lockstep.tinker.server import TinkerServer
    from lockstep.tinker.service import TinkerService

    async def forever() -> None:
        service = TinkerService(Idle(), Path(directory))  # type: ignore[arg-type]
        listener = Listener(GatewayConfig())
        TinkerServer(service, listener=listener)
        await service.start()
        await listener.start()
        print(json.dumps({"url": listener.url}), flush=True)
        await asyncio.Event().wait()

    asyncio.run(forever())


class Server(Side):
    """A server in a process of its own: of a model, or of nothing. Clients find it by itself."""

    def __init__(self, model: str, directory: Path) -> None:
        self._journal = directory / "journal-seconds"
        words = [model, "--api", "tinker", "--json", "--out", str(directory / "out")]
        command = command_of(serve, words) if model else command_of(serve_idle, str(directory))
        super().__init__(command, environment={"JOURNAL_SECONDS": str(self._journal)})
        os.environ |= {"TINKER_BASE_URL": self.first["url"], "TINKER_API_KEY": "tml-local"}

    def journal_seconds(self) -> float:
        self._journal.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        while not (self._journal.exists() and (text := self._journal.read_text())):
            time.sleep(0.01)
        return float(text)


def train(model: str, steps: int, out: Path) -> list[dict[str, Any]]:
    """A quickstart with an adapter: its rows of metrics, after the first ones."""
    settings = [f"model={model}", f"steps={steps}", f"lora.rank={RANK}", "evaluation.num_tasks=1",
                "evaluation.every=1000000"]  # fmt: skip
    alone(train_quickstart, settings, str(out))
    return steps_of(out)[WARMUP_STEPS:]


def play(model: str, steps: int) -> list[dict[str, Any]]:
    """Rows of the example's program, after the first ones."""
    sys.path.append(str(ROOT / "examples"))
    import tinker_docsearch as example

    arguments = ["--model", model, "--steps", str(steps), "--rank", str(RANK)]
    return asyncio.run(example.train(example.parse(arguments)))[WARMUP_STEPS:]


async def futures(server: Server) -> tuple[float, float]:
    """(processor milliseconds of the server, and of the client) for one sample of nothing."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient()
    sampler = await service.create_sampling_client_async(base_model="idle")
    prompt = types.ModelInput.from_ints(list(range(PROMPT_TOKENS)))
    params = types.SamplingParams(max_tokens=1)
    await sampler.sample(prompt, 1, params)
    began = server.cpu_seconds(), time.process_time()
    await asyncio.gather(*(sampler.sample(prompt, 1, params) for _ in range(NUM_FUTURES)))
    ended = server.cpu_seconds(), time.process_time()
    service.close("success").result()
    ours, theirs = (1e3 * (b - a) / NUM_FUTURES for a, b in zip(began, ended, strict=True))
    return ours, theirs


def compare(*, steps: int = 12, rounds: int = 3, model: str = "tiny-gpt-oss") -> Iterator[Row]:
    if importlib.util.find_spec("tinker") is None:
        raise CannotRun("the client is not installed: pip install tinker")
    api: dict[str, list[float]] = {"training-step": [], "rl-step": []}
    own: dict[str, list[float]] = {"training-step": [], "rl-step": []}
    with tempfile.TemporaryDirectory() as place, Server(model, Path(place)) as server:
        journal_seconds = rl_seconds = 0.0
        for number in range(rounds):
            for found in train(model, steps, Path(place) / f"run{number}"):
                own["rl-step"].append(found["time/step_seconds"])
                seconds = found["time/train_seconds"] / found["tokens/trained"]
                own["training-step"].append(1e3 * seconds)
            began, before = time.perf_counter(), server.journal_seconds()
            for found in play(model, steps):
                api["rl-step"].append(found["seconds"])
                seconds = found["train_seconds"] / found["trained_tokens"]
                api["training-step"].append(1e3 * seconds)
            journal_seconds += server.journal_seconds() - before
            rl_seconds += time.perf_counter() - began
            note(f"round {number + 1} of {rounds}")
    how = "median seconds through the API (ours) and of lockstep train (peer)"
    for name in api:
        yield row(f"tinker-{name}", median(api[name]), median(own[name]), "s", how=how)
    with tempfile.TemporaryDirectory() as place, Server("", Path(place)) as server:
        server_ms, client_ms = asyncio.run(futures(server))
    how = f"of the server's processor, {client_ms:.2f} ms of the client's beside it; peer: the goal"
    yield row("tinker-future", server_ms, GOALS["future"], "ms", how=how)
    share = 100 * journal_seconds / rl_seconds
    how = "share of a whole step's time; peer: the goal"
    yield row("tinker-journal", share, GOALS["journal"], "%", how=how)


if __name__ == "__main__":
    main(compare, short={"steps": 5, "rounds": 1})
