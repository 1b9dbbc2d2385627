"""The protocol of an inference engine: token ids in, sampled ids and their log-probs out.

An engine never sees messages, templates or text. It is handed the exact ids of a path and
returns the ids that it sampled, with the log-prob of each under a stated distribution.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from lockstep.errors import CapabilityError
from lockstep.launch.shared_file import Newest
from lockstep.ops.contract import ContractChoice
from lockstep.types import Delta, Distribution, Float32Array, Int32Array, Request

WeightSource = Literal["shared", "tensors", "directory", "adapter"]
"""A form of weights that `Engine.load_weights` accepts. shared: None, the trainer's own parameters.
tensors: a mapping of Hugging Face names. directory: a checkpoint that the engine can read. adapter:
a directory in PEFT's format, applied to the model that the engine started with."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """Log-probs that an engine gives to ids that it did not sample."""

    logprobs: Float32Array
    """[T] float32, natural log, of each id given those before it; NaN before the first id that was
    asked for, and at index 0."""
    policy_version: int
    """Version of the weights that scored the ids."""
    num_cached_tokens: int = 0
    """Ids whose keys and values were found in the cache."""
    num_prefilled_tokens: int = 0
    """Ids that were computed."""
    fingerprint: str = ""
    """Numerics that computed the log-probs, as in `Delta`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Features of an engine, compared with the needs of a run before anything starts."""

    name: str
    vocab_size: int
    max_tokens: int
    """Longest prompt plus reply."""
    distributions: tuple[Distribution, ...]
    """Distributions that the engine can record log-probs of."""
    has_stop_strings: bool = False
    has_prefix_cache: bool = False
    has_seeds: bool = False
    has_routed_experts: bool = False
    """Requests that ask get the experts of every position from `Request.routes_from` on, computed
    or found in the prefix cache."""
    has_adapters: bool = False
    """Requests may name an adapter."""
    has_score: bool = False
    scored_distributions: tuple[Distribution, ...] = ("model", "tempered")
    """Distributions that `score` supports. At temperature 1 these two are the same."""
    has_support: bool = False
    """Requests that ask get the ids that top-p and top-k kept."""
    has_grammar: bool = False
    """Requests may have a grammar."""
    has_sleep: bool = False
    """`sleep` returns the memory of keys and values to the device."""
    has_positional_draws: bool = False
    """A draw depends only on the request's seed and the token's position on its path, so a reply
    that was interrupted continues under the same seed as if it had not been."""
    has_restart: bool = False
    """`load_weights` starts the engine's process again if it has ended."""
    weight_sources: tuple[WeightSource, ...] = ("tensors",)
    """Forms that `load_weights` accepts; empty for an engine whose weights never change."""
    fingerprint: str = ""
    """Numerics that compute the log-probs (`ops.contract.Fingerprint.text`); empty if unknown, and
    then no contract covers them."""

    @property
    def shares_weights(self) -> bool:
        """True if the engine runs the trainer's own parameters: a sync only sets a version."""
        return "shared" in self.weight_sources


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """The run that an engine is made for."""

    model: Any
    """The trainer's decoder, for an engine in this process; others start from `directory`."""
    token_bytes: Sequence[bytes]
    """Bytes of each id, for stop strings and grammars."""
    control_ids: Collection[int] = ()
    """Ids that no text spells, for grammars."""
    directory: Path
    """Checkpoint that the trainer started from."""
    vocab_size: int
    max_tokens: int
    """Longest prompt plus reply of the run."""
    dtype: str
    """Dtype that the trainer computes in."""
    contract: ContractChoice = "none"
    """Setting `contract` of the run."""
    seed: int = 0
    run: str = "run"
    """Name of the run, shown to others who use the same server."""
    scratch: Path | None = None
    """Directory for logs and for weights in transit; None uses a temporary directory."""
    on_wait: Callable[[str], None] = lambda text: None
    """Called with a sentence about whatever the engine is waiting for."""
    replica: int = 0
    """Index of this engine in its pool, from 0."""
    gpus: Sequence[str] = ()
    """CUDA_VISIBLE_DEVICES of each replica that runs in a process of its own; empty without
    GPUs."""
    newest: Newest = field(default_factory=Newest)
    """Weights on their way to these replicas."""


