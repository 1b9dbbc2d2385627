"""The sampler read other ids: the row's prompt, or its earlier replies, were written anew.

Each repair writes the row again, by its messages or by an edit of its ids, and the model scores
what comes of it. A call's id and the spelling of its arguments are of no account: only numbers are
compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from lockstep.doctor.explain import Prediction, View, hypothesis
from lockstep.doctor.facts.base import MIN_PADDING
from lockstep.doctor.facts.structure import MIN_PROMPT
from lockstep.doctor.rows import Float64Array
from lockstep.doctor.scoring.layouts import Laid, Layout
from lockstep.doctor.scoring.model import Variant
from lockstep.doctor.scoring.prompts import Ids, Parts, Prompts, with_prompt
from lockstep.errors import LockstepError
from lockstep.renderers.base import Renderer
from lockstep.types import Int64Array, Message, ToolSchema


def variants_of(
    view: View, written: list[tuple[str, str, Callable[[Parts], Parts | None]]]
) -> list[Variant]:
    """(cause, words, the row's parts as the sampler saw them) as variants."""
    model, rows = view.model, view.rows
    stops = frozenset(view.setting.stop_ids)

    def score(write: Callable[[Parts], Parts | None], chosen: Int64Array) -> Float64Array:
        return model.score_laid(rows, with_prompt(write, rows, chosen.tolist(), stops))

    return [
        Variant(
            cause=cause, text=text, score=partial(score, write), sides=("sampler",), basis="repair"
        )
        for cause, text, write in written
    ]


@hypothesis(
    "structure",
    cause="padding",
    needs=("model",),
    basis="repair",
    claim="the sampler read the row's ids, without padding and repetition",
)
def structure(view: View) -> Iterator[Prediction]:
    model = view.model
    tokenizer = view.setting.tokenizer
    texts = () if tokenizer is None else ("\n", "\n\n", " ")
    separators = [
        (
            "dropped_separator",
            f"read {text!r} after each reply",
            partial(_separated, ids=tokenizer.encode(text)),
        )
        for text in texts
        if tokenizer is not None
    ]
    yield from model.tried(
        view,
        variants_of(
            view,
            [
                *separators,
                ("padding", "read the row without the runs of one id", _without_runs),
                ("duplicated_prompt", "read the prompt once", _once),
            ],
        ),
    )


def _without_runs(parts: Parts) -> Parts | None:
    def cut(ids: Ids) -> Ids:
        values = np.array(ids)
        if len(values) < MIN_PADDING:
            return ids
        edges = np.flatnonzero(np.diff(values) != 0) + 1
        runs = np.split(values, edges)
        return [int(i) for run in runs if len(run) < 2 * MIN_PADDING for i in run]

    return parts.with_observed([cut(ids) for ids in parts.observed])


def _separated(parts: Parts, ids: Ids) -> Parts | None:
    first, *later = parts.observed
    return parts.with_observed([first, *(o if o[: len(ids)] == ids else ids + o for o in later)])


def _once(parts: Parts) -> Parts | None:
    prompt = parts.observed[0]
    half = len(prompt) // 2
    if half < MIN_PROMPT or prompt[:half] != prompt[half:]:
        return None
    return parts.with_observed([prompt[:half], *parts.observed[1:]])


@hypothesis(
    "prompt",
    cause="wrong_template",
    needs=("model", "tokenizer"),
    basis="repair",
    fitted=1,
    claim="the sampler read the prompt that the row has",
)
def prompt(view: View) -> Iterator[Prediction]:
    model, setting = view.setting.model, view.setting
    assert model is not None and setting.tokenizer is not None, "needed"
    prompts = Prompts(setting.tokenizer, setting.renderer)
    written = [
        ("wrong_template", f"read the prompt {text}", write) for text, write in prompts.all()
    ]
    yield from model.tried(view, variants_of(view, written))


@hypothesis(
    "messages",
    cause="wrong_template",
    needs=("model", "renderer", "messages"),
    basis="repair",
    claim="the row is the dialogue that its messages say",
)
def messages(view: View) -> Iterator[Prediction]:
    """The dialogue as the model's template writes it, extended turn by turn; and with the replies
    as the model would have written their messages."""
    model, renderer = view.setting.model, view.setting.renderer
    assert model is not None and renderer is not None and view.setting.tokenizer is not None
    prompts = Prompts(view.setting.tokenizer, renderer)
    told: list[tuple[str, str, Callable[[Parts], Parts | None]]] = []

    def template(parts: Parts) -> Parts | None:
        return prompts.by_messages(parts)

    def glue(parts: Parts) -> Parts | None:
        """The ids between turns as the template writes them, where only those differ."""
        other = template(parts)
        if other is None:
            return None
        return parts.with_observed([parts.observed[0], *other.observed[1:]])

    def separator(parts: Parts) -> Parts | None:
        other = glue(parts)
        if other is None:
            return None
        kept = [
            new if 0 < len(new) - len(old) <= 2 and new[len(new) - len(old) :] == old else old
            for old, new in zip(parts.observed, other.observed, strict=True)
        ]
        return parts.with_observed(kept)

    told.append(("dropped_separator", "read the separators after replies", separator))
    told.append(("wrong_template", "read between turns what the template writes", glue))
    told.append(("wrong_template", "read the prompt as the template writes it", template))
    for words, write in (("as their messages are written", renderer.render_reply),):
        drawn = partial(_with_replies, renderer=renderer, write=write, then=None)
        both = partial(_with_replies, renderer=renderer, write=write, then=template)
        told.append(("thinking_dropped", "drew the thinking of its replies", _thinking(renderer)))
        told.append(("rerendered", f"drew the replies {words}", drawn))
        told.append(
            ("rerendered", f"drew the replies {words}, and read the template's prompt", both)
        )
    yield from model.tried(view, variants_of(view, told))


def _replies(parts: Parts) -> list[Message] | None:
    said = [m for m in parts.messages or () if m.role == "assistant"]
    return said if len(said) == len(parts.replies) else None


def _with_replies(
    parts: Parts,
    *,
    renderer: Renderer,
    write: Callable[[Message], Ids],
    then: Callable[[Parts], Parts | None] | None,
) -> Parts | None:
    """The replies as the model writes their messages, where the row has other ids."""
    if (said := _replies(parts)) is None:
        return None
    out: list[Ids] = []
    for reply, message in zip(parts.replies, said, strict=True):
        try:
            out.append(list(write(message)) if not message.parse_error else reply)
        except LockstepError:
            out.append(reply)
    if out == parts.replies:
        return None
    changed = replace(parts, replies=out)
    return changed if then is None else then(changed) or changed


def _thinking(renderer: Renderer) -> Callable[[Parts], Parts | None]:
    def write(parts: Parts) -> Parts | None:
        if (said := _replies(parts)) is None or not any(m.thinking for m in said):
            return None
        observed = [list(ids) for ids in parts.observed]
        for number, (reply, message) in enumerate(zip(parts.replies, said, strict=True)):
            if not message.thinking:
                continue
            try:
                whole = list(renderer.render_reply(message))
            except LockstepError:
                return None
            lost = len(whole) - len(reply)
            if lost > 0 and whole[lost:] == reply:
                observed[number] += whole[:lost]  # drawn, and not in the row
        return parts.with_observed(observed)

    return write


@hypothesis(
    "kept_messages",
    cause="rerendered",
    needs=("model", "renderer", "messages"),
    basis="repair",
    fitted=1,
    claim="replies are where they were drawn",
)
def kept_messages(view: View) -> Iterator[Prediction]:
    """A program that keeps messages: each reply was drawn after the template's whole history, and
    all log-probs were laid onto the row's trained tokens in one list, maybe some places off."""
    model, renderer, rows = view.setting.model, view.setting.renderer, view.rows
    tokenizer = view.setting.tokenizer
    assert model is not None and renderer is not None and tokenizer is not None, "needed"
    prompts = Prompts(tokenizer, renderer)
    assert rows.messages is not None and rows.rollout_logprobs is not None, "needed"
    tools = tools_of(view.setting.tools)
    for text, write in (
        ("text", lambda m: prompts.encode(m.content)),
        ("messages", renderer.render_reply),
    ):
        found: list[Laid] = []
        listed: list[Int64Array] = []
        for row, tokens in enumerate(rows.slices):
            own = rows.rollout_logprobs[tokens]
            at = np.flatnonzero(np.isfinite(own) & rows.loss_mask[tokens]) + tokens.start
            listed.append(at)
            for ids, drawn, first in _turns(rows.messages[row] or (), renderer, tools, write):
                mine = at[first : first + drawn]
                place = np.full(len(ids), -1)
                begin = len(ids) - drawn
                place[begin : begin + len(mine)] = mine
                found.append((ids, np.arange(len(ids)), place))
        key = ("kept", text)
        values = model.once(rows, key, lambda f=found: model.score_laid(rows, Layout.of(f, rows)))
        recorded = rows.rollout_logprobs.astype(np.float64)
        for by in (0, 1, -1, 2, -2):
            moved = np.full(rows.num_tokens, np.nan)
            for at in listed:
                source = np.arange(len(at)) + by
                inside = (source >= 0) & (source < len(at))
                moved[at[inside]] = values[at[source[inside]]]
            yield Prediction(
                text=f"drawn after a history of {text}, and laid {-by:+d} places off",
                sampler=recorded - moved + model.plain(rows),
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
            prompt, drawn = (
                list(renderer.render(list(messages[:number]), tools)),
                list(write(message)),
            )
        except LockstepError:
            return
        yield [*prompt, *drawn], len(drawn), first
        first += len(drawn)


def tools_of(told: str) -> list[ToolSchema]:
    """The tools that the dump names; none where it names none, or in another form."""
    try:
        found = json.loads(told) if told else []
        return [ToolSchema.from_dict(tool) for tool in found]
    except (ValueError, TypeError, LockstepError):
        return []
