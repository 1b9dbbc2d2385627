"""From logits to ids and log-probs, for all rows of a step at once.

A draw is the inverse of the cumulative distribution at one uniform number, a hash of the request's
seed and the token's position. It does not depend on other requests or on preemption.

# B rows  V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lockstep.ops.base import Ops
from lockstep.types import Distribution

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
class Rule:
    """How a row draws. Rows of one rule are drawn together."""

    temperature: float
    is_filtered: bool
    """Whether top-p or top-k is on."""
    distribution: Distribution
    records_support: bool = False
    """Whether each draw returns the ids that the filter kept."""


def sample(
    logits: Tensor,
    uniform: Tensor,
    rule: Rule,
    ops: Ops,
    *,
    top_p: Tensor | None = None,
    top_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draws once from each row of logits [B, V].

    Returns (ids [B] int64, log-probs [B] float32 under the rule's distribution, kept [B, V] bool:
    True at ids that could be drawn; None unless the rule records it).
    uniform [B] float32; top_p [B] float32 and top_k [B] int64 if the rule filters. A row with a
    non-finite logit gets a NaN log-prob and some id of the vocabulary.
    """
    if rule.temperature == 0:
        logp = ops.log_softmax(logits)
        ids = logp.argmax(-1, keepdim=True)
        return ids[:, 0], logp.gather(1, ids)[:, 0], None
    logp = ops.log_softmax(logits, temperature=rule.temperature)
    if rule.is_filtered:
        assert top_p is not None and top_k is not None, "a filtering rule needs top_p and top_k"
        ids, kept = _draw_filtered(logp, uniform, top_p, top_k)
        if rule.distribution == "sampled":
            # The trainer's arithmetic over the support, not a log-prob minus a log mass.
            logp = ops.log_softmax(logits, temperature=rule.temperature, kept=kept)
            found = logp.gather(1, ids)[:, 0]
            return ids[:, 0], found, kept if rule.records_support else None
    else:
        ids = _draw(_probs(logits, rule.temperature), uniform)
    if rule.distribution == "model" and rule.temperature != 1.0:
        logp = ops.log_softmax(logits)
    return ids[:, 0], logp.gather(1, ids)[:, 0], None


def _probs(logits: Tensor, temperature: float) -> Tensor:
    """exp(log_softmax) up to rounding, but cheaper."""
    logits = logits.float()
    return torch.softmax(logits if temperature == 1.0 else logits / temperature, -1)


def _draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """[B, 1]: first id whose cumulative probability exceeds u times the sum. probs [B, V] need not
    sum to 1; an id of probability 0 is never drawn."""
    cumulative = probs.cumsum(-1)
    target = cumulative[:, -1:] * uniform[:, None]
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=probs.shape[1] - 1)


def _draw_filtered(
    logp: Tensor, uniform: Tensor, top_p: Tensor, top_k: Tensor
) -> tuple[Tensor, Tensor]:
    """(ids [B, 1], kept [B, V] bool). Applies top-k, then top-p to the rest, in the order of
    Hugging Face and vLLM. Of equally likely tokens the smaller id comes first."""
    logp, order = logp.sort(dim=-1, descending=True, stable=True)
    probs = logp.exp()
    rank = torch.arange(probs.shape[1], device=probs.device)
    is_kept = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    probs = probs * is_kept
    before = probs.cumsum(-1) - probs
    is_kept = is_kept & (before < top_p[:, None] * probs.sum(-1, keepdim=True))
    ids = order.gather(1, _draw(probs * is_kept, uniform))
    return ids, torch.empty_like(is_kept).scatter_(1, order, is_kept)
