"""Every metric by name: what it counts, in which unit, and which way is better.

People build dashboards on these names, so they are stable: a name that is not here is refused by
`check_row`, which every test of the loop runs. A pattern with `*` is a family whose last part is
given by the task, the evaluation or the phase of a step.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from lockstep.errors import DataError
from lockstep.types import Group, Sample

_log = logging.getLogger(__name__)

Direction = Literal["up", "down", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One line of the table."""

    name: str
    """As in metrics.jsonl; `*` stands for one or more characters."""
    unit: str
    """"1" is a bare number; "share" lies in 0..1."""
    better: Direction
    """Which way an improvement goes; "none" where it depends or nothing can be said."""
    meaning: str
    """One line, for people who did not write the code."""


def _metric(name: str, unit: str, better: Direction, meaning: str) -> Metric:
    return Metric(name=name, unit=unit, better=better, meaning=meaning)


_MISMATCH: tuple[tuple[str, str, Direction, str], ...] = (
    ("k1", "nats", "none", "Mean of rollout minus trainer log-prob; cancels under a shift."),
    ("k2", "nats", "down", "Half the mean square of the log-prob difference."),
    ("k3", "nats", "down", "Low-variance estimate of KL(rollout, trainer); never negative."),
    ("k1_unforced", "nats", "none", "k1 without tokens that were as good as forced."),
    ("k2_unforced", "nats", "down", "k2 without tokens that were as good as forced."),
    ("k3_unforced", "nats", "down", "k3 without tokens that were as good as forced."),
    ("max_abs_diff", "nats", "down", "Largest difference of one token's two log-probs."),
    ("unequal_tokens", "tokens", "down", "Tokens whose two log-probs differ in any bit."),
    ("compared_tokens", "tokens", "none", "Sampled tokens that were compared."),
    ("forced_share", "share", "none", "Tokens with a rollout probability above 0.99."),
    ("nonfinite_tokens", "tokens", "down", "Tokens without a finite log-prob on either side."),
    ("ess", "share", "up", "Effective sample size of the importance weights, as a share."),
    ("log_ppl_abs_diff_mean", "nats", "down", "Mean gap of a row's mean log-prob."),
    ("log_ppl_abs_diff_max", "nats", "down", "Largest gap of a row's mean log-prob."),
    ("log_ppl_diff_mean", "nats", "none", "Mean of a row's mean rollout minus trainer log-prob."),
    ("log_ppl_diff_max", "nats", "none", "Largest of a row's mean rollout minus trainer log-prob."),
    ("log_ppl_diff_min", "nats", "none", "Lowest of a row's mean rollout minus trainer log-prob."),
    ("chi2", "1", "down", "Mean square of the tokens' ratios, minus 1."),
    ("chi2_sequence", "1", "down", "Mean square of the rows' products of ratios, minus 1."),
    ("log_ratio_min", "nats", "none", "Lowest trainer minus rollout log-prob."),
    ("log_ratio_max", "nats", "none", "Highest trainer minus rollout log-prob."),
    ("log_ratio_p*", "nats", "none", "A percentile of trainer minus rollout log-prob."),
    ("outlier_tokens", "tokens", "down", "Tokens that differ by more than 1e-4."),
    ("by_age/*", "1", "none", "Of tokens sampled so many updates ago: 0 numerics, more staleness."),
    ("by_turn/*", "1", "none", "Of the tokens of one turn of the episode."),
    ("by_position/*", "1", "none", "Of the tokens at these places of their row."),
    ("by_kind/*", "1", "none", "Of the tokens that spell text, or of control tokens."),
)  # fmt: skip

