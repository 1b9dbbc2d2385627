"""The running rows of the engine, and the index tensors of one step.

State that changes with every token is held in arrays over all rows, so that a step has no loop over
requests. Code runs per request only when it arrives, ends, or needs another page.

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
from lockstep.engines.embedded.kv_cache import ZERO_PAGE, PagedCache, PageLease, ResidentCache
from lockstep.engines.grammar import GrammarState
from lockstep.engines.ledger import Entry
from lockstep.engines.sampling import DrawRule, DrawTable, stream_of
from lockstep.ops.base import Ops
from lockstep.ops.chunks import StateStep, fed_positions
from lockstep.ops.context import PagedContext, ResidentRows
from lockstep.ops.transfer import to_device
from lockstep.types import Float32Array, Int32Array, Routes

Tensor = torch.Tensor

JOIN_PAIRS = 16384
"""Query-key pairs that one block of attention may waste on padding before it is split in two: about
the cost of another block's calls on a CPU."""


def pack_draws(ids: Tensor, logprobs: Tensor) -> Tensor:
    """[2, B] int32: ids, and the bits of the log-probs; so that one copy reads both."""
    return torch.stack([ids.int(), logprobs.view(torch.int32)])


class PendingDraws:
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


@dataclass(slots=True, eq=False, kw_only=True)
class Scoring:
    """A text whose log-probs are wanted."""

    first: int
    """First id whose log-prob is wanted; keys before its predictor may be reused."""
    logprobs: Float32Array
    future: asyncio.Future[Scores]


@dataclass(slots=True, eq=False)
class WeightsKey:
    """The weights that requests are sampled by: the base model, or it with an adapter."""

    number: int
    """0 is the base. An adapter gets another number whenever its tensors are replaced."""
    version: int
    adapter: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(Entry):
    """One request on its way through the engine."""

    weights: WeightsKey
    order: int
    """Number in the order of arrival."""
    limit: int
    """Most tokens to sample, limited by the end of the context too."""
    ids: Int32Array
    """Ids to prefill: the prompt, and after a preemption the sampled ids too."""
    scoring: Scoring | None = None
    """Set for a text that is scored and samples nothing."""
    lease: PageLease | None = None
    row: int = -1
    """Row in `BatchRows`; -1 while it waits or is prefilled."""
    num_computed: int = 0
    sampled: tuple[Int32Array, Float32Array] = np.empty(0, np.int32), np.empty(0, np.float32)
    """(ids, log-probs) of a preempted request. A running request has its own in `BatchRows`."""
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
    def held(self) -> PageLease:
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


_MOVED = (
    *("last_ids", "positions", "num_pages", "counts", "limits", "streams", "top_p", "top_k"),
    *("stop_ids", "rule_of", "adapters", "slots", "places"),
)
"""Arrays of `BatchRows` whose entry moves with the row as it is."""


