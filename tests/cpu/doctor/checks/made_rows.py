"""Rows of a policy that is a hash: every prefix has its own logits, so that any distribution over
the next token, of either side, is known exactly."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from lockstep.doctor.checks.rows import Rows

VOCABULARY = 40
Logits = np.ndarray


def policy_rows(
    *,
    groups: int = 8,
    size: int = 8,
    length: int = 24,
    seed: int = 0,
    sampler: Callable[[Logits, np.random.Generator], Logits] = lambda z, _: z,
    trainer: Callable[[Logits, np.random.Generator], Logits] = lambda z, _: z,
) -> Rows:
    """`groups` x `size` rows: a prompt of 4 ids, then `length` tokens drawn from softmax of what
    `sampler` makes of the policy's logits. Each side's log-probs are of its own logits; what it
    draws from its generator is new for every token: noise."""
    rng = np.random.default_rng(seed)
    ids, rollout, scored = [], [], []
    for group in range(groups):
        prompt = [100 + group, 100 + group // 2, 90, 91]
        for _ in range(size):
            row = list(prompt)
            for _ in range(length):
                raw = _logits(row, seed)
                drawn = _log_softmax(sampler(raw, rng))
                token = int(rng.choice(VOCABULARY, p=np.exp(drawn) / np.exp(drawn).sum()))
                rollout.append(drawn[token])
                scored.append(_log_softmax(trainer(raw, rng))[token])
                row.append(token)
            ids.append(row)
    num = groups * size
    mask = np.tile(np.arange(length + 4) >= 4, num)
    columns = [np.full(num * (length + 4), np.nan, np.float32) for _ in range(2)]
    for column, values in zip(columns, (rollout, scored), strict=True):
        column[mask] = np.minimum(np.array(values), 0.0)
    return Rows(
        row_ids=tuple(f"r{i}" for i in range(num)),
        offsets=np.arange(num + 1) * (length + 4),
        token_ids=np.array(ids, np.int32).ravel(),
        loss_mask=mask,
        rollout_logprobs=columns[0],
        trainer_logprobs=columns[1],
        groups=np.repeat(np.arange(groups), size),
    )


def bfloat16(logits: Logits, _: np.random.Generator) -> Logits:
    """Rounded as a model in bfloat16 hands its logits over."""
    bits = logits.astype(np.float32).view(np.uint32)
    return ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def noisy(std: float) -> Callable[[Logits, np.random.Generator], Logits]:
    """With noise that is new each time."""
    return lambda logits, rng: logits + rng.normal(0.0, std, len(logits))


def tempered(temperature: float) -> Callable[[Logits, np.random.Generator], Logits]:
    return lambda logits, _: logits / temperature


def nucleus(mass: float) -> Callable[[Logits, np.random.Generator], Logits]:
    """The smallest set with this much probability; others cannot be drawn."""

    def cut(logits: Logits, _: np.random.Generator) -> Logits:
        prob = np.exp(_log_softmax(logits))
        order = np.argsort(-prob)
        kept = order[: int(np.searchsorted(np.cumsum(prob[order]), mass)) + 1]
        out = np.full(len(logits), -np.inf)
        out[kept] = logits[kept]
        return out

    return cut


def best_of(k: int) -> Callable[[Logits, np.random.Generator], Logits]:
    """The k most probable."""

    def cut(logits: Logits, _: np.random.Generator) -> Logits:
        out = np.full(len(logits), -np.inf)
        kept = np.argsort(-logits)[:k]
        out[kept] = logits[kept]
        return out

    return cut


def _logits(row: list[int], seed: int) -> Logits:
    """From 2 to 30; at every fourth place one token is as good as forced."""
    code = zlib.crc32(np.array([seed, *row], np.int64).tobytes())
    rng = np.random.default_rng(code)
    scale = (1.0, 1.0, 2.5, 4.0)[code % 4]
    logits = 12.0 + np.clip(rng.normal(0.0, scale, VOCABULARY), -10, 10)
    logits[code % VOCABULARY] += 15.0 * (code % 4 == 0)
    return logits


def _log_softmax(logits: Logits) -> Logits:
    apart = logits - logits.max()
    return apart - np.log(np.exp(apart).sum())
