"""The engine inside the training process: the trainer's own decoder over a paged cache.

A step runs in the event loop, without threads: all running requests sample one token, and prompts
are prefilled in the same step. Between steps, coroutines that await replies run, so that the next
turn of an episode joins the next step. With shared weights a sync is a new version number.

Cost of a step: a part that does not depend on the batch, a part per token fed, and attention over
each request's pages. Per request that comes or ends there is work in Python proportional to its
length; per sampled token there is none. On a GPU the running requests' part of a step is a CUDA
graph (`decode_graph`), and prefill runs beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch

from lockstep.engines.base import Capabilities, Scores
from lockstep.engines.config import GPU_SHARE, EmbeddedConfig
from lockstep.engines.embedded.batch import (
    BatchRows,
    PendingDraws,
    PrefillChunk,
    Scoring,
    Sequence,
    WeightsKey,
    adapters_of,
    build_inputs,
)
from lockstep.engines.embedded.decode_graph import Capture, CudaGraphs, DecodeGraphs
from lockstep.engines.embedded.kv_cache import PagedCache, ResidentCache
from lockstep.engines.embedded.lookup import Guess, draw, guesses_of
from lockstep.engines.embedded.scheduler import Scheduler
from lockstep.engines.grammar import Vocabulary
from lockstep.engines.ledger import LedgerEngine, limit_of, no_adapter
from lockstep.errors import CapabilityError, EngineError, TornWeightsError
from lockstep.launch.event_loop import running
from lockstep.launch.gpu import KeptAddresses, release_gpu_memory
from lockstep.models.adapters import AdapterStacks
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import check_tensors, decoder_like, load_weights, read_tensors
from lockstep.models.lora_config import product_shapes
from lockstep.models.moe import Routing
from lockstep.models.peft_io import read_adapter
from lockstep.ops.base import Ops
from lockstep.ops.selftest import adapter_failure, fingerprint
from lockstep.ops.transfer import to_device
from lockstep.types import Delta, FinishReason, Int32Array, Ragged, Request, Routes

YIELDS_AFTER_REPLY = 3
"""Turns of the event loop that coroutines get when a request has ended: enough for an episode to
parse the reply, call a tool that does not wait, and send its next turn into the next step."""


class EmbeddedEngine(LedgerEngine[Sequence]):
    """`Engine` over a `Decoder`. Handles token ids only.

    token_bytes: the bytes of each id, for stop strings and grammars; without it they are refused.
    control_ids: ids that no text spells, for grammars.
    is_shared: the model is the trainer's; otherwise the engine's own, and weights must be handed
    over. A shared model's parameters may be trained in place between steps. Call
    `load_weights(None, version=v)` after every update, or older keys and values would be used.
    make_capture: captures a step of decode as a graph, for ops that read `AttentionWork`. None:
    CUDA graphs on a GPU, and no graph on a CPU. addresses: keeps those of the cache while the
    engine sleeps, so that the graphs stay. None: kept on a shared GPU where the package is there.

    >>> engine = EmbeddedEngine(model, EmbeddedConfig())                        # doctest: +SKIP
    >>> async for delta in engine.generate(request): print(delta.token_ids)     # doctest: +SKIP
    """

    EVENTS = ("failed_requests", "preemptions")

    def __init__(
        self,
        model: Decoder,
        config: EmbeddedConfig,
        *,
        token_bytes: Seq[bytes] | None = None,
        control_ids: Collection[int] = (),
        is_shared: bool = True,
        make_capture: Callable[[], Capture] | None = None,
        addresses: KeptAddresses | None = None,
    ) -> None:
        super().__init__()
        shape, device = model.config, model.embedding.device
        if not (config.kv_cache_tokens and config.max_num_sequences):
            config = sized(config, model)
        self._model = model
        self._shared = model if is_shared else None
        self._config, self._token_bytes = config, token_bytes
        self._vocabulary = Vocabulary(token_bytes or (), control_ids, shape.vocab_size)
        self._base = WeightsKey(0, 0)
        self._adapters: dict[str, WeightsKey] = {}
        self._stacks, self._numbers = AdapterStacks(), count(1)
        self._tested: set[frozenset[tuple[int, ...]]] = set()
        """Shapes of adapters that the ops were tested with."""
        if device.type == "cuda" and config.share_device and KeptAddresses.can_be_kept():
            addresses = addresses or KeptAddresses()
        self._cache = PagedCache(shape, config, like=model.embedding, addresses=addresses)
        self.max_tokens = min(shape.max_positions, self._cache.num_pages * config.page_size)
        self._resident = None
        if config.resident_rows and not model.ops.reads_work(device):
            self._resident = ResidentCache(self._cache, max_tokens=config.kv_cache_tokens)
        self._rows = BatchRows(config.max_num_sequences, self.max_tokens, config.page_size)
        self._graphs = self._adapted_graphs = None
        if make_capture is None and device.type == "cuda" and config.cuda_graphs:
            make_capture = CudaGraphs
        if make_capture is not None and model.ops.reads_work(device):
            over = self._rows, self._cache, make_capture
            self._graphs = DecodeGraphs(*over)
            self._adapted_graphs = DecodeGraphs(*over, self._stacks)
        has_graphs = self._graphs is not None
        config.check_lookup(has_states=shape.linear is not None, has_graphs=has_graphs)
        self._scheduler = Scheduler(config, self._rows, self._cache, self.stats)
        self._watched: dict[Sequence, None] = {}
        """Requests that need code after every token: stop strings, streams."""
        self._guesses: list[Guess] = []
        """Those of the last step."""
        self._ahead: PendingDraws | None = None
        """A step that the device has begun before the tokens of the last one were handled."""
        self._arrivals = count(1)
        self._has_finished = False
        self._fingerprint = fingerprint(model.ops, model.embedding.dtype, device)
        self._fingerprint_text = self._fingerprint.text
        self._driver: asyncio.Task[None] | None = None

    # -- the protocol -------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        shared = ("shared",) if self._model is self._shared else ()
        return Capabilities(
            name="embedded",
            vocab_size=self._model.config.vocab_size,
            max_tokens=self.max_tokens,
            distributions=("model", "tempered", "sampled"),
            has_stop_strings=self._token_bytes is not None,
            has_prefix_cache=self._config.prefix_cache,
            has_seeds=True,
            has_score=True,
            has_support=True,
            has_grammar=self._token_bytes is not None,
            has_sleep=True,
            has_positional_draws=True,
            has_routed_experts=self._model.config.is_moe,
            has_adapters=True,
            weight_sources=(*shared, "tensors", "directory"),
            fingerprint=self._fingerprint_text,
        )

    @property
    def version(self) -> int:
        return self._base.version

    async def _score(self, request: Request, *, first: int) -> Scores:
        """Leaves nothing in the prefix cache."""
        weights, ids = self._weights_of(request.adapter, where="score"), request.prompt_ids
        values = np.full(len(ids), np.nan, np.float32)
        if len(ids) <= first:
            return Scores(
                logprobs=values, policy_version=weights.version, fingerprint=self._fingerprint_text
            )
        future: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        sequence = Sequence(
            request=request,
            weights=weights,
            order=next(self._arrivals),
            limit=0,
            ids=ids,
            scoring=Scoring(first=first, logprobs=values, future=future),
        )
        self._scheduler.add(sequence)
        self._drive()
        try:
            return await future
        finally:
            if future.cancelled():
                self._scheduler.remove(sequence)

    async def _abort(self, entry: Sequence) -> None:
        self._end(entry, "abort")

    async def _suspend(self) -> None:
        self._drop_ahead()

    async def _proceed(self, *, drop_cache: bool) -> None:
        if drop_cache:
            self._drop_cache()
        self._drive()

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        """None takes a shared model's parameters as they are; named tensors (Hugging Face names)
        or a checkpoint directory are written into a model of the engine's own.

        While paused, requests keep their keys and values until `resume` says what becomes of them.
        Raises CheckpointError, before anything is changed, for tensors that do not fit;
        TornWeightsError if reading fails midway.
        """
        self._check_open()
        self._drop_ahead()
        if source is None:
            if self._shared is None:
                raise EngineError("load_weights: the engine has weights of its own; found None.")
            self._model = self._shared
            # A fused optimizer does not count its writes: count one, so that caches are dropped.
            torch.autograd.graph.increment_version(list(self._shared.parameters()))
        else:
            self._write(source)
        self._end_segments(self._scheduler.sequences())
        self._base.version = version
        if self._is_paused:
            self._cache.forget()
            for sequence in [*self._rows.sequences, *self._scheduler.prefilling]:
                sequence.has_old_keys = True
        else:
            self._drop_cache()

    async def load_adapter(self, name: str, source: Decoder | str, *, version: int) -> None:
        """See `Engine.load_adapter`. The tensors are copied. Adapters are added to the plain base,
        without the adapter that the shared model trains. New weights of the base do not change
        them.

        Raises EngineError for a decoder without an adapter or of another shape, CheckpointError for
        a directory that does not fit, CapabilityError if the ops do not keep their contract for the
        adapter's shapes.
        """
        self._check_open()
        adapted = self._adapted(name, source)
        self._test_ops(name, adapted)
        weights = self._adapters.setdefault(name, WeightsKey(0, version, name))
        sequences = [s for s in self._scheduler.sequences() if s.weights is weights]
        self._end_segments(sequences)
        before, weights.number, weights.version = weights.number, next(self._numbers), version
        self._stacks.put(weights.number, adapted, self._model, replacing=before)
        for sequence in sequences:
            if sequence.lease is None:
                continue
            sequence.has_old_keys = self._is_paused
            if not self._is_paused:
                self._scheduler.preempt(sequence, keep=False)
            elif sequence.row >= 0:
                self._rows.adapters[sequence.row] = weights.number
        if before:
            self._cache.forget_root(before)

    async def drop_adapter(self, name: str) -> None:
        """See `Engine.drop_adapter`."""
        self._check_open()
        weights = self._weights_of(name, where="drop_adapter")
        del self._adapters[name]
        for sequence in self._scheduler.sequences():
            if sequence.weights is weights:
                text = f"the adapter {name!r} was dropped while the request was in flight."
                self._fail(sequence, EngineError(text))
        self._stacks.drop(weights.number)
        self._cache.forget_root(weights.number)

    async def _free_memory(self) -> None:
        self._drop_cache()
        self._release()

    async def _take_memory(self) -> None:
        self._cache.allocate()

    async def _close(self) -> None:
        self._drop_graphs()
        if not self._is_asleep:
            self._release()

    # -- arrival ------------------------------------------------------------------------------

    def _start(self, request: Request, ids: Int32Array) -> Sequence:
        sampling, limit = request.sampling, limit_of(request, self.capabilities)
        weights = self._weights_of(request.adapter, where=f"request {request.id}")
        order = next(self._arrivals)
        sequence = Sequence(request=request, weights=weights, order=order, limit=limit, ids=ids)
        if sampling.record_support and sampling.is_truncated:
            sequence.support = []
        if sampling.grammar:
            sequence.grammar = self._vocabulary.begin(sampling.grammar)
        if sampling.record_routes:
            self._cache.keep_routes(self._model.config)
            sequence.routes, sequence.num_routed = [], request.routes_from
        if request.stream or sampling.stop_strings:
            self._watched[sequence] = None
        self._scheduler.add(sequence)
        self._drive()
        return sequence

    def _weights_of(self, adapter: str, *, where: str) -> WeightsKey:
        if not adapter:
            return self._base
        if adapter not in self._adapters:
            raise no_adapter(where, adapter, self._adapters)
        return self._adapters[adapter]

    # -- the driver ---------------------------------------------------------------------------

    def _drive(self) -> None:
        """Starts the task that runs steps, unless it runs or there is nothing to do."""
        if self._may_sample and self._scheduler.has_work:
            self._driver = running(self._driver, self._run)

    async def _run(self) -> None:
        while self._scheduler.has_work and self._may_sample:
            self._has_finished = False
            try:
                self.step()
            except Exception as error:
                # A step that breaks leaves no request hanging: each fails with the cause.
                failure = EngineError(f"the engine's step failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self._fail_all(failure)
                return
            for _ in range(YIELDS_AFTER_REPLY if self._has_finished else 1):
                await asyncio.sleep(0)

    def step(self) -> None:
        """Samples a token for every running request, and prefills prompts beside it.

        Where the next step has the same rows, the device begins it before this one's tokens are
        read: replies are handled while it computes.
        """
        rows = self._rows
        draws, self._ahead = self._ahead, None
        if draws is None or not rows.num:
            draws = self._launch()
        self.stats["steps"] += 1
        if draws is None:
            return
        places = rows.places[: rows.num].copy()
        self._ahead = self._launch_ahead(draws, places)
        ids, logprobs = draws.wait()
        self._after_sampling(ids[places], logprobs[places], draws.support, np.arange(rows.num))
        for guess in self._guesses:
            self._keep_drawn(guess)

    def _launch(self) -> PendingDraws | None:
        """Begins a step. None if it only prefills."""
        rows, cache, draws = self._rows, self._cache, None
        chunks, broken = self._scheduler.plan(), []
        num_fed = rows.num
        assert num_fed or chunks, "a request can run whenever there is one"
        self._guesses = guesses_of(rows, self._config.lookup_tokens)
        cache.run_copies()
        with torch.inference_mode():
            drawn, computed, parts = None, None, []
            num_eager = num_fed
            if num_fed and (graphs := self._graphs_of_rows()) is not None:
                drawn, hidden = graphs.run(self._model)
                parts, num_eager = [] if hidden is None else [hidden], 0
            if chunks or num_eager:
                fed = [*chunks, *self._guesses]
                fed, computed = self._compute(fed, num_rows=num_eager)
                chunks = [chunk for chunk in fed if not isinstance(chunk, Guess)]
                parts.append(self._predictors(chunks, computed, num_rows=num_eager))
            num_drawn, support = 0 if drawn is None else num_fed, {}
            if rows.num > num_drawn:
                if self._guesses and computed is not None:
                    parts += [computed[guess.place] for guess in self._guesses]
                hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
                own, guessed = self._model.logits(hidden).tensor_split([rows.num - num_drawn])
                packed, support = rows.sample(own, self._model.ops, first=num_drawn)
                if self._guesses:
                    draw(self._guesses, rows, guessed, self._model.ops)
                drawn = packed if drawn is None else torch.cat([drawn[:, :num_fed], packed], 1)
            if drawn is not None:
                draws = PendingDraws(drawn, rows.num, support)
            if chunks and computed is not None:
                broken = self._score_chunks(chunks, computed)  # waits for the device
        rows.places[: rows.num] = np.arange(rows.num)
        for chunk in chunks:
            if chunk.sequence in broken:
                self._fail_unfinite(
                    chunk.sequence, "its prompt gave hidden states that are not finite"
                )
            else:
                self._after_chunk(chunk)
        return draws

    def _graphs_of_rows(self) -> DecodeGraphs | None:
        """The graphs that feed rows with these adapters; None: the rows are fed eagerly."""
        numbers = self._rows.adapters[: self._rows.num]
        if self._graphs is None or not numbers.any():
            return self._graphs
        can_be_captured = self._stacks.can_be_captured(self._model, numbers)
        return self._adapted_graphs if can_be_captured else None

    def _launch_ahead(self, draws: PendingDraws, places: np.ndarray) -> PendingDraws | None:
        """Begins the step after `draws`; `places` has the index of each row's draw. None if the
        rows may change, do not draw inside a graph, or have states, which cannot be taken back."""
        rows, graphs = self._rows, self._graphs_of_rows()
        if graphs is None or graphs.captured_rule() is None or self._cache.states is not None:
            return None
        if not self._scheduler.plan_ahead():
            return None
        ids = draws.ids_on_device
        with torch.inference_mode():
            if len(places) < len(ids):
                ids = ids[to_device(places, ids.device)]
            drawn, _ = graphs.run(self._model, drawn_ids=ids)
            assert drawn is not None, "the rule is captured"
            rows.places[: rows.num] = np.arange(rows.num)
            return PendingDraws(drawn, rows.num)

    def _compute(
        self, chunks: Seq[PrefillChunk], *, num_rows: int
    ) -> tuple[list[PrefillChunk], torch.Tensor]:
        """Feeds the first `num_rows` rows and the chunks, outside of a graph: (the chunks in the
        order of their tokens, hidden states [T, D])."""
        rows, cache, model = self._rows, self._cache, self._model
        reads_work = model.ops.reads_work(model.embedding.device)
        ids, positions, context, chunks = build_inputs(
            rows,
            chunks,
            cache,
            self._resident,
            num_rows=num_rows,
            num_heads=model.config.num_heads if reads_work else None,
        )
        adapters = None
        if self._adapters and (numbers := adapters_of(rows, chunks, num_rows=num_rows)).any():
            adapters = self._stacks.rows(model, numbers)
        routing = None if cache.routes is None else Routing()
        hidden = model(ids, positions, context, routing, adapters)
        if routing is not None:
            cache.write_routes(context.write_index, routing.stacked())
        return chunks, hidden

    def _predictors(
        self, chunks: Seq[PrefillChunk], hidden: torch.Tensor, *, num_rows: int
    ) -> torch.Tensor:
        """Hidden states to draw tokens from: of rows, and of the last tokens of prompts. A request
        whose prefill ends in this step becomes a row."""
        if len(hidden) == num_rows:
            return hidden
        places = list(range(num_rows))
        for chunk in chunks:
            if chunk.is_last and not chunk.sequence.scoring:
                self._scheduler.prefilling.remove(chunk.sequence)
                self._rows.append(chunk.sequence)
                places.append(chunk.place.stop - 1)
        return hidden[to_device(np.array(places, np.int64), hidden.device)]

    def _score_chunks(self, chunks: Seq[PrefillChunk], hidden: torch.Tensor) -> list[Sequence]:
        """Computes log-probs of scored texts. Returns the requests whose hidden states are not
        finite: their keys and values would be NaN. Requests that sample in this step are checked
        elsewhere."""
        finite = None
        broken: list[Sequence] = []
        scored: dict[float, list[tuple[Scoring, PrefillChunk]]] = {}
        for chunk in chunks:
            scoring = chunk.sequence.scoring
            if chunk.is_last and scoring is None:
                continue
            if finite is None:
                finite = hidden.float().sum(-1).isfinite().cpu().numpy()
            if not finite[chunk.place].all():
                broken.append(chunk.sequence)
            elif scoring is not None:
                heat = chunk.sequence.request.sampling.temperature
                scored.setdefault(heat, []).append((scoring, chunk))
        for temperature, parts in scored.items():
            self._write_scores(parts, hidden, temperature)
        return broken

    def _write_scores(
        self, parts: Seq[tuple[Scoring, PrefillChunk]], hidden: torch.Tensor, temperature: float
    ) -> None:
        """Scores all chunks of one temperature at once, since many are a few tokens long."""
        wanted = [slice(chunk.start + 1, chunk.stop + 1) for _, chunk in parts]
        ids = [chunk.sequence.ids[at] for (_, chunk), at in zip(parts, wanted, strict=True)]
        places = [np.arange(chunk.place.start, chunk.place.stop) for _, chunk in parts]
        device = hidden.device
        values, _ = self._model.log_probs(
            hidden.index_select(0, to_device(np.concatenate(places), device)),
            to_device(np.concatenate(ids).astype(np.int64), device),
            temperature=temperature,
        )
        found = np.split(values.cpu().numpy(), np.cumsum([len(part) for part in ids])[:-1])
        for (scoring, _), at, of_chunk in zip(parts, wanted, found, strict=True):
            scoring.logprobs[at] = of_chunk

    def _after_chunk(self, chunk: PrefillChunk) -> None:
        sequence, scoring = chunk.sequence, chunk.sequence.scoring
        sequence.num_computed = chunk.stop
        if scoring is None:
            self.stats["prefilled_tokens"] += chunk.stop - chunk.start
            self._cache.commit(sequence.held, sequence.ids[: chunk.stop])
            return
        self.stats["scored_tokens"] += chunk.stop - chunk.start
        if chunk.is_last:
            self._scheduler.remove(sequence)
            self._has_finished = True
            if not scoring.future.done():
                scoring.logprobs[: scoring.first] = np.nan
                num_cached = max(sequence.num_cached, 0)
                scores = Scores(
                    logprobs=scoring.logprobs,
                    policy_version=sequence.weights.version,
                    num_cached_tokens=num_cached,
                    num_prefilled_tokens=sequence.num_to_compute - num_cached,
                    fingerprint=self._fingerprint_text,
                )
                scoring.future.set_result(scores)

    # -- after a step -------------------------------------------------------------------------

    def _keep_drawn(self, guess: Guess) -> None:
        """Samples what was drawn behind guessed tokens, while those were drawn too."""
        rows, sequence = self._rows, guess.sequence
        assert guess.drawn is not None, "the step has drawn"
        for expected, id_, logprob in zip(guess.guessed, *guess.drawn, strict=True):
            row = sequence.row
            if row < 0 or rows.last_ids[row] != expected:
                return
            rows.is_loaded[row] = False  # the guessed tokens' keys are in the pages alone
            ids, logprobs = np.array([id_], np.int64), np.array([logprob])
            self._after_sampling(ids, logprobs, {}, np.array([row]))
            self.stats["guessed_tokens"] += 1

    def _after_sampling(
        self,
        ids: np.ndarray,
        logprobs: np.ndarray,
        support: Mapping[int, Int32Array],
        sampled: np.ndarray,
    ) -> None:
        """sampled: rows that get a token each."""
        rows, stats = self._rows, self.stats
        ended = rows.record(ids, logprobs, support, sampled)
        stats["sampled_tokens"] += len(sampled)
        finished = [rows.sequences[i] for i in sampled[ended]] if ended.any() else []
        constrained = rows.constrained() if len(sampled) == rows.num else ()
        for sequence, id_ in [(s, int(ids[s.row])) for s in constrained]:
            assert sequence.grammar is not None, "a constrained row has one"
            if problem := sequence.grammar.advance(id_):
                self._fail(sequence, EngineError(f"{sequence.where}: its grammar: {problem}"))
        for sequence in list(self._watched):
            if sequence.row not in sampled:
                continue
            if (text := self._matched_string(sequence)) is not None:
                self._finish_row(sequence, "stop", text)
            elif sequence.request.stream and sequence not in finished:
                self._send(sequence)
        for sequence in finished:
            if sequence.row >= 0:
                self._finish_row(sequence)

    def _finish_row(
        self, sequence: Sequence, reason: FinishReason = "length", stop: int | str | None = None
    ) -> None:
        rows, row = self._rows, sequence.row
        at = int(rows.counts[row]) - 1
        last, logprob = int(rows.sampled_ids[row, at]), float(rows.logprobs[row, at])
        if not np.isfinite(logprob):
            found = f"sampled token {at} (id {last}) has the log-prob {logprob}"
            self._fail_unfinite(sequence, found)
            return
        if stop is None and last in sequence.request.sampling.stop_ids:
            reason, stop = "stop", last
        self._end(sequence, reason, stop)

    def _matched_string(self, sequence: Sequence) -> str | None:
        """The stop string that the last token completed, even if it ends inside the token."""
        known, strings = self._token_bytes, sequence.request.sampling.stop_strings
        if not strings:
            return None
        assert known is not None, "stop strings are refused without token_bytes"
        longest = max(len(text.encode()) for text in strings)
        last_ids = self._sampled(sequence)[0][-longest:].tolist()
        tail = b"".join(known[i] for i in last_ids if i < len(known))
        return next((text for text in strings if text.encode() in tail), None)

    # -- replies ------------------------------------------------------------------------------

    def _sampled(self, sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
        """(ids, log-probs) of all tokens that a request has sampled."""
        if sequence.row >= 0:
            rows, count = self._rows, int(self._rows.counts[sequence.row])
            return rows.sampled_ids[sequence.row, :count], rows.logprobs[sequence.row, :count]
        return sequence.sampled

    def _send(
        self, sequence: Sequence, reason: FinishReason | None = None, stop: int | str | None = None
    ) -> None:
        """Sends the tokens sampled since the last delta."""
        ids, logprobs = self._sampled(sequence)
        fresh = slice(sequence.num_sent, None)
        cached = prefilled = 0
        if sequence.num_cached >= 0 and not sequence.deltas:
            cached = sequence.num_cached
            prefilled = len(sequence.request.prompt_ids) - cached
        support = sequence.support
        delta = Delta(
            token_ids=ids[fresh].copy(),
            logprobs=logprobs[fresh].copy(),
            policy_version=sequence.weights.version,
            finish_reason=reason,
            stop=stop,
            num_cached_tokens=cached,
            num_prefilled_tokens=prefilled,
            routed_experts=self._fresh_routes(sequence, len(ids)),
            support=None if support is None else Ragged.of_rows(support[fresh]),
            fingerprint=(
                replace(self._fingerprint, kv="kept").text
                if sequence.has_old_keys
                else self._fingerprint_text
            ),
        )
        self._hand_out(sequence, delta)

    def _end_segments(self, sequences: Seq[Sequence]) -> None:
        """Sends what requests have sampled before their weights change."""
        for sequence in sequences:
            if not sequence.scoring and len(self._sampled(sequence)[0]) > sequence.num_sent:
                self._send(sequence, "weight_update")

    def _fresh_routes(self, sequence: Sequence, num_sampled: int) -> Routes | None:
        """Routes of all positions read for the first `num_sampled` tokens and not sent yet."""
        if sequence.routes is None:
            return None
        if num_sampled == sequence.num_sent:
            return self._cache.read_routes([], 0, 0)
        stop = len(sequence.request.prompt_ids) + num_sampled - 1
        pages = [] if sequence.lease is None else sequence.lease.pages
        fresh = self._cache.read_routes(pages, sequence.num_routed, stop)
        routes = np.concatenate([*sequence.routes, fresh])
        sequence.routes, sequence.num_routed = [], stop
        return routes

    def _end(self, sequence: Sequence, reason: FinishReason, stop: int | str | None = None) -> None:
        """Sends the last delta and removes the request."""
        self._send(sequence, reason, stop)
        self._remove(sequence)

    def _remove(self, sequence: Sequence, *, keep: bool = True) -> None:
        self._scheduler.remove(sequence, keep=keep)
        self._watched.pop(sequence, None)
        self._has_finished = True

    def _fail(self, sequence: Sequence, error: EngineError) -> None:
        self._remove(sequence, keep=False)
        if sequence.scoring is None:
            self._fail_entry(sequence, error)
        elif not sequence.scoring.future.done():
            sequence.scoring.future.set_exception(error)

    def _fail_unfinite(self, sequence: Sequence, found: str) -> None:
        """Fails one request whose numbers are not finite; zeroes its pages, and the others go
        on."""
        weights = sequence.weights
        of_adapter = f" of adapter {weights.adapter!r}" if weights.adapter else ""
        cause = (
            f"{found}. The weights of version {weights.version}{of_adapter} give values that are "
            "not finite: a diverged or half-loaded policy?"
        )
        where = "score" if sequence.scoring else sequence.where
        self._fail(sequence, EngineError(f"{where}: {cause}"))
        self._cache.forget()
        self._cache.clear_free_pages()
        self._drop_resident()

    def _fail_all(self, error: EngineError) -> None:
        for sequence in self._scheduler.sequences():
            self._fail(sequence, error)

    # -- weights ------------------------------------------------------------------------------

    def _drop_cache(self) -> None:
        """Forgets all keys; every running request is queued and computed again."""
        scheduler = self._scheduler
        for sequence in scheduler.sequences():
            sequence.has_old_keys = False
        for sequence in [*self._rows.sequences, *scheduler.prefilling]:
            scheduler.preempt(sequence, keep=False)
        self._cache.forget()

    def _drop_resident(self) -> None:
        if self._resident is not None:
            self._resident.drop()

    def _drop_graphs(self) -> None:
        for graphs in filter(None, (self._graphs, self._adapted_graphs)):
            graphs.drop()

    def _drop_ahead(self) -> None:
        """Forgets the step that was begun ahead. It has changed nothing that is read, and its draws
        are repeated where its rows go on."""
        if self._ahead is not None:
            self._ahead.wait()
            self._ahead = None

    def _release(self) -> None:
        """Frees the memory that is not the model's."""
        self._drop_ahead()
        self._drop_resident()
        if not self._cache.deallocate():
            self._drop_graphs()
        release_gpu_memory()  # the trainer may be another process

    def _adapted(self, name: str, source: Decoder | str) -> Decoder:
        """A decoder with the adapter of `source`; it may have no weights besides."""
        if not name:
            raise EngineError("load_adapter: the name is empty, but '' means the base model.")
        if not isinstance(source, Decoder):
            return read_adapter(source, self._model.config)
        if source.lora is None or source.config != self._model.config:
            found = "one of another shape" if source.lora else "one without an adapter"
            raise EngineError(
                f"load_adapter: expected for {name!r} a decoder like the engine's with an adapter, "
                f"found {found}. `models.adapters.decoder_over` makes one."
            )
        return source

    def _test_ops(self, name: str, adapted: Decoder) -> None:
        """Raises CapabilityError unless an adapter of these shapes has the same bits in any batch
        on this machine. The contract was proved earlier, without these shapes."""
        model = self._model
        assert adapted.lora is not None, "checked before"
        shapes = product_shapes(adapted.lora, model.config)
        if type(model.ops) is Ops or shapes in self._tested:
            return
        failure = adapter_failure(
            model.ops, sorted(shapes), dtype=model.embedding.dtype, device=model.embedding.device
        )
        if failure:
            raise CapabilityError(
                f"load_adapter: {name!r} has {adapted.lora.describe()}. The ops {model.ops.name} "
                f"do not keep the contract for it on this machine: {failure}. Take another rank, "
                "or stock ops."
            )
        self._tested.add(shapes)

    def _write(self, source: Any) -> None:
        is_directory = not isinstance(source, Mapping)
        where = str(source) if is_directory else "load_weights"
        tensors = read_tensors(source) if is_directory else source
        if self._model is self._shared:
            self._model = decoder_like(self._model, tensors, where=where)
            return
        check_tensors(self._model, tensors, where=where)
        try:
            load_weights(self._model, tensors, where=where)
        except Exception as error:
            raise TornWeightsError(f"{where}: the weights were half loaded: {error}") from error


def sized(
    config: EmbeddedConfig, model: Decoder, *, share: float = GPU_SHARE, longest: int = 1
) -> EmbeddedConfig:
    """The settings with sizes for the model's device. On a GPU the engine takes this share of the
    free memory; the default suits an engine that is alone on it. longest: tokens of the longest
    sequence."""
    weight, room = model.embedding, None
    if weight.device.type == "cuda":
        room = int(share * torch.cuda.mem_get_info(weight.device)[0])
    item = weight.element_size()
    return config.sized(
        room,
        token_bytes=model.config.cached_per_token * item,
        sequence_bytes=model.config.cached_per_sequence(item),
        longest=longest,
    )
