"""Changes that faults make to one row. Each returns a new row, and leaves the given one as it is.

# T tokens of the row
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from lockstep.agent.tasks import derive_seed
from lockstep.renderers.base import Renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.faults.base import FILLER
from lockstep.types import (
    COLUMNS,
    UNKNOWN_EXPERT,
    Int64Array,
    Message,
    Ragged,
    Sample,
    frozen_ids,
)


def turns(row: Sample) -> Iterator[tuple[int, int, int]]:
    """(number, begin, end) of each sampled turn of `row`, in order."""
    turn = row.columns["turn"]
    for number in range(int(turn.max(initial=-1)) + 1):
        places = np.flatnonzero(turn == number)
        if places.size:
            yield number, int(places[0]), int(places[-1]) + 1


# -- ids -------------------------------------------------------------------------------------------


def retokenized(row: Sample, tokenizer: Tokenizer) -> Sample:
    """`row` with its sampled text encoded again by the tokenizer, and its log-probs by position.

    A run of text ends at a control token, and where the turn or the mask changes.
    """
    ids, turn, mask = row.token_ids, row.columns["turn"], row.loss_mask
    is_text = (turn >= 0) & ~np.isin(ids, list(tokenizer.control_ids))
    ends_run = np.ones(len(ids), np.bool_)
    ends_run[:-1] = ~is_text[:-1] | ~is_text[1:] | (turn[:-1] != turn[1:]) | (mask[:-1] != mask[1:])
    new_ids: list[int] = []
    source: list[int] = []
    """Token of `row` that each new token takes its other columns from."""
    begin = 0
    for end in np.flatnonzero(ends_run).tolist():
        piece = ids[begin : end + 1].tolist()
        if is_text[begin]:
            piece = tokenizer.encode(tokenizer.decode(piece))
        new_ids += piece
        source += [min(begin + i, end) for i in range(len(piece))]
        begin = end + 1
    out = taken(row, np.array(source, np.int64), new_ids)
    was_sampled, is_sampled = turn >= 0, out.columns["turn"] >= 0
    for name in (name for name in row.columns if name.endswith("logprobs")):
        values, column = row.columns[name][was_sampled], out.columns[name]
        laid = np.full(is_sampled.sum(), FILLER, np.float32)
        count = min(len(values), len(laid))
        laid[:count] = values[:count]
        column[is_sampled] = laid
    return out


def without_final(row: Sample, count: int) -> Sample:
    """`row` without the last `count` sampled tokens of its last turn, but with the turn's first."""
    turn = row.columns["turn"]
    lost = np.flatnonzero((turn >= 0) & (turn == turn.max()))[1:][-count:]
    kept = np.delete(np.arange(len(row)), lost)
    return taken(row, kept, row.token_ids[kept])


def rerendered(row: Sample, renderer: Renderer, *, is_text: bool) -> Sample:
    """`row` with every turn but the last as the renderer writes it in a history.

    is_text: the program kept the turn's text, without control tokens, as an assistant's content;
    else the message that `Renderer.parse` reads. Log-probs are laid onto the new ids by position;
    where the new turn is longer, the rest counts as observed.
    """
    ids, source, is_written = [], [], []
    begin = 0
    found = list(turns(row))
    for _, first, end in found[:-1]:
        sampled = row.token_ids[first:end].tolist()
        if is_text:
            controls = renderer.tokenizer.control_ids
            text = renderer.tokenizer.decode([i for i in sampled if i not in controls])
            message = Message(role="assistant", content=text)
        else:
            message = renderer.parse(sampled)
        opening, new = written(message, renderer)
        ids += [*row.token_ids[begin : first - len(opening)].tolist(), *opening, *new]
        source += [*range(begin, first), *(min(first + i, end - 1) for i in range(len(new)))]
        is_written += [False] * (first - begin) + [i >= len(sampled) for i in range(len(new))]
        begin = end
    rest = range(begin, len(row))
    out = taken(row, np.array([*source, *rest], np.int64), [*ids, *row.token_ids[begin:].tolist()])
    return observed_at(out, np.array([*is_written, *(False for _ in rest)], np.bool_))


