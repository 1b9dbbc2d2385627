"""The gateway's HTTP server: which session a request is for, and what its status is.

    /v1/chat/completions, /v1/responses, /v1/messages      the session of the key, or the shared one
    /s/SESSION/v1/...                                      that session
    /sessions, /sessions/SESSION/...                       made, rewarded, finished, read
    /claim                                                 an episode that waits for an agent

A turn is in its session before its first byte is sent, so a stream is sent when it is complete.
Where a client goes away meanwhile, its turn is sampled to its end, and its retry gets it; of a
client that cannot be known again (no count of attempts, no key) it is given up.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import itertools
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, cast
from urllib.parse import urlsplit

from lockstep.agent.gateway import chat, messages, responses
from lockstep.agent.gateway.config import LOOPBACK, GatewayConfig
from lockstep.agent.gateway.exchange import Refusal, TurnReply, TurnRequest, client_message
from lockstep.agent.gateway.reading import (
    Answered,
    Asked,
    Memory,
    integer_of,
    object_of,
    parse_body,
    reward_of,
    text_of,
    unsupported,
    wrong_value,
)
from lockstep.agent.gateway.registry import SessionRegistry
from lockstep.agent.gateway.session import GatewaySession
from lockstep.agent.gateway.trajectory import describe_trajectory, trajectory_to_dict
from lockstep.errors import (
    CapabilityError,
    ConfigError,
    DataError,
    EngineDownError,
    EngineError,
    MissingExtraError,
    RendererError,
)
from lockstep.renderers.base import Renderer
from lockstep.types import Message, Task

try:
    from aiohttp import web
except ImportError:  # pragma: no cover
    raise MissingExtraError.of("aiohttp", extra="http", needed_for="the gateway") from None

LOGGER = logging.getLogger(__name__)

MAX_CLAIM_SECONDS = 300.0
MAX_REMEMBERED_BODIES = 1024
"""Per session: how far back a retry can come."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Counts:
    """Counters of the server since its start."""

    num_requests: int = 0
    """Turns that were asked for."""
    num_refused: int = 0
    num_failed: int = 0
    """Answered with a status of 500 or above."""
    num_sampled_tokens: int = 0
    num_encoded_tokens: int = 0
    """Tokens of prompts that no session had before."""


