"""The backend: one decoder per base model in this process, an adapter for each model in training,
and one engine per base that samples all adapters in one batch, here or outside.

Training runs in a thread of its own, one request at a time; the engines run in the event loop.

An engine outside (vLLM, SGLang, replicas of the embedded engine) has weights of its own. Adapters
lie beside its model, by name. A whole model (rank 0) takes the place of the base, by turns with all
other samplers. The server verifies pushed weights as training does: once with a change that cannot
be missed, and after every push by the log-probs of a probe.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from lockstep.agent.tasks import derive_seed
from lockstep.engines.adapter_engine import AdapterEngine
from lockstep.engines.base import Engine
from lockstep.engines.sampling import DrawRule, sample, stream_of, uniforms
from lockstep.errors import CheckpointError, ConfigError, EngineDownError, EngineError, TokenError
from lockstep.models import peft_format
from lockstep.models.adapters import decoder_over
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.models.peft_io import load_adapter
from lockstep.ops.context import PackedContext
from lockstep.run.preflight import ModelFiles
from lockstep.run_config import ServeConfig
from lockstep.sync.config import SyncConfig
from lockstep.sync.following import GAP_GROWTH, LEAST_GAP
from lockstep.sync.probe import LogProbs, Probe
from lockstep.sync.publisher import Publisher
from lockstep.tinker.learner import TinkerLearner, adapter_config
from lockstep.tinker.requests import (
    BaseModel,
    ForwardBackward,
    ForwardBackwardResult,
    ModelSpec,
    OptimStep,
    SampledSequence,
    Sampling,
    SamplingResult,
    TinkerError,
    TopK,
)
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer
from lockstep.types import Int32Array, Request

QUALIFICATION = LoraConfig(rank=1)
"""The adapter that the engine is tested with before anybody samples: any server takes its rank."""


@dataclass(frozen=True, slots=True, eq=False)
class FullWeights:
    """Weights of a whole model, for a sampler."""

    sampler_id: str
    """"" for the base."""
    directory: Path
    version: int
    expected: LogProbs
    """Log-probs of the probe, by the learner's decoder."""


