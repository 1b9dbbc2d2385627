"""Assertions for the tests of any trainer: ids, positions and statistics, by the doctor's checks.

Each takes lists, numpy arrays or torch tensors, and raises an AssertionError that names the token,
the position and both values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.doctor.causes import CAUSES
from lockstep.doctor.examine import examine
from lockstep.doctor.explain import HYPOTHESES, View, evidence_of, judge
from lockstep.doctor.facts.physical import contradictions
from lockstep.doctor.findings import Finding, Setting
from lockstep.doctor.rows import Rows
from lockstep.renderers.base import Renderer
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Message

MAX_MEAN_DIFF = 0.05
"""Largest mean |trainer - rollout| in nats of two engines with the same weights: five times the gap
of their 16-bit kernels."""
NEXT = "For all rows at once, and the share of each cause: `lockstep doctor DUMP`."
_SHOWN = 3
_VALUES = ("facts/repeated", "facts/finite", "facts/positive")


def assert_token_exact(
    row_ids: Any,
    sampled_turns: Sequence[Any],
    *,
    loss_mask: Any = None,
    tokenizer: Tokenizer | None = None,
    name: str = "row",
) -> None:
    """Asserts that the trained row contains each turn as the engine sampled it, in order.

    row_ids: [T] ids. sampled_turns: ids of each turn, as the engine returned them. loss_mask: [T];
    if given, it must be 1 for exactly these tokens. tokenizer: adds the text of ids to the message.

    >>> assert_token_exact([1, 2, 7, 8, 3, 9], [[7, 8], [9]], loss_mask=[0, 0, 1, 1, 0, 1])
    >>> assert_token_exact([1, 2, 7, 3, 9], [[7, 8], [9]])
    Traceback (most recent call last):
    AssertionError: row: turn 0 is not in the row as it was sampled. Token 1 of 2 was sampled as \
