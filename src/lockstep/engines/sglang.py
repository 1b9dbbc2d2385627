"""SGLang's wire format: /generate, and the routes that change weights.

Written from the source of SGLang 0.5.23, whose request and response types are recorded in
tests/cpu/engines/recorded; no server has run it yet.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.engines.base import Capabilities, EngineContext
from lockstep.engines.config import SGLangConfig
from lockstep.engines.http_wire import HttpWire
from lockstep.engines.served import AnswerChunk, ServedEngine
from lockstep.errors import CapabilityError, EngineError, ServerRefusedError
from lockstep.types import Distribution, Request, Routes

CHECKED_VERSION = "0.5.23"
"""Version of SGLang that this follows."""

FLUSH_SECONDS = 60.0
"""Limit of the server's wait until no request holds a cached prefix."""

NUM_TOKENS = 12
"""Tokens of the test reply that shows the recorded distribution. In a reply of this length the
model is unsure of some token."""

LEAST_DOUBT = 1e-3
"""A log-prob at least this many nats below 0 shows its distribution."""


def _entries(about: Mapping[str, Any], name: str) -> tuple[list[int], list[float]]:
    """(ids, log-probs) of the entries [log-prob, id, text]; NaN where there is no log-prob."""
    rows = about.get(name) or []
    values = [float("nan") if row[0] is None else float(row[0]) for row in rows]
    return [int(row[1]) for row in rows], values


