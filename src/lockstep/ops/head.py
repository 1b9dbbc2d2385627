"""The log-prob head, over the `linear` of any ops.

No [T, V] tensor exists at any time. Forward computes whole rows of logits, a chunk of rows at a
time, since a softmax is over a row and must give the sampler's bits. Backward knows each row's
log-sum and needs no whole row: it forms the logits again in tiles of many rows and few columns, so
that the weight's gradient is complete after one tile, in float32, and written once. The gradient by
the hidden states alone, of a frozen head, is computed in forward for an upstream gradient of 1: no
logits are formed again.

# T tokens  D model width  V vocabulary  P rows of padding  K ids that are scored at each token
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lockstep.ops.context import sum_dtype

Tensor = torch.Tensor

CHUNK_BYTES = 128 << 20  # logits that live at once on a CPU, forward and backward
GPU_CHUNK_BYTES = 512 << 20  # and on a GPU
ROW_QUANTUM = 16  # rows of a chunk are a multiple of this, so that no ops have to pad them
TILE_ROWS = 4096  # in backward: enough to read the weight seldom, few enough for wide tiles
BLOCK_BYTES = 1 << 20  # one thread of a CPU works on this much at once: it stays in the cache


def _chunk_bytes(device: torch.device) -> int:
    return CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Tokens whose logits live at once. Logits of at most this many tokens are formed once: their
    log-probs are kept for backward."""
    rows = max(1, _chunk_bytes(device) // (4 * vocab_size))
    return rows - rows % ROW_QUANTUM if rows > ROW_QUANTUM else rows


class LogProbs(torch.autograd.Function):
    """See `Ops.log_probs`. Its `linear` and `log_softmax` must give the same numbers whether or not
    a gradient is wanted.

    Over a support, an id outside has probability 0, and so no part in the entropy or any
    gradient. Its log-prob is written as 0 where it is multiplied by that probability, since
    0 * -inf is NaN."""

    @staticmethod
    def forward(ctx, hidden, weight, ids, ops, temperature, support, V):
        """weight: [V + P, D]. The products use all its rows, because ops may keep the whole weight
        in another layout. The softmax is over V."""
        ctx.set_materialize_grads(False)  # an output that is not used has no gradient, not zeros
        T = len(ids)
        logprobs = hidden.new_empty(ids.shape, dtype=torch.float32)
        entropy, log_sums = (hidden.new_empty(T, dtype=torch.float32) for _ in range(2))
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        rows = chunk_rows(len(weight), hidden.device)
        # A single chunk is no larger than what one tile takes in backward anyway: keep it.
        has_unit = needs_hidden and not needs_weight and ids.ndim == 1
        is_kept = rows >= T and (needs_hidden or needs_weight) and not has_unit
        kept = hidden.new_empty(T, V, dtype=torch.float32) if is_kept else None
        dtype = ops.gradient_dtype(hidden.dtype, weight)
        unit = torch.zeros_like(hidden, dtype=sum_dtype(dtype)) if has_unit else None
        # Without a gradient, ops keep what they pack of it as long as it lives: for all chunks.
        fixed = weight if torch.is_inference_mode_enabled() else weight.detach()
        for part in _steps(T, rows):
            logits = ops.linear(hidden[part], fixed)[:, :V]
            choices = None if support is None else support.mask(part, V)
            tile = logits if unit is None or logits.dtype == dtype else logits.to(dtype)
            for block in _blocks(logits):
                here = slice(part.start + block.start, part.start + block.stop)
                mask = None if choices is None else choices[block]
                logp = ops.log_softmax(logits[block], temperature=temperature, kept=mask)
                at = ids[here].view(len(logp), -1)
                logprobs[here] = logp.gather(1, at).view(logprobs[here].shape)
                # The log-sum follows from any id that could be drawn: its logit less its log-prob.
                seen = at[:, :1] if mask is None else mask.byte().argmax(1, keepdim=True)
                seen_logits = logits[block].gather(1, seen).float() / temperature
                log_sums[here] = (seen_logits - logp.gather(1, seen))[:, 0]
                if mask is not None:  # exp(-inf) would also be several times slower than exp(0)
                    logp.masked_fill_(~mask, 0.0)
                probs = _probs(logp, mask)
                entropy[here] = -(probs * logp).sum(-1)
                if kept is not None:
                    kept[here] = logp
                if unit is not None:  # d log p / d logits, in the logits' place
                    tile[block] = probs.neg_().scatter_add_(
                        1, at, torch.ones_like(logprobs[here, None])
                    )
                del logp, probs
            if unit is not None:
                for columns in _steps(V, _tile_columns(hidden.device, hidden.shape[1])):
                    add_product(unit[part], tile[:, columns], fixed[columns].to(dtype))
            del logits, choices, tile  # before the next chunk is formed
        ctx.settings = dtype, temperature, support, V
        ctx.save_for_backward(hidden, weight, ids, entropy, log_sums, kept, unit)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        dtype, temperature, support, V = ctx.settings
        hidden, weight, ids, entropy, log_sums, kept, unit = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        T = len(ids)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        # A coefficient of 0 saves work, where looking for one does not wait for a device.
        if grad_entropy is not None and ids.device.type == "cpu" and not grad_entropy.any():
            grad_entropy = None
        if unit is not None and grad_entropy is None:
            scaled = unit * (grad_logprobs / temperature)[:, None]
            return scaled.to(hidden.dtype), *[None] * 6
        if ids.ndim == 1:
            ids, grad_logprobs = ids[:, None], grad_logprobs[:, None]

        def gradient(logp: Tensor, here: slice, columns: slice, choices: Tensor | None) -> Tensor:
            """dL/dlogits of some rows and columns, from their log-probs. A row's token may be one
            outside of the columns, of another tile."""
            grad, upstream = _probs(logp, choices), grad_logprobs[here].sum(1, keepdim=True)
            if grad_entropy is None:
                grad.mul_(-upstream)
            else:  # dH/dlogit_j = -p_j (log p_j + H)
                through = logp.add(entropy[here, None]).mul_(grad_entropy[here, None])
                grad.mul_(through.add_(upstream)).neg_()
            for k in range(ids.shape[1]):  # one by one: a token may name an id twice
                at = ids[here, k, None] - columns.start
                is_inside = (at >= 0) & (at < logp.shape[1])
                added = torch.where(is_inside, grad_logprobs[here, k, None], 0.0)
                grad.scatter_add_(1, at.clamp(0, logp.shape[1] - 1), added)
            return grad if temperature == 1.0 else grad.div_(temperature)

        wide_hidden = hidden.to(dtype)
        grad_hidden = torch.zeros_like(hidden, dtype=sum_dtype(dtype)) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        tile_rows = min(max(T, 1), TILE_ROWS)
        for columns in _steps(V, _tile_columns(hidden.device, tile_rows)):
            total: Tensor | None = None
            wide_weight = weight[columns].to(dtype)
            for part in _steps(T, tile_rows):
                choices = None if support is None else support.mask(part, V, columns)
                if kept is None:
                    # Rounded as in forward, or the log-sum would belong to other logits.
                    tile = torch.mm(wide_hidden[part], wide_weight.t()).to(hidden.dtype).float()
                else:
                    tile = torch.empty_like(kept[part, columns])
                for block in _blocks(tile):
                    here = slice(part.start + block.start, part.start + block.stop)
                    logp = tile[block]
                    if kept is not None:
                        logp = kept[here, columns]
                    else:
                        if temperature != 1.0:
                            logp.div_(temperature)
                        logp.sub_(log_sums[here, None])
                    mask = None if choices is None else choices[block]
                    tile[block] = gradient(logp, here, columns, mask)
                tile = tile.to(dtype)
                if grad_hidden is not None:
                    add_product(grad_hidden[part], tile, wide_weight)
                if grad_weight is not None:
                    if total is None:
                        total = torch.mm(tile.t(), wide_hidden[part]).to(sum_dtype(dtype))
                    else:
                        add_product(total, tile.t(), wide_hidden[part])
                del tile
            if grad_weight is not None:
                grad_weight[columns] = 0.0 if total is None else total  # None: of no tokens
        if grad_weight is not None:
            grad_weight[V:] = 0.0
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, *[None] * 5


def _tile_columns(device: torch.device, rows: int) -> int:
    return max(1, _chunk_bytes(device) // (4 * rows))


def _steps(size: int, step: int) -> Iterator[slice]:
    yield from (slice(at, min(at + step, size)) for at in range(0, size, step))


def _blocks(x: Tensor) -> Iterator[slice]:
    """Rows to work on at once: on a CPU the rows that fit a cache, all rows on other devices."""
    if x.device.type != "cpu":
        return _steps(len(x), max(len(x), 1))
    rows = max(1, BLOCK_BYTES // (4 * x.shape[1])) * torch.get_num_threads()
    return _steps(len(x), rows)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the dtype of `total`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(torch.mm(a, b))


def _probs(logp: Tensor, choices: Tensor | None) -> Tensor:
    """exp(logp), and 0 outside."""
    probs = logp.exp()
    return probs if choices is None else probs.masked_fill_(~choices, 0.0)
