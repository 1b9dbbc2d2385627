"""Every metric by name: what it counts, in which unit, and which way is better.

People build dashboards on these names, so they are stable: tests of the loop look each name up
here. A pattern with `*` is a family whose last part is
given by the task, the evaluation or the phase of a step.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from lockstep.errors import DataError
from lockstep.types import Group, Sample

_log = logging.getLogger(__name__)

Direction = Literal["up", "down", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One line of the table."""

    name: str
    """The name in metrics.jsonl; `*` matches one or more characters."""
    unit: str
    """"1" is a bare number; "share" lies in 0..1."""
    better: Direction
    """Direction of an improvement; "none" if neither is better."""
    meaning: str
    """One line, for people who did not write the code."""


_MISMATCH: tuple[tuple[str, str, Direction, str], ...] = (
    ("k1", "nats", "none", "Mean of rollout minus trainer log-prob; cancels under a shift."),
    ("k2", "nats", "down", "Half the mean square of the log-prob difference."),
    ("k3", "nats", "down", "Low-variance estimate of KL(rollout, trainer); never negative."),
    ("k3_numerics", "nats", "down", "k3 at age 0, or 0 under the contract."),
    ("k3_staleness", "nats", "none", "The rest of k3: the policy has moved since the draw."),
    ("k1_unforced", "nats", "none", "k1 over tokens with a rollout probability up to 0.99."),
    ("k2_unforced", "nats", "down", "k2 over tokens with a rollout probability up to 0.99."),
    ("k3_unforced", "nats", "down", "k3 over tokens with a rollout probability up to 0.99."),
    ("max_abs_diff", "nats", "down", "Largest difference of one token's two log-probs."),
    ("unequal_tokens", "tokens", "down", "Tokens whose two log-probs differ in any bit."),
    ("compared_tokens", "tokens", "none", "Sampled tokens that were compared."),
    ("forced_share", "share", "none", "Tokens with a rollout probability above 0.99."),
    ("nonfinite_tokens", "tokens", "down", "Tokens without a finite log-prob on either side."),
    ("ess", "share", "up", "Effective sample size of the importance weights, as a share."),
    ("log_ppl_abs_diff_mean", "nats", "down", "Mean gap between a row's two mean log-probs."),
    ("log_ppl_abs_diff_max", "nats", "down", "Largest gap between a row's two mean log-probs."),
    ("log_ppl_diff_mean", "nats", "none", "Mean over rows of rollout minus trainer mean log-prob."),
    ("log_ppl_diff_max", "nats", "none", "Largest rollout minus trainer mean log-prob of a row."),
    ("log_ppl_diff_min", "nats", "none", "Lowest rollout minus trainer mean log-prob of a row."),
    ("chi2", "1", "down", "Mean square of the tokens' ratios, minus 1."),
    ("chi2_sequence", "1", "down", "Mean square of the rows' products of ratios, minus 1."),
    ("log_ratio_min", "nats", "none", "Lowest trainer minus rollout log-prob."),
    ("log_ratio_max", "nats", "none", "Highest trainer minus rollout log-prob."),
    ("log_ratio_p*", "nats", "none", "A percentile of trainer minus rollout log-prob."),
    ("outlier_tokens", "tokens", "down", "Tokens that differ by more than 1e-4."),
    ("by_age/*", "1", "none", "One age: 0 is numerics alone, older is staleness too."),
    ("by_turn/*", "1", "none", "One turn of the episode."),
    ("by_position/*", "1", "none", "One range of positions in the row."),
    ("by_kind/*", "1", "none", "One kind of token: text, or control tokens."),
    ("by_seat/*", "1", "none", "One seat of a task that several play: its trained tokens."),
)

