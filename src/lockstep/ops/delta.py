"""The gated delta rule on a CPU, one definition for sampler and trainer, and its exact gradient,
which a GPU shares. A GPU's forward is one kernel: `ops.cuda_delta`.

A head has a state S [K, V]. A token with key k, value v, log-decay g and strength beta changes it:

    S <- exp(g) S + k (beta (v - exp(g) S^T k))^T,    and reads S^T q.

Within a chunk, with c the running sum of g and S the state before the chunk, token i writes

    w_i = beta_i (v_i - exp(c_i) S^T k_i) - sum_{j < i} A_ij w_j
    A_ij = beta_i exp(c_i - c_j) k_i.k_j

This triangular system is solved block by block: first the sums over earlier blocks, then the block
by its inverse, whose row i needs only rows before i. So the same products compute a token, whether
its chunk is complete (training, prefill) or comes token by token (decode, which keeps keys, w, and
the block's inverse). Under invariant ops the rows of a product do not depend on each other. Decode
reads the state per token and writes it per chunk; the recurrent form does both per token.

Source: Gated DeltaNet (arXiv 2412.06464), equation 10, and the chunked form of section 3.3.
Guard: tests/cpu/ops/test_delta.py

# N chunks  C tokens of a chunk  G key heads  H value heads  K key width  V value width  B rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.ops.chunks import Chunks, Level, StateStep
from lockstep.ops.context import take_rows
from lockstep.ops.contract import BLOCK, CHUNK, DELTA_WORK_BYTES
from lockstep.ops.transfer import to_device

Tensor = torch.Tensor
Matmul = Callable[[Tensor, Tensor], Tensor]
"""`Ops.matmul`."""
RunChunks = Callable[..., tuple["Solved", Any]]
"""`Ops.delta_chunks`."""

L2_EPS = 1e-6

PAIRS_AT_ONCE = 21  # products of pairs within a chunk that backward holds (measured, K = V = 128)


def unit_length(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q / |q| times K^-0.5 and k / |k|, over the last dim K of [T, G, K]. Computed as one norm,
    whose rows do not depend on each other."""
    G, K = q.shape[1:]
    q, k = F.rms_norm(torch.cat([q, k], 1), (K,), None, L2_EPS / K).split(G, 1)
    return q * K**-1.0, k * K**-0.5


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """Chunks [n] after the solve."""

    out: Tensor
    """[n, H, C, V]."""
    writes: Tensor
    """[n, H, C, V]: w."""
    kept: dict[str, Tensor]
    """The values that decode goes on from, by their name in `States`. "wanted" [n, H, C / BLOCK,
    BLOCK, V] and "inverse" [n, H, C / BLOCK, BLOCK, BLOCK] are of all blocks."""


def _pairs(q: Tensor, k: Tensor, matmul: Matmul) -> Tensor:
    """[n, G, 1, 2, C, C]: products of queries, and of keys, with keys."""
    n, G, C, _ = k.shape
    both = torch.cat([q, k], 2).flatten(0, 1)
    return matmul(both, k.flatten(0, 1).transpose(1, 2)).view(n, G, 1, 2, C, C)


def _decay(c: Tensor) -> Tensor:
    """[n, H, C, C]: exp(c_i - c_j), 0 above the diagonal."""
    gaps = c[..., :, None] - c[..., None, :]
    is_later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=c.device).triu(1)
    return gaps.masked_fill_(is_later, float("-inf")).exp_()


