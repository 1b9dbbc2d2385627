"""Tests whether the engine's log-probs follow the trainer's from load to load.

Between two versions the trainer's log-probs of the probe change by D, the engine's by E. If the
engine takes every load, E = D up to noise. If it takes none, E = 0. If it is a version behind, E is
the D of the load before. The slope of E on D separates these cases. Its standard error shows
whether it can be judged yet: small updates need several loads, and more in bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lockstep.sync.probe import LogProbs

RESOLVED = 0.1
"""Largest standard error of a slope that is judged."""
SLOPE_BAND = 0.3
"""Largest distance of a slope from 1, in addition to four standard errors. A load that is not taken
gives 0; a late one gives up to the correlation of two updates, 0.5 with the optimizers here."""
LEAST_CHANGE, ROUNDING = 0.01, 1e-6
"""Share of the usual gap, and nats: smaller changes of the trainer may change no weight of an
engine of another dtype."""
OUTLIER = 5.0  # medians; of a normal distribution one in a thousand is further out
GAP_GROWTH, LEAST_GAP = 5.0, 1e-3
"""Largest ratio of the median gap to the first one; gaps below LEAST_GAP nats do not count."""


@dataclass(frozen=True, slots=True)
class Look:
    """A comparison of engine and trainer after a load."""

    metrics: dict[str, float]
    """`sync/...`; a value that cannot be computed yet is not finite."""
    alarm: str = ""
    """Description of a problem; empty if there is none, or none can be seen yet."""
    is_following: bool = False
    """True if the engine was seen to follow, which is more than the absence of an alarm."""

    @property
    def gap(self) -> float:
        """Median of |engine - trainer|, in nats."""
        return self.metrics["sync/probe_gap"]


@dataclass(slots=True)
class Follower:
    """The comparisons of a window, which restarts once it has `window` loads and a slope that can
    be judged."""

    window: int
    _base: tuple[LogProbs, LogProbs] | None = None
    """(trainer, engine) at the start of the window."""
    _last: LogProbs | None = None
    """The trainer at the last comparison."""
    _usual_gap: float = field(default=math.nan)
    _num_loads: int = 0

    def look(self, trainer: LogProbs, engine: LogProbs) -> Look:
        """Compares log-probs after one or several loads."""
        gap = float(np.median(np.abs(engine - trainer)))
        if self._base is None or self._last is None:
            self._usual_gap, self._base, self._last = gap, (trainer, engine), trainer
            return Look({"sync/probe_gap": gap})
        ours, theirs = trainer - self._base[0], engine - self._base[1]
        seen = _typical(ours, theirs)
        slope, error = self._slope(theirs[seen], ours[seen])
        # Slope of what the engine lacks on the last update: -1 if that load was not taken.
        last = trainer - self._last
        calm = seen & _typical(last)
        lacking, last_error = self._slope((theirs - ours)[calm], last[calm])
        metrics = {
            "sync/probe_gap": gap,
            "sync/slope": slope,
            "sync/slope_error": error,
            "sync/last_slope": 1 + lacking,
            "sync/correlation": _correlation(ours[seen], theirs[seen]),
        }
        alarm = self._alarm(gap, (slope, error), (1 + lacking, last_error))
        is_following = not alarm and error <= RESOLVED
        self._last, self._num_loads = trainer, self._num_loads + 1
        if self._num_loads >= self.window and is_following:
            self._base, self._num_loads = (trainer, engine), 0
        return Look(metrics, alarm, is_following)

    def _slope(self, y: LogProbs, x: LogProbs) -> tuple[float, float]:
        """(least-squares slope through the origin, its heteroscedastic standard error); (nan, inf)
        if x is lost in rounding."""
        size = float(x @ x)
        if size <= len(x) * (LEAST_CHANGE * self._usual_gap + ROUNDING) ** 2:
            return math.nan, math.inf
        slope = float(y @ x) / size
        rest = y - slope * x
        return slope, math.sqrt(float(np.square(x * rest).sum())) / size

    def _alarm(self, gap: float, whole: tuple[float, float], last: tuple[float, float]) -> str:
        for (slope, error), what in (
            (whole, "since the window's begin"),
            (last, "of the last load"),
        ):
            if error <= RESOLVED and abs(slope - 1) > SLOPE_BAND + 4 * error:
                return (
                    f"the engine's log-probs follow {slope:.2f} of the trainer's change {what} "
                    "(1 is all of it)"
                )
        limit = max(GAP_GROWTH * self._usual_gap, LEAST_GAP)
        if gap > limit:
            return (
                f"engine and trainer are {gap:.2g} nats apart on the probe, {self._usual_gap:.2g} "
                "at the first load"
            )
        return ""


def _typical(*changes: LogProbs) -> npt.NDArray[np.bool_]:
    """[N] Tokens whose changes are at most OUTLIER times the largest median change. A token whose
    router flips changes by nats on one side only, and would dominate a slope."""
    limit = OUTLIER * max(float(np.median(np.abs(change))) for change in changes)
    return np.all([np.abs(change) <= limit for change in changes], axis=0)


def _correlation(x: LogProbs, y: LogProbs) -> float:
    return float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else math.nan
