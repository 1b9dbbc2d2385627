"""The headlines of the five documents that Lockstep is built from, each tried here.

    python docs/proof/claims.py           everything (`make claims`): what is missing of the studies
                                          (hours; goes on where it stopped), then the short ones
    python docs/proof/claims.py --quick   the short ones alone (`make claims-quick`, 13 minutes):
                                          fails if a verdict is another than before
    python docs/proof/claims.py --judge   run nothing: the verdicts anew, from stored figures

A claim has the documents' figure, ours, and a verdict by a rule that is part of the claim, so that
it changes only with the figures:

    reproduces      the effect is there, and its interval of 95 % excludes none
    in part         it has the claimed direction, and less than half the claimed size; or one of
                    two claims holds
    does not        half the claimed effect lies outside of the interval, or would have been seen
                    with a power of 0.8, and was not
    not tested      there are too few seeds for that, or what it needs is not here; it says what

What came out is claims.json beside this file, which docs/claims.md shows.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import mean, variance
from typing import Any, Literal

import studies
from run import host
from scipy import stats

HERE = Path(__file__).parent
RESULTS = HERE / "claims.json"

Verdict = Literal["reproduces", "in part", "does not", "not tested"]
Figures = Mapping[str, float]
Found = tuple[str, Verdict]
"""(our figure in words, verdict)"""

DOCUMENTS = {
    "tinker": "*KL divergence during RL training*, a report on multi-turn training of gpt-oss "
    "with Tinker, and its follow-up on outliers, 2026",
    "slime": "*Speed and stability: the whole stack against the mismatch of training and "
    "inference, with slime*, 2025 (in Chinese)",
    "retrospective": "*Unlocking Agentic RL Training for GPT-OSS: a Practical Retrospective*, "
    "LinkedIn, 2026",
    "kwaikat": "*Reducing Sampling Noise to Improve Stability of MoE Reinforcement Learning*, "
    "KwaiKAT team, 2025 (in Chinese)",
    "tokens": "*The asymmetry of a tokenizer's encoding and decoding: from an RL run that "
    "collapses to token in, token out in the agent loop*, on a talk about verl, 2025 (in Chinese)",
}


@dataclass(frozen=True, kw_only=True)
class Claim:
    text: str
    """The claim in one sentence."""
    theirs: str
    """Their figure."""
    measure: str = ""
    """Function of claim_measures.py whose figures `judge` gets; empty: it reads the studies."""
    study: str = ""
    """Study that it reads."""
    judge: Callable[[Figures], Found]

    @property
    def command(self) -> str:
        if self.measure:
            return f"claims.py --quick {self.measure}"
        return f"studies.py {self.study}" if self.study else ""


# -- verdicts --------------------------------------------------------------------------------------

ALPHA, POWER = 0.05, 0.8
NOT_MEASURED = "not measured yet"


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """(mean of a less mean of b, its standard error, degrees of freedom), by Welch. The error is
    infinite with fewer than two seeds."""
    if min(len(a), len(b)) < 2:
        return 0.0, math.inf, 1.0
    errors = [variance(each) / len(each) for each in (a, b)]
    error = math.sqrt(sum(errors))
    if not error:
        return mean(a) - mean(b), 0.0, 1.0
    parts = sum(e**2 / (len(each) - 1) for e, each in zip(errors, (a, b), strict=True))
    return mean(a) - mean(b), error, sum(errors) ** 2 / parts


def is_higher(a: Sequence[float], b: Sequence[float], *, by: float) -> Verdict:
    """The verdict on "a is higher than b by that much".

    >>> is_higher([0.9, 0.91, 0.92], [0.5, 0.52, 0.51], by=0.4)
    'reproduces'
    >>> is_higher([0.51, 0.52, 0.5], [0.5, 0.52, 0.51], by=0.4)
    'does not'
    >>> is_higher([0.1, 0.9, 0.5], [0.5, 0.2, 0.8], by=0.4)
    'not tested'
    """
    found, error, freedom = difference(a, b)
    if error == math.inf:
        return "not tested"
    margin = stats.t.ppf(1 - ALPHA, freedom) * error
    if found - margin > 0:
        return "reproduces" if found >= by / 2 else "in part"
    would_be_seen = margin + stats.t.ppf(POWER, freedom) * error <= by / 2
    return "does not" if would_be_seen or found + margin < by / 2 else "not tested"


def are_alike(a: Sequence[float], b: Sequence[float], *, within: float) -> Verdict:
    """The verdict on "a and b differ by no more than that", by two one-sided tests.

    >>> are_alike([0.9, 0.91, 0.92], [0.9, 0.92, 0.91], within=0.1)
    'reproduces'
    >>> are_alike([0.9, 0.91, 0.92], [0.5, 0.52, 0.51], within=0.1)
    'does not'
    """
    found, error, freedom = difference(a, b)
    if error == math.inf:
        return "not tested"
    margin = stats.t.ppf(1 - ALPHA, freedom) * error
    if abs(found) + margin < within:
        return "reproduces"
    return "does not" if abs(found) - margin > within else "not tested"


def worst(*verdicts: Verdict) -> Verdict:
    """The verdict on several claims together: in part, where some hold."""
    if "not tested" in verdicts:
        return "not tested"
    if len(set(verdicts)) == 1:
        return verdicts[0]
    return "in part"


def holds(is_so: bool) -> Verdict:
    """The verdict on figures without chance, or far outside of it."""
    return "reproduces" if is_so else "does not"


def halves(first: bool, second: bool) -> Verdict:
    """`holds` for a claim of two halves."""
    return "reproduces" if first and second else "in part" if first or second else "does not"


# -- figures of studies ----------------------------------------------------------------------------


results = cache(studies.read_results)


def seeds_of(name: str, condition: str, arm: str, figure: str) -> list[float]:
    """A figure of every seed that has been run, and has it."""
    found = studies.stored(results(), name, condition, arm)["seeds"].values()
    return [seed[figure] for seed in found if seed.get(figure) is not None]


def spread(values: Sequence[float]) -> str:
    """ "0.87 (0.85 .. 0.88, 3 seeds)" """
    if not values:
        return "not run"
    low, middle, high = (f"{v:.2g}" for v in (min(values), mean(values), max(values)))
    return f"{middle} ({low} .. {high}, {len(values)} seeds)"


def told(found: Mapping[str, Sequence[float]]) -> str:
    return ", ".join(f"{name} {spread(values)}" for name, values in found.items())


def logs_of(values: Sequence[float]) -> list[float]:
    return [math.log(value) for value in values]


def rewards(name: str, condition: str) -> Callable[[str], list[float]]:
    return lambda arm: seeds_of(name, condition, arm, "reward_last_10")


def higher(
    name: str, condition: str, high: str, low: str, *, by: float, figure: str = "reward_last_10"
) -> Callable[[Figures], Found]:
    """Judge of "the arm `high` ends higher than `low`"."""

    def judge(_: Figures) -> Found:
        found = {arm: seeds_of(name, condition, arm, figure) for arm in (high, low)}
        return told(found), is_higher(*found.values(), by=by)

    return judge


def alike(
    name: str, condition: str, arms: Sequence[str], *, within: float, figure: str = "reward_last_10"
) -> Callable[[Figures], Found]:
    """Judge of "all these arms end alike": every one against the first."""

    def judge(_: Figures) -> Found:
        found = {arm: seeds_of(name, condition, arm, figure) for arm in arms}
        first, *others = found.values()
        return told(found), worst(*(are_alike(other, first, within=within) for other in others))

    return judge


def collapses(name: str, condition: str, arm: str) -> str:
    """ "2 of 5 collapse, at step 40 to 90" """
    found = seeds_of(name, condition, arm, "collapses")
    steps = seeds_of(name, condition, arm, "collapse_step")
    at = f", at step {min(steps):.0f} to {max(steps):.0f}" if steps else ""
    return f"{sum(found):.0f} of {len(found)} collapse{at}"


def mostly(count: float, total: int) -> Verdict:
    """The verdict on "most runs of this kind do it", by the exact test of a share of one half.

    >>> mostly(5, 5), mostly(3, 5), mostly(0, 5)
    ('reproduces', 'not tested', 'does not')
    """
    if total and stats.binomtest(int(count), total, alternative="greater").pvalue < ALPHA:
        return "reproduces"
    if total and stats.binomtest(int(count), total, alternative="less").pvalue < ALPHA:
        return "does not"
    return "not tested"


def collapse_of(condition: str, arm: str, *, beside: str) -> Callable[[Figures], Found]:
    """Judge of "runs of this arm collapse"."""

    def judge(_: Figures) -> Found:
        texts = [
            f"{each}: {collapses('collapse', condition, each)}, reward "
            f"{spread(seeds_of('collapse', condition, each, 'reward_last_10'))}"
            for each in (arm, beside)
        ]
        found = seeds_of("collapse", condition, arm, "collapses")
        return "; ".join(texts), mostly(sum(found), len(found))

    return judge


def stable_estimates(_: Figures) -> Found:
    arms = ("averaged, n=8", "TIS, 2", "rollout")
    found = [seeds_of("collapse", NOISE, arm, "collapses") for arm in arms]
    text = "; ".join(f"{arm}: {collapses('collapse', NOISE, arm)}" for arm in arms)
    stable = [*found[0], *found[1]]
    table = [[sum(each), len(each) - sum(each)] for each in (stable, found[2])]
    if not sum(stable):
        return text, mostly(len(stable), len(stable))
    fewer = bool(stats.fisher_exact(table, alternative="less").pvalue < ALPHA)
    return text, "in part" if fewer else "not tested"


NOISE, BIAS = "noise x 3.3", "noise x 3.3, sinks ignored"
SINKS = "tiny-gpt-oss"


def order_of_estimates(_: Figures) -> Found:
    arms = ("rollout", "TIS, 2", "averaged, n=8")
    found = [seeds_of("collapse", NOISE, arm, "reward_last_10") for arm in arms]
    told = [f"{arm} {spread(v)}" for arm, v in zip(arms, found, strict=True)]
    best = spread(seeds_of("collapse", NOISE, "recomputed", "reward_last_10"))
    text = f"{', '.join(reversed(told))}; recomputed {best}"
    ends = is_higher(found[2], found[0], by=0.2)
    seeds = list(zip(*found, strict=False))
    if ends == "reproduces" and stats.page_trend_test(seeds).pvalue >= ALPHA:
        return f"{text}: the ends differ, the middle is not told apart", "in part"
    return text, ends


def cap_of_tis(_: Figures) -> Found:
    of = rewards("collapse", NOISE)
    found = {arm: of(arm) for arm in ("TIS, 1.5", "TIS, 2", "TIS, 5")}
    low, _, high = sorted(found.values(), key=lambda values: mean(values or [0.0]))
    return told(found), is_higher(high, low, by=0.2)


def kl_of_estimates(_: Figures) -> Found:
    arms = ("averaged, n=8", "replay", "rollout", "recomputed")
    found = {arm: seeds_of("collapse", NOISE, arm, "behaviour_k3_mean") for arm in arms}
    logs = {arm: logs_of(values) for arm, values in found.items()}
    return f"k3: {told(found)}", worst(*(
        is_higher(logs[high], logs[low], by=math.log(2))
        for low in arms[:2] for high in arms[2:]
    ))  # fmt: skip


def lost_routes(_: Figures) -> Found:
    arms = ("replay", "replay in part", "recomputed")
    name, figure = "noise as measured", "behaviour_k3_mean"
    found = {arm: seeds_of("averaging", name, arm, figure) for arm in arms}
    logs = [logs_of(values) for values in found.values()]
    return f"k3: {told(found)}", worst(
        is_higher(logs[1], logs[0], by=math.log(2)), is_higher(logs[2], logs[1], by=math.log(1.5))
    )


def broken_rows(_: Figures) -> Found:
    arms = {
        "log-probs by position": "re-tokenised, log-probs by position",
        "shifted": "shifted log-probs",
        "recomputed": "re-tokenised, log-probs recomputed",
    }
    found = {
        name: seeds_of("tokens", condition, "as by default", "reward_last_10")
        for name, condition in arms.items()
    }
    healthy = seeds_of("tokens", "healthy", "as by default", "reward_last_10")
    return f"healthy {spread(healthy)}; {told(found)}", is_higher(
        healthy, found["log-probs by position"], by=0.5
    )


def missing_end(_: Figures) -> Found:
    healthy, lost = (
        seeds_of("tokens", condition, "as by default", "reward_last_10")
        for condition in ("healthy", "final tokens dropped")
    )
    return f"healthy {spread(healthy)}, end missing {spread(lost)}", is_higher(
        healthy, lost, by=0.5
    )


def kl_thresholds(_: Figures) -> Found:
    arms = ("baseline", "token IS")
    found = {
        condition: [seeds_of("corrections", condition, arm, "reward_last_10") for arm in arms]
        for condition in ("no mismatch", "kernel noise 0.5")
    }
    k3 = seeds_of("corrections", "kernel noise 0.5", "baseline", "k3_mean")
    sound, noisy = ([v for arm in each for v in arm] for each in found.values())
    return (
        f"k3 of {spread(k3)} from noise: reward {spread(noisy)}, without {spread(sound)}",
        is_higher(sound, noisy, by=0.2),
    )


def falls_at_first(_: Figures) -> Found:
    conditions = ("kernel noise 0.035", "kernel noise 0.5")
    arms = studies.STUDIES["corrections"].arms
    first, last = (
        [
            math.log(value)
            for condition in conditions
            for arm in arms
            for value in seeds_of("corrections", condition, arm, figure)
        ]
        for figure in ("k3_first_10", "k3_last_10")
    )
    falls = [1 - math.exp(b - a) for a, b in zip(first, last, strict=True)]
    pairs = stats.ttest_rel(first, last, alternative="greater")
    text = f"{min(falls):.0%} to {max(falls):.0%} in 60 steps, {len(falls)} runs"
    return f"k3 falls by {text}", holds(bool(pairs.pvalue < ALPHA))


def rises_late(_: Figures) -> Found:
    middle, last = (
        seeds_of("late", "bfloat16 sampler", "recomputed", figure)
        for figure in ("k3_steps_200_300", "k3_last_100")
    )
    text = f"k3 {spread(middle)} at steps 200 to 299, {spread(last)} in the last 100 of 700"
    return text, is_higher(logs_of(last), logs_of(middle), by=math.log(3))


def late_mis(_: Figures) -> Found:
    texts, verdicts = [], []
    for condition in (
        "weights 4 updates old",
        "kernel noise that grows to 0.5",
        "router noise 0.3",
    ):
        base, mis = (
            logs_of(seeds_of("fork", condition, arm, "k3_last_10")) for arm in ("base", "MIS")
        )
        lower = sum(b > m for b, m in zip(base, mis, strict=True))
        texts.append(f"{condition}: lower in {lower} of {len(base)} seeds")
        verdicts.append(is_higher(base, mis, by=math.log(2)))
    return "; ".join(texts), worst(*verdicts)


def no_collapse(_: Figures) -> Found:
    counted = [
        seed
        for name in ("corrections", "moe")
        for arms in results()["studies"][name]["conditions"].values()
        for arm in arms.values()
        for seed in arm["seeds"].values()
    ]
    fallen = sum(seed["reward_last_10"] < seed["reward_first_10"] for seed in counted)
    old = seeds_of("fork", "weights 4 updates old", "base", "reward_last_10")
    text = f"noise: {fallen} of {len(counted)} runs end below their first ten steps"
    text += f"; weights 4 updates old: reward {spread(old)}"
    return text, "reproduces" if not fallen and min(old) > 0 else "in part"


def penalty(_: Figures) -> Found:
    arms = ("none", "advantage, 0.3", "loss, 0.3", "loss, 0.01")
    of = rewards("penalty", "sinks ignored")
    return told({arm: of(arm) for arm in arms}), is_higher(of("advantage, 0.3"), of("none"), by=0.2)


def pull(_: Figures) -> Found:
    of = rewards("penalty", "sinks ignored")
    text = f"as a loss {spread(of('loss, 0.3'))}, none {spread(of('none'))}"
    text += f", in the advantages {spread(of('advantage, 0.3'))}"
    return text, is_higher(of("loss, 0.3"), of("advantage, 0.3"), by=0.2)


def two_arms_of_renderers(_: Figures) -> Found:
    of = rewards("renderers", "quickstart")
    ours, theirs = of("harmony"), of("template")
    k3 = [max(seeds_of("renderers", "quickstart", arm, "k3_mean"), default=1.0)
          for arm in ("harmony", "template")]  # fmt: skip
    text = f"k3 at most {k3[0]:.0e} and {k3[1]:.0e}; reward by our renderer {spread(ours)}, by a "
    text += f"template {spread(theirs)}"
    return text, worst(holds(max(k3) < 1e-9), are_alike(ours, theirs, within=0.1))


def exploding(_: Figures) -> Found:
    peaks = [seeds_of("sinks", SINKS, arm, "grad_norm_largest") for arm in ("ignored", "correct")]
    reward = [seeds_of("sinks", SINKS, arm, "reward_last_10") for arm in ("correct", "ignored")]
    text = f"largest gradient {spread(peaks[0])}, sound {spread(peaks[1])}; reward "
    text += f"{spread(reward[1])}, sound {spread(reward[0])}"
    return text, worst(is_higher(*peaks, by=2.0), is_higher(*reward, by=0.5))


def frozen_attention(_: Figures) -> Found:
    peaks = [
        seeds_of("sinks", SINKS, arm, "grad_norm_largest")
        for arm in ("ignored", "ignored, attention frozen")
    ]
    reward = [
        seeds_of("sinks", SINKS, arm, "reward_last_10")
        for arm in ("correct", "ignored, attention frozen")
    ]
    text = f"largest gradient {spread(peaks[1])}, not frozen {spread(peaks[0])}; reward "
    text += f"{spread(reward[1])}, sound {spread(reward[0])}"
    calmer, lower = is_higher(*peaks, by=2.0), is_higher(*reward, by=0.3)
    return text, "reproduces" if (calmer, lower) == ("reproduces", "reproduces") else worst(
        calmer, lower
    )


def rescue(arm: str) -> Callable[[Figures], Found]:
    def judge(_: Figures) -> Found:
        of = rewards("sinks", SINKS)
        text = f"{spread(of(arm))}; nothing corrected {spread(of('ignored'))}, sound "
        text += spread(of("correct"))
        return text, is_higher(of(arm), of("ignored"), by=0.5)

    return judge


def on_tasks(high: str, low: str) -> Callable[[Figures], Found]:
    """Judge of "the arm `high` ends higher than `low`", by 0.3 of reward on each of three tasks."""

    def judge(_: Figures) -> Found:
        texts, verdicts = [], []
        for task in ("math", "retool", "instructions"):
            text, verdict = higher(f"sinks-{task}", task, high, low, by=0.3)(_)
            texts.append(f"{task}: {text}")
            verdicts.append(verdict)
        return "; ".join(texts), worst(*verdicts)

    return judge


def log_perplexity(_: Figures) -> Found:
    wrong, sound = (
        seeds_of("sinks", SINKS, arm, "log_ppl_abs_diff_max") for arm in ("ignored", "correct")
    )
    return f"{spread(wrong)} nats, sound {spread(sound)}", holds(min(wrong) > 100 * max(sound))


# -- the claims ------------------------------------------------------------------------------------

TINKER = (
    Claim(
        text="Rows that are re-rendered and miss their end have a KL of 4 to 7",
        theirs="k1 4 to 7, k2 25 to 40",
        measure="published_program",
        judge=lambda f: (
            f"k1 {f['k1_before']:.2g}, k2 {f['k2_before']:.3g}; rendered anew alone: k1 "
            f"{f['k1_anew']:.2g}",
            holds(f["k1_before"] > 1 and f["k2_before"] > 10),
        ),
    ),
    Claim(
        text="Rows that hold what was sampled bring it down by more than 99 %",
        theirs="k1 0.028, k2 0.003",
        measure="published_program",
        judge=lambda f: (
            f"k1 {f['k1_after']:.1g}, k2 {f['k2_after']:.1g}",
            holds(f["k1_after"] < f["k1_before"] / 100 and f["k2_after"] < f["k2_before"] / 100),
        ),
    ),
    Claim(
        text="Decoding and rendering a turn again leaves few of its tokens in place",
        theirs="6.7 % match",
        measure="published_program",
        judge=lambda f: (f"{f['match_before']:.1%} match", holds(f["match_before"] < 0.5)),
    ),
    Claim(
        text="Single turns agree; only dialogues of several turns do not",
        theirs="k1 -0.018 and 0.12 to 7",
        measure="published_program",
        judge=lambda f: (
            f"one turn {f['k1_one_turn']:.1g}, several turns rendered anew {f['k1_anew']:.2g}",
            holds(f["k1_one_turn"] < 0.01 < 0.12 < f["k1_anew"]),
        ),
    ),
    Claim(
        text="A third of the tokens is as good as forced",
        theirs="30 to 35 %",
        measure="forced_share",
        judge=lambda f: (
            ", ".join(f"{model} {share:.0%}" for model, share in f.items()),
            holds(all(0.25 < share < 0.45 for share in f.values())),
        ),
    ),
    Claim(
        text="Such rows break training",
        theirs="reward does not rise",
        study="tokens",
        judge=broken_rows,
    ),
    Claim(
        text="Missing final tokens are part of the damage, by themselves",
        theirs="one of three causes",
        study="tokens",
        judge=missing_end,
    ),
    Claim(
        text="A KL above 0.01 is a warning of damage",
        theirs="0.01 warning, 0.1 critical",
        study="corrections",
        judge=kl_thresholds,
    ),
    Claim(
        text="Two renderers of the harmony format give the same tokens",
        theirs="5 of 5 dialogues",
        measure="two_renderers",
        judge=lambda f: (
            f"{f['equal']:.0f} of {f['dialogues']:.0f} prompts",
            holds(f["equal"] == f["dialogues"]),
        ),
    ),
    Claim(
        text="It is not the renderer: trained by either, the KL is alike",
        theirs="0.13 and 0.11 (reward 0.71 and -0.14, by format errors)",
        study="renderers",
        judge=two_arms_of_renderers,
    ),
    Claim(
        text="The KL after the update is like that before it",
        theirs="0.13 -> 0.10, 0.11 -> 0.14",
        measure="pre_and_post_update",
        judge=lambda f: (
            f"sound {f['healthy_before']:.1g} -> {f['healthy_after']:.1g}; sinks ignored "
            f"{f['sinks_before']:.1g} -> {f['sinks_after']:.1g}",
            holds(f["sinks_after"] < 2 * f["sinks_before"]),
        ),
    ),
    Claim(
        text="Outliers at protocol tokens come from dropout in the trainer",
        theirs="cluster at ids above 200,000",
        measure="dropout_at_protocol_tokens",
        judge=lambda f: (
            f"control tokens are {f['among_largest']:.0%} of the largest 1 % of the gaps, and "
            f"{f['of_all']:.0%} of all tokens",
            holds(f["among_largest"] > f["of_all"]),
        ),
    ),
    Claim(
        text="A KL penalty in the advantages handles a mismatch of the two sides",
        theirs="recommended, coefficient 0.01",
        study="penalty",
        judge=penalty,
    ),
    Claim(
        text="A KL penalty in the loss handles it",
        theirs="named so in the text",
        study="penalty",
        judge=pull,
    ),
)
SLIME = (
    Claim(
        text="k3 between engines is 1e-5 to 1e-3 for dense models, 1e-3 to 1e-1 for mixtures",
        theirs="1e-5 .. 1e-3; 1e-3 .. 1e-1",
        measure="half_precision",
        judge=lambda f: (
            f"a sampler in bfloat16: dense {f['tiny-qwen3']:.1g}, mixture {f['tiny-gpt-oss']:.1g}",
            halves(1e-5 < f["tiny-qwen3"] < 1e-3, 1e-3 < f["tiny-gpt-oss"] < 1e-1),
        ),
    ),
    Claim(
        text="k3 falls at first, while the policy learns",
        theirs="a curve",
        study="corrections",
        judge=falls_at_first,
    ),
    Claim(
        text="k3 rises late, at a stable reward",
        theirs="from step 600",
        study="late",
        judge=rises_late,
    ),
    Claim(
        text="IS, with rejection and normalisation or without, does no harm",
        theirs="four equal curves",
        study="corrections",
        judge=alike("corrections", "kernel noise 0.035", tuple(studies.FOUR_ARMS), within=0.1),
    ),
    Claim(
        text="All four arms show the same growth of the responses",
        theirs="from step 100",
        study="growth",
        judge=alike(
            "growth",
            "kernel noise 0.5",
            tuple(studies.FOUR_ARMS),
            within=5.0,  # tokens, of some 45 by which they grow
            figure="response_length_last_10",
        ),
    ),
    Claim(
        text="MIS from a late checkpoint stops the growth of k3",
        theirs="from step 650, a curve",
        study="fork",
        judge=late_mis,
    ),
    Claim(
        text="A mismatch alone collapses no run",
        theirs="none of theirs, GLM 4.6 included",
        study="fork",
        judge=no_collapse,
    ),
    Claim(
        text="Normalised weights keep the step size steady, at sequence and geometric level",
        theirs="recommended for both",
        measure="normalisation",
        judge=lambda f: (
            "spread of the mean weight of 16 rows, as it is and normalised: "
            + ", ".join(
                f"{level} {f[f'{level}_spread']:.2g} and {f[f'{level}_normalised']:.1g}"
                for level in ("token", "sequence", "geometric")
            ),
            holds(
                all(
                    f[f"{level}_normalised"] < f[f"{level}_spread"] / 2
                    for level in ("sequence", "geometric")
                )
            ),
        ),
    ),
    Claim(
        text="Equal kernels bring the KL to exactly 0",
        theirs="0",
        measure="contract",
        judge=lambda f: (
            f"{f['unequal']:.0f} of {f['compared']:,.0f} tokens differ in a bit, k3 {f['k3']:.0g}",
            holds(f["unequal"] == 0 and f["k3"] == 0),
        ),
    ),
    Claim(
        text="The sampler's log-probs as the old ones save a forward pass",
        theirs="one forward of all rows",
        measure="saved_forward",
        judge=lambda f: (
            f"{f['bypass_share']:.0%} of the tokens run once more ({f['bypass_seconds']:.2g} s of "
            f"training a step), recomputed {f['recomputed_share']:.0%} "
            f"({f['recomputed_seconds']:.2g} s)",
            holds(f["bypass_share"] == 0 and f["recomputed_share"] == 1),
        ),
    ),
)
RETROSPECTIVE = (
    Claim(
        text="Two forwards of a mixture differ, so an on-policy ratio is clipped; setting it to 1 "
        "ends that",
        theirs="clip fraction 0 after the fix",
        measure="substitution",
        judge=lambda f: (
            f"clipped {f['recomputed']:.2%}, without the noise {f['without_noise']:.2%}, with "
            f"the ratio set to 1 {f['substituted']:.0%}",
            holds(f["recomputed"] > 2 * f["without_noise"] and f["substituted"] == 0),
        ),
    ),
    Claim(
        text="A trainer without sinks: gradients explode, the reward does not rise",
        theirs="curves, three tasks",
        study="sinks",
        judge=exploding,
    ),
    Claim(
        text="Freezing attention stabilises in part",
        theirs="curves",
        study="sinks",
        judge=frozen_attention,
    ),
    Claim(
        text="Sequence-level importance sampling stabilises",
        theirs="curves",
        study="sinks",
        judge=rescue("ignored, sequence IS"),
    ),
    Claim(
        text="So does a weight per token (the rollout correction it links to)",
        theirs="not shown",
        study="sinks",
        judge=rescue("ignored, token TIS"),
    ),
    Claim(
        text="With sequence-level importance sampling the reward rises modestly",
        theirs="like attention frozen",
        study="sinks",
        judge=higher("sinks", SINKS, "correct", "ignored, sequence IS", by=0.1),
    ),
    Claim(
        text="The largest log-perplexity gap of a batch shows the mismatch",
        theirs="a curve",
        study="sinks",
        judge=log_perplexity,
    ),
    Claim(
        text="Learning is driven by the experts: attention frozen learns as well",
        theirs="two equal curves",
        study="sinks",
        judge=alike("sinks", SINKS, ("correct", "correct, attention frozen"), within=0.05),
    ),
    Claim(
        text="The formulas of attention with sinks, forward and backward",
        theirs="given",
        measure="sinks_formula",
        judge=lambda f: (
            f"ours differs by {f['forward']:.0e}, gradients by {f['backward']:.0e}, that of the "
            f"sinks by {f['sink_gradient']:.0e} (float64)",
            holds(max(f.values()) < 1e-12),
        ),
    ),
    Claim(
        text="A backward without the sinks' gradient is part of the damage",
        theirs="the fix has it",
        study="sinks",
        judge=higher("sinks", SINKS, "correct", "no gradient", by=0.1),
    ),
    Claim(
        text="With sinks, mathematics, instructions and tool use learn; without, they do not",
        theirs="three figures",
        study="sinks-math sinks-retool sinks-instructions",
        judge=on_tasks("correct", "ignored"),
    ),
    Claim(
        text="On these tasks, too, sequence-level importance sampling stabilises",
        theirs="not shown",
        study="sinks-math sinks-retool sinks-instructions",
        judge=on_tasks("ignored, sequence IS", "ignored"),
    ),
    Claim(
        text="Experts computed one after the other need far less memory",
        theirs="out of 140 GiB before",
        measure="memory_of_experts",
        judge=lambda f: (
            f"log-probs of 4,096 tokens: {f['ours']:.0f} MiB, all tokens for all experts "
            f"{f['repeated']:.0f} MiB",
            holds(f["ours"] < f["repeated"] / 2),
        ),
    ),
    Claim(
        text="Sequence parallelism divides the memory of activations",
        theirs="by its degree",
        measure="sequence_parallel",
        judge=lambda f: (
            f"two processes: {f['two']:.0%} of one's peak, four: {f['four']:.0%}",
            "reproduces"
            if f["two"] < 0.55 and f["four"] < 0.3
            else "in part"
            if f["two"] < 0.8 and f["four"] < 0.5
            else "does not",
        ),
    ),
)
KWAIKAT = (
    Claim(
        text="Scored again, dense engines differ by a variance of 1e-5, mixtures by 1e-3",
        theirs="1e-5; 1e-3",
        measure="noise_of_engines",
        judge=lambda f: (
            "variance "
            + ", ".join(
                f"{f[f'{m}_{d}_var']:.0g}"
                for m in ("tiny-qwen3", "tiny-gpt-oss")
                for d in ("same", "bfloat16")
            )
            + " (dense, mixture; float32, bfloat16): engines on a CPU repeat themselves, and a "
            "GPU is needed",
            "not tested",
        ),
    ),
    Claim(
        text="The mean of eight scorings has an eighth of the variance",
        theirs="1 / n",
        measure="averaging",
        judge=lambda f: (
            f"{f['ratio']:.3f}, of scorings that are drawn: arithmetic, no engine",
            holds(abs(f["ratio"] - 1 / 8) < 0.01),
        ),
    ),
    Claim(
        text="With the sampler's log-probs as old ones, runs collapse",
        theirs="after 60 to 80 steps",
        study="collapse",
        judge=collapse_of(NOISE, "rollout", beside="recomputed"),
    ),
    Claim(
        text="With recomputed log-probs, runs collapse under a bias between the two sides",
        theirs="after 60 to 80 steps",
        study="collapse",
        judge=collapse_of(BIAS, "recomputed", beside="averaged, n=8"),
    ),
    Claim(
        text="With recomputed log-probs, runs collapse under noise alone",
        theirs="after 60 to 80 steps",
        study="collapse",
        judge=collapse_of(NOISE, "recomputed", beside="rollout"),
    ),
    Claim(
        text="TIS and averaged log-probs stay stable",
        theirs="curves",
        study="collapse",
        judge=stable_estimates,
    ),
    Claim(
        text="Averaged log-probs learn best, TIS next, the sampler's own last",
        theirs="curves, in this order",
        study="collapse",
        judge=order_of_estimates,
    ),
    Claim(
        text="TIS is sensitive to its cap",
        theirs="stated",
        study="collapse",
        judge=cap_of_tis,
    ),
    Claim(
        text="Averaging and replay hold the KL low; recorded and recomputed log-probs do not",
        theirs="curves",
        study="collapse",
        judge=kl_of_estimates,
    ),
    Claim(
        text="Routing replay works less well where prefixes lose their routes",
        theirs="stated",
        study="averaging",
        judge=lost_routes,
    ),
    Claim(
        text="Scoring again finds nearly all of its prefixes in the cache",
        theirs="near 100 %",
        measure="cache_hits",
        judge=lambda f: (
            f"{f['share']:.0%}, {f['scorings']:.0f} scorings of a token",
            holds(f["share"] > 0.95),
        ),
    ),
    Claim(
        text="Averaging saves a part of a step beside an engine that waits",
        theirs="10 to 20 %",
        measure="beside_an_idle_engine",
        judge=lambda f: (
            f"{f['averaged']:.2f} s a step, recomputed {f['recomputed']:.2f} s: "
            f"{f['low'] - 1:+.0%} to {f['high'] - 1:+.0%} (10 million parameters, an engine of its "
            "own, tools of 0 to 2 s; a quiet machine)",
            "reproduces" if f["high"] < 1 else "does not" if f["low"] > 0.95 else "not tested",
        ),
    ),
    Claim(
        text="Deterministic inference costs a large part of the throughput",
        theirs="40 to 70 %",
        measure="cost_of_determinism",
        judge=lambda f: (
            f"{max(0, 1 - f['decode-8']):.0%} of the tokens per second at 8 requests, "
            f"{max(0, 1 - f['decode-64']):.0%} at 64: hidden 512, on a CPU (by host at most 35 %)",
            holds(min(f.values()) < 0.6),
        ),
    ),
)
TOKENS = (
    Claim(
        text="Text survives encoding and decoding; ids do not survive decoding and encoding",
        theirs="common",
        measure="round_trips",
        judge=lambda f: (
            f"{f['texts_kept']:.0%} of texts kept; {f['changed']:.0%} of {f['turns']:.0f} sampled "
            "turns spelt otherwise",
            holds(f["texts_kept"] == 1 and f["changed"] > 0.05),
        ),
    ),
    Claim(
        text="Messages rendered as a whole are not the prompts and replies joined",
        theirs="stated",
        measure="histories",
        judge=lambda f: (
            f"{f['differs']:.0%} of {f['dialogues']:.0f} dialogues differ",
            holds(f["differs"] > 0.05),
        ),
    ),
    Claim(
        text="The drift grows from turn to turn",
        theirs="stated",
        measure="histories",
        judge=lambda f: (
            f"{f['first_turn_stands']:.1%} of the first turn's tokens are in place, "
            f"{f['second_turn_stands']:.1%} of the second's",
            holds(f["second_turn_stands"] < f["first_turn_stands"]),
        ),
    ),
    Claim(
        text="With ids in and ids out, rows are what was sampled, and observations are not trained",
        theirs="by construction",
        measure="histories",
        judge=lambda f: (
            f"{f['ours_equal']:.0%} of rows equal, {f['observed_tokens_trained']:.0f} observed "
            "tokens trained",
            holds(f["ours_equal"] == 1 and f["observed_tokens_trained"] == 0),
        ),
    ),
    Claim(
        text="A mismatch shows as a wild KL and clip fraction and a reward that stands still",
        theirs="symptoms",
        study="tokens",
        judge=lambda _: symptoms(),
    ),
)
CLAIMS = {
    "tinker": TINKER,
    "slime": SLIME,
    "retrospective": RETROSPECTIVE,
    "kwaikat": KWAIKAT,
    "tokens": TOKENS,
}


def symptoms() -> Found:
    condition = ("tokens", "re-tokenised, log-probs by position", "as by default")
    k2, clipped = (seeds_of(*condition, figure) for figure in ("k2_last_10", "clip_fraction"))
    sound = seeds_of("tokens", "healthy", "as by default", "clip_fraction")
    text = f"k2 {spread(k2)}, clipped {spread(clipped)}, sound {spread(sound)}"
    return text, holds(min(k2) > 1 and min(clipped) > 2 * max(sound))


# -- the command -----------------------------------------------------------------------------------


def before() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"figures": {}, "claims": []}


def every_claim() -> list[tuple[str, Claim]]:
    """(document, claim) of all."""
    return [(document, claim) for document, claims in CLAIMS.items() for claim in claims]


def judged(figures: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """Every claim with our figure and the verdict. figures: by measure."""
    results.cache_clear()
    out: list[dict[str, str]] = []
    for document, claim in every_claim():
        if claim.measure and claim.measure not in figures:
            ours, verdict = NOT_MEASURED, "not tested"
        else:
            ours, verdict = claim.judge(figures.get(claim.measure, {}).get("found", {}))
        row = {"document": document, "claim": claim.text, "command": claim.command}
        out.append(row | {"theirs": claim.theirs, "ours": ours, "verdict": verdict})
    return out


def measure(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    import claim_measures

    out: dict[str, dict[str, Any]] = {}
    for name in names:
        found = getattr(claim_measures, name)()
        found = {key: float(f"{value:.4g}") for key, value in found.items()}
        out[name] = {"found": found, "date": datetime.now(UTC).date().isoformat(), "host": host()}
        print(name, found, flush=True)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--quick", nargs="*", metavar="MEASURE", help="the short ones, or some")
    kinds.add_argument("--judge", action="store_true", help="run nothing")
    options = parser.parse_args()
    every = list(dict.fromkeys(claim.measure for _, claim in every_claim() if claim.measure))
    wanted = [] if options.judge else options.quick or every
    if unknown := [name for name in wanted if name not in every]:
        parser.error(f"no measure {', '.join(unknown)}; there are {', '.join(every)}")
    if not options.judge and options.quick is None:
        for name, study in studies.STUDIES.items():
            studies.run_all(
                name, list(study.conditions), list(study.arms), range(study.num_seeds), jobs=2
            )
            studies.draw(name)
    old = before()
    figures = old["figures"] | measure(wanted)
    claims = judged(figures)
    changed = [
        f"{new['claim']}: {was['verdict']} before, {new['verdict']} now ({new['ours']})"
        for new in claims
        for was in old["claims"]
        if was["claim"] == new["claim"]
        and was["ours"] != NOT_MEASURED
        and was["verdict"] != new["verdict"]
    ]
    print(*changed, sep="\n")
    if options.quick is not None and changed:
        print(f"{len(changed)} verdicts changed: {RESULTS.name} is left as it is")
        return 1
    document = {"command": "python docs/proof/claims.py", "claims": claims, "figures": figures}
    RESULTS.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