class BatchRows(DrawTable):
    """State of the requests that sample a token in every step: one entry per row in each array.

    The next step feeds `last_ids` at `positions`, and samples the token of the next position.
    """

    def __init__(self, capacity: int, max_context: int, page_size: int) -> None:
        super().__init__(
            rules=[],
            rule_of=np.zeros(capacity, np.int64),
            streams=np.zeros(capacity, np.uint64),
            top_p=np.ones(capacity, np.float32),
            top_k=np.zeros(capacity, np.int64),
        )
        self.num = 0
        self.page_size = page_size
        self.sequences: list[Sequence] = []
        self.last_ids = np.zeros(capacity, np.int64)
        self.positions = np.zeros(capacity, np.int64)
        self.pages = np.full((capacity, -(-max_context // page_size)), ZERO_PAGE, np.int64)
        self.num_pages = np.zeros(capacity, np.int64)
        self.counts = np.zeros(capacity, np.int64)
        self.limits = np.zeros(capacity, np.int64)
        self.stop_ids = np.full((capacity, 4), -1, np.int64)
        self.adapters = np.zeros(capacity, np.int64)
        """Number of each row's `WeightsKey`."""
        self.slots = np.zeros(capacity, np.int64)
        """Slot of each row's states of linear attention."""
        self.places = np.zeros(capacity, np.int64)
        """Place of each row in the batch that was fed last."""
        self.is_loaded = np.zeros(capacity, np.bool_)
        """True if the row is in the resident cache."""
        # As long as the longest possible reply; untouched memory is not taken from the system.
        self.sampled_ids = np.empty((capacity, max_context), np.int32)
        self.logprobs = np.empty((capacity, max_context), np.float32)
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
        rule = DrawRule(
            sampling.temperature,
            sampling.is_filtered and sampling.temperature > 0,
            sampling.distribution,
            sequence.support is not None,
            sequence.grammar is not None,
        )
        if rule not in self.rules:
            self.rules.append(rule)
        self.rule_of[row] = self.rules.index(rule)
        self.adapters[row] = sequence.weights.number
        self.slots[row] = sequence.held.slot
        self.is_loaded[row] = False
        ids, logprobs = sequence.sampled
        self.counts[row] = count = len(ids)
        self.sampled_ids[row, :count], self.logprobs[row, :count] = ids, logprobs
        sequence.row = row
        self.sequences.append(sequence)
        self.num += 1
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
            for name in _MOVED:
                array = getattr(self, name)
                array[row] = array[last]
            self.is_loaded[row] = False
            self.sequences[row] = self.sequences[last]
            self.sequences[row].row = row
        self.pages[last, : self.num_pages[last]] = ZERO_PAGE
        self.sequences.pop()
        self.num = last
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

    def shared_rule(self) -> DrawRule | None:
        """The rule that all rows draw by; None if rules differ."""
        rule_of = self.rule_of[: self.num]
        return self.rules[rule_of[0]] if (rule_of == rule_of[0]).all() else None

    def sample(
        self, logits: Tensor, ops: Ops, *, first: int = 0
    ) -> tuple[Tensor, dict[int, Int32Array]]:
        """Draws one token for each row from `first` on, from logits [num - first, V]: (what
        `pack_draws` gives, row -> its support).

        The second holds only rows that ask for their support.
        """
        rows = np.arange(first, self.num)
        ids, logprobs, support = self.draw(logits, rows, self.positions[rows] + 1, ops)
        return pack_draws(ids, logprobs), support

    def text(self, row: int) -> Int32Array:
        """Ids of the prompt, and those sampled since."""
        ids, count = self.sequences[row].ids, int(self.counts[row])
        num_new = int(self.positions[row]) + 1 - len(ids)
        return np.concatenate([ids, self.sampled_ids[row, count - num_new : count]])

    def allowed(self, row: int) -> npt.NDArray[np.bool_]:
        grammar = self.sequences[row].grammar
        assert grammar is not None, "a constrained row has one"
        return grammar.allowed()

    def constrained(self) -> list[Sequence]:
        """Requests with a grammar."""
        rules = [i for i, rule in enumerate(self.rules) if rule.is_constrained]
        rows = np.flatnonzero(np.isin(self.rule_of[: self.num], rules)) if rules else ()
        return [self.sequences[row] for row in rows]

    def record(
        self,
        ids: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        support: Mapping[int, Int32Array],
        rows: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """Appends a token to each of `rows`. Returns which rows end with theirs: at a stop id, at
        their limit, or by a log-prob that is not a number."""
        self.sampled_ids[rows, self.counts[rows]] = ids
        self.logprobs[rows, self.counts[rows]] = logprobs
        for row, kept_ids in support.items():
            of_request = self.sequences[row].support
            assert of_request is not None, "only a request that asks gets its support"
            of_request.append(kept_ids)
        self.counts[rows] += 1
        self.positions[rows] += 1
        self.last_ids[rows] = ids
        ended = (self.stop_ids[rows] == ids[:, None]).any(1)
        ended |= self.counts[rows] >= self.limits[rows]
        ended |= ~(logprobs > -np.inf)
        return ended


@dataclass(slots=True, eq=False)
class PrefillChunk:
    """Positions [start, stop) of a request's ids, to be prefilled in this step."""

    sequence: Sequence
    start: int
    stop: int
    place: slice = field(default_factory=lambda: slice(0))
    """Range of its tokens within the step."""

    @property
    def ids(self) -> Int32Array:
        return self.sequence.ids[self.start : self.stop]

    @property
    def is_last(self) -> bool:
        return self.stop == self.sequence.num_to_compute


def adapters_of(
    rows: BatchRows, chunks: Seq[PrefillChunk], *, num_rows: int
) -> npt.NDArray[np.int64]:
    """[T] number of the weights of each token that `build_inputs` feeds."""
    of_rows = rows.adapters[:num_rows]
    of_chunks = [np.full(c.stop - c.start, c.sequence.weights.number) for c in chunks]
    return np.concatenate([of_rows, *of_chunks]) if of_chunks else of_rows


def build_inputs(
    rows: BatchRows,
    chunks: Seq[PrefillChunk],
    cache: PagedCache,
    resident: ResidentCache | None,
    *,
    num_rows: int,
    num_heads: int | None = None,
) -> tuple[Tensor, Tensor, PagedContext, list[PrefillChunk]]:
    """(ids, positions, context) for the decoder in a step: the first `num_rows` rows, then the
    chunks one after another, and the chunks in that order. Loads the resident cache, so pending
    copies between pages must run before.

    num_heads: of the queries, for ops that read `AttentionWork` in place of padded blocks.
    """
    n, size, device = num_rows, rows.page_size, cache.keys.device
    groups = _group_chunks(chunks, size) if num_heads is None else [[*range(len(chunks))]]
    ordered = [chunks[i] for group in groups for i in group]
    of_chunks = np.array([(c.start, c.stop, c.sequence.held.slot) for c in ordered], np.int64)
    of_rows = np.stack([rows.positions[:n], rows.positions[:n] + 1, rows.slots[:n]], 1)
    starts, stops, slots = np.concatenate([of_rows, of_chunks.reshape(-1, 3)]).T
    lengths = stops - starts
    firsts = np.cumsum(lengths) - lengths
    for chunk, first in zip(ordered, firsts[n:].tolist(), strict=True):
        chunk.place = slice(first, first + chunk.stop - chunk.start)
    tables = np.full((len(starts), -(-int(stops.max()) // size)), ZERO_PAGE, np.int64)
    tables[:n] = rows.pages[:n, : tables.shape[1]]
    for row, chunk in enumerate(ordered, n):
        pages = chunk.sequence.held.pages[: tables.shape[1]]
        tables[row, : len(pages)] = pages
    _, positions = fed_positions(starts, lengths)
    ids = np.concatenate([rows.last_ids[:n], *(c.ids for c in ordered)])
    found, parts, states = None, None, None
    if num_heads is None:
        found = _load_resident(rows, resident, device) if n and resident is not None else None
        parts = _group_rows(stops[:n], size, is_whole=found is not None)
        if groups:
            ends = np.cumsum([len(group) for group in groups])
            parts += np.split(np.arange(n, len(starts)), ends[:-1])
    if cache.states is not None:
        states = StateStep.of(cache.states.states, slots, starts, stops, num_rows=n)
    context = PagedContext.of(
        cache.keys,
        cache.values,
        tables,
        starts,
        stops,
        num_heads=num_heads,
        groups=parts,
        resident=found,
        states=states,
    )
    return to_device(ids, device), to_device(positions, device), context, ordered


def _group_rows(
    stops: npt.NDArray[np.int64], page_size: int, *, is_whole: bool
) -> list[npt.NDArray[np.int64]]:
    """Groups rows into blocks of attention: one, or several if their lengths differ much."""
    if not len(stops):
        return []
    num_pages = -(-stops // page_size)
    wasted = (int(num_pages.max()) * len(stops) - int(num_pages.sum())) * page_size
    if is_whole or wasted <= JOIN_PAIRS:
        return [np.arange(len(stops))]
    power = np.ceil(np.log2(num_pages)).astype(np.int64)
    return [np.flatnonzero(power == value) for value in np.unique(power)]


def _group_chunks(chunks: Seq[PrefillChunk], page_size: int) -> list[list[int]]:
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
    rows: BatchRows, resident: ResidentCache, device: torch.device
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
