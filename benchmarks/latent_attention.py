"""Latent attention over cached latents against the form that unfolds keys and values.

    python benchmarks/latent_attention.py

Prints the bytes of the cache per token and layer, of DeepSeek V3's config and of the timed one;
then CPU seconds of one layer's attention under the contract's ops, of a decode step (8 sequences
with 1,024 tokens before them, pages of 16, without resident rows) and of a training pass (forward
and backward of one row). The unfolded form is written here: it caches and attends to a key and a
value for each head. Medians of rounds that alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

from measuring import Row, in_turn, main, models_of, row, seconds_of

import numpy as np
import torch
import torch.nn.functional as F

from lockstep.models.attention import rope_table
from lockstep.models.config import ModelConfig
from lockstep.models.latent_attention import LATENT_EPS, LatentAttention
from lockstep.models.layer_inputs import LayerInputs
from lockstep.ops.base import Context
from lockstep.ops.context import AttentionSpec, PackedContext, PagedContext
from lockstep.ops.invariant import InvariantOps

DTYPE, PAGE, LENGTH, BATCH = torch.bfloat16, 16, 1024, 8
OPS = InvariantOps()
DEEPSEEK_V3, TIMED = map(ModelConfig.from_hf, models_of("latent_attention").values())
"""The timed one has an eighth of DeepSeek V3's heads, and a quarter of its widths."""


class Unfolded(LatentAttention):
    """The same numbers up to rounding, by keys and values of all heads."""

    def forward(self, x_TD, inputs, norm, output_norm):
        at, H, T, ops = self.latent, self.num_heads, len(x_TD), inputs.ops
        assert self.q_proj is not None, "the config that is timed has one projection"
        q_TH = self.q_proj(x_TD, inputs).view(T, H, -1)
        q_nope, q_rope = q_TH.split([at.nope_dim, at.rope_dim], -1)
        folded, k_rope = self.kv_a_proj(x_TD, inputs).split([at.kv_rank, at.rope_dim], -1)
        folded = ops.rms_norm(folded.contiguous(), self.kv_a_norm, LATENT_EPS)
        k_nope, v = self.kv_b_proj(folded, inputs).view(T, H, -1).split(
            [at.nope_dim, at.value_dim], -1
        )  # fmt: skip
        parts = torch.cat([q_rope, k_rope[:, None]], 1)
        parts = parts.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        q_rope, k_rope = ops.rope(parts, inputs.cos, inputs.sin).split([H, 1], 1)
        out = ops.attention(
            torch.cat([q_nope, q_rope], -1),
            torch.cat([k_nope, k_rope.expand(-1, H, -1)], -1),
            F.pad(v, (0, at.nope_dim + at.rope_dim - at.value_dim)),
            AttentionSpec(None, None, self.scale, self.layer),
            inputs.context,
        )[..., : at.value_dim].flatten(1)
        return self.o_proj.added(x_TD, out, output_norm, self.eps, inputs)


def make(kind: type[LatentAttention]) -> LatentAttention:
    assert TIMED.latent is not None, "it has one"
    torch.manual_seed(0)
    layer = kind(TIMED, TIMED.latent, 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.05)
    return layer.to(DTYPE)


def run(layer: LatentAttention, x_TD: torch.Tensor, positions_T: torch.Tensor, context: Context):
    cos, sin = rope_table(TIMED)
    return layer(x_TD, LayerInputs(OPS, context, cos[positions_T], sin[positions_T]), None, None)


def inputs(num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, TIMED.hidden_size, generator=generator).to(DTYPE)


def train(layer: LatentAttention, num_tokens: int) -> torch.Tensor:
    out = run(layer, inputs(num_tokens), torch.arange(num_tokens), PackedContext.of([num_tokens]))
    out.float().square().sum().backward()
    return out


def step_of(layer: LatentAttention) -> Callable[[], object]:
    """A decode step, after its pages were filled with random keys and values."""
    is_unfolded = isinstance(layer, Unfolded)
    heads, width = (TIMED.num_heads, TIMED.head_dim) if is_unfolded else (1, TIMED.key_dim)
    pages = LENGTH // PAGE + 1
    keys = torch.randn(1, heads, BATCH * pages, PAGE, width).to(DTYPE)
    values = keys.clone() if is_unfolded else keys
    tables = np.arange(BATCH * pages).reshape(BATCH, pages)
    starts, stops = [LENGTH] * BATCH, [LENGTH + 1] * BATCH
    positions, x_TD = torch.full((BATCH,), LENGTH), inputs(BATCH)

    def step() -> object:
        context = PagedContext.of(keys, values, tables, starts, stops)
        with torch.inference_mode():
            return run(layer, x_TD, positions, context)

    return step


def milliseconds(rounds: int, *sides: Callable[[], object]) -> list[float]:
    """The median of each side, after a call that warms up."""
    timed = {str(at): partial(seconds_of, side) for at, side in enumerate(sides)}
    return [1e3 * median(taken[1:]) for taken in in_turn(rounds + 1, timed).values()]


def compare(*, rounds: int = 5, tokens: tuple[int, ...] = (512, 2048)) -> Iterator[Row]:
    how = "latents against unfolded"
    for name, config in (("DeepSeek V3", DEEPSEEK_V3), ("timed", TIMED)):
        ours = config.cached_per_token * DTYPE.itemsize
        theirs = 2 * config.num_heads * config.head_dim * DTYPE.itemsize
        yield row(f"cache of {name}", ours, theirs, "bytes per token and layer", how=how)
    latent, unfolded = make(LatentAttention), make(Unfolded)
    found, wanted = (train(layer, 64).detach().float() for layer in (latent, unfolded))
    distance = float((found - wanted).norm() / wanted.norm())
    assert distance < 0.02, f"the forms differ by {distance:.2g}: roundings of bfloat16 do not"
    decoded = f"latent attention, decode step, {BATCH} sequences of {LENGTH:,} tokens"
    taken = milliseconds(4 * rounds, step_of(latent), step_of(unfolded))
    yield row(decoded, *taken, "ms", how=how)
    for count in tokens:
        taken = milliseconds(rounds, *(partial(train, side, count) for side in (latent, unfolded)))
        yield row(f"latent attention, training pass of {count:,} tokens", *taken, "ms", how=how)


if __name__ == "__main__":
    main(compare, short={"rounds": 2, "tokens": (512,)})
