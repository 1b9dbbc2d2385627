"""Shows that nothing foreign ends, hangs or poisons a run: each hook with each misbehaviour.

python docs/proof/soak.py                                # all of it: `make soak`, 20 minutes
python docs/proof/soak.py --hook step --only hangs       # one misbehaviour of one hook
python docs/proof/soak.py --hook fault                   # the 20 faults that every trainer meets
python docs/proof/soak.py --kills 100 --hook kill        # runs that are killed, and continued

One run trains per hook, in a process of its own with a time limit; each of its tasks misbehaves in
one way. For trackers and consoles it is one run per misbehaviour. A run must do all its steps, end
with status 0 within the limit, store every episode, and be readable by `report` and `doctor`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib.machinery
import itertools
import json
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import warnings
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import numpy as np

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.harness import Endpoint, Harness
from lockstep.agent.judge import JudgeScorer
from lockstep.agent.task_config import Split
from lockstep.agent.tasks import GeneratedSource, ListSource, TaskSource
from lockstep.agent.tools import ToolLimits, ToolRunner
from lockstep.envs.docsearch.config import DocSearchConfig, DocSearchEnvironment, world_problem
from lockstep.envs.docsearch.worlds import world_of
from lockstep.errors import RunError
from lockstep.store.run import load_run
from lockstep.types import Message, Task

GROUP_SIZE = 2
MAX_SECONDS = 4.0
"""The limit of one episode: what hangs costs this much."""

Call = Callable[[], Awaitable[Any]]
"""The sound hook."""


class HasNoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class OwnBase(BaseException):
    pass


class Hostile:
    """Every access raises."""

    def __getattribute__(self, name: str = "text, length or items") -> Any:
        raise RuntimeError(f"no {name}")

    __repr__ = __len__ = __iter__ = __getattribute__  # type: ignore[assignment]


def raises(error: Callable[[], BaseException]) -> Callable[[Call], Awaitable[Any]]:
    async def misbehave(sound: Call) -> Any:
        raise error()

    return misbehave


def returns(value: Callable[[], Any]) -> Callable[[Call], Awaitable[Any]]:
    async def misbehave(sound: Call) -> Any:
        await sound()
        return value()

    return misbehave


def first(action: Callable[[], Any]) -> Callable[[Call], Awaitable[Any]]:
    """Does something to the process, and then what is asked."""

    async def misbehave(sound: Call) -> Any:
        action()
        return await sound()

    return misbehave


async def hangs(sound: Call) -> Any:
    await asyncio.Event().wait()


async def swallows_cancellation(sound: Call) -> Any:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


async def cancels_itself(sound: Call) -> Any:
    asyncio.current_task().cancel()  # type: ignore[union-attr]
    await asyncio.sleep(1)


async def recurses(sound: Call) -> Any:
    return await recurses(sound)


def gives(value: Callable[[], Any]) -> Call:
    """A sound hook with this result."""

    async def sound() -> Any:
        return value()

    return sound


nothing = gives(lambda: None)
_KEPT: list[Any] = []


def changes_the_process() -> None:
    os.environ["LOCKSTEP_SOAK"] = "changed"
    os.environ["TMPDIR"] = "/nonexistent"
    os.chdir(tempfile.gettempdir())


DEEP = functools.reduce(lambda inner, _: [inner], range(100_000), [])

MISBEHAVIOURS: dict[str, Callable[[Call], Awaitable[Any]]] = {
    "raises": raises(lambda: ValueError("x")),
    "raises_without_text": raises(HasNoText),
    "raises_base": raises(lambda: OwnBase("x")),
    "exits": raises(lambda: SystemExit(3)),
    "is_closed": raises(GeneratorExit),
    "raises_cancelled": raises(asyncio.CancelledError),
    "raises_stop": raises(StopAsyncIteration),
    "raises_group": raises(
        lambda: BaseExceptionGroup("x", [ValueError("y"), asyncio.CancelledError()])
    ),
    "raises_timeout": raises(TimeoutError),
    "raises_memory": raises(MemoryError),
    "raises_long": raises(lambda: ValueError("x" * 10_000_000)),
    "raises_surrogates": raises(lambda: ValueError("\ud800\x1b[2J\x00")),
    "recurses": recurses,
    "hangs": hangs,
    "swallows_cancellation": swallows_cancellation,
    "cancels_itself": cancels_itself,
    "blocks": first(lambda: time.sleep(1)),
    "leaves_a_task": first(
        lambda: _KEPT.append(asyncio.ensure_future(swallows_cancellation(nothing)))
    ),
    "leaves_a_failed_task": first(
        lambda: asyncio.ensure_future(raises(lambda: ValueError("nobody looks"))(nothing))
    ),
    "leaves_a_thread": first(lambda: threading.Thread(target=time.sleep, args=(1e6,)).start()),
    "seeds_everything": first(lambda: (random.seed(0), np.random.seed(0))),
    "changes_the_process": first(changes_the_process),
    "breaks_stdout": first(lambda: setattr(sys, "stdout", None)),
    "turns_warnings_to_errors": first(lambda: warnings.simplefilter("error")),
    "runs_a_loop": first(lambda: asyncio.run(asyncio.sleep(0))),
    "returns_none": returns(lambda: None),
    "returns_hostile": returns(Hostile),
    "returns_number": returns(lambda: 10**400),
    "returns_nan": returns(lambda: math.nan),
    "returns_deep": returns(lambda: DEEP),
    "returns_long": returns(lambda: "word " * 1_000_000),
    "returns_surrogates": returns(lambda: "\ud800\x1b[2J\x00"),
}

SCORES: dict[str, Callable[[], Any]] = {
    "reward_huge_int": lambda: Score(reward=10**400),
    "reward_huge": lambda: Score(reward=1e308),
    "reward_minus_huge": lambda: Score(reward=-1e308),
    "reward_infinite": lambda: Score(reward=math.inf),
    "reward_text": lambda: Score(reward="1"),  # type: ignore[arg-type]
    "parts_none": lambda: Score(reward=1.0, parts=None),  # type: ignore[arg-type]
    "parts_key": lambda: Score(reward=1.0, parts={1: 1.0}),  # type: ignore[dict-item]
    "parts_huge": lambda: Score(reward=1.0, parts={"a": 1e308}),
    "parts_name": lambda: Score(reward=1.0, parts={"a\ud800\n" * 1000: 1.0}),
}
OBSERVATIONS: dict[str, Callable[[], Any]] = {
    "content_number": lambda: Observation(messages=[Message(role="tool", content=5)]),  # type: ignore[arg-type]
    "content_surrogate": lambda: Observation(messages=[Message(role="tool", content="\ud800")]),
    "content_long": lambda: Observation(
        messages=[Message(role="tool", content="word " * 1_000_000)]
    ),
    "role_unknown": lambda: Observation(messages=[Message(role="robot", content="x")]),  # type: ignore[arg-type]
    "metrics_huge": lambda: Observation(done=True, metrics={"a": 1e308}),
    "metrics_text": lambda: Observation(done=True, metrics={"a": "b"}),  # type: ignore[dict-item]
    "without_end": lambda: Observation(messages=[Message(role="tool", content="again")]),
}
HOOKS = (
    *("make", "reset", "tools", "step", "score", "close", "tool", "async_tool"),
    *("group_scorer", "group_scorer_of", "harness", "harness_close", "judge"),
)


def ways(hook: str) -> dict[str, Callable[[Call], Awaitable[Any]]]:
    """The misbehaviours of a hook by name."""
    if hook == "judge":
        return {name: returns(lambda: None) for name in JUDGES}
    more = {"score": SCORES, "harness": SCORES, "step": OBSERVATIONS}.get(hook, {})
    return MISBEHAVIOURS | {name: returns(value) for name, value in more.items()}


def at_once(coroutine: Any) -> Any:
    """The result of a coroutine that must not wait; what waits is called sound."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    return None


