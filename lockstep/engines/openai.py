"""/v1/completions with token ids in both directions, in the dialects of vLLM, SGLang and others.

OpenAI's protocol returns text. Some servers return the ids as well, each in its own way. A server
that returns only text is refused: encoding the text again sometimes gives other tokens than those
that were sampled, and nobody would see it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from lockstep.engines.base import Capabilities, EngineContext
from lockstep.engines.config import OpenAIConfig
from lockstep.engines.http import HttpClient
from lockstep.engines.http_wire import (
    HttpWire,
    check_temperature,
    connect,
    recorded_distribution,
)
from lockstep.engines.served import Chunk, ServedEngine
from lockstep.errors import CapabilityError, EngineError
from lockstep.types import Request

COMPLETIONS = "/v1/completions"

HOW_STARTED = "vllm serve MODEL --port 8000, or python -m sglang.launch_server --model-path MODEL"

ASKS_FOR_IDS: Mapping[str, Any] = {
    "logprobs": 1,  # some servers take 0 for none
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,  # a vLLM without its tokenizer cannot spell them
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "no_stop_trim": True,
}
"""Options that make servers return ids and log-probs, the stop id included. Servers ignore unknown
options; the error of one that does not is shown."""


def openai_engine(config: OpenAIConfig, context: EngineContext) -> ServedEngine:
    """The engine of engine=openai. Returns when the server answers."""
    client = connect(config, context, name="openai", path="/v1/models", how_started=HOW_STARTED)
    return ServedEngine(OpenAIWire(client, context, config.served_model))


class OpenAIWire(HttpWire):
    """`Wire` to one server that speaks OpenAI's protocol. Closing the connection is the only way to
    end a call, so calls stream."""

    ends_calls = False
    ping_path = "/v1/models"

    def __init__(self, client: HttpClient, context: EngineContext, wanted: str) -> None:
        """wanted: name of the model, or empty for the only one. Raises CapabilityError, with the
        reason, if the server cannot be used."""
        super().__init__(client, context)
        self._where = f"engine openai at {client.url}"
        served = {str(m["id"]): m for m in client.call_now("/v1/models")["data"]}
        if not wanted and len(served) == 1:
            wanted = next(iter(served))
        if wanted not in served:
            found = f"has no model {wanted!r}" if wanted else "has several models"
            raise CapabilityError(
                f"{self._where} {found}: {', '.join(served)}. Name one of them with "
                "engine.served_model=NAME."
            )
        self._model = wanted

        def ask(prompt_ids: list[int], **settings: Any) -> tuple[list[int], list[float]]:
            body = {"model": self._model, "prompt": prompt_ids, **ASKS_FOR_IDS, **settings}
            return self._tokens(_choice(client.call_now(COMPLETIONS, body)))

        distribution = recorded_distribution(
            lambda ids, num, sampling: ask(ids, max_tokens=num, **sampling), context.vocab_size
        )
        self._has_top_k = distribution is not None
        self.capabilities = Capabilities(
            name="openai",
            vocab_size=context.vocab_size,
            max_tokens=int(served[wanted].get("max_model_len") or context.max_tokens),
            distributions=(distribution or "model",),
            weight_sources=(),
        )

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        sampling = request.sampling
        check_temperature(sampling)
        if sampling.is_truncated and not self._has_top_k:
            raise CapabilityError(
                f"{self._where} did not honour top_k=1 at the start, and "
                f"top_p={sampling.top_p:g}, top_k={sampling.top_k} is asked for."
            )
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # Not ignore_eos, which some servers apply to stop ids too: a server also ends at ids of
            # its own, and the reply continues in another call.
            "stop_token_ids": list(sampling.stop_ids),
            "stream": True,
            **ASKS_FOR_IDS,
        }
        if sampling.temperature > 0:
            body |= {"seed": request.seed} | ({"top_k": sampling.top_k} if sampling.top_k else {})
        async for event in self._client.stream(COMPLETIONS, body):
            if event.get("choices"):
                yield self._chunk(_choice(event))

    def _chunk(self, choice: Mapping[str, Any]) -> Chunk:
        ids, logprobs = self._tokens(choice)
        reason = choice.get("finish_reason")
        stop = choice.get("stop_reason", choice.get("matched_stop"))
        if reason == "stop" and stop is None and ids:
            stop = ids[-1]  # servers do not name ends of their own
        return Chunk(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=reason,
            stop=stop,
            prompt_ids=choice.get("prompt_token_ids"),
        )

    def _tokens(self, choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        """(ids, log-probs) of a choice or of a part of a stream. Raises CapabilityError for text
        without ids, and for ids without log-probs."""
        found = choice.get("logprobs") or {}
        ids = choice.get("token_ids")
        if ids is None and not choice.get("text") and choice.get("finish_reason"):
            return [], []
        if ids is None:
            raise CapabilityError(
                f"{self._where} returns text and no token ids (return_token_ids). Text is not "
                "encoded again: now and then that gives other tokens than were sampled. Start a "
                f"server that returns them: {HOW_STARTED}"
            )
        logprobs = found.get("token_logprobs")
        if ids and not logprobs:
            raise CapabilityError(
                f"{self._where} sends no log-probs of the tokens that it sampled. Start a server "
                f"that does: {HOW_STARTED}"
            )
        return [int(i) for i in ids], [float(v) for v in logprobs or ()]


def _choice(answer: Any) -> Mapping[str, Any]:
    try:
        return answer["choices"][0]
    except (LookupError, TypeError):
        raise EngineError(f"an answer of {COMPLETIONS} without choices: {answer!r:.200}") from None