@runtime_checkable
class Engine(Protocol):
    """The protocol. Subclass it: the methods after `close` have defaults.
    `examples/check_engine.py` tests an implementation."""

    capabilities: Capabilities
    version: int
    """Policy version of the weights that sample the next token."""

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Samples one reply. Yields at least one delta; the last one has a `finish_reason`.

        A request whose id is known, running or recently ended, gets the same tokens again and is
        never sampled twice. Closing the iterator early aborts the request.
        Raises EngineError if no delta can be given (prompt too long, id out of the vocabulary).
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
        adapter: str = "",
    ) -> Scores:
        """The log-probs of `token_ids[first:]`, each given all ids before it.

        Keys and values of ids before `first - 1` may come from the cache; the others are computed.
        priority, affinity, adapter: as in `Request`.
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
        """Continues. "drop" recomputes the keys and values of waiting requests, "keep" does not.

        Tokens sampled from keys of older weights have a fingerprint that says so (`kv=kept`).
        """
        ...

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        """Takes new weights, in one of the forms of `Capabilities.weight_sources`.

        Tensors are produced one by one, in order, and may be views of the trainer's memory: an
        engine copies a tensor to keep it. A directory exists until the next version is taken. The
        version may be any number, also negative or lower than the last.
        Running requests end their segment with finish_reason "weight_update" and continue under
        the new version. Cached prefixes are dropped.
        """
        ...

    async def sleep(self) -> None:
        """Frees the memory of keys and values until `wake`; new requests are refused, weights can
        be loaded. Raises CapabilityError without `has_sleep`."""
        ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...

    # -- optional: what an engine may add ---------------------------------------------------------

    async def load_adapter(self, name: str, source: Any, *, version: int) -> None:
        """Loads an adapter that requests may name, or new tensors of a loaded one. The source is a
        directory in PEFT's form or, for an engine in this process, a decoder with an adapter.

        Running requests of the name end their segment with finish_reason "weight_update" and
        continue under the new version, which is the adapter's own. Its cached prefixes are dropped.
        Other requests are unaffected.
        """
        raise CapabilityError(f"load_adapter: engine {self.capabilities.name} takes no adapters.")

    async def drop_adapter(self, name: str) -> None:
        """Frees an adapter's memory; its running requests fail. Raises EngineError for a name that
        is not loaded."""
        raise CapabilityError(f"drop_adapter: engine {self.capabilities.name} takes no adapters.")

    async def ping(self) -> None:
        """Raises EngineDownError if the engine is gone. Costs next to nothing."""

    def take_metrics(self) -> dict[str, float]:
        """Events since the last call, by the names of `engine/NAME` in the reference of metrics."""
        return {}

    async def check_lease(self) -> None:
        """Raises LeaseError if the engine has, or had since the last call, weights that this run
        did not load."""

    def remembers(self, source: Mapping[str, Any], *, version: int) -> bool:
        """True if `load_weights` of these tensors would not read them again, so that the trainer
        may be changing them."""
        return False

    async def score_by_each(
        self,
        token_ids: Int32Array,
        *,
        distribution: Distribution,
        temperature: float,
        adapter: str = "",
    ) -> Mapping[str, Scores]:
        """`score` by each engine that has weights of its own: by the name of each replica of a
        pool, by "" for a single engine. Replicas that fail are left out; EngineError if all do."""
        how: dict[str, Any] = {"distribution": distribution, "temperature": temperature}
        return {"": await self.score(token_ids, **how, adapter=adapter)}
