"""The sampler's column is a function of the natural log-probs: another base, a temperature, a cut.

Without the logits the effect of a temperature is known up to the number of rivals that a token has:
with p the token's probability and the rest spread over K others, log p at temperature T is
t/T - log(p^(1/T) + K^(1-1/T) (1-p)^(1/T)).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from lockstep.doctor.explain import Prediction, View, hypothesis
from lockstep.doctor.rows import Float64Array

TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0)
"""Sampling temperatures that recipes of verl, slime, TRL and prime-rl use, and their inverses."""
NUM_RIVALS = (1, 4, 16, 64, 256)
TOP_P = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Values of top-p in the same recipes."""
BASES = {"to base 2": np.log(2.0), "to base 10": np.log(10.0), "negated": -1.0}


@hypothesis("log_base", cause="positive", least=0.6, claim="log-probs are natural logs")
def log_base(view: View) -> Iterator[Prediction]:
    for side in ("sampler", "trainer"):
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


@hypothesis(
    "temperature",
    cause="processed",
    fitted=2,
    least=0.2,
    claim="both sides take log-probs at one temperature",
)
def temperature(view: View) -> Iterator[Prediction]:
    for one, rivals in product(TEMPERATURES, NUM_RIVALS):
        for side, other in (("sampler", "trainer"), ("trainer", "sampler")):
            values = at_temperature(getattr(view, other), one, rivals)
            text = f"the {side} at about {one:g} times the {other}'s temperature"
            yield Prediction.of_side(other, values, text, is_of_rows=False)


@hypothesis(
    "cut_support",
    cause="processed",
    fitted=1,
    least=0.5,
    claim="both sides normalise over the same tokens",
)
def cut_support(view: View) -> Iterator[Prediction]:
    """Renormalised over what top-p leaves: 1 where the token alone is left, else larger by at most
    1 / top-p, and nowhere smaller."""
    for side, other in (("sampler", "trainer"), ("trainer", "sampler")):
        mine, theirs = getattr(view, side), getattr(view, other)
        known = np.isfinite(mine) & np.isfinite(theirs)
        rise = (mine - theirs)[known]
        for top_p in TOP_P:
            bound = -np.log(top_p)
            # A cut never lowers a log-prob, and raises none by more than its bound.
            if not len(rise) or np.quantile(rise, 0.02) < -0.2 * bound:
                continue
            alone = theirs >= -bound
            moved = np.where(alone, 0.0, np.minimum(theirs + bound / 2, 0.0))
            text = f"the {side} after top-p of about {top_p:g}"
            yield Prediction.of_side(other, moved, text, is_of_rows=False)
