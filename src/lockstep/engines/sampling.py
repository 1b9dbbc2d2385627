"""Draws of tokens and their log-probs: one arithmetic for the embedded engine, for Lockstep's
decoder in vLLM and for the Tinker server.

A draw is the inverse of the cumulative distribution at one uniform number, a hash of the request's
seed and the token's position. It does not depend on other requests or on preemption.

# B rows  V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lockstep.ops.base import Ops
from lockstep.ops.transfer import to_device
from lockstep.types import Distribution, Int32Array, pack_support

Tensor = torch.Tensor

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
class DrawRule:
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
    rule: DrawRule,
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
    else:
        ids = ops.draw(logp.exp(), uniform)
    if kept is not None and rule.distribution == "sampled":
        # The trainer's arithmetic over the support, not a log-prob minus a log mass.
        logp = ops.log_softmax(logits, temperature=rule.temperature, kept=kept)
        return ids[:, 0], logp.gather(1, ids)[:, 0], kept if rule.records_support else None
    if rule.distribution == "model" and rule.temperature != 1.0:
        logp = ops.log_softmax(logits)
    return ids[:, 0], logp.gather(1, ids)[:, 0], None


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


@dataclass(slots=True, eq=False, kw_only=True)
class DrawTable:
    """How rows draw: one entry per row in each array."""

    rules: list[DrawRule]
    rule_of: npt.NDArray[np.int64]
    """Index of each row's rule."""
    streams: npt.NDArray[np.uint64]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]

    def allowed(self, row: int) -> npt.NDArray[np.bool_]:
        """[V] the ids that the grammar of a constrained row allows."""
        raise NotImplementedError

    def draw(
        self,
        logits: Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        ops: Ops,
        *,
        pack: Callable[[npt.NDArray[np.bool_]], Int32Array] = pack_support,
    ) -> tuple[Tensor, Tensor, dict[int, Int32Array]]:
        """Draws a token for each of `positions` [T], of `rows` [T], from logits [T, V].

        Returns (ids [T] int64, log-probs [T] float32, support). The support maps a row to the ids
        that it could draw, if its rule records them. pack: stores [V] bool as ids.
        """
        device, numbers = logits.device, self.rule_of[rows]
        uniform = to_device(uniforms(self.streams[rows], positions), device)
        if (numbers == numbers[0]).all():
            return self._draw_alike(logits, uniform, rows, ops, pack)
        ids = torch.empty(len(logits), dtype=torch.int64, device=device)
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=device)
        support = dict[int, Int32Array]()
        for number in np.unique(numbers):
            places = np.flatnonzero(numbers == number)
            at = to_device(places, device)
            ids[at], logprobs[at], own = self._draw_alike(
                logits[at], uniform[at], rows[places], ops, pack
            )
            support |= own
        return ids, logprobs, support

    def _draw_alike(
        self,
        logits: Tensor,
        uniform: Tensor,
        rows: npt.NDArray[np.int64],
        ops: Ops,
        pack: Callable[[npt.NDArray[np.bool_]], Int32Array],
    ) -> tuple[Tensor, Tensor, dict[int, Int32Array]]:
        """`draw` for rows of one rule."""
        rule, device, filters = self.rules[self.rule_of[rows[0]]], logits.device, {}
        if rule.is_filtered:
            filters["top_p"] = to_device(self.top_p[rows], device)
            filters["top_k"] = to_device(self.top_k[rows], device)
        if rule.is_constrained:
            filters["allowed"] = to_device(np.stack([self.allowed(row) for row in rows]), device)
        ids, logprobs, kept = sample(logits, uniform, rule, ops, **filters)
        if kept is None:
            return ids, logprobs, {}
        packed = map(pack, kept.cpu().numpy())
        return ids, logprobs, dict(zip(rows.tolist(), packed, strict=True))