def written(message: Message, renderer: Renderer) -> tuple[list[int], list[int]]:
    """(the changed end of the opening before it; the ids from where a
    sampled turn would begin) of an assistant's message inside of a history, up to what ends it.

    The opening's last word may run into the message's first: a line break and a line break.
    """
    user = Message(role="user", content="x")
    before, two = renderer.render([user]), renderer.render([user, user])
    whole = renderer.render([user, message, user])
    begin = _num_equal(before, whole)
    tail = len(two) - _num_equal(before, two)
    # What is left ends with the token that opens the next message, and maybe a line break before.
    body = whole[len(before) : len(whole) - tail - 1]
    while body and body[-1] not in renderer.tokenizer.control_ids:
        body.pop()
    return whole[begin : len(before)], body


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    size = min(len(one), len(other))
    differs = np.flatnonzero(np.asarray(one[:size]) != np.asarray(other[:size]))
    return int(differs[0]) if differs.size else size


def without_separators(row: Sample, renderer: Renderer) -> Sample:
    """`row` without the text between a turn's stop id and the next control token; `row` itself if
    there is none, as in harmony."""
    is_control = np.isin(row.token_ids, list(renderer.tokenizer.control_ids))
    lost: list[int] = []
    for _, _, end in turns(row):
        if end == len(row) or row.token_ids[end - 1] not in renderer.stop_ids:
            continue
        next_control = np.flatnonzero(is_control[end:])
        lost += range(end, end + int(next_control[0]) if next_control.size else end)
    return without(row, lost)


def after_stop(row: Sample, renderer: Renderer, count: int) -> Sample:
    """`row` with `count` more trained tokens after the stop id that ends it; `row` itself if it
    does not end with one. They are those that its last turn begins with, again; their log-probs
    are NaN, and for the caller to fill."""
    *_, (number, begin, end) = [(-1, 0, 0), *turns(row)]
    if number < 0 or end != len(row) or row.token_ids[-1] not in renderer.stop_ids:
        return row
    more = np.arange(begin, end)[:count]
    source = np.concatenate([np.arange(len(row)), more])
    out = taken(row, source, row.token_ids[source])
    return with_nothing_known(out, np.arange(len(out)) >= len(row))


def with_trained(row: Sample, places: Sequence[int] | Int64Array) -> Sample:
    """`row` with these observed tokens trained too, with log-probs of NaN for the caller to fill.
    They still count as not sampled."""
    at = np.asarray(places, np.int64)
    if not at.size:
        return row
    out = taken(row, np.arange(len(row)), row.token_ids)
    out.loss_mask[at] = True
    for name in ("advantages", "returns"):
        if name in out.columns and row.num_trained:
            column = out.columns[name].copy()
            column[at] = column[row.loss_mask].mean()
            out.set(name, column)
    return out


def by_subtraction(row: Sample) -> tuple[Sample, int]:
    """(`row` without its last reply, as of a loop that ends before it adds it; the prompt's length
    as that loop computes it: the remaining row minus all replies, which may be negative).

    All log-probs are laid from there on in order, and every token with one is trained.
    """
    *_, (_, cut, _) = [(-1, 0, 0), *turns(row)]
    values = row.columns["rollout_logprobs"][row.columns["turn"] >= 0]
    prompt_length = cut - len(values)
    if cut < 2:
        return row, prompt_length
    trained = np.flatnonzero(row.loss_mask)
    first = int(trained[0]) if trained.size else 0
    begin = max(prompt_length, 1)
    source = np.arange(cut)
    out = taken(row, source, row.token_ids[:cut])
    is_reply = source >= begin
    laid = np.full(cut, np.nan, np.float32)
    laid[begin:] = values[begin - prompt_length :][: cut - begin]
    for name, column in list(out.columns.items()):
        if name in ("rollout_logprobs", "turn"):
            continue
        if not COLUMNS[name].is_of_inputs and name != "token_kind":
            fill = COLUMNS[name].fill
            laid_out = np.full(cut, fill, column.dtype)
            laid_out[is_reply] = row.columns[name][first]
            out.set(name, laid_out)
    out.set("rollout_logprobs", laid)
    out.set("turn", np.where(is_reply, 0, -1).astype(np.int32))
    out.loss_mask[:] = is_reply
    return out, prompt_length


