"""Tokens of older weights have a gap, and tokens of the trainer's version have none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.doctor.explain import Prediction, View, hypothesis
from lockstep.doctor.findings import MIN_TOKENS
from lockstep.doctor.rows import given


@hypothesis(cause="stale", needs=("policy_version", "trainer_version"), fitted=1, least=0.1)
def stale(view: View) -> Iterator[Prediction]:
    """Older tokens are as near as the others."""
    rows, at = view.rows, view.rows.compared
    version = given(rows.policy_version)[at]
    age = given(rows.trainer_version)[rows.row_of[at]] - version
    is_old, is_new = (age > 0) & (version >= 0), age == 0
    gap = rows.gap[at]
    if min(is_old.sum(), is_new.sum()) < MIN_TOKENS:
        return
    ratio = float(np.sqrt((gap[is_new] ** 2).mean() / max((gap[is_old] ** 2).mean(), 1e-12)))
    if ratio >= 1:
        return
    out = np.full(rows.num_tokens, np.nan)
    out[at[is_old]] = (view.trainer[at] - ratio * gap)[is_old]
    yield Prediction(
        text=f"drawn by weights up to {int(age.max())} updates old", sampler=out, is_of_rows=False
    )
