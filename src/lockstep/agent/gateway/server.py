"""The gateway's HTTP server.

    /v1/chat/completions, /v1/responses, /v1/messages      the session of the key, or the shared one
    /s/SESSION/v1/...                                      that session
    /sessions, /sessions/SESSION/...                       made, rewarded, finished, read
    /claim                                                 an episode that waits for an agent

A turn is recorded before its first byte is sent, so a stream is sent when it is complete. If the
client goes away meanwhile, its turn is sampled to the end and kept for its retry; a client that
cannot be recognized (it sends no count of its attempts) has it aborted.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import json
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from lockstep.agent.gateway import chat, messages, responses
from lockstep.agent.gateway.config import GatewayConfig
from lockstep.agent.gateway.exchange import Refusal, TurnReply, TurnRequest
from lockstep.agent.gateway.listener import NOTES, Listener, Site, route_of, section, web
from lockstep.agent.gateway.reading import (
    Answered,
    Asked,
    Value,
    event,
    in_thread,
    parse_body,
    parsed,
)
from lockstep.agent.gateway.registry import SessionRegistry
from lockstep.agent.gateway.session import GatewaySession
from lockstep.launch.background import Background
from lockstep.renderers.base import Renderer
from lockstep.types import Task, Trajectory

LOGGER = logging.getLogger(__name__)

CLAIM_SECONDS, MAX_CLAIM_SECONDS = 30.0, 300.0
MAX_REMEMBERED_BODIES = 65536
"""Latest bodies that a retry can refer to, by their digests: at most 20 MiB."""
COUNTS = ("requests", "refused", "failed", "sampled_tokens", "encoded_tokens")
"""Names of a server's counters. failed: answers of status 500 or above."""


