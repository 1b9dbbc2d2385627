"""Training rows laid end to end, as checks look at them: a few thousand at a time, as arrays.

# N tokens of all rows  R rows  S spans of sampled tokens  L layers  K active experts
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.doctor.checks.contexts import Contexts, contexts_of
from lockstep.doctor.checks.once import Once
from lockstep.errors import AlignmentError
from lockstep.types import COLUMNS, Float32Array, Int32Array, Int64Array, Message, Sample

BoolArray = npt.NDArray[np.bool_]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows(Once):
    """Some rows of a run or of a dump. What is None is not known, and checks that need it cannot
    be made; nothing is ever filled in.

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
    """[R] what the row is called where it came from."""
    offsets: Int64Array
    """[R + 1] where each row begins in the arrays of tokens, and where the last one ends."""
    token_ids: Int32Array
    """[N]"""
    loss_mask: BoolArray
    """[N] trained."""
    rollout_logprobs: Float32Array | None = None
    """[N] the sampler's, natural log, of each token itself (not of the next); NaN where none."""
    trainer_logprobs: Float32Array | None = None
    """[N] the trainer's, before the update; NaN where none."""
    rescored_logprobs: Float32Array | None = None
    """[N] of the model at hand, where the doctor was given one; NaN where it was not asked."""
    is_sampled: BoolArray | None = None
    """[N] said to have been drawn by the model; None where only the loss mask is known."""
    turn: Int32Array | None = None
    """[N] as the dump says it, -1 of what was not sampled; `turns` is known always."""
    policy_version: Int32Array | None = None
    """[N] of the weights that sampled it, -1 of what was not sampled."""
    trainer_version: Int64Array | None = None
    """[R] of the weights that `trainer_logprobs` are of."""
    advantages: Float32Array | None = None
    """[N]"""
    routed_experts: npt.NDArray[np.int16] | None = None
    """[N, L, K] the sampler's; -1 where not recorded."""
    trainer_routed_experts: npt.NDArray[np.int16] | None = None
    """[N, L, K] the trainer's."""
    prompt_lengths: Int64Array | None = None
    """[R] tokens before the response, as the dump says: it may be wrong, and negative."""
    rewards: Float64Array | None = None
    """[R]"""
    groups: Int64Array | None = None
    """[R] rows of one task in one step have the same number."""
    steps: Int64Array | None = None
    """[R] training step."""
    messages: tuple[tuple[Message, ...] | None, ...] | None = None
    """[R] the dialogue that the row shows, the model's replies included."""
    texts: tuple[str | None, ...] | None = None
    """[R] the response as the dump spells it."""
    engine_ids: tuple[tuple[Int32Array, ...] | None, ...] | None = None
    """[R] what the engine answered, turn by turn, where it was kept beside what is trained."""

    def __post_init__(self) -> None:
        num_rows, num_tokens = len(self.row_ids), len(self.token_ids)
        sizes = {"token": num_tokens, "row": num_rows}
        if len(self.offsets) != num_rows + 1 or self.offsets[0] or self.offsets[-1] != num_tokens:
            raise AlignmentError(
                f"{num_rows} rows of {num_tokens} tokens: offsets must be {num_rows + 1} numbers "
                f"from 0 to {num_tokens}, found {len(self.offsets)} up to {self.offsets[-1:]}."
            )
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if value is None or name in ("row_ids", "offsets", "token_ids"):
                continue
            kind = "row" if name in _OF_ROWS else "token"
            if len(value) != sizes[kind]:
                raise AlignmentError(
                    f"{name} must have {sizes[kind]} entries, one per {kind}; found {len(value)}. "
                    f"First row: {self.row_ids[:1]}."
                )

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    # -- made of ------------------------------------------------------------------------------

    @classmethod
    def of(cls, samples: Sequence[Sample], **more: Any) -> Rows:
        """Training rows of Lockstep. more: fields that a `Sample` has no column for.

        A column that not every row has is left out. `is_sampled` is where a turn is said.
        """
        sizes = [len(sample) for sample in samples]
        ids = [sample.token_ids for sample in samples] or [np.empty(0, np.int32)]
        masks = [sample.loss_mask for sample in samples] or [np.empty(0, np.bool_)]

        def column(name: str) -> npt.NDArray[Any] | None:
            if not samples or not all(name in sample.columns for sample in samples):
                return None
            return np.concatenate([sample.columns[name] for sample in samples])

        turn = column("turn")
        known: dict[str, Any] = {
            "rollout_logprobs": column("rollout_logprobs"),
            "trainer_logprobs": _trainer_logprobs(samples),
            "turn": turn,
            "is_sampled": None if turn is None else turn >= 0,
            "policy_version": column("policy_version"),
            "advantages": column("advantages"),
            "routed_experts": column("routed_experts"),
            "groups": np.array([sample.group for sample in samples], np.int64),
        }
        return cls(
            row_ids=tuple(sample.id for sample in samples),
            offsets=np.cumsum([0, *sizes], dtype=np.int64),
            token_ids=np.concatenate(ids),
            loss_mask=np.concatenate(masks),
            **known | more,
        )

    def take(self, index: Sequence[int] | Int64Array) -> Rows:
        """The rows at these places, in this order."""
        index = np.asarray(index, np.int64)
        sizes = self.sizes[index]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        at = np.arange(offsets[-1]) + np.repeat(self.offsets[index] - offsets[:-1], sizes)
        parts: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if value is None or name == "offsets":
                continue
            if isinstance(value, tuple):
                parts[name] = tuple(value[i] for i in index.tolist())
            else:
                parts[name] = value[index] if name in _OF_ROWS else value[at]
        return Rows(**{**parts, "offsets": offsets})

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Rows of several pieces, one after another. A field that one of them lacks is left out.

        >>> one = Rows(row_ids=("a",), offsets=np.array([0, 1]), token_ids=np.array([7], np.int32),
        ...            loss_mask=np.array([True]))
        >>> len(Rows.joined([one, one]))
        2
        """
        sizes = np.concatenate([[0], *(part.sizes for part in parts)])
        found: dict[str, Any] = {"offsets": np.cumsum(sizes, dtype=np.int64)}
        for name in (f.name for f in fields(cls)):
            values = [getattr(part, name) for part in parts]
            if name == "offsets" or any(value is None for value in values):
                continue
            if isinstance(values[0], tuple):
                found[name] = tuple(entry for value in values for entry in value)
            else:
                found[name] = np.concatenate(values)
        return cls(**found)

    def with_(self, **changed: Any) -> Rows:
        """A copy with other columns; the arrays that stay are shared."""
        return replace(self, **changed)

    def has_same_ids(self, other: Rows) -> bool:
        """Whether these are the same rows, as far as their ids and ends tell."""
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(
            self.token_ids, other.token_ids
        )

    # -- read ---------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> Int64Array:
        """[R] tokens of each row."""
        return np.diff(self.offsets)

    @cached_property
    def row_of(self) -> Int64Array:
        """[N] the row that each token is of."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @cached_property
    def position(self) -> Int64Array:
        """[N] the place of each token in its row."""
        return np.arange(self.num_tokens) - np.repeat(self.offsets[:-1], self.sizes)

    @cached_property
    def prefix_keys(self) -> npt.NDArray[np.uint64]:
        """[N] a number for the ids of the row up to and with this one: two places of this chunk
        have the same one if those ids are the same (else by chance, once in 2^64 / N^2)."""
        place = _mixed(self.position.astype(np.uint64) + np.uint64(1))
        mixed = _mixed(self.token_ids.astype(np.uint64) * _GOLDEN + place)
        total = np.cumsum(mixed, dtype=np.uint64)
        before = np.concatenate([np.zeros(1, np.uint64), total])[self.offsets[:-1]]
        return total - np.repeat(before, self.sizes)

    @cached_property
    def contexts(self) -> Contexts:
        """Where the same token, or another one, follows the same ids."""
        return contexts_of(self)

    @cached_property
    def sampled(self) -> BoolArray:
        """[N] drawn by the model, as far as is known: `is_sampled`, else the loss mask."""
        return self.loss_mask if self.is_sampled is None else self.is_sampled

    @cached_property
    def spans(self) -> Spans:
        """The sampled turns: runs of sampled tokens of one turn in one row."""
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
    def turns(self) -> Int32Array:
        """[N] number of the sampled turn in its row, -1 of what was not sampled."""
        if self.turn is not None:
            return self.turn
        spans = self.spans
        first = np.searchsorted(spans.row, spans.row)  # the first span of the same row
        number = np.arange(len(spans.row)) - first
        out = np.full(self.num_tokens, -1, np.int32)
        out[self.sampled] = np.repeat(number, spans.end - spans.begin)
        return out

    @cached_property
    def gap(self) -> Float64Array:
        """[N] trainer - rollout of each trained token that has both, finite; NaN elsewhere."""
        if self.rollout_logprobs is None or self.trainer_logprobs is None:
            return np.full(self.num_tokens, np.nan)
        with np.errstate(invalid="ignore"):
            gap = self.trainer_logprobs.astype(np.float64) - self.rollout_logprobs
        gap[~self.loss_mask | ~np.isfinite(gap)] = np.nan
        return gap

    @cached_property
    def compared(self) -> Int64Array:
        """[n] the tokens that `gap` is known of."""
        return np.flatnonzero(~np.isnan(self.gap))

    def where(self, at: int) -> tuple[str, int]:
        """(row's id, place in the row) of the token `at`."""
        row = int(self.row_of[at])
        return self.row_ids[row], at - int(self.offsets[row])

    def rows(self) -> Iterator[tuple[str, slice]]:
        """(row's id, its tokens) one after the other: for checks that must go row by row."""
        for name, begin, end in zip(
            self.row_ids, self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True
        ):
            yield name, slice(begin, end)


