"""The parts that models, samplers and listings of one server work with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.agent.gateway.reading import Value
from lockstep.tinker.checkpoints import CheckpointFiles
from lockstep.tinker.futures import Futures
from lockstep.tinker.journal import Journal
from lockstep.tinker.origins import Origins
from lockstep.tinker.requests import BaseModel, ModelSpec, not_found
from lockstep.tinker.sessions import Sessions
from lockstep.tinker_config import TinkerConfig

if TYPE_CHECKING:
    from lockstep.tinker.embedded import EmbeddedBackend
    from lockstep.tinker.record import ModelRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The backend, the journal, the saved weights, the settings and the clients of one server."""

    backend: EmbeddedBackend
    journal: Journal
    store: CheckpointFiles
    config: TinkerConfig
    bases: Mapping[str, BaseModel]
    """Name -> base model."""
    sessions: Sessions
    futures: Futures
    origins: Origins
    open_record: Callable[[str, ModelSpec], ModelRecord] | None
    """Begins the record of a model by its id; None keeps none."""

    def base(self, name: Value) -> BaseModel:
        """Raises TinkerError (404)."""
        found = self.bases.get(name.text().partition(":")[0])
        if found is None:
            raise not_found(
                f"base_model={name.text()[:120]!r} is not served here; expected "
                f"{' or '.join(map(repr, self.bases))}."
            )
        return found
