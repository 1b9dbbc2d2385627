"""The model at hand, as hypotheses see it: it scores rows, as they are or otherwise.

Without torch: `scorer` is imported when the first row is scored.

# N tokens of the rows  R rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.doctor.inputs.base import Dump, Facts
from lockstep.doctor.rows import SIDES, Float64Array, Rows, given
from lockstep.doctor.scoring.distribution import Distribution
from lockstep.doctor.scoring.weights import Weights, config_of, described, weights_at_hand
from lockstep.doctor.tokenization import locate, settings_beside
from lockstep.errors import CheckpointError, DataError, LockstepError
from lockstep.memory import GIB
from lockstep.models.config import FallbackConfig, ModelConfig
from lockstep.models.shapes import decoder_shapes, num_elements
from lockstep.system import available_bytes
from lockstep.types import Int64Array

if TYPE_CHECKING:
    from lockstep.doctor.scoring.layouts import Layout
    from lockstep.doctor.scoring.scorer import Scorer

MAX_TOKENS, MIN_TOKENS = 16_384, 1_536
"""Tokens of the sample: shares have errors of about 1 % with the first, and a standard error over
rows still needs some twenty rows."""
MULTIPLIES = 3e11
"""Multiplications of one forward over the sample: some six seconds on a core of 50 GFLOP/s, so that
a 135M model is loaded, scored and varied in a minute."""


@dataclass(kw_only=True)
class Model:
    """Weights that score rows. Results are remembered by the ids of the rows."""

    weights: tuple[Weights, ...]
    """The first is the trained model, unless steps say which."""
    config: ModelConfig | FallbackConfig
    facts: Facts = field(default_factory=Facts)
    max_tokens: int = 0
    """Size of the sample; 0: the tokens that take a few seconds."""
    _known: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def __post_init__(self) -> None:
        config = self.config
        if not isinstance(config, ModelConfig):
            self.max_tokens = self.max_tokens or MAX_TOKENS // 2
            return
        elements = num_elements(decoder_shapes(config))
        found = available_bytes()
        # The model is in float32; some of it is there twice while it is read or cast to bfloat16.
        needed = int(4 * elements * 1.5)
        if found is not None and found[0] < needed:
            raise CheckpointError(
                f"{self.weights[0].name} takes {needed / GIB:.1f} GiB to be scored by in "
                f"float32, and there are {found[0] / GIB:.1f} GiB ({found[1]})."
            )
        affordable = int(MULTIPLIES / max(elements, 1))
        self.max_tokens = self.max_tokens or min(max(affordable, MIN_TOKENS), MAX_TOKENS)

    @cached_property
    def scorer(self) -> Scorer:
        from lockstep.doctor.scoring.scorer import Scorer

        return Scorer()

    @cached_property
    def pad_id(self) -> int | None:
        known: list[Any] = [self.facts.pad_id]
        for file in ("config.json", "generation_config.json"):
            settings = settings_beside(self.weights[0].model_directory, file) or {}
            for name in ("pad_token_id", "eos_token_id"):
                found = settings.get(name)
                known += found if isinstance(found, list) else [found]
        return next((id_ for id_ in known if isinstance(id_, int) and id_ >= 0), None)

    def rows_of(self, dump: Dump, facts: Facts) -> Iterator[Rows]:
        """The rows of the dump. Raises DataError if its facts name a model of another architecture
        or size, and for ids or experts that the model does not have."""
        named = c = self.config
        with suppress(LockstepError):  # it is not on this machine
            named = config_of(locate(facts.model, may_fetch=False))
        if (of_dump := described(named)) != described(c):
            raise self._refusal(dump, f"the rows are of {facts.model} ({of_dump})", described(c))
        experts = (len(c.routed_layers), c.num_active_experts)
        for rows in dump.chunks():
            is_beyond = (rows.token_ids < 0) | (rows.token_ids >= c.vocab_size)
            if is_beyond.any():
                row, place = rows.where(at := int(np.argmax(is_beyond)))
                what = f"row {row}, token {place} has the id {rows.token_ids[at]}"
                raise self._refusal(dump, what, f"ids up to {c.vocab_size - 1}")
            routes = rows.routed_experts if isinstance(c, ModelConfig) else None
            if routes is not None and routes.ndim == 3:
                is_beyond = (routes >= c.num_experts).any((1, 2)) | (routes.shape[1:] != experts)
                if is_beyond.any():
                    row, place = rows.where(at := int(np.argmax(is_beyond)))
                    what = f"row {row}, token {place} has the experts {routes[at].tolist()!s:.60}"
                    told = f"{experts[0]} layers that send a token to {experts[1]} of"
                    raise self._refusal(dump, what, f"{told} {c.num_experts} experts")
            yield rows

    def _refusal(self, dump: Dump, found: str, has: str) -> DataError:
        return DataError(
            f"{dump.path}: {found}, and {self.weights[0].name} has {has}: the rows are of another "
            "model. Give theirs (--model DIR), or leave --model out."
        )

    # -- scores -------------------------------------------------------------------------------

    def loaded(self, rows: Rows) -> Any:
        """The trained model in float32, with the weights of most of these rows."""
        return self.scorer.load(self.weights[self.own(rows)])

    def _places(self, rows: Rows) -> list[int]:
        """Index of the weights that the trainer ran on each row whose weights are at hand."""
        if rows.steps is None or all(one.step is None for one in self.weights):
            return [0]
        by_step = {one.step: place for place, one in enumerate(self.weights)}
        return [by_step[step] for step in rows.steps.tolist() if step in by_step]

    def own(self, rows: Rows) -> int:
        """Index of the weights that the trainer ran on most of the rows; 0 if none is known."""
        places = self._places(rows)
        return max(set(places), key=places.count) if places else 0

    def has_own(self, rows: Rows) -> bool:
        """True if the weights of these rows are at hand."""
        return bool(self._places(rows))

    def once(self, rows: Rows, name: Any, make: Callable[[], Any]) -> Any:
        key = (name, digest(rows))
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def processed(self, rows: Rows, kinds: Sequence[Distribution]) -> dict[Any, Float64Array]:
        """[N] of each processing of the logits, in one forward for all that are new."""
        found = self.once(rows, "processed", dict)
        if new := [d for d in kinds if d not in found]:
            model, every = self.loaded(rows), np.arange(len(rows))
            found |= self.scorer.score(model, rows, every, distributions=new, has_spread=True)
        return found

    def plain(self, rows: Rows) -> Float64Array:
        """[N] log-probs by the model itself, under the processing that the trainer has."""
        return self.processed(rows, [self.processing(rows)])[self.processing(rows)]

    def spread(self, rows: Rows) -> Float64Array:
        """[N] variance of the log-prob under unit noise on every logit."""
        return self.processed(rows, [self.processing(rows)])["spread"]

    def processing(self, rows: Rows) -> Distribution:
        """Temperature of the recorded log-probs: 1, or the run's, whichever is nearer."""
        asked = self.facts.temperature or 1.0
        if asked == 1.0:
            return Distribution()
        kinds = [Distribution(), Distribution(temperature=asked)]

        def apart(kind: Distribution) -> float:
            at, values = rows.compared, self.processed(rows, kinds)[kind]
            sides = [given(getattr(rows, name))[at] for name in SIDES.values()] if len(at) else []
            return sum(float(np.median(np.abs(side - values[at]))) for side in sides)

        return self.once(rows, "processing", lambda: min(kinds, key=apart))

    def bfloat16(self, rows: Rows) -> Float64Array:
        """[N] the model computed in bfloat16."""

        def make() -> Float64Array:
            copied = self.scorer.copied_in_bfloat16(self.loaded(rows))
            return self.score(rows, np.arange(len(rows)), of=copied)

        return self.once(rows, "bfloat16", make)

    def noise(self, rows: Rows) -> float:
        """Mean of d^2 that a pair of precisions makes."""
        at = np.flatnonzero(rows.loss_mask & (rows.position > 0))
        d = (self.bfloat16(rows) - self.plain(rows))[at]
        d = d[np.isfinite(d)]
        return float(np.square(d).mean()) if len(d) else 0.0

    def score(self, rows: Rows, chosen: Int64Array, **options: Any) -> Float64Array:
        """[N] log-probs of the chosen rows by the model; NaN in others. options: of
        `Scorer.score`; of: another model."""
        kind = options.pop("distribution", None) or self.processing(rows)
        of = options.pop("of", None) or self.loaded(rows)
        return self.scorer.score(of, rows, chosen, distributions=[kind], **options)[kind]

    def score_laid(self, rows: Rows, layout: Layout | None) -> Float64Array:
        """[N] log-probs of the tokens that are in a layout of these rows."""
        out = np.full(rows.num_tokens, np.nan)
        if layout is None or not layout.rows.loss_mask.any():
            return out
        options = {"positions": layout.positions, "distribution": self.processing(rows)}
        every = np.arange(len(layout.rows))
        values = self.score(layout.rows, every, of=self.loaded(rows), **options)
        is_own = layout.place >= 0
        out[layout.place[is_own]] = values[is_own]
        return out


def digest(rows: Rows) -> str:
    """Digest of the ids, bounds and masks of rows."""
    out = blake2b(digest_size=16)
    for values in (rows.token_ids, rows.offsets, rows.loss_mask):
        out.update(np.ascontiguousarray(values).tobytes())
    return out.hexdigest()


def open_model(dump: Dump, facts: Facts, *, model: str | Path | Model, **more: Any) -> Model:
    """The model at hand. more: for `weights_at_hand`. Raises CheckpointError if it is too large or
    torn, ConfigError for what names no model."""
    if isinstance(model, Model):
        return model
    weights, config = weights_at_hand(dump, model, **more)
    found = Model(weights=weights, config=config, facts=facts)
    found.scorer.load(weights[0])  # a torn file is refused here
    return found
