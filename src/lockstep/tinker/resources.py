"""The parts that models and samplers of one server work with."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.agent.gateway.reading import Value
from lockstep.tinker.checkpoints import CheckpointFiles
from lockstep.tinker.futures import Futures, Sessions
from lockstep.tinker.journal import Accepted, Journal
from lockstep.tinker.provenance import DrawnIndex, Provenance, trace_datum
from lockstep.tinker.requests import (
    BaseModel,
    Datum,
    ForwardBackward,
    ModelSpec,
    Sampling,
    SamplingResult,
    invalid,
    not_found,
)
from lockstep.tinker_config import TinkerConfig

if TYPE_CHECKING:
    from lockstep.tinker.embedded import EmbeddedBackend
    from lockstep.tinker.record import ModelRecord

LOGGER = logging.getLogger(__name__)


class Resources:
    """The backend, the journal, the saved weights, the settings and the clients of one server."""

    def __init__(
        self,
        backend: EmbeddedBackend,
        directory: Path,
        config: TinkerConfig | None = None,
        *,
        open_record: Callable[[str, ModelSpec], ModelRecord] | None = None,
    ) -> None:
        """open_record: begins the record of a model by its id; None keeps none. Raises RunError if
        another process uses the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        self.backend, self.open_record = backend, open_record
        self.config = config = config or TinkerConfig()
        self.bases = {base.name: base for base in backend.base_models}
        self.journal = Journal(directory / "journal.sqlite")
        self.store = CheckpointFiles(directory, self.journal)
        self.sessions = Sessions(self.journal)
        self.futures = Futures(self.journal, config, self.sessions)
        self.origins = Origins(self.journal, config)

    def base(self, name: Value) -> BaseModel:
        """Raises TinkerError (404)."""
        found = self.bases.get(name.text().partition(":")[0])
        if found is None:
            raise not_found(
                f"base_model={name.text()[:120]!r} is not served here; expected "
                f"{' or '.join(map(repr, self.bases))}."
            )
        return found


class Origins:
    """Remembers replies in the journal, and compares datums with them."""

    def __init__(self, journal: Journal, config: TinkerConfig) -> None:
        self._journal, self._config = journal, config
        self._index = DrawnIndex()
        for sequence_id, prompt_ids in journal.prompts():
            self._index.add(sequence_id, prompt_ids)

    def add(self, request: Accepted, asked: Sampling, result: SamplingResult) -> None:
        """Remembers the replies to a request, within the transaction that writes its result."""
        if self._config.provenance == "off":
            return
        self._journal.add_drawn(request, asked.prompt_ids, result.sequences)
        for at in range(len(result.sequences)):
            self._index.add(f"{request.id}.{at}", asked.prompt_ids)

    def check(self, asked: ForwardBackward, *, is_new: bool) -> ForwardBackward:
        """Returns the request with the versions that drew its targets. is_new: False for a request
        that was accepted before. Raises TinkerError (422) for a datum that the settings do not let
        in."""
        if self._config.provenance == "off":
            return asked
        counts, data = Counter[str](), list[Datum]()
        lookup = cache(self._journal.drawn)  # datums of one prompt ask for the same replies
        for number, datum in enumerate(asked.data):
            found = trace_datum(number, datum, lookup, loss=asked.loss, index=self._index)
            counts[found.status] += 1
            if is_new and not asked.is_forward_only:
                self._judge(found, asked.loss)
            data.append(replace(datum, versions=found.versions))
        return replace(asked, data=tuple(data), origins=counts)

    def _judge(self, found: Provenance, loss: str) -> None:
        """Raises TinkerError for a datum that the settings refuse."""
        config = self._config
        if found.status not in ("differs", "foreign"):
            return
        if config.provenance == "warn":
            LOGGER.warning("trained nevertheless: %s", found.text)
        elif found.status == "differs":
            raise invalid(
                f"{found.text} Nothing was trained. Start the server with tinker.provenance=warn "
                "to train such datums nevertheless."
            )
        elif config.provenance == "refuse":
            raise invalid(
                f"{found.text} Nothing was trained: {loss} may train what this server drew within "
                f"{config.drawn_seconds:g} s. Was the prompt changed or "
                "encoded again? If the tokens were sampled elsewhere, start the server with "
                "tinker.provenance=refuse_changed."
            )


def metrics_of(asked: ForwardBackward, num_updates: int) -> dict[str, float]:
    """Counts of datums by origin, and how many updates ago their tokens were drawn.

    num_updates: made on the model so far.
    """
    found = {f"provenance/{name}:sum": float(count) for name, count in asked.origins.items()}
    versions = [datum.versions for datum in asked.data if datum.versions is not None]
    ages = [num_updates - int(v) for each in versions for v in set(each[each >= 0].tolist())]
    if ages:
        found["provenance/updates_since_drawn:max"] = float(max(ages))
        found["provenance/updates_since_drawn_least:min"] = float(min(ages))
    return found
