"""Are both sides' log-probs of the distribution that was sampled from, or are temperature, top-p or
top-k on one side only?

Temperature. With T on the sampler's side alone and a = 1/T, the log-odds of a sampled token are

    logit(p_sampler) = a * logit(p_trainer) + (a - 1) * H

where H >= 0 is a Renyi entropy of the other tokens: a line that is the lower edge of all tokens
(upper, for T > 1) in any context. At a branch (different tokens after the same ids) the normaliser
cancels, and the ratio of the two sides' differences is exactly a.

Truncation. Top-p and top-k divide by the mass that they keep: the sampler's log-prob is above the
trainer's by -log(mass), never below, and by the same amount for all tokens at a branch.

# N tokens  R rows  B pairs at branches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.doctor.checks.base import Check, Finding
from lockstep.doctor.checks.rows import BoolArray, Float64Array, Rows, largest
from lockstep.doctor.checks.values.precision import contexts_of
from lockstep.types import Int64Array

SAMPLE_TOKENS = 4096
"""Tokens of a chunk that are read; the whole dump would tell no more."""
NUM_SAMPLES = 16
"""Chunks whose tokens are kept; with more, every second one is dropped."""
TEMPERATURES = tuple(round(0.3 + 0.05 * i, 2) for i in range(35) if i != 14)
"""Temperatures that are tried besides the declared one: 0.3 to 2.0 without 1.0, then finer."""
ENTROPY = 4.0
"""Nats of H that are allowed; only a few tokens of undecided contexts have more."""
MIN_GAP = 1e-4
"""|d| in nats above which a token is informative."""
MIN_TOLD = 5
"""Informative tokens that a judged row needs."""
MAX_RESIDUAL = 0.1
"""Share of a row's sum of |d| that processing may leave: the noise of two engines is less of any
processing that matters, and other causes leave a third and more."""
MIN_SHARE = 0.8
"""Share of the judged rows, and of their gap, that must be explained if there are no branches."""
MIN_ROWS = 4
"""Rows that must be judged, and explained."""
MIN_PAIRS = 6
"""Branches in explained rows, from which on they decide."""
MAX_PAIR_RESIDUAL = 0.25
"""Share of the squares at branches that may be left: exact processing leaves float noise, another
engine's noise a few per cent, other weights a fifth and more."""
MAX_PAIR_RESIDUAL_OF_SOME = 0.01
"""The same if only some rows are explained: some of many may fit by chance."""
MIN_SHARE_OF_SOME = 0.2
"""Share of the gap of judged rows that must be explained then."""
MAX_LONE_RESIDUAL = 0.03
"""MAX_RESIDUAL over all explained rows if there are no branches."""
MAX_OFF = 0.03
"""Relative error of the ratio of temperatures that is found: the distance of two that are tried."""
MIN_TOLD_OF_KIND = 64
"""Informative tokens that a penalty needs, of those that the row has already and of new ones."""
MIN_RAISED = 0.98
"""Share of the new tokens that must be likelier to the sampler: a penalty takes mass from others
and gives it to all of them, and only noise makes exceptions."""
MIN_LOWERED = 0.5
"""Share of the tokens that the row has already that must be less likely: those with a small logit
gain more than they lose. Truncation, which raises every token, lowers none."""
MIN_LOG_MASS = float(np.log(0.05))
"""Log of the least mass that a truncation keeps at a place. Another prompt makes most tokens of the
trainer less likely too, by more."""
MASS_ERROR = 0.01
"""Mass below a top-p that noise may show as kept."""
NUM_SHOWN = 8
"""Tokens that are offered as evidence."""


