"""Findings about what the two sides compute, with the model at hand.

All of them read one comparison (`compare`), so that none contradicts another. Causes that a variant
of the model reproduces come first, what is left of a side that deviates is judged as noise.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from lockstep.doctor.checks.base import MAX_EVIDENCE, Check, Finding
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows, largest
from lockstep.doctor.checks.tokens.wrong_template import undeclared_tool
from lockstep.doctor.numerics.compare import (
    COLUMN_OF,
    FLOAT_K2,
    MAX_PROMPT_WITHIN,
    MAX_STEADY,
    MAX_WITHIN,
    MIN_SHARE,
    MIN_TOKENS,
    NOISE_FACTOR,
    Comparison,
    Side,
    log_likelihood_gain,
    own_noise,
    variance_within,
)
from lockstep.doctor.numerics.rescore import rescoring_of

MIN_GAIN = 10.0
"""Nats by which one kind of noise must tell a deviation better than another to be named: a factor
of 20,000 in likelihood, of which a heavy tail makes some."""
MIN_LEFT = 0.01
"""Share of a side's recorded deviation that must be left after earlier repairs to be judged: a
repair may be an estimate (log-probs after a temperature), and its error is no noise."""
MIN_REPLAYED = 0.1
"""Share of a side's deviation that replaying the recorded routes must remove to be named."""
MAX_CURRENT = 0.1
"""Ratio of the mean square deviation of the trainer's own version to that of older ones, up to
which age is all that makes it."""
MAX_TRIED = 4
"""Variants that a finding names of those that explain nothing."""
MOSTLY = 0.5
"""The same, above which a deviation is one of routes though it repeats: routers as noisy as that
make log-probs worse wherever they matter."""


