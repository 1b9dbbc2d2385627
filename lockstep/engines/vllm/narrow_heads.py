"""Attention heads of any width on vLLM's CPU kernels; runs in the process of vLLM's model.

The kernels support widths of 32, 64, 80 ... only, and the first step with another width ends the
engine. Keys, queries and values are padded with zeros to the next width and the output is cut:
every sum has the same terms and some zeros. The scale is an argument and uses the true width.

Guard: tests/vllm/test_served.py::test_a_shipped_model_is_sampled_as_the_trainer_computes_it
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform


def widen_narrow_heads() -> None:
    """Makes vLLM's attention in this process accept heads of any width, on a CPU. Idempotent;
    changes nothing on a GPU."""
    if not current_platform.is_cpu() or hasattr(Attention, "true_head_size"):
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    supported = CPUAttentionBackend.get_supported_head_sizes()
    make, run = Attention.__init__, Attention.forward

    def __init__(self: Any, num_heads: int, head_size: int, *args: Any, **settings: Any) -> None:
        width = head_size
        if head_size not in supported and settings.get("head_size_v") in (None, head_size):
            width = min((w for w in supported if w >= head_size), default=head_size)
        make(self, num_heads, width, *args, **settings)
        self.true_head_size = head_size

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        output_shape: torch.Size | None = None,
        *args: Any,
        **settings: Any,
    ) -> Tensor:
        true, width = self.true_head_size, self.head_size
        if true == width:
            return run(self, query, key, value, output_shape, *args, **settings)  # type: ignore[arg-type]

        def widened(heads: Tensor | None) -> Tensor | None:
            if heads is None:
                return None
            return pad(heads.reshape(heads.shape[0], -1, true), (0, width - true)).flatten(1)

        output = run(self, widened(query), widened(key), widened(value), None, *args, **settings)  # type: ignore[arg-type]
        cut = output.view(output.shape[0], -1, width)[..., :true]
        return cut.reshape(output_shape or (output.shape[0], -1))

    Attention.true_head_size = 0  # type: ignore[attr-defined]
    Attention.__init__, Attention.forward = __init__, forward  # type: ignore[method-assign]
