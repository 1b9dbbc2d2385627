"""The only functions a model may call. Sampler and trainer run the same decoder over these.

A backend is an object with these functions and signatures; `use_backend` chooses one for the
process. A model that computed anything by another way would be equal to itself by luck alone.
"""

from __future__ import annotations

from typing import Protocol

import torch

from lockstep.errors import AlignmentError
from lockstep.ops import plain
from lockstep.ops.context import Coefficients, PackedContext, PagedContext, Support

Tensor = torch.Tensor


class Backend(Protocol):
    """What `use_backend` takes: the functions of this module, by name."""

    @property
    def name(self) -> str:
        """plain, invariant, cuda: what the fingerprint says."""
        ...

    def resident_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Of the running rows' keys and values where an engine holds them once more, in one piece
        (`ResidentRows`); None if attention reads pages alone. dtype: the model's."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def expert_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, tokens_per_expert: list[int]
    ) -> Tensor: ...

    def expert_linear_backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        tokens_per_expert: list[int],
        *,
        grad_weight: Tensor | None,
    ) -> Tensor: ...

    def route(
        self,
        logits: Tensor,
        num_active: int,
        *,
        experts: Tensor | None = None,
        is_normalized: bool = True,
    ) -> tuple[Tensor, Tensor]: ...

    def combine(self, out: Tensor, weights: Tensor) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def swiglu(self, gate_up: Tensor) -> Tensor: ...

    def swiglu_clamped(self, gate_up: Tensor, *, alpha: float, limit: float) -> Tensor: ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sinks: Tensor | None,
        window: int | None,
        scale: float,
        layer: int,
        context: PackedContext | PagedContext,
    ) -> Tensor: ...

    def log_probs(
        self,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        *,
        temperature: float = 1.0,
        support: Support | None = None,
        coefficients: Coefficients | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def log_softmax(
        self, logits: Tensor, *, temperature: float = 1.0, kept: Tensor | None = None
    ) -> Tensor: ...


_active: Backend = plain


def use_backend(backend: Backend) -> None:
    """Makes `backend` the one of this process: `ops.plain`, an `ops.invariant.InvariantOps`, or an
    `ops.cuda.CudaOps`."""
    global _active
    _active = backend


def active_backend() -> Backend:
    """What the functions below call."""
    return _active


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] @ weight [N, K]^T + bias [N] -> [..., N]."""
    return _active.linear(x, weight, bias)


def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tokens_per_expert: list[int]
) -> Tensor:
    """x [R, K], rows sorted by expert, weight [E, N, K], bias [E, N] -> [R, N].

    tokens_per_expert: [E], sums to R: the first rows belong to expert 0, and so on.
    Not differentiable: `models.experts` does that, by `expert_linear_backward`.
    """
    return _active.expert_linear(x, weight, bias, tokens_per_expert)


def expert_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    tokens_per_expert: list[int],
    *,
    grad_weight: Tensor | None,
) -> Tensor:
    """The gradient of x [R, K], from that of the output: grad [R, N].

    grad_weight: [E, N, K]; the weight's gradient is added to it. None: it is not computed.
    """
    return _active.expert_linear_backward(
        grad, x, weight, tokens_per_expert, grad_weight=grad_weight
    )


def route(
    logits: Tensor,
    num_active: int,
    *,
    experts: Tensor | None = None,
    is_normalized: bool = True,
) -> tuple[Tensor, Tensor]:
    """(weights, experts [T, A] int64) of the `num_active` largest logits [T, E], largest first;
    weights [T, A] in the logits' dtype.

    experts: [T, A] int64 taken in place of the largest, in their order (routing replay).
    is_normalized: weights are the softmax over the chosen logits alone, which is the softmax over
    all of them divided by its sum over the chosen. Otherwise that sum is left below 1.
    """
    return _active.route(logits, num_active, experts=experts, is_normalized=is_normalized)


def combine(out: Tensor, weights: Tensor) -> Tensor:
    """Each token's expert outputs [T, A, D], weighed by weights [T, A] and summed -> [T, D]."""
    return _active.combine(out, weights)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dim, times weight; computed in float32, returned in x's dtype.

    weight: [D], or [heads, D] for x [T, heads, D].
    """
    return _active.rms_norm(x, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [..., 2F] = [gate, up] -> [..., F]."""
    return _active.swiglu(gate_up)


def swiglu_clamped(gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """gpt-oss' activation: (clamp(up) + 1) * g * sigmoid(alpha * g), g = min(gate, limit)."""
    return _active.swiglu_clamped(gate_up, alpha=alpha, limit=limit)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [T, H, D] by position; cos and sin [T, 1, D] float32, sin's first half negated."""
    return _active.rope(x, cos, sin)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sinks: Tensor | None,
    window: int | None,
    scale: float,
    layer: int,
    context: PackedContext | PagedContext,
) -> Tensor:
    """Causal attention of q [T, H, D] over k, v [T, G, D] and, paged, over what is cached.

    sinks: [H] logits that take part in the softmax and have no value (gpt-oss).
    window: a position sees itself and the window - 1 before it; None sees all before it.
    Differentiable over a PackedContext, sinks included. Returns [T, H, D].
    """
    return _active.attention(
        q, k, v, sinks=sinks, window=window, scale=scale, layer=layer, context=context
    )


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    support: Support | None = None,
    coefficients: Coefficients | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-prob of ids, entropy), each [T] float32 nats, of softmax(hidden @ weight^T / t).

    hidden [T, D], weight [V, D], ids [T]. Both outputs are differentiable. The logits are formed in
    chunks of rows; no more than one chunk of [rows, V] lives at a time. support: of T tokens, whose
    softmax is over its own ids alone; an id outside has log-prob -inf. Raises AlignmentError if it
    is of another number of tokens.

    coefficients: the loss's gradient by both outputs, where it is known beforehand: the gradients
    of hidden and weight are then formed in the forward, and the logits not formed twice. Whoever
    gives them promises that backward brings them, times one number: AlignmentError if it does not,
    or if they are of another number of tokens. Then it can be called once.
    """
    if coefficients is not None and len(coefficients.logprobs) != len(ids):
        raise AlignmentError(
            f"log_probs: {len(ids)} ids, and coefficients of {len(coefficients.logprobs)} tokens: "
            "one each."
        )
    if support is not None and len(support) != len(ids):
        raise AlignmentError(
            f"log_probs: {len(ids)} ids, and a support of {len(support)} tokens: one entry each."
        )
    return _active.log_probs(
        hidden, weight, ids, temperature=temperature, support=support, coefficients=coefficients
    )


def log_softmax(logits: Tensor, *, temperature: float = 1.0, kept: Tensor | None = None) -> Tensor:
    """[..., V] float32 log-probabilities: the sampler's side of `log_probs`, same arithmetic.

    kept: [..., V] bool, True at the ids that the softmax is over; -inf elsewhere. NaN for a row
    without any.
    """
    return _active.log_softmax(logits, temperature=temperature, kept=kept)
