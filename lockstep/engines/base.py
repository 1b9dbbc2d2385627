"""What every inference engine is to Lockstep: ids in, ids and log-probs out.

An engine knows nothing of messages, templates or text. It is handed the exact ids of a path and
returns the ids that it sampled, with the log-prob of each under a stated distribution.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from lockstep.launch.workers import LocalWorkers, Workers
from lockstep.types import Delta, Distribution, Float32Array, Int32Array, Request

WeightSource = Literal["shared", "tensors", "directory", "adapter"]
"""What `Engine.load_weights` takes. shared: None, for the trainer's own parameters. tensors: a
mapping of Hugging Face names. directory: a checkpoint on a disk that the engine reads. adapter: a
directory in PEFT's form, over the model that the engine started with."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """What an engine thinks of given ids."""

    logprobs: Float32Array
    """[T] float32, natural log: of each id given those before it; NaN before the first that was
    asked for, and at index 0."""
    policy_version: int
    """Of the weights that scored them."""
    num_cached_tokens: int = 0
    """Ids whose keys and values were found."""
    num_prefilled_tokens: int = 0
    """Ids that were computed."""
    fingerprint: str = ""
    """As of `Delta`."""


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
    scored_distributions: tuple[Distribution, ...] = ("model", "tempered")
    """What `score` gives log-probs under. At temperature 1 these two are one."""
    has_support: bool = False
    """It hands back what top-p and top-k kept, for requests that ask."""
    has_sleep: bool = False
    """`sleep` gives the memory of keys and values back to the device."""
    has_positional_draws: bool = False
    """A draw depends on the request's seed and the token's place on its path alone: a reply that
    was cut goes on under the same seed as if it had not been."""
    weight_sources: tuple[WeightSource, ...] = ("tensors",)
    """What `load_weights` takes; none for an engine whose weights never change."""
    fingerprint: str = ""
    """Of the numerics that compute its log-probs (`ops.contract.Fingerprint.text`); empty if it
    cannot tell, and then no contract covers it."""

    @property
    def shares_weights(self) -> bool:
        """It runs the trainer's own parameters: a sync is a version number."""
        return "shared" in self.weight_sources


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What an engine is made for: the run around it."""

    model: Any
    """The trainer's decoder, for an engine in this process; others start from `directory`."""
    token_bytes: Sequence[bytes]
    """The bytes of each id, for stop strings."""
    directory: Path
    """The checkpoint that the trainer has begun from."""
    vocab_size: int
    max_tokens: int
    """Longest prompt plus reply of the run."""
    dtype: str
    """What the trainer computes in."""
    seed: int = 0
    run: str = "run"
    """Names the run to whoever shares the engine."""
    scratch: Path | None = None
    """Where logs of processes may be left, and weights on their way: of the run's directory; None
    where nothing is written down, then a temporary directory serves."""
    on_wait: Callable[[str], None] = lambda text: None
    """Told what is being waited for, for whoever watches."""
    replica: int = 0
    """Which of several engines of a pool this one is, from 0."""
    workers: Workers = field(default_factory=LocalWorkers)
    """Where an engine in a process of its own is started."""


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
        first: int = 1,
        affinity: str = "",
    ) -> Scores:
        """The log-probs of `token_ids[first:]`, each given all ids before it.

        Keys and values of ids before `first - 1` may come from the engine's cache, or not: those
        from there on are computed. priority, affinity: as of `Request`.
        """
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
        """Takes new weights, in one of the forms of `Capabilities.weight_sources`.

        Tensors are made one by one as they are asked for, in their order, and may be views of the
        trainer's memory: what is kept of them is copied. A directory stays until the next version
        was taken. The version may be any number, also one below 0 or lower than the last.
        Running requests end their segment with finish_reason "weight_update" and go on under the
        new version. Cached prefixes are dropped.
        """
        ...

    async def sleep(self) -> None:
        """Frees the memory of keys and values until `wake`. Requests that come meanwhile are
        refused. Weights can be loaded meanwhile. Raises CapabilityError without `has_sleep`.
        """
        ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...


# -- what an engine may do besides -----------------------------------------------------------------


@runtime_checkable
class Reporting(Protocol):
    """An engine that counts what happens in it."""

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last call, by the names of `engine/NAME` in docs/metrics.md."""
        ...


@runtime_checkable
class Pinged(Protocol):
    """An engine that can be asked whether it is there, at no cost worth mentioning."""

    async def ping(self) -> None:
        """Raises EngineDownError if it is not."""
        ...


@runtime_checkable
class Vouchable(Protocol):
    """An engine that cannot tell what computes its log-probs, and takes it from a comparison."""

    def vouch(self, fingerprint: str) -> None:
        """Its log-probs were found to be those of these numerics, to the bit: from here on what it
        sends has this fingerprint."""
        ...


@runtime_checkable
class Pooled(Protocol):
    """An engine that is several, each with weights of its own."""

    async def score_by_each(
        self, token_ids: Int32Array, *, distribution: Distribution, temperature: float
    ) -> Mapping[str, Scores]:
        """`Engine.score` by every one that takes requests, by its name. Without those that fail;
        EngineError if all do."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """An engine that keeps what it was given last, and can load it again by itself."""

    def remembers(self, source: Mapping[str, Any], *, version: int) -> bool:
        """Whether `load_weights` of these would not read them again: the trainer may be changing
        them meanwhile."""
        ...


@runtime_checkable
class Leased(Protocol):
    """An engine that others could load weights into as well."""

    async def check_lease(self) -> None:
        """Raises LeaseError if it has, or had since the last call, weights that are not this
        run's."""
        ...


@runtime_checkable
class Restartable(Protocol):
    """An engine whose process can be started anew. `sync` does so with each version if the engine
    is found not to run the weights that it is sent while it runs."""

    async def restart(self, directory: str, *, version: int) -> None:
        """Ends the process and starts it from this checkpoint, as `version`; returns when it
        answers. Running requests end their segment as at `load_weights`, and go on."""
        ...
