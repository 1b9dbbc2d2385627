"""With the logits: temperature, top-k, top-p, min-p and penalties give exact log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from lockstep.doctor.explain import Prediction, View, hypothesis
from lockstep.doctor.hypotheses.scale import TEMPERATURES, TOP_P
from lockstep.doctor.scoring.model import NUM_PROBES, Distribution, Variant

TOP_K = (1, 5, 10, 20, 40, 50, 100)
MIN_P = (0.01, 0.02, 0.05, 0.1)
PENALTIES = (1.02, 1.05, 1.1, 1.2, 1.3)
"""Values in the generation_config.json of published models, and in recipes."""


def kinds(view: View) -> list[tuple[str, Distribution]]:
    """(cause, processing): the run's own, the model's defaults, then a grid."""
    setting, own = view.setting, []
    told = Distribution(
        temperature=setting.temperature or 1.0,
        top_p=setting.top_p or 1.0,
        top_k=max(setting.top_k or 0, 0),
    )
    own.append(("processed", told))
    defaults = {k: v for k, v in (setting.generation_defaults or {}).items() if v > 0}
    if defaults:
        whole = Distribution(**defaults | {"top_k": int(defaults.get("top_k", 0))})  # pyright: ignore[reportArgumentType]
        own.append(("generation_defaults", whole))
    cuts = [Distribution(top_p=p) for p in TOP_P] + [Distribution(top_k=k) for k in TOP_K]
    cuts += [Distribution(min_p=p) for p in MIN_P]
    grid = [Distribution(temperature=t) for t in TEMPERATURES] + cuts
    grid += [Distribution(repetition_penalty=p) for p in PENALTIES]
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
        """All kinds of a few rows in one forward; of all rows, the one that is asked for."""
        if len(chosen) > NUM_PROBES:
            return model.score(rows, chosen, distribution=kind)
        key = chosen.tobytes()
        if key not in on_probes:
            on_probes[key] = model.scorer.score(
                model.loaded(rows), rows, chosen, distributions=[d for _, d in chosen_kinds]
            )
        return on_probes[key][kind]

    variants = [
        Variant(
            cause=cause,
            text=f"after {kind.describe()}",
            is_of_rows=False,
            score=lambda chosen, kind=kind: score(kind, chosen),
        )
        for cause, kind in chosen_kinds
    ]
    yield from model.tried(view, variants)
