"""The gated delta rule in one Triton kernel, for training, prefill and decode.

It is the recurrence itself, token by token from the state before a chunk, with the state in
registers. So a token's bits depend on that state and on the chunk's tokens up to it. Decode runs
the tokens of the chunk so far again, and returns the last one.

# n chunks  R slots  Q queries of a chunk: its last tokens  C tokens of a chunk  G key heads
# H value heads  K key width  V value width  B rows
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.ops.chunks import StateStep
from lockstep.ops.cuda_kernels import aligned, jit, launch, loop_bound, tl, triton
from lockstep.ops.delta import Solved

Tensor = torch.Tensor

VALUES = 32  # columns of the state in one program


def run_chunks(parts: Sequence[Tensor], state: Tensor | None) -> tuple[Solved, Tensor]:
    """See `Ops.delta_chunks`."""
    q, k, v, _, beta = parts
    n, H, C, V = v.shape
    every = torch.arange(n, device=v.device), torch.full((n,), C, device=v.device)
    after = v.new_empty(n, H, k.shape[3], V)
    out, writes = _run(q, parts[1:], state, *every, after)
    return Solved(out, writes, {"values": v, "strengths": beta}), after


def decode(parts: Sequence[Tensor], *, layer: int, step: StateStep) -> Tensor:
    """See `Ops.delta_decode`."""
    states, slots, offsets = step.states, step.slots[: step.num_rows], step.offsets
    every = states.keys, states.values, states.decays, states.strengths
    stored = tuple(of_layers[layer] for of_layers in every)
    for tokens, new in zip(stored, parts[1:], strict=True):
        tokens[slots, :, offsets] = new
    state = states.state[layer]
    return _run(parts[0][:, :, None], stored, state, slots, offsets + 1, state)[0][:, :, 0]


def _run(
    q: Tensor,
    parts: Sequence[Tensor],
    state: Tensor | None,
    slots: Tensor,
    stops: Tensor,
    after: Tensor,
) -> tuple[Tensor, Tensor]:
    """(outputs, writes), each [n, H, Q, V], of the queries q [n, G, Q, K].

    parts: (k, v, g, beta) of the chunks' tokens, state and after: those of R slots, with shapes as
    in `DeltaRule.forward`. slots, stops [n]: slot of each chunk, and how many tokens it has. The
    state after a chunk of C tokens is written to `after`, which may be `state`.
    """
    (n, G, Q, K), (_, H, C, V) = q.shape, parts[1].shape
    out, writes = (parts[1].new_empty(n, H, Q, V) for _ in range(2))
    begin = after if state is None else state
    inputs = (*map(aligned, (q, *parts)), begin, slots, stops, out, writes, after)
    sizes = (G, H, C, K, V, triton.next_power_of_2(K), VALUES)
    launch(_delta_kernel, (n, H, -(-V // VALUES)), *inputs, Q, int(state is not None), *sizes)
    return out, writes


@jit("num_queries", "has_state", unaligned=("state", "slots", "stops", "after"))
def _delta_kernel(
    q,
    k,
    v,
    g,
    beta,
    state,
    slots,
    stops,
    out,
    writes,
    after,
    num_queries,
    has_state,
    G: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, stop = tl.load(slots + chunk), tl.load(stops + chunk).to(tl.int32)
    key_head = head // (H // G)
    row = tl.arange(0, KEYS)
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_row, is_column = row < K, column < V
    is_inside = is_row[:, None] & is_column[None, :]
    tile = ((slot * H + head) * K + row[:, None]) * V + column[None, :]
    held = tl.load(state + tile, mask=is_inside & (has_state != 0), other=0.0)
    first_query = stop - num_queries
    for token in range(0, loop_bound(stop)):
        at_key, at = (slot * G + key_head) * C + token, (slot * H + head) * C + token
        key = tl.load(k + at_key * K + row, mask=is_row, other=0.0)
        value = tl.load(v + at * V + column, mask=is_column, other=0.0)
        held = held * tl.exp(tl.load(g + at))
        read = tl.sum(held * key[:, None], 0)
        write = tl.load(beta + at) * (value - read)
        held += key[:, None] * write[None, :]
        if token >= first_query:
            number = token - first_query
            place = ((chunk * G + key_head) * num_queries + number) * K
            query = tl.load(q + place + row, mask=is_row, other=0.0)
            place = ((chunk * H + head) * num_queries + number) * V
            tl.store(out + place + column, tl.sum(held * query[:, None], 0), mask=is_column)
            tl.store(writes + place + column, write, mask=is_column)
    if stop == C:
        tl.store(after + tile, held, mask=is_inside)
