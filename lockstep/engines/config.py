"""Settings of the engines. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal

from lockstep.errors import ConfigError
from lockstep.launch.config import share_of

SampleDtype = Literal["same", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """How several replicas serve one run; see docs/pool.md. Says nothing of an engine alone."""

    update: Literal["together", "rolling"] = "together"
    """together: all replicas take new weights at once. rolling: one after the other, while the
    others go on sampling; nothing stands still, and for a moment two versions sample."""
    drain_seconds: float = 0.0
    """How long a replica waits for the requests in it to end before it takes new weights; those
    that are left go on under the new ones, as a segment of their own."""
    spill_requests: int = 8
    """The next turn of an episode goes to the replica that has its prefix, unless that one has this
    many requests more than the least busy one."""
    tries: int = 3
    """How often a request is asked for at most, the first time included."""
    check_seconds: float = 10.0
    """Between two looks at whether each replica is there."""
    frozen_seconds: float = 120.0
    """A replica with requests in it from which nothing has come for so long, not even the one token
    that it is asked for after half of it, is frozen and taken out."""
    reply_seconds: float = 600.0
    """A request without a sign of its own for so long, in a replica that serves others, is lost
    and asked for again."""
    load_seconds: float = 600.0
    """How long a replica may take to load weights before it is taken out."""
    retry_seconds: tuple[float, float] = (1.0, 60.0)
    """A replica that was taken out is tried again after the first of these; the wait doubles with
    every failure, up to the second."""
    wait_seconds: float = 60.0
    """How long requests wait for a replica to come back once all are out."""

    def __post_init__(self) -> None:
        for name in ("spill_requests", "tries"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.pool.{name}={getattr(self, name)} must be at least 1.")
        for name in ("check_seconds", "frozen_seconds", "reply_seconds", "load_seconds"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"engine.pool.{name}={value} must be a finite number above 0.")
        for name in ("drain_seconds", "wait_seconds"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(
                    f"engine.pool.{name}={value} must be a finite number of at least 0."
                )
        first, longest = self.retry_seconds
        if not 0 < first <= longest < math.inf:
            raise ConfigError(
                f"engine.pool.retry_seconds={self.retry_seconds} must be two finite numbers above "
                "0, the first not above the second."
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Base of what samples. A subclass is a choice of the setting `engine`, by its tag;
    `registry.open_engine` makes the engine, or a pool of them."""

    can_record_routes: ClassVar[bool] = False
    """Whether the engine hands out the experts that a mixture's tokens went to; a subclass says."""

    share_device: bool = False
    """Engine and trainer take turns on one device: before an update the engine gives back the
    memory of its keys and values, and takes it again for the next samples. Costs the cached
    prefixes, which an update drops anyway."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """Of several replicas: who serves what, and what happens when one fails."""

    def replica_configs(self) -> tuple[EngineConfig, ...]:
        """The settings of each engine that samples: itself, where it is one."""
        return (self,)

    @property
    def is_pool(self) -> bool:
        """Whether requests go to one of several replicas, or to one that may come back."""
        return len(self.replica_configs()) > 1

    @property
    def workers(self) -> tuple[str, int, int]:
        """(function, how many, how often each is started again) of the processes that sample, where
        they are started apart from the engines in them (`launch.workers`)."""
        return "", 0, 0

    def for_rank(self, rank: int, world: int) -> EngineConfig:
        """The part of one of `world` processes that train together: each samples with engines of
        its own, inside it or dealt to it. Raises ConfigError if there are too few to deal."""
        return self

    def check_budget(self, max_tokens: int) -> None:
        """Raises ConfigError if an episode of this many tokens can never run."""


@dataclass(frozen=True, kw_only=True)
class EmbeddedConfig(EngineConfig):
    """The engine that runs the trainer's own decoder, inside the training process or beside it."""

    can_record_routes: ClassVar[bool] = True

    replicas: int = 0
    """Processes of their own that sample, each with a copy of the weights (on a GPU of its own
    where there are any). 0 samples inside the trainer's process, over its weights."""
    restarts: int = 3
    """How often each of these processes is started again after it has died."""
    dtype: SampleDtype = "same"
    """What the sampler computes in; same is the trainer's. Another one samples from a copy of the
    weights, cast at every sync: the contract is then off, and the gap measured."""
    max_num_sequences: int = 64
    """Requests that run at the same time; more wait. A step with 64 costs little
    more than one with 1."""
    max_step_tokens: int = 2048
    """Tokens that one step computes at most. Longer prompts are prefilled in chunks of what the
    sampled tokens leave of it, so that a long prompt never stops the others."""
    kv_cache_tokens: int = 65536
    """Tokens whose keys and values are held: those of running requests, and cached prefixes in what
    is left. Bytes = tokens x 2 x layers x key heads x head width x bytes of the dtype."""
    page_size: int = 128
    """Tokens per page of the cache."""
    prefix_cache: bool = True
    """Keep the keys and values of finished requests, so that the next turn computes only what is
    new."""

    resident_rows: bool = True
    """Hold the keys and values of running requests a second time, each request in one piece, so
    that decoding reads them in place and need not gather pages. Takes at most as much memory again
    as kv_cache_tokens; longer batches gather."""

    def __post_init__(self) -> None:
        for name in ("max_num_sequences", "max_step_tokens", "kv_cache_tokens", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name}={getattr(self, name)} must be at least 1.")
        for name in ("replicas", "restarts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"engine.{name}={getattr(self, name)} must be at least 0.")
        if self.max_step_tokens < self.max_num_sequences:
            raise ConfigError(
                f"engine.max_step_tokens={self.max_step_tokens} is smaller than "
                f"engine.max_num_sequences={self.max_num_sequences}: each running request samples "
                "one token per step. Raise the first or lower the second."
            )
        if self.kv_cache_tokens < self.page_size:
            raise ConfigError(
                f"engine.kv_cache_tokens={self.kv_cache_tokens} holds not even one page "
                f"(engine.page_size={self.page_size}). Raise the first or lower the second."
            )

    @property
    def is_pool(self) -> bool:
        return self.replicas > 0

    @property
    def workers(self) -> tuple[str, int, int]:
        return "lockstep.engines.embedded.replica:work", self.replicas, self.restarts

    def replica_configs(self) -> tuple[EngineConfig, ...]:
        return (replace(self, replicas=1),) * self.replicas or (self,)

    def for_rank(self, rank: int, world: int) -> EngineConfig:
        if not self.replicas:
            return self
        return replace(self, replicas=len(share_of(self.replicas, rank, world, "engine.replicas")))

    def check_budget(self, max_tokens: int) -> None:
        room = self.kv_cache_tokens // self.page_size * self.page_size
        if room < max_tokens:
            raise ConfigError(
                f"engine.kv_cache_tokens={self.kv_cache_tokens} holds {room} tokens in whole "
                f"pages, fewer than max_tokens={max_tokens}: the longest episode could never run. "
                "Raise the first or lower the second."
            )


@dataclass(frozen=True, kw_only=True)
class ServedConfig(EngineConfig):
    """Base of engines behind HTTP."""

    urls: tuple[str, ...] = ()
    """Where servers answer, as http://HOST:PORT, one for each replica."""
    start_seconds: float = 600.0
    """How long a server may take until it answers at the start."""
    request_seconds: float = 600.0
    """How long a request may go without an answer before its replica counts as frozen."""
    api_key_env: str = ""
    """Environment variable that holds the servers' key; the key itself is never written down."""
    take_over: bool = False
    """Use servers that another run holds, or held when it crashed. A run that still trains with
    them stops with an error."""

    def __post_init__(self) -> None:
        for url in self.urls:
            if not url.startswith(("http://", "https://")) or url.endswith("/"):
                raise ConfigError(
                    f"engine.urls: {url!r} must read http://HOST:PORT, without a path or a slash "
                    "at its end."
                )
        if len(set(self.urls)) < len(self.urls):
            raise ConfigError("engine.urls names a server twice: each is one replica.")
        for name in ("start_seconds", "request_seconds"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"engine.{name}={value} must be a finite number above 0.")

    def for_rank(self, rank: int, world: int) -> EngineConfig:
        if not self.urls:
            return self
        share = share_of(len(self.urls), rank, world, "engine.urls")
        return replace(self, urls=self.urls[share.start : share.stop])

    def replica_configs(self) -> tuple[EngineConfig, ...]:
        if len(self.urls) < 2:
            return (self,)
        return tuple(replace(self, urls=(url,)) for url in self.urls)


@dataclass(frozen=True, kw_only=True)
class OpenAIConfig(ServedConfig):
    """Any server whose /v1/completions takes token ids and returns those that it sampled. Its
    weights never change: it evaluates, and cannot train. See docs/engines.md."""

    TAG: ClassVar[str] = "openai"

    served_model: str = ""
    """The name that requests give the model; empty takes the only one that the server has."""

    def __post_init__(self) -> None:
        ServedConfig.__post_init__(self)
        if not self.urls:
            raise ConfigError(
                "engine=openai needs a server: engine.urls=http://HOST:PORT, without /v1. "
                "docs/engines.md says how to start one."
            )


@dataclass(frozen=True, kw_only=True)
class SGLangConfig(ServedConfig):
    """SGLang, on servers that are up. See docs/sglang.md, also for what has run on a GPU."""

    TAG: ClassVar[str] = "sglang"
    can_record_routes: ClassVar[bool] = True

    deterministic: bool = False
    """Refuse a server that was started without --enable-deterministic-inference. With it a reply
    does not depend on the batch, and a request's seed decides it."""
    weights: Literal["directory", "ipc"] = "directory"
    """How new weights reach the server. directory: a checkpoint on a disk that both see. ipc: the
    trainer's own memory, of the same GPUs on the same machine."""

    def __post_init__(self) -> None:
        ServedConfig.__post_init__(self)
        if not self.urls:
            raise ConfigError(
                "engine=sglang needs a server: engine.urls=http://HOST:PORT. It is started as "
                "docs/sglang.md says."
            )


OF_ATTACHED = (
    "urls", "start_seconds", "request_seconds", "api_key_env", "share_device", "pool", "take_over",
)  # fmt: skip
"""The settings that say something of servers that others have started."""


@dataclass(frozen=True, kw_only=True)
class VllmConfig(ServedConfig):
    """vLLM. With engine.urls on servers that are up; without, on servers that the run starts and
    ends; with engine.in_process=true in this process. See docs/vllm.md."""

    can_record_routes: ClassVar[bool] = True

    in_process: bool = False
    """Run vLLM inside the training process, which then must have it installed."""
    python: str = ""
    """Interpreter of the environment that has vLLM, for servers that the run starts; empty is
    this one."""
    replicas: int = 1
    """Servers that the run starts."""
    dtype: Literal["same", "float32", "bfloat16", "float16"] = "same"
    """What the engine computes in; same is what the trainer computes in."""
    max_num_sequences: int = 64
    """Requests that one replica runs at the same time; more wait."""
    kv_cache_gib: float = 0.0
    """GiB of keys and values that a replica holds; 0 is vLLM's share of the GPU's memory, and 1
    where there is no GPU."""
    prefix_cache: bool = True
    """Keep the keys and values of finished requests, so that the next turn computes only what is
    new."""
    deterministic: bool = False
    """VLLM_BATCH_INVARIANT=1: kernels whose result does not depend on the batch. vLLM has them for
    GPUs; slower."""
    eager: bool | None = None
    """No compilation and no CUDA graphs: slower steps, a quicker start. none: only where there is
    no GPU."""
    tensor_parallel: int = 1
    """GPUs that one replica is spread over."""
    max_adapter_rank: int = 0
    """Take the weights of a run with lora as an adapter of at most this rank; 0 takes them merged
    into the model."""
    args: tuple[str, ...] = ()
    """More arguments of vLLM's server, as --NAME=VALUE; in process, of its LLM class."""
    env: tuple[str, ...] = ()
    """Environment variables of the engine's processes, as NAME=VALUE."""

    def __post_init__(self) -> None:
        ServedConfig.__post_init__(self)
        if self.urls and self.in_process:
            raise ConfigError(
                "engine.urls and engine.in_process=true: the engine is behind one or inside the "
                "other. Leave one out."
            )
        if self.in_process and (self.python or self.replicas != 1):
            raise ConfigError(
                "engine.in_process=true runs one engine, with this interpreter: leave engine."
                "python and engine.replicas out."
            )
        if self.urls:
            self._check_attached()
        for name in ("replicas", "max_num_sequences", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name}={getattr(self, name)} must be at least 1.")
        if self.max_adapter_rank < 0:
            raise ConfigError(
                f"engine.max_adapter_rank={self.max_adapter_rank} must be at least 0."
            )
        if not 0 <= self.kv_cache_gib < math.inf:
            raise ConfigError(
                f"engine.kv_cache_gib={self.kv_cache_gib} must be at least 0; 0 is vLLM's choice."
            )
        for value in self.args:
            if not value.startswith("--"):
                raise ConfigError(f"engine.args: {value!r} must read --NAME or --NAME=VALUE.")
        for value in self.env:
            if not value.partition("=")[0].isidentifier() or "=" not in value:
                raise ConfigError(f"engine.env: {value!r} must read NAME=VALUE.")

    def for_rank(self, rank: int, world: int) -> EngineConfig:
        if self.urls or self.in_process:
            return ServedConfig.for_rank(self, rank, world)
        return replace(self, replicas=len(share_of(self.replicas, rank, world, "engine.replicas")))

    def replica_configs(self) -> tuple[EngineConfig, ...]:
        if self.replicas == 1:
            return ServedConfig.replica_configs(self)
        return (replace(self, replicas=1),) * self.replicas

    def _check_attached(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name not in OF_ATTACHED and value != entry.default:
                raise ConfigError(
                    f"engine.{entry.name}={value} with engine.urls: those servers run already, "
                    f"and it would do nothing. Start them with it, or leave one of the two out."
                )
