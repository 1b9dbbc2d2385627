"""Cost of the gateway: the time that it adds to a request, and a long conversation through it.

1. 64 agents at the same time, each in a session of its own, 16 turns to a dialogue, then the next:
   a load tool in one process, the server in another. The engine answers each turn after the same
   time, which is subtracted. The rest is reading the request, finding it in the session's tree,
   encoding new messages, recording, writing, and both ends of HTTP.
2. One conversation of 128 turns: the number of encoded tokens, and of tokens in the last prompt.
3. Memory: growth of the process per stored token.

The load tool is wrk, with a script that keeps 64 dialogues going. Without wrk the load is left out.
The peer is the same load on a bare aiohttp server that reads the same JSON, waits the same time and
answers with the same bytes: a lower bound for Python gateways.

    python benchmarks/gateway.py [--seconds N] [--latency-ms N] [--wrk COMMAND]
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from measuring import Row, Side, command_of, listed, main, note, resident_bytes, row

import numpy as np
from aiohttp import ClientSession, web

from lockstep.agent.gateway.config import GatewayConfig
from lockstep.agent.gateway.registry import SessionRegistry
from lockstep.agent.gateway.server import GatewayServer
from lockstep.agent.gateway.session import GatewaySession
from lockstep.agent.turns import Budget, TurnSampler
from lockstep.models.locate import locate_model
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.engines import FakeEngine
from lockstep.types import Delta, Message, Request, SamplingParams, Task, Trajectory

NUM_AGENTS = 64
NUM_TURNS = 16
"""Turns of a dialogue of the load."""
SPREAD_SECONDS = 0.5
"""Over which the agents of the load begin."""
LONG_TURNS = 128
MODEL = "model"
SCRIPT = Path(__file__).with_suffix(".lua")
HOW = (
    "milliseconds that a turn takes beyond the engine's own time, median over 64 agents at the "
    "same time; peer: a bare aiohttp server that reads the same JSON and answers with a constant"
)
WORDS = (
    "the parser reads one more line of the file and says what it found there before it goes on to "
    "the next test which fails for the same reason as before"
)
REPLY = f"I look at it: {WORDS}. Then I run the tests again. {WORDS}."
SYSTEM = " ".join(["You repair programs. Say what you do, then do it."] * 20)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": WORDS,
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
    for name in ("read_file", "write_file", "run_tests")
]


# -- measurements ---------------------------------------------------------------------------------


class ConstantEngine(FakeEngine):
    """The same reply to everything, after the same time. Keeps nothing."""

    def __init__(self, reply_ids: list[int], *, seconds: float) -> None:
        super().__init__(lambda request: reply_ids)
        self._ids = np.array(reply_ids, np.int32)
        self._logprobs = np.full(len(reply_ids), -0.5, np.float32)
        self._seconds = seconds

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        await asyncio.sleep(self._seconds)
        yield Delta(
            token_ids=self._ids,
            logprobs=self._logprobs,
            policy_version=0,
            finish_reason="stop",
            stop=int(self._ids[-1]),
        )


def make_server(*, seconds: float) -> GatewayServer:
    tokenizer = Tokenizer.from_file(locate_model("tiny-qwen3"))
    renderer = ChatMLRenderer(tokenizer)
    reply_ids = renderer.render_reply(Message(role="assistant", content=REPLY))
    engine = ConstantEngine(reply_ids, seconds=seconds)
    numbers = itertools.count()

    def make(task: Task | None) -> GatewaySession:
        sampler = TurnSampler(
            engine,
            renderer,
            Trajectory(id=str(next(numbers))),
            sampling=SamplingParams(max_tokens=2048),
            budget=Budget(max_tokens=1 << 20, max_turns=1 << 30),
        )
        return GatewaySession(sampler, seed=0, rule="client")

    sessions = SessionRegistry(make)
    return GatewayServer(sessions, renderer=renderer, model=MODEL, config=GatewayConfig())


async def bare_server(*, seconds: float) -> str:
    """Starts it and returns its address."""
    answer = {
        "id": "x",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": REPLY}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
    numbers = itertools.count()

    async def chat(request: web.Request) -> web.Response:
        json.loads(await request.read())
        await asyncio.sleep(seconds)
        name = request.match_info["session"]
        return web.json_response(answer, headers={"x-lockstep-session": name})

    async def create(request: web.Request) -> web.Response:
        return web.json_response({"id": str(next(numbers))})

    app = web.Application(client_max_size=1 << 26)
    app.add_routes(
        [web.post("/s/{session}/v1/chat/completions", chat), web.post("/sessions", create)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"


def serve(kind: str, seconds: float) -> None:
    """Prints the address, and serves until it is killed. Runs in a process of its own."""

    async def forever() -> None:
        if kind == "ours":
            server = make_server(seconds=seconds)
            await server.start()
            url = server.url
        else:
            url = await bare_server(seconds=seconds)
        print(json.dumps({"url": url}), flush=True)
        await asyncio.Event().wait()

    asyncio.run(forever())


# -- the load -------------------------------------------------------------------------------------


def by_wrk(wrk: str, url: str, sessions: list[str], seconds: float) -> dict[str, float]:
    """wrk keeps one request of each session under way: it is asked again when it has answered."""
    with tempfile.TemporaryDirectory() as folder:
        names, script = Path(folder) / "sessions", Path(folder) / "load.lua"
        names.write_text("\n".join(sessions) + "\n")

        def quoted(text: str) -> str:  # JSON's, in Lua's long brackets
            return f"[==[{text}]==]"

        values = {
            "system": quoted(json.dumps(SYSTEM)),
            "reply": quoted(json.dumps(REPLY)),
            "words": quoted(WORDS),
            "tools": quoted(json.dumps(TOOLS)),
            "model": MODEL,
            "sessions": names,
            "turns": NUM_TURNS,
            "agents": len(sessions),
            "spread_ms": SPREAD_SECONDS * 1e3,
        }
        script.write_text(SCRIPT.read_text() % values)
        command = [wrk, "-t1", f"-c{len(sessions)}", f"-d{seconds:g}s", "--timeout", "30s"]
        done = subprocess.run(
            [*command, "-s", str(script), url], capture_output=True, text=True, check=False
        )
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT")), "")
    if not line:
        raise SystemExit(f"wrk failed: {done.stdout}{done.stderr}")
    median, worst, num, errors = line.split()[1:]
    return {
        "median_ms": float(median) / 1e3,
        "p99_ms": float(worst) / 1e3,
        "requests": int(num),
        "errors": int(errors),
    }


async def new_session(client: ClientSession, url: str) -> dict[str, Any]:
    async with client.post(f"{url}/sessions") as response:
        return await response.json()


def load(kind: str, wrk: str, *, seconds: float, latency: float) -> dict[str, float]:
    """A server in a process of its own under the load; the engine's time is taken off."""
    with Side(command_of(serve, kind, latency)) as server:
        url = server.first["url"]

        async def made() -> list[str]:
            async with ClientSession() as client:
                return [(await new_session(client, url))["id"] for _ in range(NUM_AGENTS)]

        sessions = asyncio.run(made())
        before = server.cpu_seconds()  # of its start
        found = by_wrk(wrk, url, sessions, seconds)
        found["cpu_ms"] = 1e3 * (server.cpu_seconds() - before) / found["requests"]
    if found["errors"]:
        raise SystemExit(f"{kind}: {found['errors']} of {found['requests']} requests failed.")
    for name in ("median_ms", "p99_ms"):
        found[name] -= latency * 1e3
    note(f"  {kind}: {listed(found)}")
    return found


