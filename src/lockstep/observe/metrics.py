"""Every metric by name: its meaning, its unit, and its better direction.

People build dashboards on these names, so they are stable: tests of the loop look each name up
here. A pattern with `*` is a family; the task, the evaluation or the phase of a step gives its last
part.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from lockstep.errors import DataError
from lockstep.tables import tables_beside
from lockstep.types import TOKEN_KINDS, Group, Sample

_log = logging.getLogger(__name__)

Direction = Literal["up", "down", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One line of the table."""

    name: str
    """The name in metrics.jsonl; `*` matches one or more characters."""
    unit: str
    """"1" is a bare number; "share" lies in 0..1."""
    better: Direction
    """Direction of an improvement; "none" if neither is better."""
    meaning: str
    """One line, for people who did not write the code."""


_COPIES = {"mismatch_after/": "After the update: ", "mismatch_averaged/": "Averaged behaviour: "}
"""Room with the same metrics as mismatch/, but support_bias, which is measured once -> what begins
their meaning."""


def _read(tables: Mapping[str, Any]) -> list[Metric]:
    """The metrics of tables: one for each room, with an array for each metric."""
    return [
        Metric(name=f"{place}{name}", unit=unit, better=better, meaning=f"{begin}{meaning}")
        for room, rows in tables.items()
        for place, begin in {room: "", **(_COPIES if room == "mismatch/" else {})}.items()
        for name, (unit, better, meaning) in rows.items()
        if place == room or name != "support_bias"
    ]


METRICS = tuple(_read(tables_beside(__file__)))
"""All metrics, in reading order. An exact name wins over a family."""

_EXACT = {metric.name: metric for metric in METRICS if "*" not in metric.name}


StepMetric = Callable[[Sequence[Group], Sequence[Sample]], float]
_REGISTERED: dict[str, StepMetric] = {}


def step_metric(
    name: str, *, unit: str, better: Direction, meaning: str
) -> Callable[[StepMetric], StepMetric]:
    """Adds a metric of your own to every training step, as a decorator in a file for `--plugin`.

    The function gets the step's groups of trajectories and its training rows and returns a number.
    If it raises, the step has no such metric and the log says why. Raises DataError for a
    name that exists.
    """

    def register(function: StepMetric) -> StepMetric:
        if find_metric(name) is not None:
            raise DataError(f"the metric {name} exists already; choose another name.")
        _EXACT[name] = Metric(name=name, unit=unit, better=better, meaning=meaning)
        _REGISTERED[name] = function
        return function

    return register


def registered_metrics(groups: Sequence[Group], rows: Sequence[Sample]) -> dict[str, float]:
    """Computes the metrics that plugins registered, for one step."""
    found: dict[str, float] = {}
    for name, function in _REGISTERED.items():
        try:
            found[name] = float(function(groups, rows))
        except Exception as error:
            _log.warning("metric %s left out: %s: %s", name, type(error).__name__, error)
    return found


def find_metric(name: str) -> Metric | None:
    """The table's line for a name, with the family's `*` filled in; None if it has none.

    >>> find_metric("reward/correctness").unit
    'reward'
    """
    if name in _EXACT:
        return _EXACT[name]
    for metric in METRICS:
        if "*" in metric.name and fnmatchcase(name, metric.name.replace("*", "?*")):
            return replace(metric, name=name)
    return None


_HELD_OUT = re.compile(r"eval/(.+)/((?:mean|pass)(?:@\d+)?)")


def held_out_label(name: str) -> str | None:
    """How a held-out mean, pass rate or loss reads; None for every other name, its interval's
    included.

    >>> [held_out_label(f"eval/{n}") for n in ("greedy/mean@1", "sampled/pass@4", "greedy/failed")]
    ['greedy', 'sampled pass@4', None]
    """
    if name == "eval/loss":
        return "loss"
    match = _HELD_OUT.fullmatch(name)
    if match is None:
        return None
    split, statistic = match[1].replace("/", " "), match[2]
    return split if statistic in ("mean", "mean@1") else f"{split} {statistic}"


def is_step_row(row: Mapping[str, Any]) -> bool:
    """True if a row belongs to a training step. Rows between steps hold only held-out figures and
    the engine's counters."""
    return any(name != "step" and not name.startswith(("eval/", "engine/")) for name in row)


# -- parts of the tokens ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition of tokens by one of their numbers, in half-open ranges."""

    name: str
    labels: tuple[str, ...]
    starts: tuple[int, ...]
    """First number of each label's range, rising; numbers below the first belong to it."""


def _part(name: str, *starts: int, labels: Sequence[str] = ()) -> Partition:
    ends = [*starts[1:], None]
    made = [
        f"{a}+" if b is None else str(a) if b == a + 1 else f"{a}-{b - 1}"
        for a, b in zip(starts, ends, strict=True)
    ]
    return Partition(name, tuple(labels) or tuple(made), starts)


PARTS = (
    _part("age", 0, 1, 2, 4),
    _part("turn", 0, 1, 2, 3, 4, 8),
    _part("position", 0, 16, 64, 256, 1024, 4096, 16384),
    _part("kind", *range(len(TOKEN_KINDS)), labels=TOKEN_KINDS),
    _part("forced", 0, 1, labels=("no", "yes")),
)
"""age: updates between the policy that sampled and the one in training (0: what differs is
numerics, above: staleness too). turn: of the episode. position: of the token in its row. kind: see
TOKEN_KINDS. forced: probability under the sampler over 0.99."""