id 8; the row has id 3 at position 3. Train the ids that the engine returned. For all rows at \
once, and the share of each cause: `lockstep doctor DUMP`.
    """
    ids, mask = _ids(row_ids), None if loss_mask is None else _array(loss_mask)
    if mask is not None and len(mask) != len(ids):
        raise AssertionError(f"{name}: {len(ids)} ids and a loss mask of {len(mask)} entries.")
    is_sampled = np.zeros(len(ids), np.bool_)
    begin = 0
    for number, turn in enumerate(map(_ids, sampled_turns)):
        at, num_equal = _find(ids, turn, begin)
        if num_equal < len(turn):
            place = at + num_equal
            raise AssertionError(
                f"{name}: turn {number} is not in the row as it was sampled. Token {num_equal} of "
                f"{len(turn)} was sampled as {_token(turn, num_equal, tokenizer)}; the row has "
                f"{_token(ids, place, tokenizer)} at position {place}. Train the ids that the "
                f"engine returned. {NEXT}"
            )
        begin = at + len(turn)
        is_sampled[at:begin] = True
    other = [] if mask is None else np.flatnonzero(mask.astype(np.bool_) != is_sampled).tolist()
    if other:
        at = other[0]
        what, cause = "is trained but was not sampled", "observation_trained"
        if is_sampled[at]:
            what, cause = "was sampled but is not trained", "missing_final"
        raise AssertionError(
            f"{name}: {_token(ids, at, tokenizer)} at position {at} {what}, like "
            f"{len(other) - 1} others. {CAUSES[cause].remedy} {NEXT}"
        )


def assert_aligned(
    rollout_logprobs: Any,
    trainer_logprobs: Any,
    loss_mask: Any = None,
    *,
    row_ids: Any = None,
    max_mean_diff: float = MAX_MEAN_DIFF,
    name: str = "row",
) -> None:
    """Asserts that the two sides' log-probs at each index are of the same token.

    rollout_logprobs, trainer_logprobs: [T] of one row, or one such list per row; natural log, each
    at its own token's index (not at its predecessor's). loss_mask: the same shape; None compares
    all. row_ids: ids, for the message. max_mean_diff: largest allowed mean |d| in nats.

    >>> logprobs = [-2.0, -0.1, -1.5, -0.7, -3.0, -0.2, -1.1, -2.4]
    >>> assert_aligned(logprobs, logprobs)
    """
    rows = _rows(rollout_logprobs, trainer_logprobs, loss_mask, row_ids, name)
    has = frozenset({"rollout_logprobs", "trainer_logprobs"})
    found = examine(lambda: [rows], Setting(), has=has, only=_VALUES).findings
    if wrong := [finding for finding in found if finding.verdict == "differs"]:
        raise AssertionError("\n".join(_text_of(finding, rows) for finding in wrong) + f"\n{NEXT}")
    gap = np.abs(rows.gap)
    if np.isnan(gap).all():
        raise AssertionError(
            f"{name}: no token has a log-prob of both sides; {int(rows.loss_mask.sum())} are "
            "trained. Were the sampler's log-probs asked for?"
        )
    mean = float(np.nanmean(gap))
    if mean > max_mean_diff:
        if shift := _shift(rows):
            raise AssertionError(f"{shift}\n{NEXT}")
        raise AssertionError(
            f"the two sides are {mean:.3g} nats apart in the mean, at most {max_mean_diff:g} were "
            f"expected; no offset explains it. The worst: {_worst(rows)}. {NEXT}"
        )


def _shift(rows: Rows) -> str:
    """The offset of log-probs, if a shift explains most of the gap; empty otherwise."""
    view = View(rows=rows, setting=Setting())
    shift = HYPOTHESES["hypotheses/shifted"]
    judged = judge(view, shift, list(shift.predict(view)))
    if judged is None or judged.share < 0.5:
        return ""
    cause = CAUSES["shifted"]
    lines = [
        f"  {e.row}, positions {e.begin}-{e.end}: {e.note}"
        for e in evidence_of(view, judged, _SHOWN)
    ]
    lines += [f"  the worst: {_worst(rows)}", f"  {cause.remedy}"]
    return "\n".join([f"{cause.title} They are {judged.prediction.text}.", *lines])


def assert_prefix(shorter_ids: Any, longer_ids: Any, *, tokenizer: Tokenizer | None = None) -> None:
    """Asserts that the first ids are a prefix of the second, such as a row and the next prompt.

    >>> assert_prefix([1, 2], [1, 2, 3])
    """
    one, other = _ids(shorter_ids), _ids(longer_ids)
    at = first_difference(one.tolist(), other.tolist())
    if at < len(one):
        raise AssertionError(
            f"{at} of {len(one)} ids are a prefix; then {_token(one, at, tokenizer)} at position "
            f"{at} against {_token(other, at, tokenizer)}. Extend the ids turn by turn in place of "
            f"rendering the history again. {NEXT}"
        )


def assert_incremental(template: Any, messages: Sequence[Message | Mapping[str, Any]]) -> None:
    """Asserts that the template over a whole dialogue begins with the dialogue after each turn.

    template: a renderer of Lockstep, or a tokenizer of transformers with a chat template. messages:
    a dialogue with at least two replies. If this fails, make rows by extending ids, never from the
    last prompt, which does not contain the turns as they were sampled.
    """
    written = _by_renderer if isinstance(template, Renderer) else _by_template
    roles = [m.role if isinstance(m, Message) else m["role"] for m in messages]
    replies = [at for at, role in enumerate(roles) if role == "assistant"]
    if len(replies) < 2:
        raise AssertionError(
            f"{len(replies)} messages of the assistant: the template of one turn cannot change an "
            "earlier one. Give a dialogue with two replies."
        )
    tokenizer = template.tokenizer if isinstance(template, Renderer) else None
    for number, (at, then) in enumerate(pairwise(replies)):
        path = written(template, messages[: at + 1], has_reply=True)
        prompt = written(template, messages[:then], has_reply=False)
        try:
            assert_prefix(path, prompt, tokenizer=tokenizer)
        except AssertionError as error:
            raise AssertionError(
                f"the prompt of reply {number + 1} does not begin with the dialogue up to reply "
                f"{number}: {error}"
            ) from None


def _by_renderer(
    template: Renderer, messages: Sequence[Message | Mapping[str, Any]], *, has_reply: bool
) -> list[int]:
    """Ids up to where the next reply begins. has_reply: to the end of the last message, a reply."""
    given = [m if isinstance(m, Message) else Message.from_dict(m) for m in messages]
    if has_reply:
        return [*template.render(given[:-1]), *template.render_reply(given[-1])]
    return template.render(given)


def _by_template(
    template: Any, messages: Sequence[Message | Mapping[str, Any]], *, has_reply: bool
) -> Any:
    given = [m.to_dict() if isinstance(m, Message) else m for m in messages]
    found = template.apply_chat_template(given, add_generation_prompt=not has_reply, tokenize=True)
    return found["input_ids"] if isinstance(found, Mapping) else found


def assert_physical(metrics: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> None:
    """Asserts that the statistics of training do not contradict each other.

    metrics: one mapping per step, or one alone, by the names of docs/reference/metrics.md
    (mismatch/k1, train/clip_fraction) or the names of verl, TRL and slime for the same figures
    (doctor/facts/metric_names.toml). Rules without their metrics are skipped; if no rule can
    be tried, that is an AssertionError too.

    >>> assert_physical([{"train/pg_clipfrac": 0.02, "train/loss": 0.1}] * 8)
    """
    steps = (metrics,) if isinstance(metrics, Mapping) else tuple(metrics)
    finding = contradictions(Setting(step_metrics=steps))
    if finding.verdict == "not_checkable":
        raise AssertionError(f"{finding.measured}.")
    if finding.verdict == "differs":
        raise AssertionError(f"{finding.measured}. {CAUSES['unphysical'].remedy} {NEXT}")


# -- arguments as rows -----------------------------------------------------------------------------


def _array(values: Any) -> npt.NDArray[Any]:
    """An array of a list, an array or a tensor (on any device, with a gradient, of 16 bits)."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    return np.asarray(values)


