"""A model's forward over the ranks that share a micro-batch: each computes a run of its tokens.

Everything but attention needs a rank's own tokens alone; see `ops.split` for attention.

# T packed tokens  N trained tokens  n of a rank
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lockstep.models.moe import Routing
from lockstep.ops.context import PackedContext, Support
from lockstep.ops.split import SplitContext

Tensor = torch.Tensor


class SplitModel(NamedTuple):
    """A model whose micro-batches are shared by the ranks of a group."""

    model: Any
    """A `Decoder`, or a `ValueModel`."""
    group: dist.ProcessGroup

    def score(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        context: PackedContext,
        *,
        predictors_N: Tensor,
        targets_N: Tensor,
        support: Support | None = None,
        routing: Routing | None = None,
        **settings: Any,
    ) -> tuple[Tensor, Tensor]:
        """`Decoder.score`, each rank on its part: (log-prob, entropy) of all N tokens on all ranks,
        which call it together with equal arguments.

        Backward leaves each rank its part of every parameter's gradient: their sum over the ranks
        is the gradient of a loss that all of them compute alike. routing: of all T tokens; the
        choices that it records are gathered.
        """
        split = SplitContext.of(context, len(ids_T), self.group)
        mine = _places_in(split, predictors_N)
        own = None if routing is None else _take_routing(routing, split)
        found = self.model.score(
            split.take(ids_T),
            split.take(positions_T),
            split,
            predictors_N=predictors_N.index_select(0, mine) - split.start,
            targets_N=targets_N.index_select(0, mine),
            support=None if support is None else support.take(mine),
            routing=own,
            **settings,
        )
        if routing is not None and own is not None:
            routing.chosen |= {layer: split.gather(x) for layer, x in own.chosen.items()}
            routing.differing |= {layer: split.gather(x) for layer, x in own.differing.items()}
            if own.prob_sums:
                sums_LE = torch.stack(own.prob_sums)
                index = torch.arange(sums_LE.shape[1], device=sums_LE.device)
                routing.prob_sums = list(_Spread.apply(sums_LE, index, len(index), self.group))
        logprobs, entropy = _Spread.apply(torch.stack(found), mine, len(targets_N), self.group)
        return logprobs, entropy

    def values(
        self, ids_T: Tensor, positions_T: Tensor, context: PackedContext, *, states_N: Tensor
    ) -> Tensor:
        """A critic's forward as `score` is a policy's: [N] values of all states on all ranks."""
        split = SplitContext.of(context, len(ids_T), self.group)
        mine = _places_in(split, states_N)
        states_n = states_N.index_select(0, mine) - split.start
        found = self.model(split.take(ids_T), split.take(positions_T), split, states_N=states_n)
        return _Spread.apply(found[None], mine, len(states_N), self.group)[0]


def _places_in(split: SplitContext, index_N: Tensor) -> Tensor:
    """[n]: places in `index_N` of the tokens that are this rank's."""
    return ((index_N >= split.start) & (index_N < split.stop)).nonzero()[:, 0]


def _take_routing(routing: Routing, split: SplitContext) -> Routing:
    """This rank's part of the routes."""
    inputs = (routing.replay_TLA, routing.is_known_T, routing.weight_T)
    replay, is_known, weight = (None if x is None else split.take(x) for x in inputs)
    return Routing(replay_TLA=replay, is_known_T=is_known, weight_T=weight)


class _Spread(torch.autograd.Function):
    """[F, n] values of each rank at their places among [F, N], on all ranks, summed.

    A token's place is one rank's, the others add 0.0: exact in any order. Every rank computes the
    same loss from the result, so the gradient of a value is its owner's own.
    """

    @staticmethod
    def forward(ctx, own: Tensor, index: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(index)
        out = own.new_zeros(len(own), size).index_copy_(1, index, own)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        (index,) = ctx.saved_tensors
        return grad.index_select(1, index), None, None, None
