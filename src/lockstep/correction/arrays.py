"""Functions on tensors for callers with numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

Values = torch.Tensor | npt.NDArray[Any]


def takes_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of tensors, which also takes numpy arrays and then gives arrays. Its first
    argument may be a list of numbers.

    >>> takes_arrays(torch.neg)(np.array([1.0, -2.0]))
    array([-1.,  2.])
    """

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        first = cast("list[Any]", args[0]) if args and isinstance(args[0], list) else None
        if first is not None and not any(isinstance(x, torch.Tensor) for x in first):
            args = (np.asarray(first), *args[1:])
        if not any(isinstance(x, np.ndarray) for x in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        found: Any = function(*map(_tensor, args), **{k: _tensor(x) for k, x in kwargs.items()})
        if is_dataclass(found) and not isinstance(found, type):
            return replace(found, **{f.name: _array(getattr(found, f.name)) for f in fields(found)})
        return _array(found)

    return called


def _tensor(x: Any) -> Any:
    """`x`, or a tensor of an array of numbers; names of groups may be texts."""
    is_number = isinstance(x, np.ndarray) and x.dtype.kind in "biuf"  # pyright: ignore
    return torch.from_numpy(x) if is_number else x  # pyright: ignore


def _array(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.numpy()
    if isinstance(x, tuple):
        return tuple(map(_array, cast("tuple[Any, ...]", x)))
    known: Any = x
    return {k: _array(v) for k, v in known.items()} if isinstance(x, Mapping) else x
