"""The inputs of a forward's layers besides the stream and their own weights.

# T tokens  E experts  A active experts  L routed layers  K rotary width
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lockstep.models.adapter_rows import AdapterRows
from lockstep.ops.base import Context, Ops

Tensor = torch.Tensor


@dataclass(slots=True, eq=False, kw_only=True)
class Routing:
    """Experts to replay in one forward, and the experts that were chosen.

    Passed to `Decoder.forward`. Each routed layer reads and writes its own entry, indexed by layer
    number, so that a layer that runs twice (activation checkpointing) finds the same. Routed layers
    are counted from 0; dense ones in between are left out.

    >>> routing = Routing(replay_TLA=torch.tensor([[[3, 1]], [[0, 2]]]))  # 2 tokens, 1 layer, top 2
    >>> hidden = decoder(ids, positions, context, routing)      # doctest: +SKIP
    >>> routing.chosen[0].tolist()                              # doctest: +SKIP
    [[3, 1], [0, 2]]
    """

    replay_TLA: Tensor | None = None
    """[T, L, A] integers: experts of each token, in slot order. The router's logits still weigh
    them, with gradient. None lets the router choose."""
    is_known_T: Tensor | None = None
    """[T] bool: True if `replay_TLA` is valid for the token; the router chooses for the others.
    None: valid for all tokens."""
    chosen: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Routed layer -> [T, A] int64: experts that were used."""
    differing: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Routed layer -> [T] bool: in a replay, whether the router would have chosen other experts."""
    weight_T: Tensor | None = None
    """[T] float32: weight of each token in `prob_sums`. None computes no sums."""
    prob_sums: list[Tensor] = field(default_factory=list[Tensor])
    """[E] float32 of each routed layer: the router's softmax over all experts, summed over tokens;
    carries gradient. Complete after the forward, and until backward."""

    def stacked(self) -> Tensor:
        """[T, L, A] int64 of all routed layers, after the forward."""
        return torch.stack([self.chosen[layer] for layer in sorted(self.chosen)], 1)


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """The inputs that layers of one kind share in a forward."""

    ops: Ops
    context: Context
    """Where the keys of the tokens are."""
    cos: Tensor
    """[T, 1, K] float32: see `attention.rope_table`."""
    sin: Tensor
    routing: Routing | None = None
    adapters: AdapterRows | None = None
    """One adapter per row, in place of the projections' own."""
