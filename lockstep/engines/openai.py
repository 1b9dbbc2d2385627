"""/v1/completions with token ids in both directions, in the dialects of vLLM, SGLang and others.

OpenAI's protocol returns text. Some servers return the ids as well, each in its own way; a few
requests at the start find out which way, and what else the server can do (`read_facts`). A server
that returns only text is refused: encoding the text again sometimes gives other tokens than those
that were sampled, and nobody would see it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from lockstep.engines.base import Capabilities, EngineContext
from lockstep.engines.config import OpenAIConfig
from lockstep.engines.http import HttpClient
from lockstep.engines.http_wire import (
    HttpWire,
    check_temperature,
    connect,
    finish_reason,
    num_cached,
)
from lockstep.engines.served import Chunk, ServedEngine, WireScores
from lockstep.engines.server_checks import (
    NUM_TOKENS,
    agree,
    check_same_model,
    prompt_of,
    recorded_distribution,
)
from lockstep.errors import CapabilityError, EngineError
from lockstep.types import Distribution, Int32Array, Request

COMPLETIONS = "/v1/completions"

HOW_STARTED = "vllm serve MODEL --port 8000, or python -m sglang.launch_server --model-path MODEL"

PREFIX = "token_id:"
"""Prefix with which vLLM writes an id in place of a token's text."""

ASKS_FOR_IDS: Mapping[str, Any] = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "no_stop_trim": True,
}
"""Options that make servers return ids, the stop id included. Servers ignore unknown options; the
error of one that does not is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Behaviour of one server."""

    model: str
    max_tokens: int
    distribution: Distribution
    has_top_k: bool
    has_seeds: bool
    num_logprobs: int
    """Value of `logprobs` that returns the sampled token's log-prob."""
    ignores_eos: bool
    """It honours stop ids if `ignore_eos` is set. If not, `ignore_eos` is left out, and it also
    stops at ids of its own."""
    scores_by: Literal["", "prompt_logprobs", "echo"]


def read_facts(client: HttpClient, served_model: str, context: EngineContext) -> Facts:
    """Finds out what a running server can do, with requests of a few tokens.

    Raises CapabilityError, with the reason, if it cannot be used.
    """
    model, max_tokens = _model_of(client, served_model)
    prompt = prompt_of(context.vocab_size)

    num_logprobs = 0

    def ask(**changes: Any) -> tuple[list[int], list[float], Mapping[str, Any]]:
        body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0.0}
        body |= {"logprobs": num_logprobs, **ASKS_FOR_IDS, **changes}
        choice = _choice(client.call_now(COMPLETIONS, body))
        return (*_tokens(client.url, choice), choice)

    try:
        ids, logprobs, choice = ask(ignore_eos=True)
    except _NoLogprobsError:  # for some, 0 is none, and 1 is that of the likeliest as well
        num_logprobs = 1
        ids, logprobs, choice = ask(ignore_eos=True)
    echo = choice.get("prompt_token_ids")
    if echo is not None and list(echo) != prompt:
        raise CapabilityError(
            f"engine openai at {client.url} read {echo[:12]} where {prompt[:12]} was sent: it adds "
            "tokens of its own to a prompt of ids."
        )
    if len(ids) < NUM_TOKENS:
        raise CapabilityError(
            f"engine openai at {client.url} sampled {len(ids)} tokens of {NUM_TOKENS} with "
            "ignore_eos=true: its end can not be chosen by the request."
        )
    ignores_eos = _stops_with(client, ask, ids)
    plain = ask(temperature=1.0, top_k=1, ignore_eos=True)
    cool = ask(temperature=0.5, top_k=1, ignore_eos=True)
    distribution = recorded_distribution(ids, plain[:2], cool[:2])
    drawn = [ask(temperature=1.0, seed=seed, ignore_eos=True)[0] for seed in (11, 11, 12)]
    facts = Facts(
        model=model,
        max_tokens=max_tokens or context.max_tokens,
        distribution=distribution or "model",
        has_top_k=distribution is not None,
        has_seeds=drawn[0] == drawn[1] != drawn[2],
        num_logprobs=num_logprobs,
        ignores_eos=ignores_eos,
        scores_by=_scores_by(client, model, prompt, ids, logprobs),
    )
    check_same_model("openai", client.url, context, prompt, ids, logprobs)
    return facts


