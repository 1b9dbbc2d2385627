"""Losses, aggregations and advantages as pure functions, for any trainer.

from lockstep.objectives.aggregation import aggregate
from lockstep.objectives.losses import ppo_clip

out = ppo_clip(logprobs, old_logprobs, advantages, mask=mask)
aggregate(out.loss, Layout.padded(mask)).backward()
"""
