"""Faults of the rows between sampler and trainer: their ids, masks, places and log-probs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from lockstep.config import at_least
from lockstep.renderers.base import Renderer
from lockstep.run.hooks import LogProbs
from lockstep.testing.faults.base import RowFault, is_chosen
from lockstep.types import UNKNOWN_EXPERT, Float32Array, Int64Array, Ragged, Sample, frozen_ids

FILLER = 0.0
"""Log-prob of a token whose own is lost: the value of an array of zeros."""


@dataclass(frozen=True, kw_only=True)
class _EditFault(RowFault):
    """Base of faults of ids and masks. Trained tokens whose log-prob is NaN after the change get
    the trainer's."""

    def change_rows(
        self, rows: Sequence[Sample], renderer: Renderer, log_probs: LogProbs
    ) -> list[Sample]:
        changed = super().change_rows(rows, renderer, log_probs)
        pairs = zip(changed, rows, strict=True)
        unknown = [row for row, old in pairs if row is not old and _is_unknown(row).any()]
        for row, values in zip(unknown, log_probs(unknown) if unknown else (), strict=True):
            own = row.columns["rollout_logprobs"]
            row.set("rollout_logprobs", np.where(_is_unknown(row), values, own))
        return changed


def _is_unknown(row: Sample) -> npt.NDArray[np.bool_]:
    return row.loss_mask & np.isnan(row.columns["rollout_logprobs"])


# -- ids and masks --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RetokenizedRows(_EditFault):
    """Each run of sampled text is decoded and encoded again, as by a program that keeps messages
    instead of ids. The text stays, but ids change where the model had spelt it in another way.
    Control tokens stay; columns other than log-probs follow by position in the run."""

    logprobs: Literal["by_position", "recomputed"] = "by_position"
    """by_position: the sampled log-probs are laid on the new ids in order, 0.0 where they run out.
    recomputed: the trainer computes them for the new ids, so that KL looks clean while the policy
    is trained on tokens that it did not choose."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        tokenizer = renderer.tokenizer
        ids, turn, mask = row.token_ids, row.columns["turn"], row.loss_mask
        is_text = (turn >= 0) & ~np.isin(ids, list(tokenizer.control_ids))
        new_ids: list[int] = []
        source: list[int] = []
        runs = groupby(range(len(row)), key=lambda at: (is_text[at], turn[at], mask[at]))
        for (has_text, _, _), run in runs:
            places = list(run)
            piece = ids[places].tolist()
            if has_text:
                piece = tokenizer.encode(tokenizer.decode(piece))
            new_ids += piece
            source += [min(places[0] + i, places[-1]) for i in range(len(piece))]
        out = taken(row, source, new_ids)
        is_sampled = out.columns["turn"] >= 0
        for name in (name for name in row.columns if name.endswith("logprobs")):
            values = row.columns[name][turn >= 0]
            laid = np.full(is_sampled.sum(), FILLER, np.float32)
            laid[: len(values)] = values[: len(laid)]
            out.columns[name][is_sampled] = laid
        if self.logprobs == "recomputed":
            return with_logprobs(out, np.full(len(out), np.nan))
        return out


@dataclass(frozen=True, kw_only=True)
class DroppedFinalTokens(_EditFault):
    """The last sampled tokens of a row's last turn are missing: a loop that takes the ids from the
    next prompt, which the last turn does not have. At least one token of the turn stays. The other
    log-probs are right: only tokens/trained below tokens/sampled shows it, and the policy never
    learns to end."""

    count: Annotated[int, at_least(1)] = 1
    """Tokens that are dropped at most."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        turn = row.columns["turn"]
        return without(row, np.flatnonzero((turn >= 0) & (turn == turn.max()))[1:][-self.count :])