_TABLE: dict[str, tuple[tuple[str, str, Direction, str], ...]] = {
    "": (
        ("step", "steps", "none", "Index of the training step, from 0."),
        ("policy_version", "updates", "none", "Version of the weights that sampled: updates made."),
        ("perplexity", "1", "none", "exp of minus the mean log-prob of the sampled tokens."),
    ),
    "reward/": (
        ("mean", "reward", "up", "Mean reward of the step's episodes."),
        ("std", "reward", "none", "Standard deviation over the step's episodes."),
        ("min", "reward", "up", "Lowest reward of the step."),
        ("max", "reward", "up", "Highest reward of the step."),
        ("source/*", "reward", "up", "Mean reward of one part of a mixture."),
        ("*/mean", "reward", "up", "Mean reward of one seat, in a task that several play."),
        ("*", "reward", "none", "Mean of one raw part of the reward, before its weight."),
    ),
    "advantage/": (
        ("mean", "1", "none", "Mean advantage over trained tokens."),
        ("std", "1", "none", "Standard deviation of the advantage."),
        ("max_abs", "1", "none", "Largest advantage by size."),
    ),
    "credit/": (
        ("compared_share", "share", "up", "Turns that had a peer to be compared with."),
        ("rewarded_share", "share", "none", "Turns with a reward of their own."),
    ),
    "episodes/": (
        ("total", "episodes", "none", "Episodes sampled for the step."),
        ("failed", "episodes", "down", "Episodes that broke; never trained."),
        ("truncated", "episodes", "down", "Episodes that a budget ended."),
        ("turns_mean", "turns", "none", "Turns of the model per episode."),
        ("without_signal", "groups", "down", "Groups of several episodes with equal rewards."),
        ("source/*", "episodes", "none", "Episodes of one part of a mixture."),
        ("seat/*", "episodes", "none", "Episodes of one seat, in a task that several play."),
        ("without_signal/*", "groups", "down", "Groups of one seat with equal rewards."),
    ),
    "signal/": (
        ("replaced", "groups", "down", "Groups without a signal that others were played for."),
        ("missing", "groups", "down", "Trained groups without a signal, all extra tasks used."),
        ("known_tasks", "tasks", "none", "Tasks of which the run knows how often they teach."),
        ("known_share", "share", "up", "Mean share of their groups whose rewards differed."),
        ("over_long_rows", "rows", "down", "Rows left out by signal.over_long=drop."),
    ),
    "distill/": (
        ("kl", "nats", "down", "KL(student, teacher), estimated from the sampled tokens."),
    ),
    "episode/": (
        ("sandbox/programs", "programs", "none", "Programs run per episode."),
        ("sandbox/error", "programs", "down", "Programs that raised, or were no program."),
        ("sandbox/timeout", "programs", "down", "Programs that ran into their time limit."),
        ("sandbox/memory", "programs", "down", "Programs that ran into their memory limit."),
        ("sandbox/output", "programs", "down", "Programs that ran on after their output was cut."),
        ("sandbox/refused", "programs", "down", "Programs that asked for a file or a socket."),
        ("sandbox/crashed", "programs", "down", "Programs that took their sandbox down."),
        ("sandbox/truncated", "programs", "down", "Programs that printed more than was read."),
        ("branches/*", "branches", "none", "Turns that began a branch, by reason."),
        ("gateway/requests", "requests", "none", "Turns that an agent asked for."),
        ("gateway/repeated_requests", "requests", "none", "Requests that came again."),
        ("gateway/reused_tokens", "tokens", "up", "Prompt tokens that were not encoded again."),
        ("gateway/altered_replies", "replies", "down", "Replies that an agent sent back changed."),
        ("gateway/altered_tokens", "tokens", "down", "Tokens added or lost in altered replies."),
        ("gateway/abandoned_turns", "turns", "down", "Turns retried, or never received."),
        ("gateway/ignored_rewards", "rewards", "down", "Posted rewards that a score replaced."),
        ("gateway/engine_errors", "requests", "down", "Requests that the engine did not answer."),
        ("gateway/ignored/*", "requests", "down", "Requests that set a field without effect."),
        ("*", "1", "none", "Mean over episodes of a counter of the environment."),
    ),
    "response_length/": (
        ("mean", "tokens", "none", "Sampled tokens per episode."),
        ("max", "tokens", "none", "Sampled tokens of the longest episode."),
        ("min", "tokens", "none", "Sampled tokens of the shortest episode."),
    ),
    "mismatch/": (
        *_MISMATCH,
        ("support_bias", "nats", "down", "Mean -log of the mass that top-p/top-k kept."),
    ),
    "mismatch_after/": tuple((n, u, b, f"After the update: {m}") for n, u, b, m in _MISMATCH),
    "mismatch_averaged/": tuple((n, u, b, f"Averaged behaviour: {m}") for n, u, b, m in _MISMATCH),
    "noise/": (
        ("rescorings", "passes", "none", "Mean number of re-scorings behind a token's average."),
        ("var_rollout", "nats^2", "down", "Variance of a log-prob between re-scorings."),
        ("sampling_bias", "nats", "none", "Mean of recorded minus re-scored log-prob."),
        ("fallback_tokens", "tokens", "down", "Trained tokens that no re-scoring covers."),
        ("stale_rescorings", "passes", "down", "Re-scorings by other weights than the sampler's."),
        ("failed_rescorings", "passes", "down", "Re-scorings that the engine refused."),
        ("cache_hit_share", "share", "up", "Prompt tokens of re-scorings read from the cache."),
        ("overlapped_share", "share", "up", "Re-scorings that ended before the last episode did."),
    ),
    "staleness/": (
        ("version", "updates", "none", "Version of the weights in training: updates made."),
        ("mean", "updates", "down", "Updates since a trained token was sampled."),
        ("max", "updates", "down", "Updates since the oldest trained token was sampled."),
        ("mixed_rows", "rows", "none", "Rows that several versions sampled."),
        ("over_rows", "rows", "down", "Rows with a token older than max_staleness."),
        ("dropped_rows", "rows", "down", "Rows left out by over_stale=drop."),
    ),
    "correction/": (
        ("weight_mean", "1", "none", "Mean weight of kept tokens, as bounded."),
        ("weight_std", "1", "down", "Standard deviation of these weights."),
        ("ess", "share", "up", "Effective sample size of the bounded weights."),
        ("above_share", "share", "none", "Tokens whose weight was over the limit."),
        ("below_share", "share", "none", "Tokens whose weight was under the limit."),
        ("kept_tokens", "tokens", "none", "Tokens that were trained on."),
        ("rejected_share", "share", "down", "Sampled tokens not trained on."),
        ("rejected_sequences_share", "share", "down", "Rows with no token left."),
        ("rejected_by/*", "share", "down", "Sampled tokens that one rule rejected."),
        ("normalizer", "1", "none", "Divisor of the weights."),
        ("sequence_weight_mean", "1", "none", "Mean weight of a row, as bounded."),
        ("sequence_ess", "share", "up", "Effective sample size over rows."),
        ("sequence_log_ratio_max", "nats", "none", "Largest log weight of a row."),
        ("sequence_log_ratio_min", "nats", "none", "Lowest log weight of a row."),
        ("by_*", "1", "none", "The same for one age, turn, position or kind."),
    ),
    "train/": (
        ("loss", "nats", "none", "The objective that was minimised."),
        ("grad_norm", "1", "none", "Norm of the gradient before clipping."),
        ("clip_fraction", "share", "none", "Tokens whose ratio the objective clipped."),
        ("dual_clip_fraction", "share", "none", "Tokens that only the dual clip stopped."),
        ("truncated_fraction", "share", "none", "Tokens whose weight was cut by a ratio."),
        ("divergence_mean", "1", "none", "Mean of DPPO's divergence from the old policy."),
        ("divergence_max", "1", "none", "Largest of DPPO's divergences."),
        ("reference_kl", "nats", "none", "Estimate of KL(policy, reference) in the loss."),
        ("teacher_kl", "nats", "down", "KL from the teacher in the loss: distill.signal."),
        ("entropy", "nats", "none", "Mean entropy of the policy at sampled tokens."),
        ("lr", "1", "none", "Learning rate of the step."),
        ("skipped_updates", "updates", "down", "Updates left out as not finite."),
        ("loss_scale", "1", "none", "Factor on the loss, for float16's gradients."),
        ("overflows", "passes", "down", "Passes repeated under a smaller factor."),
        ("ratio_mean", "1", "none", "Mean ratio of trainer to old probability."),
        ("ratio_max", "1", "none", "Largest ratio of trainer to old probability."),
        ("log_ratio_abs_max", "nats", "none", "Largest log of that ratio, by size."),
        ("approx_kl", "nats", "none", "Mean of old minus trainer log-prob: k1 of the update."),
        ("approx_kl/*", "nats", "none", "The same in one of a step's several updates, from 0."),
    ),
    "training/": (("rows", "rows", "none", "Rows that were trained."),),
    "provenance/": (
        ("drawn", "rows", "up", "Rows whose tokens are what the server drew (Tinker's API)."),
        ("foreign", "rows", "none", "Rows with trained tokens that the server did not draw."),
        ("unknown", "rows", "none", "Rows that claim no origin, as in supervised training."),
        ("differs", "rows", "down", "Rows that differ from what was drawn, trained by request."),
    ),
    "policy/": (("*", "1", "none", "A figure of the policy of one seat: policy/SEAT/train/loss."),),
    "critic/": (
        ("loss", "1", "down", "Half the mean squared error of a value, clipped."),
        ("explained_variance", "1", "up", "Share of the returns' variance that it foresaw."),
        ("value_mean", "reward", "none", "Mean value before a trained token."),
        ("return_mean", "reward", "none", "Mean return, which the values are trained to."),
        ("clip_fraction", "share", "none", "Tokens whose value moved too far to learn."),
        ("grad_norm", "1", "none", "Norm of the critic's gradient before clipping."),
        ("lr", "1", "none", "Learning rate of the critic."),
        ("skipped_updates", "updates", "down", "Critic updates left out as not finite."),
        ("loss_scale", "1", "none", "Factor on the critic's loss."),
        ("overflows", "passes", "down", "Critic passes repeated under a smaller factor."),
    ),
    "eval/": (("*", "1", "up", "A held-out figure: eval/NAME/mean@K, .../low, .../high, ..."),),
    "doctor/": (
        ("rows", "rows", "none", "Rows of the step that were checked."),
        ("causes", "causes", "down", "Causes of a mismatch found in these rows."),
        ("*", "1", "down", "1 if the rows of the step show this cause."),
    ),
    "routing/": (
        ("replayed_share", "share", "up", "Tokens fed to the trainer whose routes were replayed."),
        ("differing_share", "share", "down", "Replayed routes that the router would not choose."),
    ),
    "moe/": (
        ("load_max", "1", "down", "Largest number of tokens of an expert over the even spread's."),
        ("load_cv", "1", "down", "Standard deviation over mean of the tokens per expert."),
        ("load_cv/*", "1", "down", "The same for one routed layer, counted from 0."),
        ("unused_experts", "share", "down", "Experts that no token went to."),
    ),
    "tokens/": (
        ("sampled", "tokens", "none", "Tokens that the model sampled."),
        ("replaced", "tokens", "down", "Tokens sampled for groups that others replaced."),
        ("trained", "tokens", "none", "Tokens in the loss."),
        ("recomputed", "tokens", "down", "Trained tokens scored by a forward before the loss."),
        ("rows", "tokens", "none", "Tokens that the trained rows have the model read."),
        ("distinct", "tokens", "none", "The same with each common beginning of rows counted once."),
        (
            "computed",
            "tokens",
            "down",
            "Tokens of the micro-batches; no tree is cut if as many as `distinct`.",
        ),
        ("encoded", "tokens", "none", "Tokens that the renderer wrote."),
        ("prefilled", "tokens", "down", "Prompt tokens that the engine computed."),
        ("cached", "tokens", "up", "Prompt tokens whose keys and values were reused."),
    ),
    "sync/": (
        ("bytes", "bytes", "down", "Bytes of weights handed to the engine."),
        ("level", "1", "up", "Verified: 1 version, 2 qualified, 3 follows the trainer."),
        ("probe_gap", "nats", "down", "Median of |engine - trainer| on the probe."),
        ("slope", "1", "none", "Engine's change per trainer's change: 1 follows, 0 does not."),
        ("slope_error", "1", "down", "Standard error of sync/slope; judged below 0.1."),
        ("last_slope", "1", "none", "sync/slope of the last load alone."),
        ("correlation", "1", "up", "Correlation of the engine's and the trainer's change."),
        ("alarm", "1", "down", "1 if the engine does not follow the trainer."),
    ),
    "time/": (
        ("step_seconds", "seconds", "down", "The whole step."),
        ("sample_seconds", "seconds", "down", "Sampling the step's episodes."),
        ("wait_seconds", "seconds", "down", "Waiting for the step's episodes."),
        ("idle_seconds", "seconds", "down", "Time since the last step without any sampling."),
        ("train_seconds", "seconds", "down", "Measuring, correcting and updating."),
        ("rescore_seconds", "seconds", "down", "Waiting for re-scorings after the last episode."),
        ("elapsed_seconds", "seconds", "none", "Time since the run began, resumes included."),
        ("*_seconds", "seconds", "down", "One phase of the step."),
    ),
    "engine/": (
        ("replicas", "engines", "up", "Replicas that take requests when the row ends."),
        ("lost_replicas", "events", "down", "Replicas that were taken out."),
        ("frozen_replicas", "events", "down", "Replicas taken out because they stood still."),
        ("returned_replicas", "events", "none", "Replicas that came back."),
        ("retries", "requests", "down", "Requests asked again of another replica."),
        ("restarts", "events", "down", "Engine processes that had died and were started again."),
        ("continued_tokens", "tokens", "none", "Tokens of a cut reply that were kept."),
        ("dropped_tokens", "tokens", "down", "Tokens that arrived and were thrown away."),
        ("lost_replies", "requests", "down", "Requests that a replica never answered."),
        ("wrong_versions", "events", "down", "Replies from weights that were not given."),
        ("spilled_requests", "requests", "down", "Turns sent to a replica without their prefix."),
        ("failed_requests", "requests", "down", "Requests that ended in an error."),
        ("preemptions", "events", "down", "Requests computed again for lack of cache pages."),
    ),
}

