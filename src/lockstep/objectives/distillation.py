"""Divergences between a student's and a teacher's distribution, as losses on tokens. torch.

# N tokens  D, d widths of student and teacher  V vocabulary  K ids that the teacher lists
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep.correction.arrays import takes_arrays
from lockstep.errors import AlignmentError
from lockstep.objectives.config import KLOrder, check_kind
from lockstep.ops.context import sum_dtype
from lockstep.ops.head import chunk_rows

Tensor = torch.Tensor

# 1 - p of a probability that has rounded to 1, the smallest step of float32. Without it one such
# token would be infinitely far from another that is as sure.
SMALLEST_COMPLEMENT = torch.finfo(torch.float32).eps / 2


@takes_arrays
def top_k_kl(logprobs: Tensor, teacher_logprobs: Tensor, *, order: KLOrder = "reverse") -> Tensor:
    """[N] nats: the KL of two distributions that are known at K ids, and elsewhere by the mass that
    is left.

    logprobs: [N, K] float32 of the student at ids that the teacher listed; carries gradient.
    teacher_logprobs: [N, K] at the same ids; constant. All other ids count as one outcome, so this
    is a lower bound of the KL over the vocabulary, and equal to it where all but one id are listed.
    Source of the bound: log sum inequality, Cover and Thomas 2006, theorem 2.7.1.

    >>> student, teacher = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    >>> round(top_k_kl(student, teacher).item(), 4)      # .5 log(.5 / .25) + .5 log(.5 / .75)
    0.1438
    """
    if logprobs.shape != teacher_logprobs.shape:
        raise AlignmentError(
            f"logprobs have the shape {list(logprobs.shape)} and teacher_logprobs "
            f"{list(teacher_logprobs.shape)}: each is one number per token and listed id."
        )
    given = (logprobs, teacher_logprobs.detach())
    student, teacher = (_with_rest(x if x.dtype == torch.float64 else x.float()) for x in given)
    return _kl(student, teacher, order)


@takes_arrays
def vocabulary_kl(
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    order: KLOrder = "reverse",
) -> Tensor:
    """[N] float32 nats: the KL of the two distributions over the ids that both models have, the
    first `vocab_size` of them.

    hidden [N, D] and head [V, D] of the student carry gradient; teacher_hidden [N, d] and
    teacher_head are constants. No [N, V] tensor exists: chunks of tokens are computed one after
    another, and again in backward. Both sides are at this temperature. Source: GKD (Agarwal et al.
    2024, arXiv 2306.13649), equation 1.
    """
    shared = min(len(head), len(teacher_head), vocab_size or len(head))
    found = _VocabularyKL.apply(
        hidden, head[:shared], teacher_hidden, teacher_head[:shared], temperature, order
    )
    assert isinstance(found, Tensor)
    return found


class _VocabularyKL(torch.autograd.Function):
    """dKL/dlogit_j of the student is p_j (log p_j - log q_j - KL) / temperature in reverse order,
    and (p_j - q_j) / temperature in forward order."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, temperature, order = args
        kl = tensors[0].new_empty(len(tensors[0]), dtype=torch.float32)
        for rows in _chunks(tensors):
            kl[rows] = _kl(*_both_logprobs(tensors, rows, temperature), order)
        ctx.save_for_backward(*tensors, kl)
        ctx.settings = temperature, order
        return kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (*tensors, kl), (temperature, order) = ctx.saved_tensors, ctx.settings
        hidden, head = tensors[:2]
        grad_hidden = torch.empty_like(hidden)
        grad_head = None
        if ctx.needs_input_grad[1]:
            grad_head = torch.zeros_like(head, dtype=sum_dtype(head.dtype))
        for rows in _chunks(tensors):
            student, teacher = _both_logprobs(tensors, rows, temperature)
            if order == "reverse":
                grad = student.exp()
                grad.mul_(student.sub_(teacher).sub_(kl[rows, None]))
            else:
                grad = student.exp_().sub_(teacher.exp_())
            grad = grad.mul_(grads[0][rows, None] / temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ head
            if grad_head is not None:
                grad_head += grad.t() @ hidden[rows]
        grad_head = None if grad_head is None else grad_head.to(head.dtype)
        return grad_hidden, grad_head, None, None, None, None


def _chunks(tensors: list[Tensor]) -> list[slice]:
    hidden, head = tensors[:2]
    # Log-probs of both sides, and three products of theirs, are there at once.
    size = max(1, chunk_rows(len(head), hidden.device) // 5)
    return [slice(at, at + size) for at in range(0, len(hidden), size)]


def _both_logprobs(tensors: list[Tensor], rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
    """(student's, teacher's), each [rows, V] float32."""
    hidden, head, teacher_hidden, teacher_head = tensors
    student, teacher = (
        (x[rows] @ weight.t()).float().div_(temperature)
        for x, weight in ((hidden, head), (teacher_hidden, teacher_head))
    )
    for logits in (student, teacher):
        logits.sub_(logits.logsumexp(-1, keepdim=True))
    return student, teacher


def _with_rest(logprobs: Tensor) -> Tensor:
    """[N, K] -> [N, K + 1]: with the log of the mass that is left."""
    left = 1 - logprobs.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs, left.clamp(min=SMALLEST_COMPLEMENT).log()], -1)


def _kl(student: Tensor, teacher: Tensor, order: KLOrder) -> Tensor:
    """student, teacher: [N, outcomes] log-probs."""
    check_kind("order", order, KLOrder)
    of, other = (student, teacher) if order == "reverse" else (teacher, student)
    prob = of.exp()
    return (prob * torch.where(prob > 0, of - other, 0.0)).sum(-1)  # 0 log 0 is 0
