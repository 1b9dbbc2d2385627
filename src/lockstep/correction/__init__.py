"""Corrections of the gap between sampler and trainer: tensors in, tensors out, for any trainer.

    from lockstep.correction import Correction, correct

    corrected = correct(logprobs, rollout_logprobs, Correction.mis(), layout=mask)
    loss = (corrected.weights * policy_loss).sum() / corrected.denominator_tokens

Names are imported on first use, so that settings can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.correction.config import Correction, Rule
    from lockstep.correction.layout import Layout
    from lockstep.correction.metrics import MismatchReport
    from lockstep.correction.tokens import TokenFacts
    from lockstep.correction.weighing import Corrected, correct, measure, weigh

_MODULES = ("config", "layout", "metrics", "tokens", "weighing")
__all__ = ["Corrected", "Correction", "Layout", "MismatchReport", "Rule", "TokenFacts"]
__all__ += ["correct", "measure", "weigh"]


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        found = importlib.import_module(f"lockstep.correction.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module 'lockstep.correction' has no attribute {name!r}")
