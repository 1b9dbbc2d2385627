"""What every inference engine is to Lockstep: ids in, ids and log-probs out.

An engine knows nothing of messages, templates or text. It is handed the exact ids of a path and
returns the ids that it sampled, with the log-prob of each under a stated distribution.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from lockstep.types import Delta, Distribution, Float32Array, Int32Array, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do; compared with what the config needs before anything starts."""

    name: str
    vocab_size: int
    max_tokens: int
    """Longest prompt plus reply."""
    distributions: tuple[Distribution, ...]
    """Whose log-probs it can record."""
    has_stop_strings: bool = False
    has_prefix_cache: bool = False
    has_seeds: bool = False
    has_routed_experts: bool = False
    """It hands back the experts that tokens went to, for requests that ask: of every position from
    `Request.routes_from` on, whether it computed it or found it in its prefix cache."""
    has_adapters: bool = False
    has_score: bool = False
    has_support: bool = False
    """It hands back what top-p and top-k kept, for requests that ask."""
    shares_weights: bool = False
    """It runs the trainer's own parameters: a sync is a version number."""
    fingerprint: str = ""
    """Of the numerics that compute its log-probs (`ops.contract.Fingerprint.text`); empty if it
    cannot tell, and then no contract covers it."""


@runtime_checkable
class Engine(Protocol):
    """The protocol. `lockstep.testing.check_engine` runs an implementation through it."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def version(self) -> int:
        """Policy version of the weights that the next token is sampled with."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Samples one reply. Yields at least one delta; the last one has a `finish_reason`.

        A request of a known id that is still running or just ended is answered with the same
        tokens again, never sampled twice. Closing the iterator early aborts the request.
        Raises EngineError where no delta can be given (prompt too long, id out of vocabulary).
        """
        ...

    async def score(
        self,
        token_ids: Int32Array,
        *,
        distribution: Distribution = "model",
        temperature: float = 1.0,
        priority: int = 0,
    ) -> Float32Array:
        """[T] float32: the log-prob of each id given those before it; NaN at index 0."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a running request: its last delta has finish_reason "abort" and the tokens so far.

        Unknown and finished ids are ignored.
        """
        ...

    async def pause(self) -> None:
        """Returns when no step is running; requests wait and keep their place."""
        ...

    async def resume(self, *, kv: Literal["drop", "keep"] = "drop") -> None:
        """Goes on. "drop" recomputes the keys and values of waiting requests, "keep" does not.

        What is sampled from keys of older weights has a fingerprint that says so (`kv=kept`).
        """
        ...

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        """Takes new weights: named tensors, a checkpoint directory, or None if they are shared.

        Running requests end their segment with finish_reason "weight_update" and go on under the
        new version. Cached prefixes are dropped.
        """
        ...

    async def sleep(self) -> None:
        """Frees the memory of keys and values until `wake`. Waiting requests are refused."""
        ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...
