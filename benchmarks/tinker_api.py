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

    python benchmarks/tinker.py [--json] [--steps 12] [--rounds 3] [--model tiny-gpt-oss]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}

NAME = "tinker"
ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "tinker_docsearch.py"
WARMUP_STEPS = 2
NUM_FUTURES, PROMPT_TOKENS = 2000, 300
RANK = 32
GOALS = {"training-step": 1.25, "rl-step": 1.25, "future": 3.0, "journal": 2.0}


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


async def serve_idle(directory: Path) -> None:
    from lockstep.agent.gateway.config import GatewayConfig
    from lockstep.agent.gateway.listener import Listener
    from lockstep.tinker.server import TinkerServer
    from lockstep.tinker.service import TinkerService

    service = TinkerService(Idle(), directory)  # type: ignore[arg-type]
    listener = Listener(GatewayConfig())
    TinkerServer(service, listener=listener)
    await service.start()
    await listener.start()
    print(json.dumps({"url": listener.url}), flush=True)
    await asyncio.Event().wait()


class Server:
    """A server in a process of its own: of a model, or of nothing."""

    def __init__(self, model: str, directory: Path) -> None:
        self._journal = directory / "journal-seconds"
        arguments = ["--serve", model, "--api", "tinker", "--json", "--out", str(directory / "out")]
        if not model:
            arguments = ["--serve-idle", str(directory / "idle")]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdout=subprocess.PIPE,
            env={**os.environ, "JOURNAL_SECONDS": str(self._journal)},
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the server did not start; its message is above.")
        os.environ["TINKER_BASE_URL"] = json.loads(line)["url"]
        os.environ["TINKER_API_KEY"] = "tml-local"

    def cpu_seconds(self) -> float:
        words = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def journal_seconds(self) -> float:
        self._journal.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGUSR1)
        while not (self._journal.exists() and (text := self._journal.read_text())):
            time.sleep(0.01)
        return float(text)

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)


@contextmanager
def served(model: str, directory: Path) -> Iterator[Server]:
    server = Server(model, directory)
    try:
        yield server
    finally:
        server.close()


def train(model: str, steps: int, out: Path) -> list[dict[str, Any]]:
    """`lockstep train quickstart` with an adapter: its rows of metrics, after the first ones."""
    settings = ("evaluation.every=1000000", "evaluation.at_start=false", "evaluation.num_tasks=1")
    command = [sys.executable, "-m", "lockstep.cli", "train", "quickstart", f"model={model}"]
    subprocess.run(
        [*command, f"steps={steps}", f"lora.rank={RANK}", f"out={out}", *settings, "--json"],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row][WARMUP_STEPS:]


def play(model: str, steps: int) -> list[dict[str, Any]]:
    """Rows of the example's program, after the first ones."""
    spec = importlib.util.spec_from_file_location("tinker_docsearch", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)
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


def measure(model: str, steps: int, rounds: int) -> list[dict[str, Any]]:
    api: dict[str, list[float]] = {"training": [], "rl": []}
    own: dict[str, list[float]] = {"training": [], "rl": []}
    with tempfile.TemporaryDirectory() as place, served(model, Path(place)) as server:
        journal_seconds = rl_seconds = 0.0
        for number in range(rounds):
            run = Path(place) / f"run{number}"
            rows = train(model, steps, run)
            own["rl"] += [row["time/step_seconds"] for row in rows]
            own["training"] += [
                1e3 * row["time/train_seconds"] / row["tokens/trained"] for row in rows
            ]
            began, before = time.perf_counter(), server.journal_seconds()
            rows = play(model, steps)
            journal_seconds += server.journal_seconds() - before
            rl_seconds += time.perf_counter() - began
            api["rl"] += [row["seconds"] for row in rows]
            api["training"] += [1e3 * row["train_seconds"] / row["trained_tokens"] for row in rows]
            note(f"round {number + 1} of {rounds}")
    with tempfile.TemporaryDirectory() as place, served("", Path(place)) as server:
        server_ms, client_ms = asyncio.run(futures(server))
    parts = []
    for name, key in (("training-step", "training"), ("rl-step", "rl")):
        ours, peer = statistics.median(api[key]), statistics.median(own[key])
        how = "median seconds through the API (ours) and of lockstep train (peer)"
        parts.append(part(name, ours, peer, "s", how))
        note(f"{name}: {ours:.3f} s through the API, {peer:.3f} s without: {ours / peer:.2f}x")
    how = (
        f"processor time of the server, {client_ms:.2f} ms of the client beside it; peer: the goal"
    )
    parts.append(part("future", server_ms, GOALS["future"], "ms", how))
    share = 100 * journal_seconds / rl_seconds
    how = "share of a whole step's time; peer: the goal"
    parts.append(part("journal", share, GOALS["journal"], "%", how))
    note(f"future: {server_ms:.2f} ms of the server; journal: {share:.2f} % of an RL step")
    return parts


def part(name: str, ours: float, peer: float, unit: str, how: str) -> dict[str, Any]:
    return {
        "name": f"{NAME}-{name}",
        "ours": round(ours, 4),
        "peer": round(peer, 4),
        "unit": unit,
        "ratio": round(peer / ours, 3),
        "better": "lower",
        "how": how,
    }


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    if "--serve" in sys.argv[1:2]:
        serve(sys.argv[2:])
        return 0
    if "--serve-idle" in sys.argv[1:2]:
        asyncio.run(serve_idle(Path(sys.argv[2])))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the JSON line alone on stdout")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="tiny-gpt-oss")
    options = parser.parse_args()
    if importlib.util.find_spec("tinker") is None:
        print(
            json.dumps({"name": NAME, "skipped": "the client is not installed: pip install tinker"})
        )
        return 0
    parts = measure(options.model, options.steps, options.rounds)
    print(json.dumps({**parts[0], "name": NAME, "parts": parts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