@dataclass(frozen=True, kw_only=True)
class HostileConfig(DocSearchConfig):
    """Questions of the quickstart, each with one misbehaviour."""

    TAG: ClassVar[str] = "hostile"

    hook: str = "step"
    """The hook that misbehaves, on the training split alone."""
    only: tuple[str, ...] = ()
    """Names of the misbehaviours; empty takes all."""

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        sound = GeneratedSource(self._world_task, seed=seed, split=split)
        if split == "eval":
            return sound
        names = list(self.only or ways(self.hook))
        for at in range(0, len(names) * 8 // 7 + 8, 8):
            names.insert(at, f"sound-{at}")
        return ListSource(
            [replace(t, id=name) for name, t in zip(names, sound.take(len(names)), strict=True)],
            seed=seed,
            shuffle=False,
        )

    def environment(self, task: Task, agent: AgentConfig) -> Any:
        way = ways(self.hook).get(task.id)
        if way is None:
            return super().environment(task, agent)
        if self.hook.startswith("harness"):
            return HostileHarness(task.payload["question"], self.hook, way)
        if self.hook == "judge":
            return JudgedEnvironment(super().environment(task, agent), task)

        problem = world_problem(world_of(task.payload["world_seed"], self.two_hop_share), self)
        make = gives(lambda: HostileEnvironment(problem, self, ToolLimits.of(agent), way))
        return way(make) if self.hook == "make" else at_once(make())

    def group_scorer(self, task: Task) -> Any:
        if self.hook == "group_scorer_of" and (way := ways(self.hook).get(task.id)):
            return at_once(way(nothing))
        if self.hook != "group_scorer":
            return None

        async def scores(environments: Any) -> Any:
            async def sound() -> Any:
                return [await environment.score() for environment in environments]

            way = getattr(environments[0], "way", None)
            return await (sound() if way is None else way(sound))

        return scores


class HostileEnvironment(DocSearchEnvironment):
    def __init__(self, problem: Any, config: HostileConfig, limits: Any, way: Any) -> None:
        super().__init__(problem, config, limits)
        self.way, self.hook = way, config.hook
        (search,) = self.tools
        functions = {"tool": self._tool, "async_tool": self._async_tool}
        if function := functions.get(self.hook):
            search = replace(search, function=function, is_instant=False)
        self.__dict__["tools"] = (search,)
        self._runner = ToolRunner((search,), limits)

    def __getattribute__(self, name: str) -> Any:
        get = super().__getattribute__
        if name in ("reset", "step", "score", "close") and get("hook") == name:
            return lambda *given: get("way")(lambda: get(name)(*given))
        if name == "tools" and get("__dict__").get("hook") == "tools":
            return at_once(get("way")(gives(lambda: get("__dict__")["tools"])))
        return get(name)

    async def _async_tool(self, keywords: list[str]) -> Any:
        return await self.way(gives(lambda: self._search(keywords)))

    def _tool(self, keywords: list[str]) -> Any:
        return asyncio.run(self._async_tool(keywords))


# -- running --------------------------------------------------------------------------------------


class HostileHarness(Harness):
    """Asks for one turn over HTTP; then, or when it is closed, misbehaves."""

    def __init__(self, question: str, hook: str, way: Any) -> None:
        self.question, self.hook, self.way = question, hook, way

    async def run(self, task: Task, endpoint: Endpoint) -> Any:
        async def sound() -> Score:
            said = [{"role": "user", "content": self.question}]
            body = {"model": endpoint.model, "messages": said}
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            async with aiohttp.ClientSession(headers=headers) as client:
                url = f"{endpoint.base_url}/v1/chat/completions"
                async with client.post(url, json=body) as reply:
                    reply.raise_for_status()
            return Score(reward=1.0)

        return await (self.way(sound) if self.hook == "harness" else sound())

    async def close(self) -> Any:
        return await (self.way(nothing) if self.hook == "harness_close" else nothing())


# -- judges ---------------------------------------------------------------------------------------


def content(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


PLAN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
JUDGES: dict[str, tuple[int, bytes] | str] = {
    **{name: name for name in ("hangs", "resets", "drips")},
    **{name: (status, body.encode()) for name, (status, body) in PLAN["judges"].items()},
    "deep": (200, b"[" * 200_000),
    "no_utf8": (200, b"\xff\xfe{"),
    "grade_huge": (200, content('{"score": 1' + "0" * 400 + "}")),
    "grade_deep": (200, content("[" * 100_000)),
    "long": (200, content("word " * 2_000_000)),
}
"""Answers of a judge's server by name: (status, body), or what the connection does."""


class Judges(ThreadingHTTPServer):
    daemon_threads = True

    class RequestHandlerClass(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            name = self.path.split("/")[1]
            answer = JUDGES[name]
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if answer == "resets":
                self.connection.close()
            elif answer == "hangs":
                time.sleep(60)
            elif answer == "drips":
                self.send_response(200)
                self.end_headers()
                for _ in range(60):
                    self.wfile.write(b" ")
                    time.sleep(0.5)
            else:
                status, body = answer
                self.send_response(int(status))
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(bytes(body))

        def log_message(self, *_: Any) -> None:
            pass


@functools.cache
def judges_url() -> str:
    server = Judges(("127.0.0.1", 0), Judges.RequestHandlerClass)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


class _HastyJudge(JudgeScorer):
    """Tries once more, after a tenth of a second."""

    retries, retry_seconds = 1, 0.1


class JudgedEnvironment(Environment):
    """Plays soundly, and is scored by a judge whose server misbehaves."""

    def __init__(self, sound: Any, task: Task) -> None:
        self.sound, self.task, self.tools = sound, task, sound.tools
        self.reset, self.step = sound.reset, sound.step

    async def score(self) -> Score:
        url = f"{judges_url()}/{self.task.id}/v1"
        judge = _HastyJudge(url=url, model="judge", timeout_seconds=1)
        return (await judge.score(self.task, self.sound.answer or "none", []))[0]


# -- trackers -------------------------------------------------------------------------------------


class HostileTracker:
    """Stands in for the package wandb: one of its functions misbehaves."""

    def __init__(self, method: str, way: Any) -> None:
        self.method, self.way = method, way
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)

    def __getattr__(self, name: str) -> Any:
        if name not in ("init", "log", "finish"):
            raise AttributeError(name)

        if name != self.method:
            return lambda *given, **named: self
        return lambda *given, **named: asyncio.run(self.way(gives(lambda: self)))


if hostile := os.environ.get("LOCKSTEP_SOAK_TRACKER"):
    method, _, way_name = hostile.partition(":")
    sys.modules["wandb"] = HostileTracker(method, MISBEHAVIOURS[way_name])  # type: ignore[assignment]


# -- running --------------------------------------------------------------------------------------

SMALL = (
    *("groups_per_step=8", f"group_size={GROUP_SIZE}", "agent.max_turns=3"),
    *("evaluation.num_tasks=1", "evaluation.num_samples=1", "max_failed_share=0.99"),
    *(f"agent.max_seconds={MAX_SECONDS}", f"agent.tool_timeout_seconds={MAX_SECONDS / 2}"),
    "checkpoint.every=0",
)


def lockstep(*words: str) -> list[str]:
    return [sys.executable, "-m", "lockstep.cli", *words]


def ended(command: list[str], limit: float, **options: Any) -> list[str]:
    """Runs a command. Returns what is wrong with how it ended: nothing for status 0 in time."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        found = subprocess.run(command, timeout=limit, **pipes | options)
    except subprocess.TimeoutExpired as late:
        lines = (late.stdout or b"").decode(errors="replace").strip().splitlines()
        return [f"not ended after {limit:g} s; it printed last: {lines[-2:]}"]
    if found.returncode == 0:
        return []
    text = ((found.stderr or b"") + (found.stdout or b"")).decode(errors="replace").strip()
    return [f"exit status {found.returncode}: " + "\n    ".join(text.splitlines()[-8:])]


def of_hook(hook: str, only: tuple[str, ...], out: Path) -> list[str]:
    """Trains with one hook broken. Returns the problems."""
    names = only or tuple(ways(hook))
    steps = math.ceil(len(names) / 7)
    chosen = [f"task.only={','.join(only)}"] if only else []
    own = ("--plugin", __file__, "task=hostile", f"task.hook={hook}", *chosen, f"steps={steps}")
    problems = trained(out, *own, num_steps=steps, limit=60 + 3 * MAX_SECONDS * steps)
    if not problems:
        for verb in (("report", str(out), "--out", str(out / "again.html")), ("doctor", str(out))):
            found = ended(lockstep(*verb), 120)
            problems += [f"lockstep {verb[0]}: {x}" for x in found if "status 1" not in x]
    return problems


def trained(
    out: Path, *words: str, num_steps: int, limit: float = 120, shell: str = "", **options: Any
) -> list[str]:
    """Trains in a short run. Returns its problems. shell: a line that has the run as COMMAND."""
    command = lockstep("train", "quickstart", f"out={out}", *SMALL, *words)
    if shell:
        command = ["bash", "-o", "pipefail", "-c", shell.replace("COMMAND", shlex.join(command))]
    return [*ended(command, limit, **options), *unaccounted(out, num_steps)]


def unaccounted(out: Path, steps: int) -> list[str]:
    """Steps and episodes that the run directory lacks."""
    if not (out / "metrics.jsonl").is_file():
        return ["no metrics.jsonl"]
    run, problems = load_run(out), []
    rows = {row["step"]: row for row in run.metrics if "episodes/total" in row}
    if sorted(rows) != list(range(steps)):
        problems.append(f"steps {sorted(rows)} of {steps} are in metrics.jsonl")
    for step in range(steps):
        stored: list[Any] = []
        with contextlib.suppress(RunError):  # none are stored
            stored = [t for group in run.groups(step) for t in group.trajectories]
        if len(stored) != 8 * GROUP_SIZE or step not in rows:
            problems.append(f"step {step}: {len(stored)} episodes of {8 * GROUP_SIZE} are stored")
            continue
        failed = [t for t in stored if t.status == "failed"]
        if any(not t.error for t in failed) or rows[step]["episodes/failed"] != len(failed):
            problems.append(f"step {step}: {len(failed)} failed episodes, not all with a reason")
    return problems


def of_tracker(method: str, name: str, out: Path) -> list[str]:
    """Trains with a tracker, one of whose functions misbehaves."""
    own = ("--plugin", __file__, "record.loggers=wandb", "steps=1", "evaluation.at_start=false")
    environment = {**os.environ, "LOCKSTEP_SOAK_TRACKER": f"{method}:{name}"}
    return trained(out, *own, num_steps=1, env=environment)


CONSOLES = {
    "full": "COMMAND >/dev/full 2>&1", "closed": "COMMAND >&- 2>&-",
    "head": "COMMAND | head -1 >/dev/null",
}  # fmt: skip
"""Nobody reads what is printed. head leaves after one line; its own status is not the run's."""


def of_console(name: str, out: Path) -> list[str]:
    return trained(out, "steps=2", num_steps=2, shell=CONSOLES[name])


# -- kills ----------------------------------------------------------------------------------------

KILLED = (
    *("groups_per_step=2", "group_size=4", "evaluation.num_tasks=2", "evaluation.every=2"),
    *("steps=4", "checkpoint.every=3", "checkpoint.keep_last=1"),
)


@functools.cache
def unbroken(folder: Path) -> Path:
    """A run that nothing interrupts."""
    out = folder / "unbroken"
    shutil.rmtree(out, ignore_errors=True)
    command = lockstep("train", "quickstart", f"out={out}", *KILLED)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


SIGNALS = (
    *("KILL", "INT", "TERM", "INT INT", "TERM TERM", "INT KILL", "INT INT KILL", "TERM INT KILL"),
)
"""What a user, a scheduler or a closed terminal sends to the processes of a run, in this order."""


def of_kill(share: float, folder: Path, out: Path) -> list[str]:
    """Sends signals to a run when it has this share of its rows, and to the one that continues it.
    Returns what the run that ends has other than one that nothing interrupts."""
    whole = unbroken(folder)
    draws, sent = random.Random(share), []
    for after in (share, draws.random(), math.inf):
        is_begun = (out / "config.json").is_file()
        words = (str(out), "resume=true") if is_begun else ("quickstart", f"out={out}", *KILLED)
        process = subprocess.Popen(
            lockstep("train", *words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        names = draws.choice(SIGNALS).split() if math.isfinite(after) else []
        num_rows = math.floor(after * len(load_run(whole).metrics)) if names else 0
        while names and process.poll() is None and len(rows_in(out)) < num_rows:
            time.sleep(0.02)
        for name in names:
            moment = draws.expovariate(2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(moment)
                break
            os.killpg(process.pid, getattr(signal, f"SIG{name}"))
            sent.append(f"{name} {num_rows} rows + {moment:.2f} s")
        try:
            _, errors = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            return [f"{sent}: not ended after 300 s"]
        ends = (0, 130, -signal.SIGKILL, -signal.SIGINT, -signal.SIGTERM) if names else (0,)
        is_early = names and errors.endswith(b"KeyboardInterrupt\n")  # as Python itself started
        if process.returncode not in ends and not is_early:
            return [f"{sent}: exit {process.returncode}: {errors.decode().strip()[-300:]}"]
    names = [name for name, read in READERS.items() if read(out) != read(whole)]
    return [f"{sent}: other than without a signal: {', '.join(names)}"] if names else []


def rows_in(out: Path) -> list[bytes]:
    """The rows of a run that may be writing another."""
    file = out / "metrics.jsonl"
    return file.read_bytes().splitlines() if file.is_file() else []


OF_TIME = ("time/", "tokens/cached", "tokens/prefilled", "episode/cached")
"""Metrics that depend on how long a tool takes: a prompt that comes in a step later finds another
prefix in the cache. What is sampled does not depend on it."""


def metrics_of(path: Path) -> list[dict[str, Any]]:
    rows = load_run(path).metrics
    return [{k: v for k, v in row.items() if not k.startswith(OF_TIME)} for row in rows]


def episodes_of(path: Path) -> list[tuple[Any, ...]]:
    return [
        (split, record.trajectory.id, segment.token_ids.tolist(), str(segment.logprobs))
        for split in load_run(path).splits()
        for record in load_run(path).trajectories(split=split)
        for segment in record.trajectory.segments
    ]


def weights_of(path: Path) -> dict[str, bytes]:
    last = max((path / "checkpoints").iterdir())
    return {str(file.relative_to(last)): file.read_bytes() for file in last.rglob("*.safetensors")}


READERS: dict[str, Callable[[Path], Any]] = {
    "metrics": metrics_of,
    "episodes": episodes_of,
    "weights and moments": weights_of,
}

# -- a server under load --------------------------------------------------------------------------


async def load(url: str, num_clients: int, seconds: float) -> tuple[int, float]:
    """Sessions of `num_clients` at a time, one in a hundred hostile, for so long. Returns how many
    sessions ended, and the longest wait for /health."""
    ended, longest, until = 0, 0.0, time.monotonic() + seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as client:

        async def post(path: str, **given: Any) -> bytes:
            async with client.post(path, **given) as reply:
                return await reply.read()

        async def sound(number: int) -> None:
            session = json.loads(await post("/sessions", json={"task": {"id": str(number)}}))
            words = {"role": "user", "content": f"Where was {number} born?"}
            body = {"model": session["model"], "messages": [words], "max_tokens": 4}
            headers = {"Authorization": f"Bearer {session['api_key']}"}
            await post(f"/s/{session['id']}/v1/chat/completions", json=body, headers=headers)
            for verb, given in (("reward", {"reward": 1.0}), ("finish", {})):
                await post(f"/sessions/{session['id']}/{verb}", json=given, headers=headers)

        async def hostile(number: int) -> None:
            kind = number // 100 % 4
            if kind == 0:  # 8 MB of one word
                words = {"role": "user", "content": "x" * 2**23}
                body = {"model": "tiny-qwen3", "messages": [words]}
                await post("/v1/chat/completions", json=body)
            elif kind == 1:
                await post("/sessions", data=b"[" * 100_000, headers=JSON)
            else:  # a request that is never completed, or a connection without one
                host, port = url.removeprefix("http://").split(":")
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"POST /sessions HTTP/1.1\r\nHost: localhost\r\n" * (kind - 2))
                await asyncio.sleep(2)
                writer.close()

        numbers = itertools.count()

        async def one_client() -> None:
            nonlocal ended
            while time.monotonic() < until:
                number = next(numbers)
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    await (hostile(number) if number % 100 == 7 else sound(number))
                    ended += number % 100 != 7

        async def watch() -> None:
            nonlocal longest
            while time.monotonic() < until:
                began = time.monotonic()
                async with client.get("/health") as reply:
                    await reply.read()
                longest = max(longest, time.monotonic() - began)
                await asyncio.sleep(0.05)

        await asyncio.gather(watch(), *(one_client() for _ in range(num_clients)))
    return ended, longest


JSON = {"Content-Type": "application/json"}
LOAD_CLIENTS, LOAD_SECONDS = 500, 60.0
SERVED: list[str] = []
"""What the server did, in words."""


def of_server(out: Path) -> list[str]:
    """Serves a model to many clients, three times. Returns what grows from the second to the third,
    slow answers of /health, and sessions that were answered and not stored."""
    words = ("tiny-qwen3", "agent.max_turn_tokens=4", f"--out={out}", "--json")
    server = subprocess.Popen(lockstep("serve", *words), stdout=subprocess.PIPE)
    assert server.stdout is not None
    problems, sizes, total = [], [], 0
    try:
        url = json.loads(server.stdout.readline())["url"]
        for _ in range(3):  # the first one fills caches and the list of ended sessions
            ended, longest = asyncio.run(load(url, LOAD_CLIENTS, LOAD_SECONDS / 3))
            total += ended
            time.sleep(6)  # longer than a connection without a request is kept
            files = len(os.listdir(f"/proc/{server.pid}/fd"))
            pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
            sizes.append((files, pages * 4096 / 2**20))
            SERVED.append(
                f"{ended} sessions of {LOAD_CLIENTS} clients, /health within {longest:.2f} s; then "
                f"{files} open files, {sizes[-1][1]:.0f} MiB"
            )
            print(SERVED[-1], flush=True)
            if longest > 1:
                problems.append(f"/health took {longest:.2f} s")
        for what, before, after in zip(("open files", "MiB"), *sizes[1:], strict=True):
            if after > 1.05 * before + 5:
                problems.append(f"{before:.0f} {what} grew to {after:.0f}")
    finally:
        server.kill()
        server.wait()
    stored = sum(1 for _ in load_run(out).trajectories())
    if stored < total:
        problems.append(f"{stored} of {total} finished sessions are stored")
    return problems


# -- faults by name -------------------------------------------------------------------------------

TESTS = Path(__file__).parents[2] / "tests" / "cpu"
FAULTS: dict[str, list[str]] = PLAN["faults"]
"""Fault -> the tests that a run survives it, below tests/cpu."""


def of_fault(name: str, out: Path) -> list[str]:
    """Runs the tests of a fault."""
    chosen = [str(TESTS / each) for each in FAULTS[name]]
    return ended([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen], 600)


# -- all of it ------------------------------------------------------------------------------------

Check = Callable[[Path], list[str]]
"""Makes a run in a folder. Returns its problems."""


def cases_of(
    hooks: Sequence[str], only: tuple[str, ...], num_kills: int, folder: Path
) -> dict[str, Check]:
    """The checks of these hooks by name."""
    draws = random.Random(0)
    shares = [(at + draws.random()) / num_kills for at in range(num_kills)]
    special: dict[str, dict[str, Check]] = {
        "tracker": {
            f"tracker.{method}-{name}": functools.partial(of_tracker, method, name)
            for method in ("init", "log", "finish")
            for name in only or MISBEHAVIOURS
        },
        "console": {f"console-{name}": functools.partial(of_console, name) for name in CONSOLES},
        "server": {"server": of_server},
        "kill": {f"kill-{at:.3f}": functools.partial(of_kill, at, folder) for at in shares},
        "fault": {name: functools.partial(of_fault, name) for name in FAULTS},
    }
    found: dict[str, Check] = {}
    for hook in hooks:
        found |= special.get(hook, {hook: functools.partial(of_hook, hook, only)})
    return found


def main() -> int:
    every = (*HOOKS, "tracker", "console", "fault", "server", "kill")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hook", action="append", help=", ".join(every))
    parser.add_argument("--only", action="append", default=[], help="a misbehaviour by name")
    parser.add_argument("--kills", type=int, default=100, help="runs that are killed; default: 100")
    parser.add_argument("--out", type=Path, help="folder of the runs; default: a temporary one")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    hooks = options.hook or every
    cases = cases_of(hooks, tuple(options.only), options.kills, folder)
    num_bad, started = 0, time.monotonic()
    found: dict[str, list[str]] = {}

    def timed(name: str) -> tuple[str, float, list[str]]:
        out, began = folder / name, time.monotonic()
        shutil.rmtree(out, ignore_errors=True)
        problems = cases[name](out)
        return name, time.monotonic() - began, problems

    if any(name.startswith("kill-") for name in cases):
        unbroken(folder)
    with ThreadPoolExecutor(2) as runs:
        for name, seconds, problems in runs.map(timed, cases):
            num_bad += bool(problems)
            found[name] = problems
            print(f"{name:45} {seconds:6.1f} s  {'; '.join(problems) or 'ok'}", flush=True)
    print(f"{num_bad} of {len(cases)} runs with a problem")
    if options.hook is None and options.kills == 100:
        from run import save, stamp

        minutes = round((time.monotonic() - started) / 60, 1)
        result = {"minutes": minutes, "figures": SERVED, "problems": found}
        save("soak", stamp("python docs/proof/soak.py") | result)
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
