"""Load of a mixture's experts, over all rows of an update, whatever its micro-batches.

A token that several rows share is run once in a micro-batch and counts once for each of them.

# T tokens  L routed layers  E experts  A active experts
"""

from __future__ import annotations

import numpy as np
import torch

from lockstep.models.decoder import Decoder
from lockstep.models.moe import Router, Routing
from lockstep.models.sharding import local_part, part_like
from lockstep.ops.transfer import to_device
from lockstep.training.packing import PackedBatch

Tensor = torch.Tensor


def expert_load(batch: PackedBatch, chosen_TLA: Tensor, num_experts: int) -> Tensor:
    """[L, E] float64: tokens given to each expert; each layer's sum is tokens times active experts.
    Loads of micro-batches and ranks add up.

    chosen_TLA: [T, L, A] integers, the experts that processed the tokens of `batch`.
    """
    T, L, A = chosen_TLA.shape
    layer_L = torch.arange(L, device=chosen_TLA.device)
    place_TLA = layer_L[:, None] * num_experts + chosen_TLA.long()
    weight_TLA = count_rows(batch).double()[:, None, None].expand(T, L, A)
    counts = weight_TLA.new_zeros(L * num_experts)  # whole numbers: exact in any order
    counts.scatter_add_(0, place_TLA.flatten(), weight_TLA.flatten())
    return counts.view(L, num_experts)


def count_rows(batch: PackedBatch) -> Tensor:
    """[T] float32: rows of the micro-batch that contain each token."""
    rows_T = np.bincount(np.concatenate(batch.inputs), minlength=len(batch.ids))
    return to_device(rows_T.astype(np.float32), batch.ids.device)


def router_aux_loss(batch: PackedBatch, routing: Routing) -> Tensor:
    """[] load-balancing loss of the routers over one micro-batch, after its forward: about the
    number of active experts at an even load, more at an uneven one.

    With the means over tokens and layers alike: E * sum over experts of (choices of the expert per
    token) * (mean probability of the expert); only the second has a gradient. It equals
    transformers' `load_balancing_loss_func` on the same rows, padded and masked, each without the
    tokens after the last that predicts a trained one. In a replay, choices are the replayed ones.
    A product of means is not a sum over tokens, so the mean over micro-batches differs from the
    loss of all their rows at once; transformers' differs likewise with gradient accumulation.

    routing: with `weight_T=count_rows(batch)`, so that a token that several rows share counts once
    for each. Source: Switch Transformers (arXiv 2101.03961), equations 4 to 6.
    """
    sums_E = torch.stack(routing.prob_sums).sum(0)
    load_LE = expert_load(batch, routing.stacked(), len(sums_E))
    num_tokens = len(load_LE) * sum(map(len, batch.inputs))  # each once per layer
    share_E = load_LE.sum(0).float() / num_tokens
    return len(sums_E) * (share_E * sums_E / num_tokens).sum()


def load_metrics(counts_LE: np.ndarray) -> dict[str, float]:
    """`moe/...` metrics of [L, E] tokens per layer and expert.

    >>> load_metrics(np.array([[3.0, 1.0]]))["moe/load_max"]
    1.5
    """
    E = counts_LE.shape[1]
    ratio_LE = counts_LE * E / np.maximum(counts_LE.sum(1, keepdims=True), 1.0)  # 1 is even
    spread_L = ratio_LE.std(1)
    return {
        "moe/load_max": float(ratio_LE.max()),
        "moe/load_cv": float(spread_L.mean()),
        "moe/unused_experts": float((counts_LE == 0).mean()),
        **{f"moe/load_cv/{layer}": float(x) for layer, x in enumerate(spread_L)},
    }


def balance_experts(model: Decoder, load_LE: Tensor, *, rate: float) -> None:
    """Adds `rate` to the bias of experts with fewer tokens than the mean of their layer, and
    subtracts it from experts with more. load_LE: of the update, equal on all ranks.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router, load_E in zip(routers, load_LE, strict=True):
        bias = router.choice_bias
        assert bias is not None, "a model without the bias was refused before"
        move_E = rate * (load_E.sum() - len(load_E) * load_E).sign()  # whole numbers: exact
        own = local_part(bias.detach())
        own += part_like(move_E, bias).to(own)
