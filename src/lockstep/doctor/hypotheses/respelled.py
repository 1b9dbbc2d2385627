"""Log-probs belong to other ids of the same text: offsets change from some token on.

A reply that is decoded and encoded again has other tokens here and there. The program laid its
log-probs onto the new ids in order, so the offset changes at each such place. The search finds the
best path of offsets for all replies at once. The same search on the log-probs of other replies
measures how much a path explains by chance.

Encoding a text again mostly gives fewer ids than were drawn. If a row has more ids, and no single
id of the vocabulary covers two of them, the text itself changed: it was rendered from messages.

# S replies  L tokens of the longest  K offsets
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from lockstep.doctor.explain import Prediction, View, hypothesis
from lockstep.doctor.hypotheses.shifted import at_offsets
from lockstep.doctor.rows import Float64Array
from lockstep.types import Int64Array

REACH = 12
"""Largest offset: respelt words of a reply add or take one token each."""


@hypothesis(cause="reencoded", fitted=3, is_of_other_ids=True, least=0.2)
def respelled(view: View) -> Iterator[Prediction]:
    """Log-probs belong to the ids in the row."""
    rows = view.rows
    spans = rows.spans
    at = np.flatnonzero(rows.span_of >= 0)  # unknown ones too: they hold their places
    span = rows.span_of[at]
    num = np.bincount(span, minlength=len(spans))
    first = np.concatenate([[0], np.cumsum(num)])[:-1]
    place = np.arange(len(at)) - first[span]
    out = np.full(rows.num_tokens, np.nan)
    steps = np.zeros(rows.num_tokens, np.int64)
    total = gained = whole = by_chance = 0.0
    size = np.ceil(np.log2(np.maximum(num, 1))).astype(np.int64)
    for power in np.unique(size[num > 0]).tolist():  # replies of near lengths: little padding
        mine = np.flatnonzero((size == power) & (num > 0))
        width = int(num[mine].max())
        number = np.full(len(spans), -1)
        number[mine] = np.arange(len(mine))
        keep = number[span] >= 0
        index = number[span[keep]], place[keep]
        t, s = np.full((2, len(mine), width), np.nan)
        t[index], s[index] = view.trainer[at[keep]], view.sampler[at[keep]]
        moved, offset, gain = aligned(view, t, s)
        # Chance: another reply's log-probs in place of a reply's own.
        other = np.roll(s, 1, 0)
        *_, luck = aligned(view, t, other)
        total += float(np.nansum(view.loss(t - s)))
        whole += float(np.nansum(view.loss(t - other)))
        gained, by_chance = gained + float(gain.sum()), by_chance + float(luck.sum())
        out[at[keep]] = np.where((gain > 0)[index[0]], moved[index], np.nan)
        change = np.diff(offset, axis=1, prepend=offset[:, :1])
        steps[at[keep]] = np.where((gain > 0)[index[0]], change[index], 0)
    if total and gained > 0:
        chance = max(by_chance / max(whole, 1e-9), 0.0)
        yield Prediction(
            text="at offsets that change inside of replies",
            cause="rerendered" if _is_rewritten(view, steps) else "",
            sampler=out,
            chance=chance,
        )


def _is_rewritten(view: View, steps: Int64Array) -> bool:
    """True if the row's text is longer than the drawn text. steps: [N] changes of the offset."""
    rows, tokenizer = view.rows, view.setting.tokenizer
    if tokenizer is None:
        return False
    longer, shorter = 0, int((steps > 0).sum())
    for place in np.flatnonzero(steps < 0).tolist():
        span = rows.span_of[place]
        near = slice(max(place - 2, rows.spans.begin[span]), min(place + 2, rows.spans.end[span]))
        words = [tokenizer.decode([id_]) for id_ in rows.token_ids[near].tolist()]
        if all(word.strip() for word in words):  # some tokenizers put a space before any text
            longer += all(len(tokenizer.encode(a + b)) > 1 for a, b in pairwise(words))
    return longer - shorter > 2 * np.sqrt(longer + shorter)  # 2.5 % by chance


def aligned(
    view: View, t: Float64Array, s: Float64Array
) -> tuple[Float64Array, Int64Array, Float64Array]:
    """([S, L] the sampler's numbers along the best path of offsets, [S, L] these offsets, [S] the
    gap that the path removes)."""
    S, L = t.shape
    offsets = np.arange(-REACH, REACH + 1)
    moved, cost = at_offsets(view, t, s, REACH)
    cost = np.nan_to_num(cost)
    # A change costs as much as a token that is a nat off: a path changes for two tokens or more.
    switch = float(view.loss(np.ones(1))[0])
    jump = switch * np.minimum(np.abs(offsets[:, None] - offsets[None]), 3)
    best = np.tile(switch * np.abs(offsets).clip(0, 3), (S, 1))
    back: list[Int64Array] = []
    for place in range(L):
        routes = best[:, :, None] + jump[None]  # [S, from, to]
        chosen = routes.argmin(1)
        best = np.take_along_axis(routes, chosen[:, None], 1)[:, 0] + cost[:, :, place]
        back.append(chosen)
    path = np.empty((S, L), np.int64)
    state = best.argmin(1)
    total = best.min(1)
    for place in range(L - 1, -1, -1):
        path[:, place] = state
        state = np.take_along_axis(back[place], state[:, None], 1)[:, 0]
    out = np.take_along_axis(moved, path[:, None], 1)[:, 0]
    gain = np.nansum(view.loss(t - s), 1) - total
    return out, offsets[path], gain