METRICS: tuple[Metric, ...] = (
    _metric("step", "steps", "none", "Index of the training step, from 0."),
    _metric("policy_version", "updates", "none", "Updates behind the weights that sampled."),
    # reward
    _metric("reward/mean", "reward", "up", "Mean reward of the step's episodes."),
    _metric("reward/std", "reward", "none", "Standard deviation over the step's episodes."),
    _metric("reward/min", "reward", "up", "Lowest reward of the step."),
    _metric("reward/max", "reward", "up", "Highest reward of the step."),
    _metric("reward/source/*", "reward", "up", "Mean reward of one part of a mixture."),
    _metric("reward/*", "reward", "none", "Mean of one raw part of the reward, before its weight."),
    _metric("advantage/mean", "1", "none", "Mean advantage over trained tokens."),
    _metric("advantage/std", "1", "none", "Standard deviation of the advantage."),
    _metric("advantage/max_abs", "1", "none", "Largest advantage by size."),
    # episodes
    _metric("episodes/total", "episodes", "none", "Episodes sampled for the step."),
    _metric("episodes/failed", "episodes", "down", "Episodes that broke; never trained."),
    _metric("episodes/truncated", "episodes", "down", "Episodes that a budget ended."),
    _metric("episodes/turns_mean", "turns", "none", "Turns of the model per episode."),
    _metric("episodes/without_signal", "groups", "down", "Groups of several with equal rewards."),
    _metric("episodes/source/*", "episodes", "none", "Episodes of one part of a mixture."),
    _metric("episode/sandbox/programs", "programs", "none", "Programs run per episode."),
    _metric("episode/sandbox/error", "programs", "down", "Of them: raised, or were no program."),
    _metric("episode/sandbox/timeout", "programs", "down", "Ended at their limit of time."),
    _metric("episode/sandbox/memory", "programs", "down", "Ended at their limit of memory."),
    _metric("episode/sandbox/output", "programs", "down", "Ran on after the output was cut."),
    _metric("episode/sandbox/refused", "programs", "down", "Asked for a file, socket or process."),
    _metric("episode/sandbox/crashed", "programs", "down", "Took their sandbox down with them."),
    _metric("episode/sandbox/truncated", "programs", "down", "Printed more than was read."),
    _metric("episode/branches/*", "branches", "none", "Turns that began a branch, by reason."),
    _metric("episode/gateway/requests", "requests", "none", "Turns that an agent asked for."),
    _metric("episode/gateway/repeated_requests", "requests", "none", "That came again."),
    _metric("episode/gateway/reused_tokens", "tokens", "up", "Of prompts: not encoded again."),
    _metric("episode/gateway/altered_replies", "replies", "down", "That an agent told otherwise."),
    _metric("episode/gateway/altered_tokens", "tokens", "down", "Of them: that went or came."),
    _metric("episode/gateway/abandoned_turns", "turns", "down", "Retried, or never received."),
    _metric("episode/gateway/ignored_rewards", "rewards", "down", "Posted; a score replaced them."),
    _metric("episode/gateway/engine_errors", "requests", "down", "That the engine did not answer."),
    _metric("episode/gateway/ignored/*", "requests", "down", "Asked for other sampling settings."),
    _metric("episode/*", "1", "none", "Mean over episodes of a counter of the environment."),
    _metric("response_length/mean", "tokens", "none", "Sampled tokens per episode."),
    _metric("response_length/max", "tokens", "none", "Sampled tokens of the longest episode."),
    _metric("response_length/min", "tokens", "none", "Sampled tokens of the shortest episode."),
    _metric("perplexity", "1", "none", "exp of minus the mean log-prob of the sampled tokens."),
    # mismatch
    *(_metric(f"mismatch/{n}", u, b, m) for n, u, b, m in _MISMATCH),
    *(_metric(f"mismatch_after/{n}", u, b, f"After the update: {m}") for n, u, b, m in _MISMATCH),
    _metric(
        "mismatch/support_bias", "nats", "down",
        "Mean -log of the mass that top-p/top-k kept; 0 where the trainer renormalises.",
    ),
    *(
        _metric(f"mismatch_averaged/{n}", u, b, f"Of the averaged behaviour: {m}")
        for n, u, b, m in _MISMATCH
    ),
    _metric("noise/rescorings", "passes", "none", "Re-scorings of a token that its average has."),
    _metric("noise/var_rollout", "nats^2", "down", "Variance of a log-prob between re-scorings."),
    _metric("noise/sampling_bias", "nats", "none", "Recorded minus re-scored log-prob, mean."),
    _metric(
        "noise/fallback_tokens", "tokens", "down",
        "Trained tokens without a re-scoring: the recorded log-prob stands for the average.",
    ),
    _metric(
        "noise/stale_rescorings", "passes", "down",
        "Re-scorings of a turn, whole or in part, by other weights than sampled it: not used.",
    ),
    _metric("noise/failed_rescorings", "passes", "down", "Re-scorings that the engine refused."),
    _metric(
        "noise/cache_hit_share", "share", "up",
        "Tokens before a re-scored turn whose keys and values were reused.",
    ),
    _metric(
        "noise/overlapped_share", "share", "up",
        "Re-scorings that were done before the batch's last episode ended.",
    ),
    # staleness
    _metric("staleness/version", "updates", "none", "Updates behind the weights in training."),
    _metric("staleness/mean", "updates", "down", "Updates since a trained token was sampled."),
    _metric("staleness/max", "updates", "down", "Updates since the oldest of them was sampled."),
    _metric("staleness/mixed_rows", "rows", "none", "Rows that several versions sampled."),
    _metric("staleness/over_rows", "rows", "down", "Rows with a token older than max_staleness."),
    _metric("staleness/dropped_rows", "rows", "down", "Of these, left out by over_stale=drop."),
    # correction
    _metric("correction/weight_mean", "1", "none", "Mean weight of kept tokens, as bounded."),
    _metric("correction/weight_std", "1", "down", "Standard deviation of these weights."),
    _metric("correction/ess", "share", "up", "Effective sample size of the bounded weights."),
    _metric("correction/above_share", "share", "none", "Tokens whose weight was over the limit."),
    _metric("correction/below_share", "share", "none", "Tokens whose weight was under the limit."),
    _metric("correction/kept_tokens", "tokens", "none", "Tokens that were trained on."),
    _metric("correction/rejected_share", "share", "down", "Sampled tokens not trained on."),
    _metric("correction/rejected_sequences_share", "share", "down", "Rows with no token left."),
    _metric("correction/rejected_by/*", "share", "down", "Sampled tokens that one rule rejected."),
    _metric("correction/normalizer", "1", "none", "What the weights were divided by."),
    _metric("correction/sequence_weight_mean", "1", "none", "Mean weight of a row, as bounded."),
    _metric("correction/sequence_ess", "share", "up", "Effective sample size over rows."),
    _metric("correction/sequence_log_ratio_max", "nats", "none", "Largest log weight of a row."),
    _metric("correction/sequence_log_ratio_min", "nats", "none", "Lowest log weight of a row."),
    _metric("correction/by_*", "1", "none", "The same of one age, turn, position or kind."),
    # training
    _metric("train/loss", "nats", "none", "The objective that was minimised."),
    _metric("train/grad_norm", "1", "none", "Norm of the gradient before clipping."),
    _metric("train/clip_fraction", "share", "none", "Tokens whose ratio the objective clipped."),
    _metric("train/dual_clip_fraction", "share", "none", "Tokens that only the dual clip stopped."),
    _metric("train/truncated_fraction", "share", "none", "Tokens whose weight was cut by a ratio."),
    _metric("train/divergence_mean", "1", "none", "Mean of DPPO's divergence from the old policy."),
    _metric("train/divergence_max", "1", "none", "Largest of DPPO's divergences."),
    _metric("train/reference_kl", "nats", "none", "Estimate of KL(policy, reference) in the loss."),
    _metric("train/entropy", "nats", "none", "Mean entropy of the policy at sampled tokens."),
    _metric("train/lr", "1", "none", "Learning rate of the step."),
    _metric("train/skipped_updates", "updates", "down", "Updates left out as not finite, so far."),
    _metric("train/loss_scale", "1", "none", "Factor on the loss, for float16's gradients."),
    _metric("train/overflows", "passes", "down", "Passes repeated under a smaller factor."),
    _metric("training/rows", "rows", "none", "Rows that were trained."),
    _metric("train/ratio_mean", "1", "none", "Mean ratio of trainer to old probability."),
    _metric("train/ratio_max", "1", "none", "Largest ratio of trainer to old probability."),
    _metric("train/log_ratio_abs_max", "nats", "none", "Largest log of that ratio, by size."),
    # critic
    _metric("critic/loss", "1", "down", "Half the squared error of a value, clipped, mean."),
    _metric("critic/explained_variance", "1", "up", "Share of the returns' variance it foresaw."),
    _metric("critic/value_mean", "reward", "none", "Mean value before a trained token."),
    _metric("critic/return_mean", "reward", "none", "Mean of what the critic should have said."),
    _metric("critic/clip_fraction", "share", "none", "Tokens whose value moved too far to learn."),
    _metric("critic/grad_norm", "1", "none", "Norm of the critic's gradient before clipping."),
    _metric("critic/lr", "1", "none", "Learning rate of the critic."),
    _metric("critic/skipped_updates", "updates", "down", "Critic updates left out as not finite."),
    _metric("critic/loss_scale", "1", "none", "Factor on the critic's loss."),
    _metric("critic/overflows", "passes", "down", "The critic's passes repeated likewise."),
    # evaluation
    _metric("eval/*", "1", "up", "A held-out figure: eval/NAME/mean@K, .../low, .../high, ..."),
    # doctor
    _metric("doctor/rows", "rows", "none", "Rows of the step that the checks looked at."),
    _metric("doctor/causes", "causes", "down", "Causes of a mismatch that they show."),
    _metric("doctor/*", "1", "down", "1 where the rows of the step show this cause."),
    # tokens and time
    _metric("tokens/sampled", "tokens", "none", "Tokens that the model sampled."),
    _metric("tokens/trained", "tokens", "none", "Tokens in the loss."),
    _metric(
        "tokens/recomputed", "tokens", "down",
        "Sampled tokens whose log-probs the trainer computed once more before the loss.",
    ),
    _metric("tokens/encoded", "tokens", "none", "Tokens that the renderer wrote."),
    _metric(
        "routing/replayed_share", "share", "up",
        "Tokens fed to the trainer whose routes were replayed; with `trainer.routing_replay`.",
    ),
    _metric(
        "routing/differing_share", "share", "down",
        "Of the replayed (token, layer) pairs, those whose router would have chosen other experts.",
    ),
    _metric(
        "moe/load_max", "1", "down",
        "Tokens of an expert over those of an even spread: the largest of all routed layers.",
    ),
    _metric(
        "moe/load_cv", "1", "down",
        "Standard deviation over mean of the tokens per expert: mean of the routed layers.",
    ),
    _metric("moe/load_cv/*", "1", "down", "The same of one routed layer, counted from 0."),
    _metric("moe/unused_experts", "share", "down", "Experts that no token went to."),
    _metric(
        "moe/aux_loss", "1", "down",
        "Experts * sum of load * mean router probability, 1 if even; with `router_aux_coef`.",
    ),
    _metric("tokens/prefilled", "tokens", "down", "Prompt tokens that the engine computed."),
    _metric("tokens/cached", "tokens", "up", "Prompt tokens whose keys and values were reused."),
    # sync
    _metric("sync/bytes", "bytes", "down", "Of the weights that were handed to the engine."),
    _metric(
        "sync/level", "1", "up",
        "How far the engine's weights are verified: 1 version, 2 qualified, 3 and following.",
    ),
    _metric("sync/probe_gap", "nats", "down", "Median of |engine - trainer| on the probe."),
    _metric(
        "sync/slope", "1", "none",
        "Of the engine's change on the trainer's since the window's begin: 1 follows, 0 does not.",
    ),
    _metric("sync/slope_error", "1", "down", "Standard error of sync/slope; judged below 0.1."),
    _metric("sync/last_slope", "1", "none", "As sync/slope, of the last load alone."),
    _metric("sync/correlation", "1", "up", "Of the engine's and the trainer's change, by token."),
    _metric("sync/alarm", "1", "down", "1 where the engine does not follow the trainer."),
    # time
    _metric("time/step_seconds", "seconds", "down", "The whole step."),
    _metric("time/sample_seconds", "seconds", "down", "Sampling the step's episodes."),
    _metric("time/wait_seconds", "seconds", "down", "Of the step: waiting for its episodes."),
    _metric(
        "time/idle_seconds", "seconds", "down", "Since the last step: nothing was being sampled."
    ),
    _metric("time/train_seconds", "seconds", "down", "Measuring, correcting and updating."),
    _metric(
        "time/rescore_seconds", "seconds", "down",
        "Of sampling: waiting for re-scorings after the last episode ended.",
    ),
    _metric("time/elapsed_seconds", "seconds", "none", "Since the run began, resumes included."),
    _metric("time/*_seconds", "seconds", "down", "One phase of the step."),
    # engine
    _metric("engine/replicas", "engines", "up", "Replicas that take requests when the row ends."),
    _metric("engine/lost_replicas", "events", "down", "Replicas that were taken out."),
    _metric("engine/frozen_replicas", "events", "down", "Of those, the ones that stood still."),
    _metric("engine/returned_replicas", "events", "none", "Replicas that came back."),
    _metric("engine/retries", "requests", "down", "Requests asked for once more, elsewhere."),
    _metric("engine/continued_tokens", "tokens", "none", "Tokens of a cut reply that were kept."),
    _metric("engine/dropped_tokens", "tokens", "down", "Tokens that came and were thrown away."),
    _metric("engine/duplicated_deltas", "events", "down", "Pieces of replies that came twice."),
    _metric("engine/misordered_deltas", "events", "down", "Pieces that followed on nothing."),
    _metric("engine/lost_replies", "requests", "down", "Requests that one replica never answered."),
    _metric("engine/wrong_versions", "events", "down", "Replies of weights that were not given."),
    _metric("engine/spilled_requests", "requests", "down", "Turns sent away from their prefix."),
    _metric("engine/failed_requests", "requests", "down", "Requests that ended in an error."),
    _metric("engine/preemptions", "events", "down", "Requests computed again for want of pages."),
)  # fmt: skip
"""In the order in which people read them. An exact name wins over a family."""

