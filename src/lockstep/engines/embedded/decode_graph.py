"""Decode as a CUDA graph: one launch per step in place of a few hundred.

A graph is captured once for each size of batch and way of drawing, and replayed over tensors at
fixed places: the inputs of a step are written to pinned memory and sent in one copy, and the draws
are read in one. Weights are read in place, so weights that are updated in place need no capture.
Prefill runs eagerly beside it. With batch-invariant ops, padding a batch to a graph's size changes
no bit.

# B rows of a graph  C most rows  D model width
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.engines.embedded.batch import BatchRows, pack_draws
from lockstep.engines.embedded.kv_cache import ZERO_PAGE, PagedCache
from lockstep.engines.sampling import DrawRule, sample, uniforms
from lockstep.models.adapter_rows import AdapterRows, AdaptersOfShape, Groups, sort_rows
from lockstep.models.adapters import AdapterStacks, group_of
from lockstep.models.decoder import Decoder
from lockstep.models.moe import Routing
from lockstep.ops.chunks import StateStep
from lockstep.ops.context import (
    SPLIT_KEYS,
    VALUE_PARTS,
    AttentionWork,
    PagedContext,
    decode_capacity,
    plan_work,
    programs_of,
)
from lockstep.ops.contract import CHUNK

Tensor = torch.Tensor

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Records the launches of a function of no arguments, and returns what sends them again."""

MAX_RULES = 4
"""Number of drawing rules that are captured, such as training's and evaluation's. Rows with further
rules share the graph that draws nothing."""

ALIGNMENT = 256  # least bytes between the starts of two inputs; torch's allocator aligns so too


class CudaGraphs:
    """The `Capture` of a GPU. Its graphs share one pool of memory, since one runs at a time; the
    pool ends with the last of them."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, body: Callable[[], None]) -> Replay:
        # The first run compiles kernels and fills caches, which a capture may not do.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a trainer's, may go on to use the GPU.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            body()
        return graph.replay


def graph_size(num_rows: int, most: int) -> int:
    """Rows of the graph for a batch: 1, 2, 4, 8, 16, 24 and so on in eights, and `most`.

    >>> [graph_size(n, 20) for n in (1, 3, 8, 9, 17)]
    [1, 4, 8, 16, 20]
    """
    size = 1 << (num_rows - 1).bit_length() if num_rows <= 8 else -(-num_rows // 8) * 8
    return min(size, most)


class Inputs:
    """Arrays on the host and tensors on the device in one layout. One copy sends the first ones."""

    def __init__(
        self, fields: dict[str, tuple[type[np.generic], int]], device: torch.device
    ) -> None:
        """fields: dtype and length of each."""
        starts, stop = {}, 0
        for name, (dtype, length) in fields.items():
            starts[name] = stop
            stop += -(-np.dtype(dtype).itemsize * length // ALIGNMENT) * ALIGNMENT
        memory = np.zeros(stop, np.uint8)
        self._pinned = torch.from_numpy(memory)
        if device.type == "cuda":
            self._pinned = self._pinned.pin_memory()
            memory = self._pinned.numpy()
        self._sent = torch.zeros(stop, dtype=torch.uint8, device=device)
        self._is_sent = torch.cuda.Event() if device.type == "cuda" else None
        self._stops: dict[str, int] = {}
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.device: dict[str, Tensor] = {}
        for name, (dtype, length) in fields.items():
            stop = self._stops[name] = starts[name] + np.dtype(dtype).itemsize * length
            self.host[name] = memory[starts[name] : stop].view(dtype)
            of_dtype = getattr(torch, np.dtype(dtype).name)
            self.device[name] = self._sent[starts[name] : stop].view(of_dtype)

    def send(self, last: str, *, num_unused: int = 0) -> None:
        """Sends the fields up to `last`, without the end of that one."""
        stop = self._stops[last] - num_unused * self.host[last].itemsize
        self._sent[:stop].copy_(self._pinned[:stop], non_blocking=True)
        if self._is_sent is not None:
            self._is_sent.record()

    def wait(self) -> None:
        """Waits until the host's arrays may be written again."""
        if self._is_sent is not None:
            self._is_sent.synchronize()