class SGLangWire(HttpWire):
    """`Wire` to one SGLang server."""

    name = "sglang"
    how_started = "python -m sglang.launch_server --model-path MODEL --skip-tokenizer-init"
    ping_path = "/model_info"
    adapter_routes = ("/load_lora_adapter", "/unload_lora_adapter")
    label_options: ClassVar[Mapping[str, Any]] = {"abort_all_requests": False}

    def __init__(self, config: SGLangConfig, context: EngineContext) -> None:
        """Finds out about the running server. Raises CapabilityError, with the reason, if it
        cannot be used."""
        super().__init__(config, context)
        client = self._client
        info = client.call_now("/server_info")
        is_deterministic = bool(info.get("enable_deterministic_inference"))
        if config.deterministic and not is_deterministic:
            raise CapabilityError(
                f"engine sglang at {client.url} was started without "
                "--enable-deterministic-inference, and engine.deterministic=true wants it. Start "
                "it with the flag, or leave the setting."
            )
        found = client.call_now("/model_info")
        self.check_model(found, ("model_type", "architectures"))
        self._model = getattr(context.model, "config", None)
        is_moe = bool(getattr(self._model, "is_moe", False))  # transformers' models have their own
        self._sends_increments = bool(info.get("incremental_streaming_output"))
        """An event of a stream has the tokens since the last one, and not all tokens."""
        self._priority_sign = 0
        """1: lower priorities run first; -1: higher ones; 0: it has no priorities."""
        if info.get("enable_priority_scheduling"):
            self._priority_sign = 1 if info.get("schedule_low_priority_values_first") else -1
        has_adapters = bool(info.get("enable_lora"))
        self.capabilities = Capabilities(
            name="sglang",
            vocab_size=context.vocab_size,
            max_tokens=int(info["max_req_input_len"]),
            distributions=(self._recorded_distribution(),),
            has_seeds=is_deterministic,
            has_positional_draws=is_deterministic,
            has_prefix_cache=not info.get("disable_radix_cache"),
            has_routed_experts=bool(info.get("enable_return_routed_experts") and is_moe),
            has_adapters=has_adapters,
            has_score=True,
            scored_distributions=("model",),  # a prompt's log-probs ignore the temperature
            has_sleep=bool(info.get("enable_memory_saver")),
            weight_sources=("directory", "adapter") if has_adapters else ("directory",),
        )

    def _recorded_distribution(self) -> Distribution:
        """The distribution of the server's recorded log-probs.

        With top_k=1 two replies, at temperature 1 and 0.5, must choose the greedy ids; raises
        CapabilityError if they do not. Log-probs after top_k are 0; log-probs after temperature
        differ between the two; the model's do not.
        """
        prompt_ids = np.linspace(0, self._context.vocab_size - 1, 8).astype(int).tolist()

        def sample(**sampling: float) -> tuple[list[int], list[float]]:
            settings = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
            body = {"input_ids": prompt_ids, "sampling_params": settings, "return_logprob": True}
            about = self._client.call_now("/generate", body)["meta_info"]
            return _entries(about, "output_token_logprobs")

        greedy_ids, _ = sample(temperature=0.0)
        plain_ids, plain = sample(temperature=1.0, top_k=1)
        cool_ids, cool = sample(temperature=0.5, top_k=1)
        if not greedy_ids == plain_ids == cool_ids:
            raise CapabilityError(
                f"engine sglang at {self.url} does not choose the likeliest token with top_k=1, "
                "so the kind of its log-probs is unknown. A custom sampler or logits processor?"
            )
        at_1, at_half = np.array(plain), np.array(cool)
        if max(np.abs(at_1).max(), np.abs(at_half).max()) < LEAST_DOUBT:
            return "sampled"
        doubted = np.abs(at_1) > LEAST_DOUBT
        gaps = np.abs(at_1 - at_half)[doubted]
        return "model" if gaps.mean() < 0.1 * np.abs(at_1[doubted]).mean() else "tempered"

    # -- calls --------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncIterator[AnswerChunk]:
        body = self._generate_body(request)
        if not request.stream:
            yield self._chunk(await self._client.post("/generate", body), request, 0)
            return
        num_before = 0
        async for event in self._client.stream("/generate", body | {"stream": True}):
            chunk = self._chunk(event, request, num_before)
            if not self._sends_increments:
                num_before += len(chunk.token_ids)
            yield chunk

    def _generate_body(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        settings: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.is_truncated else 1.0,
            "top_k": sampling.top_k if sampling.is_truncated and sampling.top_k else -1,
            # ignore_eos would ignore the stop ids as well. Without it the server also ends at ids
            # of its own, and the reply continues in another call.
            "ignore_eos": not sampling.stop_ids,
            "stop_token_ids": list(sampling.stop_ids),
            "no_stop_trim": True,
        }
        if self.capabilities.has_seeds:
            settings["sampling_seed"] = request.seed
        body = self._body(request, settings)
        if sampling.record_routes:
            body["return_routed_experts"] = True
            body["routed_experts_start_len"] = request.routes_from
        return body

    def _body(self, request: Request, settings: dict[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "rid": f"{request.id}.",  # an abort ends every request whose id begins with its own
            "input_ids": request.prompt_ids.tolist(),
            "sampling_params": settings,
            "return_logprob": True,
            "return_prompt_token_ids": True,
        }
        if self._priority_sign:
            body["priority"] = self._priority_sign * request.priority
        if request.adapter:
            body["lora_path"] = request.adapter
        return body

    def _chunk(self, answer: Any, request: Request, num_before: int) -> AnswerChunk:
        """num_before: tokens of the answer that came with earlier events."""
        about = answer["meta_info"]
        ids, logprobs = answer["output_ids"], _entries(about, "output_token_logprobs")
        self.check_scored(logprobs[0], list(ids))
        reason = about["finish_reason"] or {}
        kind = reason.get("type")
        if kind == "abort" and reason.get("status_code"):
            raise ServerRefusedError(
                f"{self.url} refused a request: {reason.get('message')}",
                status=int(reason["status_code"]),
            )
        routes = None
        if request.sampling.record_routes and about.get("routed_experts") is not None:
            routes = self._routes(about["routed_experts"])
        return AnswerChunk(
            token_ids=ids[num_before:],
            logprobs=logprobs[1][num_before:],
            finish_reason=kind,
            stop=reason.get("matched"),
            prompt_ids=answer.get("prompt_token_ids"),
            num_cached_tokens=int(about.get("cached_tokens") or 0),
            routed_experts=routes,
            labels=self.labels_of(about) or (about["weight_version"],),
        )

    def _routes(self, text: str) -> Routes:
        """[T, layers that route, active]: SGLang sends every layer, as int32 in base64."""
        flat, model = np.frombuffer(base64.b64decode(text), np.int32), self._model
        assert model is not None, "routes are asked for only of a known model"
        if flat.size % (model.num_layers * model.num_active_experts):
            raise EngineError(
                f"{self.url}: {flat.size} routes, which are no rows of {model.num_layers} layers "
                f"and {model.num_active_experts} experts: another model?"
            )
        rows = flat.reshape(-1, model.num_layers, model.num_active_experts)
        return rows[:, list(model.routed_layers)].astype(np.int16)

    async def score(self, request: Request, *, first: int) -> AnswerChunk:
        body = self._body(request, {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True})
        # The first entry belongs to the id at this index and has no log-prob.
        body["logprob_start_len"] = first - 1
        answer = await self._client.post("/generate", body)
        return replace(
            self._chunk(answer, request, 0),
            token_ids=request.prompt_ids[first:].tolist(),
            logprobs=_entries(answer["meta_info"], "input_token_logprobs")[1][1:],
        )

    async def abort(self, call_id: str) -> None:
        await self._client.post("/abort_request", {"rid": f"{call_id}."})

    # -- weights ------------------------------------------------------------------------------

    async def pause(self) -> None:
        await self._client.post("/abort_request", {"abort_all": True})
        await self._client.post("/pause_generation", {"mode": "abort"})

    async def resume(self, *, drop_cache: bool) -> None:
        if drop_cache:
            await self._client.post(f"/flush_cache?timeout={FLUSH_SECONDS:g}", is_json=False)
        await self._client.post("/continue_generation", {})

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        """source: a directory of a checkpoint that the server can read."""
        body = {"model_path": str(Path(str(source)).absolute()), "flush_cache": True}
        await self._client.post("/update_weights_from_disk", body)

    async def read_label(self) -> str:
        """The label, which SGLang calls the version of its weights."""
        return str((await self._client.get("/model_info")).get("weight_version"))

    async def sleep(self) -> None:
        await self._client.post("/release_memory_occupation", {"tags": ["kv_cache"]})

    async def wake(self) -> None:
        await self._client.post("/resume_memory_occupation", {"tags": ["kv_cache"]})


def sglang_engine(config: SGLangConfig, context: EngineContext) -> ServedEngine:
    """The engine of engine=sglang. Returns when the server answers."""
    wire = SGLangWire(config, context)
    return ServedEngine(wire, lease=wire.lease())
