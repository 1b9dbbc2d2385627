"""Facts about the parts of a row: masks, turns, stops, prompts, padding, experts and versions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from lockstep.doctor.facts.base import FAR, MIN_EQUAL, Contradiction, Places, agree, fact
from lockstep.doctor.findings import Basis, Setting
from lockstep.doctor.gap import gap_of
from lockstep.doctor.rows import BoolArray, Rows, given
from lockstep.types import Int64Array

MOST = 0.9
"""Share of replies that must end with an id for it to be a stop id that nobody told."""


@fact(needs=("is_sampled",))
def mask_author(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """The model drew all trained tokens."""
    spans = rows.spans
    trained = rows.loss_mask
    first = rows.firsts(spans.begin)
    begin, end = rows.runs(trained & ~given(rows.is_sampled))
    # Just before the first reply the border is early; elsewhere an observation is trained.
    is_border = end == first[rows.row_of[begin]]
    note = "tokens before the first reply are trained, and no model drew them"
    yield Contradiction("boundary", note, begin[is_border], end[is_border])
    note = "tokens are trained that no model drew, by the recorded turns"
    inner = ~is_border
    yield Contradiction("observation_trained", note, begin[inner], end[inner])
    num = rows.num_in(trained, spans.begin, spans.end)
    for cause, note, at in (
        ("boundary", "the first drawn tokens of a reply are not trained", spans.begin),
        ("missing_final", "the last drawn tokens of a reply are not trained", spans.end - 1),
    ):
        is_part = (num > 0) & ~trained[at]
        if cause == "missing_final" and rows.rollout_logprobs is not None:
            is_part &= np.isfinite(rows.rollout_logprobs[at])  # else nothing could be trained
        yield Contradiction(cause, note, spans.begin[is_part], spans.end[is_part])


@fact(needs=("prompt_lengths",))
def prompt_length(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """The prompt ends where the first reply begins."""
    length = given(rows.prompt_lengths)
    first = rows.firsts(np.flatnonzero(rows.loss_mask)) - rows.offsets[:-1]
    is_wrong = (length < 0) | (length > rows.sizes)
    is_wrong |= (first < rows.sizes) & (length > first)  # trained tokens inside of the prompt
    row = np.flatnonzero(is_wrong)
    begin = rows.offsets[row] + np.minimum(first, np.maximum(rows.sizes - 1, 0))[row]
    note = "the recorded length of the prompt is negative, beyond the row, or behind trained tokens"
    yield Contradiction("boundary", note, begin, begin + 1)


def stop_ids(rows: Rows, setting: Setting) -> tuple[Int64Array, Basis]:
    """Ids that end a reply: the recorded ones, or else one or two ids that nearly all earlier
    replies of a dialogue end with, and nearly no reply has inside."""
    if setting.stop_ids:
        return np.array(sorted(setting.stop_ids)), "shown"
    spans, ids = rows.spans, rows.token_ids
    is_earlier = ~spans.is_last
    begin, end = (spans.begin[is_earlier], spans.end[is_earlier])
    ends = ids[(end if len(end) else spans.end) - 1]
    found, count = np.unique(ends, return_counts=True)
    for chosen in (found[np.argsort(-count)[:num]] for num in (1, 2)):
        inside = rows.num_in(np.isin(ids, chosen), begin, np.maximum(end - 1, begin)) > 0
        is_rare = not len(end) or inside.mean() <= 1 - MOST
        if len(ends) >= 8 and np.isin(ends, chosen).mean() >= MOST and is_rare:
            return chosen.astype(np.int64), "fit"
    return np.empty(0, np.int64), "fit"


@fact()
def after_stop(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """A reply ends at its first stop id."""
    spans, (stops, basis) = rows.spans, stop_ids(rows, setting)
    is_stop = np.isin(rows.token_ids, stops) & rows.sampled
    if not is_stop.any() or not len(spans):
        return
    first = np.full(len(spans), rows.num_tokens, np.int64)
    np.minimum.at(first, rows.span_of[is_stop], np.flatnonzero(is_stop))
    hit = np.flatnonzero(first + 1 < spans.end)
    hit = hit[rows.loss_mask[np.minimum(first[hit] + 1, rows.num_tokens - 1)]]
    if not len(hit) or (basis == "fit" and 2 * len(hit) > len(spans)):
        return  # an id inside of most replies does not end them
    begin, end = first[hit] + 1, spans.end[hit]
    # Tokens that go on to another stop are a dialogue: observations and later replies.
    goes_on = rows.num_in(is_stop, begin, end) > 0
    # The end of the prompt, if they begin with the first trained token of the row.
    is_early = goes_on & (rows.firsts(spans.begin)[spans.row] == first)[hit]
    if is_early.any():
        note = "the trained tokens of a row begin with the stop id of the prompt"
        yield Contradiction("boundary", note, begin[is_early] - 1, begin[is_early], basis=basis)
        begin, end, hit = (at[~is_early] for at in (begin, end, hit))
        goes_on = goes_on[~is_early]
    if not len(hit):
        return
    spans_of_row = np.bincount(spans.row, minlength=len(rows))
    is_merged = spans_of_row[spans.row[hit]] == 1  # else the mask does tell turns apart
    is_dialogue = (goes_on & is_merged).mean() > 0.5 and rows.is_sampled is None
    # Nobody drew tokens there that the trainer denies; padding is no observation.
    pad = -1 if setting.pad_id is None else setting.pad_id
    words = rows.within(begin, end) & (rows.token_ids != pad)
    is_denied = gap_of(rows.gap[words]).means()["k2"] > FAR**2 / 2
    cause = "observation_trained" if is_dialogue or is_denied else "after_stop"
    note = "tokens after the stop id of a reply are trained"
    yield Contradiction(cause, note, begin, end, basis=basis)


@fact()
def missing_stop(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """A reply that the dialogue goes on after ends with a stop id."""
    spans, (stops, basis) = rows.spans, stop_ids(rows, setting)
    ids, renderer = rows.token_ids, setting.renderer
    known = stops if renderer is None else [*stops, *renderer.tokenizer.control_ids]
    is_known = np.isin(ids, known)
    if not is_known.any():  # not this program's ids
        return
    last = spans.end - 1
    ends = np.isin(ids[last], stops)
    following = np.minimum(spans.end, rows.num_tokens - 1)
    is_closed = ends | np.isin(ids[following], stops)
    # A hole in the mask splits a reply: the next run of trained tokens is its end.
    is_closed[:-1] |= np.isin(ids[spans.begin[1:]], stops) & (spans.row[1:] == spans.row[:-1])
    earlier = is_closed[~spans.is_last]
    # Plain text may follow a stop string, which ends a reply without an id, and has the finish
    # reason "stop" too. A template's text has control tokens, and a stop id before them.
    is_open = ~spans.is_last & ~is_closed
    has_control = rows.num_in(is_known, spans.end, np.append(spans.begin[1:], rows.num_tokens)) > 0
    is_wrong, is_unusual = is_open & has_control, is_open & _is_usual(earlier)
    if rows.finish_reasons is not None:
        said = np.array([reason == "stop" for reason in rows.finish_reasons], np.bool_)
        said = said[spans.row] & spans.is_last
        is_unusual |= said & ~ends & _is_usual(ends[said])
    if setting.stop_ids and _is_usual(earlier):
        # Last replies that lack an end, though shorter than others that have one, were not cut.
        longest = int(spans.size[ends].max(initial=0))
        open_ = spans.is_last & ~ends & (spans.size < longest)
        if open_.sum() >= MOST * spans.is_last.sum():
            is_wrong |= open_
    is_told = np.zeros(len(spans), np.bool_)
    if rows.engine_ids is not None:  # facts/engine_ids judges the ends of these rows
        is_told = np.array([bool(replies) for replies in rows.engine_ids], np.bool_)[spans.row]
    note = "a reply ended, and neither it nor the text after it has a stop id"
    # A model scores the row with the stop id (hypotheses/structure): what else is wrong then shows.
    found = partial(Contradiction, "missing_final", note, reaches_on=setting.model is None)
    for where in (is_wrong, is_unusual & ~is_wrong):
        if len(at := last[where & ~is_told]):
            yield found(at, at + 1, basis=basis if where is is_wrong else "fit")


def _is_usual(has_end: BoolArray) -> bool:
    """True if nearly all of many replies have an end."""
    return len(has_end) >= 8 and has_end.mean() >= MOST


@fact(needs=("advantages",))
def advantages(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """Each trained token has its own advantage."""
    has = np.nan_to_num(given(rows.advantages)) != 0
    begin, end = rows.runs(rows.loss_mask)
    long = end - begin >= 3
    begin, end = begin[long], end[long]
    inside = rows.num_in(has, begin, end) == end - begin - 1
    padded = np.concatenate([has, [False]])
    is_end = np.concatenate([rows.position[1:] == 0, [True]])
    late = inside & ~has[begin] & padded[end] & ~is_end[end - 1]
    early = inside & ~has[end - 1] & padded[begin - 1] & (rows.position[begin] > 0)
    for is_moved, at in ((late, begin), (early, end - 1)):
        note = "a trained token has the advantage 0, and an untrained one beside its run has one"
        yield Contradiction("late_advantages", note, at[is_moved], at[is_moved] + 1, moves=False)


@fact(needs=("routed_experts",))
def routes(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """A token's experts differ from each other."""
    experts = given(rows.routed_experts)
    if experts.ndim != 3 or not experts.size:
        return
    is_known = (experts >= 0).all((1, 2))
    ordered = np.sort(experts, -1)
    is_twice = (ordered[..., 1:] == ordered[..., :-1]).any((1, 2)) & is_known
    if experts.shape[-1] == 1:
        is_same = (experts == experts[:1]).all((1, 2)) & is_known
        is_twice = is_same if is_same.sum() == is_known.sum() > 16 else is_twice
    note = "one expert is listed twice for a token: a filler, not a route"
    yield Contradiction("zero_routes", note, *rows.runs(is_twice), moves=False)


