"""The first step of every loss: check shapes, widen, and blank masked tokens."""

from __future__ import annotations

import torch

from lockstep.errors import AlignmentError

Tensor = torch.Tensor


def read_tokens(mask: Tensor | None, **tensors: Tensor) -> list[Tensor]:
    """The tensors, of one shape, at least float32, 0.0 where `mask` is False.

    The first carries gradient; the others are constants and are detached. Masked places are blanked
    here, before anything is computed from them: a where() afterwards would keep the value and let a
    NaN gradient through. Raises AlignmentError if the shapes differ.

    >>> mask = torch.tensor([True, False])
    >>> [x.tolist() for x in read_tokens(mask, a=torch.tensor([1.0, torch.nan]), b=mask.half())]
    [[1.0, 0.0], [1.0, 0.0]]
    """
    (first, live), *_ = tensors.items()
    for name, other in (tensors | ({} if mask is None else {"mask": mask})).items():
        if other.shape != live.shape:
            raise AlignmentError(
                f"{first} have the shape {list(live.shape)} and {name} {list(other.shape)}: each "
                "is one number per token. Shifted twice, or not at all?"
            )
    given = [live, *(x.detach() for name, x in tensors.items() if name != first)]
    wide = [x if x.dtype == torch.float64 else x.float() for x in given]
    return wide if mask is None else [torch.where(mask != 0, x, 0.0) for x in wide]
