"""Finds the op at which trainer and sampler diverge, by running both sides of one row.

# T tokens of the row that are fed  N sampled tokens  C recorded calls of a forward  V vocabulary
# B rows of company  Q tokens of a step  S page size  W numbers of one call per token
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import saved_tensors_hooks

from lockstep.errors import AlignmentError
from lockstep.ops.context import PackedContext, PagedContext, Support
from lockstep.ops.recording import Model, OpCall, Record, at_token, digests, record
from lockstep.types import Int64Array, Ragged

Tensor = torch.Tensor
Keep = Callable[[tuple[Tensor, ...]], Tensor]

HEAD = OpCall("log_probs", None, 0)
"""Last call for a sampled token: `log_probs` in the trainer, `linear` and `log_softmax` in the
sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDifference:
    """An op whose numbers for one token differ between the two sides."""

    call: OpCall
    trainer: float
    """The trainer's number where the difference is largest."""
    sampler: float
    num_unequal: int
    num_compared: int

    @property
    def max_abs_diff(self) -> float:
        return abs(self.trainer - self.sampler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Result of `bisect`. Tokens are indices into the row's `token_ids`."""

    token: int | None
    """First sampled token whose log-probs (trainer's, sampler's, recorded) are not all equal; None
    if they are equal everywhere and only intermediate numbers differ."""
    trainer_logprob: float | None
    sampler_logprob: float | None
    recorded_logprob: float | None
    """Log-prob in the record; None if the token has none."""
    fed_token: int | None
    """First token whose forward differs, `token - 1` or earlier; None if both sides agree."""
    ops: tuple[OpDifference, ...]
    """Ops that differ for `fed_token`, in the order of the forward: the first is where the sides
    diverge. Empty if the difference was gone in a second run."""

    @property
    def recorded_side(self) -> Literal["trainer", "sampler", "neither", "unknown"]:
        """The side whose log-prob was recorded, where the two differ; unknown without a record."""
        recorded = self.recorded_logprob
        if recorded is None:
            return "unknown"
        if recorded == self.trainer_logprob:
            return "trainer"
        return "sampler" if recorded == self.sampler_logprob else "neither"

    def describe(self) -> str:
        """One paragraph, for an error message."""
        return f"{self._describe_token()} {self._describe_ops()}"

    def _describe_token(self) -> str:
        if self.token is None:
            return "Every log-prob is equal, but some intermediate numbers differ."
        recorded = {
            "unknown": "none was recorded",
            "trainer": "the trainer's was recorded",
            "sampler": "the sampler's was recorded",
            "neither": f"{_text(self.recorded_logprob)} was recorded",
        }[self.recorded_side]
        return (
            f"Token {self.token} is the first whose log-probs differ: "
            f"{_text(self.trainer_logprob)} by the trainer's packed forward, "
            f"{_text(self.sampler_logprob)} by the sampler's steps, and {recorded}."
        )

    def _describe_ops(self) -> str:
        if self.fed_token is None:
            return (
                "Both sides agree, so this model did not record it. The recording model had other "
                "weights, keys and values of older weights, or other rows in its batch on ops that "
                "are not invariant; or the logits were changed before the record, as by another "
                "temperature, or by top-p and top-k without their support."
            )
        if not self.ops:
            return (
                f"The sides differed for token {self.fed_token}, and agreed when run again: the "
                "result of some op changes from run to run."
            )
        first, last = self.ops[0], self.ops[-1]
        text = (
            f"The sides diverge at token {self.fed_token} in {first.call}: {first.num_unequal} of "
            f"{first.num_compared} numbers differ, by up to {first.max_abs_diff:.3g} "
            f"({_text(first.trainer)} in the trainer, {_text(first.sampler)} in the sampler)."
        )
        if last is not first:
            text += (
                f" {len(self.ops) - 1} later calls differ too; the last is {last.call}, by "
                f"{last.max_abs_diff:.3g}."
            )
        return text


def bisect(
    model: Model,
    token_ids: npt.NDArray[Any],
    *,
    is_sampled: npt.NDArray[np.bool_],
    temperature: float = 1.0,
    support: Ragged | None = None,
    recorded: npt.NDArray[np.float32] | None = None,
    company: Sequence[npt.NDArray[Any]] = (),
    page_size: int = 16,
    max_chunk_tokens: int = 512,
) -> Parting | None:
    """Runs one row as the trainer does and as the sampler does, and finds where they diverge.

    The trainer's side is one packed forward, with gradients enabled as in training. The sampler's
    side runs in inference mode over fresh pages: tokens that were not sampled (the prompt, and what
    was observed between two turns) are prefilled in chunks, and each sampled token is fed in a step
    of its own. Both use the model's ops.

    Returns the first token and op whose outputs differ, up to the first sampled token whose
    log-probs differ. None if nothing differs. -0.0 equals 0.0.

    token_ids, is_sampled: [T]. support: T entries, as in a `Sample`. recorded: [T] float32, as
    recorded while sampling; NaN is not compared. company: ids of other rows, which follow this row
    in the trainer's pack; the sampler decodes the last token of each in every step.

    Costs a rollout of the row alone and two packed forwards, and eight bytes of memory per token
    and op. Reuse of a prefix, preemption and an engine's resident rows are not replayed. Raises
    AlignmentError if the arrays are not parallel, if no token is sampled or token 0 is, and if the
    two sides call different ops.

    >>> parting = bisect(model, ids, is_sampled=mask, recorded=logprobs)    # doctest: +SKIP
    >>> if parting is not None: raise ContractError(parting.describe())     # doctest: +SKIP
    """
    targets = _targets(len(token_ids), is_sampled, support=support, recorded=recorded)
    device = model.head.device
    ids, *others = (
        torch.from_numpy(np.asarray(row, np.int64)).to(device) for row in (token_ids, *company)
    )
    row = _Row(
        ids[: targets[-1]],  # the last sampled id is never fed
        others,
        targets,
        ids[torch.from_numpy(targets).to(device)],
        temperature,
        None if support is None else Support.of(support.take(targets), device=device),
    )
    packed, trainer_T = _run_trainer(model, row, digests)
    packed_CT = torch.stack(packed.kept)
    sampler = _Sampler(model, row, page_size, max_chunk_tokens)
    token: int | None = None
    fed_token: int | None = None
    of_sampler: list[Tensor] = []
    sampler_logprob = math.nan
    for start, stop, n in _steps(targets, max_chunk_tokens):
        step, sampler_logprob = sampler.run(start, stop, n, digests)
        _check_calls(packed.calls, step.calls)
        is_unequal_CQ = packed_CT[:, start:stop] != torch.stack(step.kept)[:, len(others) :]
        if fed_token is None and is_unequal_CQ.any():
            ahead = int(is_unequal_CQ.any(0).nonzero()[0])
            fed_token = start + ahead
            keep = partial(at_token, token=len(others) + ahead)
            of_sampler = sampler.run(start, stop, n, keep)[0].kept
        is_unequal = bool(is_unequal_CQ[-1, -1])  # the log-prob
        if n is not None and recorded is not None and not np.isnan(recorded[stop]):
            is_unequal |= float(recorded[stop]) != sampler_logprob
        if is_unequal:
            token = stop
            break
    if token is None and fed_token is None:
        return None
    differences: tuple[OpDifference, ...] = ()
    if fed_token is not None:
        of_trainer = _run_trainer(model, row, partial(at_token, token=fed_token))[0].kept
        differences = _differences(packed.calls, of_trainer, of_sampler)
    found = None if token is None or recorded is None else float(recorded[token])
    return Parting(
        token=token,
        trainer_logprob=None if token is None else float(trainer_T[token - 1]),
        sampler_logprob=None if token is None else sampler_logprob,
        recorded_logprob=None if found is None or math.isnan(found) else found,
        fed_token=fed_token,
        ops=differences,
    )


def first_difference(
    model: Model,
    other: Model,
    token_ids: npt.NDArray[Any],
    *,
    around_other: Callable[[], AbstractContextManager[Model]] | None = None,
) -> tuple[int | None, tuple[OpDifference, ...]]:
    """(first token for which the ops of two models differ, the differences), over one packed
    forward of each; (None, ()) if nothing differs.

    The models must call the same ops: one without sinks, with other weights, in another dtype.
    around_other: makes the model that runs in place of `other`, for a model that is switched
    between two states. `OpDifference.trainer` is the number of `model`, `sampler` that of `other`.
    Raises AlignmentError if the models call different ops.
    """
    ids = torch.from_numpy(np.asarray(token_ids, np.int64)).to(model.head.device)
    positions = torch.arange(len(ids), device=ids.device)

    def run(of_other: bool, keep: Keep) -> Record:
        context = PackedContext.of([len(ids)], device=ids.device)
        if not of_other:
            return record(model, ids, positions, context, keep=keep)
        with nullcontext(other) if around_other is None else around_other() as twin:
            return record(twin, ids, positions, context, keep=keep)

    first, second = run(False, digests), run(True, digests)
    _check_calls(first.calls, second.calls)
    is_unequal_T = (torch.stack(first.kept) != torch.stack(second.kept)).any(0)
    if not is_unequal_T.any():
        return None, ()
    token = int(is_unequal_T.nonzero()[0])
    keep = partial(at_token, token=token)
    return token, _differences(first.calls, run(False, keep).kept, run(True, keep).kept)


# -- the two sides --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    ids: Tensor
    """[T]: the ids that are fed."""
    others: list[Tensor]
    """[B]: the ids of the other rows."""
    targets: Int64Array
    """[N]: places of the sampled tokens; each is predicted by the token before it."""
    target_ids: Tensor
    """[N]: ids of the sampled tokens."""
    temperature: float
    support: Support | None
    """Support of the N sampled tokens."""


def _run_trainer(model: Model, row: _Row, keep: Keep) -> tuple[Record, Tensor]:
    """(record that ends with `HEAD`, log-prob [T] of the token after each, NaN where unsampled).
    The record keeps the row's tokens, then those of the other rows."""
    rows = [row.ids, *row.others]
    lengths = [len(ids) for ids in rows]
    device = row.ids.device
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    predictors = torch.from_numpy(row.targets - 1).to(device)
    context = PackedContext.of(lengths, device=device)
    with torch.enable_grad(), saved_tensors_hooks(_drop, _drop):
        run = record(model, torch.cat(rows), positions, context, keep=keep)
        logprobs_N, _ = model.ops.log_probs(
            run.hidden.index_select(0, predictors),
            model.head,
            row.target_ids,
            temperature=row.temperature,
            support=row.support,
        )
    logprobs = torch.full((len(positions),), math.nan, device=device)
    logprobs[predictors] = logprobs_N.detach()
    return _with_head(run, logprobs, keep), logprobs[: len(row.ids)]


def _drop(_: object) -> Any:
    """Discards what a backward would read, since none follows."""
    return None


class _Sampler:
    """Steps over pages of its own. The other rows are prefilled and come before the row."""

    def __init__(self, model: Model, row: _Row, page_size: int, max_chunk_tokens: int) -> None:
        self._model, self._row = model, row
        self._rows = [*row.others, row.ids]
        counts = [math.ceil(len(ids) / page_size) for ids in self._rows]
        c, head = model.config, model.head
        shape = (c.num_layers, c.num_kv_heads, 1 + sum(counts), page_size, c.head_dim)
        self._keys, self._values = head.new_zeros(shape).detach(), head.new_zeros(shape).detach()
        # Page 0 stays zero: it fills up the tables of shorter rows.
        self._tables = np.zeros((len(counts), max(counts)), np.int64)
        first = 1
        for row, count in zip(self._tables, counts, strict=True):
            row[:count] = np.arange(first, first := first + count)
        with torch.inference_mode():
            for i, ids in enumerate(self._rows[:-1]):
                for start, stop in _chunks(0, len(ids), max_chunk_tokens):
                    model(*self._inputs([(i, start, stop)]))

    def run(self, start: int, stop: int, n: int | None, keep: Keep) -> tuple[Record, float]:
        """Feeds the row's [start, stop) and returns the log-prob of its n-th sampled token, which
        is at `stop`; NaN if n is None. The record keeps the tokens of the other rows, then the
        row's. May be repeated."""
        row, weight = self._row, self._model.head
        decoded = [(i, len(ids) - 1, len(ids)) for i, ids in enumerate(row.others)]
        with torch.inference_mode():
            inputs = self._inputs([*decoded, (len(decoded), start, stop)])
            run = record(self._model, *inputs, keep=keep)
            logprobs = torch.full((len(run.hidden),), math.nan, device=weight.device)
            if n is not None:
                kept = None
                if row.support is not None:
                    kept = row.support.mask(slice(n, n + 1), len(weight))
                drawn = [*range(len(decoded)), len(run.hidden) - 1]
                logits = self._model.ops.linear(run.hidden[drawn], weight)
                scores = self._model.ops.log_softmax(logits, temperature=row.temperature, kept=kept)
                logprobs[-1] = scores[-1, row.target_ids[n]]
            return _with_head(run, logprobs, keep), float(logprobs[-1])

    def _inputs(self, parts: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, PagedContext]:
        """(ids, positions, context) of a step. parts: (row, start, stop) each."""
        rows, starts, stops = zip(*parts, strict=True)
        ids = torch.cat([self._rows[i][start:stop] for i, start, stop in parts])
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in parts])
        tables = self._tables[list(rows)]
        context = PagedContext.of(self._keys, self._values, tables, starts, stops)
        return ids, positions.to(ids.device), context


