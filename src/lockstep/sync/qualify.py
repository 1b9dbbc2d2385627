"""Tests once, with a change that cannot be missed, that an engine runs the weights it is sent.

Every group of tensors is changed in the trainer's model, the weights are sent as in the rest of the
run, and engine and trainer score the same texts. Then the change is undone and both score again. A
large response alone proves little: vLLM 0.32 changes by nats when half of the tensors of gpt-oss
keep their old values. So the engine's log-probs are compared with the trainer's of the same
weights.

The groups that did not arrive are found without another load: the trainer scores the texts with one
group unchanged and the rest changed. The difference from all changed is the mark that an engine
with the group's old values shows. The same is tested when the change is undone, where the changed
values are the old ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.errors import EngineError
from lockstep.sync.changes import WeightChange
from lockstep.sync.probe import LogProbs, Probe

Who = tuple[int, str]
"""(rank, name of a replica, or "" for a single engine)."""

CHANGED_VERSION = -1
"""Version of the changed weights: no policy of the run. Nothing samples from them."""

MAX_GAP = 0.25
"""Largest median gap of engine and trainer, as a share of the median change, in either state.
Measured with a bfloat16 engine and a float32 trainer: 0.016 for the shipped models, at most
0.09 for random ones of 24 layers. Weights that arrive in another order give more than 1."""
MAX_GROWTH, LEAST_GAP = 30.0, 2e-4
"""Largest ratio of the noises of the two states; a gap below LEAST_GAP of the change is rounding.
Measured with a bfloat16 engine: 1.7 for the shipped models, 12 for SmolLM2-135M. In float32 this
finds single tensors that keep their old values."""
MAX_MARK = 0.3
"""Largest share of a group's mark in the gap: 1 is all old, 0 all arrived. Measured in bfloat16: at
most 0.08, and 0.46 where one layer of two has old sinks."""
LEAST_MARK, ROUNDING = 0.5, 1e-6
"""A group is judged if its mark exceeds this share of the gap, in median, and these nats: over the
504 tokens of a probe the noise of its share is then 0.1."""

EXPLAINED = 0.05
"""Largest rest of an explained gap, as a share of the change."""
GAIN = 0.95
"""Another group is named only if it reduces the gap to less than this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qualification:
    """Result of a qualification; medians over the tokens of the probe, in nats."""

    gap: float
    """Gap of engine and trainer under the true weights."""
    changed_gap: float
    """Gap under the changed weights."""
    change: float
    """Effect of the change on the trainer's log-probs."""
    marks: dict[str, float]
    """Group -> share of its mark in the gap: 0 has arrived, 1 has not. Without `unseen`."""
    unseen: tuple[str, ...] = ()
    """Groups whose effect is too small to be distinguished from noise."""
    old: tuple[str, ...] = ()
    """Groups with old values, if they explain the engine's log-probs."""
    failure: str = ""
    """Description of the problem; empty if the engine runs the sent weights."""
    replica: str = ""
    """Name of the worst of several engines."""

    @property
    def is_passed(self) -> bool:
        return not self.failure

    def describe(self) -> str:
        """One line."""
        failure = self.failure
        if failure and self.replica:
            failure = f"{self.replica}: {failure}"
        if self.old:
            return f"{failure}: it still runs the old values of {', '.join(self.old)}"
        if failure:
            return f"{failure}: no single group of tensors explains it"
        line = (
            f"{', '.join(self.marks)} arrive; a change of {self.change:.2g} nats is "
            f"followed to {self.changed_gap:.1e}"
        )
        return line + (f"; not to be seen: {', '.join(self.unseen)}" * bool(self.unseen))


@dataclass(frozen=True, slots=True)
class Stage:
    """The scores under one state of the trainer's weights."""

    ours: LogProbs
    """[N] Scores of the trainer."""
    theirs: LogProbs
    """[N] Scores of the engine, after the weights were sent."""
    marks: Mapping[str, LogProbs]
    """Group -> [N] scores of the trainer with the group in its other state, minus `ours`."""

    @property
    def gap(self) -> float:
        return _median(self.theirs - self.ours)

    @property
    def noise(self) -> float:
        """The gap relative to the log-probs: rounding grows with what is rounded."""
        return self.gap / max(_median(self.ours), ROUNDING)

    def shares(self) -> dict[str, float]:
        """Group -> share of its mark in the gap, if it can be judged."""
        gap = self.theirs - self.ours
        return {
            group: _slope(gap, mark)
            for group, mark in self.marks.items()
            if _median(mark) > max(LEAST_MARK * self.gap, ROUNDING)
        }


