"""The critic's loss, and how much of the returns its values explain. torch."""

from __future__ import annotations

import torch

from lockstep.correction.layout import Layout
from lockstep.errors import ConfigError
from lockstep.objectives.inputs import read_tokens
from lockstep.objectives.losses import TokenLoss

Tensor = torch.Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip: float = 0.0,
    mask: Tensor | None = None,
) -> TokenLoss:
    """Half the squared error of each value, pessimistic about those that have moved far.

        max((v - R)^2, (clamp(v, v_old - clip, v_old + clip) - R)^2) / 2

    values: carry gradient; old_values, from before the batch, and returns are constants; all of one
    shape, float32. clip: 0 is off. Places where `mask` is False may hold anything: loss and
    gradient are 0 there. `clip_fraction` is the share of tokens whose gradient the clip cuts off.
    Source: Schulman et al.'s PPO code (openai/baselines, ppo2); as in TRL and verl.

    >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
    >>> value_loss(one, 0 * one, two).loss.tolist(), value_loss(one, 0 * one, two, clip=0.5).loss
    ([0.5], tensor([1.1250]))
    """
    if not 0 <= clip < float("inf"):
        raise ConfigError(f"clip={clip} must be a finite number, at least 0; 0 is off.")
    values, old_values, returns = read_tokens(
        mask, values=values, old_values=old_values, returns=returns
    )
    loss = (values - returns).square()
    is_clipped = torch.zeros_like(loss, dtype=torch.bool)
    if clip:
        near = torch.clamp(values, old_values - clip, old_values + clip)
        clipped = (near - returns).square()
        is_clipped = (clipped > loss).detach()
        loss = torch.maximum(loss, clipped)
    return TokenLoss(loss / 2, mean={"clip_fraction": is_clipped})


def explained_variance(values: Tensor, returns: Tensor, layout: Layout) -> float | None:
    """1 - Var(returns - values) / Var(returns) over all tokens that count.

    1 is a critic that knows the returns, 0 one that knows no more than their mean, and below 0 one
    that knows less. None if all returns are equal: there is nothing to explain.

    >>> explained_variance(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), Layout.packed([2]))
    1.0
    """
    layout.check(values=values, returns=returns)
    inside = slice(None) if layout.mask is None else layout.mask
    expected, found = values[inside].double().flatten(), returns[inside].double().flatten()
    if not len(found) or bool((found == found[0]).all()):
        return None
    return 1.0 - float((found - expected).var(correction=0) / found.var(correction=0))