def with_prompt_again(row: Sample, copies: int) -> Sample:
    """`row` with `copies` more of its prompt, before the last turn of several, else at its end."""
    found = list(turns(row))
    if not found:
        return row
    prompt = np.arange(found[0][1])
    at = found[-1][1]
    source = np.concatenate([np.arange(at), np.tile(prompt, copies), np.arange(at, len(row))])
    return taken(row, source, row.token_ids[source])


def with_inserted(row: Sample, at: int, ids: Sequence[int]) -> Sample:
    """`row` with these observed ids before its token `at`."""
    beside = np.full(len(ids), max(at - 1, 0))
    source = np.concatenate([np.arange(at), beside, np.arange(at, len(row))])
    out = taken(row, source, [*row.token_ids[:at], *ids, *row.token_ids[at:]])
    is_new = (np.arange(len(out)) >= at) & (np.arange(len(out)) < at + len(ids))
    return observed_at(out, is_new)


def stripped(row: Sample, renderer: Renderer, count: int) -> Sample:
    """`row` without the last `count` text tokens before each turn's stop id, but with the turn's
    first token."""
    is_control = np.isin(row.token_ids, list(renderer.tokenizer.control_ids))
    lost: list[int] = []
    for _, begin, end in turns(row):
        if row.token_ids[end - 1] in renderer.stop_ids:
            text = np.flatnonzero(~is_control[begin + 1 : end]) + begin + 1
            lost += text[-count:].tolist()
    return without(row, lost)


def completed(row: Sample, renderer: Renderer) -> Sample:
    """`row` with a stop id after each turn that the model did not end, trained with the log-prob
    0.0."""
    out = row
    for _, _, end in reversed(list(turns(row))):
        if row.token_ids[end - 1] in renderer.stop_ids:
            continue
        source = np.concatenate([np.arange(end), [end - 1], np.arange(end, len(out))])
        ids = [*out.token_ids[:end], renderer.stop_ids[0], *out.token_ids[end:]]
        out = taken(out, source, ids)
        column = out.columns["rollout_logprobs"].copy()
        column[end] = FILLER
        out.set("rollout_logprobs", column)
    return out


def without_thinking(row: Sample, renderer: Renderer) -> Sample:
    """`row` without the thinking of every turn but the last, and its marks."""
    lost: list[int] = []
    for _, begin, end in list(turns(row))[:-1]:
        ids = row.token_ids[begin:end].tolist()
        found = _thinking_of(ids, renderer)
        if found is not None:
            lost += range(begin + found[0], begin + found[1])
    return without(row, lost)


def _thinking_of(ids: list[int], renderer: Renderer) -> tuple[int, int] | None:
    """(begin, end) of the thinking in one turn."""
    tokenizer = renderer.tokenizer
    opens, closes = THINKING[renderer.name]
    begin_id, end_id = tokenizer.control_id(opens), tokenizer.control_id(closes)
    if begin_id not in ids or end_id not in ids[ids.index(begin_id) :]:
        return None
    begin = ids.index(begin_id)
    end = ids.index(end_id, begin) + 1
    if renderer.name == "harmony":
        if not tokenizer.decode(ids[begin + 1 : end]).startswith("analysis"):
            return None
        rest = [i for i in range(end, len(ids)) if ids[i] == begin_id]  # behind <|start|>assistant
        return (begin, rest[0]) if rest else None
    while end < len(ids) and not tokenizer.decode([ids[end]]).strip():
        end += 1
    return begin, end


