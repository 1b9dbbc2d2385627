"""One side computes the model otherwise: without sinks, in narrow formats, by other weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from lockstep.doctor.explain import Prediction, View, hypothesis
from lockstep.doctor.findings import MOST
from lockstep.doctor.rows import SIDES, Float64Array, Rows
from lockstep.doctor.scoring.layouts import layouts
from lockstep.doctor.scoring.model import Model
from lockstep.doctor.scoring.variants import Variant, by_variants, prediction
from lockstep.types import Int64Array

CAUSE_OF = {"rope": "ignored_rope_scaling", "quantised": "quantised_rollout"}


@hypothesis(cause="ignored_sinks", needs=("model",))
@by_variants
def arithmetic(view: View) -> Iterator[Variant]:
    """Both sides compute what the model's config says."""
    model, rows = view.model, view.rows

    def within(change: Any, chosen: Int64Array) -> Float64Array:
        with change.made():
            return model.score(rows, chosen)

    for change in sorted(model.scorer.changes(model.loaded(rows)), key=lambda c: c.rank):
        cause = CAUSE_OF.get(change.kind, f"ignored_{change.kind}")
        sides = ("sampler",) if change.kind == "quantised" else (*SIDES,)
        yield Variant(cause, change.text, partial(within, change), sides=sides)


@hypothesis(cause="half_head", needs=("model",), least=0.5)
@by_variants
def half_head(view: View) -> Iterator[Variant]:
    """Both sides compute the head in one precision."""
    model, rows = view.model, view.rows
    import torch

    from lockstep.doctor.scoring.scorer import has_plain_head

    if not has_plain_head(model.loaded(rows)):
        return

    def in_bfloat16(chosen: Int64Array) -> Float64Array:
        copied = model.scorer.copied_in_bfloat16(model.loaded(rows))
        return model.score(rows, chosen, of=copied, head=torch.float32)

    def whole(chosen: Int64Array) -> Float64Array:
        return np.where(np.isin(rows.row_of, chosen), model.bfloat16(rows), np.nan)

    narrow = "lost_updates" if moved_in_bfloat16(model, rows) < MOST else "precision"
    head = partial(model.score, rows, head=torch.bfloat16)
    yield Variant("half_head", "with a head in bfloat16", head)
    yield Variant(narrow, "in bfloat16 with a head in float32", in_bfloat16)
    yield Variant(narrow, "in bfloat16", whole)


def moved_in_bfloat16(model: Model, rows: Rows) -> float:
    """Share of the elements changed since the weights before that bfloat16 shows; 1 if no earlier
    weights are at hand, or none has changed."""
    own = model.own(rows)
    if own == 0:
        return 1.0
    before, after = (
        {name: p.detach() for name, p in model.scorer.load(weights).named_parameters()}
        for weights in model.weights[own - 1 : own + 1]
    )
    changed = moved = 0
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        changed += int((old != new).sum())
        moved += int((old.bfloat16() != new.bfloat16()).sum())
    return moved / changed if changed else 1.0


@hypothesis(cause="adapter_not_merged", needs=("model",), least=0.5)
def adapter(view: View) -> Iterator[Prediction]:
    """Both sides add the adapter once, at its own scale."""
    model, rows = view.model, view.rows

    every = np.arange(len(rows))
    for text, changed in model.scorer.adapters(model.loaded(rows)):
        # Scored whole: the strength lasts until the next is made.
        score = partial(model.score, rows, every, of=changed)
        values = model.once(rows, ("all", text), score)
        cause = "adapter_not_merged" if text.startswith("without") else "adapter_scaled"
        variant = Variant(cause, text, lambda _, v=values: v)
        for side in variant.sides:
            yield prediction(view, variant, values, side)


@hypothesis(cause="other_weights", needs=("model",), least=0.5)
@by_variants
def other_weights_given(view: View) -> Iterator[Variant]:
    """Both sides run the weights of this step."""
    model, rows = view.model, view.rows
    own = model.own(rows)

    def by(number: int, chosen: Int64Array) -> Float64Array:
        return model.score(rows, chosen, of=model.scorer.load(model.weights[number]))

    for number, weights in reversed([*enumerate(model.weights)]):
        if number != own:
            name = f"by the weights {weights.name}"
            yield Variant("other_weights", name, partial(by, number))


@hypothesis(cause="wrong_positions", needs=("model",), least=0.8)
@by_variants
def layout(view: View) -> Iterator[Variant]:
    """Both sides see the row alone, at positions from 0."""
    model, rows = view.model, view.rows
    pad_id = model.pad_id if view.setting.pad_id is None else view.setting.pad_id
    max_positions = model.config.max_positions

    def score(lay: Any, chosen: Int64Array) -> Float64Array:
        return model.score_laid(rows, lay(chosen))

    for cause, text, lay in layouts(rows, pad_id=pad_id, max_positions=max_positions):
        yield Variant(cause, text, partial(score, lay))
