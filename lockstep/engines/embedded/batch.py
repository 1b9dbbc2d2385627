"""The running rows of the engine, and the index tensors of one step.

State that changes with every token is held in arrays over all rows, so that a step has no loop over
requests. Code runs per request only when it arrives, ends, or needs another page.

A draw is the inverse of the cumulative distribution at one uniform number, a hash of the request's
seed and the token's position. It does not depend on other requests or on preemption.

# B rows  V vocabulary
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from lockstep.engines.base import Scores
from lockstep.engines.embedded.kv_cache import ZERO_PAGE, Lease, PagedCache, ResidentCache
from lockstep.engines.grammar import GrammarState
from lockstep.engines.ledger import Entry
from lockstep.ops.base import Ops
from lockstep.ops.chunks import StateStep
from lockstep.ops.context import AttentionWork, PagedBlock, PagedContext, ResidentRows, to_device
from lockstep.types import Distribution, Float32Array, Int32Array, Routes, pack_support

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit affects every output
    bit."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream_of(seed: int) -> np.uint64:
    """Start of a request's stream of random numbers; computed once per request."""
    return _mix(np.array([seed & _MASK], np.uint64) + _GOLDEN)[0]


def uniforms(
    streams: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """[B] float32 in [0, 1), multiples of 2^-24: a hash of stream and position.

    float32 holds 24 bits, so u times the sum of the probabilities stays below that sum, and a draw
    never falls past the last token.
    """
    bits = _mix(streams + positions.astype(np.uint64) * _GOLDEN) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2.0**-24)


@dataclass(frozen=True, slots=True)
class Rule:
    """How a row draws. Rows of one rule are drawn together."""

    temperature: float
    is_filtered: bool
    """True if top-p or top-k is on."""
    distribution: Distribution
    records_support: bool = False
    """True if each draw returns the ids that it could have been."""
    is_constrained: bool = False
    """True if each row has a grammar."""


