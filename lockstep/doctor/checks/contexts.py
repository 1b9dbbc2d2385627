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
    """The repeated contexts of one chunk, found once."""
    return rows.once("contexts", lambda: _contexts_of(rows))


def _contexts_of(rows: Rows) -> Contexts:
    at = np.flatnonzero(rows.loss_mask & (rows.position > 0))
    for side in (rows.rollout_logprobs, rows.trainer_logprobs):
        if side is not None:
            at = at[np.isfinite(side[at])]
    weights = _weights_keys(rows, at)
    context = rows.prefix_keys[at - 1] + weights
    _, of, num = np.unique(context, return_inverse=True, return_counts=True)
    is_shared = num[of] > 1
    at, weights, context = at[is_shared], weights[is_shared], context[is_shared]
    key = rows.prefix_keys[at] + weights
    order = np.argsort(key, kind="stable")
    begins = np.diff(key[order], prepend=~key[order[:1]]) != 0
    size = np.diff(np.flatnonzero(np.append(begins, True)))
    different = order[begins]
    different = different[np.argsort(context[different], kind="stable")]
    is_pair = context[different][1:] == context[different][:-1]
    num_repeated = size[size > 1]
    return Contexts(
        repeated=at[order][np.repeat(size > 1, size)],
        group=np.repeat(np.arange(len(num_repeated)), num_repeated),
        size=num_repeated,
        one=at[different[:-1][is_pair]],
        other=at[different[1:][is_pair]],
    )


def _weights_keys(rows: Rows, at: Int64Array) -> npt.NDArray[np.uint64]:
    """Hash of the weights that sampled and scored the tokens `at` (any shape)."""
    out = np.zeros(at.shape, np.uint64)
    if rows.policy_version is not None:
        out += rows.policy_version[at].astype(np.uint64)
    for of_row in (rows.steps, rows.trainer_version):
        if of_row is not None:
            out = out * np.uint64(1_000_003) + of_row[rows.row_of[at]].astype(np.uint64)
    return out * np.uint64(0xD6E8FEB86659FD93)