def _ids(values: Any) -> npt.NDArray[np.int32]:
    found = _array(values)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise AssertionError(f"expected a list of ids, of one row or turn; found {values!r:.60}.")
    return found.astype(np.int32)


def _rows(rollout: Any, trainer: Any, mask: Any, ids: Any, name: str) -> Rows:
    num = [len(row) for row in _ragged(rollout)]
    for side, values in {"trainer": trainer, "loss mask": mask, "ids": ids}.items():
        found = num if values is None else [len(row) for row in _ragged(values)]
        for at, (one, other) in enumerate(zip_longest(num, found, fillvalue="none")):
            if one != other:
                raise AssertionError(
                    f"{name} {at}: {one} log-probs of the sampler, {other} of the {side}. Each "
                    "token needs one of each, at its own index."
                )
    total = sum(num)
    return Rows(
        row_ids=tuple(f"{name} {at}" for at in range(len(num))) if len(num) > 1 else (name,),
        offsets=np.cumsum([0, *num], dtype=np.int64),
        token_ids=(np.arange(total) if ids is None else _flat(ids)).astype(np.int32),
        loss_mask=(np.ones(total) if mask is None else _flat(mask)).astype(np.bool_),
        rollout_logprobs=_flat(rollout).astype(np.float32),
        trainer_logprobs=_flat(trainer).astype(np.float32),
    )


def _flat(values: Any) -> npt.NDArray[Any]:
    return np.concatenate([*_ragged(values), np.empty(0)])


def _ragged(values: Any) -> list[npt.NDArray[Any]]:
    """One array per row."""
    is_nested = len(values) and np.ndim(_array(values[0]))
    return [_array(row).reshape(-1) for row in (values if is_nested else [values])]


# -- where they differ -----------------------------------------------------------------------------


def _find(ids: npt.NDArray[np.int32], turn: npt.NDArray[np.int32], begin: int) -> tuple[int, int]:
    """(position in `ids` from `begin` on with the longest prefix of `turn`, its length)."""
    places = np.flatnonzero(ids[begin:] == turn[0]) + begin if len(turn) else []
    found = [(int(at), first_difference(turn.tolist(), ids[at:].tolist())) for at in places]
    return max(found, key=lambda place: place[1], default=(begin, 0))


def _token(ids: npt.NDArray[np.int32], at: int, tokenizer: Tokenizer | None) -> str:
    if at >= len(ids):
        return "nothing more"
    text = "" if tokenizer is None else f" ({tokenizer.decode([int(ids[at])])!r})"
    return f"id {int(ids[at])}{text}"


def _worst(rows: Rows) -> str:
    at = int(np.nanargmax(np.abs(rows.gap)))
    row, place = rows.where(at)
    assert rows.rollout_logprobs is not None and rows.trainer_logprobs is not None
    return (
        f"{row}, position {place}, id {int(rows.token_ids[at])}: sampler "
        f"{rows.rollout_logprobs[at]:.4g}, trainer {rows.trainer_logprobs[at]:.4g}"
    )


def _text_of(finding: Finding, rows: Rows) -> str:
    """The finding, its proof and its remedy."""
    cause = CAUSES[finding.cause]
    lines = [f"{cause.title} {finding.measured}."]
    for evidence in finding.evidence[:_SHOWN]:
        span = f"{evidence.begin}-{evidence.end}"
        lines.append(f"  {evidence.row}, positions {span}: {evidence.note}")
    if not np.isnan(rows.gap).all():
        lines.append(f"  the worst: {_worst(rows)}")
    return "\n".join([*lines, f"  {cause.remedy}"])