def _model_of(client: HttpClient, wanted: str) -> tuple[str, int]:
    """(name, longest prompt plus reply or 0) of the model to use."""
    served = {str(m["id"]): m for m in client.call_now("/v1/models")["data"]}
    if not wanted and len(served) == 1:
        wanted = next(iter(served))
    if wanted not in served:
        found = f"has no model {wanted!r}" if wanted else "has several models"
        raise CapabilityError(
            f"engine openai at {client.url} {found}: {', '.join(served)}. Name one of them with "
            "engine.served_model=NAME."
        )
    return wanted, int(served[wanted].get("max_model_len") or 0)


def _stops_with(client: HttpClient, ask: Any, ids: Sequence[int]) -> bool:
    """Whether stop ids are honoured with `ignore_eos`, which some servers apply to them too."""
    stop = ids[len(ids) // 2]
    wanted = list(ids[: list(ids).index(stop) + 1])
    for ignore_eos in (True, False):
        found, _, choice = ask(stop_token_ids=[stop], ignore_eos=ignore_eos)
        if found == wanted:
            return ignore_eos
        if found == wanted[:-1] and choice.get("finish_reason") == "stop":
            raise CapabilityError(
                f"engine openai at {client.url} leaves the stop id out of the ids that it returns: "
                f"{found} for {wanted}. The model chose it, so it is trained, with its log-prob. "
                "Start a server that keeps it: vLLM, or SGLang with --skip-tokenizer-init."
            )
    raise CapabilityError(
        f"engine openai at {client.url} does not stop at stop_token_ids: {found} for {wanted}."
    )


def _scores_by(
    client: HttpClient,
    model: str,
    prompt: Sequence[int],
    ids: Sequence[int],
    logprobs: Sequence[float],
) -> Literal["", "prompt_logprobs", "echo"]:
    """The way in which the server scores given ids; empty unless the scores of its own reply equal
    the log-probs that it recorded."""
    path = [*prompt, *ids]
    for way in ("prompt_logprobs", "echo"):
        try:
            answer = client.call_now(COMPLETIONS, _scoring_body(model, path, way))
            found = _scores(answer, path, way)
        except (EngineError, LookupError, TypeError, ValueError):
            continue  # it does not have this way
        if len(found) == len(path) and agree(found[len(prompt) :], logprobs):
            return way
    return ""


class _NoLogprobsError(CapabilityError):
    """The answer has ids without log-probs."""


def _choice(answer: Any) -> Mapping[str, Any]:
    try:
        return answer["choices"][0]
    except (LookupError, TypeError):
        raise EngineError(f"an answer of {COMPLETIONS} without choices: {answer!r:.200}") from None


def _tokens(url: str, choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """(ids, log-probs) of a choice or of a part of a stream. Raises CapabilityError for text
    without ids."""
    found = choice.get("logprobs") or {}
    ids, tokens = choice.get("token_ids"), found.get("tokens") or []
    if ids is None and tokens and all(str(t).startswith(PREFIX) for t in tokens):
        ids = [int(t.removeprefix(PREFIX)) for t in tokens]
    if ids is None:
        if not choice.get("text") and not tokens and choice.get("finish_reason"):
            return [], []
        raise CapabilityError(
            f"engine openai at {url} returns text and no token ids: neither token_ids "
            f"(return_token_ids) nor logprobs.tokens as {PREFIX}ID (return_tokens_as_token_ids). "
            "Text is not encoded again: now and then that gives other tokens than were sampled. "
            f"Start a server that returns them: {HOW_STARTED}"
        )
    logprobs = found.get("token_logprobs")
    if ids and not logprobs:
        raise _NoLogprobsError(
            f"engine openai at {url} sends no log-probs of the tokens that it sampled: the "
            "sampler's side of everything that Lockstep measures. Start a server that does: "
            f"{HOW_STARTED}"
        )
    return [int(i) for i in ids], [float(v) for v in logprobs or ()]


def _scoring_body(model: str, ids: Sequence[int], way: str) -> dict[str, Any]:
    body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0}
    if way == "echo":
        return body | {"echo": True, "logprobs": 1, **ASKS_FOR_IDS}
    return body | {"prompt_logprobs": 0, **ASKS_FOR_IDS}


def _scores(answer: Any, ids: Sequence[int], way: str) -> list[float]:
    """A log-prob for each id, NaN for the first."""
    choice = _choice(answer)
    if way == "echo":
        found = choice["logprobs"]["token_logprobs"][: len(ids)]
        return [np.nan if value is None else float(value) for value in found]
    rows = choice["prompt_logprobs"]
    scored = [float(row[str(i)]["logprob"]) for i, row in zip(ids[1:], rows[1:], strict=True)]
    return [np.nan, *scored]


class OpenAIWire(HttpWire):
    """`Wire` to one server that speaks OpenAI's protocol."""

    ends_calls = False
    """Closing the connection is the only way to end a call: calls stream."""
    ping_path = "/v1/models"

    def __init__(self, client: HttpClient, facts: Facts, context: EngineContext) -> None:
        super().__init__(client, context)
        self._facts = facts
        self.capabilities = Capabilities(
            name="openai",
            vocab_size=context.vocab_size,
            max_tokens=facts.max_tokens,
            distributions=(facts.distribution,),
            has_seeds=facts.has_seeds,
            has_score=bool(facts.scores_by),
            scored_distributions=("model",),
            weight_sources=(),
        )

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        sampling, facts = request.sampling, self._facts
        check_temperature(sampling)
        if sampling.is_truncated and not facts.has_top_k:
            raise CapabilityError(
                f"engine openai at {self._client.url} did not honour top_k=1 at the start, and "
                f"top_p={sampling.top_p:g}, top_k={sampling.top_k} is asked for."
            )
        body: dict[str, Any] = {
            "model": facts.model,
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "logprobs": facts.num_logprobs,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": facts.ignores_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            **ASKS_FOR_IDS,
        }
        if sampling.temperature > 0 and sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.temperature > 0 and facts.has_seeds:
            body["seed"] = request.seed
        last: Chunk | None = None
        async for event in self._client.stream(COMPLETIONS, body):
            if not event.get("choices"):  # the event after the last, with the counts
                if last is not None:
                    yield replace(last, num_cached_tokens=num_cached(event))
                    last = None
                continue
            chunk = self._chunk(_choice(event))
            if chunk.finish_reason is None:
                yield chunk
            else:
                last = chunk
        if last is not None:
            yield last

    def _chunk(self, choice: Mapping[str, Any]) -> Chunk:
        ids, logprobs = _tokens(self._client.url, choice)
        where = f"engine openai at {self._client.url}"
        reason = finish_reason(choice.get("finish_reason"), where)
        stop = choice.get("stop_reason", choice.get("matched_stop"))
        if reason == "stop" and stop is None and ids and not self._facts.ignores_eos:
            stop = ids[-1]  # of its own ends, servers name none
        return Chunk(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=reason,
            stop=stop,
            prompt_ids=choice.get("prompt_token_ids"),
        )

    async def score(
        self, call_id: str, token_ids: Int32Array, *, first: int, priority: int
    ) -> WireScores:
        ids, way = token_ids.tolist(), self._facts.scores_by
        if len(ids) >= self._facts.max_tokens:
            raise EngineError(
                f"score: the text has {len(ids)} tokens; a server that samples one token with it "
                f"takes {self._facts.max_tokens - 1}."
            )
        answer = await self._client.post(COMPLETIONS, _scoring_body(self._facts.model, ids, way))
        try:
            found = _scores(answer, ids, way)
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"score: the answer of {self._client.url} has no log-prob of each id: {error}"
            ) from error
        return WireScores(
            logprobs=found[first:], prompt_ids=_choice(answer).get("prompt_token_ids")
        )


def openai_engine(config: OpenAIConfig, context: EngineContext) -> ServedEngine:
    """The engine of engine=openai. Returns when the server answers."""
    client = connect(config, context, name="openai", path="/v1/models", how_started=HOW_STARTED)
    return ServedEngine(
        OpenAIWire(client, read_facts(client, config.served_model, context), context)
    )