class GatewayServer:
    """Serves `sessions` from `start` to `close`.

    model: name of the model. key: opens every session; "" lets in the users of this machine, and is
    refused for any other address. claims_need_key: False lets these users claim episodes without
    it. store: stores the finished sessions; awaited before a client reads that its session ended.
    listener: shared with other APIs, instead of one of its own by `config`.
    """

    def __init__(
        self,
        sessions: SessionRegistry,
        *,
        renderer: Renderer,
        model: str,
        config: GatewayConfig | None = None,
        key: str = "",
        claims_need_key: bool = True,
        store: Callable[[], Awaitable[None]] | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.sessions, self.model = sessions, model
        self._listener = listener or Listener(config or GatewayConfig())
        self.config = self._listener.config
        self.counts: Counter[str] = Counter()
        """By the names of COUNTS."""
        self.config.check_key(key)
        self._key, self._claims_need_key = key.encode(), claims_need_key
        self._store = store
        self._renderer = renderer
        self._shared: GatewaySession | None = None
        self._turns = Background()
        self._numbers = itertools.count()
        self._errors: deque[str] = deque(maxlen=10)
        self._keys: dict[bytes, str] = {}
        """Digest of a session's body -> the key of the latest first attempt."""
        is_open = not (key and claims_need_key)
        self._listener.add(
            Site(routes=self._routes(), refuse=self._refuse, is_open=is_open, section=self._section)
        )

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listens. Raises ConfigError if the address cannot be taken."""
        await self._listener.start()

    async def close(self) -> None:
        """Stops listening, cancels turns in progress, and finishes the shared session. Other
        sessions stay as they are."""
        self._listener.stop_listening()
        await self._turns.cancel()
        await self._listener.close()
        if self._shared is not None:
            await self._shared.finish()

    @property
    def url(self) -> str:
        """`http://HOST:PORT`, or https, as reached from this machine."""
        return self._listener.url

    def _routes(self) -> list[web.RouteDef]:
        routes = [
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
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

    def _refuse(self, error: Exception, request: web.Request) -> web.Response:
        """Turns an error into a status and a body in the dialect's own shape."""
        refusal = self._refusal_of(error, request)
        is_anthropic = "anthropic-version" in request.headers or "/v1/messages" in request.path
        dialect = messages if is_anthropic else chat
        response = _json(dialect.error(refusal), status=refusal.status)
        if refusal.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if refusal.status in (409, 410, 500):  # the official clients would try these again
            response.headers["x-should-retry"] = "false"
        return response

    def _refusal_of(self, error: Exception, request: web.Request) -> Refusal:
        match error:
            case Refusal():
                refusal = error
            case web.HTTPException():
                text = f"{request.method} {request.path[:120]}: {error.reason}. Ask for turns at "
                text += "/v1/chat/completions, /v1/responses or /v1/messages."
                refusal = Refusal(error.status, "bad_request", text)
            case _:
                text = f"{type(error).__name__} in the gateway; its log has the place."
                refusal = Refusal(500, "internal_error", text)
        self.counts["failed" if refusal.status >= 500 else "refused"] += 1
        NOTES.get()["error"] = refusal.code
        now = time.strftime("%H:%M:%S", time.gmtime())
        self._errors.append(f"{now} UTC  {route_of(request)}: {refusal.status} {refusal.code}")
        if refusal.status == 500:  # a bug here, not a server that is away
            LOGGER.error("%s %s", request.method, request.path, exc_info=error)
        return refusal

    async def _value(self, request: web.Request, *fields: str) -> Value:
        """The body of a request about a session; an empty object without one. fields: all that it
        may have."""
        raw = b""
        if request.can_read_body:
            raw = await self._listener.read(request, content_type="application/json")
        body = Value(await parsed(raw or b"{}"))
        body.check_known(*fields, is_strict=True)
        return body

    # -- the session of a request -----------------------------------------------------------------

    def _session(self, request: web.Request) -> GatewaySession:
        """Returns the session that a request is for. Raises Refusal (401, 403, 404)."""
        named = request.match_info.get("session") or request.headers.get("x-lockstep-session", "")
        if (owner := self._key_owner(request)) is None:
            return self.sessions.get(named) if named else self._shared_session()
        if named and named != owner.id:
            text = f"this key is of another session than {named[:80]!r}."
            raise Refusal(403, "foreign_session", text)
        return owner

    def _key_owner(self, request: web.Request) -> GatewaySession | None:
        """Returns the session of the request's key, or None if all sessions are open: the server's
        key came, or the server has none. Raises Refusal (401)."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            key = request.headers.get("x-api-key", "")
        key = key.strip()
        given = key.encode("utf-8", "surrogateescape")
        if self._key and hmac.compare_digest(given, self._key):
            return None
        owner = self.sessions.of_key(key) if key and key.isascii() else None
        if owner is None and self._key:
            found = "this one is not known" if key else "none came"
            text = f"a key is needed, of a session or of the whole server, and {found}."
            raise Refusal(401, "invalid_api_key", f"{text} Send Authorization: Bearer KEY.")
        return owner

    def _check_master(self, request: web.Request) -> None:
        if self._key_owner(request) is not None:
            text = "a session's key opens that session and nothing else."
            raise Refusal(403, "needs_master_key", text)

    def _shared_session(self) -> GatewaySession:
        """Returns the session for requests that name none."""
        shared, limit = self._shared, self.config.rotate_tokens
        if shared is None or shared.is_finished:
            shared = self._shared = self.sessions.create()
        elif not shared.is_busy and sum(map(len, shared.trajectory.segments)) >= limit:
            self._turns.start(shared.finish())
            shared = self._shared = self.sessions.create()
        return shared

    # -- turns ------------------------------------------------------------------------------------

    async def _asked(
        self, request: web.Request, read: Callable[..., Asked]
    ) -> tuple[GatewaySession, bytes, Asked]:
        """(session, body, the body as `read` reads it). Raises Refusal."""
        session = self._session(request)
        raw = await self._listener.read(request, content_type="application/json")
        if session.is_finished:  # the shared one may have ended meanwhile
            session = self._session(request)
        asked = await in_thread(raw, lambda: read(parse_body(raw), session.dialogues))
        self._check_model(asked.model)
        return session, raw, asked

    def _check_model(self, name: str) -> None:
        names = (self.model, *self.config.names)
        if name not in names and "*" not in names:
            text = f"the model {name[:80]!r} is not served here; expected {self.model!r}. "
            text += "Let other names in with gateway.names."
            raise Refusal(404, "unknown_model", text, parameter="model")

    async def _answer(self, dialect: ModuleType, request: web.Request) -> web.StreamResponse:
        session, raw, asked = await self._asked(request, dialect.read)
        if key := self._turn_key(request, session, raw):
            asked = replace(asked, turn=replace(asked.turn, key=key))
        self.counts["requests"] += 1
        NOTES.get().update(session=session.id, model=asked.model[:80])
        has_ids = request.headers.get("x-lockstep-ids", "").lower() in ("1", "true", "yes")
        work = self._turns.start(self._sample(session, asked, has_ids=has_ids))
        # Retrieves an error, as its client may be gone.
        work.add_done_callback(lambda work: work.cancelled() or work.exception())
        try:
            if asked.is_streamed:
                return await self._stream(request, dialect, session, work)
            found = await asyncio.shield(work)
            _note_tokens(found)
        except (asyncio.CancelledError, ConnectionError):  # the client is gone
            if not key:
                work.cancel()
            work.add_done_callback(partial(_lost, session))
            raise
        body = {**dialect.write(found), **found.extension()}
        return _json(body, headers=_headers(session, found.replies))

    async def _stream(
        self,
        request: web.Request,
        dialect: ModuleType,
        session: GatewaySession,
        work: asyncio.Task[Answered],
    ) -> web.StreamResponse:
        """Sends a stream. It begins when the turn is complete or takes long, so that an early
        refusal has its own status."""
        wait = self.config.keep_alive_seconds
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        await asyncio.wait((work,), timeout=wait)
        known = work.result().replies if work.done() else ()
        response = web.StreamResponse(headers={**headers, **_headers(session, known)})
        await response.prepare(request)
        while not work.done():
            await response.write(dialect.KEEP_ALIVE)
            await asyncio.wait((work,), timeout=wait)
        try:
            found = work.result()
        except Exception as error:
            refusal = dialect.error(self._refusal_of(error, request))
            await response.write(event({"type": "error", **refusal}, "error"))
            return response
        _note_tokens(found)
        await response.write(b"".join(dialect.events(found)))
        await response.write_eof()
        return response

    async def _sample(self, session: GatewaySession, asked: Asked, *, has_ids: bool) -> Answered:
        """Samples the requested turns side by side."""
        turns = [asked.turn]
        if asked.num_choices > 1:
            turns = [_choice(asked.turn, at) for at in range(asked.num_choices)]
        ended = await asyncio.gather(*map(session.reply, turns), return_exceptions=True)
        replies = [reply for reply in ended if isinstance(reply, TurnReply)]
        if errors := [error for error in ended if isinstance(error, BaseException)]:
            for turn, reply in zip(turns, ended, strict=True):
                if isinstance(reply, TurnReply):
                    session.lost(reply.leaf, key=turn.key)
            raise errors[0]
        for reply in replies:
            if not reply.is_repeated:
                self.counts["encoded_tokens"] += len(reply.prompt_ids) - reply.num_reused_tokens
                self.counts["sampled_tokens"] += len(reply.token_ids)
        found = Answered(
            asked=asked,
            replies=replies,
            id=secrets.token_hex(12),
            created=int(time.time()),
            session_id=session.id,
            renderer=self._renderer,
            has_ids=has_ids,
        )
        if asked.is_stored:
            last = replace(replies[0].message, parse_error="")
            dialogue = [*asked.turn.messages[asked.num_instructions :], last]
            session.dialogues[responses.response_id(found)] = dialogue
        return found

    def _turn_key(self, request: web.Request, session: GatewaySession, raw: bytes) -> str:
        """Returns the key that two attempts of one request share, or "".

        The official clients count their attempts: a later one has the key of the latest first
        attempt with the same body.
        """
        attempt = request.headers.get("x-stainless-retry-count", "")
        if not attempt:
            return ""
        sent = f"{session.id} {request.path}\n".encode() + raw
        digest, keys = hashlib.blake2b(sent, digest_size=16).digest(), self._keys
        known = keys.get(digest)
        if known is None or not attempt.strip("0"):
            keys.pop(digest, None)
            known = keys[digest] = f"{digest.hex()}/{next(self._numbers)}"
            if len(keys) > MAX_REMEMBERED_BODIES:
                del keys[next(iter(keys))]
        return known

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session, _, asked = await self._asked(request, partial(messages.read, is_counted=True))
        return _json({"input_tokens": await session.count_tokens(asked.turn)})

    async def _models(self, request: web.Request) -> web.Response:
        """All names, or the one of the path."""
        self._key_owner(request)
        names = dict.fromkeys([self.model, *(name for name in self.config.names if name != "*")])
        about = {"object": "model", "type": "model", "owned_by": "lockstep", "created": 0}
        about["created_at"] = "1970-01-01T00:00:00Z"
        if name := request.match_info.get("model"):
            self._check_model(name)
            return _json({"id": name, "display_name": name, **about})
        listed = [{"id": name, "display_name": name, **about} for name in names]
        ends = {"first_id": self.model, "last_id": [*names][-1], "has_more": False}
        return _json({"object": "list", "data": listed, **ends})

    # -- sessions ---------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok", "model": self.model})

    async def _metrics(self, request: web.Request) -> web.Response:
        """The counts in Prometheus' text format."""
        self._check_master(request)
        full = "lockstep_gateway_sessions"
        text = f"# TYPE {full} gauge\n{full} {len(self.sessions.all())}\n"
        for name in COUNTS:
            full = f"lockstep_gateway_{name}_total"
            text += f"# TYPE {full} counter\n{full} {self.counts[name]}\n"
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4"})

    def _section(self) -> str:
        return section(
            self.model,
            addresses={
                "OpenAI's clients, base_url": f"{self.url}/v1",
                "Anthropic's clients, base_url": self.url,
                "model": self.model,
                "api_key": "the server's key" if self._key else "any; the server has none",
            },
            counts={"sessions": len(self.sessions.all())}
            | {name.replace("_", " "): self.counts[name] for name in COUNTS},
            errors=reversed(self._errors),
        )

    async def _create(self, request: web.Request) -> web.Response:
        self._check_master(request)
        given, task = (await self._value(request, "task"))["task"], None
        if given.raw is not None:
            given.check_known("id", "payload", is_strict=True)
            task = Task(id=given["id"].text(), payload=given["payload"].object())
        return _json(self._access(self.sessions.create(task=task)), status=201)

    def _access(self, session: GatewaySession) -> dict[str, Any]:
        """Describes a session to its agent."""
        base_url = f"{self.url}/s/{session.id}"
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
        if session is self._shared:
            self._shared = None
        return _json({"id": session.id, "deleted": True})

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await self._value(request, "reward", "parts", "leaf")
        parts = body["parts"]
        await session.set_reward(
            body["reward"].finite(),
            parts={name: parts[name].finite() for name in parts.object()},
            leaf=body["leaf"].integer(0),
        )
        return _json(_summary(session))

    async def _finish(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await self._value(request, "error")
        await session.finish(error=body["error"].text(""))
        if self._store is not None:
            await self._store()
        return _json(_summary(session))

    async def _trajectory(self, request: web.Request) -> web.Response:
        return _json(_trajectory_to_dict(self._session(request).trajectory))

    async def _claim(self, request: web.Request) -> web.Response:
        if self._claims_need_key:
            self._check_master(request)
        body = await self._value(request, "wait_seconds")
        seconds = body["wait_seconds"].number(0, MAX_CLAIM_SECONDS)
        try:
            async with asyncio.timeout(CLAIM_SECONDS if seconds is None else seconds):
                session, task = await self.sessions.claim()
        except TimeoutError:
            return web.Response(status=204)  # nothing yet: ask again
        about = {"id": task.id, "payload": dict(task.payload), "source": task.source}
        return _json({**self._access(session), "task": about})


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


def _note_tokens(found: Answered) -> None:
    NOTES.get().update(
        tokens_in=len(found.replies[0].prompt_ids),
        tokens_out=sum(len(reply.token_ids) for reply in found.replies),
    )


def _headers(session: GatewaySession, replies: Sequence[TurnReply]) -> dict[str, str]:
    found = {"x-lockstep-session": session.id}
    if replies:
        found["x-lockstep-leaf"] = ",".join(str(reply.leaf) for reply in replies)
    return found


def _lost(session: GatewaySession, work: asyncio.Task[Answered]) -> None:
    """The turns were sampled, and their client is gone."""
    if not work.cancelled() and work.exception() is None:
        for reply in work.result().replies:
            session.lost(reply.leaf)


def _choice(turn: TurnRequest, at: int) -> TurnRequest:
    """One of several replies to the same request: another draw, another key."""
    seed = None if turn.seed is None else (turn.seed + at + 2**63) % 2**64 - 2**63
    return replace(turn, seed=seed, key=turn.key and f"{turn.key}/{at}")


def _summary(session: GatewaySession) -> dict[str, Any]:
    trajectory, names = session.trajectory, ("status", "num_turns", "num_sampled_tokens", "error")
    return {
        "id": session.id,
        **{name: getattr(trajectory, name) for name in names},
        "is_finished": session.is_finished,
        "task": trajectory.task_id,
        "num_tokens": sum(map(len, trajectory.segments)),
        "leaves": trajectory.leaves(),
        "rewards": {str(leaf): reward for leaf, reward in session.rewards.items()},
    }


def _trajectory_to_dict(trajectory: Trajectory) -> dict[str, Any]:
    """JSON-able: every segment with its ids, log-probs and messages. Numbers are finite."""
    names = ("id", "task_id", "status", "error", "reward_parts", "metrics")
    of_segment = ("parent", "turn", "is_sampled", "reason", "policy_version", "finish_reason")
    return {
        **{name: getattr(trajectory, name) for name in names},
        "rewards": {str(leaf): reward for leaf, reward in trajectory.rewards.items()},
        "segments": [
            {
                **{name: getattr(segment, name) for name in (*of_segment, "stop")},
                "token_ids": segment.token_ids.tolist(),
                "logprobs": None if segment.logprobs is None else segment.logprobs.tolist(),
                "messages": [message.to_dict() for message in segment.messages],
            }
            for segment in trajectory.segments
        ],
    }
