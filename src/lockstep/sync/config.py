"""Settings of the sync of weights. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lockstep.config import Checked


@dataclass(frozen=True, kw_only=True)
class SyncConfig(Checked):
    """How weights reach the engine, and how this is verified (documentation: Engines)."""

    form: Literal["auto", "shared", "tensors", "directory", "adapter"] = "auto"
    """shared: the engine runs the trainer's own memory. adapter: only the adapter is written, and
    the engine adds it to the model. tensors: handed over one by one. directory: written as a
    checkpoint that the engine reads. auto takes the first of these that engine and model
    support."""
    kv: Literal["drop", "keep"] = "drop"
    """Keys and values of episodes that get new weights: drop recomputes them; keep reuses the old
    weights' keys and values, which is faster and samples from neither policy exactly."""
    qualify: Literal["auto", "on", "off"] = "auto"
    """Load a large change of every group of tensors before the first step, compare the scores of
    engine and trainer, and undo it: two loads. An engine that fails is refused. auto: whenever
    weights are sent and the engine can score, except for injected faults of the weights."""
    num_probes: ClassVar[int] = 8
    """Number of texts in the probe: random ids, the same in the whole run."""
    probe_tokens: ClassVar[int] = 64
    """Ids per text."""
    window: ClassVar[int] = 8
    """Number of loads for comparing the changes of the engine's and the trainer's log-probs; more
    if the changes are too small to judge."""
    directory: str = ""
    """Directory of versioned checkpoints, on a file system that the engine's hosts see. Empty is
    `weights` in the run's directory."""