@dataclass(frozen=True, slots=True, order=True)
class Processing:
    """Processing that one side applied to the logits and the other did not."""

    slope: float = 1.0
    """1/T of the sampler."""
    truncated: int = 0
    """1 if the sampler renormalised, -1 if the trainer did, else 0."""

    def left_over(self, rollout: Float64Array, trainer: Float64Array) -> Float64Array:
        """The part of each gap that it cannot explain, 0.0 where it may explain all of it."""
        d = trainer - rollout
        if self.truncated and self.slope == 1.0:
            bound = self.truncated * MIN_LOG_MASS
            return np.clip(d, min(bound, 0.0), max(bound, 0.0)) - d
        edge = self.slope * _logit(trainer)
        room = (self.slope - 1.0) * ENTROPY
        at = np.clip(_logit(rollout), edge + min(room, 0.0), edge + max(room, 0.0))
        left = rollout + np.logaddexp(0.0, -at)
        if self.truncated:  # the kept mass adds to it
            left = np.minimum(left, 0.0) if self.truncated > 0 else np.maximum(left, 0.0)
        return np.where((rollout > -MIN_GAP) & (trainer > -MIN_GAP), 0.0, left)

    def __str__(self) -> str:
        told: list[str] = []
        if self.slope != 1.0:
            ratio = 1 / self.slope
            told.append(f"the sampler's are of a temperature {ratio:.3g} times the trainer's")
        if self.truncated:
            who, other = ("sampler", "trainer")[:: self.truncated]
            told.append(f"the {who}'s are renormalised over the kept tokens, the {other}'s are not")
        return " and ".join(told)


