"""Processing of logits, as a sampler may do it."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Processing of the logits before a log-prob is taken."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    """Share of the largest probability below which a token is dropped."""
    repetition_penalty: float = 1.0
    """Divisor of the positive logits, and factor of the negative ones, of ids that are in the row
    already."""

    def describe(self) -> str:
        named, plain = asdict(self), asdict(Distribution())
        kept = {n: value for n, value in named.items() if n == "temperature" or value != plain[n]}
        return " ".join(f"{name}={value:g}" for name, value in kept.items())
