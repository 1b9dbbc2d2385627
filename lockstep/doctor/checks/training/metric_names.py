"""Names by which trainers log the figures that the rules of training read.

Only names whose figure has the meaning of ours are here: a mean of |d| or a difference of
probabilities has no rule, `kl` of TRL is to the reference model, and its `policy/approxkl_avg` is
a k2. Sources: verl 0.9.1 (trainer/ppo/core_algos.py, metric_utils.py, rollout_corr_helper.py), TRL
1.16.0 (trainer/grpo_trainer.py) and 0.24.0 (trainer/ppo_trainer.py), slime (megatron_utils/loss.py
and model.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

THEIR_NAMES: Mapping[str, Sequence[str]] = {
    ours: theirs.split()
    for ours, theirs in {
        # ours: verl, TRL, slime and miles
        "mismatch/k1": "rollout_corr/kl",
        "mismatch/k3": "rollout_corr/k3_kl",
        "mismatch/ess": "rollout_corr/rollout_is_eff_sample_size",
        "mismatch/max_abs_diff": "sampling/sampling_logp_difference/max",
        "train/approx_kl": "actor/ppo_kl train/ppo_kl",
        "train/clip_fraction": "actor/pg_clipfrac clip_ratio/region_mean clip_ratio "
        "policy/clipfrac_avg train/pg_clipfrac",
        "train/loss": "actor/pg_loss loss loss/policy_avg train/pg_loss",
        "train/grad_norm": "actor/grad_norm grad_norm",
        "train/lr": "actor/lr learning_rate train/lr-pg_0",
        "reward/mean": "critic/rewards/mean critic/score/mean reward objective/scores "
        "rollout/raw_reward",
        "reward/std": "reward_std",
        "response_length/mean": "completions/mean_length rollout/response_len/mean "
        "rollout/response_lengths",
        "perplexity": "rollout_corr/rollout_ppl",
    }.items()
}
"""Our name -> the same figure in other programs."""


def known_metrics(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of metrics with our names beside those of other programs; ours win.

    >>> known_metrics([{"actor/pg_clipfrac": 0.1, "step": 3}])[0]["train/clip_fraction"]
    0.1
    """
    return [
        {
            ours: row[name]
            for ours, theirs in THEIR_NAMES.items()
            for name in reversed(theirs)
            if name in row
        }
        | dict(row)
        for row in rows
    ]
