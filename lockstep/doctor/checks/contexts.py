"""Tokens that follow the same ids in several rows: the same token again, and different ones.

The rows of one task share their prompt, and some ids after it. If a token occurs again after the
same ids, a side that computes deterministically gives it the same log-prob each time. At a
*branch*, where different tokens follow the same ids, their log-probs share one normaliser, which
cancels in differences. Neither needs a model. Rows are compared within one chunk.

# N tokens  M tokens that occur again  G groups of these  B pairs at branches
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.doctor.checks.rows import Rows
from lockstep.types import Int64Array

FIRST_STRIDE, MAX_STRIDE = 4, 64
"""Tokens that rows are followed over at once, while none of them diverges."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Contexts:
    """Trained tokens with finite log-probs on both sides that follow the same ids, under the same
    weights as far as versions and steps are known."""

    repeated: Int64Array
    """[M] indices of tokens that occur again, group by group."""
    group: Int64Array
    """[M] group of each, 0 .. G-1."""
    size: Int64Array
    """[G] tokens of each group, at least 2."""
    one: Int64Array
    """[B] index of a token at a branch, ..."""
    other: Int64Array
    """[B] ... and of a different token there. k different tokens make k - 1 pairs, in a chain."""


def contexts_of(rows: Rows) -> Contexts:
    """The repeated contexts of one chunk, found once.

    Rows that begin alike are followed together, one trained token at a time, until each has
    diverged from all others. Where none diverges, many tokens are passed at once, without sorting.
    """
    return rows.once("contexts", lambda: _contexts_of(rows))


def _contexts_of(rows: Rows) -> Contexts:
    at = np.flatnonzero(rows.loss_mask)
    at = at[rows.position[at] > 0]
    num = np.bincount(rows.row_of[at], minlength=len(rows))
    first = np.cumsum(num) - num
    finite = np.ones(rows.num_tokens, np.bool_)
    for side in (rows.rollout_logprobs, rows.trainer_logprobs):
        if side is not None:
            finite &= np.isfinite(side)
    repeated: list[Int64Array] = []
    sizes: list[Int64Array] = []
    pairs: list[tuple[Int64Array, Int64Array]] = []
    alive, k, stride = np.flatnonzero(num), 0, 0
    alike = _Alike(key=np.empty(0, np.uint64), weights=np.empty(0, np.uint64))

    def going_on() -> tuple[Int64Array, _Alike]:
        """The rows of `alive` that have a k-th token and are not alone."""
        has_more = num[alive] > k
        left = alike.where(has_more)
        is_paired = left.is_paired
        return alive[has_more][is_paired], left.where(is_paired)

    while len(alive) > 1:
        if stride:
            ahead = min(stride, int(num[alive].min()) - k)
            ahead_at = at[first[alive] + (k + np.arange(ahead))[:, None]]
            passed = alike.num_kept(rows, ahead_at, finite)
            if passed:
                repeated.append(ahead_at[:passed].reshape(-1))
                sizes.append(np.tile(alike.sizes, passed))
                k += passed
                alive, alike = going_on()
            stride = min(2 * stride, MAX_STRIDE) if passed == ahead else 0
            if stride or len(alive) < 2:
                continue
        stride = FIRST_STRIDE
        token = at[first[alive] + k]
        weights = _weights_keys(rows, token)
        is_shared = _stands_twice(rows.prefix_keys[token - 1] + weights)
        alive, token, weights = alive[is_shared], token[is_shared], weights[is_shared]
        key = rows.prefix_keys[token] + weights
        known = np.flatnonzero(finite[token])
        order = known[np.argsort(key[known], kind="stable")]
        begins = np.ones(len(order), np.bool_)
        begins[1:] = key[order][1:] != key[order][:-1]
        size = np.diff(np.flatnonzero(np.append(begins, True)))
        repeated.append(token[order][np.repeat(size > 1, size)])
        sizes.append(size[size > 1])
        different = token[order[begins]]
        context = (rows.prefix_keys[token - 1] + weights)[order[begins]]
        by_context = np.argsort(context, kind="stable")
        is_pair = context[by_context][1:] == context[by_context][:-1]
        pairs.append((different[by_context[:-1]][is_pair], different[by_context[1:]][is_pair]))
        k += 1
        order = np.argsort(key, kind="stable")
        alive, alike = alive[order], _Alike(key=key[order], weights=weights[order])
        alive, alike = going_on()
    size = np.concatenate([*sizes, np.empty(0, np.int64)])
    none = np.empty(0, np.int64)
    return Contexts(
        repeated=np.concatenate([*repeated, none]),
        group=np.repeat(np.arange(len(size)), size),
        size=size,
        one=np.concatenate([*(one for one, _ in pairs), none]),
        other=np.concatenate([*(other for _, other in pairs), none]),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Alike:
    """A rows, those with the same ids so far next to each other."""

    key: npt.NDArray[np.uint64]
    """[A] equal for rows that are alike."""
    weights: npt.NDArray[np.uint64]
    """[A] `_weights_keys` of the last token that was compared."""

    def where(self, is_kept: npt.NDArray[np.bool_]) -> _Alike:
        return _Alike(key=self.key[is_kept], weights=self.weights[is_kept])

    @property
    def is_paired(self) -> npt.NDArray[np.bool_]:
        """[A] True if another row has the same key."""
        same = np.zeros(len(self.key) + 1, np.bool_)
        same[1:-1] = self.key[1:] == self.key[:-1]
        return same[:-1] | same[1:]

    @property
    def sizes(self) -> Int64Array:
        """Number of rows of each key."""
        ends = np.flatnonzero(self.key[1:] != self.key[:-1]) + 1
        return np.diff(ends, prepend=0, append=len(self.key))

    def num_kept(self, rows: Rows, token: Int64Array, finite: npt.NDArray[np.bool_]) -> int:
        """How many of the next P tokens [P, A] keep the grouping as it is, with finite log-probs.
        Rows may also come together again, under other weights."""
        weights = _weights_keys(rows, token)
        same = self.key[1:] == self.key[:-1]
        kept = finite[token].all(1) & (weights == self.weights).all(1)
        for until in (token - 1, token):
            key = rows.prefix_keys[until]
            kept &= ((key[:, 1:] == key[:, :-1]) == same).all(1)
        return len(kept) if kept.all() else int(np.argmin(kept))


def _stands_twice(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """True for each number that occurs more than once."""
    order = np.argsort(keys)
    same = np.zeros(len(keys) + 1, np.bool_)
    same[1:-1] = keys[order][1:] == keys[order][:-1]
    out = np.empty(len(keys), np.bool_)
    out[order] = same[:-1] | same[1:]
    return out


def _weights_keys(rows: Rows, at: Int64Array) -> npt.NDArray[np.uint64]:
    """Hash of the weights that sampled and scored the tokens `at` (any shape)."""
    out = np.zeros(at.shape, np.uint64)
    if rows.policy_version is not None:
        out += rows.policy_version[at].astype(np.uint64)
    for of_row in (rows.steps, rows.trainer_version):
        if of_row is not None:
            out = out * np.uint64(1_000_003) + of_row[rows.row_of[at]].astype(np.uint64)
    return out * np.uint64(0xD6E8FEB86659FD93)
