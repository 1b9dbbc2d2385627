"""Tests before a model is loaded whether this machine's GPU can be used, and names the reason if
not.

torch is imported inside functions: settings are read without it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
from contextlib import AbstractContextManager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from lockstep.errors import ConfigError, EngineError, MissingExtraError, require_package

Device = Literal["cpu", "cuda"]

LEAST_CAPABILITY = (8, 0)
"""Ampere: the first chips whose tensor cores take bfloat16, which the kernels are written for."""
SEGMENTS_BYTES = 256 << 20
"""At most this much is lost where torch rounds a cache's tensors up to segments, of 20 MiB for one
between 1 and 10 MiB."""
TAKEN_SHARE = 0.1
"""If other processes take more than this share of a GPU's memory, they are named."""


def shows_gpu(root: Path = Path("/")) -> bool:
    """True if an NVIDIA driver is loaded (or, in WSL 2, handed in) and its GPUs are not hidden."""
    drivers = ("dev/nvidiactl", "usr/lib/wsl/lib/libcuda.so.1")
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not is_hidden and any((root / driver).exists() for driver in drivers)


def check_driver(setting: str) -> None:
    """Raises ConfigError, before torch is imported, where no GPU can be there for it."""
    if not shows_gpu():
        raise ConfigError(
            f"{setting}, and this machine shows no GPU: no NVIDIA driver is loaded, or "
            "CUDA_VISIBLE_DEVICES hides them. `nvidia-smi -L` lists the GPUs. Set device=auto, "
            "which takes one if there is one."
        )
    if (found := version("torch")).endswith("+cpu"):
        raise ConfigError(f"{setting}, and torch {found} {_without_cuda(found)}.")


def _without_cuda(found: str) -> str:
    default = f"pip install --force-reinstall torch=={found.partition('+')[0]}"
    return f"is built without CUDA. Install its default build: {default}"


def check_gpu(setting: str) -> None:
    """Raises ConfigError or MissingExtraError if torch and the kernels cannot use the GPU of this
    process. setting: what asks for one."""
    import torch

    if reason := _why_unseen():
        raise ConfigError(f"{setting}, and torch {torch.__version__} {reason}. Or set device=cpu.")
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"{setting}: {name} has compute capability {_dotted(capability)}, and the kernels need "
            f"{_dotted(LEAST_CAPABILITY)} or newer (A100, RTX 30 and later). Choose another GPU of "
            "this machine with CUDA_VISIBLE_DEVICES=N, or device=cpu."
        )
    require_package("triton", extra="cuda", needed_for=setting)
    if reason := _why_no_compiler():
        raise ConfigError(
            f"{setting}: Triton compiles a launcher for each kernel in C, and {reason}. Or set "
            "device=cpu."
        )


def _why_unseen() -> str:
    """Why torch cannot use a GPU, and the remedy; empty if it can."""
    import torch

    if torch.version.cuda is None:
        return _without_cuda(torch.__version__)
    if torch.cuda.is_available():
        return ""
    remedy = "`nvidia-smi` shows what the driver sees"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if "too old" in text:
            remedy = f"Update the driver, or install a torch for a CUDA before {torch.version.cuda}"
        elif "no NVIDIA driver" in text:
            remedy = "Install NVIDIA's driver; give a container the GPUs (docker run --gpus all)"
        elif hidden := os.environ.get("CUDA_VISIBLE_DEVICES"):
            remedy = f"CUDA_VISIBLE_DEVICES={hidden} must name a GPU that `nvidia-smi -L` lists"
        return f"cannot use one: {text.partition('. ')[0].rstrip('.')}. {remedy}"
    return f"sees none. {remedy}"


def _why_no_compiler() -> str:
    """Why Triton could not compile C here, and the remedy; empty if it can."""
    asked = os.environ.get("CC")
    if asked is not None and shutil.which(asked) is None:
        return f"CC={asked} is no program here. Set CC to a C compiler, or unset it"
    if asked is None and not (shutil.which("gcc") or shutil.which("clang")):
        return "this machine has neither gcc nor clang. Install one (apt-get install gcc)"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"{header} is missing. Install Python's headers (apt-get install python3-dev)"
    return ""


