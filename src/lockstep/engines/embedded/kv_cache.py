"""Keys and values in pages, shared between requests with a common prefix.

A page holds `page_size` consecutive positions of one path of tokens. Pages with known content form
a trie, one node per page. A request walks it with its prompt, uses full pages in place, and
continues in a partly filled last page if nobody else does, or in a copy of it. So reuse is exact
to the token, although memory is allocated in pages.

Cost: a lookup is O(prompt) plus, in the page where paths diverge, O(paths that diverge there);
taking and freeing a page is O(1); nothing here runs once per sampled token.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.state_cache import StateCache
from lockstep.launch.gpu import KeptAddresses
from lockstep.models.config import ModelConfig
from lockstep.ops.context import KEY_BLOCK, planes_of
from lockstep.ops.contract import CHUNK
from lockstep.ops.transfer import to_device
from lockstep.types import Routes, route_dtype

Ids = npt.NDArray[np.int32]

ZERO_PAGE = 0
"""Never allocated. Fills the unused places of page tables. Ops that read these places find zeros
there: masked keys and values must be finite, whatever other requests computed. With ops that do
not, rows that fill up the batch of a graph write to it."""
_ALIGNMENT = 64
"""Bytes; torch's own on a CPU. Kernels may add up in another order where a tensor is unaligned."""


@dataclass(slots=True, eq=False)
class PageNode:
    """A page of the trie. Its positions follow its parent's positions; the parent of a path's first
    page is a root."""

    page: int
    parent: PageNode | int
    epoch: int
    length: int = 0
    """Computed positions of the page."""
    borders: tuple[int, ...] = ()
    """Offsets in the page where a state of linear attention may be kept."""
    num_users: int = 0
    """Leases that hold this page or a page below it."""


@dataclass(slots=True, eq=False)
class PageLease:
    """The pages that one request holds, in the order of its positions."""

    epoch: int
    root: int = 0
    pages: list[int] = field(default_factory=list)
    nodes: list[PageNode] = field(default_factory=list)
    """Trie nodes of the pages entered so far. A node with another page means that another request
    computed the same tokens first; this lease's page then stays private."""
    num_cached: int = 0
    """Positions that were computed before."""
    num_committed: int = 0
    """Positions entered into the trie."""
    slot: int = 0
    """Slot of its states, in a model with linear attention."""


