"""Attention under Ulysses sequence parallelism: tokens are cut over ranks, attention's heads too.

Each rank has a range of the packed tokens. Around attention two all-to-alls turn "my tokens, all
heads" into "all tokens, my heads" and back, so that attention sees whole rows: windows, sinks and
rows that begin alike work as on one rank. Source: DeepSpeed-Ulysses (arXiv 2309.14509).

# T packed tokens  P tokens of a rank  S ranks
# H query heads  G key heads  h, g heads of a rank  K head width
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from lockstep.ops.context import AttentionSpec, PackedContext

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SplitContext:
    """A `PackedContext` whose tokens are cut into one run per rank.

    Five tokens on two ranks: sizes (3, 2); rank 0 holds tokens 0 to 2, rank 1 tokens 3 and 4.
    """

    packed: PackedContext
    """Context of all T tokens, for attention."""
    num_tokens: int
    """T."""
    sizes: tuple[int, ...]
    """[S]: tokens of each rank, at least one. With fewer tokens than ranks, several ranks hold a
    copy of the last token, and only the first copy counts."""
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
        """Index after the last of this rank's tokens."""
        return self.start + self.sizes[self.rank]

    def take(self, x_T: Tensor) -> Tensor:
        """This rank's run [P, ...] of values [T, ...]."""
        places = torch.arange(self.start, self.stop, device=x_T.device)
        return x_T.index_select(0, places.clamp(max=self.num_tokens - 1))

    def gather(self, x_P: Tensor) -> Tensor:
        """[T, ...]: the runs of all ranks, concatenated. No gradient."""
        longest = max(self.sizes)
        parts = [x_P.new_empty(longest, *x_P.shape[1:]) for _ in self.sizes]
        filler = x_P.new_zeros(longest - len(x_P), *x_P.shape[1:])
        dist.all_gather(parts, torch.cat([x_P, filler]), group=self.group)
        whole = torch.cat([part[:size] for part, size in zip(parts, self.sizes, strict=True)])
        return whole[: self.num_tokens]


def split_attention(
    attend: Callable[..., Tensor],
    q_PHK: Tensor,
    k_PGK: Tensor,
    v_PGK: Tensor,
    spec: AttentionSpec,
    context: SplitContext,
) -> Tensor:
    """`Ops.attention` where each rank has a run of the tokens: [P, H, K].

    attend: attention over all tokens, called with q, k, v, spec and context. A rank computes H / S
    query heads with their sinks, and the key heads that they read; where there are fewer key heads
    than ranks, neighbouring ranks compute with the same one.
    """
    S, T = len(context.sizes), context.num_tokens
    P, H, K = q_PHK.shape
    if k_PGK.shape[1] < S:
        copies = S // k_PGK.shape[1]
        k_PGK, v_PGK = (x.repeat_interleave(copies, 1) for x in (k_PGK, v_PGK))
    h, g = H // S, k_PGK.shape[1] // S
    parts = [q_PHK.reshape(P, S, h, K), k_PGK.reshape(P, S, g, K), v_PGK.reshape(P, S, g, K)]
    by_rank = torch.cat(parts, 2).transpose(0, 1).flatten(0, 1)
    qkv = _Exchange.apply(by_rank, context, True)[:T]
    q_ThK, k_TgK, v_TgK = qkv.split([h, g, g], 1)
    if spec.sinks is not None:
        spec = replace(spec, sinks=spec.sinks[h * context.rank : h * (context.rank + 1)])
    out_ThK = attend(q_ThK, k_TgK, v_TgK, spec, context.packed)
    if (num_doubled := sum(context.sizes) - T) > 0:
        out_ThK = torch.cat([out_ThK, out_ThK.new_zeros(num_doubled, h, K)])
    back = _Exchange.apply(out_ThK, context, False)
    return back.view(S, P, h, K).transpose(0, 1).reshape(P, H, K)


class _Exchange(torch.autograd.Function):
    """All-to-all over the first dim, to heads or back; each direction is the other's gradient."""

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
