"""Scheduling: admission, shared prefixes, chunks of prefill, preemption.

Requests are ordered by priority, then by arrival. A request that runs out of pages takes them from
the last one in that order, which is computed again later. The first in the order can take all
pages, and any request fits into all pages, so there is always progress.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.batch import BatchRows, PrefillChunk, Sequence
from lockstep.engines.embedded.kv_cache import PagedCache
from lockstep.ops.contract import CHUNK
from lockstep.ops.packed import num_equal


class Scheduler:
    """Waiting, prefilling and running requests over one cache."""

    def __init__(
        self, config: EmbeddedConfig, rows: BatchRows, cache: PagedCache, stats: Counter[str]
    ) -> None:
        self.rows, self.cache, self.stats = rows, cache, stats
        self.max_sequences, self.max_tokens = config.max_num_sequences, config.max_step_tokens
        self._waiting: list[Sequence] = []
        """Waiting requests, by rank."""
        self.prefilling: list[Sequence] = []
        self._is_settled = False
        """True if no request has come or gone since the last plan."""

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return self.rows.num + len(self.prefilling)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self.num_running > 0

    def sequences(self) -> list[Sequence]:
        """Every request, running ones first."""
        return [*self.rows.sequences, *self.prefilling, *self._waiting]

    def add(self, sequence: Sequence) -> None:
        """Queues a request."""
        self._is_settled = False
        insort(self._waiting, sequence, key=lambda waiting: waiting.rank)

    def remove(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Removes a request in any state. keep: its keys and values stay in the cache."""
        if sequence.lease is not None:
            self._vacate(sequence, keep=keep)
        elif sequence in self._waiting:  # a score that was given up may have ended
            self._waiting.remove(sequence)

    def preempt(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Takes a request's pages and queues it. Later it is computed again from its longest cached
        prefix."""
        rows, row = self.rows, sequence.row
        if row >= 0:
            count = int(rows.counts[row])
            sampled = rows.sampled_ids[row, :count], rows.logprobs[row, :count]
            sequence.sampled = sampled[0].copy(), sampled[1].copy()
            if sequence.routes is not None and count > sequence.num_sent:
                # Save the routes that were sampled with; computed again, some may differ.
                stop = int(rows.positions[row])
                routes = self.cache.read_routes(sequence.held.pages, sequence.num_routed, stop)
                sequence.routes.append(routes)
                sequence.num_routed = stop
        self._vacate(sequence, keep=keep)
        self.add(sequence)

    def _vacate(self, sequence: Sequence, *, keep: bool) -> None:
        lease, row = sequence.held, sequence.row
        self._is_settled = False
        if row >= 0:
            rows = self.rows
            sequence.ids = rows.text(row)
            computed = int(rows.positions[row])
            rows.remove(row)
        else:
            self.prefilling.remove(sequence)
            computed = sequence.num_computed
        self.cache.close(lease, sequence.ids[:computed], keep=keep and not sequence.scoring)
        sequence.lease = None
        sequence.num_computed = 0

    # -- one step -----------------------------------------------------------------------------

    def plan(self) -> list[PrefillChunk]:
        """Allocates pages, admits requests, and returns this step's prefill chunks."""
        self._give_pages()
        self._admit()
        budget = self.max_tokens - self.rows.num
        chunks: list[PrefillChunk] = []
        for sequence in self.prefilling:
            if budget <= 0:
                break
            begin, whole = sequence.num_computed, sequence.num_to_compute
            stop = begin + budget
            if self.cache.states is not None and (stop < whole or whole % CHUNK == 0):
                # States are known at borders alone, where the next part begins. Others with the
                # same prompt go on from the last one before its last token, which each must feed.
                stop = max(min(stop, whole - 1) // CHUNK * CHUNK, begin + CHUNK)
            stop = min(stop, whole)
            chunks.append(PrefillChunk(sequence, sequence.num_computed, stop))
            budget -= stop - sequence.num_computed
        self._is_settled = True
        return chunks

    def plan_ahead(self) -> bool:
        """Allocates pages for the step after the running step, whose tokens are not known yet.
        False if that step may have other rows: a request waits or is prefilled, a row is at its
        limit, or pages are short."""
        rows, n = self.rows, self.rows.num
        if self.prefilling or (self._waiting and not self._is_settled):
            return False
        if (rows.counts[:n] + 1 >= rows.limits[:n]).any():
            return False
        needy = rows.full_rows(ahead=1)
        if len(needy) > self.cache.num_available:
            return False
        for sequence in needy:
            page = self.cache.grow(sequence.held)
            assert page is not None, "pages were counted"
            rows.add_page(sequence.row, page)
        return True

    def _give_pages(self) -> None:
        needy = self.rows.full_rows()
        for sequence in sorted(needy, key=lambda s: s.rank):
            while sequence.row >= 0:
                if (page := self.cache.grow(sequence.held)) is not None:
                    self.rows.add_page(sequence.row, page)
                    break
                self.preempt(self._last_in_order())
                self.stats["preemptions"] += 1

    def _last_in_order(self) -> Sequence:
        return max([*self.rows.sequences, *self.prefilling], key=lambda s: s.rank)

    def _admit(self) -> None:
        at = 0
        pending = sum(s.num_to_compute - s.num_computed for s in self.prefilling)
        while at < len(self._waiting) and pending + self.rows.num < self.max_tokens:
            sequence = self._waiting[at]
            if self._awaits_prefix(sequence):
                at += 1
                continue
            lease = None
            if self.num_running < self.max_sequences:
                reuse = sequence.scoring.first if sequence.scoring else len(sequence.ids)
                lease = self.cache.open(
                    sequence.ids[: sequence.num_to_compute],
                    reuse=reuse - 1,
                    root=sequence.weights.number,
                )
            if lease is None:
                if not self.num_running:
                    break
                victim = self._last_in_order()
                if victim.request.priority <= sequence.request.priority:
                    break
                self.preempt(victim)
                self.stats["preemptions"] += 1
                continue
            del self._waiting[at]
            sequence.lease = lease
            sequence.num_computed = lease.num_cached
            self.stats["cached_tokens"] += lease.num_cached
            if sequence.num_cached < 0:
                sequence.num_cached = lease.num_cached
            remaining = sequence.num_to_compute - lease.num_cached
            if remaining == 1 and not sequence.scoring:
                self.stats["prefilled_tokens"] += 1
                self.rows.append(sequence)  # its one token is fed as a sampled one would be
            else:
                self.prefilling.append(sequence)
                pending += remaining

    def _awaits_prefix(self, sequence: Sequence) -> bool:
        """True if a request in prefill computes at least half of this request's tokens. Then
        waiting for it saves more than it costs."""
        if not self.cache.is_caching or sequence.scoring:
            return False
        ids, weights = sequence.ids, sequence.weights
        others = [
            other.ids for other in self.prefilling if not other.scoring and other.weights is weights
        ]
        num_shared = max((num_equal(ids, other) for other in others), default=0)
        if 2 * num_shared < len(ids):
            return False
        known = self.cache.num_known(ids[:-1], root=weights.number)
        needed = known + -(-(len(ids) - 1 - known) // 2)
        return known < needed <= num_shared
