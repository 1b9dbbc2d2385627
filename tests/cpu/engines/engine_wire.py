"""A wire without a server: the embedded engine answers as servers do, for tests of what is made of
answers. Faults are put in by `change`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from lockstep.engines.served import AnswerChunk, Wire
from lockstep.types import Delta


class EngineWire(Wire):
    """`Wire` over an engine in this process. streams: whether each token comes by itself. change:
    what becomes of each chunk on its way."""

    def __init__(self, engine, *, streams=False, change=lambda chunk: chunk, **claims):
        self.engine, self.streams, self.change = engine, streams, change
        self.claims = claims
        self.calls = []
        self.running = {}
        self.told = []
        self.is_paused = False
        self.fails_load = False

    @property
    def capabilities(self):
        found = self.engine.capabilities
        sources = tuple(s for s in found.weight_sources if s != "shared")
        claims = {
            "name": "wire",
            "has_stop_strings": False,
            "has_positional_draws": False,
            "scored_distributions": ("model",),
            "weight_sources": sources,
        }
        return replace(found, **(claims | self.claims))

    async def generate(self, request):
        self.calls.append(request)
        self.running[request.id] = request
        try:
            held = []
            streams = request.stream or self.streams
            asked = replace(request, stream=streams)
            async for delta in self.engine.generate(asked):
                held.append(delta)
                if delta.finish_reason is not None or streams:
                    yield self.change(as_chunk(request, held))
                    held = []
        finally:
            del self.running[request.id]

    async def score(self, request, *, first):
        ids, wanted = request.prompt_ids, slice(first, None)
        found = await self.engine.score(ids, first=first, adapter=request.adapter)
        return AnswerChunk(token_ids=ids[wanted], logprobs=found.logprobs[wanted], prompt_ids=ids)

    async def abort(self, call_id):
        self.told.append(f"abort {call_id}")
        await self.engine.abort(call_id)

    async def pause(self):
        self.told.append("pause")
        for call_id in list(self.running):
            await self.engine.abort(call_id)
        await self.engine.pause()

    async def resume(self, *, drop_cache):
        self.told.append(f"resume drop_cache={drop_cache}")
        await self.engine.resume(kv="drop" if drop_cache else "keep")

    async def load_adapter(self, name, directory):
        self.told.append(f"load {name}")
        await self.engine.load_adapter(name, str(directory), version=0)

    async def drop_adapter(self, name):
        self.told.append(f"drop {name}")
        await self.engine.drop_adapter(name)

    async def load_weights(self, source, *, version):
        if self.fails_load:
            raise OSError("disk full")
        await self.engine.load_weights(source, version=version)

    async def ping(self):
        self.told.append("ping")

    async def sleep(self):
        await self.engine.sleep()

    async def wake(self):
        await self.engine.wake()

    async def close(self):
        await self.engine.close()


def as_chunk(request, deltas: list[Delta]) -> AnswerChunk:
    last = deltas[-1]
    routes = [d.routed_experts for d in deltas if d.routed_experts is not None]
    return AnswerChunk(
        token_ids=np.concatenate([d.token_ids for d in deltas]).tolist(),
        logprobs=np.concatenate([d.logprobs for d in deltas]).tolist(),
        finish_reason=last.finish_reason,
        stop=last.stop,
        prompt_ids=request.prompt_ids.tolist(),
        num_cached_tokens=sum(d.num_cached_tokens for d in deltas),
        routed_experts=np.concatenate(routes) if routes else None,
        support=(
            None
            if last.support is None
            else [list(ids) for d in deltas if d.support is not None for ids in d.support]
        ),
    )


async def until(claim, *, seconds=10.0):
    """Lets everything else run until `claim()` holds."""
    async with asyncio.timeout(seconds):
        while not claim():
            await asyncio.sleep(0.001)
