"""A metric of your own: how much of each trained row the model wrote.

    lockstep train quickstart --plugin my_metric steps=2 out=runs/metric

The function sees the groups of trajectories and the training rows of one step. Its value is a
column of metrics.jsonl and a curve in the report.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.observe.metrics import step_metric
from lockstep.types import Group, Sample


@step_metric(
    "rows/sampled_share",
    unit="share",
    better="none",
    meaning="Share of the tokens of the training rows that the model sampled.",
)
def sampled_share(groups: Sequence[Group], rows: Sequence[Sample]) -> float:
    return sum(row.num_trained for row in rows) / sum(len(row.token_ids) for row in rows)