class Processed(Check):
    """Fits temperature, top-p and top-k on one side to the gap."""

    name = "values/processed"
    claim = "both sides' log-probs are of the distribution that was sampled from"
    cause = "processed"
    needs = ("rollout_logprobs", "trainer_logprobs")

    def begin(self) -> None:
        self._samples: list[Rows] = []
        self._stride, self._num_chunks = 1, 0
        self._chosen: Processing | None = None
        self._kept_mass = 1.0
        """Smallest mass that was kept at a place, if only truncation was found."""

    def look(self, rows: Rows) -> None:
        if self._num_chunks % self._stride == 0:
            num_rows = int(np.searchsorted(rows.offsets, SAMPLE_TOKENS, side="right")) - 1
            self._samples.append(rows.take(np.arange(min(max(num_rows, 1), len(rows)))))
            if len(self._samples) > NUM_SAMPLES:
                self._samples = self._samples[::2]
                self._stride *= 2
        self._num_chunks += 1

    def conclude(self) -> Finding:
        if not self._samples:
            return self.consistent("there are no rows")
        sample = _Sample(Rows.joined(self._samples))
        told = f"{len(sample.rollout)} tokens of {len(sample.rows)} rows were read"
        if sample.is_judged.sum() < MIN_ROWS:
            return self.consistent(f"{told}: they agree, or are too few")
        fits = [_Fit(processing, sample) for processing in self._candidates(sample)]
        best = max(fits, key=lambda fit: fit.score)
        if best.processing.slope != 1.0:
            best = self._refined(best, sample)
        if not best.is_proof and (slope := sample.slope_at_branches()) is not None:
            both = [Processing(slope=slope, truncated=who) for who in (1, -1)]
            best = max((_Fit(kind, sample) for kind in both), key=lambda fit: fit.score)
        self.count(judged_rows=sample.is_judged, explained_rows=best.hit, branches=best.num_pairs)
        figures = {"explained_gap": best.share, "left_of_it": best.residual}
        if not best.is_proof:
            return self.consistent(f"{told}: no processing explains the gap", **figures)
        self._chosen = best.processing
        self._show(best, sample)
        told = (
            f"in {self.counts['explained_rows']} of {self.counts['judged_rows']} judged rows "
            f"{best.processing}: it leaves {best.residual:.1%} of their gap"
        )
        if best.num_pairs >= MIN_PAIRS:
            told += f", and {best.pair_residual:.1%} at {best.num_pairs} branches"
        if best.processing.slope == 1.0:
            self._kept_mass = float(np.exp(-np.abs(sample.d)[best.hit[sample.row]].max()))
            told += f"; at least {self._kept_mass:.3g} of the mass was kept at each place"
        return self.differs(told, **figures, temperature_ratio=1 / best.processing.slope)

    def repair(self, rows: Rows) -> Rows:
        """Each gap without the part that the processing may make; its exact part depends on the
        whole distribution, which is not in the dump."""
        if self._chosen is None:
            return rows
        at = rows.compared
        trainer = rows.trainer[at].astype(np.float64)
        rollout = rows.rollout.astype(np.float64)
        left = self._chosen.left_over(rollout[at], trainer)
        total = rows.row_sums(at, np.abs(rows.gap[at]))
        is_hit = rows.row_sums(at, np.abs(left)) <= MAX_RESIDUAL * total
        kept = is_hit[rows.row_of[at]]
        repaired = rollout.copy()
        repaired[at[kept]] = (trainer + left)[kept]
        # Noise is no processing: it stays, where repeated contexts show it.
        contexts = contexts_of(rows)
        again = contexts.repeated
        mean = contexts.means(rollout[again])[contexts.group]
        num_hit = np.bincount(contexts.group, is_hit[rows.row_of[again]])
        is_whole = (num_hit == contexts.size)[contexts.group]
        again = again[is_whole]
        repaired[again] = rows.trainer[again] + rollout[again] - mean[is_whole]
        return rows.with_(rollout_logprobs=repaired.astype(np.float32))

    def _candidates(self, sample: _Sample) -> list[Processing]:
        declared = self.setting.temperature
        tried = set(TEMPERATURES)
        if declared and declared != 1.0:
            tried |= {declared, 1 / declared}
        if (slope := sample.slope_at_branches()) is not None:
            tried.add(1 / slope)
        return [
            Processing(truncated=1),
            Processing(truncated=-1),
            *(Processing(slope=1 / t) for t in sorted(tried)),
        ]

    def _refined(self, best: _Fit, sample: _Sample) -> _Fit:
        """The fit with the temperature that branches show, or the best of smaller steps."""
        if best.num_pairs >= MIN_PAIRS:
            slope = sample.slope_at_branches(best.hit)
            return best if slope is None else _Fit(Processing(slope=slope), sample)
        around = [
            _Fit(Processing(slope=1 / (1 / best.processing.slope + step)), sample)
            for step in (-0.04, -0.03, -0.02, -0.01, 0.01, 0.02, 0.03, 0.04)
        ]
        return max(best, *around, key=lambda fit: fit.score)

    def _show(self, best: _Fit, sample: _Sample) -> None:
        d = np.abs(sample.d)
        hit = np.flatnonzero(best.hit[sample.row])
        for i in hit[largest(d[hit], NUM_SHOWN)].tolist():
            at = int(sample.at[i])
            note = f"sampler {sample.rollout[i]:.4f}, trainer {sample.trainer[i]:.4f}"
            self.show(float(d[i]), sample.rows, at, at + 1, note)


