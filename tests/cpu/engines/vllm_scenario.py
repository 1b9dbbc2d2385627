"""What is asked of a vLLM server to record its answers, and of the record in place of the server.

`recorded` stands between the two: a proxy that writes down each exchange. `replayed` answers from
what it wrote, in order, and fails for a request that was never sent to a real server.
"""

import asyncio
import json
from contextlib import asynccontextmanager

import numpy as np
from aiohttp import ClientSession, web

from lockstep.engines.config import VllmConfig
from lockstep.engines.http import HttpClient
from lockstep.engines.lease import Lease
from lockstep.engines.served import ServedEngine
from lockstep.engines.vllm.wire import VllmWire
from lockstep.types import Request, SamplingParams

PROMPT = np.array([5, 6, 7, 8], np.int32)
STOP = 543
UNSTABLE = ("request_id", "created", "id")  # another one each time
KEPT = {
    "model_config": (
        "model", "max_model_len", "logprobs_mode", "served_model_name", "enable_sleep_mode",
        "return_sampling_mask", "dtype",
    ),
    "cache_config": ("enable_prefix_caching",),
    "parallel_config": ("worker_extension_cls", "tensor_parallel_size", "data_parallel_size"),
    "scheduler_config": ("policy", "enable_chunked_prefill"),
    "device_config": ("device",),
}  # fmt: skip
"""Of /server_info, which tells everything of the machine as well."""


async def play(url, context, directory):
    """Talks to the server at `url`; returns what an engine makes of its answers, as JSON."""
    client = HttpClient(url, name="vllm")
    wire = await asyncio.to_thread(VllmWire, VllmConfig(), context, client)
    wire.lease = Lease("recorded", server=url, process="1")
    engine = ServedEngine(wire)
    limits = engine.capabilities
    found = {"max_tokens": limits.max_tokens, "vocab_size": limits.vocab_size}

    async def ask(name, **sampling):
        sampling = SamplingParams(**({"max_tokens": 20} | sampling))
        request = Request(id=name, prompt_ids=PROMPT, sampling=sampling, seed=3)
        deltas = [delta async for delta in engine.generate(request)]
        found[name] = {
            "ids": [int(i) for d in deltas for i in d.token_ids],
            "logprobs": [float(v) for d in deltas for v in d.logprobs],
            "versions": [d.policy_version for d in deltas],
            "reason": deltas[-1].finish_reason,
            "stop": deltas[-1].stop,
        }
        return found[name]["ids"]

    ids = await ask("drawn", temperature=0.7)
    await ask("greedy", temperature=0.0)
    await ask("stopped", stop_ids=(STOP,), max_tokens=60)
    scores = await engine.score(np.concatenate([PROMPT, np.array(ids, np.int32)]))
    found["scores"] = [float(v) for v in scores.logprobs[1:]]
    await engine.load_weights(str(directory), version=3)
    await ask("after", temperature=0.7)
    await engine.check_lease()
    await engine.close()
    return found


def _asked(body):
    if isinstance(body, dict):
        body = {k: _asked(v) for k, v in body.items() if k not in UNSTABLE}
    return "DIRECTORY" if isinstance(body, str) and body.startswith("/") else body


def _trimmed(path, text):
    if not path.startswith("/server_info"):
        return text
    config = json.loads(text)["vllm_config"]
    kept = {name: {k: config[name].get(k) for k in keys} for name, keys in KEPT.items()}
    kept["model_config"]["model"] = "DIRECTORY"
    return json.dumps({"vllm_config": kept | {"lora_config": config["lora_config"]}})


@asynccontextmanager
async def _serving(handle):
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def recorded(url, exchanges):
    """The address of a proxy to `url`; every exchange is appended to `exchanges`."""

    async def handle(request):
        sent = await request.read()
        path = str(request.rel_url)
        async with (
            ClientSession() as session,
            session.request(
                request.method, url + path, data=sent, headers={"Content-Type": "application/json"}
            ) as answer,
        ):
            text = await answer.text()
            kind = answer.content_type
            status = answer.status
        body = _asked(json.loads(sent)) if sent else None
        exchanges.append(
            {
                "ask": [request.method, path, body], "status": status, "type": kind,
                "answer": _trimmed(path, text),
            }
        )  # fmt: skip
        return web.Response(text=text, status=status, content_type=kind)

    async with _serving(handle) as address:
        yield address


@asynccontextmanager
async def replayed(exchanges):
    """The address of a server that answers as was recorded, each answer once and in its order."""
    left = list(exchanges)

    async def handle(request):
        sent = await request.read()
        body = _asked(json.loads(sent)) if sent else None
        asked = [request.method, str(request.rel_url), body]
        for entry in left:
            if entry["ask"] == asked:
                left.remove(entry)
                return web.Response(
                    text=entry["answer"], status=entry["status"], content_type=entry["type"]
                )
        return web.Response(text=json.dumps({"error": f"never recorded: {asked}"}), status=501)

    async with _serving(handle) as address:
        yield address
    assert not left, f"recorded, and not asked for: {[entry['ask'] for entry in left]}"
