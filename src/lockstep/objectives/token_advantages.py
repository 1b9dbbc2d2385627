"""Advantages of tokens from a critic's values, over rows with several turns. torch, no gradient.

# R rows  S tokens of the longest row  K tokens of a block
"""

from __future__ import annotations

import numpy as np
import torch

from lockstep.correction.arrays import takes_arrays
from lockstep.correction.kl import is_readable
from lockstep.correction.layout import Layout
from lockstep.errors import AlignmentError, ConfigError

Tensor = torch.Tensor

BLOCK = 128
"""Tokens that one product sums up; the recursion is walked block by block, not token by token."""


@takes_arrays
def gae(
    rewards: Tensor,
    values: Tensor,
    layout: Layout | Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns): generalised advantage estimates, and the critic's targets.

    rewards, values: the layout's shape. A reward is given after its token; a value belongs to the
    state before its token. bootstrap: [R], the value of the state after the row's
    last token where the episode was cut off; 0 (and None: everywhere) where it ended. Both results
    have the layout's shape and the dtype of `values`, float32 where those are whole numbers. They
    are 0.0 where tokens do not count, and computed in float64.

        delta_t = r_t + gamma * V_next - V_t
        A_t = delta_t + gamma * lam * A_next,  returns_t = A_t + V_t

    "Next" is the row's next token that counts. Observed tokens in between are skipped, since the
    policy does not choose them: otherwise a longer tool output would make the same choice worth
    less, and untrained values would enter. A reward on a token that does not count is not read:
    put it on the sampled token before.

    gamma, lam: in [0, 1], else ConfigError. Not whitened: see `whiten`. Raises AlignmentError if
    shapes differ, if the layout is one rank's piece of longer rows, or, on a CPU, if `bootstrap` or
    a value at a counted token is not finite; on a GPU such a value makes the row's advantages NaN.
    Source: Schulman et al. 2016 (arXiv 1506.02438), eq. 16.

    >>> layout = Layout.packed([3])
    >>> gae(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.5, 0.5]), layout, lam=0.5)
    (tensor([0.1250, 0.2500, 0.5000]), tensor([0.6250, 0.7500, 1.0000]))
    """
    layout = Layout.of(layout, rewards=rewards, values=values)
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ConfigError(f"gae(gamma={gamma}, lam={lam}): expected numbers in [0, 1].")
    _check_whole_rows(layout, rewards, values, bootstrap)
    rewards, values = rewards.detach(), values.detach() * 1.0
    # Rows from the left, without the tokens that do not count, and 0.0 behind their ends.
    device, width = values.device, int(np.diff(layout.offsets).max(initial=0))
    is_counted = _counted(layout, device).reshape(-1)
    lengths_R = layout.row_counts(device).long()
    is_token_RS = torch.arange(width, device=device) < lengths_R[:, None]
    shift_R = torch.arange(layout.num_rows, device=device) * width - lengths_R.cumsum(0) + lengths_R
    place = is_counted.cumsum(0) - 1 + layout.expand(shift_R).reshape(-1)
    place = torch.where(is_counted, place, is_token_RS.numel())  # behind all rows

    def in_rows(given: Tensor) -> Tensor:
        out = torch.zeros(is_token_RS.numel() + 1, dtype=torch.float64, device=device)
        return out.scatter_(0, place, given.reshape(-1).double())[:-1].view(is_token_RS.shape)

    def spread(found_RS: Tensor) -> Tensor:
        padded = torch.cat([found_RS.reshape(-1), found_RS.new_zeros(1)])
        return padded.index_select(0, place).to(values.dtype).view(layout.shape)

    reward_RS, value_RS = in_rows(rewards), in_rows(values)
    next_RS = torch.cat([value_RS[:, 1:], torch.zeros_like(value_RS[:, :1])], 1)
    if bootstrap is not None and width:
        last_R = (lengths_R - 1).clamp(min=0)
        next_RS.scatter_(1, last_R[:, None], bootstrap.detach().double()[:, None])
    delta_RS = torch.where(is_token_RS, reward_RS + gamma * next_RS - value_RS, 0.0)
    advantage_RS = _sum_from_the_right(delta_RS, gamma * lam)

    return spread(advantage_RS), spread(advantage_RS + value_RS)


@takes_arrays
def whiten(values: Tensor, layout: Layout | Tensor, *, eps: float = 1e-8) -> Tensor:
    """(values - mean) / sqrt(variance + eps) over all tokens that count; 0.0 elsewhere.

    values: the layout's shape. The variance is divided by n - 1; fewer than two tokens give zeros.
    Every token counts alike, so long rows weigh more. Over this layout alone: a batch that is
    spread over ranks otherwise than by splitting rows is gathered first.
    """
    layout, given = Layout.of(layout, values=values), values.detach() * 1.0
    is_token = _counted(layout, given.device)
    inside = torch.where(is_token, given.double(), 0.0)
    count = layout.row_counts(given.device).sum()
    mean = layout.row_sums(inside).sum() / count.clamp(min=1)
    offset = torch.where(is_token, inside - mean, 0.0)
    variance = layout.row_sums(offset.square()).sum() / (count - 1).clamp(min=1)
    return (offset / (variance + eps).sqrt()).to(given.dtype)


# -- mechanism ------------------------------------------------------------------------------------


def _counted(layout: Layout, device: torch.device) -> Tensor:
    """The layout's shape, bool: the tokens that count."""
    if layout.mask is not None:
        return layout.mask
    return torch.ones(layout.shape, dtype=torch.bool, device=device)