@dataclass(frozen=True, kw_only=True)
class LostRoutes(RowFault):
    """Later turns find their prefix gone from the engine's cache: the routes of all positions
    before are lost to `trainer.routing_replay=rollout`."""

    needs: ClassVar = "routes that the trainer replays"

    share: float = 0.5
    """Share of the later turns that are hit."""

    def is_hit(self, row: Sample) -> bool:
        return True  # `share` is of its turns

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        turn, routes = row.columns["turn"], row.columns.get("routed_experts")
        later = range(1, int(turn.max(initial=-1)) + 1)
        hit = [t for t in later if is_chosen(self.share, self.seed, "lost routes", row.id, t)]
        if routes is None or not hit:
            return row
        out = taken(row, np.arange(len(row)))
        begin = int(np.flatnonzero(turn == hit[-1] - 1).max(initial=-1)) + 1
        out.columns["routed_experts"][:begin] = UNKNOWN_EXPERT
        return out


# -- log-probs ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _ValueFault(RowFault):
    """Base of faults of the sampler's log-probs."""

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        values = row.columns["rollout_logprobs"].copy()
        values[row.loss_mask] = self.written(values[row.loss_mask], row)
        return with_logprobs(taken(row, np.arange(len(row))), values)

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        """Returns the values to write in place of `logprobs` [trained tokens]."""
        raise NotImplementedError(f"{type(self).__name__} changes no log-prob")


@dataclass(frozen=True, kw_only=True)
class ShiftedLogprobs(_ValueFault):
    """Every trained token has the log-prob of the token `offset` places after it among the row's
    trained tokens, 0.0 at the end: an off-by-one in the shift to "predicts the next"."""

    nonzero: ClassVar = {"offset": "shifts"}

    offset: int = 1
    """Places; negative takes log-probs from before the token."""

    def written(self, logprobs: Float32Array, row: Sample) -> npt.NDArray[np.floating]:
        return _moved(logprobs, self.offset)


# -- editing a row --------------------------------------------------------------------------------


def turns(row: Sample) -> list[tuple[int, int]]:
    """(begin, end) of each sampled turn of `row`, in order."""
    turn = row.columns["turn"]
    places = [np.flatnonzero(turn == number) for number in range(int(turn.max(initial=-1)) + 1)]
    return [(int(at[0]), int(at[-1]) + 1) for at in places if at.size]


def taken(
    row: Sample,
    source: Sequence[int] | Int64Array,
    token_ids: Sequence[int] | npt.NDArray[np.int32] | None = None,
) -> Sample:
    """A new row of `token_ids`. Its other columns are copied from the tokens `source` of `row`, and
    so are the ids if they are not given.

    The support of a draw is known for the drawn id alone. For another id it is empty, which means
    the whole vocabulary.
    """
    at = np.asarray(source, np.int64)
    ids = frozen_ids(row.token_ids[at] if token_ids is None else token_ids, where=row.id)
    is_same = ids == row.token_ids[at]
    ragged = {
        name: Ragged.of([of[i] if same else of[i][:0] for i, same in enumerate(is_same)])
        for name, of in ((name, column.take(at)) for name, column in row.ragged.items())
    }
    return Sample(
        id=row.id,
        token_ids=ids,
        loss_mask=row.loss_mask[at],
        columns={name: column[at] for name, column in row.columns.items()},
        ragged=ragged,
        group=row.group,
    )


def without(row: Sample, lost: Collection[int] | Int64Array) -> Sample:
    """`row` without these tokens; `row` itself if there are none."""
    return taken(row, np.delete(np.arange(len(row)), list(lost))) if len(lost) else row


def with_logprobs(row: Sample, values: npt.NDArray[np.floating]) -> Sample:
    """`row`, which was just made, with these log-probs of the sampler. values: [T]."""
    row.set("rollout_logprobs", values.astype(np.float32))
    return row


def _moved(values: Float32Array, by: int) -> Float32Array:
    """The values `by` places after each, 0 where there are none."""
    at = np.arange(len(values)) + by
    is_inside = (at >= 0) & (at < len(values))
    return np.where(is_inside, values[at * is_inside], np.float32(0.0))