@fact()
def prompt_twice(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """A row holds its prompt once."""
    out = Places(reaches_on=not setting.model)
    first = rows.firsts(np.flatnonzero(rows.sampled))
    for row, tokens in enumerate(rows.slices):
        size = min(int(first[row]), tokens.stop) - tokens.start
        prompt = rows.token_ids[tokens.start : tokens.start + size]
        half = size // 2
        if half >= 2 * MIN_EQUAL and np.array_equal(prompt[:half], prompt[half:]):
            begin, end = tokens.start + half, tokens.start + size
            out.add("duplicated_prompt", "the row contains the prompt twice", begin, end)
    yield from out.all()


@fact()
def padding(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """No padding stands inside of a row, or before it."""
    ids, position = rows.token_ids, rows.position
    is_same = np.zeros(rows.num_tokens, np.bool_)
    is_same[1:] = (ids[1:] == ids[:-1]) & (position[1:] > 0)
    is_free = ~rows.sampled
    begin, end = rows.runs(is_same & is_free)
    size = end - begin + 1
    pad = -1 if setting.pad_id is None else setting.pad_id
    is_pad = (ids[begin] == pad) & (size >= MIN_EQUAL)
    if setting.pad_id is None:
        # Nobody names the id: it opens rows, stands right before a reply, or is longer than text.
        is_near = rows.sampled[np.minimum(end, rows.num_tokens - 1)] | (position[begin] == 1)
        is_pad = (size >= 2 * MIN_EQUAL) & (is_near | (size >= 4 * MIN_EQUAL))
        control = setting.tokenizer.control_ids if setting.tokenizer is not None else frozenset()
        if control:
            is_pad |= np.isin(ids[begin], list(control)) & (size >= MIN_EQUAL)
    row_end = rows.offsets[rows.row_of[begin] + 1]
    chosen = is_pad & (end < row_end) & (begin > 0)
    chosen &= rows.num_in(rows.sampled, begin, row_end) > 0
    # Both sides ignored it, or read it, as they read the places of an image.
    is_shared = chosen & ((position[begin] == 1) | (setting.pad_id is None))
    if agree(rows, rows.row_of[begin[is_shared]], setting):
        chosen &= ~is_shared
    note = "padding stands before or between tokens of a row"
    # A model scores the row without it (hypotheses/structure): what else is wrong then shows.
    found = partial(Contradiction, "padding", note, reaches_on=not setting.model)
    yield found(begin[chosen] - 1, end[chosen], basis="fit" if setting.pad_id is None else "shown")


@fact(needs=("policy_version", "trainer_version"))
def versions(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """Tokens are drawn by weights that the trainer has had."""
    version, trainer_version = given(rows.policy_version), given(rows.trainer_version)[rows.row_of]
    known = rows.sampled & rows.loss_mask & (version >= 0) & (trainer_version >= 0)
    age = trainer_version - version
    begin, end = rows.runs(known & (age < 0))
    note = "a token's version is newer than the weights that trained on it"
    yield Contradiction("late_version", note, begin, end, moves=False)
    if setting.max_staleness is not None:
        begin, end = rows.runs(known & (age > setting.max_staleness))
        note = f"tokens are more than max_staleness={setting.max_staleness} updates old"
        yield Contradiction("stale", note, begin, end)