_EXACT = {metric.name: metric for metric in METRICS if "*" not in metric.name}
_FAMILIES = tuple(
    (re.compile(re.escape(metric.name).replace(r"\*", r".+")), metric)
    for metric in METRICS
    if "*" in metric.name
)


StepMetric = Callable[[Sequence[Group], Sequence[Sample]], float]
_REGISTERED: dict[str, StepMetric] = {}


def step_metric(
    name: str, *, unit: str, better: Direction, meaning: str
) -> Callable[[StepMetric], StepMetric]:
    """Adds a metric of your own to every training step, as a decorator in a file for `--plugin`.

    The function gets the step's groups of trajectories and its training rows and returns a number.
    If it raises, the step goes on without the metric and the log says why. Raises DataError for a
    name that exists.
    """

    def register(function: StepMetric) -> StepMetric:
        if find_metric(name) is not None:
            raise DataError(f"the metric {name} exists already; choose another name.")
        _EXACT[name] = _metric(name, unit, better, meaning)
        _REGISTERED[name] = function
        find_metric.cache_clear()
        return function

    return register


def registered_metrics(groups: Sequence[Group], rows: Sequence[Sample]) -> dict[str, float]:
    """Computes the metrics that plugins registered, for one step."""
    found: dict[str, float] = {}
    for name, function in _REGISTERED.items():
        try:
            found[name] = float(function(groups, rows))
        except Exception as error:
            _log.warning("metric %s left out: %s: %s", name, type(error).__name__, error)
    return found