def _by_head(pairs: Tensor, num_heads: int) -> Tensor:
    """[n, G, 1, C, C] -> [n, H, C, C]: repeats each key head for its value heads."""
    n, G, _, C, _ = pairs.shape
    return pairs.expand(n, G, num_heads // G, C, C).reshape(n, num_heads, C, C)


def _read(q: Tensor, k: Tensor, state: Tensor, matmul: Matmul) -> tuple[Tensor, Tensor]:
    """(S^T q, S^T k), each [n, H, rows, V], of q and k [n, G, rows, K]."""
    n, G, rows, _ = k.shape
    H, V = state.shape[1], state.shape[3]
    both = torch.cat([q, k], 2).repeat_interleave(H // G, 1)
    read = matmul(both.flatten(0, 1), state.flatten(0, 1)).view(n, H, 2 * rows, V)
    return read[:, :, :rows], read[:, :, rows:]


def solve(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, beta: Tensor, state: Tensor | None, matmul: Matmul
) -> Solved:
    """q, k [n, G, C, K] of unit length, the queries scaled; v [n, H, C, V]; c, beta [n, H, C];
    state [n, H, K, V], None is 0. All have one dtype."""
    n, H, C, V = v.shape
    pairs, decay, grow = _pairs(q, k, matmul), _decay(c), c.exp()[..., None]
    scores = _by_head(pairs[:, :, :, 0], H) * decay
    system = (_by_head(pairs[:, :, :, 1], H) * decay * beta[..., None]).tril_(-1)
    base, out = beta[..., None] * v, None
    if state is not None:
        read_q, read_k = _read(q, k, state, matmul)
        base, out = beta[..., None] * (v - grow * read_k), grow * read_q
    blocks = C // BLOCK
    diagonal = torch.stack(
        [system[..., b : b + BLOCK, b : b + BLOCK] for b in range(0, C, BLOCK)], 2
    ).reshape(-1, BLOCK, BLOCK)
    inverse = torch.eye(BLOCK, dtype=c.dtype, device=c.device).repeat(len(diagonal), 1, 1)
    for row in range(1, BLOCK):
        # A product of this size is computed by itself, and `matmul` would pad the row.
        inverse[:, row : row + 1] -= torch.bmm(diagonal[:, row : row + 1], inverse)
    inverse = inverse.view(n, H, blocks, BLOCK, BLOCK)
    writes, wanted = torch.empty_like(v), v.new_empty(n, H, blocks, BLOCK, V)
    for block in range(blocks):
        here = slice(block * BLOCK, (block + 1) * BLOCK)
        rest = base[:, :, here]
        if block:
            before = slice(here.start)
            known = system[:, :, here, before].flatten(0, 1)
            sums = matmul(known, writes[:, :, before].flatten(0, 1))
            rest = rest - sums.view(n, H, BLOCK, V)
        wanted[:, :, block] = rest
        found = matmul(inverse[:, :, block].flatten(0, 1), rest.reshape(n * H, BLOCK, V))
        writes[:, :, here] = found.view(n, H, BLOCK, V)
    own = matmul(scores.flatten(0, 1), writes.flatten(0, 1)).view(n, H, C, V)
    kept = {"values": writes, "wanted": wanted, "inverse": inverse}
    return Solved(own if out is None else out + own, writes, kept)


def advance(k: Tensor, writes: Tensor, c: Tensor, state: Tensor | None, matmul: Matmul) -> Tensor:
    """[n, H, K, V]: the state after a chunk."""
    n, H, _, V = writes.shape
    kept = (c[..., -1:] - c).exp()[..., None]
    keys = kept * k.repeat_interleave(H // k.shape[1], 1)
    added = matmul(keys.flatten(0, 1).transpose(1, 2), writes.flatten(0, 1))
    added = added.view(n, H, -1, V)
    return added if state is None else c[..., -1].exp()[..., None, None] * state + added


def _parent_states(after: Tensor | None, level: Level) -> Tensor | None:
    if after is None or level.parents is None:
        return after
    return after.index_select(0, level.parents)


def _pieces(level: Level, v: Tensor) -> Iterator[tuple[slice, slice]]:
    """(chunks among all, the same within the level) of each piece that is computed at once."""
    room = DELTA_WORK_BYTES["cpu" if v.device.type == "cpu" else "cuda"]
    of_chunk = PAIRS_AT_ONCE * v.shape[1] * CHUNK**2 * v.element_size()
    size, (begin, end) = max(1, room // of_chunk), (level.part.start, level.part.stop)
    for at in range(begin, end, size):
        stop = min(at + size, end)
        yield slice(at, stop), slice(at - begin, stop - begin)


def _joined(states: list[Tensor]) -> Tensor | None:
    """The states of all pieces of a level; a single piece, the usual case, is not copied."""
    if len(states) <= 1:
        return states[0] if states else None
    return torch.cat(states)


class DeltaRule(torch.autograd.Function):
    """The rule over chunks of rows that begin with the state 0. Keeps its inputs, the writes and
    the states at borders: memory grows with the tokens. What it holds beside them is bounded,
    however many rows there are: chunks of a level are computed some at a time."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, chunks: Chunks, run: RunChunks):
        """q, k [N, G, C, K], v [N, H, C, V], g, beta [N, H, C] -> [N, H, C, V]."""
        out, writes = torch.empty_like(v), torch.empty_like(v)
        states: list[Tensor | None] = []
        after: Tensor | None = None
        for number, level in enumerate(chunks.levels):
            states.append(state := _parent_states(after, level))
            ends: list[Tensor] = []
            for at, here in _pieces(level, v):
                before = None if state is None else state[here]
                is_last = number + 1 == len(chunks.levels)
                parts = [x[at] for x in (q, k, v, g, beta)]
                solved, end = run(parts, before, is_last=is_last)
                out[at], writes[at] = solved.out, solved.writes
                ends += [] if end is None or is_last else [end]
            after = _joined(ends)
        ctx.save_for_backward(q, k, v, g.cumsum(-1), beta, writes, *states)
        ctx.chunks = chunks
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, c, beta, writes, *states = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v, c, beta)]
        after: Tensor | None = None
        levels: tuple[Level, ...] = ctx.chunks.levels
        for number in range(len(levels) - 1, -1, -1):
            level, state = levels[number], states[number]
            starts: list[Tensor] = []
            for at, here in _pieces(level, v):
                parts = (q[at], k[at], v[at], c[at], beta[at], writes[at])
                grad_after, begun = (None if x is None else x[here] for x in (after, state))
                *found, before = _solve_backward(grad_out[at], parts, grad_after, begun)
                for grad, part in zip(grads, found, strict=True):
                    grad[at] = part
                if before is not None:
                    starts.append(before)
            after = before = _joined(starts)
            if before is not None and level.parents is not None:
                after = before.new_zeros(level.num_parents, *before.shape[1:])
                after.index_add_(0, level.parents, before)
        # The gradient of a running sum is the running sum from the end.
        grads[3] = grads[3].flip(-1).cumsum(-1).flip(-1)
        return *grads, None, None


def _solve_backward(
    grad: Tensor, parts: tuple[Tensor, ...], grad_after: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, c, beta and the state of `solve` and `advance`, by their formulas.
    grad [n, H, C, V] of the output, parts (q, k, v, c, beta, writes), grad_after [n, H, K, V] of
    the state after the chunks."""
    q, k, v, c, beta, writes = parts
    H, G = v.shape[1], k.shape[1]
    qh, kh = (x.repeat_interleave(H // G, 1) for x in (q, k))
    decay, grow, strength = _decay(c), c.exp()[..., None], beta[..., None]
    of_queries = _by_head((q @ k.transpose(-1, -2))[:, :, None], H)
    of_keys = _by_head((k @ k.transpose(-1, -2))[:, :, None], H)
    scores, system = of_queries * decay, (of_keys * decay * strength).tril_(-1)
    grad_writes = scores.transpose(-1, -2) @ grad
    grad_k = torch.zeros_like(kh)
    grad_c = torch.zeros_like(c)
    if grad_after is not None:
        kept = (c[..., -1:] - c).exp()[..., None]
        grad_writes = grad_writes + (kept * kh) @ grad_after
        through = kept * (writes @ grad_after.transpose(-1, -2))
        grad_k += through
        of_kept = (through * kh).sum(-1)
        grad_c -= of_kept
        grad_c[..., -1] += of_kept.sum(-1)
    grad_base = torch.linalg.solve_triangular(
        system.transpose(-1, -2), grad_writes, upper=True, unitriangular=True
    )
    grad_scores = (grad @ writes.transpose(-1, -2)).tril_()
    grad_system = (grad_base @ writes.transpose(-1, -2)).tril_(-1).neg_()
    grad_v = strength * grad_base
    grad_beta = (grad_system * of_keys * decay).sum(-1)
    grad_of_keys = grad_system * decay * strength
    grad_of_queries = grad_scores * decay
    weighed = grad_scores * scores + grad_system * system
    grad_c += weighed.sum(-1) - weighed.sum(-2)
    grad_q = grad_of_queries @ kh
    grad_k += grad_of_queries.transpose(-1, -2) @ qh
    grad_k += (grad_of_keys + grad_of_keys.transpose(-1, -2)) @ kh
    grad_state = None
    if state is None:
        grad_beta += (grad_base * v).sum(-1)
    else:
        read_q, read_k = qh @ state, kh @ state
        grad_beta += (grad_base * (v - grow * read_k)).sum(-1)
        grad_read_q, grad_read_k = grow * grad, -grow * grad_v
        grad_c += (grad_read_q * read_q + grad_read_k * read_k).sum(-1)
        grad_q = grad_q + grad_read_q @ state.transpose(-1, -2)
        grad_k += grad_read_k @ state.transpose(-1, -2)
        grad_state = qh.transpose(-1, -2) @ grad_read_q + kh.transpose(-1, -2) @ grad_read_k
        if grad_after is not None:
            last = c[..., -1].exp()[..., None, None]
            grad_state += last * grad_after
            grad_c[..., -1] += (last * grad_after * state).sum((-1, -2))
    if H > G:
        grad_q, grad_k = (x.unflatten(1, (G, H // G)).sum(2) for x in (grad_q, grad_k))
    return grad_q, grad_k, grad_v, grad_c, grad_beta, grad_state


def over_chunks(
    parts: tuple[Tensor, ...],
    chunks: Chunks,
    run: RunChunks,
    prefill: Callable[..., Tensor] | None = None,
) -> Tensor:
    """The rule for tokens: (q, k, v, g, beta) as `Ops.delta_rule` has them, the queries scaled and
    all in one dtype -> [T, H, V]. prefill: None is `DeltaRule`."""
    cut = [
        take_rows(x, chunks.tokens).unflatten(0, chunks.is_real.shape).transpose(1, 2).contiguous()
        for x in parts
    ]
    # A place past the end of a row neither decays nor writes.
    real = chunks.is_real[:, None].to(parts[0].dtype)
    cut[3], cut[4] = cut[3] * real, cut[4] * real
    out = DeltaRule.apply(*cut, chunks, run) if prefill is None else prefill(cut, run=run)
    assert isinstance(out, Tensor)
    return take_rows(out.transpose(1, 2).flatten(0, 1), chunks.places)


# -- the sampler ----------------------------------------------------------------------------------


def prefill(parts: Sequence[Tensor], *, layer: int, step: StateStep, run: RunChunks) -> Tensor:
    """The rule over the parts of prompts, chunk by chunk from each sequence's state; what their
    sequences go on from is kept. Shapes as in `DeltaRule.forward`."""
    (_, k, v, g, _), chunks, states = parts, step.chunks, step.states
    assert chunks is not None, "a step without prompts has no chunks"
    slots = step.slots[step.num_rows :]
    out = torch.empty_like(v)
    kept: list[dict[str, Tensor]] = []
    after = states.state[layer].index_select(0, slots)
    for level in chunks.levels:
        at, state = level.part, after
        if level.num_parents:
            state = _parent_states(after, level)
        assert state is not None, "a sampler's sequence has a state"
        found, after = run([x[at] for x in parts], state)
        out[at] = found.out
        kept.append({**found.kept, "before": state, "after": after})
    ends = to_device(chunks.ends, v.device)
    last = {name: torch.cat([of[name] for of in kept]).index_select(0, ends) for name in kept[0]}
    is_full = (step.last_places == CHUNK - 1)[:, None, None, None]
    states.state[layer, slots] = torch.where(is_full, last.pop("after"), last.pop("before"))
    states.keys[layer, slots] = k.index_select(0, ends)
    states.decays[layer, slots] = g.index_select(0, ends)
    rows, block = torch.arange(len(ends), device=v.device), step.last_places // BLOCK
    for name, found in last.items():
        is_of_blocks = name in ("wanted", "inverse")
        getattr(states, name)[layer, slots] = found[rows, :, block] if is_of_blocks else found
    return out


def decode(parts: Sequence[Tensor], *, layer: int, step: StateStep, matmul: Matmul) -> Tensor:
    """The rule for one token of each row: q, k [B, G, K], v [B, H, V], g, beta [B, H] -> [B, H,
    V]."""
    q, k, v, g, beta = parts
    (H, V), (G, K), states = v.shape[1:], k.shape[1:], step.states
    at = step.places((G, H))
    states.keys[layer].view(-1, K).index_copy_(0, at.keys, k.reshape(-1, K))
    states.decays[layer].view(-1).index_copy_(0, at.values, g.reshape(-1))
    q, k, v, beta = (step.computed(x) for x in (q, k, v, beta))
    N, strength = len(v), beta[..., None]
    keys, state = step.stored(states.keys, layer), step.stored(states.state, layer)
    c = step.stored(states.decays, layer).cumsum(-1)
    here = c.gather(-1, at.here)
    decay, grow = (here - c + at.later).exp_(), here.exp()
    # Rows [query, key, 0, 0] of each head: products pad to four rows anyway.
    both = F.pad(torch.stack([q, k], 2), (0, 0, 0, 2))
    pairs = matmul(both.view(N * G, 4, K), keys.flatten(0, 1).transpose(1, 2))
    pairs = pairs.view(N, G, 1, 4, CHUNK) * decay.view(N, G, H // G, 1, CHUNK)
    pairs = pairs.view(N, H, 4, CHUNK)
    if H > G:
        both = both.repeat_interleave(H // G, 1)
    read = matmul(both.view(N * H, 4, K), state.flatten(0, 1)).view(N, H, 4, V)
    rest = strength * (v - grow * read[:, :, 1])
    writes = step.stored(states.values, layer).flatten(0, 1)
    if at.earlier is not None:
        known = pairs * (strength * at.earlier)[:, :, None]
        rest = rest - matmul(known.view(N * H, 4, CHUNK), writes).view(N, H, 4, V)[:, :, 1]
    diagonal = pairs[:, :, 1].gather(-1, at.block) * (strength * at.before)
    inverse = step.stored(states.inverse, layer).flatten(0, 1)
    row = at.unit - torch.bmm(diagonal.view(N * H, 1, BLOCK), inverse).view(N, H, BLOCK)
    states.inverse[layer].view(-1, BLOCK).index_copy_(0, at.blocks, step.rows(row).view(-1, BLOCK))
    states.wanted[layer].view(-1, V).index_copy_(0, at.blocks, step.rows(rest).view(-1, V))
    wanted = step.stored(states.wanted, layer).flatten(0, 1)
    written = matmul(row.view(N * H, 1, BLOCK), wanted).view(N, H, V)
    states.values[layer].view(-1, V).index_copy_(0, at.values, step.rows(written).view(-1, V))
    if step.span is None:
        writes.view(-1, V).index_copy_(0, at.copies, written.view(-1, V))
    own = matmul(pairs.view(N * H, 4, CHUNK), writes).view(N, H, 4, V)[:, :, 0]
    if (full := step.full) is not None:
        ended = (x.index_select(0, full) for x in (keys, writes.view(N, H, CHUNK, V), c, state))
        states.state[layer, step.full_slots] = advance(*ended, matmul=matmul)
    return step.rows(grow * read[:, :, 0] + own)
