"""Judges the metrics of a run: the mismatch of sampler and trainer, and the health of its learning.

`TRIGGERS` is the only definition of the silent obstacles to learning. The console, metrics.jsonl,
the trackers, the report and the end of a run all show what `judge` and `spells` find with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from lockstep.observe.metrics import is_step_row
from lockstep.tables import tables_beside

Architecture = Literal["dense", "moe"]
Level = Literal["unmeasured", "ok", "notice", "warning", "critical"]
LEVELS: tuple[Level, ...] = get_args(Level)

WARNING_LIMIT = 0.01
CRITICAL_LIMIT = 0.1
"""Limits on max(|k1|, k2, k3). Above the first the gradient is visibly off-policy; above the second
runs collapse. k1 alone nearly cancels when log-probs are shifted by a token: k2 and k3 do not."""

ONE_PROCESS_BAND = (0.0, 1e-11)
"""k3 where sampler and trainer are one process over one set of ops: float32 noise at most."""
DENSE_BAND = (1e-5, 1e-3)
"""k3 of a dense model across two engines."""
MOE_BAND = (1e-3, 1e-1)
"""k3 of a mixture of experts across two engines: a router near a tie flips some tokens."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """The verdict on one row of metrics."""

    level: Level
    """ok: nothing to do. notice: below the limits, but above the normal band of this set-up."""
    value: float
    """max(|k1|, k2, k3); NaN if unmeasured."""
    text: str
    """One line with the value, the normal values, and the next step if it is not normal."""
    name: str = ""
    """Name of the trigger; "" for the mismatch."""
    label: str = ""
    """The same in two or three words, for the line of a step."""


def mismatch(metrics: Mapping[str, Any]) -> float:
    """max(|k1|, k2, k3) of a metrics row; NaN if one of them is missing or not a number."""
    k1, k2, k3 = (metrics.get(f"mismatch/{name}", math.nan) for name in ("k1", "k2", "k3"))
    return math.nan if math.isnan(k1 + k2 + k3) else max(abs(k1), k2, k3)


def normal_band(architecture: Architecture, *, is_one_process: bool) -> tuple[float, float]:
    """The k3 that is normal: (low, high)."""
    if is_one_process:
        return ONE_PROCESS_BAND
    return MOE_BAND if architecture == "moe" else DENSE_BAND


def mismatch_alarm(
    metrics: Mapping[str, Any], architecture: Architecture, *, is_one_process: bool = False
) -> Alarm:
    """Judges a metrics row's mismatch before the update. If seats have policies of their own, the
    worst seat counts.

    is_one_process: sampler and trainer run in one process over the same ops (the embedded engine).

    >>> row = {"mismatch/k1": 0.001, "mismatch/k2": 1.18, "mismatch/k3": 676.0}
    >>> mismatch_alarm(row, "dense").level  # log-probs shifted by one token: k1 looks harmless
    'critical'
    """
    alarms: list[Alarm] = []
    for seat, row in policy_rows(metrics).items():
        alarm = _judged(row, architecture, is_one_process=is_one_process)
        alarms.append(replace(alarm, text=f"{seat}: {alarm.text}") if seat else alarm)
    return max(alarms, key=lambda alarm: LEVELS.index(alarm.level))


def policy_rows(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The row of the run's policy, under "", and the row of each seat with a policy of its own.

    >>> policy_rows({"step": 3, "policy/second/train/lr": 0.1})["second"]
    {'train/lr': 0.1}
    """
    rows: dict[str, dict[str, Any]] = {"": dict(metrics)}
    for name, value in metrics.items():
        if name.startswith("policy/"):
            _, seat, of_seat = name.split("/", 2)
            rows.setdefault(seat, {})[of_seat] = value
    return rows


