"""Ulysses sequence parallelism: a micro-batch's tokens are cut over ranks, attention's heads too.

Each rank has a run of the packed tokens and everything but attention is done on it alone. Around
attention two all-to-alls turn "my tokens, all heads" into "all tokens, my heads" and back, so that
attention sees whole rows: windows, sinks and rows that begin alike work as on one rank.
Source: DeepSpeed-Ulysses (arXiv 2309.14509).

# T packed tokens  P those of a rank  S ranks  N trained tokens
# H query heads  G key heads  h, g those of a rank  K head width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lockstep.models.moe import Balancing, Routing
from lockstep.ops import api as ops
from lockstep.ops.context import PackedContext, Support

if TYPE_CHECKING:
    from lockstep.models.critic import ValueModel
    from lockstep.models.decoder import Decoder

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SequenceParallel:
    """The ranks that share each micro-batch. All call with the same arguments, in step."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return self.group.size()

    def score(
        self,
        model: Decoder,
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
        """`Decoder.score`, each rank on its part: (log-prob, entropy) of all N tokens on all ranks.

        Backward leaves each rank its part of every parameter's gradient: their sum over the ranks
        is that of a loss which all of them compute alike. routing: of all T tokens; what it
        keeps of the forward is gathered.
        """
        split = SplitContext.of(context, len(ids_T), self.group)
        is_mine_N = (predictors_N >= split.start) & (predictors_N < split.stop)
        mine = is_mine_N.nonzero()[:, 0]
        own = None if routing is None else split.take_routing(routing)
        logprobs, entropy = model.score(
            split.take(ids_T),
            split.take(positions_T),
            split,  # the decoder hands it to attention, and looks at it nowhere else
            predictors_N=predictors_N.index_select(0, mine) - split.start,
            targets_N=targets_N.index_select(0, mine),
            support=None if support is None else support.take(mine),
            routing=own,
            **settings,
        )
        if routing is not None and own is not None:
            routing.chosen |= {layer: split.gather(x) for layer, x in own.chosen.items()}
            routing.differing |= {layer: split.gather(x) for layer, x in own.differing.items()}
            if routing.balancing is not None and own.balancing is not None:
                routing.balancing.losses |= own.balancing.losses
                for loss in routing.balancing.losses.values():
                    dist.all_reduce(loss, group=self.group)
        found = _Spread.apply(torch.stack([logprobs, entropy]), mine, len(targets_N), self.group)
        return found[0], found[1]

    def values(
        self,
        model: ValueModel,
        ids_T: Tensor,
        positions_T: Tensor,
        context: PackedContext,
        *,
        states_N: Tensor,
    ) -> Tensor:
        """A critic's forward, each rank on its part: [N] values of all states on all ranks. Its
        gradients are parts, as those of `score`."""
        split = SplitContext.of(context, len(ids_T), self.group)
        is_mine_N = (states_N >= split.start) & (states_N < split.stop)
        mine = is_mine_N.nonzero()[:, 0]
        values = model(
            split.take(ids_T),
            split.take(positions_T),
            split,
            states_N=states_N.index_select(0, mine) - split.start,
        )
        return _Spread.apply(values[None], mine, len(states_N), self.group)[0]


@dataclass(frozen=True, slots=True, eq=False)
class SplitContext:
    """A `PackedContext` whose tokens are cut in one run per rank."""

    packed: PackedContext
    """Of all T tokens: what attention sees."""
    num_tokens: int
    """T."""
    sizes: tuple[int, ...]
    """[S] tokens of each rank, at least one: where there are fewer tokens than ranks, the last one
    stands on several, and only the first of them counts."""
    group: dist.ProcessGroup

    @classmethod
    def of(cls, packed: PackedContext, num_tokens: int, group: dist.ProcessGroup) -> SplitContext:
        least, more = divmod(max(num_tokens, group.size()), group.size())
        sizes = tuple(least + (rank < more) for rank in range(group.size()))
        return cls(packed, num_tokens, sizes, group)

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.rank])

    @property
    def stop(self) -> int:
        """Behind the last of this rank's tokens."""
        return self.start + self.sizes[self.rank]

    def take(self, x_T: Tensor) -> Tensor:
        """This rank's part [P, ...] of values [T, ...]."""
        places = torch.arange(self.start, self.stop, device=x_T.device)
        return x_T.index_select(0, places.clamp(max=self.num_tokens - 1))

    def take_routing(self, routing: Routing) -> Routing:
        replay, is_known = routing.replay_TLA, routing.is_known_T
        own = Routing(
            replay_TLA=None if replay is None else self.take(replay),
            is_known_T=None if is_known is None else self.take(is_known),
        )
        if (whole := routing.balancing) is not None:
            weight_P = self.take(whole.weight_T)
            weight_P[max(self.num_tokens - self.start, 0) :] = 0.0  # what stands on several ranks
            own.balancing = Balancing(pull_LE=whole.pull_LE, weight_T=weight_P)
        return own

    def gather(self, x_P: Tensor) -> Tensor:
        """[T, ...] of all ranks' parts. No gradient."""
        longest = max(self.sizes)
        parts = [x_P.new_empty(longest, *x_P.shape[1:]) for _ in self.sizes]
        filler = x_P.new_zeros(longest - len(x_P), *x_P.shape[1:])
        dist.all_gather(parts, torch.cat([x_P, filler]), group=self.group)
        whole = torch.cat([part[:size] for part, size in zip(parts, self.sizes, strict=True)])
        return whole[: self.num_tokens]


