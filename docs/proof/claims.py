"""The headlines of the five documents that Lockstep is built from, each tried here.

    python docs/proof/claims.py           everything (`make claims`): what is missing of the studies
                                          (hours; goes on where it stopped), then the short ones
    python docs/proof/claims.py --quick   the short ones alone (`make claims-quick`): fails if a
                                          verdict is another than before
    ... --quick MEASURE ...               some of them, whose figures replace the stored ones
    python docs/proof/claims.py --judge   run nothing: the verdicts anew, from stored figures

claims.toml beside this file has the claims and what each is compared with. One rule judges all
comparisons of a figure a with a comparator b:

- The difference a - b (or the logarithm of a / b) is taken between runs of the same seed. Its
  two-sided interval of 95 % over the seeds is by Student's t ("The probable error of a mean",
  Biometrika 6, 1908). Counts of runs are compared by Fisher's exact test, two-sided, in place.
- An interval within the limit that the row names: no difference. That is equivalence (Schuirmann,
  J. Pharmacokinet. Biopharm. 15, 1987, at 95 % in place of his 90 %).
- Else an interval above 0 reproduces "a is higher than b", and one below 0 is the opposite.
- "a and b are alike" reproduces by the first, and differs where the interval leaves no room for it.
- Anything else is not decided. Fewer than five seeds are told as too few.

What came out is claims.json beside this file, which docs/claims.md shows.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, stdev
from typing import Any

import studies
from run import HERE, host, rounded, today
from scipy import stats

RESULTS = HERE / "claims.json"
CLAIMS = HERE / "claims.toml"

CONFIDENCE = 0.95
ENOUGH_SEEDS = 5
SMALL_REWARD = 0.1  # five times the spread by chance of a mean of ten steps, 0.02
SMALL_RATIO = 1.25  # regulators' limit for drugs that may replace each other (FDA, 2001)
NOT_TESTABLE = "not testable here"

Interval = tuple[float, float]


# -- the rule --------------------------------------------------------------------------------------


def interval(values: Sequence[float], *, is_exact: bool = False) -> Interval | None:
    """The two-sided interval of 95 % of the mean, by Student's t; None below two values. An exact
    value is its own interval.

    >>> [round(end, 3) for end in interval([1.0, 2.0, 3.0])]
    [-0.484, 4.484]
    """
    if is_exact:
        return min(values), max(values)
    if len(values) < 2:
        return None
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    margin = quantile * stdev(values) / math.sqrt(len(values))
    return mean(values) - margin, mean(values) + margin


def verdict(found: Interval | None, *, is_alike: bool, within: float) -> str:
    """The verdict on "a is higher than b", or on "a and b are alike", by the interval of a - b.

    >>> verdict((0.3, 0.5), is_alike=False, within=0.1)
    'reproduces'
    >>> verdict((-0.02, 0.05), is_alike=False, within=0.1)
    'no difference'
    >>> verdict((0.05, 0.5), is_alike=True, within=0.1)
    'not decided'
    """
    if found is None:
        return "not decided"
    low, high = found
    if -within <= low and high <= within:
        return "reproduces" if is_alike else "no difference"
    if is_alike:
        return "differs" if low > within or high < -within else "not decided"
    return "reproduces" if low > 0 else "opposite" if high < 0 else "not decided"


def verdict_of_counts(a: Sequence[float], b: Sequence[float]) -> str:
    """The verdict on "more runs of a do it than of b", by Fisher's exact test.

    >>> verdict_of_counts([1.0] * 5, [0.0] * 5), verdict_of_counts([1.0] * 3, [0.0] * 3)
    ('reproduces', 'not decided')
    """
    table = [[sum(each), len(each) - sum(each)] for each in (a, b)]
    if stats.fisher_exact(table).pvalue >= 1 - CONFIDENCE:
        return "not decided"
    return "reproduces" if mean(a) > mean(b) else "opposite"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A line of `compare` in claims.toml, where the fields are explained."""

    of: str
    a: str | float
    b: str | float
    is_alike: bool = False
    within: float | None = None
    ratio: bool = False
    exact: bool = False

    def judge(self, measured: Mapping[str, Any]) -> tuple[str, str]:
        """(figures in words, verdict)."""
        read = {side: values_of(side, measured) for side in (self.a, self.b)}
        seeds = min(len(v) for side, v in read.items() if isinstance(side, str))
        if not seeds:
            return f"{self.of}: not run", "not decided"
        a, b = (
            read[side][:seeds] if isinstance(side, str) else [side] * seeds
            for side in (self.a, self.b)
        )
        if isinstance(self.a, str) and self.a.endswith("/collapses"):
            told = " and ".join(f"{sum(each):.0f} of {seeds}" for each in (a, b))
            return f"{self.of}: {told}", with_seeds(verdict_of_counts(a, b), seeds)
        usual = SMALL_RATIO if self.ratio else SMALL_REWARD
        limit = usual if self.within is None else self.within
        pairs = zip(a, b, strict=True)
        found = interval(
            [math.log(x / y) if self.ratio else x - y for x, y in pairs], is_exact=self.exact
        )
        judged = verdict(
            found, is_alike=self.is_alike, within=math.log(limit) if self.ratio else limit
        )
        if judged == "no difference":
            judged += f" beyond {'a factor of ' if self.ratio else ''}{limit:g}"
        text = f"{self.of}: {mean(a):.3g} and {mean(b):.3g}"
        if self.exact:
            return text, judged
        if found is not None:
            low, high = (f"{math.exp(end) if self.ratio else end:.2g}" for end in found)
            text += f" ({'ratio' if self.ratio else 'difference'} {low} .. {high})"
        return text, with_seeds(judged, seeds)