class OutsideEngine:
    """An engine of one base model, whose weights are pushed and verified."""

    def __init__(
        self, engine: Engine, decoder: Decoder, model_files: ModelFiles, *, max_tokens: int
    ) -> None:
        """decoder, model_files: the base model. max_tokens: of a probe, see `Publisher`."""
        self._engine, directory = engine, model_files.directory
        model = decoder_over(decoder)
        add_adapter(model, lora_shape(QUALIFICATION, model.config), seed=0)
        budget = max(max_tokens, TrainerConfig().max_tokens_per_microbatch)
        config = TrainerConfig(max_tokens_per_microbatch=budget)
        self._trainer = Trainer(model, config, like=directory)
        left_out = model_files.renderer.tokenizer.control_ids
        self._of_probe: Mapping[str, Any] = {"left_out": left_out, "max_tokens": max_tokens}
        self._limit = LEAST_GAP
        """Nats between engine and decoder on the probe, above which other weights are at work."""
        self._holder: str | None = ""
        """The sampler whose whole weights the engine runs; "" is the base, None not known."""
        self._door, self._empty, self._num_inside = asyncio.Lock(), asyncio.Event(), 0
        self._empty.set()
        self.base = FullWeights("", directory, engine.version, self.scores(decoder))

    def _probe(self, engine: Engine) -> Probe:
        return Probe(SyncConfig(), engine, self._trainer, **self._of_probe)

    async def qualify(self, place: Path) -> str:
        """Pushes an adapter in `place` with a large change, and one without. Returns a line for a
        person; raises EngineError if the engine does not run the weights that it was sent."""
        view, trainer = AdapterEngine(self._engine, "qualification"), self._trainer
        publisher = Publisher(view, trainer, trainer.model, place=place, probed=self._of_probe)
        try:
            await publisher.publish(0)
        finally:
            publisher.close()
        await view.close()
        if publisher.qualification is not None:
            self._limit = max(LEAST_GAP, GAP_GROWTH * publisher.qualification.gap)
        await self.check("", self.base.expected, version=self.base.version)
        return publisher.describe()

    def scores(self, decoder: Decoder) -> LogProbs:
        """The log-probs of the probe that the engine gives if it runs the weights of `decoder`."""
        return self._probe(self._engine).by_trainer(decoder)

    async def check(self, adapter: str, expected: LogProbs, *, version: int) -> None:
        """Raises EngineError unless every replica scores the probe as expected. adapter: the name
        that requests give; "" for the whole model."""
        if not self._engine.capabilities.has_score:
            return
        probe = self._probe(AdapterEngine(self._engine, adapter) if adapter else self._engine)
        for replica, found in (await probe.by_engines(version=version)).items():
            gap = float(np.median(np.abs(found - expected)))
            if gap > self._limit:
                name = f"{self._engine.capabilities.name}{f' ({replica})' * bool(replica)}"
                raise EngineError(
                    f"engine {name} took the weights of version {version} and is {gap:.2g} nats "
                    f"from them on the probe; up to {self._limit:.2g} is rounding. Nothing was "
                    "sampled from them. Look at its log."
                )

    @asynccontextmanager
    async def holding(self, weights: FullWeights) -> AsyncIterator[None]:
        """The engine has these weights inside the block. Others wait, first come first served,
        until nobody needs the current weights."""
        async with self._door:
            if self._holder != weights.sampler_id:
                await self._empty.wait()
                await self._load(weights)
            self._num_inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()

    async def replace(self, weights: FullWeights) -> None:
        """Gives running requests of a sampler its new weights, if the engine has its old ones."""
        async with self._door:
            if self._holder == weights.sampler_id:
                await self._load(weights)

    async def _load(self, weights: FullWeights) -> None:
        self._holder = None
        await self._engine.load_weights(str(weights.directory), version=weights.version)
        await self.check("", weights.expected, version=weights.version)
        self._holder = weights.sampler_id


T = TypeVar("T")
Tensor = torch.Tensor


@dataclass(slots=True, kw_only=True)
class Base:
    """A base model: its decoder, which nothing trains, and the engine that samples from it."""

    info: BaseModel
    config: ServeConfig
    """The server's settings, with this model."""
    model_files: ModelFiles
    decoder: Decoder
    engine: Engine
    facts: Mapping[str, Any]
    """For the environment.json of the runs over it."""
    make_engine: Callable[[Decoder], Engine] | None = None
    """Makes an engine with weights of its own, for another decoder of the same shapes."""
    outside: OutsideEngine | None = None
    """An engine in another process, which has no `make_engine`."""

    def load(self, directory: Path) -> Decoder:
        """Another decoder of the same dtype, device and ops."""
        weight, size = self.decoder.embedding, self.decoder.config.vocab_size
        like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        return load_checkpoint(directory, **like, ops=self.decoder.ops, vocab_size=size)


@dataclass(slots=True, kw_only=True)
class _Sampler:
    base: Base
    engine: Engine
    decoder: Decoder
    """Decoder of the engine, without the adapter."""
    adapter: Path | None = None
    """Directory of the adapter, which the engine knows by the sampler's id; None for none."""
    full: FullWeights | None = None
    """Weights that an engine outside takes in place of the base's."""

    def holding(self) -> AbstractAsyncContextManager[None]:
        """Inside of it the engine has the sampler's weights."""
        outside = self.base.outside
        return nullcontext() if outside is None else outside.holding(self.full or outside.base)

    def adapted(self) -> Decoder:
        """The decoder with the sampler's adapter."""
        if self.adapter is None:
            return self.decoder
        decoder = decoder_over(self.decoder)
        add_adapter(decoder, peft_format.read_shape(self.adapter, decoder.config), seed=0)
        load_adapter(decoder, self.adapter)
        return decoder


