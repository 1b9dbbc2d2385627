"""Settings of the engines. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from lockstep.errors import ConfigError

SampleDtype = Literal["same", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Base of what samples. A subclass is a choice of the setting `engine`, by its tag;
    `registry.make_engine` makes the engine."""

    can_record_routes: ClassVar[bool] = False
    """Whether the engine hands out the experts that a mixture's tokens went to; a subclass says."""

    def check_budget(self, max_tokens: int) -> None:
        """Raises ConfigError if an episode of this many tokens can never run."""


@dataclass(frozen=True, kw_only=True)
class EmbeddedConfig(EngineConfig):
    """The engine inside the training process: it runs the trainer's own decoder."""

    can_record_routes: ClassVar[bool] = True

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