class GenerationDefaults(Processed):
    """The processing that is found against that of the model's generation_config.json."""

    name = "values/generation_defaults"
    claim = "the engine sampled as the run says, and not by the defaults of the model"
    cause = "generation_defaults"
    needs = (*Processed.needs, "generation_defaults")

    def look(self, rows: Rows) -> None:
        super().look(rows)
        if not self._penalty > 1:
            return
        at = rows.compared[np.abs(rows.gap[rows.compared]) > MIN_GAP]
        # The first of the tokens of one row with one id is new, and all others come again.
        key = (rows.row_of << np.int64(32)) + rows.token_ids
        is_again = np.ones(rows.num_tokens, np.bool_)
        is_again[np.unique(key, return_index=True)[1]] = False
        again, lowered = is_again[at], rows.gap[at] > 0
        self.count(again=again, again_lowered=again & lowered)
        self.count(new=~again, new_raised=~again & ~lowered)

    @property
    def _penalty(self) -> float:
        assert self.setting.generation_defaults is not None, "the check's needs"
        return self.setting.generation_defaults.get("repetition_penalty", 1.0)

    @property
    def _is_penalised(self) -> bool:
        c = self.counts
        return (
            self._penalty > 1
            and min(c["again"], c["new"]) >= MIN_TOLD_OF_KIND
            and c["again_lowered"] >= MIN_LOWERED * c["again"]
            and c["new_raised"] >= MIN_RAISED * c["new"]
        )

    def conclude(self) -> Finding:
        finding = super().conclude()
        settings = self._settings() if finding.verdict == "differs" else ()
        if not settings and self._is_penalised:
            c = self.counts
            self._chosen = None
            return self.differs(
                f"{c['again_lowered']} of {c['again']} tokens that their row has already are less "
                f"likely to the sampler, and {c['new_raised']} of {c['new']} others are likelier: "
                f"generation_config.json has repetition_penalty={self._penalty:g}"
            )
        if not settings:
            self._chosen = None
            told = "no processing is found that the model's generation_config.json explains"
            return self.consistent(told)
        told = f"{finding.measured}. generation_config.json has {', '.join(settings)}"
        return replace(finding, measured=f"{told}, of which the run says otherwise or nothing")

    def repair(self, rows: Rows) -> Rows:
        """As for any processing; a penalty is on every token."""
        if self._chosen is None and self._is_penalised:
            return rows.agreeing(rows.loss_mask)
        return super().repair(rows)

    def _settings(self) -> Sequence[str]:
        """The settings of the file that explain what is found, and that the run has not."""
        chosen, defaults, run = self._chosen, self.setting.generation_defaults, self.setting
        assert chosen is not None and defaults is not None, "there is a finding, and the needs"
        out: list[str] = []
        if chosen.slope != 1.0:
            asked, default = run.temperature or 1.0, defaults.get("temperature", 1.0)
            off = abs(asked / (chosen.slope * max(default, MIN_GAP)) - 1)
            if asked == default or off > MAX_OFF:
                return ()
            out.append(f"temperature={default:g}")
        if chosen.truncated < 0:
            return ()
        if chosen.truncated:
            top_p, top_k = defaults.get("top_p", 1.0), int(defaults.get("top_k", 0))
            is_cut_otherwise = top_k > 0 or defaults.get("min_p", 0.0) > 0
            is_mass_enough = self._kept_mass >= top_p - MASS_ERROR or is_cut_otherwise
            if top_p < 1 and run.top_p in (None, 1.0) and is_mass_enough:
                out.append(f"top_p={top_p:g}")
            if top_k > 0 and run.top_k in (None, 0, -1):
                out.append(f"top_k={top_k}")
            if defaults.get("min_p", 0.0) > 0:
                out.append(f"min_p={defaults['min_p']:g}")
            if len(out) == (chosen.slope != 1.0):
                return ()
        return out


