"""Settings of Tinker's API. No torch, no server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from lockstep.config import Checked, at_least
from lockstep.errors import ConfigError

KEY_PREFIX = "tml-"
"""Begins every key that clients send; they refuse others by themselves."""


def client_key(key: str) -> str:
    """The key that clients send for a server's.

    >>> client_key("sesame"), client_key("tml-sesame"), client_key("")
    ('tml-sesame', 'tml-sesame', '')
    """
    return key if key.startswith(KEY_PREFIX) or not key else KEY_PREFIX + key


@dataclass(frozen=True, kw_only=True)
class TinkerConfig(Checked):
    """Limits of Tinker's API, and what the server keeps."""

    models: tuple[str, ...] = ()
    """Base models as NAME=MODEL, by the names that clients use. Empty serves the model of the
    command under its own name."""
    silent_seconds: ClassVar[float] = 300.0
    """Seconds without a sign of life (clients send one every 10 s) until a session counts as gone:
    its models and samplers are unloaded, its checkpoints stay."""
    state_seconds: ClassVar[float] = 60.0
    """Seconds of a model's work between saves of its state. An update saves when they have passed,
    so a restart repeats about that much at most."""
    result_seconds: ClassVar[float] = 3600.0
    """Seconds that a result is kept after it was fetched."""
    sampler_seconds: ClassVar[float] = 86400.0
    """Seconds without a request until the weights of an unnamed sampler are deleted."""
    missing_seconds: ClassVar[float] = 330.0
    """Seconds that a model waits for a request that never came while later ones are there. Clients
    send a request again for 300 s; then they give it up and go on with the next."""
    hold_seconds: ClassVar[float] = 30.0
    """Seconds that a question for a result is held before the client must ask again; clients cut a
    connection after 45 s."""
    provenance: Literal["refuse", "refuse_changed", "warn", "off"] = "refuse"
    """Datums that a policy loss (importance_sampling, ppo, cispo, dro, gspo) may train. refuse:
    only datums drawn by this server, with unchanged ids, order, place and log-probs.
    refuse_changed: also datums sampled elsewhere or too long ago, but none that was drawn here and
    changed since. warn: all, with a warning. off: all, and nothing is compared. A token without an
    advantage is not trained, so it may be anything. Other losses, as in distillation or supervised
    training, take any datum with correct spans. Forward-only passes take every datum."""
    stable_reinforce: Literal["refuse", "importance_sampling"] = "refuse"
    """Treatment of the loss stable_reinforce, whose formula is not published: refuse it, or compute
    importance_sampling in its place, for programs that cannot choose another one."""
    drawn_seconds: ClassVar[float] = 86400.0
    """Seconds that the server remembers its draws, at most until the session ends."""
    max_pending_samples: ClassVar[int] = 4096
    """Requests for samples that wait or run at a time; further ones are answered with 429, and the
    clients wait."""
    max_open_samplers: Annotated[int, at_least(1)] = 16
    """Samplers whose weights are in memory; the one unused for longest makes room, and is loaded
    again when it is asked."""

    @property
    def substitute(self) -> str:
        """Loss in place of stable_reinforce; empty if it is refused."""
        return "" if self.stable_reinforce == "refuse" else self.stable_reinforce

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [entry.partition("=")[0] for entry in self.models]
        for entry in self.models:
            if not all(entry.partition("=")[::2]):
                raise ConfigError(f"tinker.models has {entry!r}; expected NAME=MODEL.")
        if len(set(names)) < len(names):
            raise ConfigError(f"tinker.models names a model twice: {', '.join(names)}.")