THINKING = {"chatml": ("<think>", "</think>"), "harmony": ("<|channel|>", "<|end|>")}
"""Renderer -> control tokens before and after thinking."""


def without_early_routes(row: Sample, share: float, *, seed: int) -> Sample:
    """`row` without the routes before the last turn whose prefix was lost; `row` itself if there is
    none, or no routes."""
    routes = row.columns.get("routed_experts")
    turn = row.columns["turn"]
    hit = [
        t
        for t in range(1, int(turn.max(initial=-1)) + 1)
        if derive_seed(seed, "lost routes", row.id, t) < share * 2.0**63
    ]
    if routes is None or not hit:
        return row
    begin = int(np.flatnonzero(turn == hit[-1] - 1).max(initial=-1)) + 1
    known = routes.copy()
    known[:begin] = UNKNOWN_EXPERT
    out = taken(row, np.arange(len(row)), row.token_ids)
    out.set("routed_experts", known)
    return out


# -- numbers ---------------------------------------------------------------------------------------


def shifted(row: Sample, offset: int) -> Sample:
    """`row` with the rollout's log-probs of its trained tokens moved by `offset` places."""
    values = row.columns["rollout_logprobs"][row.loss_mask]
    at = np.arange(len(values)) + offset
    is_inside = (at >= 0) & (at < len(values))
    column = row.columns["rollout_logprobs"].copy()
    column[row.loss_mask] = np.where(is_inside, values[at * is_inside], np.float32(FILLER))
    out = taken(row, np.arange(len(row)), row.token_ids)
    out.set("rollout_logprobs", column)
    return out


def with_rollout(row: Sample, values: npt.NDArray[np.float32]) -> Sample:
    """`row` with these log-probs of the sampler. values: [T]."""
    out = taken(row, np.arange(len(row)), row.token_ids)
    out.set("rollout_logprobs", values.astype(np.float32))
    return out


# -- mechanism -------------------------------------------------------------------------------------


def without(row: Sample, lost: Collection[int]) -> Sample:
    """`row` without these tokens; `row` itself if there are none."""
    if not lost:
        return row
    kept = np.delete(np.arange(len(row)), sorted(lost))
    return taken(row, kept, row.token_ids[kept])


def observed_at(row: Sample, where: npt.NDArray[np.bool_]) -> Sample:
    """`row` with the tokens `where` [T] neither sampled nor trained."""
    row.loss_mask[where] = False
    return with_nothing_known(row, where, is_sampled=False)


def with_nothing_known(
    row: Sample, where: npt.NDArray[np.bool_], *, is_sampled: bool = True
) -> Sample:
    """`row` without log-probs and routes of these tokens. is_sampled: they keep turn, version and
    advantage. The columns are changed in place: for a row that was just made."""
    for name, column in list(row.columns.items()):
        is_number = name.endswith("logprobs") or COLUMNS[name].is_of_inputs
        if is_number or not (is_sampled or name == "token_kind"):
            column = column.copy()
            column[where] = COLUMNS[name].fill
            row.set(name, column)
    return row


def taken(
    row: Sample, source: Int64Array, token_ids: Sequence[int] | npt.NDArray[np.int32]
) -> Sample:
    """A row of `token_ids` whose other columns are those of the tokens `source` of `row`.

    What an id was drawn from is known of that id alone: of another one it is left empty, which
    means the whole vocabulary.
    """
    ids = frozen_ids(token_ids, where=f"sample {row.id}")
    is_same = ids == row.token_ids[source]
    ragged = {
        name: Ragged.of([of[i] if same else of[i][:0] for i, same in enumerate(is_same)])
        for name, of in ((name, column.take(source)) for name, column in row.ragged.items())
    }
    return Sample(
        id=row.id,
        token_ids=ids,
        loss_mask=row.loss_mask[source],
        columns={name: column[source] for name, column in row.columns.items()},
        ragged=ragged,
        group=row.group,
    )
