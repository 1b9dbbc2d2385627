"""Facts about a run that a dump may state beside its rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about the run that made the rows. None and empty values are unknown."""

    trainer: str = ""
    """Program that wrote the rows: "lockstep", "verl", "slime", "trl", "prime-rl", "nemo-rl",
    "tinker", or a name of your own."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end a reply; default: the renderer's stop ids."""
    pad_id: int | None = None
    """Id of the padding token; default: the one in tokenizer_config.json."""
    temperature: float | None = None
    """Sampling temperature."""
    top_p: float | None = None
    """Sampling top-p; 1 keeps the whole vocabulary."""
    top_k: int | None = None
    """Sampling top-k; 0 keeps the whole vocabulary."""
    max_staleness: int | None = None
    """Number of updates that a token may lag behind, according to the settings of the run."""
    is_one_process: bool | None = None
    """True if sampler and trainer share one process and the same ops, so that noise is a defect."""
    is_moe: bool | None = None
    """True for a mixture of experts."""
    tools: str = ""
    """Tools of the dialogues: the JSON list that the template was given."""