class _Compared(Check):
    """Base: looks at the sample once, as both sides against the model."""

    needs: ClassVar[tuple[str, ...]] = ("model",)
    _comparison: Comparison | None = None

    def look(self, rows: Rows) -> None:
        self._comparison = rescoring_of(self.setting).compare(rows)

    def conclude(self) -> Finding:
        if self._comparison is not None:
            return self.judge()
        model = self.setting.model
        return self.unable(model if isinstance(model, str) else "no row was scored")

    def unable(self, reason: str) -> Finding:
        return self.not_checkable("model", measured=reason)

    @abstractmethod
    def judge(self) -> Finding:
        """The finding, of rows that were scored."""

    @property
    def comparison(self) -> Comparison:
        assert self._comparison is not None, f"{self.name} concluded before it looked at rows"
        return self._comparison

    def repetition(self, side: Side) -> float | None:
        """`variance_within` of the deviation that no variant explains; None if two precisions
        could make as much. What mostly goes with the sampler's routes does not repeat."""
        comparison, is_left = self.comparison, side.is_unexplained
        recorded = rescoring_of(self.setting).recorded.get(side.name, 0.0)
        if not comparison.is_noisy(side) or side.noise < MIN_LEFT * recorded:
            return None
        # Little of the deviation may be strays of a cause that was named for other rows.
        is_little = side.k2[is_left].sum() < MIN_SHARE * side.k2[side.is_known].sum()
        if is_little or side.tokens[is_left].sum() < MIN_TOKENS or self._is_of_age(side):
            return None
        within = variance_within(
            comparison.evidence.rows,
            comparison.deviation(side),
            comparison.evidence.spread,
            is_shared=side.name == "trainer",
            reference=side.reference,
        )
        is_of_routes = comparison.replayed_share(side) > MOSTLY
        return np.nan if within <= MAX_WITHIN and is_of_routes else within

    def _is_of_age(self, side: Side) -> bool:
        """Whether only the tokens that weights before the trainer's sampled deviate: the check of
        stale tokens judges these."""
        rows, d = self.comparison.evidence.rows, self.comparison.deviation(side)
        if rows.policy_version is None or rows.trainer_version is None or side.name != "sampler":
            return False
        is_older = rows.policy_version < rows.trainer_version[rows.row_of]
        known = np.isfinite(d)
        old, new = d[known & is_older] ** 2, d[known & ~is_older] ** 2
        return bool(len(old) and len(new) >= MIN_TOKENS and new.mean() <= MAX_CURRENT * old.mean())

    def is_of_prompts(self, side: Side) -> bool:
        """Whether what no variant reproduces is of prompts that were not guessed (tools, a system
        message), rather than of other weights or noise: another prompt explains much of the side,
        or it is `is_steady`, or replies call tools that no prompt declares."""
        k2 = side.k2[side.explained_by("wrong_template")].sum()
        if k2 >= MIN_SHARE * side.k2[side.is_known].sum() > 0:
            return True
        return self.is_of_unknown_prompts(side)

    def is_of_unknown_prompts(self, side: Side) -> bool:
        """Whether a sampler's deviation is the same after the very same ids, which noise is not,
        and yet neither what other weights make, nor the rounding of other kernels: it repeats a
        little wherever the last tokens are the same. Or it repeats, and replies call tools of
        which no prompt says anything."""
        within = self.repetition(side) if side.name == "sampler" else None
        if within is None or not within <= MAX_PROMPT_WITHIN:
            return False
        evidence = self.comparison.evidence
        steady = own_noise(evidence.rows, self.comparison.deviation(side), evidence.spread)
        is_between = within > MAX_WITHIN and steady <= MAX_STEADY
        return is_between or bool(self._undeclared)

    @property
    def _undeclared(self) -> str:
        rows = self.comparison.evidence.rows
        return rows.once("undeclared tool", lambda: undeclared_tool(rows, self.setting))

    def show_worst(
        self, side: Side, rows_hit: BoolArray, note: str = "", other: Float64Array | None = None
    ) -> None:
        """The tokens of these rows that deviate most, with what each number is.

        other: [N] what `note` says that it is.
        """
        rows = self.comparison.evidence.rows
        d = np.abs(side.values - side.reference)
        d[~np.isfinite(d) | ~rows_hit[rows.row_of]] = 0.0
        for at in largest(d, MAX_EVIDENCE).tolist():
            if not d[at]:
                break
            held = "the model" if side.is_known[rows.row_of[at]] else "the other side"
            text = f"{side.name} {side.values[at]:.4f}, {held} {side.reference[at]:.4f}"
            if other is not None and np.isfinite(other[at]):
                text += f", {note} {other[at]:.4f}"
            self.show(float(d[at]), rows, at, at + 1, text)

    def repaired(self, rows: Rows, is_hit: Callable[[Side], BoolArray | None]) -> Rows:
        """`rows` with the model's log-probs in the rows that `is_hit` [R] names, side by side; as
        they are if they were not scored."""
        for side in self.comparison.sides.values() if self.has_scored(rows) else ():
            chosen = is_hit(side)
            if chosen is not None and chosen.any():
                rows = self.set_side(rows, side, chosen, side.reference)
        return rows

    def has_scored(self, rows: Rows) -> bool:
        """Whether rows with these ids were compared, whatever was repaired since."""
        found = self._comparison
        return found is not None and found.evidence.rows.has_same_ids(rows)

    def set_side(self, rows: Rows, side: Side, chosen: BoolArray, values: Float64Array) -> Rows:
        """`rows` with the side's log-probs replaced in the rows that are chosen [R]."""
        column = COLUMN_OF[side.name]
        is_set = chosen[rows.row_of] & np.isfinite(values) & np.isfinite(side.values)
        replaced = np.where(is_set, values, getattr(rows, column)).astype(np.float32)
        return rows.with_(**{column: replaced})


# -- what a variant of the model reproduces -------------------------------------------------------


class Reproduced(_Compared):
    """A side whose numbers are those of the model with one thing changed."""

    is_defect: ClassVar[bool] = True

    def judge(self) -> Finding:
        comparison = self.comparison
        tried = [v.text for v in comparison.evidence.variants if v.cause == self.cause]
        tried += [
            t for t in (comparison.evidence.tried or {}).get(self.cause, ()) if t not in tried
        ]
        if not tried:
            return self._untried()
        figures: dict[str, float] = {"bfloat16_k2": comparison.floor}
        texts: list[str] = []
        for side in self.comparison.sides.values():
            is_hit = side.explained_by(self.cause)
            if not is_hit.any():
                continue
            tokens = int(side.tokens[is_hit].sum())
            before = float(side.k2[is_hit].sum()) / tokens
            after = float(side.left[is_hit].sum()) / tokens
            counts = np.bincount(side.hit[is_hit], minlength=len(side.variants))
            variant = side.variants[int(counts.argmax())]
            texts.append(
                f"{variant.text} the model gives what the {side.name} has in {is_hit.sum()} of "
                f"{(side.tokens > 0).sum()} rows: k2 against it falls from {before:.1e} to "
                f"{after:.1e}"
            )
            figures |= {
                f"{side.name}_rows": int(is_hit.sum()),
                f"{side.name}_k2_before": before,
                f"{side.name}_k2_after": after,
            }
            self.show_worst(side, is_hit, f"it {variant.text}", variant.logprobs)
        if not texts:
            shown = tried[:MAX_TRIED]
            more = f" and {len(tried) - len(shown)} more" if len(tried) > len(shown) else ""
            told = f"neither side has what the model gives {', '.join(shown)}{more}"
            return self.consistent(told, **figures)
        whole = "; ".join([*texts, comparison.describe()])
        return self.found("differs" if self.is_defect else "information", whole, **figures)

    def _untried(self) -> Finding:
        if self.comparison.evidence.tried is None:
            return self.consistent("no row deviates by more than two precisions do")
        return self.consistent("the model or the dump has nothing of the kind")

    def repair(self, rows: Rows) -> Rows:
        return self.repaired(rows, lambda side: side.explained_by(self.cause))


