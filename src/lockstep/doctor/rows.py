"""Rows of a dump as arrays, laid end to end: what checks read, a few thousand rows at a time.

# N tokens of all rows  R rows  S spans of sampled tokens  L layers  K active experts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lockstep.errors import AlignmentError
from lockstep.store.trajectories import trainer_logprobs
from lockstep.types import Float32Array, Int32Array, Int64Array, Message, Sample

SIDES = {"sampler": "rollout_logprobs", "trainer": "trainer_logprobs"}
"""Side -> its column."""
T = TypeVar("T")
BoolArray = npt.NDArray[np.bool_]
Float64Array = npt.NDArray[np.float64]


def given(value: T | None) -> T:
    """A field that a check names in `needs`: the check runs only if it is there."""
    assert value is not None, "the check does not name it in `needs`"
    return value


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Some whole rows of a run or dump. None means not recorded: checks that need the field are not
    made, and nothing is ever filled in.

    >>> rows = Rows(
    ...     row_ids=("a", "b"),
    ...     offsets=np.array([0, 3, 5]),
    ...     token_ids=np.array([7, 8, 9, 7, 8], np.int32),
    ...     loss_mask=np.array([False, True, True, False, True]),
    ... )
    >>> rows.row_of.tolist(), rows.turns.tolist()
    ([0, 0, 0, 1, 1], [-1, 0, 0, -1, 0])
    """

    row_ids: tuple[str, ...]
    """[R] name of each row in its source."""
    offsets: Int64Array
    """[R + 1] index of each row's first token; last, the number of tokens."""
    token_ids: Int32Array
    """[N]"""
    loss_mask: BoolArray
    """[N] True where the token is trained."""
    rollout_logprobs: Float32Array | None = None
    """[N] log-prob of the token itself (not of the next one) by the sampler, natural log; NaN where
    there is none."""
    trainer_logprobs: Float32Array | None = None
    """[N] the same by the trainer, before its update."""
    is_sampled: BoolArray | None = None
    """[N] True where the source says that the model drew the token."""
    turn: Int32Array | None = None
    """[N] number of the turn by the source, -1 where not sampled; `turns` is always known."""
    policy_version: Int32Array | None = None
    """[N] version of the weights that sampled the token, -1 where not sampled."""
    trainer_version: Int64Array | None = None
    """[R] version of the weights behind `trainer_logprobs`; -1 where the trainer measured none: it
    measures the first of a step's updates, whose policy is the sampler's."""
    advantages: Float32Array | None = None
    """[N]"""
    routed_experts: npt.NDArray[np.int16] | None = None
    """[N, L, K] experts of the sampler; -1 where not recorded."""
    trainer_routed_experts: npt.NDArray[np.int16] | None = None
    """[N, L, K] experts of the trainer."""
    prompt_lengths: Int64Array | None = None
    """[R] tokens before the response by the source; may be wrong, even negative."""
    rewards: Float64Array | None = None
    """[R]"""
    groups: Int64Array | None = None
    """[R] equal for rows of one task in one step."""
    steps: Int64Array | None = None
    """[R] training step."""
    messages: tuple[tuple[Message, ...] | None, ...] | None = None
    """[R] dialogue of the row, replies included."""
    texts: tuple[str | None, ...] | None = None
    """[R] response as text."""
    finish_reasons: tuple[str | None, ...] | None = None
    """[R] why the last reply ended by the engine: "stop", "length"."""
    engine_ids: tuple[tuple[Int32Array, ...] | None, ...] | None = None
    """[R] ids that the engine returned, by turn."""
    engine_prompt_ids: tuple[tuple[Int32Array, ...] | None, ...] | None = None
    """[R] ids that the engine was sent before each of these turns, from the beginning of the row;
    the first turn's alone are enough."""
    absent: tuple[frozenset[str], ...] | None = None
    """[R] columns of log-probs without any number of this row, not even NaN, in the source."""

    def __post_init__(self) -> None:
        num_rows, num_tokens = len(self.row_ids), len(self.token_ids)
        if len(self.offsets) != num_rows + 1 or self.offsets[0] or self.offsets[-1] != num_tokens:
            raise AlignmentError(
                f"{num_rows} rows of {num_tokens} tokens: offsets must be {num_rows + 1} numbers "
                f"from 0 to {num_tokens}, found {len(self.offsets)} up to {self.offsets[-1:]}."
            )
        for name in sorted(self.has - {"row_ids", "token_ids"}):
            kind, size = ("row", num_rows) if name in _OF_ROWS else ("token", num_tokens)
            if len(getattr(self, name)) != size:
                raise AlignmentError(
                    f"{name} must have {size} entries, one per {kind}; found "
                    f"{len(getattr(self, name))}. First row: {self.row_ids[:1]}."
                )

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def has(self) -> frozenset[str]:
        """Names of the fields that are known, without `offsets`."""
        known = {f.name for f in fields(self) if getattr(self, f.name) is not None}
        return frozenset(known - {"offsets"})

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    # -- made of ------------------------------------------------------------------------------

    @classmethod
    def of(cls, samples: Sequence[Sample], **more: Any) -> Rows:
        """Rows made of `samples`. more: fields that a `Sample` has no column for.

        A column that some sample lacks is left out. `is_sampled` is True where a turn is given.
        """
        sizes = [len(sample) for sample in samples]
        ids = [sample.token_ids for sample in samples] or [np.empty(0, np.int32)]
        masks = [sample.loss_mask for sample in samples] or [np.empty(0, np.bool_)]

        def column(name: str) -> npt.NDArray[Any] | None:
            if not samples or not all(name in sample.columns for sample in samples):
                return None
            return np.concatenate([sample.columns[name] for sample in samples])

        names = ("rollout_logprobs", "turn", "policy_version", "advantages", "routed_experts")
        known: dict[str, Any] = {name: column(name) for name in names}
        known["trainer_logprobs"] = _trainer_logprobs(samples)
        known["is_sampled"] = None if known["turn"] is None else known["turn"] >= 0
        known["groups"] = np.array([sample.group for sample in samples], np.int64)
        return cls(
            row_ids=tuple(sample.id for sample in samples),
            offsets=np.cumsum([0, *sizes], dtype=np.int64),
            token_ids=np.concatenate(ids),
            loss_mask=np.concatenate(masks),
            **known | more,
        )

    def take(self, index: Sequence[int] | Int64Array) -> Rows:
        """The rows at these indices, in this order."""
        index = np.asarray(index, np.int64)
        sizes = self.sizes[index]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        at = np.arange(offsets[-1]) + np.repeat(self.offsets[index] - offsets[:-1], sizes)
        parts: dict[str, Any] = {"offsets": offsets}
        for name in self.has:
            value = getattr(self, name)
            if isinstance(value, tuple):
                parts[name] = tuple(value[i] for i in index.tolist())
            else:
                parts[name] = value[index] if name in _OF_ROWS else value[at]
        return Rows(**parts)

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Rows of several chunks in one. A field that one of them lacks is left out.

        >>> one = Rows(row_ids=("a",), offsets=np.array([0, 1]), token_ids=np.array([7], np.int32),
        ...            loss_mask=np.array([True]))
        >>> len(Rows.joined([one, one]))
        2
        """
        sizes = np.concatenate([[0], *(part.sizes for part in parts)])
        found: dict[str, Any] = {"offsets": np.cumsum(sizes, dtype=np.int64)}
        for name in frozenset.intersection(*(part.has for part in parts)):
            values = [getattr(part, name) for part in parts]
            is_tuple = isinstance(values[0], tuple)
            found[name] = tuple(chain(*values)) if is_tuple else np.concatenate(values)
        return cls(**found)

    def with_(self, **changed: Any) -> Rows:
        """A copy with other columns; unchanged arrays are shared."""
        return replace(self, **changed)

    # -- read ---------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> Int64Array:
        """[R] tokens of each row."""
        return np.diff(self.offsets)

    @cached_property
    def slices(self) -> list[slice]:
        """[R] the place of each row's tokens."""
        return [slice(begin, end) for begin, end in pairwise(self.offsets.tolist())]

    @cached_property
    def row_of(self) -> Int64Array:
        """[N] index of the row that each token belongs to."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @cached_property
    def position(self) -> Int64Array:
        """[N] position of each token in its row."""
        return np.arange(self.num_tokens) - np.repeat(self.offsets[:-1], self.sizes)

    @cached_property
    def prefix_keys(self) -> npt.NDArray[np.uint64]:
        """[N] hash of the row's ids up to and with this one: two tokens of a chunk have the same
        key if they follow the same ids, and else with probability N^2 / 2^64."""
        place = _mixed(self.position.astype(np.uint64) + np.uint64(1))
        mixed = _mixed(self.token_ids.astype(np.uint64) * _GOLDEN + place)
        total = np.cumsum(mixed, dtype=np.uint64)
        before = np.concatenate([np.zeros(1, np.uint64), total])[self.offsets[:-1]]
        return total - np.repeat(before, self.sizes)

    @cached_property
    def sampled(self) -> BoolArray:
        """[N] True where the model drew the token: `is_sampled`, else the loss mask."""
        return self.loss_mask if self.is_sampled is None else self.is_sampled

    @cached_property
    def spans(self) -> Spans:
        """The sampled turns: maximal runs of sampled tokens of one turn in one row."""
        sampled = self.sampled
        ends = np.ones(self.num_tokens, np.bool_)
        ends[:-1] = (sampled[1:] != sampled[:-1]) | (self.row_of[1:] != self.row_of[:-1])
        if self.turn is not None:
            ends[:-1] |= self.turn[1:] != self.turn[:-1]
        end = np.flatnonzero(ends) + 1
        begin = np.concatenate([[0], end[:-1]]) if len(end) else end
        kept = sampled[begin] if len(begin) else np.empty(0, np.bool_)
        begin, end = begin[kept], end[kept]
        return Spans(begin=begin, end=end, row=self.row_of[begin])

    @cached_property
    def replies(self) -> list[list[tuple[int, int]]]:
        """[R] (begin, end) of each sampled turn of a row."""
        out: list[list[tuple[int, int]]] = [[] for _ in self.slices]
        for row, *place in np.stack([self.spans.row, self.spans.begin, self.spans.end], 1).tolist():
            out[row].append((place[0], place[1]))
        return out

    @cached_property
    def span_of(self) -> Int64Array:
        """[N] index in `spans` of the turn that each token belongs to, -1 where not sampled."""
        out = np.full(self.num_tokens, -1, np.int64)
        out[self.sampled] = np.repeat(np.arange(len(self.spans)), self.spans.size)
        return out

    @cached_property
    def turns(self) -> Int32Array:
        """[N] number of the sampled turn in its row, -1 where not sampled."""
        if self.turn is not None:
            return self.turn
        spans = self.spans
        first = np.searchsorted(spans.row, spans.row)  # the first span of the same row
        number = np.arange(len(spans)) - first
        return np.append(number, -1)[self.span_of].astype(np.int32)

    @cached_property
    def gap(self) -> Float64Array:
        """[N] trainer - rollout of each trained token with two finite log-probs; NaN elsewhere."""
        if self.rollout_logprobs is None or self.trainer_logprobs is None:
            return np.full(self.num_tokens, np.nan)
        with np.errstate(invalid="ignore"):
            gap = self.trainer_logprobs.astype(np.float64) - self.rollout_logprobs
        gap[~self.loss_mask | ~np.isfinite(gap)] = np.nan
        return gap

    def unscored(self, column: str) -> BoolArray:
        """[R] True for rows that a side, whose log-probs are `column`, did not score."""
        return np.array([column in names for names in self.absent or [()] * len(self)], np.bool_)

    @cached_property
    def compared(self) -> Int64Array:
        """[n] indices of the tokens that have a `gap`."""
        return np.flatnonzero(~np.isnan(self.gap))

    def where(self, at: int) -> tuple[str, int]:
        """(row's id, position in the row) of the token with index `at`."""
        row = int(self.row_of[at])
        return self.row_ids[row], at - int(self.offsets[row])

    def row_sums(self, at: Int64Array, weights: Any = None) -> npt.NDArray[Any]:
        """[R] sum of `weights` [n] over the tokens `at` [n] of each row; None counts them."""
        return np.bincount(self.row_of[at], weights, minlength=len(self))

    def row_means(self, at: Int64Array, values: Float64Array) -> Float64Array:
        """[R] mean of `values` [n] over the tokens `at` [n] of each row; 0 for a row without."""
        return self.row_sums(at, values) / np.maximum(self.row_sums(at), 1)

    def firsts(self, at: Int64Array) -> Int64Array:
        """[R] smallest of the indices `at` in each row, N where there is none."""
        first = np.full(len(self), self.num_tokens, np.int64)
        np.minimum.at(first, self.row_of[at], at)
        return first

    def runs(self, mask: BoolArray) -> tuple[Int64Array, Int64Array]:
        """(begin, end) of each run of True in `mask` [N], inside one row."""
        index = np.flatnonzero(mask)
        if not len(index):
            return index, index
        is_begin = np.ones(len(index), np.bool_)
        is_begin[1:] = (np.diff(index) > 1) | (self.position[index[1:]] == 0)
        return index[is_begin], index[np.append(is_begin[1:], True)] + 1

    def num_in(self, mask: BoolArray, begin: Int64Array, end: Int64Array) -> Int64Array:
        """[X] number of True of `mask` [N] in each of the slices begin..end [X]."""
        before = np.concatenate([[0], np.cumsum(mask)])
        return before[end] - before[begin]

    def within(self, begin: Int64Array, end: Int64Array) -> BoolArray:
        """[N] True inside of the slices begin..end."""
        edges = np.zeros(self.num_tokens + 1, np.int64)
        np.add.at(edges, begin, 1)
        np.add.at(edges, end, -1)
        return np.cumsum(edges)[:-1] > 0


def _trainer_logprobs(samples: Sequence[Sample]) -> Float32Array | None:
    """[N] the trainer's log-probs, NaN in rows that it did not score; None if it scored none."""
    found = [trainer_logprobs(sample) for sample in samples]
    if all(column is None for column in found):
        return None
    pairs, nan = zip(samples, found, strict=True), np.float32(np.nan)
    return np.concatenate([np.full(len(s), nan) if c is None else c for s, c in pairs])


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mixes the bits of each number (the finaliser of splitmix64)."""
    out = values ^ (values >> np.uint64(30))
    out *= np.uint64(0xBF58476D1CE4E5B9)
    out ^= out >> np.uint64(27)
    out *= np.uint64(0x94D049BB133111EB)
    return out ^ (out >> np.uint64(31))


_OF_ROWS = frozenset(
    {
        *("row_ids", "offsets", "trainer_version", "prompt_lengths", "rewards", "groups", "steps"),
        *("messages", "texts", "finish_reasons", "engine_ids", "engine_prompt_ids", "absent"),
    }
)
TOKEN_COLUMNS = tuple(f.name for f in fields(Rows) if f.name not in _OF_ROWS)
"""Fields with one entry per token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """Runs of tokens, each inside one row."""

    begin: Int64Array
    """[S] index of the first token."""
    end: Int64Array
    """[S] index after the last token."""
    row: Int64Array
    """[S]"""

    def __len__(self) -> int:
        return len(self.begin)

    @cached_property
    def size(self) -> Int64Array:
        """[S] tokens."""
        return self.end - self.begin

    @cached_property
    def is_last(self) -> BoolArray:
        """[S] True for the last span of its row."""
        return np.append(self.row[1:] != self.row[:-1], True)[: len(self.row)]
