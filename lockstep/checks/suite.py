"""Every check on arrays, in its stage."""

from __future__ import annotations

from lockstep.checks.base import Check
from lockstep.checks.tokens.alignment import Shifted
from lockstep.checks.values.estimators import Estimators, Forced
from lockstep.checks.values.finite import NonFinite, Positive
from lockstep.checks.values.noise import NoisySampler, NoisyTrainer
from lockstep.checks.values.precision import Precision
from lockstep.checks.values.rounding import Clamped, Quantised

STRUCTURE: tuple[type[Check], ...] = (Shifted, NonFinite, Positive, Estimators, Forced)
"""What is obvious: ids, masks, and what stands beside which."""
VALUES: tuple[type[Check], ...] = (Clamped, Quantised)
"""What the log-probs are of, and how they were kept."""
NOISE: tuple[type[Check], ...] = (Precision, NoisySampler, NoisyTrainer)
"""What is the same each time and what is not: of rows that are otherwise explained."""
TRAINING: tuple[type[Check], ...] = ()
"""What the run does with them."""

STAGES = (STRUCTURE, VALUES, NOISE, TRAINING)
"""Each sees the rows as the repairs of those before it have left them."""