def _reproduced(cause: str, claim: str, *, is_defect: bool = True) -> type[Reproduced]:
    """A check of variants that need no more judging."""
    members = {
        "__doc__": f"Names {cause} where a variant of it has a side's numbers.",
        "__module__": __name__,
        "name": f"numerics/{cause}",
        "claim": claim,
        "cause": cause,
        "is_defect": is_defect,
    }
    return type("".join(word.title() for word in cause.split("_")), (Reproduced,), members)


class WrongPrompt(Reproduced):
    """Other prompts, each tried before the same replies; and, where none fits, whether what is left
    of the sampler is of a prompt that was not guessed."""

    name = "numerics/wrong_template"
    claim = "both sides' replies follow the prompt of the row"
    cause = "wrong_template"

    def judge(self) -> Finding:
        found = super().judge()
        if found.verdict == "differs":
            return found
        for side in self.comparison.sides.values():
            if not self.is_of_unknown_prompts(side):
                continue
            self.show_worst(side, side.is_unexplained)
            why = (
                f"no prompt says anything of the tool {self._undeclared!r}, which replies call"
                if self._undeclared
                else "it does so by the same after the very same ids, and by something else in "
                "other prompts, where noise would change and other weights would not"
            )
            return self.differs(
                f"the {side.name} read another prompt than the rows have, which was not guessed: "
                f"it deviates from the model (k2 {side.noise:.1e}), and {why}",
                "fit",
                k2=side.noise,
            )
        return found

    def repair(self, rows: Rows) -> Rows:
        def unknown(side: Side) -> BoolArray | None:
            return side.is_unexplained if self.is_of_unknown_prompts(side) else None

        return super().repair(self.repaired(rows, unknown))


REPRODUCED: tuple[type[Reproduced], ...] = (
    WrongPrompt,
    _reproduced("ignored_sinks", "both sides' attention has the model's sinks, in every layer"),
    _reproduced(
        "ignored_window", "both sides' attention keeps to the sliding window of every layer"
    ),
    _reproduced(
        "ignored_rope_scaling", "both sides turn queries and keys by the model's rotary angles"
    ),
    _reproduced("wrong_positions", "both sides count positions from the start of each row"),
    _reproduced("packing_leak", "attention sees nothing of other rows"),
    _reproduced("padding_attended", "attention sees no padding, and every token of the row"),
    _reproduced("adapter_not_merged", "both sides run the model with its adapter, once"),
    # From the whole of the logits: exact, where the check of the values alone must infer it.
    _reproduced("processed", "both sides' log-probs are of the same distribution"),
    _reproduced(
        "generation_defaults",
        "neither side's log-probs are after settings of generation_config.json that the run has "
        "not asked for",
    ),
    _reproduced("quantised_rollout", "both sides run the weights in the precision that is saved"),
)
"""In the order of their repairs."""
HALF_HEAD = _reproduced(
    "half_head", "both sides compute the output projection in one precision", is_defect=False
)