def _trainer_logprobs(samples: Sequence[Sample]) -> Float32Array | None:
    """What the trainer computed for each row before its update, NaN of rows that it computed
    nothing of; None if that is all of them. An old policy that is the sampler's own array was taken
    from there: comparing the two would report a gap of 0 that nobody measured."""
    found: list[Float32Array | None] = []
    for sample in samples:
        rollout = sample.columns.get("rollout_logprobs")
        columns = (sample.columns.get(name) for name in ("logprobs", "old_logprobs"))
        found.append(next((c for c in columns if c is not None and c is not rollout), None))
    if all(column is None for column in found):
        return None
    return np.concatenate(
        [
            np.full(len(sample), np.nan, np.float32) if column is None else column
            for sample, column in zip(samples, found, strict=True)
        ]
    )


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each number as one that looks drawn at random (the finaliser of splitmix64)."""
    out = values ^ (values >> np.uint64(30))
    out *= np.uint64(0xBF58476D1CE4E5B9)
    out ^= out >> np.uint64(27)
    out *= np.uint64(0x94D049BB133111EB)
    return out ^ (out >> np.uint64(31))


_OF_ROWS = frozenset(
    {
        "row_ids",
        "offsets",
        "trainer_version",
        "prompt_lengths",
        "rewards",
        "groups",
        "steps",
        "messages",
        "texts",
        "engine_ids",
    }
)
TOKEN_COLUMNS = tuple(f.name for f in fields(Rows) if f.name not in _OF_ROWS)
"""Fields with an entry per token."""
assert {"rollout_logprobs", "advantages", "policy_version", "routed_experts"} <= set(COLUMNS)


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """Runs of tokens, each inside of one row."""

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
