"""Settings of the gateway. No torch, no server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from lockstep.config import Checked, Form, Interval, at_least, check_key, require


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(Checked):
    """Address of the gateway, and limits of one request."""

    host: Annotated[str, Form(".+", "an address; 127.0.0.1 is this machine alone")] = "127.0.0.1"
    """Address to listen on. Any other than this machine's own needs a key (LOCKSTEP_KEY)."""
    port: Annotated[int, Interval("[0, 65536)")] = 0
    """0 takes a free one, which is printed."""
    certificate: tuple[str, ...] = ()
    """Files of a TLS certificate with its chain and of its private key, as PEM; one file may have
    both. The server then speaks https alone. Empty speaks http."""
    names: Annotated[tuple[str, ...], Form(".+", "names that are not empty")] = ()
    """Names of the model besides its own, for agents that have a name built in; "*" answers to any.
    """
    max_body_bytes: Annotated[int, at_least(1024)] = 64 * 1024 * 1024
    """Size of one request; a larger one is answered with 413."""
    read_seconds: ClassVar[float] = 60.0
    """Seconds that a client may take to send its headers, and again to send the body; a connection
    without a request is closed after as long."""
    max_connections: ClassVar[int] = 1000
    """Connections at a time, within the limit on open files. A further connection replaces the
    oldest idle one."""
    keep_alive_seconds: ClassVar[float] = 10.0
    """Seconds until a stream whose turn is not complete sends a keep-alive, and between
    keep-alives."""
    rotate_tokens: ClassVar[int] = 1_000_000
    """Requests that name no session share one. It ends at this many tokens, and another begins."""

    log: str = ""
    """File that gets a line of JSON for each request: time, session, route, model, tokens, status,
    milliseconds and the code of an error; never the messages."""

    def check_key(self, key: str) -> None:
        """Raises ConfigError unless `key` may open a server at this address; "" is none."""
        check_key(key, host=self.host, where=f"gateway.host={self.host}")

    def __post_init__(self) -> None:
        super().__post_init__()
        is_pair = len(self.certificate) <= 2
        require(self, certificate=(is_pair, "CERTIFICATE, or CERTIFICATE,KEY"))
