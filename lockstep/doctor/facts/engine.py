"""Facts about the ids that the engine returned and was sent, against the ids of the row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.doctor.facts.base import MIN_PADDING, Contradiction, fact
from lockstep.doctor.findings import Setting
from lockstep.doctor.rows import Rows
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Int32Array

Ids = Int32Array


@dataclass
class _Places:
    """Places by (cause, note, whether the rest of the row follows from it)."""

    found: dict[tuple[str, str, bool], list[tuple[int, int, Sequence[int]]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(
        self,
        cause: str,
        note: str,
        begin: int,
        end: int,
        ids: Sequence[int] = (),
        *,
        on: bool = True,
    ) -> None:
        self.found[cause, note, on].append((begin, max(end, begin + 1), ids))

    def all(self) -> Iterator[Contradiction]:
        for (cause, note, on), found in self.found.items():
            begin, end, ids = zip(*found, strict=True)
            yield Contradiction(
                cause=cause,
                note=note,
                begin=np.array(begin),
                end=np.array(end),
                expected=ids if any(len(i) for i in ids) else (),
                reaches_on=on,
            )


@fact("engine_ids", claim="the row trains the ids that the engine returned", needs=("engine_ids",))
def engine_ids(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    assert rows.engine_ids is not None, "the fact needs it"
    out, spans_of = _Places(), rows.spans.of_rows(len(rows))
    spans = rows.spans
    for row, tokens in enumerate(rows.slices):
        answered = rows.engine_ids[row]
        if answered is None or not len(tokens_of(rows, tokens)):
            continue
        answered = [reply for reply in answered if len(reply)]
        mine = [(int(spans.begin[s]), int(spans.end[s])) for s in spans_of[row]]
        is_equal = len(mine) == len(answered) and all(
            np.array_equal(rows.token_ids[b:e], reply)
            for (b, e), reply in zip(mine, answered, strict=True)
        )
        if is_equal:
            continue
        found = located(rows.token_ids[tokens], answered, [b - tokens.start for b, _ in mine])
        if found is not None:
            _wrong_masks(rows, [(tokens.start + b, tokens.start + e) for b, e in found], out)
        else:
            _wrong_ids(rows, mine, answered, setting.tokenizer, out, tokens)
    yield from out.all()


def tokens_of(rows: Rows, tokens: slice) -> Ids:
    return rows.token_ids[tokens]


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


def _wrong_masks(rows: Rows, places: Sequence[tuple[int, int]], out: _Places) -> None:
    """The ids are there; other tokens are trained."""
    row = int(rows.row_of[places[0][0]])
    begin, end = int(rows.offsets[row]), int(rows.offsets[row + 1])
    drawn = np.zeros(end - begin, np.bool_)
    for b, e in places:
        drawn[b - begin : e - begin] = True
    trained = rows.loss_mask[begin:end]
    first, last = places[0][0] - begin, places[-1][1] - begin
    more = np.flatnonzero(trained & ~drawn)
    for run in np.split(more, np.flatnonzero(np.diff(more) > 1) + 1) if len(more) else ():
        b, e = int(run[0]), int(run[-1]) + 1
        if e <= first:
            told = ("boundary", "tokens before the engine's first reply are trained")
        elif b >= last:
            told = ("after_stop", "tokens after the engine's last reply are trained")
        else:
            told = ("observation_trained", "tokens between the engine's replies are trained")
        out.add(*told, begin + b, begin + e, on=False)
    for b, e in places:
        mine = trained[b - begin : e - begin]
        if not mine.any() or mine.all():
            continue
        lost = np.flatnonzero(~mine)
        if not mine[0]:
            told = ("boundary", "the first ids of the engine's reply are not trained")
        elif not mine[-1]:
            told = ("missing_final", "the last ids of the engine's reply are not trained")
        else:
            continue
        out.add(*told, b + int(lost[0]), b + int(lost[-1]) + 1, on=False)


def _wrong_ids(
    rows: Rows,
    mine: Sequence[tuple[int, int]],
    answered: Sequence[Ids],
    tokenizer: Tokenizer | None,
    out: _Places,
    tokens: slice,
) -> None:
    """The row lacks ids that the engine returned."""
    for (begin, end), reply in zip(mine, answered, strict=False):
        ids = rows.token_ids[begin:end]
        if np.array_equal(ids, reply):
            continue
        cause, note = compare(ids, reply, tokenizer)
        is_control = tokenizer is not None and int(reply[-1]) in tokenizer.control_ids
        if cause == "reencoded" and is_control and ids[-1] != reply[-1]:
            lost = "the end of the engine's reply is lost"
            out.add("missing_final", lost, end - 1, end, [int(reply[-1])], on=False)
        at = first_difference(ids.tolist(), reply.tolist())
        lost = cause == "missing_final"
        begin = begin + at if not lost else end - 1
        out.add(cause, note, begin, end, () if lost else reply[at:].tolist())
    if len(mine) < len(answered):
        end = tokens.stop
        lost = f"the row lacks the last of the engine's {len(answered)} replies"
        if not mine or all(
            np.array_equal(rows.token_ids[b:e], r)
            for (b, e), r in zip(mine, answered, strict=False)
        ):
            out.add("missing_final", lost, end - 1, end, answered[-1].tolist())


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


@fact(
    "engine_prompts",
    claim="the row begins with the ids that the engine was sent",
    needs=("engine_prompt_ids", "engine_ids"),
)
def engine_prompts(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    assert rows.engine_prompt_ids is not None and rows.engine_ids is not None, "needed"
    out, spans_of, spans = _Places(), rows.spans.of_rows(len(rows)), rows.spans
    for row, tokens in enumerate(rows.slices):
        sent, answered = rows.engine_prompt_ids[row], rows.engine_ids[row]
        if not sent or answered is None:
            continue
        ids, start = rows.token_ids[tokens], tokens.start
        answered = [reply for reply in answered if len(reply)]
        mine = [int(spans.begin[s]) - start for s in spans_of[row]]
        found = located(ids, answered, mine)
        begins = [b for b, _ in found] if found is not None else mine
        if not begins or (np.array_equal(ids[: begins[0]], sent[0]) and len(sent) == 1):
            continue
        note = _of_prompt(ids[: begins[0]], sent[0], setting)
        if note is not None:
            at = first_difference(ids.tolist(), sent[0].tolist())
            out.add(*note, start + at, start + max(begins[0], at + 1), sent[0][at:].tolist())
            continue
        for turn in range(1, min(len(sent), len(begins), len(answered) + 1)):
            before = len(sent[turn - 1]) + len(answered[turn - 1])
            history = np.concatenate([sent[turn - 1], answered[turn - 1]])
            end = found[turn - 1][1] if found is not None else None
            if not np.array_equal(sent[turn][:before], history):
                note = ("rerendered", "the engine was sent a history that was rendered anew")
                at = first_difference(sent[turn].tolist(), ids.tolist())
                out.add(
                    *note,
                    start + min(at, len(ids) - 1),
                    start + begins[turn],
                    sent[turn][at:].tolist(),
                )
                break
            if end is None:
                break
            glue, theirs = ids[end : begins[turn]], sent[turn][before:]
            if np.array_equal(glue, theirs):
                continue
            told = _of_glue(glue, theirs, setting)
            out.add(*told, start + end, start + max(begins[turn], end + 1), theirs.tolist())
            break
    yield from out.all()


def _of_prompt(mine: Ids, sent: Ids, setting: Setting) -> tuple[str, str] | None:
    """(cause, note) of a first prompt that is not the engine's; None for an equal one."""
    if np.array_equal(mine, sent):
        return None
    if len(mine) == 2 * len(sent) and np.array_equal(mine, np.concatenate([sent, sent])):
        return "duplicated_prompt", "the prompt that the engine was sent stands in the row twice"
    if _is_padded(mine, sent):
        return "padding", "the prompt that the engine was sent, with padding"
    return "wrong_template", "the prompt is not what the engine was sent"


def _of_glue(mine: Ids, sent: Ids, setting: Setting) -> tuple[str, str]:
    if _is_padded(mine, sent):
        return "padding", "padding stands between two turns"
    lost = len(sent) - len(mine)
    if 0 < lost <= 2 and np.array_equal(sent[lost:], mine):
        return "dropped_separator", "the separator after a reply is lost"
    return "wrong_template", "the ids between two turns are not what the engine was sent"


def _is_padded(mine: Ids, sent: Ids) -> bool:
    """Whether `mine` is `sent` with a run of one id in it."""
    more = len(mine) - len(sent)
    if more < MIN_PADDING:
        return False
    at = first_difference(mine.tolist(), sent.tolist())
    inserted = mine[at : at + more]
    return bool((inserted == inserted[0]).all()) and np.array_equal(mine[at + more :], sent[at:])
