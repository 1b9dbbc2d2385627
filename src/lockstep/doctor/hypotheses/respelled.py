"""Log-probs are of other ids of the same text: aligned up to a token, then at changing offsets.

A reply that is decoded and encoded again has other tokens here and there. Its log-probs were laid
onto the new ids in order, so that the offset changes at each of these places. The best monotone
path of offsets is found for all replies at once; the same search on the log-probs of other replies
says what it explains by chance. With the model, the first place of a row tells whether the same
text was drawn: a split of the token there gives both of the recorded numbers.

# S replies  L tokens of the longest  K offsets
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from lockstep.doctor.explain import CHUNK, Prediction, View, hypothesis
from lockstep.doctor.facts.base import FAR
from lockstep.doctor.findings import MOST
from lockstep.doctor.rows import Float64Array
from lockstep.doctor.scoring.layouts import Laid, Layout
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Int64Array

REACH = 12
"""Largest offset: respelt words of a reply add or take one token each."""


@hypothesis(
    "respelled",
    cause="reencoded",
    fitted=3,
    least=0.2,
    claim="log-probs are of the ids that stand in the row",
)
def respelled(view: View) -> Iterator[Prediction]:
    rows = view.rows
    spans = rows.spans
    at = np.flatnonzero(rows.span_of >= 0)  # unknown ones too: they hold their places
    span = rows.span_of[at]
    if not len(rows.compared):
        return
    num = np.bincount(span, minlength=len(spans))
    first = np.concatenate([[0], np.cumsum(num)])[:-1]
    place = np.arange(len(at)) - first[span]
    out = np.full(rows.num_tokens, np.nan)
    whole = by_chance = 0.0
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
        out[at[keep]] = aligned(view, t, s)[index]
        # Chance: another reply's log-probs in place of a reply's own.
        other = np.roll(s, 1, 0)
        lucky, gap = view.loss(t - aligned(view, t, other)), view.loss(t - other)
        whole += float(np.nansum(gap))
        by_chance += float(np.nansum(gap - np.where(np.isnan(lucky), gap, lucky)))
    if np.isfinite(out).any():
        chance = min(max(by_chance / max(whole, 1e-9), 0.0), MOST)
        share = same_text(view)
        told = "" if share is None else f", {share:.0%} of the first places by the same text"
        yield Prediction(
            text=f"at offsets that change inside of replies{told}",
            sampler=out,
            chance=chance,
            cause="rerendered" if share is not None and share < 1 - MOST / 2 else "reencoded",
        )


def same_text(view: View) -> float | None:
    """Share of the rows whose first token that is far off was drawn in other tokens of the same
    text: the model gives the first two their numbers. None where too few rows can tell."""
    rows, model, tokenizer = view.rows, view.setting.model, view.setting.tokenizer
    if model is None or tokenizer is None or np.any(view.above):
        return None
    near, num_sites = 2 * view.scale + view.step, 0
    pieces = enumerate(tokenizer.all_token_bytes())
    id_of = {piece: id_ for id_, piece in pieces if piece and id_ not in tokenizer.control_ids}
    far = rows.firsts(np.flatnonzero((np.abs(rows.gap) > FAR) & (rows.span_of >= 0)))
    known = zip(rows.offsets.tolist(), far.tolist(), strict=False)
    laid: list[Laid] = []
    for begin, site in [(begin, site) for begin, site in known if site < rows.num_tokens]:
        before = np.abs(rows.gap[begin:site])
        if np.isfinite(before).sum() < CHUNK or np.nanmedian(before) > near:
            continue  # the ids before it were not read as they are in the row
        if sum(len(ids) for ids, *_ in laid) > model.max_tokens // 2:
            break
        num_sites += 1
        end = int(rows.spans.end[rows.span_of[site]])
        for at in range(site - 1, min(site + 1, end - 1)):
            for pair in _spellings(tokenizer, id_of, rows.token_ids[at:end].tolist()):
                ids = np.append(rows.token_ids[begin:at], pair)
                place = np.append(np.full(at - begin, -1), [at, at + 1])
                laid.append((ids, np.arange(len(ids)), place))
    if num_sites < CHUNK or (layout := Layout.of(laid, rows)) is None:
        return None
    values = model.score(layout.rows, np.arange(len(laid)), of=model.loaded(rows))
    is_near = (layout.place >= 0) & (np.abs(values - view.sampler[layout.place]) <= near)
    is_given = layout.rows.row_sums(np.flatnonzero(is_near)) == 2
    last = layout.place[layout.rows.offsets[1:] - 1]
    return len(np.unique(rows.row_of[last[is_given]])) / num_sites


def _spellings(
    tokenizer: Tokenizer, id_of: Mapping[bytes, int], ids: list[int]
) -> Iterator[tuple[int, int]]:
    """Other first two tokens of the same text: a shorter or longer first one, then the rest of the
    token that it splits, or what the tokenizer writes next."""
    ids = ids[: next((n for n, i in enumerate(ids) if i in tokenizer.control_ids), len(ids))]
    text = tokenizer.decode_bytes(ids[:REACH])
    own = tokenizer.token_bytes(ids[0]) if ids else b""
    for size in range(1, len(text)):
        if size == len(own) or text[:size] not in id_of:
            continue
        rest = text[size:]
        following = tokenizer.encode(rest.decode("utf-8", "ignore"))[:1]
        for second in {own[size:], *map(tokenizer.token_bytes, following)} & id_of.keys():
            if rest.startswith(second):
                yield id_of[text[:size]], id_of[second]


def aligned(view: View, t: Float64Array, s: Float64Array) -> Float64Array:
    """[S, L] the sampler's numbers along the best path of offsets; NaN in replies that gain
    nothing."""
    S, L = t.shape
    offsets = np.arange(-REACH, REACH + 1)
    K = len(offsets)
    source = np.arange(L)[None] + offsets[:, None]  # [K, L]
    inside = (source >= 0) & (source < L)
    moved = np.where(inside[None], s[:, source.clip(0, L - 1)], np.nan)  # [S, K, L]
    plain, cost = view.loss(t - s), view.loss(t[:, None] - moved)
    # Nothing recorded there: the token keeps its gap.
    cost = np.where(np.isnan(cost), plain[:, None], cost)
    cost = np.nan_to_num(cost)
    # A change costs as much as a token that is a nat off: a path changes for two tokens or more.
    switch = float(view.loss(np.ones(1))[0])
    jump = switch * np.minimum(np.abs(offsets[:, None] - offsets[None]), 3)
    best = np.full((S, K), np.inf)
    best[:] = switch * np.abs(offsets)[None].clip(0, 3)
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
    return np.where((total < np.nansum(plain, 1))[:, None], out, np.nan)
