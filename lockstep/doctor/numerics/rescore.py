"""The sample of rows that the model at hand scores, and the results.

Without torch: `scorer` is imported when the first row is scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.doctor.checks.base import Setting
from lockstep.doctor.checks.examine import Chunks, Stage, all_stages
from lockstep.doctor.checks.rows import Float32Array, Float64Array, Once, Rows
from lockstep.doctor.checks.values.processed import Processed
from lockstep.doctor.inputs.base import Dump, Facts
from lockstep.doctor.numerics.compare import (
    COLUMN_OF,
    FLOAT_K2,
    MAX_ROW_RESIDUAL,
    WILD_FACTOR,
    Comparison,
    Distribution,
    Evidence,
    Fit,
    Scored,
    SideName,
    Variant,
    compare,
)
from lockstep.doctor.numerics.layouts import MAX_BEFORE, Lines, turn_positions
from lockstep.doctor.numerics.prompts import Prompt, Prompts
from lockstep.doctor.numerics.weights import Weights, WeightsAtHand, weights_at_hand
from lockstep.doctor.tokenization import Tokenization, generation_defaults, settings_beside
from lockstep.errors import CheckpointError, MissingExtraError
from lockstep.memory import GIB, available_bytes
from lockstep.models.config import ModelConfig
from lockstep.models.shapes import decoder_shapes, num_elements
from lockstep.types import Int32Array, Int64Array

TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.4, 1.7, 2.0)
"""Temperatures of a side that are tried: a deviation that is nearly one of these is its."""
TOP_P, TOP_K = (0.7, 0.8, 0.9, 0.95), (20, 50)

if TYPE_CHECKING:
    from lockstep.doctor.numerics.scorer import Scorer
    from lockstep.doctor.numerics.search import Search

MAX_TOKENS = 32_768
"""Largest sample: shares have errors of about 1 %, as far as rows are alike."""
MIN_TOKENS = 2_048
"""Smallest sample: with fewer tokens too little repeats to tell noise from other weights."""
MIN_FOREIGN = 0.9
"""Share of the rows that neither side computed with the weights at hand, from which these are not
those of the dump."""
MULTIPLIES = 4e11
"""Multiplications of one forward over the sample: some ten seconds on a core. A larger model gets a
smaller sample."""


@dataclass(kw_only=True)
class Rescoring(Once):
    """The model at hand, as checks see it: `Setting.model`."""

    weights: WeightsAtHand
    facts: Facts = field(default_factory=Facts)
    """Facts of the dump: its temperature, top-p and top-k of sampling are tried."""
    sides: Sequence[SideName] = tuple(COLUMN_OF)
    """The sides whose log-probs the dump has."""
    words: Tokenization = field(default_factory=Tokenization)
    """Tokenizer and renderer of the rows, to write other prompts for the same replies."""
    seed: int = 0
    max_tokens: int = 0
    """Size of the sample; 0: as many as take seconds."""
    recorded: dict[SideName, float] = field(default_factory=dict[SideName, float])
    """k2 per token of each side against the model, as the sample has it before any repair."""
    _sample: Rows | None = None
    _preceding: dict[str, tuple[Int32Array, ...]] = field(default_factory=dict[str, Any])
    """Row of the sample -> ids of the rows before it in the dump, the nearest first."""
    _longest: int = 0
    """Tokens of the dump's longest row."""
    _longest_prompt: int = 0

    def __post_init__(self) -> None:
        config = self.weights.config
        if not isinstance(config, ModelConfig):
            self.max_tokens = self.max_tokens or MIN_TOKENS
            return
        elements = num_elements(decoder_shapes(config))
        found = available_bytes()
        # In float32, and while a copy is cast to bfloat16 or a file is read, some of it twice.
        needed = int(4 * elements * 1.5)
        if found is not None and found[0] < needed:
            raise CheckpointError(
                f"{self.weights.all[0].name} takes {needed / GIB:.1f} GiB to be scored by in "
                f"float32, and there are {found[0] / GIB:.1f} GiB ({found[1]})."
            )
        affordable = int(MULTIPLIES / max(elements, 1))
        self.max_tokens = self.max_tokens or min(max(affordable, MIN_TOKENS), MAX_TOKENS)

    # -- the sample ---------------------------------------------------------------------------

    def stages(self, stages: Sequence[Stage]) -> list[Stage]:
        """`stages`, in which checks that lack the log-probs of one side see the sample, filled with
        the model's. Checks of noise and of processed log-probs are left out: they infer what the
        model tells exactly."""
        filled = frozenset(COLUMN_OF[name] for name in COLUMN_OF if name not in self.sides)
        out: list[Stage] = []
        for stage in stages:
            if tuple(stage.checks) == all_stages()["noise"]:
                continue
            made = [check for check in stage.checks if not issubclass(check, Processed)]
            late = [check for check in made if filled & set(check.needs)]
            out.append(replace(stage, checks=[check for check in made if check not in late]))
            if late:
                out.append(Stage(checks=late, chunks=self.sample, has=filled))
        return out

    def prepare(self, chunks: Chunks) -> None:
        """Draws the sample and scores it. Raises CheckpointError if that cannot be done."""
        drawn = self._choose(chunks())
        evidence = self._score(drawn)
        # Rows whose weights are not at hand can only tell of other weights. Those that do not are
        # dropped: no cause could have a share of their gap.
        judged = np.flatnonzero((comparison := compare(evidence)).is_judged)
        if 0 < len(judged) < len(drawn):
            evidence = evidence.take(judged)
        self.once(f"evidence {_digest(evidence.rows)}", lambda: evidence)
        self._sample = self._filled(evidence.rows)
        self.recorded = {s: _k2(evidence.side(s) - evidence.reference) for s in COLUMN_OF}
        sampler, trainer = evidence.side("sampler"), evidence.side("trainer")
        nearest, floor = min(self.recorded.values()), _k2(evidence.bfloat16 - evidence.reference)
        left = [_k2(side - v.logprobs) for side in (sampler, trainer) for v in evidence.variants]
        is_far = nearest > WILD_FACTOR * floor and min(left) > MAX_ROW_RESIDUAL * nearest
        if is_far and comparison.is_foreign.mean() >= MIN_FOREIGN:
            raise CheckpointError(
                f"{self.weights.all[0].name} is another model than that of the rows, or another "
                "checkpoint of it, or both sides score by a setting (a temperature) that the dump "
                f"does not state: they agree with each other (k2 {_k2(sampler - trainer):.1e}), "
                f"and the nearer is at k2 {nearest:.1e} from it, where bfloat16 makes {floor:.1e}. "
                "It is no evidence about them. Give the weights that they were made with: "
                "--model DIR, --against DIR"
            )

    def sample(self) -> Iterable[Rows]:
        """The sample, as chunks of a stage. A side without log-probs has the model's."""
        assert self._sample is not None, "prepare() comes first"
        return [self._sample]

    def _choose(self, chunks: Iterable[Rows]) -> Rows:
        """Rows drawn at random, half of them from rows whose weights are at hand, as far as there
        are as many. Memory: the sample, and one chunk."""
        rng = np.random.default_rng(self.seed)
        ranks, kept = np.empty(0), list[Rows]()
        before: list[Int32Array] = []
        for rows in chunks:
            ids = [*before, *np.split(rows.token_ids, rows.offsets[1:-1])]
            num_before, before = len(before), ids[-MAX_BEFORE:]
            drawn = rng.random(len(rows))
            drawn[self._own(rows) >= 0] /= 2
            at = np.flatnonzero(rows.loss_mask)
            trained, first = rows.row_sums(at), rows.firsts(at, rows.position[at])
            first[trained == 0] = 0
            self._longest = max(self._longest, int(rows.sizes.max(initial=0)))
            self._longest_prompt = max(self._longest_prompt, int(first.max(initial=0)))
            is_usable = (trained > 0) & (rows.sizes <= self.weights.config.max_positions)
            if not is_usable.any():
                continue
            ranks = np.concatenate([ranks, drawn[is_usable]])
            known = Rows.joined([*kept, rows.take(np.flatnonzero(is_usable))])
            order = np.argsort(ranks, kind="stable")
            fits = np.cumsum(known.sizes[order]) <= self.max_tokens
            fits[0] = True
            chosen = np.sort(order[fits])
            ranks, kept = ranks[chosen], [known.take(chosen)]
            number_of = {name: number for number, name in enumerate(rows.row_ids)}
            for name in kept[0].row_ids:
                if name in number_of:
                    at = num_before + number_of[name]
                    self._preceding[name] = tuple(ids[max(at - MAX_BEFORE, 0) : at][::-1])
        if not kept:
            limit = self.weights.config.max_positions
            raise CheckpointError(f"no row has a trained token and at most {limit} tokens.")
        return kept[0]

    def _own(self, rows: Rows) -> Int64Array:
        """[R] index of the weights that the trainer ran on each row; -1: not at hand."""
        steps = [None] * len(rows) if rows.steps is None else rows.steps.tolist()
        places = [self.weights.of_step(step) for step in steps]
        return np.array([-1 if place is None else place for place in places], np.int64)

    def _filled(self, rows: Rows) -> Rows:
        """The rows with the model's log-probs in place of a side that has none."""
        reference = self.evidence(rows).reference.astype(np.float32)
        filled = {COLUMN_OF[name]: reference for name in COLUMN_OF if name not in self.sides}
        return rows.with_(**filled)

    # -- what was computed --------------------------------------------------------------------

    def evidence(self, rows: Rows) -> Evidence:
        """Scores of these rows by the model. Computed once for rows of the same ids."""
        known = self.once(f"evidence {_digest(rows)}", lambda: self._score(rows))
        return replace(known, rows=rows)

    def compare(self, rows: Rows) -> Comparison:
        """Both sides of these rows, as they are, against the model."""
        key = _digest(rows, rows.rollout_logprobs, rows.trainer_logprobs)
        return self.once(
            f"comparison {key}", lambda: self._search(rows).explained(self.evidence(rows))
        )

    def _search(self, rows: Rows) -> Search:
        """The variants of these rows, which are scored where there is something to explain."""
        from lockstep.doctor.numerics.search import Known, Search

        def make() -> Search:
            known = Known(
                lines=self._lines(rows), distributions=self._processing(), prompts=self._prompts()
            )
            return Search(rows, self.scorer, self.weights.all, self._own(rows), known)

        return self.once(f"search {_digest(rows)}", make)

    def _prompts(self) -> list[Prompt]:
        tokenizer = self.words.tokenizer
        return [] if tokenizer is None else list(Prompts(tokenizer, self.words.renderer).all())

    def _lines(self, rows: Rows) -> Lines:
        config = self.weights.config
        trained = np.flatnonzero(rows.loss_mask & (rows.position > 0))
        prompts = np.minimum(rows.firsts(trained, rows.position[trained]), rows.sizes)
        return Lines(
            prompts=prompts,
            longest_prompt=max(self._longest_prompt, int(prompts.max(initial=0))),
            longest=max(self._longest, int(rows.sizes.max(initial=0))),
            preceding=[self._preceding.get(name, ()) for name in rows.row_ids],
            turns=turn_positions(rows),
            pad_id=self._pad_id(),
            max_positions=config.max_positions,
        )

    def _pad_id(self) -> int | None:
        known: list[Any] = [self.facts.pad_id]
        for file in ("config.json", "generation_config.json"):
            settings = settings_beside(self.weights.all[0].model_directory, file) or {}
            for name in ("pad_token_id", "eos_token_id"):
                found = settings.get(name)
                known += found if isinstance(found, list) else [found]
        return next((id_ for id_ in known if isinstance(id_, int) and id_ >= 0), None)

    def _processing(self) -> dict[str, Sequence[Distribution]]:
        """Cause -> settings that the dump does not tell: those of generation_config.json, then
        temperatures and cuts on a grid, each relative to what is sampled."""
        defaults = self._defaults()
        grid = [Distribution(temperature=t) for t in TEMPERATURES]
        grid += [Distribution(top_p=p) for p in TOP_P] + [Distribution(top_k=k) for k in TOP_K]
        known = {*self._distributions(), *defaults}
        return {
            "generation_defaults": defaults,
            "processed": [one for one in grid if one not in known],
        }

    def _defaults(self) -> tuple[Distribution, ...]:
        """Processing of the logits by generation_config.json, as an engine takes it for what a
        request leaves open: with the run's own temperature and without, all of it, or what is
        before top-p, top-k and min-p."""
        found = generation_defaults(self.weights.all[0].model_directory) or {}
        named: dict[str, Any] = {name: value for name, value in found.items() if value > 0}
        whole = Distribution(**named | {"top_k": int(named.get("top_k", 0))})
        asked = self.facts.temperature or 1.0
        out: list[Distribution] = []
        for temperature in (whole.temperature, asked):
            one = replace(whole, temperature=temperature)
            out += [one, replace(one, top_p=1.0, top_k=0, min_p=0.0)]
        known = self._distributions()
        return tuple(d for d in dict.fromkeys(out) if d not in known)

    @cached_property
    def scorer(self) -> Scorer:
        from lockstep.doctor.numerics.scorer import Scorer

        return Scorer()

    def _distributions(self) -> tuple[Distribution, ...]:
        temperature = self.facts.temperature or 1.0  # greedy sampling records at temperature 1
        found = [Distribution(), Distribution(temperature=temperature)]
        top_p, top_k = self.facts.top_p or 1.0, max(self.facts.top_k or 0, 0)
        found.append(Distribution(temperature=temperature, top_p=top_p, top_k=top_k))
        return tuple(dict.fromkeys(found))

    def _score(self, rows: Rows) -> Evidence:
        own = self._own(rows)
        distributions = self._distributions()
        scored = [
            self._by_weights(rows, weights, np.flatnonzero(own == number), distributions)
            for number, weights in enumerate(self.weights.all)
        ]
        names = {name for found in scored for name in found}

        def of_own(name: str, values: Callable[[Scored], Any]) -> Float64Array:
            """[N] values under this variant of each row's own weights; NaN where there are none."""
            out = np.full(rows.num_tokens, np.nan)
            for number, found in enumerate(scored):
                if name in found:
                    out = np.where(own[rows.row_of] == number, values(found[name]), out)
            return out

        def logprobs(name: str, distribution: Distribution) -> Float64Array:
            return of_own(name, lambda found: found.logprobs[distribution])

        chosen, dtype = self._reference(rows, logprobs, distributions)
        plain, reference = logprobs("all", chosen), logprobs(dtype, chosen)

        def variant(cause: str, text: str, values: Float64Array, fit: Fit = "most") -> Variant:
            return Variant(cause=cause, text=text, logprobs=values, plain=plain, fit=fit)

        variants = [
            variant("adapter_not_merged", name, logprobs(name, chosen))
            for name in sorted(names - {"all", "bfloat16", "replayed"})
        ]
        for number, weights in enumerate(self.weights.all):
            values = scored[number]["all"].logprobs[chosen].astype(np.float64)
            values[own[rows.row_of] == number] = np.nan
            variants.append(variant("other_weights", f"with the weights {weights.name}", values))
        for other in (d for d in distributions if d != chosen):
            text, values = f"after {other.describe()}", logprobs("all", other)
            variants.append(variant("processed", text, values, "near"))
        name, other_dtype = ("all", "float32") if dtype == "bfloat16" else ("bfloat16", "bfloat16")
        values, text = logprobs(name, chosen), f"in {other_dtype}"
        variants.append(Variant(cause="precision", text=text, logprobs=values))
        replayed = None
        if "replayed" in names and dtype != "replayed":
            replayed = logprobs("replayed", chosen)
        return Evidence(
            rows=rows,
            reference=reference,
            variants=[v for v in variants if np.isfinite(v.logprobs).any()],
            bfloat16=logprobs("bfloat16", chosen) - plain + reference,
            spread=of_own("all", lambda found: found.spread),
            replayed=replayed,
            is_replayed=dtype == "replayed",
            plain=plain,
            processing=chosen,
            sides=self.sides,
        )

    def _by_weights(
        self, rows: Rows, weights: Weights, own: Int64Array, distributions: Sequence[Distribution]
    ) -> dict[str, Scored]:
        """Variant -> scores; "all": the model itself on every row, other variants on `own` rows."""
        scorer, every = self.scorer, np.arange(len(rows))
        model = scorer.load(weights)
        score = partial(scorer.score, rows=rows, distributions=distributions)
        out = {"all": score(model, chosen=every, has_spread=True)}
        if not len(own):
            return out
        if rows.routed_experts is not None and getattr(self.weights.config, "is_moe", False):
            out["replayed"] = score(model, chosen=own, is_replaying=True)
        for text, changed in scorer.without_adapter(model):
            out[text] = score(changed, chosen=own)
        out["bfloat16"] = score(scorer.in_bfloat16(model), chosen=own)
        return out

    def _reference(
        self, rows: Rows, logprobs: Any, distributions: Sequence[Distribution]
    ) -> tuple[Distribution, str]:
        """Processing of the logits and precision of the trainer, or of the sampler if the trainer
        has no log-probs: float32 and the whole softmax, unless another pair is nearer."""
        values = rows.trainer_logprobs if "trainer" in self.sides else rows.rollout_logprobs
        assert values is not None, "a model is opened for rows with log-probs"
        best, least = (distributions[0], "all"), math.inf
        for name in ("all", "bfloat16", "replayed"):
            for distribution in distributions:
                d = (values.astype(np.float64) - logprobs(name, distribution))[rows.loss_mask]
                d = d[np.isfinite(d)]
                # The median: a defect of some rows must not decide.
                error = float(np.median(d * d)) if len(d) else math.inf
                if error < 0.5 * least and not (least <= 2 * FLOAT_K2):
                    best, least = (distribution, name), error
        return best

    # -- noise --------------------------------------------------------------------------------

    def router_noises(self, rows: Rows) -> tuple[Float64Array, ...]:
        """Variances that noisy routers would cause, under the weights of most of these rows.
        Computed on demand, by some more forwards."""
        own = self._own(rows)
        number = int(np.bincount(own[own >= 0]).argmax()) if (own >= 0).any() else -1
        weights, chosen = self.weights.all[number], np.flatnonzero(own == number)
        if number < 0 or weights.is_fallback:
            return ()
        return self.once(
            f"router noises {_digest(rows)}",
            lambda: self.scorer.router_variances(weights, rows, chosen, seed=self.seed),
        )