def _judged(
    metrics: Mapping[str, Any], architecture: Architecture, *, is_one_process: bool
) -> Alarm:
    value, num_broken = mismatch(metrics), metrics.get("mismatch/nonfinite_tokens", 0)
    is_measured = "mismatch/k3" in metrics and metrics.get("mismatch/compared_tokens") != 0
    if num_broken > 0 or (is_measured and not math.isfinite(value)):
        text = f"mismatch: {num_broken:g} tokens without a finite log-prob; none is trained on."
        return Alarm("critical", value, text)
    if not is_measured:
        return Alarm("unmeasured", math.nan, "mismatch: not measured in this step.")
    high = normal_band(architecture, is_one_process=is_one_process)[1]
    where = "in one process" if is_one_process else f"for {architecture} across engines"
    normal = f"normal {where}: k3 up to {high:.0e}"
    age = metrics.get("staleness/max", 0)
    if age > 0:  # the policy itself has moved: no band says by how much
        high = math.inf
        normal = f"tokens are up to {age:g} update(s) old; mismatch/by_age/0 is the numerics alone"
    shown = f"mismatch {value:.2g}"
    if value > CRITICAL_LIMIT:
        advice = "Training on it is likely to collapse: stop, and look at the report."
        return Alarm("critical", value, f"{shown} is above {CRITICAL_LIMIT:g} ({normal}). {advice}")
    if value > WARNING_LIMIT:
        advice = "The report's trajectories, sorted by mismatch, show where."
        return Alarm("warning", value, f"{shown} is above {WARNING_LIMIT:g} ({normal}). {advice}")
    is_normal = metrics["mismatch/k3"] <= high
    return Alarm("ok" if is_normal else "notice", value, f"{shown} ({normal}).")


# ---------------------------------------------------------------------------------------------
# Health: silent obstacles to learning
# ---------------------------------------------------------------------------------------------

SOLVED = 0.1
"""Tasks are solved where the mean reward is as close as this to the highest of the run, as a share
of the range of its rewards."""
NUM_NAMES = 3
"""Tools that one line names."""
WINDOW = 10
"""Number of steps for measuring shares: one odd step is a tenth of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """One way to lose the learning without an error: a table of triggers.toml."""

    name: str
    """The metric `health/NAME` is 1 while it holds."""
    label: str
    count: str
    """Metric that is summed over the window. `*` matches the name of a tool: each is judged."""
    of: str = ""
    """Metric that it is a share of; "" takes the last value of `count` as it is."""
    above: float = math.inf
    """It holds from this share on."""
    below: float = -math.inf
    """It holds up to this share."""
    because: str
    """Reason of the threshold."""
    evidence: float = 1
    """Least sum of `of` in the window."""
    num_steps: int = 2
    """Steps of the window that must show it, fewer only where the run ends before."""
    is_about_rewards: bool = False
    """It does not hold once the tasks are solved: equal rewards are then the aim."""
    unless: tuple[str, ...] = ()
    """Triggers that are its cause: it is not said beside them."""
    says: str
    """Says what happens. %(NAME)s is a setting, or one of the words of `_alarm`."""
    settings: tuple[str, ...]
    """The setting that would change it, with a value: the first of them that the run has."""


_TABLES = tables_beside(__file__, "triggers.toml")
TRIGGERS = tuple(Trigger(name=name, **row) for name, row in _TABLES.items())
"""The table of `triggers.toml`. Guard: tests/cpu/observe/test_health.py."""


@dataclass(slots=True)
class Health:
    """The triggers over the last steps of one run.

    >>> health = Health({"agent.max_turn_tokens": 64})
    >>> row = {"train/loss": 0.1, "episodes/total": 64, "episodes/cut/max_turn_tokens": 44}
    >>> health.take(row), health.take(row)
    ({'health/alarms': 0}, {'health/alarms': 1, 'health/cut_by_max_turn_tokens': 1})
    >>> print(health.alarms[0].text)
    88 of 128 episodes had a turn cut by agent.max_turn_tokens=64. Set agent.max_turn_tokens=128.
    """

    settings: Mapping[str, Any]
    """The run's settings, by dotted key."""
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    """Trigger -> an example in words, such as the text of an error."""
    alarms: list[Alarm] = field(default_factory=list[Alarm])
    """Current alarms."""
    _window: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _rewards: tuple[float, float] = (math.inf, -math.inf)
    """(lowest, highest) of the run."""

    def take(self, row: Mapping[str, Any], *, is_last: bool = False) -> dict[str, float]:
        """Judges the run after a further step. Returns `health/...`. is_last: no later step can
        confirm this one."""
        self._window.append(row)
        low, high = self._rewards
        low = min(low, row.get("reward/min", low))
        high = max(high, row.get("reward/max", high))
        self._rewards = low, high
        is_solved = row.get("reward/mean", low) > high - SOLVED * (high - low)
        found: dict[str, Alarm] = {}
        for trigger in TRIGGERS:
            least = min(trigger.num_steps, len(self._window) if is_last else WINDOW)
            names = {""}
            if "*" in trigger.of:
                known = trigger.of.removesuffix("*")
                keys = {key for row in self._window for key in row if key.startswith(known)}
                names = {key.removeprefix(known) for key in keys}
            sums = {name: _sums(trigger, name, self._window) for name in sorted(names)}
            held = {name: total for name, (total, num_steps) in sums.items() if num_steps >= least}
            if held and not (is_solved and trigger.is_about_rewards):
                found[trigger.name] = self._alarm(trigger, held)
        causes = {trigger.name: trigger.unless for trigger in TRIGGERS}
        self.alarms = [each for name, each in found.items() if not found.keys() & {*causes[name]}]
        return {"health/alarms": len(self.alarms), **{f"health/{a.name}": 1 for a in self.alarms}}

    def _alarm(self, trigger: Trigger, held: Mapping[str, tuple[float, float]]) -> Alarm:
        """held: tool, or "" -> (count, of) over the window."""
        count, of = (sum(pair[at] for pair in held.values()) for at in (0, 1))
        value, more = count / of, len(held) - NUM_NAMES
        known = [each for each in trigger.settings if each.partition("=")[0] in self.settings]
        setting = known[0] if known else trigger.settings[-1]
        now = self.settings.get(setting.partition("=")[0])
        size = float(now) if isinstance(now, int | float) else math.nan
        replaced = sum(row.get("signal/replaced", 0) for row in self._window)
        words = {
            **self.settings,
            "names": ", ".join([*held][:NUM_NAMES]) + (f" and {more} more" if more > 0 else ""),
            "count": f"{count:,.0f}",
            "of": f"{of:,.0f}",
            "share": f"{100 * value:.0f} %",
            "value": f"{value:.3g}",
            "mean": f"{self._window[-1].get('reward/mean', math.nan):.3g}",
            "replaced": f"{replaced:,.0f}",
            "now": f"{size:g}",
            "twice": f"{2 * size:g}",
            "usual": f"{size / (value or math.nan):.1g}",
        }
        reason = self.reasons.get(trigger.name, "").rstrip(".")
        example = f", for example: {reason}" if reason else ""
        text = f"{trigger.says % words}{example}. Set {(setting % words).rstrip('.')}."
        share = f" {100 * value:.0f} %" if value and trigger.of else ""
        return Alarm("warning", value, text, name=trigger.name, label=f"{trigger.label}{share}")


