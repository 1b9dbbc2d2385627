"""Saved weights under a directory: checkpoints with a path, unnamed samplers, states of models.

    checkpoints/MODEL/weights/NAME            tinker://MODEL/weights/NAME
    checkpoints/MODEL/sampler_weights/NAME    tinker://MODEL/sampler_weights/NAME
    samplers/SAMPLER                          unnamed ones, until their session ends
    states/MODEL/SEQ_ID                       what a restart continues from

A directory is there whole or not at all: it is written beside its place and renamed.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from lockstep.agent.gateway.reading import Value
from lockstep.store.files import replace_directory, sync_tree
from lockstep.tinker.journal import Checkpoint, Journal
from lockstep.tinker.requests import invalid, not_found

SCHEME = "tinker://"
SEGMENTS = {"weights": "training", "sampler_weights": "sampler"}
"""Second part of a path -> kind of the checkpoint."""
PARTIAL, REPLACED = ".partial", ".replaced"
MIN_TTL_SECONDS, MAX_TTL_SECONDS = 1, 10 * 366 * 86400

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@-]{0,127}")


def path_of(model_id: str, segment: str, name: str) -> str:
    """Raises TinkerError (422) for a name that cannot be a directory's."""
    if not _NAME.fullmatch(name) or name.endswith((PARTIAL, REPLACED)):
        raise invalid(
            f"the name {name[:80]!r} cannot name a checkpoint; expected 1 to 128 letters, digits "
            "or any of _ - . = + @, without a slash, not beginning with a dot."
        )
    return f"{SCHEME}{model_id}/{segment}/{name}"


class CheckpointFiles:
    """The directory, and the records of the checkpoints in it."""

    def __init__(self, directory: Path, journal: Journal) -> None:
        self.directory, self._journal = directory, journal
        self.known = journal.all(Checkpoint)
        """Path -> checkpoint. Who adds one writes its record together with the request's result."""
        self._tidy()

    def _tidy(self) -> None:
        """Removes what a killed process left half written or half deleted."""
        for replaced in self.directory.rglob(f"*{REPLACED}"):
            place = replaced.with_name(replaced.name.removesuffix(REPLACED))
            if not place.exists():
                os.replace(replaced, place)
        for pattern in (f"*{PARTIAL}", f"*{REPLACED}"):
            for left in list(self.directory.rglob(pattern)):
                shutil.rmtree(left, ignore_errors=True)
        known = {self.place(path) for path in self.known}
        for left in self.directory.glob("checkpoints/*/*/*"):
            if left not in known:
                shutil.rmtree(left, ignore_errors=True)

    def place(self, path: str) -> Path:
        """The directory of a path that is well formed."""
        return self.directory / "checkpoints" / path.removeprefix(SCHEME)

    async def write(self, place: Path, write: Callable[[Path], Awaitable[None]]) -> None:
        """Makes or replaces the directory `place`, which `write` fills."""
        partial, replaced = (place.with_name(place.name + end) for end in (PARTIAL, REPLACED))
        for left in (partial, replaced):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            await write(partial)
            await asyncio.to_thread(sync_tree, partial)
            replace_directory(partial, place, aside=replaced)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    async def link(self, source: Path, place: Path) -> None:
        """Makes `place` the same directory as `source`, of the same files."""

        async def write(partial: Path) -> None:
            shutil.copytree(source, partial, copy_function=os.link, dirs_exist_ok=True)

        await self.write(place, write)

    def remove(self, place: Path) -> None:
        """Deletes a directory, if it exists."""
        shutil.rmtree(place, ignore_errors=True)

    # -- paths ------------------------------------------------------------------------------------

    def find(self, path: str) -> Checkpoint:
        """Raises TinkerError: 404 for an unknown path, 422 for another text."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in SEGMENTS:
            raise invalid(
                f"{path[:200]!r} is no path of a checkpoint; expected tinker://MODEL/weights/NAME "
                "or tinker://MODEL/sampler_weights/NAME, as save_state returns it."
            )
        found = self.known.get(path)
        if found is None or found.is_over:
            raise not_found(
                f"{path[:200]} is not here: it was never saved on this server, was deleted, or its "
                "time (ttl_seconds) is over. `tinker checkpoint list` lists the others."
            )
        return found

    def of_model(self, model_id: str | None = None) -> Iterator[Checkpoint]:
        """All checkpoints of a model, or of all, the latest first."""
        prefix = SCHEME if model_id is None else f"{SCHEME}{model_id}/"
        for checkpoint in sorted(self.known.values(), key=lambda each: -each.created):
            if checkpoint.id.startswith(prefix) and not checkpoint.is_over:
                yield checkpoint

    def delete(self, checkpoint: Checkpoint) -> None:
        """Forgets it first: a kill in between leaves a directory, which the next start removes."""
        self._journal.remove(checkpoint)
        del self.known[checkpoint.id]
        self.remove(self.place(checkpoint.id))

    def set_ttl(self, checkpoint: Checkpoint, seconds: int | None) -> None:
        checkpoint.expires = expiry(seconds)
        self._journal.put(checkpoint)

    def expire(self) -> None:
        """Deletes expired checkpoints."""
        for checkpoint in [each for each in self.known.values() if each.is_over]:
            self.delete(checkpoint)


def check_ttl(seconds: Value) -> int | None:
    """A lifetime in seconds; None has no end. Raises Refusal."""
    return seconds.integer(MIN_TTL_SECONDS, MAX_TTL_SECONDS)


def expiry(seconds: int | None) -> float | None:
    return None if seconds is None else time.time() + seconds


def size_of(place: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