class GatewayServer:
    """Serves `sessions` from `start` to `close`.

    model: what the model is called. key: opens every session; "" leaves this machine's users in,
    and is refused for any other address.
    """

    def __init__(
        self,
        sessions: SessionRegistry,
        *,
        renderer: Renderer,
        model: str,
        config: GatewayConfig | None = None,
        key: str = "",
    ) -> None:
        self.sessions, self.model = sessions, model
        self.config = config or GatewayConfig()
        self.counts = Counts()
        self.config.check_key(key)
        self._key = key.encode()
        self._renderer = renderer
        self._token_bytes = renderer.tokenizer.all_token_bytes()
        self._memories: dict[str, Memory] = {}
        self._shared: GatewaySession | None = None
        self._num_shared_tokens = 0
        self._num_shared_turns = 0
        self._rotation: asyncio.TimerHandle | None = None
        self._turns: set[asyncio.Task[Any]] = set()
        self._numbers = itertools.count()
        self._runner: web.AppRunner | None = None
        self._port = self.config.port

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listens. Raises ConfigError if the address cannot be taken."""
        app = web.Application(
            client_max_size=self.config.max_body_bytes, middlewares=[self._answer_safely]
        )
        app.add_routes(self._routes())
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=5.0,
            handler_cancellation=True,
            keepalive_timeout=self.config.read_seconds,  # also of headers that never end
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self.config.host, self.config.port).start()
        except OSError as error:
            await runner.cleanup()
            hint = " port=0 takes a free one." if error.errno == errno.EADDRINUSE else ""
            raise ConfigError(
                f"gateway.host={self.config.host} gateway.port={self.config.port}: "
                f"{error.strerror or error}.{hint}"
            ) from error
        self._runner = runner
        self._port = cast("tuple[str, int]", runner.addresses[0])[1]

    async def close(self) -> None:
        """Stops listening; turns under way are given up. Sessions stay as they are, but for the
        shared one, which nobody else would finish."""
        if self._runner is not None:
            for turn in self._turns:
                turn.cancel()
            await asyncio.gather(*self._turns, return_exceptions=True)
            await self._runner.cleanup()
            self._runner = None
        if self._rotation is not None:
            self._rotation.cancel()
        if self._shared is not None and not self._shared.is_finished:
            await self._shared.finish()

    @property
    def url(self) -> str:
        """`http://HOST:PORT`, as somebody on this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.config.host, self.config.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    def session_url(self, session_id: str) -> str:
        """`Endpoint.base_url` of a session."""
        return f"{self.url}/s/{session_id}"

    def _routes(self) -> list[web.RouteDef]:
        routes = [
            web.get("/health", self._health),
            web.post("/sessions", self._create),
            web.get("/sessions", self._list),
            web.get("/sessions/{session}", self._show),
            web.delete("/sessions/{session}", self._remove),
            web.post("/sessions/{session}/reward", self._reward),
            web.post("/sessions/{session}/finish", self._finish),
            web.get("/sessions/{session}/trajectory", self._trajectory),
            web.post("/claim", self._claim),
        ]
        for prefix in ("/v1", "/s/{session}/v1"):
            routes += [
                web.post(f"{prefix}/chat/completions", partial(self._answer, chat)),
                web.post(f"{prefix}/responses", partial(self._answer, responses)),
                web.post(f"{prefix}/messages", partial(self._answer, messages)),
                web.post(f"{prefix}/messages/count_tokens", self._count_tokens),
                web.get(f"{prefix}/models", self._models),
                web.get(f"{prefix}/models/{{model:.+}}", self._models),
            ]
        return routes

    # -- every request ----------------------------------------------------------------------------

    @web.middleware
    async def _answer_safely(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whatever happens, a status and a body in the dialect's own shape."""
        try:
            self._check_origin(request)
            return await handler(request)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            refusal = self._refusal_of(error, request)
        dialect = messages if _is_anthropic(request) else chat
        response = _json(dialect.error(refusal), status=refusal.status)
        if refusal.status == 503:
            response.headers["Retry-After"] = f"{max(1, round(self.config.retry_after_seconds))}"
        if refusal.status in (409, 410, 500):  # the official clients would try these again
            response.headers["x-should-retry"] = "false"
        if refusal.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if refusal.status in (408, 413):  # the rest of the body is not read
            response.force_close()
        return response

    def _check_origin(self, request: web.Request) -> None:
        """A page in a browser on this machine must not reach a server that has no key."""
        if self._key:
            return
        origin = request.headers.get("Origin", "")
        host = request.headers.get("Host", "")
        for name in (host and f"//{host}", origin):
            if name and _host(name) not in LOOPBACK:
                raise Refusal(
                    403,
                    "foreign_origin",
                    f"this server has no key and answers this machine alone, not "
                    f"{_host(name)[:80]!r}. Start it with a key (LOCKSTEP_KEY) to be reached by "
                    "another name.",
                )

    def _refusal_of(self, error: Exception, request: web.Request) -> Refusal:
        refusal = _refusal_of(error, request, self.config)
        if refusal.status >= 500:
            self.counts.num_failed += 1
        else:
            self.counts.num_refused += 1
        if refusal.status == 500:  # somebody's mistake, and not a server that is away
            LOGGER.error("%s %s", request.method, request.path, exc_info=error)
        return refusal

    async def _body(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            raise Refusal(
                415,
                "not_json",
                f"the body must be application/json, found {request.content_type}. Send the header "
                "Content-Type: application/json.",
            )
        try:
            async with asyncio.timeout(self.config.read_seconds):
                return await request.read()
        except TimeoutError:
            raise Refusal(
                408,
                "slow_client",
                f"the body did not arrive within {self.config.read_seconds:g} s.",
            ) from None
        except web.RequestPayloadError as error:  # its compression is broken
            raise Refusal(400, "unreadable_body", f"the body cannot be read: {error}.") from None

    async def _small_body(self, request: web.Request) -> dict[str, Any]:
        """Reads a body that may be missing."""
        if not request.can_read_body:
            return {}
        return parse_body(await self._body(request) or b"{}")

    # -- whose session ----------------------------------------------------------------------------

    def _session(self, request: web.Request) -> GatewaySession:
        """The session that a request is for. Raises Refusal (401, 403, 404)."""
        key = _key_of(request)
        named = request.match_info.get("session") or request.headers.get("x-lockstep-session", "")
        if self._is_master(key):
            return self.sessions.get(named) if named else self._shared_session()
        owner = self._owner(key)
        if owner is not None:
            if named and named != owner.id:
                raise Refusal(
                    403, "foreign_session", f"this key is of another session than {named[:80]!r}."
                )
            return owner
        if self._key:
            raise _unauthorized(key)
        return self.sessions.get(named) if named else self._shared_session()

    def _owner(self, key: str) -> GatewaySession | None:
        return self.sessions.of_key(key) if key and key.isascii() else None

    def _is_master(self, key: str) -> bool:
        given = key.encode("utf-8", "surrogateescape")
        return bool(self._key) and hmac.compare_digest(given, self._key)

    def _check_master(self, request: web.Request) -> None:
        key = _key_of(request)
        if self._is_master(key):
            return
        if self._owner(key) is not None:
            raise Refusal(
                403, "needs_master_key", "a session's key opens that session and nothing else."
            )
        if self._key:
            raise _unauthorized(key)

    def _shared_session(self) -> GatewaySession:
        """Returns the session for requests that name none."""
        is_full = self._num_shared_tokens >= self.config.rotate_tokens
        shared = self._shared
        if shared is None or shared.is_finished or (is_full and not self._num_shared_turns):
            if shared is not None and not shared.is_finished:
                self._spawn(self._end(shared))
            self._shared = shared = self.sessions.create()
            self._num_shared_tokens = 0
        self._rotate_later()
        return shared

    def _rotate_later(self) -> None:
        if self._rotation is not None:
            self._rotation.cancel()
        loop = asyncio.get_running_loop()
        self._rotation = loop.call_later(self.config.rotate_seconds, self._rotate)

    def _rotate(self) -> None:
        if self._num_shared_turns:
            self._rotate_later()
        elif (shared := self._shared) is not None:
            self._shared = None
            self._spawn(self._end(shared))

    def _memory(self, session: GatewaySession) -> Memory:
        found = self._memories.get(session.id)
        if found is None:
            known = {known.id for known in self.sessions.all()}
            if len(self._memories) > 2 * len(known):  # some were removed by others than this server
                self._memories = {k: m for k, m in self._memories.items() if k in known}
            found = self._memories[session.id] = Memory()
        return found

    # -- turns ------------------------------------------------------------------------------------

    async def _answer(self, dialect: ModuleType, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        raw = await self._body(request)
        if session.is_finished:  # the shared one may have ended meanwhile
            session = self._session(request)
        asked = dialect.read(parse_body(raw), self._memory(session))
        self._check_asked(asked)
        if key := self._turn_key(request, session, raw):
            asked = replace(asked, turn=replace(asked.turn, key=key))
        self.counts.num_requests += 1
        self._num_shared_turns += session is self._shared
        work = self._spawn(self._sample(session, asked))
        has_ids = request.headers.get("x-lockstep-ids", "").lower() in ("1", "true", "yes")

        def answered(replies: list[TurnReply]) -> Answered:
            found = self._answered(asked, replies, session, has_ids=has_ids)
            if dialect is responses and asked.is_stored:
                dialogue = [*asked.turn.messages[asked.num_instructions :], _as_stored(replies[0])]
                self._memory(session).dialogues.add(responses.response_id(found), dialogue)
            return found

        try:
            if asked.is_streamed:
                return await self._stream(request, dialect, session, work, answered)
            replies = await asyncio.shield(work)
        except (asyncio.CancelledError, ConnectionError):  # the client is gone
            if not key:
                work.cancel()
            work.add_done_callback(partial(_lost, session))
            raise
        return _json(dialect.write(answered(replies)), headers=_headers(session, replies))

    async def _stream(
        self,
        request: web.Request,
        dialect: ModuleType,
        session: GatewaySession,
        work: asyncio.Task[list[TurnReply]],
        answered: Callable[[list[TurnReply]], Answered],
    ) -> web.StreamResponse:
        """A stream, begun when the turn is complete or takes long: until then a refusal has its
        own status."""
        wait = self.config.keep_alive_seconds
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        await asyncio.wait((work,), timeout=wait)
        if work.done():
            replies = work.result()
            response = web.StreamResponse(headers={**headers, **_headers(session, replies)})
            await response.prepare(request)
        else:
            response = web.StreamResponse(headers={**headers, **_headers(session, [])})
            await response.prepare(request)
            while not work.done():
                await response.write(dialect.KEEP_ALIVE)
                await asyncio.wait((work,), timeout=wait)
            try:
                replies = work.result()
            except Exception as error:
                await response.write(dialect.late_error(self._refusal_of(error, request)))
                return response
        await response.write(b"".join(dialect.events(answered(replies))))
        await response.write_eof()
        return response

    async def _sample(self, session: GatewaySession, asked: Asked) -> list[TurnReply]:
        """The turns that were asked for, side by side."""
        is_shared = session is self._shared
        try:
            if asked.num_choices == 1:
                replies = [await session.reply(asked.turn)]
            else:
                turns = [_choice(asked.turn, at) for at in range(asked.num_choices)]
                replies = await asyncio.gather(*map(session.reply, turns))
        finally:
            self._num_shared_turns -= is_shared
        for reply in replies:
            if not reply.is_repeated:
                num_encoded = len(reply.prompt_ids) - reply.num_reused_tokens
                self.counts.num_encoded_tokens += num_encoded
                self.counts.num_sampled_tokens += len(reply.token_ids)
                if is_shared:
                    self._num_shared_tokens += num_encoded + len(reply.token_ids)
        return list(replies)

    def _check_asked(self, asked: Asked) -> None:
        name = asked.model
        if name != self.model and name not in self.config.names and "*" not in self.config.names:
            raise Refusal(
                404,
                "unknown_model",
                f"the model {name[:80]!r} is not served here; expected {self.model!r}. An agent "
                "with a name of its own built in is let in by gateway.names.",
                parameter="model",
            )
        if asked.num_choices > self.config.max_choices:
            raise wrong_value("n", f"may be {self.config.max_choices} at most.")

    def _turn_key(self, request: web.Request, session: GatewaySession, raw: bytes) -> str:
        """Returns the key that two attempts of one request share, or "".

        The official clients count their attempts: a later one has the key of the latest first
        attempt with the same body. A client's own key is taken as it is.
        """
        own = request.headers.get("Idempotency-Key", "")
        attempt = request.headers.get("x-stainless-retry-count", "")
        if not own and not attempt:
            return ""
        digest = hashlib.blake2b(request.path.encode() + b"\n" + raw, digest_size=16).digest()
        memory = self._memory(session)
        if own:
            if memory.bodies.setdefault(own, digest) != digest:
                raise Refusal(
                    409,
                    "idempotency_key_reused",
                    f"Idempotency-Key {own[:80]!r} came with another body before. A new request "
                    "needs a new key.",
                )
            _forget_oldest(memory.bodies)
            return f"client/{own}"
        known = memory.keys.get(digest)
        if known is None or not attempt.strip("0"):
            memory.keys.pop(digest, None)
            known = memory.keys[digest] = f"body/{digest.hex()}/{next(self._numbers)}"
            _forget_oldest(memory.keys)
        return known

    def _answered(
        self, asked: Asked, replies: list[TurnReply], session: GatewaySession, *, has_ids: bool
    ) -> Answered:
        return Answered(
            asked=asked,
            replies=replies,
            id=secrets.token_hex(12),
            created=int(time.time()),
            session_id=session.id,
            token_bytes=self._token_bytes,
            num_thinking_tokens=[self._num_thinking_tokens(reply) for reply in replies],
            has_ids=has_ids,
        )

    def _num_thinking_tokens(self, reply: TurnReply) -> int:
        if not reply.message.thinking:
            return 0
        kept = self._renderer.without_thinking(reply.token_ids.tolist())
        return max(0, len(reply.token_ids) - len(kept))

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._turns.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._turns.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: who waits got it, and nobody else needs it

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = parse_body(await self._body(request))
        asked = messages.read(body, self._memory(session), is_counted=True)
        self._check_asked(asked)
        return _json({"input_tokens": await session.count_tokens(asked.turn)})

    async def _models(self, request: web.Request) -> web.Response:
        key = _key_of(request)
        if self._key and not self._is_master(key) and self._owner(key) is None:
            raise _unauthorized(key)
        names = [self.model, *(name for name in self.config.names if name != "*")]
        listed = [
            {
                "id": name,
                "object": "model",
                "type": "model",
                "created": 0,
                "owned_by": "lockstep",
                "display_name": name,
                "created_at": "1970-01-01T00:00:00Z",
            }
            for name in dict.fromkeys(names)
        ]
        if (wanted := request.match_info.get("model")) is None:
            ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
            return _json({"object": "list", "data": listed, **ends})
        for entry in listed:
            if entry["id"] == wanted:
                return _json(entry)
        raise Refusal(
            404,
            "unknown_model",
            f"the model {wanted[:80]!r} is not served here.",
            parameter="model",
        )

    # -- sessions ---------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok", "model": self.model})

    async def _create(self, request: web.Request) -> web.Response:
        self._check_master(request)
        body = await self._small_body(request)
        task = None
        if (given := body.get("task")) is not None:
            given = object_of(given, "task")
            task = Task(
                id=text_of(given.get("id"), "task.id"),
                payload=object_of(given.get("payload") or {}, "task.payload"),
            )
        return _json(self._opened(self.sessions.create(task=task)), status=201)

    def _opened(self, session: GatewaySession) -> dict[str, Any]:
        """Describes a session to its agent."""
        base_url = self.session_url(session.id)
        return {
            "id": session.id,
            "api_key": session.key,
            "base_url": base_url,
            "openai_base_url": f"{base_url}/v1",
            "model": self.model,
        }

    async def _list(self, request: web.Request) -> web.Response:
        self._check_master(request)
        return _json({"sessions": [_summary(session) for session in self.sessions.all()]})

    async def _show(self, request: web.Request) -> web.Response:
        return _json(_summary(self._session(request)))

    async def _remove(self, request: web.Request) -> web.Response:
        session = self._session(request)
        await self.sessions.remove(session.id)
        self._memories.pop(session.id, None)
        if session is self._shared:
            self._shared = None
        return _json({"id": session.id, "deleted": True})

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = parse_body(await self._body(request))
        if unknown := sorted(set(body) - {"reward", "parts", "leaf"}):
            raise unsupported(unknown[0], "a reward has reward, parts and leaf.")
        parts = object_of(body.get("parts") or {}, "parts")
        await session.set_reward(
            reward_of(body.get("reward"), "reward"),
            parts={name: reward_of(value, f"parts.{name}") for name, value in parts.items()},
            leaf=integer_of(body.get("leaf"), "leaf", low=0, high=2**31 - 1),
        )
        return _json(_summary(session))

    async def _finish(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await self._small_body(request)
        if unknown := sorted(set(body) - {"error"}):
            raise unsupported(unknown[0], "finish takes error alone; post a reward before it.")
        await self._end(session, error=text_of(body.get("error"), "error", optional=True))
        return _json(_summary(session))

    async def _end(self, session: GatewaySession, *, error: str = "") -> None:
        await session.finish(error=error)
        self._memories.pop(session.id, None)

    async def _trajectory(self, request: web.Request) -> web.Response:
        session = self._session(request)
        match request.query.get("format", "json"):
            case "json":
                return _json(trajectory_to_dict(session.trajectory))
            case "text":
                return web.Response(text=describe_trajectory(session.trajectory) + "\n")
            case other:
                raise wrong_value("format", f"must be json or text, found {other[:40]!r}.")

    async def _claim(self, request: web.Request) -> web.Response:
        self._check_master(request)
        body = await self._small_body(request)
        wait = body.get("wait_seconds", 30.0)
        seconds = reward_of(wait, "wait_seconds")
        if not 0 <= seconds <= MAX_CLAIM_SECONDS:
            raise wrong_value("wait_seconds", f"must lie in 0..{MAX_CLAIM_SECONDS:g}.")
        try:
            async with asyncio.timeout(seconds):
                session, task = await self.sessions.claim()
        except TimeoutError:
            return web.Response(status=204)  # nothing yet: ask again
        about = {"id": task.id, "payload": dict(task.payload), "source": task.source}
        return _json({**self._opened(session), "task": about})


# -- small things ---------------------------------------------------------------------------------


def _json(
    body: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=json.dumps(body, ensure_ascii=False, allow_nan=False).encode(),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def _headers(session: GatewaySession, replies: list[TurnReply]) -> dict[str, str]:
    found = {"x-lockstep-session": session.id}
    if replies:
        found["x-lockstep-leaf"] = ",".join(str(reply.leaf) for reply in replies)
    return found


def _key_of(request: web.Request) -> str:
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and bearer:
        return bearer.strip()
    return request.headers.get("x-api-key", "").strip()


def _unauthorized(key: str) -> Refusal:
    found = "this one is not known" if key else "none came"
    return Refusal(
        401,
        "invalid_api_key",
        f"a key is needed, of a session or of the whole server, and {found}. Send it as "
        "Authorization: Bearer KEY, or x-api-key: KEY.",
    )


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or url
    except ValueError:
        return url


def _is_anthropic(request: web.Request) -> bool:
    path = request.path
    return "anthropic-version" in request.headers or path.endswith(
        ("/v1/messages", "/v1/messages/count_tokens")
    )


def _as_stored(reply: TurnReply) -> Message:
    return replace(client_message(reply.message, reply.stop), parse_error="")


def _lost(session: GatewaySession, work: asyncio.Task[list[TurnReply]]) -> None:
    """The turns were sampled, and their client is gone."""
    if not work.cancelled() and work.exception() is None:
        for reply in work.result():
            session.lost(reply.leaf)


def _forget_oldest(memory: dict[Any, Any]) -> None:
    if len(memory) > MAX_REMEMBERED_BODIES:
        del memory[next(iter(memory))]


def _choice(turn: TurnRequest, at: int) -> TurnRequest:
    """One of several replies to the same request: another draw, another key."""
    seed = None if turn.seed is None else (turn.seed + at + 2**63) % 2**64 - 2**63
    return replace(turn, seed=seed, key=turn.key and f"{turn.key}/{at}")


def _summary(session: GatewaySession) -> dict[str, Any]:
    trajectory = session.trajectory
    return {
        "id": session.id,
        "status": trajectory.status,
        "is_finished": session.is_finished,
        "task": trajectory.task_id,
        "num_turns": trajectory.num_turns,
        "num_tokens": sum(map(len, trajectory.segments)),
        "num_sampled_tokens": trajectory.num_sampled_tokens,
        "leaves": trajectory.leaves(),
        "rewards": {str(leaf): reward for leaf, reward in session.rewards.items()},
        "error": trajectory.error,
    }


def _refusal_of(error: Exception, request: web.Request, config: GatewayConfig) -> Refusal:
    """Converts any error into the refusal that the client gets."""
    match error:
        case Refusal():
            return error
        case web.HTTPRequestEntityTooLarge():
            return Refusal(
                413,
                "body_too_large",
                f"the body is larger than {config.max_body_bytes} bytes; gateway.max_body_bytes "
                "is the limit.",
            )
        case web.HTTPNotFound():
            return Refusal(
                404,
                "unknown_url",
                f"there is nothing at {request.method} {request.path[:120]}. Turns are asked for "
                "at /v1/chat/completions, /v1/responses and /v1/messages, behind /s/SESSION or by "
                "key.",
            )
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            text = f"{request.path[:120]} takes {allowed}, not {request.method}."
            return Refusal(405, "wrong_method", text)
        case web.HTTPException():
            return Refusal(error.status, "bad_request", error.reason)
        case CapabilityError():
            return Refusal(400, "unsupported_value", str(error))
        case EngineDownError():
            return Refusal(503, "engine_down", f"the engine is not there: {error}")
        case EngineError():
            return Refusal(502, "engine_error", str(error))
        case RendererError() | DataError() | ConfigError():
            return Refusal(400, "unwritable_dialogue", str(error))
        case _:
            name = type(error).__name__
            return Refusal(
                500,
                "internal_error",
                f"{name} in the gateway; its log has the place. Nothing was added to the session.",
            )