def _sums(
    trigger: Trigger, tool: str, window: Sequence[Mapping[str, Any]]
) -> tuple[tuple[float, float], int]:
    """((count, of) over the window, number of its steps that show the trigger); no steps if the
    window as a whole does not."""
    count, of = (name.replace("*", tool) for name in (trigger.count, trigger.of))
    pairs = [(row.get(count, 0), row[of]) for row in window if row.get(of)]
    if not of:
        pairs = [(row[count], 1) for row in window if count in row][-1:]
    total = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    shares = [a / b for a, b in ([total] if total[1] else []) + pairs]
    shown = [share >= trigger.above or share <= trigger.below for share in shares]
    return total, sum(shown[1:]) if total[1] >= trigger.evidence and shown[0] else 0


def spells(
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    *,
    reasons: Mapping[str, str] | None = None,
) -> list[tuple[str, bool]]:
    """(what a run was unhealthy with, and since or until which step; whether it still is), for the
    last stretch of steps of each trigger."""
    steps = [row for row in rows if is_step_row(row)]
    health = Health(settings, dict(reasons or {}))
    began, found = dict[str, int](), dict[str, tuple[str, bool]]()
    for number, row in enumerate(steps, start=1):
        health.take(row, is_last=number == len(steps))
        held = {alarm.name: alarm.text for alarm in health.alarms}
        began = {name: began.get(name, row["step"]) for name in held}
        for name, text in held.items():
            found[name] = f"Until step {row['step']}: {text}", False
            if number == len(steps):
                found[name] = f"Since step {began[name]}: {text}", True
    return list(found.values())