def attention(
    q_PHK: Tensor,
    k_PGK: Tensor,
    v_PGK: Tensor,
    *,
    sinks: Tensor | None,
    window: int | None,
    scale: float,
    layer: int,
    context: SplitContext,
) -> Tensor:
    """`ops.attention` where each rank has a run of the tokens: [P, H, K].

    A rank computes H / S query heads with their sinks, and the key heads that they read: where
    there are fewer of these than ranks, neighbours compute with the same one.
    """
    S, T = len(context.sizes), context.num_tokens
    P, H, K = q_PHK.shape
    if k_PGK.shape[1] < S:
        copies = S // k_PGK.shape[1]
        k_PGK, v_PGK = (x.repeat_interleave(copies, 1) for x in (k_PGK, v_PGK))
    h, g = H // S, k_PGK.shape[1] // S
    parts = [q_PHK.reshape(P, S, h, K), k_PGK.reshape(P, S, g, K), v_PGK.reshape(P, S, g, K)]
    qkv = _to_heads(torch.cat(parts, 2), context)[:T]
    q_ThK, k_TgK, v_TgK = qkv.split([h, g, g], 1)
    if sinks is not None:
        sinks = sinks[h * context.rank : h * (context.rank + 1)]
    out_ThK = ops.attention(
        q_ThK, k_TgK, v_TgK,
        sinks=sinks, window=window, scale=scale, layer=layer, context=context.packed,
    )  # fmt: skip
    if (num_doubled := sum(context.sizes) - T) > 0:
        out_ThK = torch.cat([out_ThK, out_ThK.new_zeros(num_doubled, h, K)])
    return _to_tokens(out_ThK, context).reshape(P, H, K)


def _to_heads(x_PShK: Tensor, context: SplitContext) -> Tensor:
    """[P, S, h, K] of one rank's tokens -> [sum of P, h, K] of all tokens and its own heads."""
    return _Exchange.apply(x_PShK.transpose(0, 1).flatten(0, 1), context, True)


def _to_tokens(x_ThK: Tensor, context: SplitContext) -> Tensor:
    """The way back: [sum of P, h, K] -> [P, S, h, K]."""
    own = context.sizes[context.rank]
    flat = _Exchange.apply(x_ThK, context, False)
    return flat.view(len(context.sizes), own, *flat.shape[1:]).transpose(0, 1)


class _Exchange(torch.autograd.Function):
    """All-to-all over the first dim. To heads: S pieces of my tokens for the runs of all ranks; or
    the other way round, which is also its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, context: SplitContext, is_to_heads: bool) -> Tensor:
        ctx.context, ctx.is_to_heads = context, is_to_heads
        return _exchange(x, context, is_to_heads)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _exchange(grad, ctx.context, not ctx.is_to_heads), None, None


def _exchange(x: Tensor, context: SplitContext, is_to_heads: bool) -> Tensor:
    mine, runs = [context.sizes[context.rank]] * len(context.sizes), list(context.sizes)
    given, taken = (mine, runs) if is_to_heads else (runs, mine)
    out = x.new_empty(sum(taken), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), taken, given, group=context.group)
    return out


class _Spread(torch.autograd.Function):
    """[F, n] values of each rank at their places among [F, N], on all ranks.

    Each place is one rank's, the others add 0.0: exact in any order. Every rank computes the same
    loss from the result, so the gradient of a value is its owner's own.
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
