"""The sampler read other ids: the row's prompt, or its earlier replies, were written anew.

Each repair writes the row again, by its messages or by an edit of its ids, and the model scores
the result. A call's id and the spelling of its arguments do not matter: only numbers are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps

import numpy as np

from lockstep.doctor.explain import Predict, Prediction, View, hypothesis
from lockstep.doctor.facts.base import MIN_EQUAL
from lockstep.doctor.hypotheses.shifted import OFFSETS, moved
from lockstep.doctor.rows import Float64Array, given
from lockstep.doctor.scoring.layouts import Laid, Layout
from lockstep.doctor.scoring.prompts import Ids, Parts, Prompts, Write, with_prompt
from lockstep.doctor.scoring.variants import Variant, by_variants
from lockstep.errors import LockstepError
from lockstep.renderers.base import Renderer
from lockstep.types import Int64Array, Message, ToolSchema


def by_reading(make: Callable[[View], Iterable[tuple[str, str, Write]]]) -> Predict:
    """Makes a hypothesis of a function that gives (cause, words, what the sampler read)."""

    @by_variants
    def predict(view: View) -> Iterator[Variant]:
        model, rows, stops = view.model, view.rows, frozenset(view.setting.stop_ids)

        def score(write: Write, chosen: Int64Array) -> Float64Array:
            return model.score_laid(rows, with_prompt(write, rows, chosen.tolist(), stops))

        for cause, text, write in make(view):
            yield Variant(cause, text, partial(score, write), sides=("sampler",))

    return wraps(make)(predict)


@hypothesis(cause="padding", needs=("model",), basis="repair")
@by_reading
def structure(view: View) -> Iterator[tuple[str, str, Write]]:
    """The sampler read the row's ids, without padding and repetition."""
    cut = partial(_without_runs, pad=view.setting.pad_id)
    yield "padding", "read the row without the runs of one id", cut
    yield "duplicated_prompt", "read the prompt once", _once
    stops = view.setting.stop_ids
    for stop in sorted(stops):
        ended = partial(_ended, stop=stop, stops=stops)
        yield "missing_final", f"drew the stop id {stop} after each reply", ended
    if (tokenizer := view.setting.tokenizer) is not None:
        for text in ("\n", "\n\n", " "):
            separated = partial(_separated, ids=tokenizer.encode(text))
            yield "dropped_separator", f"read {text!r} after each reply", separated


def _without_runs(parts: Parts, pad: int | None) -> Parts | None:
    def cut(ids: Ids) -> Ids:
        values = np.array(ids)
        edges = np.flatnonzero(np.diff(values) != 0) + 1
        runs = np.split(values, edges)
        least = {True: MIN_EQUAL, False: 2 * MIN_EQUAL}
        return [int(i) for run in runs if len(run) < least[bool(run[0] == pad)] for i in run]

    return parts.with_observed([cut(ids) if ids else ids for ids in parts.observed])


def _separated(parts: Parts, ids: Ids) -> Parts | None:
    first, *later = parts.observed
    return parts.with_observed([first, *(o if o[: len(ids)] == ids else ids + o for o in later)])


def _ended(parts: Parts, stop: int, stops: frozenset[int]) -> Parts | None:
    first, *later = parts.observed
    pairs = zip(parts.replies, later, strict=False)
    closed = [ids if stops & {*said[-1:], *ids[:1]} else [stop, *ids] for said, ids in pairs]
    return parts.with_observed([first, *closed])


def _once(parts: Parts) -> Parts | None:
    prompt, *later = parts.observed
    half = len(prompt) // 2
    is_twice = half >= 2 * MIN_EQUAL and prompt[:half] == prompt[half:]
    return parts.with_observed([prompt[:half], *later]) if is_twice else None


def prompts_of(view: View) -> Prompts:
    tools = tools_of(view.setting.tools)
    return Prompts(given(view.setting.tokenizer), view.setting.renderer, tools)


@hypothesis(cause="wrong_template", needs=("model", "tokenizer"), basis="repair", fitted=1)
@by_reading
def prompt(view: View) -> Iterator[tuple[str, str, Write]]:
    """The sampler read the prompt that the row has."""
    for text, write in prompts_of(view).all():
        yield "wrong_template", f"read the prompt {text}", write