class _Sample:
    """The compared tokens of some whole rows."""

    def __init__(self, rows: Rows) -> None:
        at, contexts = rows.compared, contexts_of(rows)
        self.rows = rows
        self.at = at
        """[N] index in the rows."""
        self.row = rows.row_of[at]
        """[N]"""
        self.rollout = np.minimum(rows.rollout[at].astype(np.float64), 0.0)
        """[N]"""
        self.trainer = np.minimum(rows.trainer[at].astype(np.float64), 0.0)
        self.d = self.trainer - self.rollout
        to = np.full(rows.num_tokens, -1, np.int64)
        to[at] = np.arange(len(at))
        pairs = np.stack([to[contexts.one], to[contexts.other]])
        self.pairs = pairs[:, (pairs >= 0).all(axis=0)]
        """[2, B] indices of two different tokens at a branch."""
        self.is_judged = rows.row_sums(at, np.abs(self.d) > MIN_GAP) >= MIN_TOLD
        """[R] True for rows with enough informative tokens."""

    def pairs_of(self, hit: BoolArray) -> Int64Array:
        """[2, b] the branches between rows of `hit` [R]."""
        return self.pairs[:, hit[self.row[self.pairs]].all(axis=0)]

    def apart(self, pairs: Int64Array) -> tuple[Float64Array, Float64Array]:
        """([b], [b]) differences at branches of the sampler's log-probs, and of the trainer's."""
        one, other = pairs
        return self.rollout[one] - self.rollout[other], self.trainer[one] - self.trainer[other]

    def slope_at_branches(self, hit: BoolArray | None = None) -> float | None:
        """Median ratio of the two sides' differences at branches between rows of `hit` [R], over
        differences that are large enough and ratios that are not 1."""
        of_rollout, of_trainer = self.apart(self.pairs if hit is None else self.pairs_of(hit))
        clear = np.abs(of_trainer) > 0.2  # nats: the ratio is then known to noise
        ratio = of_rollout[clear] / of_trainer[clear]
        ratio = ratio[np.abs(ratio - 1.0) > 0.01]
        if len(ratio) < MIN_PAIRS:
            return None
        slope = float(np.median(ratio))
        return slope if 0.2 < slope < 5.0 else None


class _Fit:
    """How much of a sample one processing explains."""

    def __init__(self, processing: Processing, sample: _Sample) -> None:
        self.processing = processing
        d, judged = sample.d, sample.is_judged
        left = processing.left_over(sample.rollout, sample.trainer)
        whole, rest = (sample.rows.row_sums(sample.at, np.abs(x)) for x in (d, left))
        self.hit = judged & (rest <= MAX_RESIDUAL * whole)
        """[R] True for rows that it explains."""
        explained, unexplained = float(whole[self.hit].sum()), float(rest[self.hit].sum())
        self.share = explained / max(float(whole[judged].sum()), 1e-300)
        """Share of the judged rows' sum of |d| that is in explained rows."""
        self.share_of_rows = float(self.hit.sum()) / max(float(judged.sum()), 1.0)
        self.residual = unexplained / max(explained, 1e-300)
        """Share of the explained rows' sum of |d| that is left."""
        self.score = explained - 5.0 * unexplained
        """A close temperature explains the same rows worse."""
        one, other = pairs = sample.pairs_of(self.hit)
        self.num_pairs = len(one)
        """Branches between explained rows."""
        of_rollout, of_trainer = sample.apart(pairs)
        base = (of_rollout - of_trainer) ** 2
        if processing.slope == 1.0:
            base = d[one] ** 2 + d[other] ** 2
        left_apart = float(((of_rollout - processing.slope * of_trainer) ** 2).sum())
        self.pair_residual = left_apart / max(float(base.sum()), 1e-300)

    @property
    def is_proof(self) -> bool:
        if self.hit.sum() < MIN_ROWS:
            return False
        has_pairs = self.num_pairs >= MIN_PAIRS
        is_exact = has_pairs and self.pair_residual <= MAX_PAIR_RESIDUAL_OF_SOME
        if self.processing.truncated and self.processing.slope != 1.0:
            # One edge fits much by chance; only branches prove it.
            return is_exact and self.share >= MIN_SHARE
        if is_exact and self.share >= MIN_SHARE_OF_SOME:
            return True
        is_close = (
            self.pair_residual <= MAX_PAIR_RESIDUAL
            if has_pairs
            else self.residual <= MAX_LONE_RESIDUAL
        )
        return is_close and min(self.share, self.share_of_rows) >= MIN_SHARE


def _logit(logprobs: Float64Array) -> Float64Array:
    """log(p / (1 - p)), with p at most what float32 can tell from 1."""
    bounded = np.minimum(logprobs, -1e-6)
    return bounded - np.log(-np.expm1(bounded))
