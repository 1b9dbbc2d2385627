"""The interface to what executes Tinker's requests: models in training over shared bases, samplers.

`service.py` calls it. It hands over one operation of a model at a time, in order of its seq_id;
different models, and samplers, run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lockstep.tinker.requests import (
    CustomLoss,
    ForwardBackward,
    ForwardBackwardResult,
    ModelSpec,
    OptimStep,
    Sampling,
    SamplingResult,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A model that clients may train and sample."""

    name: str
    """As clients name it, and what their tokenizer is loaded by."""
    architecture: str
    vocab_size: int
    max_tokens: int
    """Longest prompt plus reply."""
    stop_ids: tuple[int, ...]
    """Ids that end a reply where the client names none."""


class Backend(Protocol):
    """Every method raises TinkerError for what the client did wrong; a method that raises, whatever
    it is, has changed nothing. Directories are written whole or not at all by the caller: a method
    writes into an empty one.

    After a restart the service makes the models anew, loads what `save` wrote, and repeats the
    requests since then, which must give the same bits.
    """

    @property
    def base_models(self) -> Sequence[BaseModel]: ...

    async def create_model(self, model_id: str, spec: ModelSpec) -> None:
        """Makes a model with a fresh adapter and optimizer."""
        ...

    async def unload_model(self, model_id: str) -> None:
        """Frees its memory. An unknown id is ignored."""
        ...

    def check_loss(self, loss: CustomLoss) -> None:
        """Raises TinkerError for a graph that would not be run: an operation that is not allowed,
        or a wrong number of outputs."""
        ...

    async def forward_backward(
        self, model_id: str, request: ForwardBackward
    ) -> ForwardBackwardResult: ...

    async def optim_step(self, model_id: str, request: OptimStep) -> dict[str, float]:
        """Returns metrics, named `name:reduction`. A gradient that is not finite makes no update,
        which `skipped:sum` counts."""
        ...

    async def save(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Writes the adapter in PEFT's form (a whole model in Hugging Face's), and, if asked, what
        a later `load` needs to continue bit for bit. Gradients that were not applied are not
        kept."""
        ...

    async def load(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Takes what `save` wrote, for a model of the same spec; drops collected gradients."""
        ...

    async def open_sampler(
        self, sampler_id: str, base_model: str, directory: Path | None, *, version: int
    ) -> None:
        """A sampler of the weights in `directory`, as `save` wrote them; None samples the base
        model. The directory stays until the sampler is closed or has another one. On a sampler that
        exists it replaces the weights under running requests, whose later tokens have the new
        version."""
        ...

    async def close_sampler(self, sampler_id: str) -> None:
        """Frees its memory; running requests fail. An unknown id is ignored."""
        ...

    async def sample(
        self,
        sampler_id: str,
        request: Sampling,
        *,
        seeds: Sequence[int],
        sequence_ids: Sequence[str],
    ) -> SamplingResult:
        """Draws a reply for each seed. The same request, weights and seeds give the same bits.
        sequence_ids: names of the replies, by which spans of a datum refer to them."""
        ...

    async def close(self) -> None: ...
