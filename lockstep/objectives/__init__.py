"""What is maximised: losses, aggregations and advantages as pure functions, for any trainer.

    from lockstep.objectives import aggregate, ppo_clip

    out = ppo_clip(logprobs, old_logprobs, advantages, mask=mask)
    aggregate(out.loss, Layout.padded(mask)).backward()

Names are imported on first use, so that settings can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.objectives.advantages import centered as centered
    from lockstep.objectives.advantages import leaf_advantages as leaf_advantages
    from lockstep.objectives.advantages import leave_one_out as leave_one_out
    from lockstep.objectives.aggregation import aggregate as aggregate
    from lockstep.objectives.aggregation import token_weights as token_weights
    from lockstep.objectives.losses import TokenBatch as TokenBatch
    from lockstep.objectives.losses import TokenLoss as TokenLoss
    from lockstep.objectives.losses import binary_divergence as binary_divergence
    from lockstep.objectives.losses import cispo as cispo
    from lockstep.objectives.losses import cross_entropy as cross_entropy
    from lockstep.objectives.losses import dppo as dppo
    from lockstep.objectives.losses import gspo as gspo
    from lockstep.objectives.losses import make_loss as make_loss
    from lockstep.objectives.losses import make_policy_loss as make_policy_loss
    from lockstep.objectives.losses import ppo_clip as ppo_clip
    from lockstep.objectives.losses import reinforce as reinforce
    from lockstep.objectives.regularizers import reference_kl as reference_kl
    from lockstep.objectives.token_advantages import gae as gae
    from lockstep.objectives.token_advantages import whiten as whiten
    from lockstep.objectives.values import explained_variance as explained_variance
    from lockstep.objectives.values import value_loss as value_loss

_PUBLIC = {
    "centered": "advantages", "leaf_advantages": "advantages", "leave_one_out": "advantages",
    "aggregate": "aggregation", "token_weights": "aggregation",
    "TokenBatch": "losses", "TokenLoss": "losses", "binary_divergence": "losses",
    "cispo": "losses", "cross_entropy": "losses", "dppo": "losses", "gspo": "losses",
    "make_loss": "losses", "make_policy_loss": "losses", "ppo_clip": "losses",
    "reinforce": "losses",
    "reference_kl": "regularizers", "gae": "token_advantages", "whiten": "token_advantages",
    "explained_variance": "values", "value_loss": "values",
}  # fmt: skip
__all__ = [
    "TokenBatch", "TokenLoss", "aggregate", "binary_divergence", "centered", "cispo",
    "cross_entropy", "dppo", "explained_variance", "gae", "gspo", "leaf_advantages",
    "leave_one_out", "make_loss", "make_policy_loss", "ppo_clip", "reference_kl", "reinforce",
    "token_weights", "value_loss", "whiten",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lockstep.objectives' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lockstep.objectives.{_PUBLIC[name]}"), name)
