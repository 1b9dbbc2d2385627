"""vLLM's wire format: /inference/v1/generate, and the routes of VLLM_SERVER_DEV_MODE.

/v1/completions takes ids as well and draws the same tokens for a seed, but it writes ids into texts
("token_id:17") and does not say which weights sampled each token.

The label of the run (`engines/lease.py`) is kept as vLLM's weight version, which every reply
carries: a server that was started anew, or that another trainer loads weights into, is found by the
first reply.

Checked against vLLM 0.32 (tests/vllm), and against its recorded answers (tests/cpu/engines).
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from lockstep.engines.base import Capabilities, EngineContext, WeightSource
from lockstep.engines.config import VllmConfig
from lockstep.engines.http import HttpClient
from lockstep.engines.http_wire import HttpWire
from lockstep.engines.served import AnswerChunk, ServedEngine
from lockstep.engines.vllm.plugin import DISTRIBUTION, SCORE_FROM, SEED, SUPPORT, check_attached
from lockstep.engines.vllm.started import WORKER_EXTENSION, VllmServer
from lockstep.engines.weight_link import WeightSender, is_same_host
from lockstep.errors import CapabilityError, EngineDownError, EngineError, ServerRefusedError
from lockstep.models.peft_format import is_adapter
from lockstep.types import Distribution, Request, Routes

CHECKED_VERSION = "0.32"
"""Version of vLLM that this was tested with."""

GENERATE = "/inference/v1/generate"

CHUNK_TOKENS = 16
"""Tokens per server-sent event. Each event is a sign of life, and
its tokens are kept if the server is lost; with fewer tokens the server is busy writing events."""

END_SECONDS = 2.0
"""Time between the first error of a server whose engine has ended, and its own end."""

NO_LOGPROB = -9999.0
"""Value that vLLM writes for a log-prob that is not finite."""

SHAPE_FIELDS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
"""Keys of config.json that are equal if two models can have the same weights."""

MIN_TEMPERATURE = 0.01
"""vLLM draws at this temperature if a lower one is asked for, with at most a warning in its log."""

DISTRIBUTIONS: dict[str, tuple[Distribution, ...]] = {
    "raw_logprobs": ("model",),
    "processed_logprobs": ("sampled",),
    "lockstep": ("model", "tempered", "sampled"),
}
"""--logprobs-mode, or Lockstep's decoder -> distributions that are recorded."""


def score_settings(first: int) -> dict[str, Any]:
    """vLLM's sampling parameters for the log-probs of a prompt from id `first` on."""
    return {
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
        "detokenize": False,
        "ignore_eos": True,
        "extra_args": {SCORE_FROM: first},
    }


def sampling_settings(request: Request, *, is_ours: bool) -> dict[str, Any]:
    """The sampling parameters of a request by vLLM's names. is_ours: for Lockstep's decoder. Raises
    CapabilityError for a temperature so low that vLLM would not draw."""
    sampling = request.sampling
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise CapabilityError(
            f"temperature={sampling.temperature:g}: vLLM would draw at {MIN_TEMPERATURE:g}. Choose "
            "0, which is greedy, or more."
        )
    settings: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # it ends at the ids of the request, and at no other
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }
    if is_ours:
        settings["extra_args"] = {
            SEED: request.seed,
            DISTRIBUTION: sampling.distribution,
            SUPPORT: sampling.record_support and sampling.is_truncated,
        }
    elif sampling.temperature > 0:
        settings["seed"] = request.seed
    if sampling.record_routes:
        settings["routed_experts_prompt_start"] = request.routes_from
    return settings


def _answer_of(
    client: HttpClient, path: str, needed: str, *, body: Mapping[str, Any] | None = None
) -> Any:
    """The answer of a route. needed: how a server that has the route is started."""
    try:
        return client.call_now(path, body)
    except ServerRefusedError as error:
        if error.status != 404:
            raise
        raise CapabilityError(
            f"{client.url} has no {path.partition('?')[0]}: a vLLM older than {CHECKED_VERSION}, "
            f"or started without {needed}. The documentation (Engines) has the whole command."
        ) from None


