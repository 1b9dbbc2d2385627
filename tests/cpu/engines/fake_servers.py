"""Servers in this process that really sample: the embedded engine behind the protocol of another.

They answer as the real ones do (docs/engines.md says where that is taken from), on a port of
loopback that the system chooses, from an event loop of their own: clients also block.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
from aiohttp import web
from engine_models import VOCAB, make_engine, make_model
from loopback import LoopbackServer

from lockstep.engines.base import EngineContext
from lockstep.errors import EngineError
from lockstep.types import Request, SamplingParams

JSON = web.RequestKey("json", dict)


def context(model=None, **changes):
    return EngineContext(
        **(
            {
                "model": model, "token_bytes": [b"x"] * VOCAB, "directory": Path("CHECKPOINT"),
                "vocab_size": VOCAB, "max_tokens": 200, "dtype": "float32",
            } | changes
        )
    )  # fmt: skip


class FakeServer(LoopbackServer):
    """A server over an embedded engine, while the `with` lasts. Subclasses add routes."""

    def __init__(self, model=None, **settings):
        self.model = model or make_model()
        self.engine_settings = settings
        self.asked = Counter()
        self.bodies = []
        """Every JSON that came, as (path, body)."""

    def app(self):
        self.engine = make_engine(self.model, **self.engine_settings)
        app = web.Application(middlewares=[self._note], client_max_size=1 << 30)
        app.add_routes(self.routes())
        return app

    @web.middleware
    async def _note(self, request, handler):
        self.asked[request.path] += 1
        try:
            if request.can_read_body:
                body = request[JSON] = await request.json()
                self.bodies.append((request.path, body))
            return await handler(request)
        except EngineError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)

    def routes(self):
        raise NotImplementedError


async def events(request, parts):
    """Server-sent events, as they come."""
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    async for part in parts:
        await answer.write(b"data: " + json.dumps(part).encode() + b"\n\n")
    await answer.write(b"data: [DONE]\n\n")
    await answer.write_eof()
    return answer


class FakeOpenAI(FakeServer):
    """/v1/completions as vLLM 0.32 answers it. returns: "ids", "text".
    distribution: whose log-probs. keeps_stop, honours: see what they break."""

    def __init__(
        self, model=None, *, returns="ids", distribution="model", keeps_stop=True,
        honours=("top_k", "seed", "stop_with_ignore_eos", "prompt_logprobs"), models=("m",),
        changed=lambda choice: choice, **settings,
    ):  # fmt: skip
        super().__init__(model, **settings)
        self.returns, self.distribution, self.keeps_stop = returns, distribution, keeps_stop
        self.honours, self.models, self.changed = set(honours), models, changed
        self.num_asked = 0

    def routes(self):
        return [
            web.get("/v1/models", self.list_models),
            web.post("/v1/completions", self.complete),
        ]

    async def list_models(self, request):
        found = [
            {"id": m, "object": "model", "max_model_len": self.engine.max_tokens}
            for m in self.models
        ]
        return web.json_response({"object": "list", "data": found})

    def request_of(self, body):
        greedy = body["temperature"] == 0
        stop_ids = tuple(body.get("stop_token_ids") or ())
        if body.get("ignore_eos") and "stop_with_ignore_eos" not in self.honours:
            stop_ids = ()
        self.num_asked += 1
        sampling = SamplingParams(
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=1.0 if greedy else body.get("top_p", 1.0),
            top_k=0 if greedy or "top_k" not in self.honours else body.get("top_k", 0),
            stop_ids=stop_ids,
            distribution=self.distribution,
        )
        seed = body.get("seed", self.num_asked) if "seed" in self.honours else self.num_asked
        return Request(
            id=f"cmpl-{self.num_asked}", prompt_ids=np.array(body["prompt"], np.int32),
            sampling=sampling, seed=seed, stream=bool(body.get("stream")),
        )  # fmt: skip

    def choice(self, body, ids, logprobs, reason, stop, *, is_first):
        ids, logprobs = [int(i) for i in ids], [float(v) for v in logprobs]
        if reason == "stop" and not self.keeps_stop:
            ids, logprobs = ids[:-1], logprobs[:-1]
        choice = {
            "index": 0,
            "text": " ".join(f"t{i}" for i in ids),
            "logprobs": {
                "tokens": [f"t{i}" for i in ids],
                "token_logprobs": logprobs,
                "text_offset": [0] * len(ids),
                "top_logprobs": [None] * len(ids),
            },
            "finish_reason": reason,
            "stop_reason": stop,
        }
        if body.get("logprobs") is None:
            choice["logprobs"] = None
        if self.returns == "ids" and body.get("return_token_ids"):
            choice["token_ids"] = ids
            choice["prompt_token_ids"] = body["prompt"] if is_first else None
        return self.changed(choice)

    async def complete(self, http):
        body = http[JSON]
        if body["model"] not in self.models:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        request = self.request_of(body)
        if body.get("stream"):
            return await events(http, self.parts(body, request))
        deltas = [d async for d in self.engine.generate(request)]
        choice = self.choice(
            body, deltas[-1].token_ids, deltas[-1].logprobs, deltas[-1].finish_reason,
            deltas[-1].stop, is_first=True,
        )  # fmt: skip
        if body.get("prompt_logprobs") is not None and "prompt_logprobs" in self.honours:
            choice["prompt_logprobs"] = await self.prompt_logprobs(body["prompt"])
        if body.get("echo") and "echo" in self.honours:
            rows = await self.prompt_logprobs(body["prompt"])
            values = [None] + [next(iter(row.values()))["logprob"] for row in rows[1:]]
            choice["logprobs"]["token_logprobs"][:0] = values
        return web.json_response({"id": request.id, "choices": [choice], "usage": {}})

    async def prompt_logprobs(self, ids):
        found = (await self.engine.score(np.array(ids, np.int32))).logprobs
        rows = [{str(i): {"logprob": float(v)}} for i, v in zip(ids, found, strict=True)]
        return [None, *rows[1:]]

    async def parts(self, body, request):
        is_first = True
        async for delta in self.engine.generate(request):
            yield {
                "id": request.id,
                "choices": [
                    self.choice(
                        body, delta.token_ids, delta.logprobs, delta.finish_reason, delta.stop,
                        is_first=is_first,
                    )
                ],
            }  # fmt: skip
            is_first = False
        yield {"id": request.id, "choices": [], "usage": {"prompt_tokens": len(body["prompt"])}}