class OtherWeights(Reproduced):
    """The weights at hand, each tried on each side; and, where none fits, whether what is left of a
    side repeats wherever the same tokens are read, as it does under other weights."""

    name = "numerics/other_weights"
    claim = "both sides run the weights that they are said to run"
    cause = "other_weights"

    def judge(self) -> Finding:
        comparison = self.comparison
        found = super().judge()
        if found.verdict == "differs":
            return found
        for side in self.comparison.sides.values():
            within = self.repetition(side)
            if within is None or not within <= MAX_WITHIN or self.is_of_prompts(side):
                continue
            self.show_worst(side, side.is_unexplained)
            return self.differs(
                f"the {side.name} deviates from the model by the same wherever the same tokens "
                f"are read (variance within equal contexts {within:.2f} of the whole, noise is "
                "near 1): other weights than any that were given, or another architecture. k2 "
                f"{side.noise:.1e}; {comparison.describe()}. --against DIR tries other checkpoints",
                "fit",
                within=within,
                k2=side.noise,
            )
        if comparison.is_foreign.any():
            return self.information(
                f"neither side computed {comparison.is_foreign.sum()} of "
                f"{len(comparison.is_foreign)} rows with the weights at hand: they are nearer to "
                "each other than to the model. Give the checkpoint that these rows were made "
                "with, and more of them by --against DIR",
                foreign_rows=float(comparison.is_foreign.sum()),
            )
        if not any(side.is_known.any() for side in self.comparison.sides.values()):
            return self.unable(
                "no row was trained by weights that are at hand: give the checkpoint by --model DIR"
            )
        return self.consistent(
            f"{comparison.describe()}; scored under {comparison.evidence.processing.describe()}",
            **found.figures,
        )

    def _untried(self) -> Finding:
        return self.consistent("", bfloat16_k2=self.comparison.floor)

    def repair(self, rows: Rows) -> Rows:
        def repeats(side: Side) -> BoolArray | None:
            within = self.repetition(side)
            is_its = within is not None and within <= MAX_WITHIN and not self.is_of_prompts(side)
            return side.is_unexplained if is_its else None

        return super().repair(self.repaired(rows, repeats))


class Precision(Reproduced):
    """A gap of the size that computing in bfloat16 makes, or its very numbers."""

    name = "numerics/precision"
    claim = "both sides compute in one precision"
    cause = "precision"
    is_defect = False

    def judge(self) -> Finding:
        found = super().judge()
        if found.verdict != "consistent":
            return found
        comparison = self.comparison
        texts = [
            f"the {side.name} is {np.sqrt(2 * side.noise):.1e} nats (root mean square) from the "
            f"model; computing in bfloat16 makes {np.sqrt(2 * comparison.floor):.1e}"
            for side in self.comparison.sides.values()
            if side.noise > FLOAT_K2 and not comparison.is_noisy(side)
        ]
        if texts:
            return self.information("; ".join(texts), bfloat16_k2=comparison.floor)
        return found


# -- what no variant reproduces -------------------------------------------------------------------


class _Noise(_Compared):
    """Base of what is left of a side that deviates, if it does not repeat."""

    basis = "fit"

    _mine: Sequence[str] = ()
    """Names of the sides with this noise."""

    def router_gain(self, side: Side) -> float:
        """Nats by which noise on the routers explains a side better than noise on the logits."""
        evidence, d = self.comparison.evidence, self.comparison.deviation(side)
        noises = rescoring_of(self.setting).router_noises(evidence.rows)
        return max((log_likelihood_gain(d, v, evidence.spread) for v in noises), default=0.0)

    def is_of_routes(self, side: Side) -> bool:
        """Whether flips of routes are behind the sampler's noise: by replay where routes are
        recorded, else by where it is large. What moves a trainer's routes is its own noise."""
        evidence = self.comparison.evidence
        if side.name != "sampler" or evidence.is_replayed:
            return False
        if evidence.replayed is not None:
            return self.comparison.replayed_share(side) >= MIN_REPLAYED
        return self.router_gain(side) > MIN_GAIN

    def is_all_of_routers(self, side: Side) -> bool:
        """Whether the rest after replay comes from the same routers: noise also weighs experts."""
        return self.is_of_routes(side) and self.router_gain(side) > MIN_GAIN

    def judge(self) -> Finding:
        comparison = self.comparison
        texts: list[str] = []
        figures: dict[str, float] = {"bfloat16_k2": comparison.floor}
        self._mine = mine = list[str]()
        for side in self.comparison.sides.values():
            within = self.repetition(side)
            if within is None or within <= MAX_WITHIN or not self.is_mine(side):
                continue
            if self.is_of_prompts(side):
                continue
            mine.append(side.name)
            texts.append(self.describe(side, within))
            figures |= {f"{side.name}_k2": side.noise, f"{side.name}_within": within}
            self.show_worst(side, side.is_unexplained)
        if texts:
            return self.differs("; ".join([*texts, comparison.describe()]), **figures)
        sizes = ", ".join(
            f"the {side.name} at k2 {side.noise:.1e}" for side in self.comparison.sides.values()
        )
        text = f"no such noise: {sizes} of the model, where computing in bfloat16 makes "
        return self.consistent(f"{text}{comparison.floor:.1e}", **figures)

    @abstractmethod
    def is_mine(self, side: Side) -> bool:
        """Whether the noise of this side is of this kind."""

    @abstractmethod
    def describe(self, side: Side, within: float) -> str:
        """The measurement in words. within: see `repetition`."""

    def repair(self, rows: Rows) -> Rows:
        return self.repaired(
            rows, lambda side: side.is_unexplained if side.name in self._mine else None
        )


