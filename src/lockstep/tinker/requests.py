"""The wire's content as Python values: requests of clients of Tinker's API, and their results.

`wire.py` reads these from HTTP bodies and writes them; `service.py` orders and journals them;
`embedded.py` computes them. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lockstep.agent.gateway.exchange import Refusal
from lockstep.types import Float32Array, Int32Array, SamplingParams

TARGETS = "target_tokens"
"""Input of every loss: the ids that are predicted."""


class TinkerError(Refusal, ValueError):
    """A request that cannot be done: the client raises the text at once.

    status: of HTTP, if it is refused before it is accepted. An accepted request that fails with 500
    or above is the server's fault, otherwise the client's.
    """

    def __init__(self, text: str, *, status: int = 400) -> None:
        super().__init__(status, "refused", text)


def invalid(text: str) -> TinkerError:
    """Refuses a request whose content is wrong (422)."""
    return TinkerError(text, status=422)


def not_found(text: str) -> TinkerError:
    """Refuses a request about something that does not exist (404)."""
    return TinkerError(text, status=404)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model in training: a base model, and the adapter that is trained on it."""

    base_model: str
    rank: int
    """Rank of the adapter; 0 trains the whole model."""
    seed: int | None = None
    """Draws the adapter's start; None lets the server choose."""
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens of a datum that come from a sampled sequence, by the client's word."""

    kind: str
    """Part of the sequence that they come from: prompt or sampled."""
    sequence_id: str
    offset: int
    """First token, counted within that part."""
    length: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """One row: the input ids, and what the loss reads at each of them.

    Position i predicts `inputs["target_tokens"][i]`, which usually is token i + 1.
    """

    token_ids: Int32Array
    """[N] int32: the model's input."""
    inputs: Mapping[str, npt.NDArray[Any]]
    """name -> [N] or [N, K] (sparse ones are made dense): target_tokens int64; weights, logprobs,
    advantages, ... float32."""
    input_spans: tuple[Span, ...] = ()
    """Where the input ids come from, in order; empty if the client does not say."""
    loss_spans: tuple[Span, ...] = ()
    """Where `target_tokens` come from, in order."""
    versions: Int32Array | None = None
    """[N] version of the weights that drew each target, as this server recorded it; -1 where it did
    not draw it. None: nobody looked."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBackward:
    """Adds the gradient of a loss, summed over all tokens, to what the next update applies."""

    data: tuple[Datum, ...]
    loss: str
    """cross_entropy, importance_sampling, ppo, cispo, dro, gspo or custom."""
    config: Mapping[str, float | str] = field(default_factory=dict)
    """Settings of the loss: clip_low_threshold, clip_high_threshold, beta, loss_id."""
    is_forward_only: bool = False
    custom: Any = None
    """The uploaded loss (`graph.GraphLoss`), if the loss is custom."""
    origins: Mapping[str, int] = field(default_factory=dict)
    """Number of datums by their origin: drawn here, differs from that, foreign or unknown."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBackwardResult:
    """Losses and log-probs of one pass."""

    logprobs: tuple[Float32Array, ...]
    """One array per datum, in the shape of its target_tokens."""
    metrics: Mapping[str, float]
    """`name:reduction`; `loss:sum` is always there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """One update of AdamW by the gradients collected since the last one."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Norm that the gradient is scaled down to; 0 does not clip."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampling:
    """Draws from one sampler."""

    prompt_ids: Int32Array
    num_samples: int
    params: SamplingParams
    seed: int | None = None
    has_prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_ids: npt.NDArray[np.int64] | None = None
    """[len(prompt) - 1, K]: ids whose log-prob is wanted at each place of the prompt, -1 for
    none."""
    has_sparse_targets: bool = False
    """The client listed the cells of `target_ids` that it wants, and reads an answer of the same
    form."""
    num_alternatives: int = 0
    """Ids to be drawn, independently and at this temperature, at each place of the prompt but the
    first."""
    first: int = 1
    """First place of the prompt whose log-probs are wanted; nothing predicts place 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopK:
    """The most likely ids at some places, most likely first."""

    ids: Int32Array
    """[places, K]."""
    logprobs: Float32Array
    """[places, K], NaN where there is nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledSequence:
    """One reply."""

    token_ids: Int32Array
    """The stop token included."""
    logprobs: Float32Array
    """Under softmax(logits / temperature)."""
    versions: Int32Array
    """Version of the weights that drew each token: updates made before."""
    stop_reason: Literal["stop", "length"]
    topk: TopK | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingResult:
    """All replies to one request."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: Float32Array | None = None
    """[len(prompt)], NaN at 0 and where nothing was asked for."""
    topk_prompt: TopK | None = None
    target_logprobs: npt.NDArray[np.float32] | None = None
    """[len(prompt) - 1, K], NaN where the target is -1."""
    alternatives: TopK | None = None
    """[len(prompt) - 1, num_alternatives], in the order of drawing."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the cache."""
