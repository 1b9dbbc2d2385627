"""The output of each op of a forward, seen from outside: the model's ops in a wrapper.

# T tokens of the forward  C recorded calls  W numbers of one call per token
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn

from lockstep.ops.base import Ops
from lockstep.ops.context import PackedContext, PagedContext

Tensor = torch.Tensor
Around = Callable[..., Any]
"""Called as around(op, function, *args, **kwargs); its result goes to the model."""

DIGEST_NUMBERS = 1 << 20  # numbers that are widened at once: 8 MiB
DIGEST_SEED = 0


class Shape(Protocol):
    """Sizes of a model's inputs and paged cache: see `models.config.ModelConfig`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class Model(Protocol):
    """A decoder that computes by its `ops`: see `models.decoder.Decoder`."""

    ops: Ops

    @property
    def config(self) -> Shape: ...
    @property
    def layers(self) -> Iterable[nn.Module]: ...
    @property
    def head(self) -> Tensor: ...

    def __call__(
        self, ids_T: Tensor, positions_T: Tensor, context: PackedContext | PagedContext, /
    ) -> Tensor: ...


OP_NAMES = frozenset(
    {
        "linear",
        "expert_linear",
        "expert_linear_backward",
        "route",
        "combine",
        "rms_norm",
        "swiglu",
        "rope",
        "attention",
        "log_probs",
        "log_softmax",
    }
)
"""The methods of `Ops` that compute."""


class _WatchedOps:
    def __init__(self, ops: Ops, around: Around) -> None:
        self._ops, self._around = ops, around

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        return partial(self._around, name, value) if name in OP_NAMES else value


@contextmanager
def with_ops(model: Model, ops: Ops) -> Iterator[None]:
    """In the block, `model` computes by `ops`."""
    before, model.ops = model.ops, ops
    try:
        yield
    finally:
        model.ops = before


def around_every_op(model: Model, around: Around) -> AbstractContextManager[None]:
    """In the block, each op that the model calls goes through `around`.

    >>> def count(op, function, *args, **kwargs):
    ...     calls.append(op)
    ...     return function(*args, **kwargs)
    >>> from types import SimpleNamespace
    >>> calls, x, model = [], torch.ones(2, 2), SimpleNamespace(ops=Ops())
    >>> with around_every_op(model, count):
    ...     out = model.ops.linear(model.ops.swiglu(x), x[:, :1])
    >>> calls
    ['swiglu', 'linear']
    """
    return with_ops(model, cast(Ops, _WatchedOps(model.ops, around)))


@dataclass(frozen=True, slots=True)
class OpCall:
    """Names one call of a forward."""

    op: str
    """Method of `Ops`."""
    layer: int | None
    """None outside of all layers."""
    nth: int
    """From 0, among the calls of this op in this layer."""

    def __str__(self) -> str:
        where = "outside of the layers" if self.layer is None else f"layer {self.layer}"
        return f"{where}, {self.op}[{self.nth}]"


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One forward."""

    calls: list[OpCall]
    """[C]: calls in order."""
    kept: list[Tensor]
    """[C]: the result of `keep` for each call."""
    hidden: Tensor
    """[T, D]: the model's output."""


def record(
    model: Model,
    ids_T: Tensor,
    positions_T: Tensor,
    context: PackedContext | PagedContext,
    *,
    keep: Callable[[tuple[Tensor, ...]], Tensor],
) -> Record:
    """Runs the model once. keep: called with the outputs of each op, whose first dim is the tokens.

    Ops per pair of token and expert have no row per token and are left out; `route` before them and
    `combine` after them are kept. A `combine` over chunks of tokens counts as one call. Any other
    output without T rows is left out too.
    """
    calls: list[OpCall] = []
    kept: list[Tensor] = []
    count: Counter[tuple[str, int | None]] = Counter()
    layer: int | None = None
    is_by_pair = False
    chunks: list[Tensor] = []

    def around(op: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal is_by_pair
        out = function(*args, **kwargs)
        if op in ("expert_linear", "combine"):
            is_by_pair = op == "expert_linear"
        outputs: tuple[Any, ...] = out if isinstance(out, tuple) else (out,)
        if op == "combine" and len(outputs[0]) < len(ids_T):
            chunks.append(outputs[0].detach())
            if sum(len(chunk) for chunk in chunks) < len(ids_T):
                return out
            outputs = (torch.cat(chunks),)
            chunks.clear()
        if not is_by_pair and all(isinstance(o, Tensor) and len(o) == len(ids_T) for o in outputs):
            calls.append(OpCall(op, layer, count[op, layer]))
            count[op, layer] += 1
            kept.append(keep(tuple(o.detach() for o in outputs)))
        return out

    def enter(index: int | None, *_: object) -> None:
        nonlocal layer
        layer = index

    with ExitStack() as stack:
        for i, module in enumerate(model.layers):
            for handle in (
                module.register_forward_pre_hook(partial(enter, i)),
                module.register_forward_hook(partial(enter, None)),
            ):
                stack.callback(handle.remove)
        stack.enter_context(around_every_op(model, around))
        hidden = model(ids_T, positions_T, context)
    return Record(calls, kept, hidden)


def at_token(outputs: tuple[Tensor, ...], *, token: int) -> Tensor:
    """[W] float64: all numbers of one token."""
    return _numbers(outputs, slice(token, token + 1))[0]


def digests(outputs: tuple[Tensor, ...]) -> Tensor:
    """[T] int64: a hash of each token's numbers.

    Eight bytes in place of W numbers, so that two forwards over a long row can be compared whole.
    The hash is the sum of bits times odd constants, modulo 2^64: tokens that differ in one number
    never collide, others with probability of about 2^-63.
    """
    num_tokens = len(outputs[0])
    width = sum(o[:1].numel() for o in outputs)
    generator = torch.Generator().manual_seed(DIGEST_SEED)
    factors_W = torch.randint(-(1 << 63), (1 << 63) - 1, (width,), generator=generator) | 1
    factors_W = factors_W.to(outputs[0].device)
    rows = max(1, DIGEST_NUMBERS // width)
    parts = [
        (_numbers(outputs, slice(at, at + rows)).view(torch.int64) * factors_W).sum(1)
        for at in range(0, num_tokens, rows)
    ]
    return torch.cat(parts)


def _numbers(outputs: tuple[Tensor, ...], rows: slice) -> Tensor:
    """[rows, W] float64, which holds every dtype in use exactly. Equal numbers get equal bits: -0.0
    becomes 0.0, and every NaN the same NaN."""
    parts = [o[rows] for o in outputs]
    numbers = torch.cat([part.reshape(len(part), -1).double() for part in parts], 1) + 0.0
    return numbers.masked_fill_(numbers.isnan(), math.nan)
