"""A model's ops, watched call by call, and ops whose bits depend on company."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lockstep.ops.base import Ops
from lockstep.ops.invariant import InvariantOps

OP_NAMES = {name for name in vars(Ops) if name[0] != "_" and not name.endswith(("dtype", "name"))}


class _WatchedOps:
    def __init__(self, ops: Ops, around: Callable[..., Any]) -> None:
        self._ops, self._around = ops, around

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        return partial(self._around, name, value) if name in OP_NAMES else value


@contextmanager
def around_every_op(model: Any, around: Callable[..., Any]) -> Iterator[None]:
    """In the block, each op that the model calls goes through around(op, function, *args,
    **kwargs), whose result the model gets."""
    before = model.ops
    model.ops = _WatchedOps(before, around)
    try:
        yield
    finally:
        model.ops = before


class CrowdedOps(InvariantOps):
    """Products of several weights whose bits depend on how many there are."""

    def expert_linear(self, x, weight, bias, tokens_per_expert):
        out = super().expert_linear(x, weight, bias, tokens_per_expert)
        return out * (1 + 2**-20) if len(weight) > 4 else out
