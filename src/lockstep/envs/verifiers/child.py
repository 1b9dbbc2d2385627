"""The child process for an environment of verifiers.

    python child.py            (started by `config`, with a Python that has verifiers 0.4)

It follows the protocol of `lockstep.children` without importing Lockstep, since verifiers pins
packages that a trainer needs in other versions and may be installed elsewhere. Requests run
concurrently. Source: verifiers 0.4.0, v1/env.py, v1/configs/env.py.
"""

import asyncio
import itertools
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

SERIES = "0.4."


class Refused(Exception):
    """A mistake that the user can correct."""


class Server:
    def __init__(self) -> None:
        self.env: Any = None
        self.tasks: list[Any] = []
        self.serving: Any = None
        self.keys = itertools.count()

    async def open(self, *, environment: dict[str, Any], limit: int) -> dict[str, Any]:
        """Loads the environment and at most `limit` of its tasks (0: all)."""
        try:
            found = version("verifiers")
        except PackageNotFoundError:
            raise Refused(
                f"{sys.executable} has no verifiers. Install it there: pip install "
                "'verifiers>=0.4,<0.5'; or name the Python that has it with task.python=PATH."
            ) from None
        if not found.startswith(SERIES):
            raise Refused(f"{sys.executable} has verifiers {found}; expected {SERIES}x.")
        loaders = import_module("verifiers.v1.utils.loaders")
        try:
            self.env = loaders.load_environment(loaders.resolve_env_config(environment))
        except (ImportError, TypeError, ValueError, AttributeError) as error:
            raise Refused(f"{type(error).__name__}: {error}") from None
        taskset = self.env.taskset
        if not limit and not taskset.bounded:
            raise Refused("its tasks never end: set how many to take with task.limit=N.")
        self.tasks = list(taskset.take(limit) if limit else taskset)
        seats = self.env._agent_specs
        self.serving = self.env.serving()
        await self.serving.__aenter__()
        return {
            "version": found,
            "tasks": [
                {"key": task.key, "question": task.data.prompt_text, "name": task.data.name or ""}
                for task in self.tasks
            ],
            "runs_code_here": sorted(
                seat
                for seat, spec in seats.items()
                if self.env._harnesses[seat].EXECUTES_CODE and spec.runtime.type == "subprocess"
            ),
        }

    async def run(self, *, index: int, url: str, api_key: str, model: str) -> dict[str, Any]:
        """Plays one episode. The model is served at `url`."""
        clients = import_module("verifiers.v1.clients")
        variable = f"LOCKSTEP_SESSION_KEY_{next(self.keys)}"
        os.environ[variable] = api_key  # a client's key comes from the environment alone
        try:
            client = clients.EvalClientConfig(base_url=url, api_key_var=variable)
            context = clients.ModelContext(model=model, client=client)
            episode = await self.env.run_episode(self.tasks[index], context)
        finally:
            os.environ.pop(variable, None)
        problems = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        return {
            "ok": episode.ok,
            "errors": [f"{e.type}: {e.message}" for e in problems],
            "rewards": [trace.reward for trace in traces],
            "parts": [
                {name: r.score for name, r in trace.rewards.items() if r is not None}
                for trace in traces
            ],
        }

    async def answer(self, request: dict[str, Any], write: Any) -> None:
        number = request.pop("id")
        request.pop("seconds")
        try:
            reply = await (self.run if number else self.open)(**request)
        except Exception as error:
            text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
            reply = {"error": type(error).__name__, "text": text}
        write({"id": number, **reply})


async def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an environment prints is not a reply

    def write(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    server, running = Server(), {}
    loop, reader = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    while line := await loop.run_in_executor(reader, sys.stdin.readline):
        request = json.loads(line)
        if "cancel" in request:
            if task := running.get(request["cancel"]):
                task.cancel()
            continue
        number = request["id"]
        task = running[number] = asyncio.create_task(server.answer(request, write))
        task.add_done_callback(lambda _, number=number: running.pop(number, None))
    for task in list(running.values()):
        task.cancel()
    if server.serving is not None:
        await server.serving.__aexit__(None, None, None)


if __name__ == "__main__":
    asyncio.run(main())
