"""Where rows begin with the same ids: the same token after the same ids, and different ones.

The rows of one task begin with the same prompt, and go on with the same ids for a while. Where a
token stands more than once after the same ids, a side that computes the same thing each time has
given it the same log-prob each time. Where different tokens were drawn after the same ids (a
branch), their log-probs share one normaliser, which falls out of differences. Neither needs a
model. Rows of one chunk are compared with each other; those of one task stand together in it.

# N tokens  M tokens that stand more than once  G of these that differ  B pairs at branches
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lockstep.types import Int64Array

if TYPE_CHECKING:
    from lockstep.checks.rows import Rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Contexts:
    """Trained tokens with finite log-probs (of both sides, where there are two) that follow the
    same ids, under the same weights as far as versions and steps are known."""

    repeated: Int64Array
    """[M] tokens that stand more than once: index into the chunk's, group after group."""
    group: Int64Array
    """[M] 0 .. G-1."""
    size: Int64Array
    """[G] how often each stands there, at least 2."""
    one: Int64Array
    """[B] index of a token at a branch, ..."""
    other: Int64Array
    """[B] ... and of a different one there. Of k different tokens k - 1 pairs, in a chain."""


def contexts_of(rows: Rows) -> Contexts:
    """What `Rows.contexts` holds. Two sorts of the trained tokens."""
    trained = rows.loss_mask.copy()
    for side in (rows.rollout_logprobs, rows.trainer_logprobs):
        if side is not None:
            trained &= np.isfinite(side)
    at = np.flatnonzero(trained)
    at = at[rows.position[at] > 0]
    weights = _weights_keys(rows, at)
    keys = rows.prefix_keys[at] + weights
    order = np.argsort(keys)
    key = keys[order]
    same = np.zeros(len(key) + 1, np.bool_)
    same[1:-1] = key[1:] == key[:-1]
    after, before = same[:-1], same[1:]  # equal to the one before it, to the one after it
    is_repeated = after | before
    begins = (is_repeated & ~after)[is_repeated]
    group = np.cumsum(begins) - 1
    first = order[~after]  # one of each different token
    context = rows.prefix_keys[at[first] - 1] + weights[first]
    order_of_first = np.argsort(context, kind="stable")
    is_pair = np.diff(context[order_of_first]) == 0
    different = at[first[order_of_first]]
    return Contexts(
        repeated=at[order[is_repeated]],
        group=group,
        size=np.bincount(group, minlength=int(begins.sum())),
        one=different[:-1][is_pair],
        other=different[1:][is_pair],
    )


def _weights_keys(rows: Rows, at: Int64Array) -> npt.NDArray[np.uint64]:
    """A number for the weights that the tokens `at` were sampled and scored by."""
    out = np.zeros(len(at), np.uint64)
    if rows.policy_version is not None:
        out += rows.policy_version[at].astype(np.uint64)
    for of_row in (rows.steps, rows.trainer_version):
        if of_row is not None:
            out = out * np.uint64(1_000_003) + of_row[rows.row_of[at]].astype(np.uint64)
    return out * np.uint64(0xD6E8FEB86659FD93)
