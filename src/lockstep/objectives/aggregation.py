"""The weighted sum of token losses, in one place.

    loss = aggregate(out.loss, Layout.padded(mask), how="sequence_mean")

A batch that comes in micro-batches, or is spread over ranks, gives `denominator`: the number of
tokens or rows of the whole. The parts then add up to what the whole batch gives.
"""

from __future__ import annotations

import torch

from lockstep.correction.arrays import takes_arrays
from lockstep.correction.layout import Layout
from lockstep.errors import ConfigError
from lockstep.objectives.config import AGGREGATES, Aggregate, is_aggregate

Tensor = torch.Tensor


def token_weights(
    layout: Layout | Tensor,
    how: Aggregate,
    *,
    denominator: float | Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The weight of each token's loss: the layout's shape, float32; 0.0 where a token does not
    count.

    token_mean: 1 / denominator. sequence_mean: 1 / (denominator * tokens of the row). A number: 1 /
    (denominator * number). denominator: None counts the tokens (token_mean) or the rows that have
    any (the others) of this layout; a tensor is not checked to be above 0. With nothing to count
    all weights are 0.

    >>> token_weights(Layout.packed([1, 2]), "sequence_mean").tolist()
    [0.5, 0.25, 0.25]
    """
    if not is_aggregate(how):
        raise ConfigError(f"aggregate={how!r} must be {AGGREGATES}.")
    if not isinstance(denominator, Tensor | None) and not denominator > 0:
        raise ConfigError(
            f"denominator={denominator} must be above 0: it is the number of tokens (token_mean) "
            "or rows of the whole batch."
        )
    layout = Layout.of(layout)
    count_R = layout.row_counts(device)
    if denominator is None:
        counted = count_R if how == "token_mean" else (count_R > 0).double()
        total: Tensor | float = counted.sum().clamp(min=1)
    else:
        total = denominator
    per_row = torch.ones_like(count_R)
    if how == "sequence_mean":
        per_row = 1 / count_R.clamp(min=1)
    elif how != "token_mean":
        per_row = per_row / how
    weights = layout.expand((per_row / total).float())
    return weights if layout.mask is None else torch.where(layout.mask, weights, 0.0)


@takes_arrays
def aggregate(
    token_loss: Tensor,
    layout: Layout | Tensor,
    *,
    how: Aggregate = "token_mean",
    denominator: float | Tensor | None = None,
) -> Tensor:
    """[]: the loss of a batch from the losses of its tokens; carries their gradient.

    token_loss: the layout's shape; a [B, T] mask is a padded layout. Tokens that do not count add
    nothing, whatever value they hold. A layout whose rows are split over ranks gives this rank's
    part; the parts sum to the loss. Sources: token_mean DAPO (arXiv 2503.14476), sequence_mean GRPO
    (arXiv 2402.03300), a number Dr. GRPO (arXiv 2503.20783).
    """
    layout = Layout.of(layout, token_loss=token_loss)
    weights = token_weights(layout, how, denominator=denominator, device=token_loss.device)
    if layout.mask is not None:
        token_loss = torch.where(layout.mask, token_loss, 0.0)
    return (token_loss * weights).sum()