def _settings(client: HttpClient) -> dict[str, Any]:
    """The settings that a server was started with. Raises CapabilityError unless a run can sample
    from it and change its weights."""
    _answer_of(client, "/version", "vLLM")
    info = _answer_of(
        client, "/server_info?config_format=json", "VLLM_SERVER_DEV_MODE=1 in its environment"
    )
    settings = info["vllm_config"]
    mode = settings["model_config"]["logprobs_mode"]
    if mode not in DISTRIBUTIONS:
        raise CapabilityError(
            f"{client.url} was started with --logprobs-mode={mode}: it sends "
            "no log-probs. Start it with --logprobs-mode=processed_logprobs."
        )
    if settings["parallel_config"].get("worker_extension_cls") != WORKER_EXTENSION:
        raise CapabilityError(
            f"{client.url} cannot take new weights: vLLM's own reload leaves some models with "
            f"wrong ones. Start it with --worker-extension-cls={WORKER_EXTENSION} and this "
            "package on its PYTHONPATH, or leave engine.urls out: the run starts a server."
        )
    return settings


def _counts_cached(client: HttpClient) -> bool:
    """True if replies count the prompt tokens found in the cache. Raises CapabilityError if the
    server has no route that takes ids."""
    asked = {"max_tokens": 1, "detokenize": False, "ignore_eos": True}
    body = {"token_ids": [0], "return_token_ids": True, "sampling_params": asked}
    usage = _answer_of(client, GENERATE, "--enable-scale-out", body=body).get("usage") or {}
    return usage.get("prompt_tokens_details") is not None


