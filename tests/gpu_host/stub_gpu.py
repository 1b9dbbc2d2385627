"""A GPU that is not there: the real code runs on it over fake tensors, and what it would have done
is counted.

Tensors have shapes and no numbers, so a model of any size runs, and reading a number is an error.
Triton kernels are not run; each distinct instance is noted, to be compiled for a chip by
`compiled.py`. The device is torch's PrivateUse1: autograd does not know fake tensors on "cuda" in a
build of torch without CUDA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.jit import JITFunction

backend_registration._setup_privateuseone_for_python_backend("gpu")  # for the whole process
DEVICE = torch.device("gpu", 0)
H200 = SimpleNamespace(
    name="a stub",
    multi_processor_count=132,
    total_memory=141 << 30,
    major=9,
    minor=0,
    shared_memory_per_block_optin=227 << 10,
)

NO_KERNEL = {
    *("alias", "as_strided", "detach", "diagonal", "expand", "flatten", "narrow", "permute"),
    *("reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose"),
    *(
        "unbind",
        "unflatten",
        "unfold",
        "unsqueeze",
        "view",
        "_reshape_alias",
        "_unsafe_view",
        "lift_fresh",
    ),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "device"),
}
"""Aten ops that launch nothing. Copies are counted apart."""


@dataclass
class Counts:
    """What the host asked of the GPU."""

    kernels: Counter[str] = field(default_factory=Counter)
    """Launches of Triton kernels by name."""
    aten: Counter[str] = field(default_factory=Counter)
    """Aten ops that launch something, by name."""
    to_device: int = 0
    """Copies from the host."""
    to_host: int = 0
    """Copies to the host."""
    waits: int = 0
    """Copies that the host waits for: those to it, and those from memory that is not pinned."""

    @property
    def num_launches(self) -> int:
        return self.kernels.total() + self.aten.total()


class StubGpu:
    """Counts of the code that runs in `stub_gpu`."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.instances: dict[Any, Any] = {}
        """Key of each distinct kernel instance -> (kernel, arguments by name, options)."""
        self.largest = 0
        """Elements of the largest tensor that an op returned since it was set to 0."""

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """The counts of a block."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before


class _Watch(TorchDispatchMode):
    def __init__(self, gpu: StubGpu, fakes: FakeTensorMode) -> None:
        super().__init__()
        self._gpu, self._fakes = gpu, fakes

    def _faked(self, x: torch.Tensor) -> torch.Tensor:
        return x if isinstance(x, FakeTensor) else self._fakes.from_tensor(x)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _is_of_host(args, kwargs or {}):
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, self._faked, (args, kwargs))
        out = func(*args, **(kwargs or {}))
        counts, name = self._gpu.counts, func.overloadpacket.__name__
        tensors = [x for x in (out if isinstance(out, tuple | list) else [out]) if _is_on_gpu(x)]
        self._gpu.largest = max([self._gpu.largest, *(x.numel() for x in tensors)])
        inputs = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if _is_on_gpu(x)]
        is_moved = name in ("_to_copy", "copy_", "to")
        if is_moved and bool(inputs) != bool(tensors):
            counts.to_host += not tensors
            counts.to_device += bool(tensors)
            counts.waits += not (tensors and (kwargs or {}).get("non_blocking"))
        elif name == "copy_" and not _is_on_gpu(args[1]):
            counts.to_device += 1
            counts.waits += not (len(args) > 2 and args[2])
        elif name in ("to", "contiguous") and out is args[0]:
            pass  # it is so already
        elif tensors and name not in NO_KERNEL:
            counts.aten[name] += 1
        return out


def _is_of_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op reads and makes real tensors of the host alone: it is run."""
    if torch.device(kwargs.get("device") or "cpu") != torch.device("cpu"):
        return False
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return not any(isinstance(x, FakeTensor) for x in leaves)


def _is_on_gpu(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == DEVICE.type


@contextmanager
def stub_gpu(monkeypatch: pytest.MonkeyPatch, *, chip: int = 9) -> Iterator[StubGpu]:
    """In the block, tensors on `DEVICE` are fake. Reading one raises DataDependentOutputException
    (or an error of numpy's), which a test must not see."""
    gpu = StubGpu()

    def launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        gpu.counts.kernels[kernel.__name__] += 1
        bound = dict(zip(kernel.arg_names, args, strict=True))
        gpu.instances.setdefault(_instance(kernel, bound, options), (kernel, bound, options))

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr("lockstep.ops.cuda_kernels.generation", lambda: chip)
    monkeypatch.setattr("lockstep.ops.cuda_attention.generation", lambda: chip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: H200)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (chip, 0))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: torch.empty(x.shape, dtype=x.dtype))
    fakes = FakeTensorMode()
    with fakes, _Watch(gpu, fakes), monkeypatch.context() as inside:
        inside.setattr(torch.cuda, "is_available", lambda: True)
        yield gpu


def _instance(kernel: JITFunction, bound: dict[str, Any], options: dict[str, Any]) -> Any:
    """What Triton compiles anew for: dtypes, constants, options, and which arguments are given."""
    parts: list[Any] = [kernel.__name__]
    for parameter, value in zip(kernel.params, bound.values(), strict=True):
        if parameter.is_constexpr:
            parts.append(value)
        elif isinstance(value, torch.Tensor):
            parts.append(value.dtype)
        elif hasattr(value, "block_shape"):
            parts.append((value.base.dtype, tuple(value.block_shape)))
        elif value is None or parameter.do_not_specialize:
            parts.append(type(value))
        elif isinstance(value, int):
            parts.append((value == 1, value % 16 == 0, value.bit_length() > 31))
    return (*parts, *sorted(options.items()))
