"""What this server drew, and whether the datums that it should train on are that."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from functools import cache

from lockstep.tinker.journal import Journal, Request
from lockstep.tinker.provenance import Drawn, DrawnIndex, trace_datum
from lockstep.tinker.requests import (
    Datum,
    ForwardBackward,
    Sampling,
    SamplingResult,
    TinkerError,
)
from lockstep.tinker_config import TinkerConfig

LOGGER = logging.getLogger(__name__)


class Origins:
    """Remembers replies in the journal, and compares datums with them."""

    def __init__(self, journal: Journal, config: TinkerConfig) -> None:
        self._journal, self._config = journal, config
        self._index = DrawnIndex()
        for sequence_id, prompt_ids in journal.prompts():
            self._index.add(sequence_id, prompt_ids)

    def add(self, request: Request, asked: Sampling, result: SamplingResult) -> None:
        """Remembers the replies to a request, within the transaction that writes its result."""
        if self._config.provenance == "off":
            return
        drawn = [
            Drawn(
                prompt_ids=asked.prompt_ids,
                token_ids=reply.token_ids,
                logprobs=reply.logprobs,
                versions=reply.versions,
            )
            for reply in result.sequences
        ]
        self._journal.add_drawn(request, drawn)
        for at in range(len(drawn)):
            self._index.add(f"{request.id}.{at}", asked.prompt_ids)

    def check(self, asked: ForwardBackward, *, is_new: bool) -> ForwardBackward:
        """Returns the request with the versions that drew its targets. is_new: False for one that
        was let in before. Raises TinkerError (422) for tokens that are not what was drawn, unless
        they are to be trained with a warning."""
        if self._config.provenance == "off":
            return asked
        counts, data = Counter[str](), list[Datum]()
        lookup = cache(self._journal.drawn)  # datums of one prompt ask for the same replies
        for number, datum in enumerate(asked.data):
            found = trace_datum(number, datum, lookup, index=self._index)
            counts[found.status] += 1
            if found.status == "differs" and is_new:
                if self._config.provenance == "refuse":
                    raise TinkerError(
                        f"{found.text} Nothing was trained. Start the server with "
                        "tinker.provenance=warn to train such datums nevertheless.",
                        status=422,
                    )
                LOGGER.warning("trained nevertheless: %s", found.text)
            data.append(replace(datum, versions=found.versions))
        return replace(asked, data=tuple(data), origins=counts)


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
