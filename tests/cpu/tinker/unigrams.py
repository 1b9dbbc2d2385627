"""A backend of unigram models: one logit per id, plain gradient descent. Everything is exact, so
orders, restarts and repetitions show in the numbers.

As a program it serves a directory: `python unigrams.py DIRECTORY PORT`.
"""

import asyncio
import json
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lockstep.agent.gateway.config import GatewayConfig
from lockstep.agent.gateway.listener import Listener
from lockstep.tinker.requests import (
    BaseModel,
    ForwardBackwardResult,
    SampledSequence,
    SamplingResult,
    TinkerError,
    TopK,
)
from lockstep.tinker.server import TinkerServer
from lockstep.tinker.service import TinkerService
from lockstep.tinker_config import TinkerConfig

VOCAB = 50
BASE = BaseModel(
    name="org/tiny", architecture="unigram", vocab_size=VOCAB, max_tokens=64, stop_ids=(0,)
)


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max()
    return (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)


@dataclass
class Unigram:
    logits: np.ndarray
    rank: int
    gradient: np.ndarray = field(default_factory=lambda: np.zeros(VOCAB, np.float32))
    momentum: np.ndarray = field(default_factory=lambda: np.zeros(VOCAB, np.float32))


class Unigrams:
    """seconds: of every operation. executed: what was done, in order."""

    def __init__(self, seconds=0.0):
        self.base_models = (BASE,)
        self.models, self.samplers, self.executed = {}, {}, []
        self.seconds = seconds
        self.gate = None
        """An asyncio.Event that samples wait for, if there is one."""

    async def create_model(self, model_id, spec):
        if spec.rank > 64:
            raise TinkerError(f"rank={spec.rank}; expected at most 64.")
        assert model_id not in self.models
        rng = np.random.default_rng(spec.seed)
        self.models[model_id] = Unigram(rng.normal(size=VOCAB).astype(np.float32), spec.rank)
        self.executed.append(("create", model_id))

    async def unload_model(self, model_id):
        self.models.pop(model_id, None)

    async def forward_backward(self, model_id, request):
        await asyncio.sleep(self.seconds)
        model, loss, gradient = self.models[model_id], 0.0, np.zeros(VOCAB, np.float32)
        if request.config.get("beta") == 13:
            raise TinkerError("beta=13 is unlucky.")
        if request.config.get("beta") == 14:
            raise ZeroDivisionError("a bug of the backend")
        logprobs, outputs = log_softmax(model.logits), []
        for datum in request.data:
            targets = datum.inputs["target_tokens"]
            weights = datum.inputs.get("weights", datum.inputs.get("advantages"))
            weights = np.ones(targets.shape, np.float32) if weights is None else weights
            found = logprobs[targets]
            outputs.append(found)
            loss -= float((found * weights).sum())
            np.add.at(gradient, targets.ravel(), -weights.ravel())
            gradient += weights.sum() * np.exp(logprobs)
        if not request.is_forward_only:
            model.gradient = model.gradient + gradient
        number = int(request.data[0].token_ids[0])
        self.executed.append(("forward" if request.is_forward_only else "backward", number))
        metrics = {"loss:sum": loss}
        if request.custom is not None:
            metrics["custom:sum"] = float(len(request.custom.ranks))
        return ForwardBackwardResult(logprobs=tuple(outputs), metrics=metrics)

    async def optim_step(self, model_id, request):
        await asyncio.sleep(self.seconds)
        model = self.models[model_id]
        model.momentum = request.beta1 * model.momentum + model.gradient
        norm = float(np.sqrt((model.gradient.astype(np.float64) ** 2).sum()))
        model.logits = (model.logits - request.learning_rate * model.momentum).astype(np.float32)
        model.gradient = np.zeros(VOCAB, np.float32)
        self.executed.append(("optim", request.learning_rate))
        return {"grad_norm:mean": norm}

    async def save(self, model_id, directory, *, with_optimizer):
        assert not list(directory.iterdir())
        model = self.models[model_id]
        np.save(directory / "logits.npy", model.logits)
        if with_optimizer:
            np.save(directory / "momentum.npy", model.momentum)
        self.executed.append(("save", directory.name))

    async def load(self, model_id, directory, *, with_optimizer):
        model = self.models[model_id]
        model.logits = np.load(directory / "logits.npy")
        model.momentum = np.zeros(VOCAB, np.float32)
        if with_optimizer:
            model.momentum = np.load(directory / "momentum.npy")
        model.gradient = np.zeros(VOCAB, np.float32)

    async def open_sampler(self, sampler_id, base_model, directory, *, version):
        assert base_model == BASE.name
        logits = np.zeros(VOCAB, np.float32)
        if directory is not None:
            logits = np.load(directory / "logits.npy")
        self.samplers[sampler_id] = (logits, version)

    async def close_sampler(self, sampler_id):
        self.samplers.pop(sampler_id, None)

    async def sample(self, sampler_id, request, *, seeds, sequence_ids):
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(self.seconds)
        assert len(seeds) == len(sequence_ids) == request.num_samples
        logits, version = self.samplers[sampler_id]
        scaled = log_softmax(logits / np.float32(request.params.temperature))
        sequences = tuple(_draw(scaled, version, request, seed) for seed in seeds)
        self.executed.append(("sample", sampler_id))
        result = SamplingResult(sequences=sequences)
        plain, prompt = log_softmax(logits), request.prompt_ids
        if request.has_prompt_logprobs:
            found = plain[prompt]
            found[: request.first] = np.nan
            result = replace(result, prompt_logprobs=found)
        if request.topk_prompt_logprobs:
            k = request.topk_prompt_logprobs
            best = np.argsort(-plain)[:k]
            ids = np.tile(best, (len(prompt), 1)).astype(np.int32)
            result = replace(result, topk_prompt=TopK(ids=ids, logprobs=plain[ids]))
        if request.target_ids is not None:
            found = np.where(request.target_ids < 0, np.nan, plain[request.target_ids])
            result = replace(result, target_logprobs=found.astype(np.float32))
        if request.num_alternatives:
            shape = (len(prompt) - 1, request.num_alternatives)
            ids = np.random.default_rng(seeds[0]).integers(0, VOCAB, shape).astype(np.int32)
            result = replace(result, alternatives=TopK(ids=ids, logprobs=plain[ids]))
        return result

    async def close(self):
        pass


