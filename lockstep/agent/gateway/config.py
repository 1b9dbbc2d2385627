"""Settings of the gateway. No torch, no server."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Address of the gateway, and limits of one request."""

    host: str = "127.0.0.1"
    """Address to listen on. Any other than this machine's own needs a key (LOCKSTEP_KEY)."""
    port: int = 0
    """0 takes a free one, which is printed."""
    names: tuple[str, ...] = ()
    """Names of the model besides its own, for agents that have a name built in; "*" answers to any.
    """
    max_body_bytes: int = 64 * 1024 * 1024
    """Size of one request; a larger one is answered with 413."""
    read_seconds: float = 60.0
    """Seconds that a client may take to send its headers, and again to send the body; a connection
    without a request is closed after as long."""
    keep_alive_seconds: float = 10.0
    """Seconds until a stream whose turn is not complete sends a keep-alive, and between
    keep-alives."""
    max_choices: int = 64
    """Largest `n` of one request: replies that are sampled side by side."""
    retry_after_seconds: float = 1.0
    """Value of Retry-After while the engine is down, in seconds."""
    rotate_tokens: int = 1_000_000
    """Requests that name no session share one. It ends at this many tokens, and another begins."""

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK

    def check_key(self, key: str) -> None:
        """Raises ConfigError unless `key` may open a server at this address; "" is none."""
        if not self.is_local and not key:
            raise ConfigError(
                f"gateway.host={self.host} can be reached from other machines, so it needs a key: "
                "set LOCKSTEP_KEY. Without one the gateway listens on 127.0.0.1 alone."
            )
        if key and (not key.isascii() or not key.isprintable() or " " in key):
            raise ConfigError("the gateway's key must be printable ASCII without spaces.")

    def __post_init__(self) -> None:
        for ok, name, expected in (
            (bool(self.host), "host", "an address; 127.0.0.1 is this machine alone"),
            (0 <= self.port < 65536, "port", "in 0..65535; 0 takes a free one"),
            (all(self.names), "names", "names that are not empty"),
            (self.max_body_bytes >= 1024, "max_body_bytes", "at least 1024"),
            (0 < self.read_seconds < math.inf, "read_seconds", "a finite number above 0"),
            (
                0 < self.keep_alive_seconds < math.inf,
                "keep_alive_seconds",
                "a finite number above 0",
            ),
            (self.max_choices >= 1, "max_choices", "at least 1"),
            (
                0 <= self.retry_after_seconds < math.inf,
                "retry_after_seconds",
                "a finite number, at least 0",
            ),
            (self.rotate_tokens >= 1, "rotate_tokens", "at least 1"),
        ):
            if not ok:
                raise ConfigError(f"gateway.{name}={getattr(self, name)!r} must be {expected}.")
