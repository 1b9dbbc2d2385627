"""Every check on arrays, in its stage."""

from __future__ import annotations

from lockstep.checks.base import Check
from lockstep.checks.tokens.alignment import Shifted

STRUCTURE: tuple[type[Check], ...] = (Shifted,)
"""What is obvious: ids, masks, and what stands beside which."""
VALUES: tuple[type[Check], ...] = ()
"""What the log-probs are of."""
TRAINING: tuple[type[Check], ...] = ()
"""What the run does with them."""
