"""The sandbox `remote`: programs run by a server, such as `lockstep.agent.sandbox.server`.

Protocol. All bodies are JSON objects in UTF-8.

    POST /run           {"code": str, "session": str}, headers `Authorization: Bearer KEY` and
                        `Idempotency-Key: ID`
      200               {"output": str, "ending": ENDING, "is_truncated": bool, "seconds": float}
      400, 401, 413     {"error": str}: malformed, wrong key, too long; not retried
      429, 502, 503, 504  not run: retried with the same ID, after `Retry-After` seconds or 1
    DELETE /sessions/SESSION    204, also for an unknown session
    GET /               200 {"dialect": str}

The server enforces the limits and remembers its answer to each ID: if an answer is lost, the retry
gets it again, and the program is not run twice.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import time
import urllib.request
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar
from urllib.parse import quote

from lockstep.agent.sandbox.base import (
    ENDINGS,
    ProgramResult,
    QueuedSandbox,
    Sandbox,
    SandboxConfig,
    metrics_of,
    require,
)
from lockstep.errors import ConfigError, MissingExtraError, SandboxError

CONNECT_SECONDS = 10.0
NOT_RUN = (429, 502, 503, 504)
"""Statuses after which a request is retried."""


@dataclass(frozen=True, kw_only=True)
class RemoteConfig(SandboxConfig):
    """A server that runs programs: Lockstep's `sandbox_server`, or any with its protocol. The
    server enforces the limits, except for that on the output."""

    TAG: ClassVar[str] = "remote"

    url: str
    """Address of the server: http://HOST:PORT."""
    api_key_env: str = ""
    """Environment variable with the server's key. Empty: no key."""
    request_seconds: float = 60.0
    """Seconds for one answer; must exceed the server's time limit and queue."""
    retries: int = 4
    """Further attempts at an unanswered request. The server still runs the program once."""
    dialect: str = ""
    """Text about the Python there, for the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self,
            "sandbox",
            url=(self.url.startswith(("http://", "https://")), "http://HOST:PORT"),
            request_seconds=(0 < self.request_seconds < math.inf, "a finite number above 0"),
            retries=(self.retries >= 0, "at least 0"),
        )

    def headers(self) -> dict[str, str]:
        """Headers of every request. Raises ConfigError if the key's variable is not set."""
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        if self.api_key_env and not key:
            raise ConfigError(
                f"sandbox.api_key_env={self.api_key_env}: the environment has no such variable, or "
                "it is empty."
            )
        return {"Authorization": f"Bearer {key}"} if key else {}

    def check(self) -> None:
        """Raises ConfigError unless the server answers and accepts the key."""
        request = urllib.request.Request(self.url.rstrip("/") + "/", headers=self.headers())
        try:
            with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as answer:
                answer.read(1)
        except OSError as error:  # HTTPError and URLError too
            raise ConfigError(
                f"sandbox.url={self.url}: GET / answered {error}. Is a sandbox server up there, "
                f"and does sandbox.api_key_env={self.api_key_env!r} name its key?"
            ) from error

    def open(self) -> Sandbox:
        return RemoteSandbox(self)


class RemoteSandbox(QueuedSandbox):
    """See `RemoteConfig`. Raises SandboxError if the server does not answer."""

    def __init__(self, config: RemoteConfig) -> None:
        super().__init__(config)
        if find_spec("aiohttp") is None:
            raise MissingExtraError.of("aiohttp", extra="http", needed_for="sandbox=remote")
        self._config = config
        self._url = config.url.rstrip("/")
        self._client: Any = None
        self.dialect = config.dialect or self.dialect

    async def _run(self, code: str, session: str) -> ProgramResult:
        began = time.monotonic()
        answer = await self._ask("POST", "/run", {"code": code, "session": session})
        output, ending, seconds = (answer.get(key) for key in ("output", "ending", "seconds"))
        if ending not in ENDINGS or not isinstance(output, str):
            raise SandboxError(
                f"{self._url}/run answered ending={ending!r} and output of type "
                f"{type(output).__name__}; expected one of {list(ENDINGS)}, and text."
            )
        limit = self._limits.output_chars
        is_truncated = answer.get("is_truncated") is True or len(output) > limit
        return ProgramResult(
            output=output[:limit].encode("utf-8", "replace").decode("utf-8"),
            ending=ending,
            is_truncated=is_truncated,
            seconds=seconds if isinstance(seconds, float) else time.monotonic() - began,
            metrics=metrics_of(ending, is_truncated=is_truncated),
        )

    async def _forget(self, session: str) -> None:
        await self._ask("DELETE", f"/sessions/{quote(session, safe='')}", None)

    async def _end(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _leave_loop(self) -> None:
        self._client = None  # its connections ended with their loop

    async def _ask(self, method: str, path: str, body: dict[str, str] | None) -> dict[str, Any]:
        """The answer, after at most `retries` further attempts."""
        import aiohttp

        if self._client is None:
            timeout = aiohttp.ClientTimeout(
                total=self._config.request_seconds, sock_connect=CONNECT_SECONDS
            )
            self._client = aiohttp.ClientSession(headers=self._config.headers(), timeout=timeout)
        where = f"{method} {self._url}{path}"
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        problem = ""
        for attempt in range(self._config.retries + 1):
            wait = min(2.0**attempt, 30.0)
            try:
                async with self._client.request(
                    method, self._url + path, json=body, headers=headers
                ) as answer:
                    if answer.status < 300:
                        return await self._read(answer, where)
                    if answer.status not in NOT_RUN:
                        text = (await answer.content.read(2048)).decode("utf-8", "replace")
                        raise SandboxError(f"{where} answered {answer.status}: {text[:500]}")
                    problem = f"status {answer.status}"
                    after = answer.headers.get("Retry-After", "")
                    wait = min(float(after), 60.0) if after.isdigit() else wait
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = str(error) or type(error).__name__
            if attempt < self._config.retries:
                await asyncio.sleep(wait)
        raise SandboxError(
            f"{where}: {problem}, {self._config.retries + 1} times. Is the server up, and are its "
            "limits on time below sandbox.request_seconds?"
        )

    async def _read(self, answer: Any, where: str) -> dict[str, Any]:
        # JSON may write a character as \\uXXXX\\uXXXX, and there may be more fields.
        most = 12 * self._limits.output_chars + 4096
        text = b""
        async for part in answer.content.iter_any():
            text += part
            if len(text) > most:
                raise SandboxError(f"{where} answered more than {most} bytes.")
        try:
            found = json.loads(text or b"{}")
        except (ValueError, RecursionError) as error:
            raise SandboxError(f"{where} answered with text that is not JSON: {error}.") from error
        if not isinstance(found, dict):
            raise SandboxError(f"{where} answered a {type(found).__name__}, not an object.")
        return found