class RoutingFlips(_Noise):
    """Noise of tokens that go to other experts on the two sides.

    With the sampler's recorded routes: what replaying them removes. Without: whether the deviation
    is large where noise on the routers would make it large (`log_likelihood_gain`).
    """

    name = "numerics/routing_flips"
    claim = "tokens go to the same experts on both sides"
    cause = "routing_flips"

    def is_mine(self, side: Side) -> bool:
        return self.is_of_routes(side)

    def describe(self, side: Side, within: float) -> str:
        if side.name == "sampler" and self.comparison.evidence.replayed is not None:
            share = self.comparison.replayed_share(side)
            return (
                f"replaying the sampler's routes removes {share:.0%} of its deviation from the "
                f"model (k2 {side.noise:.1e})"
            )
        return (
            f"the {side.name} deviates (k2 {side.noise:.1e}) where a little noise on the routers "
            f"changes log-probs: that tells it {self.router_gain(side):.0f} nats better than noise "
            "on the logits; record the sampler's routes to be certain"
        )

    def repair(self, rows: Rows) -> Rows:
        """With recorded routes the trainer is moved to what it gives under them, and what is left
        is another noise; without, the side is the model's."""
        if not self._mine or not self.has_scored(rows):
            return rows
        sampler = self.comparison.sides.get("sampler")
        replayed = self.comparison.evidence.replayed
        if sampler is None or replayed is None or self.is_all_of_routers(sampler):
            return super().repair(rows)
        # The same move of the sampler the other way round: it may be the only side that there is.
        moved = sampler.values - (replayed - sampler.reference)
        return self.set_side(rows, sampler, sampler.is_unexplained, moved)


class Dropout(_Noise):
    """Noise of the trainer: a sampler has no dropout."""

    name = "numerics/dropout"
    claim = "the trainer's log-probs have no noise of their own"
    cause = "dropout"

    def is_mine(self, side: Side) -> bool:
        return side.name == "trainer" and not self.is_of_routes(side)

    def describe(self, side: Side, within: float) -> str:
        return f"the trainer's log-probs are noisy (k2 {side.noise:.1e} from the model)"


class KernelNoise(_Noise):
    """Noise of the sampler on every token."""

    name = "numerics/kernel_noise"
    claim = "the sampler's kernels round no more than a pair of precisions does"
    cause = "kernel_noise"

    def is_mine(self, side: Side) -> bool:
        if side.name != "sampler":
            return False
        if not self.is_of_routes(side):
            return True
        if self.comparison.evidence.replayed is None or self.is_all_of_routers(side):
            return False
        rest = (1 - self.comparison.replayed_share(side)) * side.noise
        return rest > NOISE_FACTOR * self.comparison.floor

    def describe(self, side: Side, within: float) -> str:
        told = (
            "too few tokens repeat to tell it from other weights"
            if np.isnan(within)
            else f"another one each time that the same tokens are read (variance within equal "
            f"contexts {within:.2f} of the whole)"
        )
        times = np.sqrt(side.noise / self.comparison.floor) if self.comparison.floor else np.inf
        return (
            f"the sampler's log-probs are noisy: {np.sqrt(2 * side.noise):.1e} nats (root mean "
            f"square) from the model, {times:.1f} times what bfloat16 makes; {told}"
        )


NUMERICS: tuple[type[Check], ...] = (
    *REPRODUCED,
    OtherWeights,
    Precision,
    HALF_HEAD,
    RoutingFlips,
    Dropout,
    KernelNoise,
)
"""In the order of their repairs."""
