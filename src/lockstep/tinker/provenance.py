"""Compares the tokens of a datum with the drawn sequences: the ids, their order, their place in the
context, and the log-probs, bit for bit.

The server remembers each sequence. Spans of a client say which sequence a token comes from; without
spans the sequence is found by its content. A difference gets the name that the doctor has for its
cause. A token must have been drawn only if a policy loss trains it, with an advantage: other losses
may have any context, as in distillation, and only the ids of their spans are compared.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lockstep.doctor.causes import CAUSES
from lockstep.doctor.facts.values import rounded
from lockstep.tinker.requests import TARGETS, Datum, Span
from lockstep.types import Float32Array, Int32Array

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

MAX_SHIFT = 4  # longest shift of tokens or log-probs that is tried
NO_POLICY_LOSSES = ("cross_entropy", "custom")
MAX_CANDIDATES = 256  # latest replies to one prompt that a datum without spans is compared with
MIN_LINKS = 3  # equal log-probs that tell one reply to a prompt from all others
FORCED = -0.01  # log-probs above it are of tokens that every model draws, with few values
GRIDS = ("float16", "bfloat16", *"23456")  # dtypes and decimals that programs round to


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """One sampled sequence, as it was drawn."""

    prompt_ids: Int32Array
    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    """Version of the weights that drew each token."""


Lookup = Callable[[str], Drawn | None]
"""sequence_id -> sequence; None if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Provenance:
    """Where the trained tokens of a datum come from."""

    status: Literal["drawn", "differs", "foreign", "unknown"]
    """foreign: a policy loss would train a token that no known sequence drew. unknown: the datum
    does not claim to be drawn, or names sequences that are not known."""
    versions: Int32Array
    """[N] int32: version of the weights that drew each target, -1 where none is known."""
    cause: str = ""
    """Name of the doctor's cause of a difference; empty if it has none."""
    position: int = -1
    """First target that differs or is foreign, or first input if only that one differs."""
    text: str = ""
    """The finding in words."""