# -- conversations --------------------------------------------------------------------------------


async def converse(num_conversations: int) -> dict[str, float]:
    """Long conversations over HTTP, one after the other: tokens encoded, memory, time."""
    server = make_server(seconds=0.0)
    await server.start()
    tokenizer = server._renderer.tokenizer
    known: dict[int, tuple[int, int]] = {}
    found: dict[str, float] = {}
    async with ClientSession() as client:
        for at in range(num_conversations):
            made = await new_session(client, server.url)
            before = tokenizer.num_encoded
            said = [{"role": "system", "content": SYSTEM}]
            times = []
            for turn in range(LONG_TURNS):
                said.append({"role": "user", "content": f"{at} {turn}: {WORDS}"})
                body = json.dumps({"model": MODEL, "tools": TOOLS, "messages": said}).encode()
                began = time.process_time()
                async with client.post(
                    f"{made['openai_base_url']}/chat/completions",
                    data=body,
                    headers={"Content-Type": "application/json"},
                ) as response:
                    answer = await response.json()
                times.append(time.process_time() - began)
                said.append(answer["choices"][0]["message"])
            trajectory = server.sessions.get(made["id"]).trajectory
            [leaf] = trajectory.leaves()
            num_path = len(trajectory.path_ids(leaf))
            found = {
                "path_tokens": num_path,
                "new_tokens": num_path - trajectory.num_sampled_tokens,
                "encoded_tokens": int(trajectory.metrics["tokens/encoded"]),
                "tokenizer_tokens": tokenizer.num_encoded - before,
                "last_body_bytes": len(body),
                "first_turns_cpu_ms": 1e3 * float(np.mean(times[:16])),
                "last_turns_cpu_ms": 1e3 * float(np.mean(times[-16:])),
            }
            gc.collect()
            known[at] = ((at + 1) * num_path, resident_bytes("VmRSS"))
    await server.close()
    (first, small), (last, large) = known[num_conversations // 2 - 1], known[num_conversations - 1]
    found["bytes_per_token"] = (large - small) / (last - first)
    return found


# -- all of it ------------------------------------------------------------------------------------


def compare(
    *, seconds: float = 20.0, latency_ms: float = 500.0, wrk: str = "wrk", conversations: int = 16
) -> Iterator[Row]:
    """wrk: its command."""
    if shutil.which(wrk):
        note(f"load of {NUM_AGENTS} agents, {seconds:g} s, the engine takes {latency_ms:g} ms")
        ours, peer = (
            load(kind, wrk, seconds=seconds, latency=latency_ms / 1e3) for kind in ("ours", "bare")
        )
        yield row("gateway", ours["median_ms"], peer["median_ms"], "ms", how=HOW)
    else:
        note(f"the load is left out: no {wrk} in PATH")
    talk = asyncio.run(converse(conversations))
    note(f"{LONG_TURNS} turns, CPU with the client's: {listed(talk)}")
    yield row(f"gateway, tokens encoded in {LONG_TURNS} turns", talk["encoded_tokens"],
              talk["path_tokens"], "tokens", how="peer: all tokens of the last path")  # fmt: skip


if __name__ == "__main__":
    main(compare, short={"seconds": 4.0, "conversations": 4})
