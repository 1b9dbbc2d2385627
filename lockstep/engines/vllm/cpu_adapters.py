"""Adapters beside each other on vLLM's CPU kernels; runs in the process of vLLM's model.

vLLM 0.32 marks rows without an adapter by the index -1, which torch reads as the last adapter: such
rows get that one's product when another row has an adapter. And it multiplies the rows of a
prompt's log-probs by the adapters of the requests, one each: with two requests the shapes differ,
and the step ends the engine. Adapters have no factors for the head here, so nothing is added there.

Guard: tests/vllm/test_local.py::test_adapters_are_taken_by_name_and_mixed_in_a_batch
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.platforms import current_platform


def mend_mixed_adapters() -> None:
    """Makes vLLM in this process compute each row of a batch by its own adapter, on a CPU.
    Changes nothing on a GPU."""
    if not current_platform.is_cpu():
        return
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU as Wrapper

    if Wrapper.add_lora_logits is _add_nothing:
        return
    shrink = Wrapper.add_shrink

    def add_shrink(self: Any, y: Tensor, x: Tensor, *args: Any, **settings: Any) -> None:
        shrink(self, y, x, *args, **settings)
        is_base = self.token_lora_indices < 0
        for part in y:
            part[: len(is_base)][is_base] = 0

    Wrapper.add_shrink, Wrapper.add_lora_logits = add_shrink, _add_nothing


def _add_nothing(self: Any, *args: Any, **settings: Any) -> None: ...
