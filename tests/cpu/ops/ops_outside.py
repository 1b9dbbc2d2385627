"""Finds computation in a model that does not go through its ops.

The promises of ops hold for their own functions only. Other code may move numbers and add, multiply
or compare them one by one, since each result then depends on its operands alone. It may not sum,
exponentiate or normalise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker
from watched_ops import around_every_op

from lockstep.ops.context import PackedContext, PagedContext

Tensor = torch.Tensor

EXACT = {
    "moves numbers or reshapes them": """
        _reshape_alias _to_copy _unsafe_view alias as_strided cat clone constant_pad_nd copy detach
        diagonal embedding expand flip gather index index_copy index_select lift_fresh masked_fill
        masked_select narrow permute repeat roll select slice split split_with_sizes squeeze stack
        t transpose tril triu unbind unfold unsqueeze view where
        """,
    "makes constants": """
        arange empty empty_like empty_strided fill full full_like new_empty new_empty_strided
        new_full new_ones new_zeros ones ones_like scalar_tensor zero zeros zeros_like
        """,
    "rounds once, number by number (IEEE 754)": """
        abs add clamp clamp_max clamp_min div maximum minimum mul neg relu sub
        """,
    "chooses among numbers: the largest is the same in every order": """
        _local_scalar_dense amax amin any all argmax argmin argsort eq equal ge gt isfinite isinf
        isnan le logical_and logical_not logical_or lt max min ne nonzero sort topk
        """,
}
"""Reason -> aten ops that a model may call on floats itself, in place (`add_`) or not. On integers
and booleans it may call any."""

_IS_EXACT = {name for names in EXACT.values() for name in names.split()}


def ops_outside(
    model: Any, ids_T: Tensor, positions_T: Tensor, context: PackedContext | PagedContext
) -> list[str]:
    """Lists ops that the model computes itself and may not: "aten.gelu in Decoder.layers.0.mlp".

    Names each op once, with the first module that calls it, in the order of the forward. A few
    tokens are enough. Runs the model twice and looks at the second run, because tables that the
    first forward makes and keeps (rotary angles) are the same for both sides. Kernels that torch's
    dispatcher does not see, such as Triton's, are not found.
    """
    with torch.no_grad():
        model(ids_T, positions_T, context)
        tracker = ModuleTracker()
        outside = _Outside(tracker)
        with around_every_op(model, outside.inside), tracker, outside:
            model(ids_T, positions_T, context)
    return [f"{op} in {module}" for op, module in outside.found.items()]


class _Outside(TorchDispatchMode):
    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        """Op -> first module that called it."""
        self._tracker = tracker
        self._is_inside = False

    def inside(self, _: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_inside = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._is_inside and not _is_exact(func, args, kwargs, out):
            where = max(self._tracker.parents - {"Global"}, key=len, default="the model")
            self.found.setdefault(str(func.overloadpacket), where)
        return out


def _is_exact(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> bool:
    tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
    if not any(x.is_floating_point() or x.is_complex() for x in tensors):
        return True
    # x + alpha * y rounds once in a vector (fused) and twice in the vector's tail.
    return func.overloadpacket.__name__.rstrip("_") in _IS_EXACT and kwargs.get("alpha", 1) == 1