def zeros_on_demand(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeros, aligned as torch aligns. On a CPU the system gives each page of them when it is first
    written, so a large cache takes the memory of the tokens that it has held."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[begin : begin + size]).view(dtype).view(shape)


class ResidentCache:
    """A contiguous copy of the running rows' keys and values: see `ResidentRows`.

    Everything in it is in the pages too: a row that is not loaded is copied from its pages before
    the next step. Not used where it would take more than `max_tokens` places.
    """

    def __init__(self, cache: PagedCache, *, max_tokens: int) -> None:
        self._cache, self._max_tokens = cache, max_tokens
        self.first_places = np.zeros((0, 0), np.int64)
        """[num_rows, G]: first place of each row's keys, by head, in a layer."""
        self.drop()

    def fit(self, num_rows: int, num_pages: int) -> bool | None:
        """Makes room for this many rows and pages per row. Returns whether loaded rows are still
        loaded; None if the limit does not allow it."""
        size = self._cache.page_size
        length = math.ceil(num_pages * size / KEY_BLOCK) * KEY_BLOCK
        if num_rows <= self.num_rows and length <= self.length:
            return True
        num_rows = max(self.num_rows, 1 << (num_rows - 1).bit_length())
        length = max(self.length, KEY_BLOCK << (length // KEY_BLOCK - 1).bit_length())
        if num_rows * length > self._max_tokens:
            self.drop()
            return None
        paged, has_values = self._cache.keys, self._cache.has_values
        layers, groups, _, _, width = paged.shape
        like = (layers, num_rows, groups, length, width), paged.dtype, paged.device
        self.keys = zeros_on_demand(*like)
        self.values = zeros_on_demand(*like) if has_values else self.keys
        self.num_rows, self.length = num_rows, length
        self.first_places = np.arange(num_rows * groups).reshape(num_rows, groups) * length
        self._memo = {}
        return False

    def memo(self) -> dict[Any, Any]:
        """See `ResidentRows.memo`; emptied before it grows with the shapes that came by."""
        if len(self._memo) > 512:
            self._memo.clear()
        return self._memo

    def load(self, rows: npt.NDArray[np.int64], pages: npt.NDArray[np.int64]) -> None:
        """Copies pages [rows, P] to the rows."""
        for row, index in zip(rows.tolist(), to_device(pages, self.keys.device), strict=True):
            for paged, resident in zip(planes_of(self._cache), planes_of(self), strict=True):
                read = paged.index_select(2, index).flatten(2, 3)
                resident[:, row, :, : read.shape[2]] = read

    def drop(self) -> None:
        """Frees the memory."""
        self.num_rows = self.length = 0
        self._memo: dict[Any, Any] = {}
        self.keys = self.values = torch.empty(0)


class PagedCache:
    """Memory for keys and values, the trie over it, and its least-recently-used order."""

    def __init__(
        self,
        model: ModelConfig,
        config: EmbeddedConfig,
        *,
        like: torch.Tensor,
        addresses: KeptAddresses | None = None,
    ) -> None:
        """like: a tensor with the keys' dtype and device. addresses: keeps the tensors' addresses
        while their memory is free; without it they are allocated anew."""
        self.has_values = model.latent is None
        """False where keys hold the values; `values` is then `keys`."""
        self.states = None if model.linear is None else StateCache(model.linear, config, like=like)
        """None without linear attention. With it, only prefixes up to a kept state are reused."""
        self.page_size, self.is_caching = config.page_size, config.prefix_cache
        self.num_pages = num_pages = config.kv_cache_tokens // config.page_size
        num_layers, page_size = len(model.attention_layers), self.page_size
        self._shape = (num_layers, model.num_kv_heads, num_pages + 1, page_size, model.key_dim)
        self._dtype, self._device = like.dtype, like.device
        self._tokens = np.zeros((num_pages + 1, page_size), np.int32)
        self._num_bytes = self._tokens.size * model.cached_per_token * like.itemsize
        self._num_bytes += (config.max_num_sequences + 1) * model.cached_per_sequence(like.itemsize)
        self.epoch = 0
        self._below: dict[PageNode | int, dict[PageNode, None]] = {}
        """Pages that follow each page. A page below a root begins a path."""
        self._idle: OrderedDict[PageNode, None] = OrderedDict()
        self._copies: list[tuple[int, int]] = []
        self.routes: torch.Tensor | None = None
        """[pages, page_size, layers, active]: experts of each position; None until
        `keep_routes`."""
        self._no_routes: Routes | None = None
        self._addresses, self._is_free = addresses, False
        self.allocate()

    # -- memory -------------------------------------------------------------------------------

    def allocate(self) -> None:
        """Allocates the memory as zeros: a masked place is multiplied by 0 and must be finite."""
        self._free = list(range(self.num_pages, 0, -1))
        if self._is_free and self._addresses is not None:
            self._addresses.take()
            self._is_free = False
            for tensor in self._tensors():
                tensor.zero_()
            return
        place = self._dtype, self._device
        with self._region(self._num_bytes):
            self.keys = zeros_on_demand(self._shape, *place)
            self.values = zeros_on_demand(self._shape, *place) if self.has_values else self.keys
            if self.states is not None:
                self.states.allocate()
        self._allocate_routes()

    def _region(self, num_bytes: int) -> AbstractContextManager[None]:
        return nullcontext() if self._addresses is None else self._addresses.region(num_bytes)

    def _tensors(self) -> list[torch.Tensor]:
        routes = [] if self.routes is None else [self.routes]
        states = [] if self.states is None else self.states.tensors()
        return [*planes_of(self), *routes, *states]

    def keep_routes(self, model: ModelConfig) -> None:
        """Stores routes for every further position, from the first call on: one request computes
        another's prefix. Positions cached before have no routes and are dropped."""
        if self.routes is None:
            self.forget()
            shape = (0, len(model.routed_layers), model.num_active_experts)
            self._no_routes = np.empty(shape, route_dtype(model.num_experts))
            self._allocate_routes()

    def _allocate_routes(self) -> None:
        if self._no_routes is not None:
            shape = (self.num_pages + 1, self.page_size, *self._no_routes.shape[1:])
            dtype = getattr(torch, self._no_routes.dtype.name)
            with self._region(math.prod(shape) * dtype.itemsize):
                self.routes = torch.zeros(shape, dtype=dtype, device=self._device)

    def deallocate(self) -> bool:
        """Frees the memory. No lease may be open. Returns True if the tensors stay, without it."""
        self.forget()
        assert len(self._free) == self.num_pages, "a lease is open while the cache is put to sleep"
        if self._addresses is not None:
            self._addresses.free()
            self._is_free = True
            return True
        self.keys = self.values = torch.empty(0)
        self.routes = None
        if self.states is not None:
            self.states.deallocate()
        return False

    @property
    def num_available(self) -> int:
        """Pages that can be allocated: free pages, and cached pages without a user."""
        return len(self._free) + len(self._idle)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        # A node is in use while one below it is, and becomes idle after it: the oldest entry is
        # always a leaf.
        node, _ = self._idle.popitem(last=False)
        self._forget(node)
        return node.page

    # -- leases -------------------------------------------------------------------------------

    def open(self, ids: Ids, *, reuse: int, root: int = 0) -> PageLease | None:
        """Pages for all of `ids`; cached positions among the first `reuse` need not be computed
        again. root: number of the weights that compute the keys; paths of different roots share
        nothing.

        None, without any change, if there are not enough pages.
        """
        lease = PageLease(self.epoch, root)
        path, partial, length, border = self._find(ids, reuse, root)
        for node in path:
            self._use(node)
        lease.nodes = path
        lease.pages = [node.page for node in path]
        lease.num_cached = lease.num_committed = len(path) * self.page_size
        needed = -(-len(ids) // self.page_size) - len(path)
        if partial is not None and partial.num_users == 0 and length == partial.length:
            # It ends where this request continues, so writing after its end overwrites nothing.
            self._use(partial)
            lease.nodes.append(partial)
            lease.pages.append(partial.page)
            lease.num_cached = lease.num_committed = lease.num_cached + length
            partial, needed = None, needed - 1
        if needed > self.num_available:
            self._unuse(lease)
            return None
        if self.states is not None:  # before the page of its border may be taken
            lease.slot = self.states.begin(border)
        if partial is not None:
            # The copy reads every source before it writes, so a source may be allocated again
            # before the step that copies.
            source, page = partial.page, self._take()
            self._copies.append((source, page))
            lease.pages.append(page)
            lease.num_cached += length
            needed -= 1
        lease.pages += [self._take() for _ in range(needed)]
        return lease

    def grow(self, lease: PageLease) -> int | None:
        """Adds a page; None if none is available."""
        if not self.num_available:
            return None
        lease.pages.append(self._take())
        return lease.pages[-1]

    def commit(self, lease: PageLease, ids: Ids) -> None:
        """Enters the computed positions, whose tokens are `ids`, into the trie."""
        if not self.is_caching or lease.epoch != self.epoch or len(ids) <= lease.num_committed:
            return
        size = self.page_size
        for i in range(lease.num_committed // size, -(-len(ids) // size)):
            part = ids[i * size : (i + 1) * size]
            parent = lease.nodes[i - 1] if i else lease.root
            own = lease.nodes[i] if i < len(lease.nodes) else None
            twin, length = self._furthest(parent, part) if len(part) == size else (None, 0)
            if twin is own or length < size:
                twin = None
            if twin is not None:
                if own is not None:
                    self._forget(own)
                self._use(twin)
                lease.nodes[i:] = [twin]
                continue
            if own is None:
                own = PageNode(lease.pages[i], parent, self.epoch, num_users=1)
                self._below.setdefault(parent, {})[own] = None
                lease.nodes.append(own)
            self._tokens[own.page, own.length : len(part)] = part[own.length :]
            own.length = len(part)
        lease.num_committed = len(ids)
        if self.states is not None and (border := len(ids) // CHUNK * CHUNK):
            node, offset = lease.nodes[(border - 1) // size], (border - 1) % size + 1
            if offset not in node.borders:
                node.borders += (offset,)
            self.states.keep(lease.slot, (node, offset))

    def close(self, lease: PageLease, ids: Ids, *, keep: bool = True) -> None:
        """Ends a lease whose computed positions hold `ids`; keeps them cached if `keep`."""
        if keep:
            self.commit(lease, ids)
        nodes = lease.nodes
        self._free += [
            page for i, page in enumerate(lease.pages) if i >= len(nodes) or nodes[i].page != page
        ]
        self._unuse(lease)
        if self.states is not None:
            self.states.end(lease.slot)

    def forget(self) -> None:
        """Drops every cached prefix. Open leases keep their pages, which are no longer shared."""
        self._free += [node.page for node in self._idle]
        self._idle.clear()
        self._below.clear()
        self.epoch += 1
        if self.states is not None:
            self.states.forget()

    def forget_root(self, root: int) -> None:
        """Drops the cached prefixes of a root that is not used any more. Pages of open leases
        become free later, when they are the oldest."""
        found = list(self._below.get(root, ()))
        for node in found:  # grows in the loop: parents come before their children
            found += self._below.get(node, ())
        for node in reversed(found):
            if node.num_users == 0:
                del self._idle[node]
                self._forget(node)
                self._free.append(node.page)

    def clear_free_pages(self) -> None:
        """Zeroes all free pages, after a request whose values were not finite."""
        free = to_device(np.array(self._free, np.int64), self._device)
        for cache in planes_of(self):
            cache.index_fill_(2, free, 0)
        if self.states is not None:
            self.states.clear_free_slots()

    def run_copies(self) -> None:
        """Runs the copies of all leases opened since the last call."""
        if not self._copies:
            return
        source, target = to_device(np.array(self._copies, np.int64), self._device).unbind(1)
        self._copies.clear()
        for cache in planes_of(self):
            cache.index_copy_(2, target, cache.index_select(2, source))
        if self.routes is not None:
            self.routes.index_copy_(0, target, self.routes.index_select(0, source))

    def write_routes(self, write_index: torch.Tensor, routes: torch.Tensor) -> None:
        """Stores routes [T, layers, active] of the positions at `write_index`."""
        assert self.routes is not None, "routes are written where they are kept"
        self.routes.flatten(0, 1).index_copy_(0, write_index, routes.to(self.routes.dtype))

    def read_routes(self, pages: Sequence[int], start: int, stop: int) -> Routes:
        """Routes of the computed positions [start, stop) of the path in `pages`."""
        assert self._no_routes is not None, "routes are read where they are kept"
        if self.routes is None or start == stop:
            return self._no_routes
        page, offset = np.divmod(np.arange(start, stop), self.page_size)
        places = np.array(pages, np.int64)[page] * self.page_size + offset
        found = self.routes.flatten(0, 1).index_select(0, to_device(places, self.routes.device))
        return found.cpu().numpy()

    def num_known(self, ids: Ids, *, root: int = 0) -> int:
        """Number of leading positions of `ids` that are cached."""
        path, _, length, _ = self._find(ids, len(ids), root)
        return len(path) * self.page_size + length

    # -- the trie -----------------------------------------------------------------------------

    def _find(
        self, ids: Ids, limit: int, root: int
    ) -> tuple[list[PageNode], PageNode | None, int, tuple[PageNode, int] | None]:
        """(full pages, the page that continues them furthest, its matching positions, None).
        With linear attention: up to the deepest kept state, and that state's key."""
        path, size = list[PageNode](), self.page_size
        while True:
            at = len(path) * size
            part = ids[at : min(at + size, limit)]
            partial, length = self._furthest(path[-1] if path else root, part)
            if partial is None or length < size:
                break
            path.append(partial)
        if self.states is None:
            return path, partial, length, None
        nodes = path if partial is None else [*path, partial]
        known = len(path) * size + length
        for border in range(known // CHUNK * CHUNK, 0, -CHUNK):
            key = nodes[(border - 1) // size], (border - 1) % size + 1
            if key in self.states:
                whole, rest = divmod(border, size)
                return nodes[:whole], nodes[whole] if rest else None, rest, key
        return [], None, 0, None

    def _furthest(self, parent: PageNode | int, part: Ids) -> tuple[PageNode | None, int]:
        """The page after `parent` that has most of `part`, and how much of it."""
        nodes = list(self._below.get(parent, ()))
        if not nodes or not len(part):
            return None, 0
        same = self._tokens[[node.page for node in nodes], : len(part)] == part
        lengths = np.minimum(
            np.where(same.all(1), len(part), same.argmin(1)), [n.length for n in nodes]
        )
        best = int(lengths.argmax())
        return (nodes[best], int(lengths[best])) if lengths[best] else (None, 0)

    def _forget(self, node: PageNode) -> None:
        if self.states is not None:
            for offset in node.borders:
                self.states.drop((node, offset))
        siblings = self._below[node.parent]
        del siblings[node]
        if not siblings:
            del self._below[node.parent]

    def _use(self, node: PageNode) -> None:
        if node.num_users == 0:
            del self._idle[node]
        node.num_users += 1

    def _unuse(self, lease: PageLease) -> None:
        for node in reversed(lease.nodes):
            node.num_users -= 1
            if node.num_users == 0:
                if node.epoch == self.epoch:
                    self._idle[node] = None
                else:
                    self._free.append(node.page)