class EmbeddedBackend:
    """Executes requests over the decoders of `bases`. `service.py` hands over one operation of a
    model at a time, in order of its seq_id; different models, and samplers, run side by side.

    Every method raises TinkerError for what the client did wrong; a method that raises, whatever it
    is, has changed nothing. Directories are written whole or not at all by the caller: a method
    writes into an empty one. After a restart the service makes the models anew, loads what `save`
    wrote, and repeats the requests since then, which must give the same bits.
    """

    def __init__(self, bases: Sequence[Base], config: TrainerConfig) -> None:
        """config: of every model in training; what an update needs is on the wire."""
        self._bases, self._config = {base.info.name: base for base in bases}, config
        self._learners: dict[str, TinkerLearner] = {}
        self._samplers: dict[str, _Sampler] = {}
        self._trainer = ThreadPoolExecutor(1, "tinker-training")

    @property
    def base_models(self) -> Sequence[BaseModel]:
        return [base.info for base in self._bases.values()]

    # -- training ---------------------------------------------------------------------------------

    async def create_model(self, model_id: str, spec: ModelSpec) -> None:
        """Makes a model with a fresh adapter and optimizer."""
        self._learners[model_id] = await self._train(self._make_learner, spec)

    def _make_learner(self, spec: ModelSpec) -> TinkerLearner:
        base = self._bases[spec.base_model]
        adapter = adapter_config(spec, base.decoder.config)
        if adapter is None:
            decoder = base.load(base.model_files.directory)
        else:
            decoder = decoder_over(base.decoder)
            add_adapter(decoder, lora_shape(adapter, decoder.config), seed=spec.seed or 0)
        return TinkerLearner(decoder, like=base.model_files.directory, config=self._config)

    async def unload_model(self, model_id: str) -> None:
        """Frees its memory. An unknown id is ignored."""
        self._learners.pop(model_id, None)

    async def forward_backward(
        self, model_id: str, request: ForwardBackward
    ) -> ForwardBackwardResult:
        return await self._train(self._learners[model_id].forward_backward, request)

    async def optim_step(self, model_id: str, request: OptimStep) -> dict[str, float]:
        """Returns metrics, named `name:reduction`. A gradient that is not finite makes no update,
        which `skipped:sum` counts."""
        return await self._train(self._learners[model_id].apply, request)

    async def save(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Writes the adapter in PEFT's form (a whole model in Hugging Face's), and, if asked, what
        a later `load` needs to continue bit for bit. Gradients that were not applied are not
        kept."""
        learner = self._learners[model_id]
        await self._train(partial(learner.save, directory, weights_only=not with_optimizer))

    async def load(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Takes what `save` wrote, for a model of the same spec; drops collected gradients."""
        learner = self._learners[model_id]
        try:
            await self._train(partial(learner.load, directory, weights_only=not with_optimizer))
        except CheckpointError as error:
            raise TinkerError(str(error)) from error

    async def _train(self, work: Callable[..., T], *arguments: object) -> T:
        """Runs in the thread of training: one request at a time, whichever model it is of."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._trainer, partial(work, *arguments))

    # -- samplers ---------------------------------------------------------------------------------

    async def open_sampler(
        self, sampler_id: str, base_model: str, directory: Path | None, *, version: int
    ) -> None:
        """A sampler of the weights in `directory`, as `save` wrote them; None samples the base
        model. The directory stays until the sampler is closed or has another one. On a sampler that
        exists it replaces the weights under running requests, whose later tokens have the new
        version."""
        base = self._bases[base_model]
        sampler = _Sampler(base=base, engine=base.engine, decoder=base.decoder)
        if directory is not None and (directory / peft_format.CONFIG).is_file():
            sampler.adapter = directory
            await self._push_adapter(sampler_id, sampler, version=version)
        elif directory is not None and base.outside is not None:
            sampler.decoder = await self._train(base.load, directory)
            expected = await self._train(base.outside.scores, sampler.decoder)
            sampler.full = FullWeights(sampler_id, directory, version, expected)
            await base.outside.replace(sampler.full)
        elif directory is not None and (known := self._samplers.get(sampler_id)) is not None:
            await known.engine.load_weights(str(directory), version=version)
            return
        elif directory is not None:
            assert base.make_engine is not None, "an engine is inside or outside"
            sampler.decoder = await self._train(base.load, directory)
            sampler.engine = base.make_engine(sampler.decoder)
            await sampler.engine.load_weights(str(directory), version=version)
        self._samplers[sampler_id] = sampler

    async def _push_adapter(self, sampler_id: str, sampler: _Sampler, *, version: int) -> None:
        engine, outside = sampler.engine, sampler.base.outside
        if outside is None:
            await engine.load_adapter(sampler_id, str(sampler.adapter), version=version)
            return
        expected = await self._train(lambda: outside.scores(sampler.adapted()))
        try:
            async with sampler.holding():
                await engine.load_adapter(sampler_id, str(sampler.adapter), version=version)
                try:
                    await outside.check(sampler_id, expected, version=version)
                except EngineError:
                    await engine.drop_adapter(sampler_id)
                    raise
        except EngineError as error:
            raise TinkerError(str(error), status=502) from error

    async def close_sampler(self, sampler_id: str) -> None:
        """Frees its memory; running requests fail. An unknown id is ignored."""
        sampler = self._samplers.pop(sampler_id, None)
        if sampler is None:
            return
        if sampler.adapter is not None:
            await sampler.engine.drop_adapter(sampler_id)
        elif sampler.engine is not sampler.base.engine:
            await sampler.engine.close()

    async def sample(
        self,
        sampler_id: str,
        request: Sampling,
        *,
        seeds: Sequence[int],
        sequence_ids: Sequence[str],
    ) -> SamplingResult:
        """Draws a reply for each seed. The same request, weights and seeds give the same bits.
        sequence_ids: names of the replies; spans of a datum refer to them."""
        sampler = self._samplers[sampler_id]
        adapter = "" if sampler.adapter is None else sampler_id
        place: dict[str, Any] = {"adapter": adapter, "affinity": sampler_id}
        asked = Request(id="", prompt_ids=request.prompt_ids, sampling=request.params, **place)
        draws = [
            _drawn(sampler.engine, replace(asked, id=f"{sampler_id}/{name}", seed=seed))
            for seed, name in zip(seeds, sequence_ids, strict=True)
        ]
        prompt_logprobs = None
        try:
            async with sampler.holding():
                replies = await asyncio.gather(*draws)
                if request.has_prompt_logprobs:
                    score = sampler.engine.score(asked.prompt_ids, first=request.first, **place)
                    prompt_logprobs = (await score).logprobs
        except (EngineError, TokenError, ConfigError) as error:
            status = 502 if isinstance(error, EngineDownError) else 400
            raise TinkerError(str(error), status=status) from error
        result = SamplingResult(
            sequences=tuple(reply for reply, _ in replies),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=max((cached for _, cached in replies), default=0),
        )
        topk = request.topk_prompt_logprobs or request.topk_sample_logprobs
        if not topk and request.target_ids is None and not request.num_alternatives:
            return result
        return await self._train(self._distributions, sampler, request, result, seeds)

    def _distributions(
        self, sampler: _Sampler, request: Sampling, result: SamplingResult, seeds: Sequence[int]
    ) -> SamplingResult:
        """Adds the values that need the whole distribution at each place of the prompt or the
        replies: a second forward, without a cache."""
        decoder, added = sampler.adapted(), dict[str, Any]()
        prompt, num_topk = request.prompt_ids, request.topk_prompt_logprobs
        if num_topk or request.target_ids is not None or request.num_alternatives:
            logits = _logits(decoder, prompt)[:-1]
            logprobs = decoder.ops.log_softmax(logits)
            if num_topk:
                topk = _topk(logprobs, num_topk)
                added["topk_prompt"] = _at_all_places(topk, len(prompt), request.first)
            if request.target_ids is not None:
                ids = torch.from_numpy(request.target_ids).to(logits.device)
                found = logprobs.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, float("nan"))
                added["target_logprobs"] = found.cpu().numpy()
            if request.num_alternatives:
                added["alternatives"] = _alternatives(decoder, logits, request, seeds[0])
        if request.topk_sample_logprobs:
            sequences = (_with_topk(decoder, request, one) for one in result.sequences)
            added["sequences"] = tuple(sequences)
        return replace(result, **added)

    # -- the whole --------------------------------------------------------------------------------

    async def close(self) -> None:
        """Leaves the engines of the bases to those who opened them."""
        self._trainer.shutdown(wait=True, cancel_futures=True)
        for sampler_id in list(self._samplers):
            await self.close_sampler(sampler_id)


# -- sampling -------------------------------------------------------------------------------------


async def _drawn(engine: Engine, request: Request) -> tuple[SampledSequence, int]:
    """(the reply, prompt tokens that were cached)."""
    deltas = [delta async for delta in engine.generate(request)]
    versions = [np.full(len(d.token_ids), d.policy_version, np.int32) for d in deltas]
    reply = SampledSequence(
        token_ids=np.concatenate([d.token_ids for d in deltas]),
        logprobs=np.concatenate([d.logprobs for d in deltas]),
        versions=np.concatenate(versions),
        stop_reason="stop" if deltas[-1].finish_reason == "stop" else "length",
    )
    return reply, deltas[0].num_cached_tokens


def _logits(decoder: Decoder, ids: Int32Array) -> Tensor:
    """[len(ids), V] of the forward that trains, which under a contract has the engine's bits."""
    device = decoder.embedding.device
    with torch.no_grad():
        ids_T = torch.from_numpy(ids.astype(np.int64)).to(device)
        context = PackedContext.of([len(ids)])
        return decoder.logits(decoder(ids_T, torch.arange(len(ids), device=device), context))


