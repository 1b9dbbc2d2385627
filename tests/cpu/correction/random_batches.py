"""Random batches and corrections for property tests, and the definition of a weight in plain loops.

Bounds are odd numbers: no sum of round log-probs falls on one, so a last bit decides nothing.
"""

import math
from dataclasses import dataclass, replace

import torch
from full_counts import PROOF
from hypothesis import settings
from hypothesis import strategies as st

from lockstep.correction import Correction, Layout, Rule, TokenFacts, correct

EXAMPLES = settings(max_examples=1000 if PROOF else 20, deadline=None)

finite = st.floats(-30, 0, width=32)
broken = st.sampled_from([math.nan, math.inf, -math.inf])
garbage = st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -1e30, 7.5, 0.0])


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens of rows, packed; every fact given, positions too."""

    new: torch.Tensor
    old: torch.Tensor
    lengths: list[int]
    facts: TokenFacts

    @property
    def layout(self):
        return Layout.packed(self.lengths)

    def correct(self, correction):
        return correct(self.new, self.old, correction, layout=self.layout, facts=self.facts)

    def rows(self, chosen):
        """The batch of these rows, in this order."""
        starts = [sum(self.lengths[:r]) for r in range(len(self.lengths))]
        index = [starts[r] + i for r in chosen for i in range(self.lengths[r])]
        return self.tokens(index, [self.lengths[r] for r in chosen])

    def tokens(self, index, lengths):
        index = torch.tensor(index, dtype=torch.int64)
        return Batch(
            new=self.new[index], old=self.old[index], lengths=lengths,
            facts=each_fact(self.facts, lambda values: values[index]),
        )  # fmt: skip

    def row_of(self):
        return [r for r, size in enumerate(self.lengths) for _ in range(size)]


def each_fact(facts, change):
    names = ("advantages", "ages", "turns", "positions", "kinds")
    return TokenFacts(**{name: change(getattr(facts, name)) for name in names})


@st.composite
def batches(draw, logprobs=finite):
    """Batches of 0..6 rows of 0..7 tokens; most tokens near each other, as they are in a run, and
    a few of them any `logprobs` at all."""
    lengths = draw(st.lists(st.sampled_from([3, 0, 1, 2, 4, 7]), min_size=3, max_size=6))
    lengths = draw(st.sampled_from([lengths, lengths, lengths, lengths[:1], []]))
    size = sum(lengths)
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    scale = draw(st.sampled_from([0.3, 0.01, 3.0]))
    old = -4 * torch.rand(size, generator=g)
    new = (old + scale * torch.randn(size, generator=g)).clamp(max=0)
    places = st.tuples(st.integers(0, max(size - 1, 0)), logprobs, logprobs)
    for place, left, right in draw(st.lists(places, max_size=4 if size else 0)):
        new[place], old[place] = left, right
    return Batch(
        new=new, old=old, lengths=lengths,
        facts=TokenFacts(
            advantages=torch.randn(size, generator=g),
            ages=torch.randint(0, 6, (size,), generator=g, dtype=torch.int32),
            turns=torch.randint(0, 10, (size,), generator=g, dtype=torch.int32),
            positions=torch.randint(0, 3000, (size,), generator=g),
            kinds=torch.randint(0, 2, (size,), generator=g, dtype=torch.int32),
        ),
    )  # fmt: skip


_signed = st.sampled_from([(0.513, 1.907), (0.213, None), (None, 3.307), (0.957, 1.0411)])


@st.composite
def rules(draw):
    stat = draw(st.sampled_from(["ratio", "k1", "k2", "k3", "prob_diff", "old_prob"]))
    aggregation = draw(st.sampled_from(["token", "sum", "mean", "max"]))
    if stat == "old_prob":
        aggregation = "token" if aggregation == "token" else "max"
        low, high = draw(st.sampled_from([(1.3e-6, None), (0.0123, 0.98), (None, 0.913)]))
    elif stat == "k1":
        low, high = draw(st.sampled_from([(-0.713, 0.613), (None, 0.0513), (-1.217, None)]))
    elif stat == "ratio":
        low, high = draw(_signed)
    else:
        low, high = None, draw(st.sampled_from([0.0313, 0.413, 2.713]))
    return Rule(
        stat=stat, aggregation=aggregation, low=low, high=high,
        only_negative_advantage=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def corrections(draw):
    level = draw(st.sampled_from(["none", "token", "sequence", "geometric"]))
    bound = draw(st.sampled_from(["truncate", "clip", "mask"]))
    low = 0.0 if bound == "truncate" else draw(st.sampled_from([0.0, 0.313, 0.713]))
    found = draw(st.lists(rules(), max_size=3))
    return Correction(
        anchor="recomputed",
        level=level,
        bound=bound,
        limits=(low, draw(st.sampled_from([1.213, 3.307, 913.7]))),
        normalize=draw(st.sampled_from([None, True])) if level != "none" else None,
        reject=tuple(replace(rule, label=f"rule{i}") for i, rule in enumerate(found)),
        denominator=draw(st.sampled_from(["original", "kept"])),
        kl_penalty_coef=draw(st.sampled_from([0.0, 0.13])),
        kl_penalty_form=draw(st.sampled_from(["advantage", "loss"])),
        kl_penalty_clip=draw(st.sampled_from([None, 0.7])),
    )


# -- the definition, token by token ---------------------------------------------------------------


def defined(batch, correction):
    """(weights, keep) in plain loops over Python numbers, in the order of the definition."""
    new, old = batch.new.double().tolist(), batch.old.double().tolist()
    is_negative = (batch.facts.advantages < 0).tolist()
    places = [[] for _ in batch.lengths]
    has_zero = [False for _ in batch.lengths]
    for token, row in enumerate(batch.row_of()):
        has_zero[row] |= new[token] == -math.inf
        if math.isfinite(new[token]) and math.isfinite(old[token]):
            places[row].append(token)
    d = {t: new[t] - old[t] for row in places for t in row}
    keep = [t in d for t in range(len(new))]
    weights = [0.0] * len(new)
    of_rows = []
    for row, is_impossible in zip(places, has_zero, strict=True):
        if not row:
            continue
        for rule in correction.reject:
            is_vetoed = is_impossible and rule.rejects_impossible
            for token in row if is_vetoed else _rejected(rule, row, d, new, old):
                if is_negative[token] or not rule.only_negative_advantage:
                    keep[token] = False
        for token in row:
            log_weight = {
                "none": 0.0, "token": d[token], "sequence": math.fsum(d[t] for t in row),
                "geometric": math.fsum(d[t] for t in row) / len(row),
            }[correction.level]  # fmt: skip
            weight = math.exp(min(max(log_weight, -20), 20))
            low, high = correction.limits
            if correction.level != "none" and correction.bound == "mask":
                keep[token] &= low <= weight <= high
            elif correction.level != "none":
                weight = min(max(weight, low), high)
            weights[token] = weight
        if any(keep[t] for t in row):
            of_rows.append(weights[row[0]])
    weights = [w if k else 0.0 for w, k in zip(weights, keep, strict=True)]
    if correction.is_normalized:
        counted = of_rows if correction.level != "token" else [w for w in weights if w]
        mean = math.fsum(counted) / max(len(counted), 1) or 1.0
        weights = [w / mean for w in weights]
    return weights, keep


def _rejected(rule, row, d, new, old):
    def is_outside(value):
        low, high = rule.low, rule.high
        return (low is not None and value < low) or (high is not None and value > high)

    def stat(token):
        x = d[token]
        return {
            "ratio": lambda: math.exp(x), "k1": lambda: -x, "k2": lambda: x * x / 2,
            "k3": lambda: math.expm1(min(x, 20)) - min(x, 20),
            "prob_diff": lambda: abs(math.exp(new[token]) - math.exp(old[token])),
            "old_prob": lambda: math.exp(new[token]),
        }[rule.stat]()  # fmt: skip

    if rule.aggregation in ("token", "max"):
        bad = [t for t in row if is_outside(stat(t))]
        return row if bad and rule.aggregation == "max" else bad
    share = len(row) if rule.aggregation == "mean" else 1
    if rule.stat == "ratio":
        value = math.exp(math.fsum(d[t] for t in row) / share)
    else:
        value = math.fsum(map(stat, row)) / share
    return row if is_outside(value) else []