class _Difference(Exception):
    """The first place where a datum differs from the drawn sequence."""

    def __init__(self, position: int, cause: str, text: str) -> None:
        super().__init__(text)
        self.position, self.cause = position, cause


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Neighbouring targets that come from one sequence."""

    sequence_id: str
    drawn: Drawn
    begin: int
    """First target."""
    offset: int
    """First token, counted within the reply."""
    length: int

    @property
    def here(self) -> slice:
        """Its targets."""
        return slice(self.begin, self.begin + self.length)

    @property
    def recorded(self) -> Float32Array:
        """[length] recorded log-probs; fewer if the reply is shorter."""
        return self.drawn.logprobs[self.offset : self.offset + self.length]


class DrawnIndex:
    """Finds sequences by the prompt that they were drawn after; 16 bytes and an id for each.

    >>> index = DrawnIndex()
    >>> index.add("a", np.array([1, 2], np.int32))
    >>> list(index.find(np.array([1, 2, 3], np.int32)))
    [(2, ['a'])]
    """

    def __init__(self, *, max_sequences: int = 1_000_000) -> None:
        """The oldest sequences are forgotten first."""
        self.max_sequences = max_sequences
        self._prompts: OrderedDict[str, tuple[int, bytes]] = OrderedDict()
        """Sequence -> length and digest of its prompt."""
        self._sequences: dict[bytes, list[str]] = {}
        self._num_by_length: Counter[int] = Counter()

    def add(self, sequence_id: str, prompt_ids: Int32Array) -> None:
        digest = hashlib.blake2b(_bytes(prompt_ids), digest_size=16).digest()
        self._prompts[sequence_id] = len(prompt_ids), digest
        self._sequences.setdefault(digest, []).append(sequence_id)
        self._num_by_length[len(prompt_ids)] += 1
        while len(self._prompts) > self.max_sequences:
            oldest, (length, digest) = self._prompts.popitem(last=False)
            self._sequences[digest].remove(oldest)
            if not self._sequences[digest]:
                del self._sequences[digest]
            self._num_by_length[length] -= 1
            if not self._num_by_length[length]:
                del self._num_by_length[length]

    def find(self, ids: Int32Array) -> Iterator[tuple[int, list[str]]]:
        """(tokens of the prompt, sequences) for each known prompt that `ids` begin with, shortest
        first."""
        state, done = hashlib.blake2b(digest_size=16), 0
        for length in sorted(self._num_by_length):
            if length > len(ids):
                return
            state.update(_bytes(ids[done:length]))
            done = length
            if found := self._sequences.get(state.copy().digest()):
                yield length, found


def trace_datum(
    number: int,
    datum: Datum,
    lookup: Lookup,
    *,
    loss: str = "importance_sampling",
    index: DrawnIndex | None = None,
) -> Provenance:
    """Compares a datum with the drawn sequences.

    number: the datum's, for the text. loss: the loss that trains it. index: finds the sequences of
    a datum without spans, unless several fit equally.
    """
    targets = datum.inputs[TARGETS]
    versions = np.full(len(targets), -1, np.int32)
    if targets.ndim != 1:
        return Provenance(status="unknown", versions=versions, text="targets are [N, K]")
    is_policy = loss not in NO_POLICY_LOSSES and "logprobs" in datum.inputs
    is_trained = datum.inputs.get("advantages", np.ones(len(targets))) != 0
    has_spans = bool(datum.input_spans or datum.loss_spans)
    unknown, runs, others = "", list[_Run](), list[_Run]()
    try:
        if has_spans:
            unknown = _read_spans(datum, lookup, runs)
        elif is_policy and index is not None:
            for run in _find_runs(datum, lookup, index, is_trained):
                (runs if _has_logprobs_of(datum, run, is_trained) else others).append(run)
        if is_policy:
            _compare_runs(datum, runs, is_trained)
        is_foreign = is_trained & is_policy
        for run in runs:
            is_foreign[run.here] = False
        at = _first(is_foreign)
        if at is not None and has_spans and not unknown:
            text = "it is trained, and its span says that it was part of a prompt"
            raise _Difference(at, "observation_trained", text)
    except _Difference as found:
        status, at, cause, text = "differs", found.position, found.cause, _sentence(number, found)
    else:
        status, cause, text = "drawn", "", ""
        if at is not None:
            why = unknown or _why_foreign(datum, at, others)
            status, text = "foreign", f"datum {number}, target {at}: it is trained, and {why}."
        elif not is_policy and (unknown or not has_spans):
            status, text = "unknown", f"datum {number}: {unknown}." if unknown else ""
    for run in runs:
        of_run = run.drawn.versions[run.offset : run.offset + run.length]
        versions[run.begin : run.begin + len(of_run)] = of_run
    position = -1 if at is None else at
    return Provenance(status=status, versions=versions, cause=cause, position=position, text=text)


def _read_spans(datum: Datum, lookup: Lookup, runs: list[_Run]) -> str:
    """Adds the sampled targets to `runs`. Returns a text about the first unknown sequence, or "".
    Raises _Difference for ids that differ from the sequence that a span names."""
    unknown, targets = "", datum.inputs[TARGETS]
    for ids, spans in ((targets, datum.loss_spans), (datum.token_ids, datum.input_spans)):
        begin = 0
        for span in spans:
            drawn, here = lookup(span.sequence_id), ids[begin : begin + span.length]
            is_sampled = span.kind == "sampled"
            if drawn is None:
                unknown = unknown or f"the sequence {span.sequence_id!r} was not drawn here"
            elif ids is not targets or is_sampled or here.any():
                # Some programs leave the targets of prompts, which nobody trains, at 0.
                if is_sampled and ids is targets:
                    runs.append(_Run(span.sequence_id, drawn, begin, span.offset, span.length))
                _compare_span(here, begin, span, drawn)
            begin += span.length
    return unknown


def _why_foreign(datum: Datum, at: int, others: list[_Run]) -> str:
    """others: sequences of the same ids, which are not meant."""
    for run in others:
        if 0 <= at - run.begin < run.length:
            given, recorded = datum.inputs["logprobs"][at], run.drawn.logprobs[at - run.begin]
            return (
                f"{run.sequence_id} drew the same ids, but with other log-probs: {recorded:.6g} "
                f"was recorded, and {given:.6g} came"
            )
    return "no sequence is known that drew it after the tokens before it"


# -- comparing -------------------------------------------------------------------------------------


def _compare_span(ids: Array, begin: int, span: Span, drawn: Drawn) -> None:
    """Raises _Difference unless the ids equal the part of the sequence that the span names."""
    is_sampled = span.kind == "sampled"
    source = drawn.token_ids if is_sampled else drawn.prompt_ids
    expected = source[span.offset : span.offset + span.length]
    size = min(len(ids), len(expected))
    at = _first(ids[:size] != expected[:size])
    part = f"of the {'reply' if is_sampled else 'prompt'} of {span.sequence_id}"
    if at is not None:
        whole = np.concatenate([drawn.prompt_ids, drawn.token_ids])
        start = span.offset + (len(drawn.prompt_ids) if is_sampled else 0)
        moved = _shift_of(ids, whole, start)
        text = f"it is {int(ids[at])}, and token {span.offset + at} {part} is {int(expected[at])}"
        if moved:
            text += f"; the ids were taken {abs(moved)} {'later' if moved > 0 else 'earlier'}"
        cause = "boundary" if moved else "reencoded" if is_sampled else "rerendered"
        raise _Difference(begin + at, cause, text)
    if len(ids) > len(expected):
        text = f"its span ends after token {span.offset + span.length - 1} {part}, which has only "
        text += f"{len(source)} tokens"
        raise _Difference(begin + size, "after_stop" if is_sampled else "boundary", text)


def _compare_runs(datum: Datum, runs: list[_Run], is_trained: Bools) -> None:
    """Raises _Difference for the first run that differs, or else for a sequence whose last tokens
    are in no run."""
    for run in runs:
        _compare_run(datum, run, is_trained[run.here])
    last_runs = {run.sequence_id: run for run in runs}.values()
    for run in sorted(last_runs, key=lambda run: run.begin):
        missing = len(run.drawn.token_ids) - run.offset - run.length
        if missing > 0:
            text = f"{run.sequence_id} drew {missing} more tokens here, which the datum leaves out"
            at = min(run.begin + run.length, len(is_trained) - 1)
            raise _Difference(at, "missing_final", text)


def _compare_run(datum: Datum, run: _Run, is_trained: Bools) -> None:
    """Compares the context, the ids and the log-probs of one run of sampled targets."""
    drawn, here, recorded, begin = run.drawn, run.here, run.recorded, run.begin
    context = np.concatenate([drawn.prompt_ids, drawn.token_ids[: run.offset]])
    _compare_context(datum.token_ids[: begin + 1], context, run)
    ids = datum.inputs[TARGETS][here]
    expected = drawn.token_ids[run.offset :]
    at = _first(ids[: len(expected)] != expected[: len(ids)])
    if at is not None:
        text = f"it is {int(ids[at])}, and {run.sequence_id} drew {int(expected[at])} here"
        cause = "reencoded" if is_trained[at:].any() else "missing_final"
        raise _Difference(begin + at, cause, text)
    # Its inputs are its targets, one place later: the next targets are drawn after them.
    fed = datum.token_ids[begin + 1 : begin + run.length]
    at = _first(fed != ids[: len(fed)])
    if at is not None:
        text = f"it is {int(ids[at])}, and the input after it is {int(fed[at])}"
        raise _Difference(begin + at, "boundary", text)
    logprobs = datum.inputs["logprobs"][here]
    at = _first(is_trained & (logprobs.view(np.int32) != recorded.view(np.int32)))
    if at is not None:
        text = (
            f"its log-prob is {logprobs[at]:.6g}, and {recorded[at]:.6g} was recorded when "
            f"{run.sequence_id} drew it"
        )
        cause = _cause_of_logprobs(logprobs[is_trained], recorded, is_trained)
        raise _Difference(begin + at, cause, text)


def _compare_context(given: Int32Array, context: Array, run: _Run) -> None:
    """Raises _Difference unless the inputs before a run are the ids that it was drawn after."""
    size = min(len(context), len(given))
    at = _first(given[:size] != context[:size])
    if at is not None:
        text = f"input {at} is {int(given[at])}, and {run.sequence_id} was drawn after "
        text += f"{int(context[at])} there"
        is_padded = len(given) > len(context) and len(set(given[: -len(context)].tolist())) == 1
        is_padded = is_padded and np.array_equal(given[-len(context) :], context)
        raise _Difference(min(at, run.begin), "padding" if is_padded else "rerendered", text)
    if len(context) != len(given):
        text = f"{run.sequence_id} drew this reply after {len(context)} tokens, here it has "
        text += f"{len(given)} before it"
        is_repeated = np.array_equal(given, np.tile(context, 2))
        raise _Difference(run.begin, "duplicated_prompt" if is_repeated else "boundary", text)


def _cause_of_logprobs(given: Array, recorded: Array, is_trained: Bools) -> str:
    """The defect of [M] log-probs at the trained places of [length] recorded ones."""
    places = np.flatnonzero(is_trained)
    expected = recorded[places]
    is_other = given != expected
    if not np.isfinite(given).all():
        return "nonfinite"
    if (given[is_other] == 0).all():
        return "fillers"
    for shift in _shifts():
        inside = (places + shift >= 0) & (places + shift < len(recorded))
        if inside.sum() >= MIN_LINKS and np.array_equal(
            given[inside], recorded[places[inside] + shift]
        ):
            return "shifted"
    for other in (np.exp(expected), -expected, expected / np.log(2), expected / np.log(10)):
        if np.allclose(given, other, rtol=1e-4, atol=0):
            return "positive"
    bound = given[is_other]
    if (bound == bound[0]).all() and len(bound) >= MIN_LINKS:
        return "clamped"
    is_rounded = any(np.array_equal(given, rounded(expected, grid)) for grid in GRIDS)
    return "quantised" if is_rounded else ""


# -- finding ---------------------------------------------------------------------------------------


def _find_runs(datum: Datum, lookup: Lookup, index: DrawnIndex, is_trained: Bools) -> list[_Run]:
    """The sequences that a datum without spans was made of, by their prompts in its own tokens:
    replies that drew every sampled target, or else the best fit to each prompt."""
    logprobs = datum.inputs["logprobs"]
    # Others are observations, whose log-probs are 0.0 by custom: they would fit a certain token's.
    is_sampled = (logprobs != 0) | (datum.inputs.get("advantages", logprobs) != 0)
    prompts = [(length - 1, names) for length, names in index.find(datum.token_ids)]
    runs = _exact_runs(datum, prompts, lookup, np.stack([is_trained, is_sampled]))
    if runs is not None:
        return runs
    runs, free = [], 0
    for begin, names in prompts:
        if begin < free:
            continue  # within a reply: a shorter prompt was known, and so is its reply
        if (run := _best_fit(datum, begin, names, lookup, is_sampled)) is not None:
            runs.append(run)
            free = begin + run.length
    return runs


def _exact_runs(
    datum: Datum, prompts: list[tuple[int, list[str]]], lookup: Lookup, places: Bools
) -> list[_Run] | None:
    """Whole replies with the datum's ids and log-probs that together drew all trained targets, or
    all sampled ones; None if there are none. A reply to a prompt may begin another reply to it, or
    a longer prompt: the replies that drew the most targets win, then the shortest, then the latest.

    prompts: (first target after it, sequences), shortest first. places: [2, N] trained, sampled.
    """
    targets, logprobs = datum.inputs[TARGETS], datum.inputs["logprobs"]
    # [N + 1, 3]: targets from each one on that are trained, that are sampled, and all, negative.
    left = np.vstack([*places, np.full(len(targets), -1)])[:, ::-1].cumsum(1).T[::-1]
    left = np.vstack([left, np.zeros(3, np.int64)])
    # (first target, number of targets drawn from there on, replies that drew them), last first.
    tails: list[tuple[int, tuple[int, ...], list[_Run]]] = [(len(targets), (0, 0, 0), [])]
    for begin, names in reversed(prompts):
        _, drawn_here, runs = tails[-1]
        for name in reversed(names):
            if drawn_here[:2] == tuple(left[begin, :2]) and (
                not runs or places[1, runs[0].begin + runs[0].length - 1]
            ):
                break
            if (drawn := lookup(name)) is None:
                continue
            end = begin + len(drawn.token_ids)
            here = slice(begin, end)
            if (
                not np.array_equal(targets[here], drawn.token_ids)
                or (places[1, here] & (logprobs[here] != drawn.logprobs)).any()
            ):
                continue
            _, after, later = next(tail for tail in reversed(tails) if tail[0] >= end)
            found = tuple(map(int, left[begin] - left[end] + after))
            if found > drawn_here:
                run = _Run(name, drawn, begin, 0, end - begin)
                drawn_here, runs = found, [run, *later]
        tails.append((begin, drawn_here, runs))
    _, drawn_here, runs = tails[-1]
    num_trained, num_sampled, _ = drawn_here
    is_whole = num_sampled == left[0, 1] or num_trained == left[0, 0] > 0
    return runs if is_whole else None


def _best_fit(
    datum: Datum, begin: int, names: list[str], lookup: Lookup, is_sampled: Bools
) -> _Run | None:
    """The one of some replies to a prompt that a datum has from target `begin` on, with a defect:
    the same ids up to the end of the sampled targets, or else the most of the log-probs. None if
    two fit equally."""
    targets, logprobs = datum.inputs[TARGETS], datum.inputs["logprobs"]
    num_sampled = _first(~is_sampled[begin:])
    fitting: list[tuple[tuple[bool, int, bool], _Run]] = []
    for name in names[: -MAX_CANDIDATES - 1 : -1]:  # the latest first
        drawn = lookup(name)
        if drawn is None:
            continue
        size = min(len(drawn.token_ids), len(targets) - begin)
        here = slice(begin, begin + size)
        given, places = logprobs[here], is_sampled[here]
        run = _Run(name, drawn, begin, 0, size)
        has_ids = np.array_equal(targets[here], drawn.token_ids[:size])
        is_equal = given == drawn.logprobs[:size] if has_ids else np.isin(given, drawn.logprobs)
        links, most = int((is_equal & places).sum()), int(places.sum())
        if most and (has_ids or links >= min(MIN_LINKS, most)):
            is_long = size >= (len(targets) - begin if num_sampled is None else num_sampled)
            fitting.append(((has_ids and is_long, links, has_ids), run))
    fitting.sort(key=lambda found: found[0], reverse=True)
    if not fitting:
        return None
    (fit, best), *others = fitting
    rivals = [run.drawn.token_ids for other, run in others if other == fit]
    is_clear = all(np.array_equal(ids, best.drawn.token_ids) for ids in rivals)
    return best if is_clear else None


def _has_logprobs_of(datum: Datum, run: _Run, is_trained: Bools) -> bool:
    """True if the log-probs of a run that was found by its ids belong to the sequence, unchanged or
    with a known defect. Another server may have drawn the same ids."""
    given, places, recorded = datum.inputs["logprobs"][run.here], is_trained[run.here], run.recorded
    telling = given[given < FORCED]
    links = int(np.isin(telling, recorded).sum())
    if len(telling) and links >= min(MIN_LINKS, len(telling)):
        return True
    is_equal = np.array_equal(given[places], recorded[: len(given)][places])
    return is_equal or bool(_cause_of_logprobs(given[places], recorded, places))


def _first(found: Bools) -> int | None:
    """Index of the first True."""
    return int(np.argmax(found)) if found.any() else None


def _shift_of(ids: Array, whole: Array, start: int) -> int:
    """Number of places that `ids` have moved from whole[start:]; 0 if they have not."""
    for shift in _shifts():
        first, last = max(0, start + shift), start + shift + len(ids)
        there = whole[first:last]
        here = ids[first - (start + shift) :][: len(there)]
        if len(there) >= MIN_LINKS and np.array_equal(here, there):
            return shift
    return 0


def _shifts() -> Iterator[int]:
    """Nearest first."""
    for distance in range(1, MAX_SHIFT + 1):
        yield from (distance, -distance)


def _sentence(number: int, difference: _Difference) -> str:
    text = f"datum {number}, target {difference.position}: {difference}."
    if cause := CAUSES.get(difference.cause):
        return f"{text} {cause.title} {cause.remedy} ({difference.cause})"
    return f"{text} It was changed or computed again; train the recorded values."


def _bytes(ids: Int32Array) -> bytes:
    return np.ascontiguousarray(ids, np.int32).tobytes()