def _topk(logprobs: Tensor, num: int) -> TopK:
    found = logprobs.topk(min(num, logprobs.shape[1]))
    return TopK(ids=found.indices.int().cpu().numpy(), logprobs=found.values.cpu().numpy())


def _at_all_places(topk: TopK, num_places: int, first: int) -> TopK:
    """For all places: nothing before `first`."""
    k = topk.ids.shape[1]
    ids = np.zeros((num_places, k), np.int32)
    logprobs = np.full((num_places, k), np.nan, np.float32)
    ids[first:], logprobs[first:] = topk.ids[first - 1 :], topk.logprobs[first - 1 :]
    return TopK(ids=ids, logprobs=logprobs)


def _with_topk(decoder: Decoder, request: Sampling, reply: SampledSequence) -> SampledSequence:
    """Adds the most likely ids at each sampled token, under the distribution of its draw."""
    ids = np.concatenate([request.prompt_ids, reply.token_ids])
    logits = _logits(decoder, ids)[len(request.prompt_ids) - 1 : -1]
    logprobs = decoder.ops.log_softmax(logits, temperature=request.params.temperature or 1.0)
    return replace(reply, topk=_topk(logprobs, request.topk_sample_logprobs))


def _alternatives(decoder: Decoder, logits: Tensor, request: Sampling, seed: int) -> TopK:
    """Draws by the engine's own function: each column by a stream of its own."""
    rule = DrawRule(request.params.temperature, is_filtered=False, distribution="model")
    places = np.arange(1, len(logits) + 1)
    drawn, found = [], []
    for column in range(request.num_alternatives):
        streams = np.full(len(places), stream_of(derive_seed(seed, "alternatives", column)))
        uniform = torch.from_numpy(uniforms(streams, places)).to(logits.device)
        ids, logprobs, _ = sample(logits, uniform, rule, decoder.ops)
        drawn.append(ids.int().cpu().numpy())
        found.append(logprobs.cpu().numpy())
    return TopK(ids=np.stack(drawn, 1), logprobs=np.stack(found, 1))