class DecodeGraphs:
    """The graphs of an engine, captured when a batch first needs them.

    Rows that draw by one rule (temperature, filters) draw inside the graph. Where the rules differ,
    or draw from a grammar, or return their support, the graph ends at the hidden states, and the
    head and the draws run eagerly. Rows with adapters of their own have graphs of their own, which
    read `adapters` and are captured again when one is added or dropped.
    """

    def __init__(
        self,
        rows: BatchRows,
        cache: PagedCache,
        make_capture: Callable[[], Capture],
        adapters: AdapterStacks | None = None,
    ) -> None:
        self._rows, self._cache, self._make_capture = rows, cache, make_capture
        self._adapters = adapters or AdapterStacks()
        self._read: tuple[object, ...] = ()
        """The objects that the graphs were captured over."""
        self._replays: dict[tuple[int, DrawRule | None], Replay] = {}
        self._rules: list[DrawRule] = []
        self._num_changes = -1
        """State of the rows that was sent."""

    def drop(self) -> None:
        """Frees the memory of all graphs."""
        self._replays.clear()
        self._rules.clear()
        self._read, self._shapes = (), []

    def run(
        self, model: Decoder, *, drawn_ids: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Feeds the token of every row: (draws [2, B] of the rows and of what fills up the graph,
        as `pack_draws` gives them; None), or where the rows do not draw inside (None, hidden states
        [rows, D]). Both are overwritten by the next call.

        drawn_ids: [rows] int32 on the device, for a step ahead of the rows' state: they were drawn,
        the host has not read them, and these ids are fed.
        """
        rows, cache = self._rows, self._cache
        read = (model, model.ops, model.lora, cache.keys, cache.routes)
        read += tuple(self._adapters.allocations())
        if len(read) != len(self._read) or any(map(operator.is_not, read, self._read)):
            self.drop()
            self._read = read
            self._make_tensors(model)
        size, rule = graph_size(rows.num, len(rows.last_ids)), self.captured_rule()
        self._send(size, ahead=int(drawn_ids is not None))
        if drawn_ids is not None:
            self._inputs.device["ids"][: rows.num].copy_(drawn_ids)
        if (key := (size, rule)) not in self._replays:
            self._replays[key] = self._capture(partial(self._body, model, *key))
        self._replays[key]()
        return (None, self._hidden[: rows.num]) if rule is None else (self._draws_of(size), None)

    def _make_tensors(self, model: Decoder) -> None:
        """Makes the tensors that the graphs read and write, other than weights and caches."""
        self._capture = self._make_capture()
        rows, device, shape = self._rows, model.embedding.device, model.config
        C, num_pages = rows.pages.shape
        self._heads = (shape.num_heads, shape.num_kv_heads)
        self._num_programs = programs_of(device)
        num_items, num_slots = self._capacity(C)
        self._shapes = self._adapters.of_every_shape(model)
        of_adapters: dict[str, tuple[type[np.generic], int]] = {}
        for i, (numbers, _) in enumerate(self._shapes):
            of_adapters |= {f"source {i}": (np.int64, C), f"places {i}": (np.int64, C)}
            of_adapters |= {f"counts {i}": (np.int32, len(numbers)), f"member {i}": (np.bool_, C)}
        fields: dict[str, tuple[type[np.generic], int]] = {
            "ids": (np.int64, C),
            "positions": (np.int64, C),
            "write_index": (np.int64, C),
            "uniform": (np.float32, C),
            "lengths": (np.int32, C),
            # sent when the rows change
            "slots": (np.int64, C),
            "top_k": (np.int64, C),
            "top_p": (np.float32, C),
            "page_starts": (np.int32, C),
            **of_adapters,
            "num_items": (np.int32, 1),
            "items": (np.int32, num_items * 4),
            "pages": (np.int32, 1 + C * num_pages),
        }
        self._inputs, self._num_changes = Inputs(fields, device), -1
        self._query_starts = torch.arange(C + 1, dtype=torch.int32, device=device)
        shape_of_counters = (num_slots, self._heads[1], VALUE_PARTS)
        self._counters = torch.zeros(shape_of_counters, dtype=torch.int32, device=device)
        self._draws = torch.zeros(2 * C, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(C, shape.hidden_size, dtype=model.embedding.dtype, device=device)

    def _capacity(self, size: int) -> tuple[int, int]:
        max_keys = self._rows.pages.shape[1] * self._rows.page_size
        return decode_capacity(size, max_keys, heads=self._heads, num_programs=self._num_programs)

    def captured_rule(self) -> DrawRule | None:
        """The rule that all rows draw by, if a graph can draw by it."""
        rule = self._rows.shared_rule()
        if rule is None or rule.records_support or rule.is_constrained:
            return None
        if rule not in self._rules and len(self._rules) < MAX_RULES:
            self._rules.append(rule)
        return rule if rule in self._rules else None

    def _send(self, size: int, *, ahead: int) -> None:
        """Sends the inputs of the next step, or of the one `ahead` of it. Rows past the last one
        feed id 0 at position 0, and write to a page and a slot that no other row reads."""
        rows, host, n = self._rows, self._inputs.host, self._rows.num
        at, page_size = rows.positions[:n] + ahead, rows.page_size
        self._inputs.wait()
        page, offset = np.divmod(at, page_size)
        unread = ZERO_PAGE * page_size
        _fill(host["ids"], rows.last_ids[:n], 0, size)
        _fill(host["positions"], at, 0, size)
        written = rows.pages[np.arange(n), page] * page_size + offset
        _fill(host["write_index"], written, unread, size)
        _fill(host["uniform"], uniforms(rows.streams[:n], at + 1), 0, size)
        _fill(host["lengths"], at + 1, 1, size)
        if (states := self._cache.states) is not None:
            _fill(host["slots"], rows.slots[:n], states.unread_slot, size)
        if self._num_changes == rows.num_changes and (at % SPLIT_KEYS).all():
            self._inputs.send("lengths")
            return
        self._num_changes = rows.num_changes
        _fill(host["top_k"], rows.top_k[:n], 0, size)
        _fill(host["top_p"], rows.top_p[:n], 1, size)
        for i, (numbers, _) in enumerate(self._shapes):
            group_n = group_of(rows.adapters[:n], numbers)
            source, counts, places = sort_rows(group_n, len(numbers))
            _fill(host[f"source {i}"], source, 0, size)
            _fill(host[f"places {i}"], places, 0, size)
            _fill(host[f"member {i}"], group_n >= 0, 0, size)
            host[f"counts {i}"][:] = counts
        items, _ = plan_work(
            np.ones(size, np.int64),
            host["lengths"][:size].astype(np.int64),
            heads=self._heads,
            num_programs=self._num_programs,
        )
        host["num_items"][0] = len(items)
        host["items"][: items.size] = items.reshape(-1)
        pages = rows.pages[:n, : int(rows.num_pages[:n].max())]
        host["pages"][0] = unread
        host["pages"][1 : 1 + pages.size] = pages.reshape(-1) * page_size
        _fill(host["page_starts"], 1 + np.arange(n) * pages.shape[1], 0, size)
        self._inputs.send("pages", num_unused=len(host["pages"]) - 1 - pages.size)

    def _body(self, model: Decoder, size: int, rule: DrawRule | None) -> None:
        """One step of the first `size` rows, over the static tensors."""
        cache, sent = self._cache, self._inputs.device
        num_items, num_slots = self._capacity(size)
        work = AttentionWork(
            query_starts=self._query_starts[: size + 1],
            lengths=sent["lengths"][:size],
            page_starts=sent["page_starts"][:size],
            pages=sent["pages"],
            page_size=self._rows.page_size,
            items=sent["items"].view(-1, 4)[:num_items],
            num_items=sent["num_items"],
            counters=self._counters[:num_slots],
            max_queries=1,
            max_keys=self._rows.pages.shape[1] * self._rows.page_size,
            num_programs=min(num_items, self._num_programs),
        )
        write_index = sent["write_index"][:size]
        states = None
        if (held := cache.states) is not None:
            slots, offsets = sent["slots"][:size], sent["positions"][:size] % CHUNK
            states = StateStep.of_rows(held.states, slots, offsets, held.unread_slot)
        context = PagedContext(cache.keys, cache.values, write_index, work=work, states=states)
        routing = None if cache.routes is None else Routing()
        adapters = self._adapter_rows(size) if self._shapes else None
        hidden = model(sent["ids"][:size], sent["positions"][:size], context, routing, adapters)
        if routing is not None:
            cache.write_routes(write_index, routing.stacked())
        if rule is None:
            self._hidden[:size] = hidden
            return
        filters = {name: sent[name][:size] for name in ("top_p", "top_k") if rule.is_filtered}
        drawn = sample(model.logits(hidden), sent["uniform"][:size], rule, model.ops, **filters)
        self._draws_of(size).copy_(pack_draws(*drawn[:2]))

    def _adapter_rows(self, size: int) -> AdapterRows:
        sent, shapes = self._inputs.device, []
        for i, (numbers, factors) in enumerate(self._shapes):
            source, places = (sent[f"{name} {i}"][:size] for name in ("source", "places"))
            groups = Groups(source, sent[f"counts {i}"], places, sent[f"member {i}"][:size, None])
            shapes.append(AdaptersOfShape(np.empty(0, np.int64), len(numbers), groups, factors))
        return AdapterRows(shapes, self._query_starts.device)

    def _draws_of(self, size: int) -> Tensor:
        return self._draws[: 2 * size].view(2, size)


def _fill(field: npt.NDArray[Any], values: npt.NDArray[Any], filler: int, size: int) -> None:
    """Writes the values of the rows, and the filler for the graph's padding rows."""
    field[: len(values)] = values
    field[len(values) : size] = filler
