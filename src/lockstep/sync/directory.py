"""Weights in transit through a file system: a directory per version.

SCRATCH/weights/v000123/config.json, model.safetensors, ...
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import EngineError

SPARE_BYTES = 64 << 20
"""Space that is left free: metrics and trajectories go to the same disk."""


class WeightsDirectory:
    """Versions written for an engine. The newest one is kept, for replicas that restart."""

    def __init__(self, place: Path | None) -> None:
        """place: None makes a temporary directory. Versions left by an earlier process are
        removed."""
        self.path = Path(tempfile.mkdtemp(prefix="lockstep-weights-")) if place is None else place
        for old in self._versions():
            shutil.rmtree(old)

    def check_room(self, version: int, num_bytes: int) -> None:
        """Raises EngineError if there is no room for a version of this size beside the last one."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise self._refusal(version, error) from error
        if free < num_bytes + SPARE_BYTES:
            raise EngineError(
                f"sync: {self.path} has {_mib(free)} free; the weights of version {version} take "
                f"{_mib(num_bytes)}, beside the engine's present ones. Free space, or set "
                "sync.directory to a larger file system that the engine sees."
            )

    def write(self, version: int, write: Callable[[Path], object]) -> Path:
        """The directory of this version, filled by `write`. Raises EngineError if the disk refuses;
        nothing is left of it then."""
        target = self.path / f"v{version:06d}"
        shutil.rmtree(target, ignore_errors=True)
        try:
            write(target)
        except OSError as error:
            shutil.rmtree(target, ignore_errors=True)
            raise self._refusal(version, error) from error
        return target

    def _refusal(self, version: int, error: OSError) -> EngineError:
        return EngineError(
            f"sync: the weights of version {version} cannot be written to {self.path} "
            f"({error.strerror or error}). The engine still runs those before. Free or repair it, "
            "or set sync.directory to another file system that the engine sees."
        )

    def keep_only(self, newest: Path | None) -> None:
        """Removes every version except this one, which the engine has loaded; None: all."""
        for old in self._versions():
            if old != newest:
                shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Removes all remaining versions."""
        self.keep_only(None)
        with contextlib.suppress(OSError):  # not made, or with files of somebody else
            self.path.rmdir()

    def _versions(self) -> list[Path]:
        return list(self.path.glob("v[0-9-]*"))


def size_of(directory: Path) -> int:
    """Bytes of the files in a directory."""
    return sum(file.stat().st_size for file in directory.iterdir())


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"