def _draw(logprobs, version, request, seed):
    rng, ids, reason = np.random.default_rng(seed), [], "length"
    for _ in range(request.params.max_tokens):
        probs = np.exp(logprobs.astype(np.float64))
        ids.append(int(rng.choice(VOCAB, p=probs / probs.sum())))
        if ids[-1] in request.params.stop_ids:
            reason = "stop"
            break
    ids = np.array(ids, np.int32)
    topk = None
    if k := request.topk_sample_logprobs:
        best = np.tile(np.argsort(-logprobs)[:k], (len(ids), 1)).astype(np.int32)
        topk = TopK(ids=best, logprobs=logprobs[best])
    return SampledSequence(
        token_ids=ids,
        logprobs=logprobs[ids],
        versions=np.full(len(ids), version, np.int32),
        stop_reason=reason,
        topk=topk,
    )


CONSTANTS = {name for name in TinkerConfig.__annotations__ if name not in TinkerConfig().__dict__}


def tinker_config(**settings):
    """The settings of a server, with other values of its constants."""
    own = {name: settings.pop(name) for name in CONSTANTS & settings.keys()}
    return type("_Quick", (TinkerConfig,), own)(**settings)


class Served:
    """A server in a thread of this process, until `close`."""

    def __init__(self, directory, backend=None, *, key="", max_body_bytes=2**26, **config):
        self.backend = backend or Unigrams()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.gateway = GatewayConfig(max_body_bytes=max_body_bytes)
        self.wait(self._start(directory, tinker_config(**config), key))
        self.url = self.listener.url

    async def _start(self, directory, config, key):
        self.service = TinkerService(self.backend, Path(directory), config)
        self.listener = Listener(self.gateway)
        TinkerServer(self.service, key=key, listener=self.listener)
        await self.service.start()
        await self.listener.start()

    def wait(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self):
        if self._thread.is_alive():
            self.wait(self.listener.close())
            self.wait(self.service.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


async def main(directory, port, seconds, config):
    service = TinkerService(Unigrams(float(seconds)), Path(directory), tinker_config(**config))
    listener = Listener(GatewayConfig(port=int(port)))
    TinkerServer(service, listener=listener)
    await service.start()
    await listener.start()
    print(listener.url, flush=True)
    while True:
        await asyncio.sleep(1)


if __name__ == "__main__":
    started = time.monotonic()
    asyncio.run(main(*sys.argv[1:4], json.loads(sys.argv[4])))
