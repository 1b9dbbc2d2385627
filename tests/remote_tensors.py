"""A device that is not there: its tensors compute on the CPU, and each wait of the host is counted.

To torch they lie on the device "meta". The host sees their numbers through a copy alone, and an op
that mixes them with tensors of the host is an error, as on a GPU.
"""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")

WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal"),
    *("unique_consecutive", "bincount", "is_nonzero", "nonzero_static", "_linalg_check_errors"),
}
"""Ops whose result has a shape or a value that the host must wait for."""


class Remote(torch.Tensor):
    """A tensor of the device. `inner` has its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Remote":
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of the block that counts")


class RemoteDevice(TorchDispatchMode):
    """In the block, tensors can be sent to the device, and `waits` counts what the host waits for.

    >>> with RemoteDevice() as device:
    ...     total = device.put(torch.ones(3)).sum()
    ...     device.waits.total(), total.tolist(), device.waits.total()
    (0, 3.0, 1)
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def put(self, values: torch.Tensor) -> torch.Tensor:
        return Remote(values.clone())

    def numbers(self, values: torch.Tensor) -> torch.Tensor:
        """The numbers of a tensor of the device, uncounted."""
        assert isinstance(values, Remote), f"{type(values)} is not on the device"
        return values.inner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        remote = {id(x.inner): x for x in given if isinstance(x, Remote)}
        if name in ("_pin_memory", "pin_memory", "is_pinned", "_is_pinned"):
            return args[0] if "is" not in name else False
        is_sent = kwargs.get("device") is not None and torch.device(kwargs["device"]) == DEVICE
        is_fetched = kwargs.get("device") is not None and not is_sent and bool(remote)
        if is_sent:
            kwargs["device"] = torch.device("cpu")
        if name not in ("_to_copy", "copy_"):
            mixed = [x for x in given if x.ndim and not isinstance(x, Remote)]
            assert not (remote and mixed), f"{name} mixes tensors of the host with the device's"
        elif name == "copy_":
            is_fetched = isinstance(args[1], Remote) and not isinstance(args[0], Remote)
        is_bool_index = name in ("index", "index_put_") and any(
            x.dtype == torch.bool for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)
        )
        is_unsized = name == "repeat_interleave" and kwargs.get("output_size") is None
        is_checked = name == "segment_reduce" and not kwargs.get("unsafe")
        if is_fetched or (
            remote and (name in WAITING or is_bool_index or is_unsized or is_checked)
        ):
            self.waits[name] += 1
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Remote) else x, (args, kwargs))
        found = func(*args, **kwargs)
        if is_fetched or not (remote or is_sent):
            return found

        def wrapped(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return remote[id(x)] if id(x) in remote else Remote(x)

        return tree_map(wrapped, found)
