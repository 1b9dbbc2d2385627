"""SGLang's server over the embedded engine, with the names that SGLang has and no others.

The names are those of recorded/sglang-0.5.23.json (record_sglang.py reads them from the package);
where SGLang itself is installed, test_sglang_engine.py holds them against its types.
"""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import numpy as np
from aiohttp import web
from engine_models import make_model
from fake_servers import JSON, FakeServer, events

from lockstep.types import Request, SamplingParams

RECORDED = json.loads((Path(__file__).parent / "recorded" / "sglang-0.5.23.json").read_text())


def known(type_name, body):
    """`body`, if the type has all of its fields: an assertion fails the request with status 500."""
    unknown = set(body) - set(RECORDED["types"][type_name])
    assert not unknown, f"SGLang's {type_name} has no {sorted(unknown)}"
    return body


class FakeSGLang(FakeServer):
    """settings of `flags` are the server's arguments; eos_ids: where its model's config ends.
    distribution: whose log-probs it records."""

    def __init__(
        self,
        model=None,
        *,
        flags=(),
        eos_ids=(),
        distribution="tempered",
        honours_top_k=True,
        **settings,
    ):
        super().__init__(model or make_model(), **settings)
        self.flags, self.eos_ids = set(flags), tuple(eos_ids)
        self.distribution, self.honours_top_k = distribution, honours_top_k
        self.label = "default"
        self.version = 0
        self.running = set()
        self.adapters, self.sampled_adapters = {}, set()
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.num_seeds = 0

    def routes(self):
        handlers = {
            "/generate": self.generate, "/abort_request": self.abort,
            "/pause_generation": self.pause, "/continue_generation": self.go_on,
            "/update_weights_from_disk": self.update, "/update_weight_version": self.set_label,
            "/release_memory_occupation": self.release, "/resume_memory_occupation": self.resume,
            "/load_lora_adapter": self.load_adapter, "/unload_lora_adapter": self.unload_adapter,
            "/flush_cache": self.flush,
        }  # fmt: skip
        reads = {
            "/health": self.health,
            "/model_info": self.model_info,
            "/server_info": self.server_info,
        }
        assert {*handlers, *reads} <= set(RECORDED["routes"])
        return [
            *(web.post(path, handler) for path, handler in handlers.items()),
            *(web.get(path, handler) for path, handler in reads.items()),
        ]

    async def health(self, http):
        return web.Response()

    async def model_info(self, http):
        found = {"model_path": "m", "weight_version": self.label, "model_type": "qwen3"}
        assert set(found) <= set(RECORDED["model_info"])
        return web.json_response(found)

    async def server_info(self, http):
        flags = (
            "enable_deterministic_inference", "enable_return_routed_experts", "enable_lora",
            "enable_memory_saver", "incremental_streaming_output", "disable_radix_cache",
        )  # fmt: skip
        found = {name: name in self.flags for name in flags}
        found |= {"max_req_input_len": self.engine.max_tokens, "version": "0.5.23", "tp_size": 1}
        assert set(found) <= set(RECORDED["server_info"])
        return web.json_response(found)

    async def generate(self, http):
        body = known("GenerateReqInput", http[JSON])
        asked = known("SamplingParams", body["sampling_params"])
        await self.may_run.wait()
        if "lora_path" in body and body["lora_path"] not in self.adapters:
            return web.json_response({"error": {"message": "unknown adapter"}}, status=400)
        request = self.request_of(body, asked)
        self.running.add(request.id)
        try:
            if body.get("stream"):
                return await events(http, self.parts(body, asked, request))
            deltas = [d async for d in self.engine.generate(request)]
            return web.json_response(await self.answer(body, asked, request, deltas[-1:]))
        finally:
            self.running.discard(request.id)

    def request_of(self, body, asked):
        greedy = asked["temperature"] == 0
        ends = () if asked.get("ignore_eos") else (*asked.get("stop_token_ids", ()), *self.eos_ids)
        self.num_seeds += 1
        seed = self.num_seeds
        if "enable_deterministic_inference" in self.flags:
            seed = asked.get("sampling_seed", 42)
        top_k = asked.get("top_k", -1) if self.honours_top_k else -1
        return Request(
            id=body.get("rid") or f"rid-{self.num_seeds}",
            prompt_ids=np.array(body["input_ids"], np.int32),
            sampling=SamplingParams(
                max_tokens=asked["max_new_tokens"], temperature=asked["temperature"],
                top_p=1.0 if greedy else asked.get("top_p", 1.0),
                top_k=0 if greedy or top_k == -1 else top_k,
                stop_ids=ends, distribution=self.distribution,
                record_routes=bool(body.get("return_routed_experts")),
            ),
            seed=seed, stream=bool(body.get("stream")),
            routes_from=body.get("routed_experts_start_len", 0),
            adapter=name if (name := body.get("lora_path", "")) in self.sampled_adapters else "",
        )  # fmt: skip

    async def answer(self, body, asked, request, deltas):
        """deltas: all since the last answer."""
        last = deltas[-1]
        ids = [int(i) for d in deltas for i in d.token_ids]
        values = [float(v) for d in deltas for v in d.logprobs]
        reason = {
            None: None, "length": {"type": "length", "length": len(ids)},
            "stop": {"type": "stop", "matched": last.stop},
            "abort": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
        }[last.finish_reason]  # fmt: skip
        if last.finish_reason == "stop" and not asked.get("no_stop_trim"):
            ids = ids[:-1]
        about = {
            "id": request.id,
            "finish_reason": reason,
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": len(ids),
            "cached_tokens": sum(d.num_cached_tokens for d in deltas),
            "weight_version": self.label,
            "weight_versions": [{"version": self.label, "start": 0, "end": len(ids)}],
        }
        if body.get("return_logprob"):
            rows = zip(values, ids, strict=False)  # a stop id that is trimmed keeps its log-prob
            about["output_token_logprobs"] = [[value, token_id, None] for value, token_id in rows]
            start = body.get("logprob_start_len", -1)
            if start >= 0:
                scores = await self.engine.score(request.prompt_ids, adapter=request.adapter)
                found = scores.logprobs[start:]
                scored = zip(found.tolist(), request.prompt_ids[start:].tolist(), strict=True)
                rows = [[value, token_id, None] for value, token_id in scored]
                about["input_token_logprobs"] = [[None, *rows[0][1:]], *rows[1:]]
        if last.finish_reason and body.get("return_routed_experts"):
            routes = [d.routed_experts for d in deltas if d.routed_experts is not None]
            whole = np.concatenate(routes).astype(np.int32)
            about["routed_experts"] = base64.b64encode(whole.tobytes()).decode()
        assert set(about) <= set(RECORDED["meta_info"])
        found = {"text": "", "output_ids": ids, "meta_info": about}
        if body.get("return_prompt_token_ids"):
            found["prompt_token_ids"] = body["input_ids"]
        return known("GenerateResponse", found)

    async def parts(self, body, asked, request):
        deltas = []
        async for delta in self.engine.generate(request):
            deltas.append(delta)
            yield await self.answer(body, asked, request, deltas)
            if "incremental_streaming_output" in self.flags:
                deltas = []

    async def abort(self, http):
        body = known("AbortReq", http[JSON])
        await self.abort_all(body.get("rid") or "", body.get("abort_all"))
        return web.Response()

    async def abort_all(self, start, is_all=True):
        if is_all or start in self.running:
            for name in [n for n in self.running if n.startswith(start) or is_all]:
                await self.engine.abort(name)

    async def pause(self, http):
        assert known("PauseGenerationReqInput", http[JSON]) == {"mode": "abort"}
        self.may_run.clear()
        while self.running:
            await self.abort_all("")
            await asyncio.sleep(0.01)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def go_on(self, http):
        known("ContinueGenerationReqInput", http[JSON])
        self.may_run.set()
        return web.json_response({"message": "Generation continued.", "status": "ok"})

    async def flush(self, http):
        if self.running:
            return web.Response(text="Flush cache failed.", status=400)
        await self.engine.pause()
        await self.engine.resume(kv="drop")
        return web.Response(text="Cache flushed.\nPlease check backend logs.\n")

    async def update(self, http):
        body = known("UpdateWeightFromDiskReqInput", http[JSON])
        found = {"success": True, "message": "Succeeded", "num_paused_requests": 0}
        try:
            self.version += 1
            await self.engine.load_weights(body["model_path"], version=self.version)
            self.label = body.get("weight_version", self.label)
        except Exception as error:
            found |= {"success": False, "message": f"Failed to update: {error}"}
        known("UpdateWeightFromDiskReqOutput", found)
        return web.json_response(found, status=200 if found["success"] else 400)

    async def set_label(self, http):
        self.label = known("UpdateWeightVersionReqInput", http[JSON])["new_version"]
        return web.json_response({"success": True, "message": "", "new_version": self.label})

    async def release(self, http):
        assert known("ReleaseMemoryOccupationReqInput", http[JSON]) == {"tags": ["kv_cache"]}
        await self.engine.sleep()
        return web.json_response(None)

    async def resume(self, http):
        assert known("ResumeMemoryOccupationReqInput", http[JSON]) == {"tags": ["kv_cache"]}
        await self.engine.wake()
        return web.json_response(None)

    async def load_adapter(self, http):
        body = known("LoadLoRAAdapterReqInput", http[JSON])
        name, path = body["lora_name"], body["lora_path"]
        if (Path(path) / "adapter_model.safetensors").is_file():
            await self.engine.load_adapter(name, path, version=0)
            self.sampled_adapters.add(name)
        self.adapters[name] = path
        return web.json_response({"success": True, "loaded_adapters": self.adapters})

    async def unload_adapter(self, http):
        name = known("UnloadLoRAAdapterReqInput", http[JSON])["lora_name"]
        if name in self.sampled_adapters:
            self.sampled_adapters.remove(name)
            await self.engine.drop_adapter(name)
        del self.adapters[name]
        return web.json_response({"success": True, "loaded_adapters": self.adapters})
