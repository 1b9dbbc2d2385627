"""Routing replay: the tokens of a mixture of experts take the routes they took before.

# T tokens  L routed layers  A active experts
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lockstep.errors import RoutingReplayError
from lockstep.models.config import ModelConfig
from lockstep.models.moe import Routing
from lockstep.training.config import RoutingReplay
from lockstep.training.packing import PackedBatch, is_routed, shift
from lockstep.types import UNKNOWN_EXPERT, Sample

Tensor = torch.Tensor

COLUMN: dict[RoutingReplay, str] = {"rollout": "routed_experts", "recompute": "old_routed_experts"}
"""Column with the experts to replay."""


def routing_of(batch: PackedBatch) -> Routing | None:
    """The routing that a micro-batch's forward replays; None if it has no routes."""
    if batch.routes is None:
        return None
    is_whole = batch.num_routed == len(batch.ids)
    is_known = None if is_whole else batch.routes[:, 0, 0] != UNKNOWN_EXPERT
    return Routing(replay_TLA=batch.routes, is_known_T=is_known)


def routes_to_replay(
    samples: Sequence[Sample], replay: RoutingReplay, model: ModelConfig, *, is_partial: bool
) -> list[npt.NDArray[np.int16]]:
    """[T, L, A] int16 per sample: its column, UNKNOWN_EXPERT where the router chooses.

    is_partial: the router may choose. Otherwise RoutingReplayError is raised for a position that
    the model reads without routes; also for routes of another model.
    """
    shape = (len(model.routed_layers), model.num_active_experts)
    out: list[npt.NDArray[np.int16]] = []
    for sample in samples:
        routes = sample.columns.get(COLUMN[replay])
        if routes is None:
            routes = np.full((len(sample), *shape), UNKNOWN_EXPERT, np.int16)
        _check_experts(sample, routes, shape, model.num_experts)
        if not is_partial:
            _check_coverage(sample, routes, replay)
        out.append(routes)
    return out


def num_differing(routing: Routing) -> Tensor:
    """[] float64: number of replayed tokens, over all layers, where the router itself would have
    chosen another set of experts."""
    is_other_LT = torch.stack(list(routing.differing.values()))
    if routing.is_known_T is not None:
        is_other_LT = is_other_LT & routing.is_known_T
    return is_other_LT.sum(dtype=torch.float64)


def keep_routes(
    samples: Sequence[Sample], batch: PackedBatch, routing: Routing, *, column: str
) -> None:
    """Sets a column of the samples to the experts that the forward of `batch` chose."""
    chosen = routing.stacked().cpu().numpy()
    for row, fed in zip(batch.rows, batch.inputs, strict=True):
        routes = np.full((len(samples[row]), *chosen.shape[1:]), UNKNOWN_EXPERT, np.int16)
        routes[: len(fed)] = chosen[fed]
        samples[row].set(column, routes)


def _check_experts(
    sample: Sample, routes: npt.NDArray[np.int16], shape: tuple[int, int], num_experts: int
) -> None:
    where = f"sample {sample.id}"
    if routes.shape[1:] != shape:
        raise RoutingReplayError(
            f"{where} has routes of {routes.shape[1]} layers x {routes.shape[2]} experts a token; "
            f"the model has {shape[0]} routed layers x {shape[1]} active experts. Another model's?"
        )
    known = is_routed(routes)[:, None, None]
    is_wrong = np.where(known, (routes < 0) | (routes >= num_experts), routes != UNKNOWN_EXPERT)
    if is_wrong.any():
        token, layer, slot = (int(i) for i in np.argwhere(is_wrong)[0])
        raise RoutingReplayError(
            f"{where}, token {token}: layer {layer} has the expert "
            f"{int(routes[token, layer, slot])}; the model has the experts 0..{num_experts - 1}. "
            "Another model's routes?"
        )
    in_order = np.sort(routes, axis=-1)
    is_twice = (in_order[..., 1:] == in_order[..., :-1]).any(-1) & known[..., 0]
    if is_twice.any():
        token, layer = (int(i) for i in np.argwhere(is_twice)[0])
        raise RoutingReplayError(
            f"{where}, token {token}: layer {layer} has the experts "
            f"{routes[token, layer].tolist()}, one of them twice. Does the engine write zeros for "
            "positions that it did not compute, such as a prefix from its cache?"
        )


def _check_coverage(sample: Sample, routes: npt.NDArray[np.int16], replay: RoutingReplay) -> None:
    if not sample.num_trained:
        return
    needed = int(shift(sample.loss_mask)[0][-1]) + 1
    missing = np.flatnonzero(~is_routed(routes[:needed]))
    if not missing.size:
        return
    if replay == "recompute":
        cause = "The trainer's own come from a forward before the update: call Trainer.update."
    else:
        cause = (
            f"The first one without is token {int(missing[0])}. Is the engine's prefix cache "
            "without routes? trainer.partial_routes=true lets the router choose there."
        )
    raise RoutingReplayError(
        f"sample {sample.id} has routes for {needed - missing.size} positions; {needed} of its "
        f"{len(sample)} ids are read before the last trained one, and need them. {cause} "
        f"`lockstep replay 'RUN#{sample.id}'` shows it."
    )