METRICS = tuple(
    Metric(name=f"{room}{name}", unit=unit, better=better, meaning=meaning)
    for room, rows in _TABLE.items()
    for name, unit, better, meaning in rows
)
"""In the order in which people read them. An exact name wins over a family."""

_EXACT = {metric.name: metric for metric in METRICS if "*" not in metric.name}


StepMetric = Callable[[Sequence[Group], Sequence[Sample]], float]
_REGISTERED: dict[str, StepMetric] = {}


def step_metric(
    name: str, *, unit: str, better: Direction, meaning: str
) -> Callable[[StepMetric], StepMetric]:
    """Adds a metric of your own to every training step, as a decorator in a file for `--plugin`.

    The function gets the step's groups of trajectories and its training rows and returns a number.
    If it raises, the step has no such metric and the log says why. Raises DataError for a
    name that exists.
    """

    def register(function: StepMetric) -> StepMetric:
        if find_metric(name) is not None:
            raise DataError(f"the metric {name} exists already; choose another name.")
        _EXACT[name] = Metric(name=name, unit=unit, better=better, meaning=meaning)
        _REGISTERED[name] = function
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


def find_metric(name: str) -> Metric | None:
    """The table's line for a name, with the family's `*` filled in; None if it has none.

    >>> find_metric("reward/correctness").unit
    'reward'
    """
    if name in _EXACT:
        return _EXACT[name]
    for metric in METRICS:
        if "*" in metric.name and fnmatchcase(name, metric.name.replace("*", "?*")):
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
    """Whether a row is of a training step. Rows between steps hold only held-out figures and the
    engine's counters."""
    return any(name != "step" and not name.startswith(("eval/", "engine/")) for name in row)