def free_gpu_memory() -> tuple[int, str] | None:
    """(free bytes of this process' GPU, their source); None without a GPU. While torch is not
    imported, nvidia-smi tells the least of all GPUs that are not hidden."""
    if "torch" in sys.modules:
        import torch

        if not torch.cuda.is_available():
            return None
        free, total = torch.cuda.mem_get_info()
        return free, f"free on the GPU{taken_by_others(free, total)}"
    only = ("-i", visible) if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) else ()
    rows = _nvidia_smi("--query-gpu=memory.free", "--format=csv,noheader,nounits", *only)
    free = [int(row[0]) << 20 for row in rows if row[0].isdigit()]
    return (min(free), "free on the GPU, by nvidia-smi") if free and shows_gpu() else None


def release_gpu_memory() -> None:
    """Returns the memory that torch keeps for later tensors to the driver: for other processes on
    the GPU. Without a GPU it does nothing."""
    import torch

    torch.cuda.empty_cache()


class KeptAddresses:
    """Memory of this process' GPU that is freed under tensors which keep their addresses, so that
    captured graphs stay valid. By torch-memory-saver, as in SGLang, slime and verl."""

    def __init__(self) -> None:
        from torch_memory_saver import torch_memory_saver  # pyright: ignore

        with suppress(AttributeError):  # it is in use already
            torch_memory_saver.hook_mode = "torch"  # the other one preloads a library
        self._saver, self._tag = torch_memory_saver, f"lockstep {id(self)}"
        # Never deleted: the end of a pool of memory ends the process with an error, even when
        # Python exits, and a second object at this address would get the pool, which is paused.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self._num_bytes = 0

    @staticmethod
    def can_be_kept() -> bool:
        """True if the package is installed and works beside torch's settings of memory."""
        settings = "".join(os.environ.get(f"PYTORCH_{a}ALLOC_CONF", "") for a in ("", "CUDA_"))
        return bool(find_spec("torch_memory_saver")) and "expandable_segments:True" not in settings

    def region(self, num_bytes: int) -> AbstractContextManager[None]:
        """Tensors that are allocated inside, of `num_bytes`, can be freed and taken again."""
        self._check_room(num_bytes)
        self._num_bytes += num_bytes
        return self._saver.region(self._tag)

    def free(self) -> None:
        import torch

        torch.cuda.synchronize()  # steps may still write
        self._saver.pause(self._tag)

    def take(self) -> None:
        """Takes back the memory, which has any content."""
        self._check_room(self._num_bytes, num_paused=self._num_bytes)
        self._saver.resume(self._tag)

    def _check_room(self, num_bytes: int, *, num_paused: int = 0) -> None:
        """Raises EngineError if they are not free; the package would end the process."""
        import torch

        release_gpu_memory()
        free, total = torch.cuda.mem_get_info()
        if free < num_bytes + SEGMENTS_BYTES:
            takers = taken_by_others(free, total, num_paused=num_paused)
            raise EngineError(
                f"the engine needs {num_bytes / 2**30:.1f} GiB of the GPU for its cache, found "
                f"{free / 2**30:.1f} free{takers}. Lower engine.kv_cache_tokens."
            )


def total_gpu_memory() -> int:
    """All bytes of this process' GPU, free or not."""
    import torch

    return torch.cuda.mem_get_info()[1]


def taken_by_others(free: int, total: int, *, num_paused: int = 0) -> str:
    """Says, after a number of free bytes, which processes hold the rest of this process' GPU. Empty
    below TAKEN_SHARE. Processes outside of this container have no name here. num_paused: bytes that
    torch counts as its own while they are free."""
    import torch

    taken = total - free - (torch.cuda.memory_reserved() - num_paused)
    if taken < TAKEN_SHARE * total:
        return ""
    gpu = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    rows = _nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader")
    others = [r for r in rows if len(r) == 3 and r[0] == gpu and r[1] != str(os.getpid())]
    by = ", ".join(f"process {row[1]} ({row[2]})" for row in others) or "other processes"
    return (
        f", where {by} took {taken / 2**30:.1f} of {total / 2**30:.1f} GiB: end what you do not "
        "need, or choose another GPU with CUDA_VISIBLE_DEVICES=N"
    )


def _nvidia_smi(*query: str) -> list[list[str]]:
    """The cells of its answer; empty if there is none."""
    try:
        answer = subprocess.check_output(("nvidia-smi", *query), text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]


def _dotted(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"


def main() -> int:
    """Prints whether the GPU can be used. Returns 0 if so; else 1, and prints the reason."""
    try:
        check_gpu("device=cuda")
    except (ConfigError, MissingExtraError) as error:
        print(error, file=sys.stderr)
        return 1
    import torch

    capability = _dotted(torch.cuda.get_device_capability())
    print(
        f"{torch.cuda.get_device_name()} can be used: compute capability {capability}, "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {version('triton')}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