def with_seeds(judged: str, seeds: int) -> str:
    return judged if seeds >= ENOUGH_SEEDS else f"{judged} (too few seeds: {seeds})"


# -- stored figures --------------------------------------------------------------------------------

results = cache(studies.read_results)


@cache
def pretrained() -> Any:
    return json.loads((HERE / "pretrained.json").read_text())


def values_of(side: str | float, measured: Mapping[str, Any]) -> list[float]:
    """A figure of every seed that has it, in the order of seeds. measured: by measure."""
    if not isinstance(side, str):
        return [side]
    source, *path = side.split("/")
    if source == "measured":
        return measured.get(path[0], {}).get("found", {}).get(path[1], [])
    if source == "pretrained":
        found = list(pretrained()[path[0]].values())
        for name in path[1:]:
            found = [seed[name] for seed in found]
        return found
    condition, arm, figure = path
    seeds = studies.stored(results(), source, condition, arm)["seeds"].values()
    if figure == "reward_mean":
        return [mean(value for _, value in seed["curves"]["reward/mean"]) for seed in seeds]
    return [seed[figure] for seed in seeds if seed.get(figure) is not None]


# -- the claims ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Claim:
    document: str
    text: str
    theirs: str
    compare: tuple[Comparison, ...]
    why: str = ""

    @classmethod
    def read(cls, *, compare: Sequence[dict[str, Any]] = (), **fields: str) -> Claim:
        return cls(compare=tuple(Comparison(**each) for each in compare), **fields)

    @property
    def sources(self) -> list[tuple[str, str]]:
        """(source, its first part) of every figure: ("measured", measure) or (study, condition)."""
        sides = [side for each in self.compare for side in (each.a, each.b)]
        return [tuple(side.split("/")[:2]) for side in sides if isinstance(side, str)]

    @property
    def commands(self) -> list[str]:
        """The commands that run it, below docs/proof."""
        found = (
            f"claims.py --quick {part}"
            if source == "measured"
            else f"pretrained.py {part}"
            if source == "pretrained"
            else f"studies.py {source}"
            for source, part in self.sources
        )
        return list(dict.fromkeys(found))


def read_claims() -> list[Claim]:
    documents = tomllib.loads(CLAIMS.read_text())
    return [
        Claim.read(document=document, text=text, **claim)
        for document, claims in documents.items()
        for text, claim in claims.items()
    ]


def judged(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every claim with our figures and a verdict per comparison. measured: figures by measure."""
    results.cache_clear()
    rows = []
    for claim in read_claims():
        found = [each.judge(measured) for each in claim.compare]
        ours = [text for text, _ in found] + ([claim.why] if claim.why else [])
        row = {"document": claim.document, "claim": claim.text, "theirs": claim.theirs}
        row |= {"ours": ours, "commands": claim.commands}
        rows.append(row | {"verdicts": [v for _, v in found] or [NOT_TESTABLE]})
    return rows


# -- the command -----------------------------------------------------------------------------------


def measures() -> list[str]:
    parts = [s for claim in read_claims() for s in claim.sources]
    return list(dict.fromkeys(part for source, part in parts if source == "measured"))


def measure(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Figures by measure: a list of one number per seed, or per repetition in one run."""
    import claim_measures

    out: dict[str, dict[str, Any]] = {}
    for name in names:
        function = getattr(claim_measures, name)
        is_seeded = "seed" in inspect.signature(function).parameters
        runs = [function(seed) for seed in claim_measures.SEEDS] if is_seeded else [function()]
        found = {
            figure: value if isinstance(value, list) else [run[figure] for run in runs]
            for figure, value in runs[0].items()
        }
        found = rounded(found, 4)
        out[name] = {"found": found, "date": today(), "host": host()}
        print(name, found, flush=True)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--quick", nargs="*", metavar="MEASURE", help="the short ones, or some anew")
    kinds.add_argument("--judge", action="store_true", help="run nothing")
    options = parser.parse_args()
    every = measures()
    wanted = [] if options.judge else options.quick or every
    if unknown := [name for name in wanted if name not in every]:
        parser.error(f"no measure {', '.join(unknown)}; there are {', '.join(every)}")
    if not options.judge and options.quick is None:
        for name, study in studies.STUDIES.items():
            seeds = range(study.num_seeds)
            studies.run_all(name, list(study.conditions), list(study.arms), seeds, jobs=2)
            studies.draw(name)
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"figures": {}, "claims": []}
    kept = {name: stored["figures"][name] for name in every if name in stored["figures"]}
    figures = kept | measure(wanted)
    claims = judged(figures)
    before = {claim["claim"]: claim["verdicts"] for claim in stored["claims"]}
    changed = [
        f"{claim['claim']}: {before[claim['claim']]} before, {claim['verdicts']} now"
        for claim in claims
        if before.get(claim["claim"], claim["verdicts"]) != claim["verdicts"]
        and "beside_an_idle_engine" not in str(claim["commands"])  # seconds vary from run to run
    ]
    print(*changed, sep="\n")
    if options.quick == [] and changed:
        print(f"{len(changed)} verdicts changed: {RESULTS.name} is left as it is")
        return 1
    document = {"command": "python docs/proof/claims.py", "claims": claims, "figures": figures}
    RESULTS.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
