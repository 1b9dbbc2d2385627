"""Settings of the sync of weights. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.errors import ConfigError

Form = Literal["shared", "tensors", "directory", "adapter"]
"""How weights reach the engine: see `SyncConfig.form`."""


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How weights get from the trainer to the engine, and how that they did is verified."""

    form: Literal["auto", "shared", "tensors", "directory", "adapter"] = "auto"
    """shared: the engine runs the trainer's own memory. adapter: only the adapter is written, for
    an engine that adds it to the model. tensors: handed over one by one. directory: written as a
    checkpoint that the engine reads. auto takes the first of these that engine and model have."""
    kv: Literal["drop", "keep"] = "drop"
    """Keys and values of episodes that take new weights: drop computes them again, keep goes on
    from those of the old weights, which is faster and samples from neither policy exactly."""
    qualify: Literal["auto", "on", "off"] = "auto"
    """Before the first step, a large change of every group of tensors is loaded, scored by engine
    and trainer, and taken back: two loads. An engine that fails is refused. auto: wherever weights
    are sent and the engine can score, but for injected faults of the weights themselves."""
    verify_every: int = 1
    """Loads between two looks at whether the engine's log-probs follow the trainer's; 0 is never.
    One costs a score and a forward of the probe."""
    num_probes: int = 8
    """Texts of the probe: random ids, the same in the whole run."""
    probe_tokens: int = 64
    """Ids of each of them."""
    window: int = 8
    """Loads over which the change of the engine's log-probs is held against the trainer's; more if
    they have moved too little to tell."""
    directory: str = ""
    """Where versioned checkpoints are written: a file system that the engine's hosts see. Empty is
    `weights` in the run's directory."""

    def __post_init__(self) -> None:
        for name, least in (("num_probes", 1), ("probe_tokens", 8), ("window", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"sync.{name}={getattr(self, name)} must be at least {least}.")
        if self.verify_every < 0:
            raise ConfigError(
                f"sync.verify_every={self.verify_every} must be at least 0; 0 is never."
            )
        if self.qualify == "on" and self.form == "shared":
            raise ConfigError(
                "sync.qualify=on with sync.form=shared: no weights are sent, so there is nothing "
                "to qualify. Leave one of them out."
            )
