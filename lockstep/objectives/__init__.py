"""Losses, aggregations and advantages as pure functions, for any trainer.

    from lockstep.objectives import aggregate, ppo_clip

    out = ppo_clip(logprobs, old_logprobs, advantages, mask=mask)
    aggregate(out.loss, Layout.padded(mask)).backward()

Names are imported on first use, so that settings can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.objectives.advantages import centered, leaf_advantages, leave_one_out
    from lockstep.objectives.aggregation import aggregate, token_weights
    from lockstep.objectives.losses import (
        TokenBatch,
        TokenLoss,
        binary_divergence,
        cispo,
        cross_entropy,
        dppo,
        explained_variance,
        gspo,
        make_loss,
        make_policy_loss,
        ppo_clip,
        reference_kl,
        reinforce,
        value_loss,
    )
    from lockstep.objectives.token_advantages import gae, whiten

_MODULES = ("advantages", "aggregation", "losses", "token_advantages")
__all__ = ["TokenBatch", "TokenLoss", "aggregate", "binary_divergence", "centered", "cispo"]
__all__ += ["cross_entropy", "dppo", "explained_variance", "gae", "gspo", "leaf_advantages"]
__all__ += ["leave_one_out", "make_loss", "make_policy_loss", "ppo_clip", "reference_kl"]
__all__ += ["reinforce", "token_weights", "value_loss", "whiten"]


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        found = importlib.import_module(f"lockstep.objectives.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module 'lockstep.objectives' has no attribute {name!r}")