def sample(
    logits: Tensor,
    uniform: Tensor,
    rule: Rule,
    ops: Ops,
    *,
    top_p: Tensor | None = None,
    top_k: Tensor | None = None,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draws once from each row of logits [B, V].

    Returns (ids [B] int64, log-probs [B] float32 under the rule's distribution, kept [B, V] bool:
    True at ids that could be drawn; None unless the rule records it).
    uniform [B] float32; top_p [B] float32 and top_k [B] int64 if the rule filters; allowed [B, V]
    bool, the ids that the row's grammar allows, if it is constrained: filters choose among them. A
    row with a non-finite logit gets a NaN log-prob and some id of the vocabulary.
    """
    if rule.temperature == 0:
        logp = ops.log_softmax(logits)
        best = logp if allowed is None else logp.masked_fill(~allowed, float("-inf"))
        ids = best.argmax(-1, keepdim=True)
        return ids[:, 0], logp.gather(1, ids)[:, 0], None
    logp, kept = ops.log_softmax(logits, temperature=rule.temperature, kept=allowed), allowed
    if rule.is_filtered:
        assert top_p is not None and top_k is not None, "a filtering rule needs top_p and top_k"
        ids, kept = _draw_filtered(logp, uniform, top_p, top_k, ops)
        kept = kept if allowed is None else kept & allowed
    elif allowed is not None or logits.is_cuda:  # a stock softmax there depends on the batch
        ids = ops.draw(logp.exp(), uniform)
    else:
        ids = ops.draw(_probs(logits, rule.temperature), uniform)
    if kept is not None and rule.distribution == "sampled":
        # The trainer's arithmetic over the support, not a log-prob minus a log mass.
        logp = ops.log_softmax(logits, temperature=rule.temperature, kept=kept)
        return ids[:, 0], logp.gather(1, ids)[:, 0], kept if rule.records_support else None
    if rule.distribution == "model" and rule.temperature != 1.0:
        logp = ops.log_softmax(logits)
    return ids[:, 0], logp.gather(1, ids)[:, 0], None


def pack_draws(ids: Tensor, logprobs: Tensor) -> Tensor:
    """[2, B] int32: ids, and the bits of the log-probs; so that one copy reads both."""
    return torch.stack([ids.int(), logprobs.view(torch.int32)])


class Draws:
    """The draws of one step, on their way to the host."""

    def __init__(
        self, packed: Tensor, num_rows: int, support: Mapping[int, Int32Array] | None = None
    ) -> None:
        """packed: see `pack_draws`, the rows' draws first; a later step may overwrite it."""
        self.ids_on_device, self.support = packed[0, :num_rows], support or {}
        self._host = packed.to("cpu", non_blocking=True, copy=True)
        self._is_done = torch.cuda.Event() if packed.is_cuda else None
        if self._is_done is not None:
            self._is_done.record()

    def wait(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """(ids, log-probs) of the rows that were fed, when the device has computed them."""
        if self._is_done is not None:
            self._is_done.synchronize()
        ids, bits = self._host.numpy()
        return ids.astype(np.int64), bits.view(np.float32)


def _probs(logits: Tensor, temperature: float) -> Tensor:
    """exp(log_softmax) up to rounding, but cheaper."""
    logits = logits.float()
    return torch.softmax(logits if temperature == 1.0 else logits / temperature, -1)


def _draw_filtered(
    logp: Tensor, uniform: Tensor, top_p: Tensor, top_k: Tensor, ops: Ops
) -> tuple[Tensor, Tensor]:
    """(ids [B, 1], kept [B, V] bool). Applies top-k, then top-p to the rest, in the order of
    Hugging Face and vLLM. Of equally likely tokens the smaller id comes first."""
    logp, order = logp.sort(dim=-1, descending=True, stable=True)
    probs = logp.exp()
    rank = torch.arange(probs.shape[1], device=probs.device)
    is_kept = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    probs = probs * is_kept
    is_kept = is_kept & ops.nucleus(probs, top_p)
    ids = order.gather(1, ops.draw(probs * is_kept, uniform))
    return ids, torch.empty_like(is_kept).scatter_(1, order, is_kept)


Tensor = torch.Tensor

JOIN_PAIRS = 16384
"""Query-key pairs that one block of attention may waste on padding before it is split in two: about
the cost of another block's calls on a CPU."""

KEY_QUANTUM = 16
"""Attention reads a multiple of this many keys: it fills a vector register in any dtype."""


Group = tuple[Rule, Tensor | slice, npt.NDArray[np.int64]]
"""(rule, rows that draw by it as an index of the logits, their numbers on the host)."""


@dataclass(slots=True, eq=False, kw_only=True)
class Scoring:
    """A text whose log-probs are wanted."""

    first: int
    """First id whose log-prob is wanted; keys before its predictor may be reused."""
    temperature: float
    logprobs: Float32Array
    future: asyncio.Future[Scores]


@dataclass(slots=True, eq=False)
class Weights:
    """The weights that requests are sampled by: the base model, or it with an adapter."""

    number: int
    """0 is the base. An adapter gets another number whenever its tensors are replaced."""
    version: int
    adapter: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(Entry):
    """One request on its way through the engine."""

    weights: Weights
    order: int
    """Number in the order of arrival."""
    limit: int
    """Most tokens to sample, limited by the end of the context too."""
    ids: Int32Array
    """Ids to prefill: the prompt, and after a preemption the sampled ids too."""
    scoring: Scoring | None = None
    """Set for a text that is scored and samples nothing."""
    lease: Lease | None = None
    row: int = -1
    """Row in `Rows`; -1 while it waits or is prefilled."""
    num_computed: int = 0
    sampled_ids: Int32Array | None = None
    """Sampled ids of a preempted request. A running request has its ids in `Rows`."""
    sampled_logprobs: Float32Array | None = None
    support: list[Int32Array] | None = None
    """Ids that each sampled token was drawn from (`types.pack_support`); None if the request does
    not ask."""
    grammar: GrammarState | None = None
    """Place in the request's grammar."""
    routes: list[Routes] | None = None
    """Routes that were saved from given-up pages and are not sent yet; None if the request does not
    ask."""
    num_routed: int = 0
    """Routes up to this position were sent or saved."""
    has_old_keys: bool = False
    """True if some of its keys were computed by older weights and kept."""
    num_cached: int = -1
    """Prompt tokens that were cached at the first admission; -1 before."""

    @property
    def held(self) -> Lease:
        """The lease of a request that runs or is prefilled."""
        assert self.lease is not None, "it waits, and holds no pages"
        return self.lease

    @property
    def rank(self) -> tuple[int, int]:
        """Order of requests: the smallest runs first and is preempted last."""
        return (self.request.priority, self.order)

    @property
    def num_to_compute(self) -> int:
        """Positions to prefill. The last id of a scored text predicts nothing and is left out."""
        return len(self.ids) - (self.scoring is not None)


class Rows:
    """State of the requests that sample a token in every step: one entry per row in each array.

    The next step feeds `last_ids` at `positions`, and samples the token of the next position.
    """

    def __init__(self, capacity: int, max_context: int, page_size: int) -> None:
        self.num = 0
        self.page_size = page_size
        self.sequences: list[Sequence] = []
        self.last_ids = np.zeros(capacity, np.int64)
        self.positions = np.zeros(capacity, np.int64)
        self.pages = np.full((capacity, -(-max_context // page_size)), ZERO_PAGE, np.int64)
        self.num_pages = np.zeros(capacity, np.int64)
        self.counts = np.zeros(capacity, np.int64)
        self.limits = np.zeros(capacity, np.int64)
        self.streams = np.zeros(capacity, np.uint64)
        self.top_p = np.ones(capacity, np.float32)
        self.top_k = np.zeros(capacity, np.int64)
        self.stop_ids = np.full((capacity, 4), -1, np.int64)
        self.rule_of = np.zeros(capacity, np.int64)
        self.adapters = np.zeros(capacity, np.int64)
        """Number of each row's `Weights`."""
        self.slots = np.zeros(capacity, np.int64)
        """Slot of each row's states of linear attention."""
        self.places = np.zeros(capacity, np.int64)
        """Place of each row in the batch that was fed last."""
        self.is_loaded = np.zeros(capacity, np.bool_)
        """True if the row is in the resident cache."""
        # As long as the longest possible reply; untouched memory is not taken from the system.
        self.sampled_ids = np.empty((capacity, max_context), np.int32)
        self.logprobs = np.empty((capacity, max_context), np.float32)
        self._rules: list[Rule] = []
        self._groups: tuple[int, list[Group]] | None = None
        """First row that the last `sample` drew for, and the groups from there on."""
        self.num_changes = 0
        """Changes of rows and their pages."""

    def append(self, sequence: Sequence) -> None:
        """Adds a request whose tokens, except for the last, are computed or are in this step."""
        row, request = self.num, sequence.request
        sampling, pages = request.sampling, sequence.held.pages
        self.last_ids[row] = sequence.ids[-1]
        self.positions[row] = len(sequence.ids) - 1
        self.pages[row, : len(pages)] = pages
        self.num_pages[row] = len(pages)
        self.limits[row] = sequence.limit
        self.streams[row] = stream_of(request.seed)
        self.top_p[row], self.top_k[row] = sampling.top_p, sampling.top_k
        if len(sampling.stop_ids) > self.stop_ids.shape[1]:
            more = len(sampling.stop_ids) - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, more)), constant_values=-1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(sampling.stop_ids)] = sampling.stop_ids
        rule = Rule(
            sampling.temperature,
            sampling.is_filtered and sampling.temperature > 0,
            sampling.distribution,
            sequence.support is not None,
            sequence.grammar is not None,
        )
        if rule not in self._rules:
            self._rules.append(rule)
        self.rule_of[row] = self._rules.index(rule)
        self.counts[row] = 0
        self.adapters[row] = sequence.weights.number
        self.slots[row] = sequence.held.slot
        self.is_loaded[row] = False
        if sequence.sampled_ids is not None and sequence.sampled_logprobs is not None:
            count = len(sequence.sampled_ids)
            self.sampled_ids[row, :count] = sequence.sampled_ids
            self.logprobs[row, :count] = sequence.sampled_logprobs
            self.counts[row] = count
            sequence.sampled_ids = sequence.sampled_logprobs = None
        sequence.row = row
        self.sequences.append(sequence)
        self.num += 1
        self._groups = None
        self.num_changes += 1

    def remove(self, row: int) -> None:
        """Removes a row; the last row moves to its place."""
        last = self.num - 1
        self.sequences[row].row = -1
        if row != last:
            count = self.counts[last]
            self.sampled_ids[row, :count] = self.sampled_ids[last, :count]
            self.logprobs[row, :count] = self.logprobs[last, :count]
            used = max(self.num_pages[row], self.num_pages[last])
            self.pages[row, :used] = self.pages[last, :used]
            for array in (
                self.last_ids,
                self.positions,
                self.num_pages,
                self.counts,
                self.limits,
                self.streams,
                self.top_p,
                self.top_k,
                self.stop_ids,
                self.rule_of,
                self.adapters,
                self.slots,
                self.places,
            ):
                array[row] = array[last]
            self.is_loaded[row] = False
            self.sequences[row] = self.sequences[last]
            self.sequences[row].row = row
        self.pages[last, : self.num_pages[last]] = ZERO_PAGE
        self.sequences.pop()
        self.num = last
        self._groups = None
        self.num_changes += 1

    def add_page(self, row: int, page: int) -> None:
        """Appends a page to a row."""
        self.pages[row, self.num_pages[row]] = page
        self.num_pages[row] += 1
        self.num_changes += 1

    def full_rows(self, *, ahead: int = 0) -> list[Sequence]:
        """Requests that have no page yet for the token to feed, or for the one `ahead` of it."""
        n = self.num
        full = self.positions[:n] + ahead >= self.num_pages[:n] * self.page_size
        return [self.sequences[i] for i in np.flatnonzero(full)] if full.any() else []

    def shared_rule(self) -> Rule | None:
        """The rule that all rows draw by; None if rules differ."""
        rule_of = self.rule_of[: self.num]
        return self._rules[rule_of[0]] if (rule_of == rule_of[0]).all() else None

    def sample(
        self, logits: Tensor, ops: Ops, *, first: int = 0
    ) -> tuple[Tensor, dict[int, Int32Array]]:
        """Draws one token for each row from `first` on, from logits [num - first, V]: (what
        `pack_draws` gives, row -> its support).

        The second holds only rows that ask for their support.
        """
        device, rows = logits.device, slice(first, self.num)
        uniform = to_device(uniforms(self.streams[rows], self.positions[rows] + 1), device)
        ids = torch.empty(len(logits), dtype=torch.int64, device=device)
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=device)
        support: dict[int, Int32Array] = {}
        if self._groups is None or self._groups[0] != first:
            self._groups = first, self._group(first, device)
        for rule, at, places in self._groups[1]:
            filters: dict[str, Tensor] = {}
            if rule.is_filtered:
                filters = {
                    "top_p": to_device(self.top_p[places], device),
                    "top_k": to_device(self.top_k[places], device),
                }
            if rule.is_constrained:
                states = [self.sequences[place].grammar for place in places]
                allowed = [state.allowed() for state in states if state is not None]
                filters["allowed"] = to_device(np.stack(allowed), device)
            ids[at], logprobs[at], kept = sample(logits[at], uniform[at], rule, ops, **filters)
            if kept is not None:
                packed = [pack_support(row) for row in kept.cpu().numpy()]
                support |= zip(places.tolist(), packed, strict=True)
        return pack_draws(ids, logprobs), support

    def constrained(self) -> list[Sequence]:
        """Requests with a grammar."""
        rules = [i for i, rule in enumerate(self._rules) if rule.is_constrained]
        rows = np.flatnonzero(np.isin(self.rule_of[: self.num], rules)) if rules else ()
        return [self.sequences[row] for row in rows]

    def _group(self, first: int, device: torch.device) -> list[Group]:
        rule_of = self.rule_of[first : self.num]
        if (rule_of == rule_of[0]).all():
            return [(self._rules[rule_of[0]], slice(None), np.arange(first, self.num))]
        places = {i: np.flatnonzero(rule_of == i) for i in np.unique(rule_of)}
        return [(self._rules[i], to_device(at, device), first + at) for i, at in places.items()]

    def record(
        self,
        ids: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        support: Mapping[int, Int32Array],
    ) -> npt.NDArray[np.bool_]:
        """Appends the tokens from `sample` to the rows. Returns which rows end with theirs: at a
        stop id, at their limit, or by a log-prob that is not a number."""
        n = self.num
        rows, counts = np.arange(n), self.counts[:n]
        self.sampled_ids[rows, counts] = ids
        self.logprobs[rows, counts] = logprobs
        for row, kept_ids in support.items():
            of_request = self.sequences[row].support
            assert of_request is not None, "only a request that asks gets its support"
            of_request.append(kept_ids)
        counts += 1
        self.positions[:n] += 1
        self.last_ids[:n] = ids
        ended = (self.stop_ids[:n] == ids[:, None]).any(1)
        ended |= counts >= self.limits[:n]
        ended |= ~(logprobs > -np.inf)
        return ended


@dataclass(slots=True, eq=False)
class Chunk:
    """Positions [start, stop) of a request's ids, to be prefilled in this step."""

    sequence: Sequence
    start: int
    stop: int
    place: slice = field(default_factory=lambda: slice(0))
    """Range of its tokens within the step."""

    @property
    def is_last(self) -> bool:
        return self.stop == self.sequence.num_to_compute


def adapters_of(rows: Rows, chunks: Seq[Chunk], *, num_rows: int) -> npt.NDArray[np.int64]:
    """[T] number of the weights of each token that `build_inputs` feeds."""
    of_rows = rows.adapters[:num_rows]
    of_chunks = [np.full(c.stop - c.start, c.sequence.weights.number) for c in chunks]
    return np.concatenate([of_rows, *of_chunks]) if of_chunks else of_rows


def build_inputs(
    rows: Rows,
    chunks: Seq[Chunk],
    cache: PagedCache,
    resident: ResidentCache | None,
    *,
    num_rows: int,
    num_heads: int | None = None,
) -> tuple[Tensor, Tensor, PagedContext, list[Chunk]]:
    """(ids, positions, context) for the decoder in a step: the first `num_rows` rows, then the
    chunks one after another, and the chunks in that order. Loads the resident cache, so pending
    copies between pages must run before.

    num_heads: of the queries, for ops that read `AttentionWork` in place of padded blocks.
    """
    n, size, device = num_rows, rows.page_size, cache.keys.device
    ids, positions = rows.last_ids[:n], rows.positions[:n]
    page, offset = np.divmod(positions, size)
    write_index = rows.pages[np.arange(n), page] * size + offset
    groups = _group_chunks(chunks, size) if num_heads is None else [[*range(len(chunks))]]
    ordered = [chunks[i] for group in groups for i in group]
    starts, stops = np.array([(c.start, c.stop) for c in ordered], np.int64).reshape(-1, 2).T
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    table = np.full((len(ordered), -(-int(stops.max(initial=0)) // size)), ZERO_PAGE, np.int64)
    if ordered:
        for row, chunk in enumerate(ordered):
            pages = chunk.sequence.held.pages[: table.shape[1]]
            table[row, : len(pages)] = pages
        for chunk, first in zip(ordered, (n + before).tolist(), strict=True):
            chunk.place = slice(first, first + chunk.stop - chunk.start)
        chunk_of = np.repeat(np.arange(len(ordered)), lengths)
        at = np.arange(len(chunk_of)) + (starts - before)[chunk_of]
        ids = np.concatenate([ids, *(c.sequence.ids[c.start : c.stop] for c in ordered)])
        positions = np.concatenate([positions, at])
        written = table[chunk_of, at // size] * size + at % size
        write_index = np.concatenate([write_index, written])
    if num_heads is None:
        layout = _Layout(size, device)
        if n:
            found = None if resident is None else _load_resident(rows, resident, device)
            layout.add_rows(rows.positions[:n], rows.pages, rows.num_pages[:n], found)
        first = 0
        for group in groups:
            part = slice(first, first := first + len(group))
            layout.add_chunks(n + before[part], lengths[part], starts[part], table[part])
        blocks, place_index = layout.finish(len(ids))
        work = None
    else:
        blocks, place_index = (), None
        of_rows = rows.pages[:n, : int(rows.num_pages[:n].max(initial=0))]
        firsts = np.arange(n) * of_rows.shape[1], np.arange(len(table)) * table.shape[1]
        work = AttentionWork.of(
            np.concatenate([np.ones(n, np.int64), lengths]),
            np.concatenate([rows.positions[:n] + 1, stops]),
            np.concatenate([firsts[0], of_rows.size + firsts[1]]),
            np.concatenate([of_rows.reshape(-1), table.reshape(-1)]) * size,
            page_size=size,
            heads=(num_heads, cache.keys.shape[1]),
            device=device,
        )
    states = None
    if cache.states is not None:
        fed = rows.positions[:n]
        states = StateStep.of(
            cache.states.states,
            np.concatenate([rows.slots[:n], [c.sequence.held.slot for c in ordered]]),
            np.concatenate([fed, starts]),
            np.concatenate([fed + 1, stops]),
            num_rows=n,
        )
    context = PagedContext(
        cache.keys, cache.values, to_device(write_index, device), blocks, place_index, work, states
    )
    ids = to_device(ids.astype(np.int64, copy=False), device)
    return ids, to_device(positions, device), context, ordered


class _Layout:
    """Builds the blocks of attention and the place of each token's output in them."""

    def __init__(self, page_size: int, device: torch.device) -> None:
        self._page_size, self._device = page_size, device
        self._blocks: list[PagedBlock] = []
        self._places: list[npt.NDArray[np.int64]] = []
        """Token of each output, per block."""
        self._is_ordered = True

    def add_rows(
        self,
        positions: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int64],
        num_pages: npt.NDArray[np.int64],
        resident: ResidentRows | None,
    ) -> None:
        """Adds one query per row. Rows of very different length go to several blocks."""
        width, n = int(num_pages.max()), len(positions)
        wasted = (width * n - int(num_pages.sum())) * self._page_size
        if wasted <= JOIN_PAIRS or resident is not None:
            tokens, queries = np.arange(n)[:, None], positions[:, None]
            self._add(tokens, queries, pages[:n, :width], is_ordered=True, resident=resident)
            return
        power = np.ceil(np.log2(num_pages)).astype(np.int64)
        for value in np.unique(power):
            rows = np.flatnonzero(power == value)
            width = int(num_pages[rows].max())
            self._add(rows[:, None], positions[rows, None], pages[rows, :width], is_ordered=False)

    def add_chunks(
        self,
        first_tokens: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        table: npt.NDArray[np.int64],
    ) -> None:
        """Adds several queries per chunk, padded to the longest by repeating the last query."""
        longest = int(lengths.max())
        steps = np.minimum(np.arange(longest), lengths[:, None] - 1)
        positions = starts[:, None] + steps
        width = int(positions.max()) // self._page_size + 1
        is_even = int(lengths.min()) == longest
        self._add(first_tokens[:, None] + steps, positions, table[:, :width], is_ordered=is_even)

    def _add(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        pages: npt.NDArray[np.int64],
        *,
        is_ordered: bool,
        resident: ResidentRows | None = None,
    ) -> None:
        last = int(positions.max())
        num_keys = min((last // KEY_QUANTUM + 1) * KEY_QUANTUM, pages.shape[1] * self._page_size)
        block = PagedBlock(
            None if is_ordered else to_device(tokens, self._device),
            to_device(positions, self._device),
            to_device(pages, self._device),
            num_keys,
            first_token=int(tokens[0, 0]),
            resident=resident,
        )
        self._blocks.append(block)
        self._places.append(tokens.reshape(-1))
        self._is_ordered &= is_ordered

    def finish(self, num_tokens: int) -> tuple[tuple[PagedBlock, ...], Tensor | None]:
        """(blocks, place_index) for `PagedContext`."""
        if self._is_ordered:
            return tuple(self._blocks), None
        # A padded place repeats its chunk's last token; the first place of a token is the real one.
        tokens = np.concatenate(self._places)
        places = np.empty(num_tokens, np.int64)
        places[tokens[::-1]] = np.arange(len(tokens))[::-1]
        return tuple(self._blocks), to_device(places, self._device)


def _group_chunks(chunks: Seq[Chunk], page_size: int) -> list[list[int]]:
    """Groups chunks into padded blocks of attention: similar ones, while padding is cheap."""
    queries = [c.stop - c.start for c in chunks]
    keys = [-(-c.stop // page_size) * page_size for c in chunks]
    groups: list[list[int]] = []
    longest = width = used = 0
    for i in sorted(range(len(chunks)), key=lambda i: (-keys[i], -queries[i])):
        used += queries[i] * keys[i]
        longest, width = max(longest, queries[i]), max(width, keys[i])
        if groups and (len(groups[-1]) + 1) * longest * width - used <= JOIN_PAIRS:
            groups[-1].append(i)
        else:
            groups.append([i])
            longest, width, used = queries[i], keys[i], queries[i] * keys[i]
    return groups


def _load_resident(
    rows: Rows, resident: ResidentCache, device: torch.device
) -> ResidentRows | None:
    """The resident cache with all rows loaded; None if it would be too large."""
    n = rows.num
    is_kept = resident.fit(n, int(rows.num_pages[:n].max()))
    if is_kept is None:
        return None
    if not is_kept:
        rows.is_loaded[:] = False
    if not rows.is_loaded[:n].all():
        missing = np.flatnonzero(~rows.is_loaded[:n])
        width = int(rows.num_pages[missing].max())
        resident.load(missing, rows.pages[missing, :width])
        rows.is_loaded[missing] = True
    places = resident.first_places[:n] + rows.positions[:n, None]
    return ResidentRows(
        resident.keys, resident.values, to_device(places.reshape(-1), device), resident.memo()
    )
