"""Every check on arrays, in its stage."""

from __future__ import annotations

from lockstep.doctor.checks.base import Check
from lockstep.doctor.checks.template.drift import TemplateDrift
from lockstep.doctor.checks.template.thinking import ThinkingDropped
from lockstep.doctor.checks.tokens.alignment import Shifted
from lockstep.doctor.checks.tokens.context import DroppedSeparator, DuplicatedPrompt, Padding
from lockstep.doctor.checks.tokens.endings import AfterStop, MissingFinal
from lockstep.doctor.checks.tokens.fillers import Fillers
from lockstep.doctor.checks.tokens.injected_control import InjectedControl
from lockstep.doctor.checks.tokens.masks import Boundary, ObservationTrained
from lockstep.doctor.checks.tokens.post_processed import PostProcessed
from lockstep.doctor.checks.tokens.reencoded import Reencoded
from lockstep.doctor.checks.tokens.rerendered import Rerendered
from lockstep.doctor.checks.training.staleness import AfterUpdate, Stale, StillVersion
from lockstep.doctor.checks.training.unphysical import Unphysical
from lockstep.doctor.checks.values.estimators import Estimators, Forced
from lockstep.doctor.checks.values.finite import NonFinite, Positive
from lockstep.doctor.checks.values.noise import NoisySampler, NoisyTrainer
from lockstep.doctor.checks.values.precision import Precision
from lockstep.doctor.checks.values.processed import Processed
from lockstep.doctor.checks.values.rounding import Clamped, Quantised

MASKS: tuple[type[Check], ...] = (
    Boundary,
    # whose ids they are: what stands behind another id bears the marks of what follows
    InjectedControl,
    ThinkingDropped,
    Rerendered,
    TemplateDrift,
    PostProcessed,
    # and which of them are the model's
    ObservationTrained,
    AfterStop,
    MissingFinal,
)
"""Which tokens are the model's: what is not trained rightly has no right log-prob either. Of
several causes in one stage, one that is gone once those before it are repaired was their mark, and
is not named."""
STRUCTURE: tuple[type[Check], ...] = (
    Reencoded,
    Shifted,
    Fillers,
    Padding,
    DuplicatedPrompt,
    DroppedSeparator,
    NonFinite,
    Positive,
    Estimators,
    Forced,
)
"""What is obvious: ids, and what stands beside which."""
VALUES: tuple[type[Check], ...] = (Clamped, Quantised)
"""How the log-probs were kept."""
PROCESSED: tuple[type[Check], ...] = (Processed,)
"""What they are of."""
NOISE: tuple[type[Check], ...] = (Precision, NoisySampler, NoisyTrainer)
"""What is the same each time and what is not: of rows that are otherwise explained."""
TRAINING: tuple[type[Check], ...] = (Stale, AfterUpdate, StillVersion, Unphysical)
"""What the run does with them."""

STAGES = (MASKS, STRUCTURE, VALUES, PROCESSED, NOISE, TRAINING)
"""Each sees the rows as the repairs of those before it have left them."""