def _steps(targets: Int64Array, max_tokens: int) -> Iterator[tuple[int, int, int | None]]:
    """(start, stop, n): the span to feed, and which sampled token follows it, if any."""
    for n, (first, target) in enumerate(pairwise([0, *targets.tolist()])):
        for start, stop in _chunks(first, target, max_tokens):
            yield start, stop, n if stop == target else None


def _chunks(first: int, end: int, max_tokens: int) -> Iterator[tuple[int, int]]:
    for start in range(first, end, max_tokens):
        yield start, min(start + max_tokens, end)


def _with_head(run: Record, logprobs: Tensor, keep: Keep) -> Record:
    return Record([*run.calls, HEAD], [*run.kept, keep((logprobs,))], run.hidden)


# -- comparison -----------------------------------------------------------------------------------


def _differences(
    calls: list[OpCall], of_trainer: list[Tensor], of_sampler: list[Tensor]
) -> tuple[OpDifference, ...]:
    """of_trainer, of_sampler: [C] of [W] float64, the numbers of one token."""
    found: list[OpDifference] = []
    for call, trainer, sampler in zip(calls, of_trainer, of_sampler, strict=True):
        is_equal = (trainer == sampler) | (trainer.isnan() & sampler.isnan())
        if not is_equal.all():
            diff = (trainer - sampler).abs().masked_fill(is_equal, 0.0)
            most = int(diff.argmax())  # the place of a NaN, if one side has it
            found.append(
                OpDifference(
                    call=call,
                    trainer=float(trainer[most]),
                    sampler=float(sampler[most]),
                    num_unequal=int((~is_equal).sum()),
                    num_compared=len(is_equal),
                )
            )
    return tuple(found)


