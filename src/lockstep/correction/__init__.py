"""Corrections of the gap between sampler and trainer: tensors in, tensors out, for any trainer.

    from lockstep.correction import Correction, correct

    corrected = correct(logprobs, rollout_logprobs, Correction.mis(), layout=mask)
    loss = (corrected.weights * policy_loss).sum() / corrected.denominator_tokens

Names are imported on first use, so that settings can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.package import lazily

if TYPE_CHECKING:
    from lockstep.correction.config import Correction as Correction
    from lockstep.correction.config import Rule as Rule
    from lockstep.correction.layout import Layout as Layout
    from lockstep.correction.metrics import MismatchReport as MismatchReport
    from lockstep.correction.tokens import TokenFacts as TokenFacts
    from lockstep.correction.weighing import Corrected as Corrected
    from lockstep.correction.weighing import correct as correct
    from lockstep.correction.weighing import measure as measure
    from lockstep.correction.weighing import weigh as weigh

__getattr__, __all__ = lazily(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