@lru_cache(maxsize=4096)
def find_metric(name: str) -> Metric | None:
    """The table's line for a name, with the family's `*` filled in; None if it has none.

    >>> find_metric("reward/correctness").unit
    'reward'
    """
    if name in _EXACT:
        return _EXACT[name]
    for pattern, metric in _FAMILIES:
        if pattern.fullmatch(name):
            return replace(metric, name=name)
    return None


_HELD_OUT = re.compile(r"eval/(.+)/((?:mean|pass)(?:@\d+)?)")


def held_out_label(name: str) -> str | None:
    """How a held-out mean or pass rate reads; None for every other name, its interval's included.

    >>> [held_out_label(f"eval/{n}") for n in ("greedy/mean@1", "sampled/pass@4", "greedy/failed")]
    ['greedy', 'sampled pass@4', None]
    """
    match = _HELD_OUT.fullmatch(name)
    if match is None:
        return None
    split, statistic = match[1].replace("/", " "), match[2]
    return split if statistic in ("mean", "mean@1") else f"{split} {statistic}"


def is_step_row(row: Mapping[str, Any]) -> bool:
    """Whether a row is of a training step; a row that has only held-out figures, and the engine's
    beside them, stands between."""
    return any(name != "step" and not name.startswith(("eval/", "engine/")) for name in row)


def unknown_names(names: Iterable[str]) -> list[str]:
    """The names that are not in the table, in order."""
    return [name for name in names if find_metric(name) is None]


def check_row(row: Mapping[str, Any]) -> None:
    """Raises DataError if a metrics row has a name that is not in the table, or no `step`."""
    if "step" not in row:
        raise DataError(f"a metrics row needs `step`; found {', '.join(row) or 'nothing'}.")
    if unknown := unknown_names(row):
        raise DataError(
            f"unknown metric names: {', '.join(unknown)}. Names are stable: use one of "
            "lockstep.observe.metrics.METRICS, or register yours with `step_metric`."
        )