@hypothesis(cause="wrong_template", needs=("model", "renderer", "messages"), basis="repair")
@by_reading
def messages(view: View) -> Iterator[tuple[str, str, Write]]:
    """The row is the dialogue that its messages say.

    The dialogue as the model's template writes it, extended turn by turn; and with the replies as
    the model would have written their messages.
    """
    renderer, template = given(view.setting.renderer), prompts_of(view).by_messages

    def glue(parts: Parts) -> Parts | None:
        """The ids between turns as the template writes them, where only those differ."""
        other = template(parts)
        return other and parts.with_observed([parts.observed[0], *other.observed[1:]])

    def separator(parts: Parts) -> Parts | None:
        if (other := glue(parts)) is None:
            return None
        kept = [
            new if 0 < len(new) - len(old) <= 2 and new[len(new) - len(old) :] == old else old
            for old, new in zip(parts.observed, other.observed, strict=True)
        ]
        return parts.with_observed(kept)

    def drawn(parts: Parts) -> Parts | None:
        """The replies as the model writes their messages."""
        found = _written(parts, renderer)
        return None if found in (None, parts.replies) else replace(parts, replies=found)

    def both(parts: Parts) -> Parts | None:
        changed = drawn(parts)
        return changed and (template(changed) or changed)

    def thinking(parts: Parts) -> Parts | None:
        if (found := _written(parts, renderer)) is None:
            return None
        said = (m for m in parts.messages or () if m.role == "assistant")
        observed = [list(ids) for ids in parts.observed]
        for before, whole, reply, message in zip(observed, found, parts.replies, said, strict=True):
            lost = len(whole) - len(reply)
            if message.thinking and lost > 0 and whole[lost:] == reply:
                before += whole[:lost]  # drawn, and not in the row
        return parts.with_observed(observed)

    yield "dropped_separator", "read the separators after replies", separator
    yield "wrong_template", "read between turns what the template writes", glue
    yield "wrong_template", "read the prompt as the template writes it", template
    yield "thinking_dropped", "drew the thinking of its replies", thinking
    yield "rerendered", "drew the replies as their messages are written", drawn
    yield "rerendered", "drew replies and read a prompt as messages are written", both


def _written(parts: Parts, renderer: Renderer) -> list[Ids] | None:
    """The replies as the model writes their messages; None where not every reply has one."""
    said = [m for m in parts.messages or () if m.role == "assistant"]
    if len(said) != len(parts.replies):
        return None
    out: list[Ids] = []
    for reply, message in zip(parts.replies, said, strict=True):
        try:
            out.append(reply if message.parse_error else list(renderer.render_reply(message)))
        except LockstepError:
            out.append(reply)
    return out


@hypothesis(cause="rerendered", needs=("model", "renderer", "messages"), basis="repair", fitted=1)
def kept_messages(view: View) -> Iterator[Prediction]:
    """Replies are where they were drawn.

    A program that keeps messages: each reply was drawn after the template's whole history, and all
    log-probs were laid onto the row's trained tokens in one list, maybe some places off.
    """
    model, rows, renderer = view.model, view.rows, given(view.setting.renderer)
    prompts, recorded = prompts_of(view), given(rows.rollout_logprobs).astype(np.float64)
    is_listed = np.isfinite(recorded) & rows.loss_mask
    listed = [np.flatnonzero(is_listed[t]) + t.start for t in rows.slices]
    for text, write in (
        ("text", lambda m: prompts.encode(m.content)),
        ("messages", renderer.render_reply),
    ):
        found: list[Laid] = []
        for said, at in zip(given(rows.messages), listed, strict=True):
            for ids, drawn, first in _turns(said or (), renderer, prompts.tools, write):
                mine = at[first : first + drawn]
                place = np.full(len(ids), -1)
                place[len(ids) - drawn :][: len(mine)] = mine
                found.append((ids, np.arange(len(ids)), place))
        layout = Layout.of(found, rows)
        values = model.once(rows, ("kept", text), lambda i=layout: model.score_laid(rows, i))
        for by in (0, *OFFSETS[:4]):
            predicted = moved(rows, values, np.concatenate(listed), by)
            yield Prediction(
                text=f"drawn after a history of {text}, and laid {-by:+d} places off",
                sampler=recorded - predicted + model.plain(rows),
            )


def _turns(
    messages: Sequence[Message],
    renderer: Renderer,
    tools: Sequence[ToolSchema],
    write: Callable[[Message], Ids],
) -> Iterator[tuple[Ids, int, int]]:
    """(the history and a reply, ids of the reply, ids of the replies before it) of each reply."""
    first = 0
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        try:
            prompt = renderer.render(list(messages[:number]), tools)
            drawn = write(message)
        except LockstepError:
            return
        yield [*prompt, *drawn], len(drawn), first
        first += len(drawn)


def tools_of(told: str) -> list[ToolSchema]:
    """The tools that the dump names; none where it names none, or in another form."""
    try:
        return [ToolSchema.from_dict(tool) for tool in json.loads(told or "[]")]
    except (ValueError, TypeError, LockstepError):
        return []
