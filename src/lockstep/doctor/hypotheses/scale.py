"""A side's log-probs are to another base, or of another distribution: a temperature, a cut.


With a model, the logits give the very numbers.
Without them the effect of a temperature is known up to the number of rivals that a token has:
with p the token's probability and the rest spread over K others, log p at temperature T is
t/T - log(p^(1/T) + K^(1-1/T) (1-p)^(1/T)).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations, product
from typing import Any

import numpy as np

from lockstep.doctor.explain import TIE, Prediction, View, hypothesis
from lockstep.doctor.rows import SIDES, Float64Array
from lockstep.doctor.scoring.distribution import Distribution
from lockstep.doctor.scoring.variants import NUM_PROBES, Variant, by_variants
from lockstep.tables import tables_beside

SETTINGS: Mapping[str, Sequence[Any]] = tables_beside(__file__, "settings.toml")
"""Setting -> values that are tried, the smallest first."""
NUM_RIVALS = (1, 4, 16, 64, 256)
"""Rivals of a token, from a forced choice to free text."""
BASES = {"to base 2": np.log(2.0), "to base 10": np.log(10.0), "negated": -1.0}


@hypothesis(cause="positive", least=0.6)
def log_base(view: View) -> Iterator[Prediction]:
    """Log-probs are natural logs."""
    for side in SIDES:
        values: Float64Array = getattr(view, side)
        for text, factor in BASES.items():
            yield Prediction.of_side(side, values * factor, f"the {side}'s logs are {text}")
        if (values[np.isfinite(values)] >= 0).all():
            with np.errstate(divide="ignore", invalid="ignore"):
                yield Prediction.of_side(side, np.log(values), f"the {side} has probabilities")


def at_temperature(values: Float64Array, temperature: float, rivals: int) -> Float64Array:
    """Approximate log-probs at a temperature, from those at 1."""
    cold = 1 / temperature
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.log1p(-np.exp(np.minimum(values, -1e-7)))
        own, others = values * cold, (1 - cold) * np.log(rivals) + rest * cold
        return own - np.logaddexp(own, others)


@hypothesis(cause="processed", fitted=2, least=0.2)
def processed(view: View) -> Iterator[Prediction]:
    """Both sides take log-probs at one temperature, over the same tokens.

    About what a temperature or a cut makes, where each token is within its exact bounds. With the
    logits, `processing` gives the very numbers.
    """
    if view.setting.model is not None:
        return
    for side, other in permutations(SIDES):
        mine, theirs = getattr(view, side), getattr(view, other)
        ids = view.rows.token_ids

        def within(low: Any, high: Any, mine: Any = mine) -> bool:
            """True if nearly all tokens are within bounds; a second cause may hit the others."""
            known = np.isfinite(mine)
            is_beyond = (mine < low - view.scale) | (mine > high + view.scale)
            return bool(known.any()) and float(is_beyond[known].mean()) < TIE

        def of(values: Float64Array, text: str, side: str = side) -> Prediction:
            whole = view.trainer + view.sampler - values
            return Prediction.of_side(side, whole, f"the {side} {text}", is_of_rows=False)

        for number, one in enumerate(SETTINGS["temperature"]):
            # All rivals' probability on one of them, or spread over the vocabulary.
            near = SETTINGS["temperature"][max(number - 1, 0) : number + 2]
            ends = [at_temperature(theirs, t, k) for t in near for k in (1, int(ids.max()) + 1)]
            if within(np.min(ends, 0), np.max(ends, 0)):
                for rivals in NUM_RIVALS:
                    text = f"at about {one:g} times the {other}'s temperature"
                    yield of(at_temperature(theirs, one, rivals), text)
        for top_p in SETTINGS["top_p"]:
            # A cut never lowers a log-prob, and raises none by more than its bound.
            bound = -np.log(top_p)
            if within(theirs, theirs + bound):
                cut = np.where(theirs >= -bound, 0.0, np.minimum(theirs + bound / 2, 0.0))
                yield of(cut, f"after top-p of about {top_p:g}")


def kinds(view: View) -> list[tuple[str, Distribution]]:
    """(cause, processing): the run's own, the model's defaults, then a grid."""
    setting, found_by = view.setting, dict[Distribution, str]()
    told = {"temperature": setting.temperature, "top_p": setting.top_p, "top_k": setting.top_k}
    for cause, found in (("processed", told), ("generation_defaults", setting.generation_defaults)):
        known: dict[str, Any] = {n: v for n, v in (found or {}).items() if v and v > 0}
        found_by.setdefault(Distribution(**known | {"top_k": int(known.get("top_k", 0))}), cause)
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
    found_by = found_by | {d: found_by.get(d, "processed") for d in grid}
    return [(cause, d) for d, cause in found_by.items() if d != Distribution()]


@hypothesis(cause="processed", needs=("model",), least=0.5)
@by_variants
def processing(view: View) -> Iterator[Variant]:
    """Both sides take log-probs of one distribution."""
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

    for cause, kind in chosen_kinds:
        yield Variant(cause, f"after {kind.describe()}", partial(score, kind), is_of_rows=False)