# -- refusals and words ---------------------------------------------------------------------------


def _targets(
    size: int,
    is_sampled: npt.NDArray[np.bool_],
    *,
    support: Ragged | None,
    recorded: npt.NDArray[np.float32] | None,
) -> Int64Array:
    """Places of the sampled tokens."""
    for name, column in (("is_sampled", is_sampled), ("support", support), ("recorded", recorded)):
        if column is not None and len(column) != size:
            raise AlignmentError(
                f"bisect: {size} token_ids, and {len(column)} entries of {name}: one each."
            )
    targets = np.flatnonzero(is_sampled)
    if not len(targets):
        raise AlignmentError(
            "bisect: no token is marked as sampled, so there is nothing to compare."
        )
    if targets[0] == 0:
        raise AlignmentError("bisect: token 0 is marked as sampled, but nothing predicts it.")
    return targets


def _check_calls(trainer: list[OpCall], sampler: list[OpCall]) -> None:
    for i, (first, second) in enumerate(zip_longest(trainer, sampler)):
        if first != second:
            raise AlignmentError(
                f"bisect: call {i} of the model is {first or 'none'} in the packed forward, and "
                f"{second or 'none'} in the sampler's step. A model must call the same ops of "
                "lockstep.ops over either context."
            )


def _text(number: float | None) -> str:
    return "none" if number is None else f"{number:.9g}"  # tells any two float32 apart