def judge(changed: Stage, restored: Stage) -> Qualification:
    """The result of the two stages; `failure` has numbers only."""
    size = _median(changed.ours - restored.ours)
    shares: dict[str, float] = {}
    for group, share in (*changed.shares().items(), *restored.shares().items()):
        shares[group] = max(share, shares.get(group, 0.0), key=abs)
    unseen = tuple(group for group in changed.marks if group not in shares)
    low, high = sorted((changed, restored), key=lambda stage: stage.noise)
    failure = ""
    if not size:
        failure = "changing every tensor does not move the trainer's own log-probs"
    elif max(changed.gap, restored.gap) > MAX_GAP * size or (
        high.noise > MAX_GROWTH * low.noise and high.gap > LEAST_GAP * size
    ):
        failure = (
            f"it is {changed.gap:.2g} nats from the trainer after a change of {size:.2g}, and "
            f"{restored.gap:.2g} when that is taken back"
        )
    elif any(share > MAX_MARK for share in shares.values()):
        failure = "it has not taken all sent tensors"
    return Qualification(
        gap=restored.gap,
        changed_gap=changed.gap,
        change=size,
        marks=shares,
        unseen=unseen,
        failure=failure,
    )


@dataclass(slots=True)
class Qualifier:
    """One qualification."""

    probe: Probe
    change: WeightChange
    send: Callable[[int], Awaitable[None]]
    """Loads the trainer's current weights as this version."""
    share: Callable[[Any], list[Any]]
    """Gathers a value from all ranks. Each rank has its own engine."""

    async def run(self, version: int) -> Qualification:
        """Runs the test. Trainer and engine end with the true weights, as `version`."""
        with self.change.turned(self.change.names):
            changed = await self._stages(CHANGED_VERSION)
        restored = await self._stages(version)
        every = {
            who: replace(judge(changed[who], restored[who]), replica=who[1])
            for who in restored
            if who in changed  # a replica that came back in between is not judged
        }
        if not every:
            raise EngineError("sync: no replica has stayed while the engine was qualified.")
        worst = max(
            every,
            key=lambda who: (not every[who].is_passed, every[who].changed_gap + every[who].gap),
        )
        if every[worst].is_passed:
            return replace(every[worst], replica="")
        return self._explain(every[worst], changed[worst], restored[worst])

    async def _stages(self, version: int) -> dict[Who, Stage]:
        """(rank, name) -> the stage of an engine, under the trainer's current weights."""
        await self.send(version)
        of_ranks = self.share(await self.probe.by_engines(version=version))
        ours = self.probe.by_trainer()
        marks = {group: self._with(n) - ours for group, n in self.change.groups().items()}
        return {
            (rank, name): Stage(ours, theirs, marks)
            for rank, by_each in enumerate(of_ranks)
            for name, theirs in by_each.items()
        }

    def _with(self, names: Iterable[str]) -> LogProbs:
        """Scores of the trainer with these parameters in their other state."""
        with self.change.turned(names):
            return self.probe.by_trainer()

    # -- the cause of a failure -----------------------------------------------------------------

    def _explain(self, found: Qualification, changed: Stage, restored: Stage) -> Qualification:
        """The result with the names of the groups that the engine has in their old state, if these
        explain its scores. Found by the trainer alone."""
        is_changed = changed.gap >= restored.gap
        theirs = (changed if is_changed else restored).theirs
        groups = self.change.groups()
        with self.change.turned(self.change.names if is_changed else ()):
            gap, old = min(self._search(theirs, ()), self._search(theirs, groups))
        if gap > EXPLAINED * found.change:
            return found
        return replace(found, old=("everything",) if len(old) == len(groups) else old)

    def _search(self, theirs: LogProbs, start: Iterable[str]) -> tuple[float, tuple[str, ...]]:
        """(gap, groups in their other state): adds or removes one group at a time, from `start` on,
        while the gap shrinks."""
        groups = self.change.groups()

        def gap_with(chosen: Iterable[str]) -> float:
            return _median(self._with([n for group in chosen for n in groups[group]]) - theirs)

        chosen = tuple(start)
        gap = gap_with(chosen)
        while True:
            tried = {}
            for group in groups:
                others = tuple(g for g in groups if (g in chosen) != (g == group))
                tried[others] = gap_with(others)
            best = min(tried, key=tried.__getitem__)
            if tried[best] > GAIN * gap:
                return gap, chosen
            chosen, gap = best, tried[best]


def _slope(gap: LogProbs, mark: LogProbs) -> float:
    """Slope of the gap on the mark by least absolute differences: the median of their ratios,
    weighted by the size of the mark. Tokens whose router flips do not matter."""
    seen = np.flatnonzero(mark)
    ratios, weights = gap[seen] / mark[seen], np.abs(mark[seen])
    order = np.argsort(ratios)
    return float(ratios[order][np.searchsorted(weights[order].cumsum(), weights.sum() / 2)])


def _median(values: LogProbs) -> float:
    """Median absolute value: a few tokens whose router is near a tie may differ by nats."""
    return float(np.median(np.abs(values)))
