"""Mends of vLLM's CPU kernels; runs in the process of vLLM's model.

Heads: the kernels support widths of 32, 64, 80 ... only, and the first step with another width ends
the engine. Keys, queries and values are padded with zeros to the next width and the output is cut:
every sum has the same terms and some zeros. The scale is an argument and uses the true width.

Adapters: vLLM 0.32 marks rows without an adapter by the index -1, which torch reads as the last
adapter. Such rows get its product when another row has an adapter. And it multiplies the rows of a
prompt's log-probs by the adapters of the requests, one each: with two requests the shapes differ,
and the step ends the engine. Adapters have no factors for the head here, so nothing is added there.

Guard: tests/vllm/test_served.py::test_a_shipped_model_is_sampled_as_the_trainer_computes_it,
tests/vllm/test_local.py::test_adapters_are_taken_by_name_and_mixed_in_a_batch
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform


def mend_cpu_kernels() -> None:
    """Makes vLLM in this process accept heads of any width, and compute each row of a batch by its
    own adapter. Idempotent; changes nothing on a GPU."""
    if current_platform.is_cpu() and not hasattr(Attention, "true_head_size"):
        _widen_narrow_heads()
        _mend_mixed_adapters()


def _widen_narrow_heads() -> None:
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


def _mend_mixed_adapters() -> None:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU as Wrapper

    shrink = Wrapper.add_shrink

    def add_shrink(self: Any, y: Tensor, x: Tensor, *args: Any, **settings: Any) -> None:
        shrink(self, y, x, *args, **settings)
        is_base = self.token_lora_indices < 0
        for part in y:
            part[: len(is_base)][is_base] = 0

    Wrapper.add_shrink, Wrapper.add_lora_logits = add_shrink, _add_nothing


def _add_nothing(self: Any, *args: Any, **settings: Any) -> None: ...
