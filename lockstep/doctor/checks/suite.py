"""Every check on arrays, by stage."""

from __future__ import annotations

from lockstep.doctor.checks.base import Check
from lockstep.doctor.checks.tokens.alignment import Shifted
from lockstep.doctor.checks.tokens.context import DroppedSeparator, DuplicatedPrompt, Padding
from lockstep.doctor.checks.tokens.endings import AfterStop, MissingFinal
from lockstep.doctor.checks.tokens.fillers import Fillers
from lockstep.doctor.checks.tokens.injected_control import InjectedControl
from lockstep.doctor.checks.tokens.masks import Boundary, ObservationTrained
from lockstep.doctor.checks.tokens.post_processed import PostProcessed
from lockstep.doctor.checks.tokens.reencoded import Reencoded
from lockstep.doctor.checks.tokens.rerendered import Rerendered
from lockstep.doctor.checks.tokens.template import ThinkingDropped
from lockstep.doctor.checks.training.staleness import AfterUpdate, GrowingGap, Stale
from lockstep.doctor.checks.training.unphysical import Unphysical
from lockstep.doctor.checks.values.finite import NonFinite, Positive
from lockstep.doctor.checks.values.noise import NoisySampler, NoisyTrainer
from lockstep.doctor.checks.values.precision import Precision
from lockstep.doctor.checks.values.processed import Processed
from lockstep.doctor.checks.values.rounding import Clamped, Quantised

_OWN: dict[str, tuple[type[Check], ...]] = {
    # Which tokens are the model's: first whose ids they are, for what follows another id bears the
    # marks of what comes later; then which of them are trained. A token that should not be trained
    # has no right log-prob either.
    "masks": (
        Boundary,
        InjectedControl,
        ThinkingDropped,
        Rerendered,
        PostProcessed,
        ObservationTrained,
        AfterStop,
        MissingFinal,
    ),
    # What is obvious: the ids, and which number is beside which token.
    "structure": (
        Reencoded,
        Shifted,
        Fillers,
        Padding,
        DuplicatedPrompt,
        DroppedSeparator,
        NonFinite,
        Positive,
    ),
    # How log-probs were stored.
    "values": (Clamped, Quantised),
    # Which distribution they are of.
    "processed": (Processed,),
    # What repeats and what does not, in rows that are otherwise explained.
    "noise": (Precision, NoisySampler, NoisyTrainer),
    # What training does with the rows.
    "training": (Stale, AfterUpdate, GrowingGap, Unphysical),
}


def stages() -> dict[str, tuple[type[Check], ...]]:
    """Stage -> its checks, in the order of their repairs; a plugin's come after the built-in ones.

    Each stage sees the rows as the repairs of the stages before it leave them. Of several causes in
    one stage, one that is gone after the repairs of those before it was their mark, and is not
    named.
    """
    out = {stage: list(checks) for stage, checks in _OWN.items()}
    for kind in _subclasses(Check):
        if kind.stage and kind not in out[kind.stage]:
            out[kind.stage].append(kind)
    return {stage: tuple(checks) for stage, checks in out.items()}


def _subclasses(kind: type[Check]) -> list[type[Check]]:
    return [one for sub in kind.__subclasses__() for one in (sub, *_subclasses(sub))]
