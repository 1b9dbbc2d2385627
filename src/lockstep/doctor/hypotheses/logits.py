"""Predicts exact log-probs under temperature, top-k, top-p, min-p and penalties, by logits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from lockstep.doctor.explain import Prediction, View, hypothesis
from lockstep.doctor.hypotheses.scale import SETTINGS
from lockstep.doctor.scoring.distribution import Distribution
from lockstep.doctor.scoring.variants import NUM_PROBES, Variant, tried


def kinds(view: View) -> list[tuple[str, Distribution]]:
    """(cause, processing): the run's own, the model's defaults, then a grid."""
    setting = view.setting
    told = {"temperature": setting.temperature, "top_p": setting.top_p, "top_k": setting.top_k}
    own: list[tuple[str, Distribution]] = []
    for cause, found in (("processed", told), ("generation_defaults", setting.generation_defaults)):
        known: dict[str, Any] = {n: v for n, v in (found or {}).items() if v and v > 0}
        own.append((cause, Distribution(**known | {"top_k": int(known.get("top_k", 0))})))
    cuts = [
        Distribution(**{name: value})
        for name in ("top_p", "top_k", "min_p")
        for value in SETTINGS[name]
    ]
    grid = [Distribution(temperature=t) for t in (*SETTINGS["temperature"], *SETTINGS["warm"])]
    grid += cuts + [Distribution(repetition_penalty=p) for p in SETTINGS["repetition_penalty"]]
    grid += [
        Distribution(temperature=t, top_p=c.top_p, top_k=c.top_k, min_p=c.min_p)
        for t, c in product((0.6, 0.7, 0.8), cuts)
        if c.top_p in (0.9, 0.95, 1.0) and c.top_k in (0, 20, 50)
    ]
    plain, seen = Distribution(), set[Distribution]()
    return [
        (cause, d)
        for cause, d in [*own, *(("processed", d) for d in grid)]
        if d != plain and not (d in seen or seen.add(d))
    ]


@hypothesis(
    "processing",
    cause="processed",
    needs=("model",),
    least=0.5,
    claim="both sides take log-probs of one distribution",
)
def processing(view: View) -> Iterator[Prediction]:
    model, rows = view.model, view.rows

    chosen_kinds = [(c, d) for c, d in kinds(view) if d != model.processing(rows)]
    on_probes: dict[bytes, dict[Distribution, np.ndarray]] = {}

    def score(kind: Distribution, chosen: np.ndarray) -> np.ndarray:
        """Scores all kinds on a few rows in one forward pass, and one kind on all rows."""
        if len(chosen) > NUM_PROBES:
            return model.score(rows, chosen, distribution=kind)
        key = chosen.tobytes()
        if key not in on_probes:
            on_probes[key] = model.scorer.score(
                model.loaded(rows), rows, chosen, distributions=[d for _, d in chosen_kinds]
            )
        return on_probes[key][kind]

    variants = [
        Variant(cause, f"after {kind.describe()}", partial(score, kind), is_of_rows=False)
        for cause, kind in chosen_kinds
    ]
    yield from tried(view, variants)