def open_model(
    dump: Dump,
    facts: Facts,
    words: Tokenization,
    *,
    model: str | Path | Rescoring,
    adapter: str | Path = "",
    against: Sequence[str | Path] = (),
) -> Rescoring | str:
    """The model at hand with its sample of the dump scored, or why it cannot be used: too large for
    this machine, torn, far from both sides. Reads the dump once.

    model, adapter, against: as in `weights.weights_at_hand`; a `Rescoring` is taken as it is.
    words: of the rows.
    Raises ConfigError for what names no model, DataError before one is loaded that the rows cannot
    be of.
    """
    sides: list[SideName] = [name for name, column in COLUMN_OF.items() if column in dump.has]
    if not sides:
        return "the rows have log-probs of neither side: nothing to compare"
    try:
        if not isinstance(model, Rescoring):
            model = Rescoring(
                weights=weights_at_hand(dump, model, adapter=adapter, against=against),
                facts=facts,
                sides=sides,
            )
        model.words = words
        model.prepare(partial(model.weights.rows_of, dump, facts))
    except (CheckpointError, MissingExtraError) as error:
        return str(error)
    return model


def _k2(d: Float64Array) -> float:
    """Mean of d^2 / 2 where d is known."""
    d = d[np.isfinite(d)]
    return float(0.5 * (d @ d) / max(len(d), 1))


def _digest(rows: Rows, *more: Float32Array | None) -> str:
    """Digest of the ids, of the bounds and masks of the rows, and of other arrays."""
    digest = blake2b(digest_size=16)
    for values in (rows.token_ids, rows.offsets, rows.loss_mask, *more):
        digest.update(b"" if values is None else np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def rescoring_of(setting: Setting) -> Rescoring:
    """The model of checks that need one."""
    assert isinstance(setting.model, Rescoring), f"no model at hand: {setting.model!r}"
    return setting.model