class VllmWire(HttpWire):
    """`Wire` to one vLLM server. server: the process, if the run has started it."""

    name = "vllm"
    how_started = (
        "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --skip-tokenizer-init --enable-scale-out "
        "--enable-prompt-tokens-details --logprobs-mode=processed_logprobs "
        "--generation-config=vllm --scheduling-policy=priority"
    )
    adapter_routes = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")

    def __init__(
        self,
        config: VllmConfig,
        context: EngineContext,
        client: HttpClient | None = None,
        *,
        server: VllmServer | None = None,
    ) -> None:
        """Finds out about the running server. Raises CapabilityError, with the command that would
        help, if it lacks what a run needs or serves another model."""
        super().__init__(config, context, client)
        self.server, self._is_delta, client = server, config.delta_sync, self._client
        self._link: WeightSender | None = None
        settings = _settings(client)
        model = settings["model_config"]
        rpc = {"method": "lockstep_facts", "kwargs": {}}
        workers = client.call_now("/collective_rpc", rpc)["results"]
        found, self._num_workers = workers[0], len(workers)
        shape, self._why_not_in_place = found["config"], found["why_not_in_place"]
        self._is_ours = bool(found.get("fingerprint"))
        if server is None:
            check_attached(config.decoder, found, url=client.url)
        self.check_model(shape, SHAPE_FIELDS)
        has_adapters = settings.get("lora_config") is not None
        if self._why_not_in_place and not has_adapters and server is None:
            raise CapabilityError(
                f"{client.url} cannot take new weights: {self._why_not_in_place}. Leave "
                "engine.urls out: a server that the run starts is started again instead."
            )
        served = model["served_model_name"]
        self._model = str((served[0] if isinstance(served, list) else served) or model["model"])
        self._has_priorities = settings["scheduler_config"]["policy"] == "priority"
        is_fixed, parallel = bool(self._why_not_in_place), settings["parallel_config"]
        offered: dict[WeightSource, bool] = {
            "tensors": not is_fixed and parallel["data_parallel_size"] == 1,
            "directory": not is_fixed or server is not None,
            "adapter": has_adapters or self._is_ours,
        }
        is_caching = bool(settings["cache_config"]["enable_prefix_caching"])
        recorded = DISTRIBUTIONS["lockstep" if self._is_ours else model["logprobs_mode"]]
        self.capabilities = Capabilities(
            name="vllm",
            vocab_size=int(shape["vocab_size"]),
            max_tokens=int(model["max_model_len"]),
            distributions=recorded,
            has_prefix_cache=_counts_cached(client) and is_caching,
            has_seeds=True,
            has_score=True,
            # Whatever the mode: no sampling step touches a prompt's log-probs.
            scored_distributions=("model",),
            has_routed_experts=bool(model.get("enable_return_routed_experts")),
            has_support=self._is_ours or bool(model.get("return_sampling_mask")),
            has_adapters=has_adapters,
            has_sleep=bool(model.get("enable_sleep_mode")),
            has_restart=server is not None,
            has_positional_draws=self._is_ours,
            weight_sources=tuple(source for source, is_taken in offered.items() if is_taken),
            fingerprint=found.get("fingerprint", ""),
        )

    # -- calls --------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncIterator[AnswerChunk]:
        settings = sampling_settings(request, is_ours=self._is_ours)
        body = self._body(request, settings)
        if request.sampling.record_routes:
            answer = await self._client.post(GENERATE, body)
            yield self._chunk(answer, answer["choices"][0], has_ended=True)
            return
        settings["stream_interval"] = CHUNK_TOKENS
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        last: tuple[Any, Any] | None = None
        async for event in self._events(body):
            if not event["choices"]:  # the last event, with the counts
                if last is None:
                    break
                yield self._chunk(last[0] | {"usage": event["usage"]}, last[1], has_ended=True)
                return
            choice = event["choices"][0]
            if choice["finish_reason"] is None:
                yield self._chunk(event, choice, has_ended=False)
            else:
                last = event, choice
        raise EngineError(f"{self.url}: a stream that ended without a count of its tokens.")

    async def _events(self, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """The events of a stream. If a server that the run started ends, its log has the reason."""
        try:
            async for event in self._client.stream(GENERATE, body):
                yield event
        except EngineError as error:
            if self.server is None:
                raise
            reason = await asyncio.to_thread(self.server.process.why_ended, END_SECONDS)
            if not reason:
                raise
            raise EngineDownError(f"engine vllm at {self.url}: {reason}") from error

    async def score(self, request: Request, *, first: int) -> AnswerChunk:
        answer = await self._client.post(GENERATE, self._body(request, score_settings(first)))
        entries, token_ids = answer["prompt_logprobs"], request.prompt_ids
        found = [
            _finite(float(entries[at][str(token_id)]["logprob"]))
            for at, token_id in enumerate(token_ids.tolist())
            if at >= first
        ]
        return AnswerChunk(
            token_ids=token_ids[first:].tolist(),
            logprobs=found,
            prompt_ids=answer["prompt_token_ids"],
            num_cached_tokens=_num_cached(answer),
            labels=self.labels_of(answer["choices"][0]),
        )

    def _body(self, request: Request, settings: Mapping[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "request_id": request.id,
            "token_ids": np.asarray(request.prompt_ids).tolist(),
            "model": request.adapter or self._model,
            "return_token_ids": True,
            "sampling_params": settings,
        }
        if self._has_priorities:
            body["priority"] = request.priority
        return body

    def _chunk(self, answer: Any, choice: Any, *, has_ended: bool) -> AnswerChunk:
        ids = choice["token_ids"] or []
        content = (choice["logprobs"] or {}).get("content") or []
        self.check_scored([entry["token_id"] for entry in content], ids)
        routes = choice.get("routed_experts")
        return AnswerChunk(
            token_ids=ids,
            logprobs=[_finite(entry["logprob"]) for entry in content],
            finish_reason=choice["finish_reason"] if has_ended else None,
            stop=choice.get("stop_reason"),
            prompt_ids=answer.get("prompt_token_ids"),
            num_cached_tokens=_num_cached(answer),
            routed_experts=None if routes is None else _routes(routes),
            support=choice.get("sampling_mask"),
            labels=self.labels_of(choice) if has_ended else (),
        )

    async def abort(self, call_id: str) -> None:
        # The server puts the name of its route before the id that it was given.
        names = [f"generate-tokens-{call_id}"]
        await self._client.post("/inference/v1/abort_requests", {"request_ids": names})

    # -- weights ------------------------------------------------------------------------------

    async def pause(self) -> None:
        if not self._is_gone:  # else no call runs, and the next load starts the server again
            await self._client.post("/pause?mode=abort&clear_cache=false")

    async def resume(self, *, drop_cache: bool) -> None:
        if drop_cache:
            answer = await self._client.post("/reset_prefix_cache")
            if not answer["success"]:
                raise EngineError(
                    f"{self.url} keeps cached prefixes of the weights before: "
                    "/reset_prefix_cache failed, as it does while requests hold them. Does "
                    "somebody else use the server?"
                )
        await self._client.post("/resume")

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        """source: tensors, or a directory that the server can read."""
        if isinstance(source, Mapping):
            await self._send(source)
            return
        directory = Path(str(source)).absolute()
        if self._is_gone and not is_adapter(directory):
            await self._restart(directory, "it had ended")
        elif self._why_not_in_place:
            await self._restart(directory, self._why_not_in_place)
        else:
            await self._prepare()
            call = {"method": "lockstep_load_directory", "kwargs": {"directory": str(directory)}}
            await self._client.post("/collective_rpc", call)

    async def load_adapter(self, name: str, directory: Path) -> None:
        await self._prepare()
        await super().load_adapter(name, directory)

    async def _prepare(self) -> None:
        """Starts the server again if it has ended."""
        if self._is_gone:
            await self._restart(self._context.directory, "it had ended")

    async def _send(self, tensors: Mapping[str, Any]) -> None:
        await self._prepare()
        link = self._link = self._link or self._open_link()
        call = {
            "method": "lockstep_load_link",
            "kwargs": {"invitation": link.invitation, "load": link.open_load()},
        }
        answer = asyncio.create_task(self._client.post("/collective_rpc", call))
        try:
            sent = await asyncio.to_thread(link.send, tensors.items(), has_failed=answer.done)
            await answer
            self.sent_bytes += sent
        except EngineError:
            self._drop_link()
            await answer  # if it has an error of its own, that says more
            raise
        except BaseException:
            self._drop_link()
            answer.cancel()
            raise

    def _open_link(self) -> WeightSender:
        host = urlsplit(self.url).hostname or ""
        return WeightSender(
            num_workers=self._num_workers,
            host=host,
            is_same_host=self.server is not None or is_same_host(host),
            is_delta=self._is_delta,
        )

    def _drop_link(self) -> None:
        """The next load begins with whole tensors."""
        if self._link is not None:
            self._link.close()
        self._link = None

    async def read_label(self) -> str:
        """The label; empty for a server that is gone and that the next load restarts."""
        return "" if self._is_gone else (await self._client.get("/weight_info"))["weight_version"]

    async def _restart(self, directory: Path, reason: str) -> None:
        server = self.server
        if server is None:
            raise EngineError(f"{self.url}: {reason}, and it is not this run's to start.")
        self._context.on_wait(f"starting vLLM again from {directory}: {reason}")
        self._drop_link()
        await asyncio.to_thread(server.process.stop)
        await asyncio.to_thread(server.start, directory)
        self._client = server.client
        for name, adapter in self._loaded.items():
            await self.load_adapter(name, adapter)

    @property
    def _is_gone(self) -> bool:
        return self.server is not None and not self.server.process.is_running

    # -- health, memory and end ---------------------------------------------------------------

    async def sleep(self) -> None:
        await self._client.post("/sleep?level=1&mode=abort")

    async def wake_weights(self) -> None:
        if not self._is_gone:  # else the load starts the server again, which is awake
            await self._client.post("/wake_up?tags=weights")

    async def wake(self) -> None:
        await self._client.post("/wake_up?tags=kv_cache")

    async def close(self) -> None:
        self._drop_link()
        if self.server is not None:
            await asyncio.to_thread(self.server.process.stop)


def _num_cached(answer: Mapping[str, Any]) -> int:
    """Prompt tokens that were found in the cache, from the answer's `usage`."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def _finite(value: float) -> float:
    return math.nan if value <= NO_LOGPROB else value


def _routes(text: str) -> Routes:
    """[T, layers, active] of the base64 of a .npy file."""
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def vllm_on_server(config: VllmConfig, context: EngineContext) -> ServedEngine:
    """An engine on the server at the first of engine.urls, or on a server that is started here and
    ends with `close`. Returns when it answers."""
    server = None if config.urls else VllmServer(config, context)
    try:
        wire = VllmWire(config, context, server and server.client, server=server)
    except BaseException:
        if server is not None:
            server.process.stop()
        raise
    return ServedEngine(wire)
