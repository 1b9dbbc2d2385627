"""Facts about the ids that the engine returned and was sent, against the ids of the row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.doctor.facts.base import MIN_EQUAL, Contradiction, Places, agree, fact
from lockstep.doctor.findings import Setting
from lockstep.doctor.rows import Rows, given
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Int32Array

Ids = Int32Array


@fact(needs=("engine_ids",))
def engine_ids(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """The row trains the ids that the engine returned."""
    out = Places(reaches_on=True)
    for row, tokens, answered, found in _replies(rows):
        mine = rows.replies[row]
        if not answered or tokens.start == tokens.stop:
            continue
        if found is None:
            _wrong_ids(rows, mine, answered, setting.tokenizer, out, tokens.stop)
        elif found != mine:
            _wrong_masks(rows, found, out)
    yield from out.all()


def _replies(rows: Rows) -> Iterator[tuple[int, slice, list[Ids], list[tuple[int, int]] | None]]:
    """(row, its tokens, the engine's replies, where the row holds them) of each row."""
    for row, tokens in enumerate(rows.slices):
        start, ids = tokens.start, rows.token_ids[tokens]
        answered = [reply for reply in given(rows.engine_ids)[row] or () if len(reply)]
        found = located(ids, answered, [begin - start for begin, _ in rows.replies[row]])
        places = None if found is None else [(start + b, start + e) for b, e in found]
        yield row, tokens, answered, places


def located(
    ids: Ids, replies: Sequence[Ids], begins: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Where the row holds each reply, in order; None if it lacks one. begins: where replies are
    believed to begin.

    >>> row = np.array([1, 7, 8, 2, 7, 9])
    >>> located(row, [np.array([7, 8]), np.array([7, 9])], [1, 4])
    [(1, 3), (4, 6)]
    """
    out: list[tuple[int, int]] = []
    cursor = 0
    for reply in replies:
        near = [b for b in begins if b >= cursor]
        places = np.flatnonzero(ids[cursor : len(ids) - len(reply) + 1] == reply[0]) + cursor
        for at in [*near, *places.tolist()]:
            if np.array_equal(ids[at : at + len(reply)], reply):
                out.append((at, at + len(reply)))
                cursor = at + len(reply)
                break
        else:
            return None
    return out


def _wrong_masks(rows: Rows, places: Sequence[tuple[int, int]], out: Places) -> None:
    """The ids are there; other tokens are trained."""
    tokens = rows.slices[int(rows.row_of[places[0][0]])]
    extra = np.zeros(tokens.stop - tokens.start + 2, np.int8)  # trained, and no engine's
    extra[1:-1] = rows.loss_mask[tokens]
    for b, e in places:
        extra[b - tokens.start + 1 : e - tokens.start + 1] = 0
        lost = np.flatnonzero(~rows.loss_mask[b:e]) + b
        if len(lost) in (0, e - b) or (lost[0] > b and lost[-1] < e - 1):
            continue
        what, cause = ("first", "boundary") if lost[0] == b else ("last", "missing_final")
        note = f"the {what} ids of the engine's reply are not trained"
        out.add(cause, note, int(lost[0]), int(lost[-1]) + 1, reaches_on=False)
    edges = np.flatnonzero(np.diff(extra)) + tokens.start
    for b, e in edges.reshape(-1, 2).tolist():
        if e <= places[0][0]:
            told = ("boundary", "tokens before the engine's first reply are trained")
        elif b >= places[-1][1]:
            told = ("after_stop", "tokens after the engine's last reply are trained")
        else:
            told = ("observation_trained", "tokens between the engine's replies are trained")
        out.add(*told, b, e, reaches_on=False)


def _wrong_ids(
    rows: Rows,
    mine: Sequence[tuple[int, int]],
    answered: Sequence[Ids],
    tokenizer: Tokenizer | None,
    out: Places,
    row_end: int,
) -> None:
    """The row lacks ids that the engine returned."""
    is_equal = True
    for (begin, end), reply in zip(mine, answered, strict=False):
        ids = rows.token_ids[begin:end]
        if np.array_equal(ids, reply):
            continue
        is_equal = False
        cause, note = compare(ids, reply, tokenizer)
        is_control = tokenizer is not None and int(reply[-1]) in tokenizer.control_ids
        if cause == "reencoded" and is_control and ids[-1] != reply[-1]:
            lost = "the end of the engine's reply is lost"
            out.add("missing_final", lost, end - 1, end, reply[-1:], reaches_on=False)
        if cause == "missing_final":
            out.add(cause, note, end - 1, end)
        else:
            at = first_difference(ids.tolist(), reply.tolist())
            out.add(cause, note, begin + at, end, reply[at:])
    if is_equal and len(mine) < len(answered):
        lost = f"the row lacks the last of the engine's {len(answered)} replies"
        out.add("missing_final", lost, row_end - 1, row_end, answered[-1])


def compare(ids: Ids, reply: Ids, tokenizer: Tokenizer | None) -> tuple[str, str]:
    """(cause, note) of a turn of the row that is not the engine's reply."""
    same = first_difference(ids.tolist(), reply.tolist())
    if same == len(ids):
        return "missing_final", f"the last {len(reply) - same} ids of the engine's reply are lost"
    if same == len(reply):
        return "after_stop", f"{len(ids) - same} ids follow the engine's reply"
    if len(ids) < len(reply) and np.array_equal(ids, reply[len(reply) - len(ids) :]):
        return "thinking_dropped", f"the first {len(reply) - len(ids)} ids of the reply are lost"
    match = f"{int((ids[: len(reply)] == reply[: len(ids)]).sum())} of {len(reply)} ids stay"
    if tokenizer is None:
        is_spelt = abs(len(ids) - len(reply)) <= len(reply) // 4
        cause = "reencoded" if is_spelt else "rerendered"
        return cause, f"the turn is not the engine's reply: {match}"
    mine, theirs = (_plain(tokenizer, one) for one in (ids, reply))
    if mine == theirs:
        return "reencoded", f"the engine's reply, decoded and encoded again: {match}"
    short, long = sorted((mine.strip(), theirs.strip()), key=len)
    if short and long.startswith(short):
        return "post_processed", f"the engine's reply with its text changed: {match}"
    return "rerendered", f"the engine's reply as a template writes its message: {match}"


def _plain(tokenizer: Tokenizer, ids: Ids) -> str:
    """The text of ids without the control token that ends them."""
    is_ended = len(ids) > 0 and int(ids[-1]) in tokenizer.control_ids
    return tokenizer.decode(ids[: len(ids) - is_ended])


@fact(needs=("engine_prompt_ids", "engine_ids"))
def engine_prompts(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """The row begins with the ids that the engine was sent."""
    out = Places(reaches_on=True)
    for row, tokens, answered, found in _replies(rows):
        sent, ids, start = given(rows.engine_prompt_ids)[row], rows.token_ids[tokens], tokens.start
        begins = [b - start for b, _ in (rows.replies[row] if found is None else found)]
        if not sent or not begins:
            continue
        told, own = _of_prompt(ids[: begins[0]], sent[0]), ids[max(begins[0] - len(sent[0]), 0) :]
        is_ignored = told and told[0] == "padding" and np.array_equal(own[: len(sent[0])], sent[0])
        if told is not None and not (is_ignored and agree(rows, [row], setting)):
            at = first_difference(ids.tolist(), sent[0].tolist())
            out.add(*told, start + at, start + max(begins[0], at + 1), sent[0][at:])
            continue
        for turn in range(1, min(len(sent), len(begins), len(answered) + 1)):
            history = np.concatenate([sent[turn - 1], answered[turn - 1]])
            before = len(history)
            if not np.array_equal(sent[turn][:before], history):
                note = "the engine was sent a history that was rendered anew"
                at = min(first_difference(sent[turn].tolist(), ids.tolist()), len(ids) - 1)
                out.add("rerendered", note, start + at, start + begins[turn], sent[turn][at:])
                break
            if found is None:
                break
            end = found[turn - 1][1] - start
            glue, theirs = ids[end : begins[turn]], sent[turn][before:]
            if not np.array_equal(glue, theirs):
                told = _of_glue(glue, theirs, sent[0])
                out.add(*told, start + end, start + max(begins[turn], end + 1), theirs)
                break
    yield from out.all()


def _of_prompt(mine: Ids, sent: Ids) -> tuple[str, str] | None:
    """(cause, note) of a first prompt that is not the engine's; None for an equal one."""
    if np.array_equal(mine, sent):
        return None
    if len(mine) == 2 * len(sent) and np.array_equal(mine, np.concatenate([sent, sent])):
        return "duplicated_prompt", "the row contains twice the prompt that the engine was sent"
    if _is_padded(mine, sent):
        return "padding", "the prompt that the engine was sent, with padding"
    if _is_padded(sent, mine):
        return "dropped_images", "the row lacks a run of one id that the engine was sent"
    return "wrong_template", "the prompt is not what the engine was sent"


def _of_glue(mine: Ids, sent: Ids, prompt: Ids) -> tuple[str, str]:
    if len(mine) == len(sent) + len(prompt) and (
        np.array_equal(mine, np.concatenate([sent, prompt]))
        or np.array_equal(mine, np.concatenate([prompt, sent]))
    ):
        return "duplicated_prompt", "the first prompt is in the row again, between two turns"
    if _is_padded(mine, sent):
        return "padding", "padding is between two turns"
    lost = len(sent) - len(mine)
    if 0 < lost <= 2 and np.array_equal(sent[lost:], mine):
        return "dropped_separator", "the separator after a reply is lost"
    return "wrong_template", "the ids between two turns are not what the engine was sent"


def _is_padded(mine: Ids, sent: Ids) -> bool:
    """Whether `mine` is `sent` with a run of one id in it."""
    more = len(mine) - len(sent)
    if more < MIN_EQUAL:
        return False
    at = first_difference(mine.tolist(), sent.tolist())
    inserted = mine[at : at + more]
    return bool((inserted == inserted[0]).all()) and np.array_equal(mine[at + more :], sent[at:])