def _sum_from_the_right(delta_RS: Tensor, decay: float) -> Tensor:
    """A_t = delta_t + decay * A_(t + 1), from A = 0 behind the end."""
    steps = torch.arange(BLOCK, device=delta_RS.device)
    ahead_KK = (steps[:, None] - steps[None, :]).clamp(min=0)
    factor = delta_RS.new_full((), decay)  # filled there: a copy of a number makes the host wait
    power_KK = factor**ahead_KK
    weight_KK = torch.tril(power_KK)  # [later, earlier]: what a later delta adds to an earlier sum
    left_K = factor ** (BLOCK - steps)
    out_RS = torch.empty_like(delta_RS)
    carry_R = delta_RS.new_zeros(len(delta_RS))
    for block in reversed(range(-(-delta_RS.shape[1] // BLOCK))):
        places = slice(block * BLOCK, min((block + 1) * BLOCK, delta_RS.shape[1]))
        size = places.stop - places.start
        summed = delta_RS[:, places] @ weight_KK[:size, :size]
        out_RS[:, places] = summed + carry_R[:, None] * left_K[BLOCK - size :]
        carry_R = out_RS[:, places.start]
    return out_RS


def _check_whole_rows(
    layout: Layout, rewards: Tensor, values: Tensor, bootstrap: Tensor | None
) -> None:
    if layout.group is not None:
        raise AlignmentError(
            "these rows are split over ranks, and a token's advantage is a sum over all that "
            "follow it: gather whole rows first."
        )
    checked = [("rewards", rewards, layout.locate), ("values", values, layout.locate)]
    if bootstrap is not None:
        if tuple(bootstrap.shape) != (layout.num_rows,):
            raise AlignmentError(
                f"bootstrap has the shape {list(bootstrap.shape)}; expected one value per row, "
                f"[{layout.num_rows}]."
            )
        checked.append(("bootstrap", bootstrap, "row {}".format))
    for name, tensor, locate in checked:
        is_bad = ~torch.isfinite(tensor)
        if tensor is not bootstrap:
            is_bad &= _counted(layout, tensor.device)
        if is_readable(tensor) and bool(is_bad.any()):
            at = int(is_bad.reshape(-1).nonzero()[0, 0])
            raise AlignmentError(
                f"{name} at {locate(at)} is {float(tensor.reshape(-1)[at])}; values at "
                "counted tokens must be finite. Does the mask mark the sampled tokens?"
            )
