"""Lockstep's decoder as a model of vLLM, over vLLM's cache and block tables.

The numbers of a token are computed by the `Decoder` and the ops that a trainer computes them by, in
whatever batch vLLM's scheduler puts it. vLLM sees a model whose layers only hold keys and values;
attention reads them through `PagedContext`, as in the embedded engine.

Guard: tests/vllm/test_decoder.py.

# T tokens  D model width  G key heads  K head width  B blocks of the cache  N tokens of a block
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from lockstep.engines.vllm.plugin import NEEDS, OPS, check_version
from lockstep.errors import CapabilityError
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import load_into, load_weights, materialize
from lockstep.models.lora import add_adapter
from lockstep.models.peft_format import is_adapter, read_shape
from lockstep.models.peft_io import load_adapter
from lockstep.ops.base import Ops
from lockstep.ops.context import PackedContext, PagedContext
from lockstep.ops.invariant import ask_for_reproducible_gemm
from lockstep.ops.selftest import fingerprint, prove


class LockstepForCausalLM(nn.Module):
    """`Decoder` by the interface of vLLM's models. Its weights are inference weights: they change
    in place, by `load_weights` alone."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        ask_for_reproducible_gemm()
        model_config = vllm_config.model_config
        check_runnable(vllm_config)
        config = ModelConfig.from_directory(model_config.model)
        device = torch.get_default_device()
        with torch.device("meta"):
            decoder = Decoder(config)
        self.decoder = materialize(decoder.to(model_config.dtype), device).requires_grad_(False)
        self._given_ops = (vllm_config.additional_config or {}).get(OPS)
        self._caches = [
            LayerCache(config, vllm_config, name=f"{prefix}layers.{layer}.attention")
            for layer in range(config.num_layers)
        ]
        self._is_proven = False

    @property
    def fingerprint(self) -> str:
        """Numerics that compute the log-probs, in their stored form."""
        weight = self.decoder.embedding
        return fingerprint(self.decoder.ops, weight.dtype, weight.device).text

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return nn.functional.embedding(input_ids, self.decoder.embedding)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: object = None,
    ) -> Tensor:
        """[T, D] final hidden states; zeros for places that fill up a batch."""
        assert intermediate_tensors is None and inputs_embeds is None, "one process, ids alone"
        steps = get_forward_context().attn_metadata
        ids, positions = input_ids.long(), positions.long()
        with torch.inference_mode():
            if steps is None:  # a trial run, whose memory is measured
                return self.decoder(ids, positions, PackedContext.of([len(ids)], device=ids.device))
            step: Step = steps[self._caches[0].name]
            count = step.num_tokens
            hidden = self.decoder(ids[:count], positions[:count], self._context(step))
            extra = len(ids) - count
            return nn.functional.pad(hidden, (0, 0, 0, extra)) if extra else hidden

    def _context(self, step: Step) -> PagedContext:
        ops, config = self.decoder.ops, self.decoder.config
        caches = self._caches
        return PagedContext.of(
            [cache.keys for cache in caches],
            [cache.values for cache in caches],
            step.tables,
            step.starts,
            step.stops,
            num_heads=config.num_heads if ops.reads_work(caches[0].keys.device) else None,
        )

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[T, vocabulary] in the compute dtype."""
        with torch.inference_mode():
            return self.decoder.logits(hidden_states)

    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | str | Path
    ) -> set[str]:
        """Copies a checkpoint's tensors, by their Hugging Face names or from its directory. An
        adapter's directory loads the adapter, which is computed beside the weights, as in the
        trainer. Returns the names of all loaded tensors. The first call finds the trainer's ops.

        Raises CheckpointError, before anything is changed, for tensors that do not fit.
        """
        if isinstance(weights, (str, Path)) and is_adapter(weights):
            if self.decoder.lora is None:
                add_adapter(self.decoder, read_shape(weights, self.decoder.config), seed=0)
                self.decoder.requires_grad_(False)
            load_adapter(self.decoder, weights)
        elif self.decoder.lora is not None:
            raise CapabilityError(
                "Lockstep's decoder in vLLM has an adapter beside its weights, and takes the next "
                "one alone. Start vLLM again for other weights."
            )
        elif isinstance(weights, (str, Path)):
            load_into(self.decoder, weights)
        else:
            named: Any = weights
            tensors = named if isinstance(named, Mapping) else dict(named)
            load_weights(self.decoder, tensors, where="the weights for vLLM")
        if not self._is_proven:
            self.decoder.ops, self._is_proven = self._find_ops(), True
        return {name for name, _ in self.named_parameters()}

    def _find_ops(self) -> Ops:
        """The original of the trainer's ops. Without a trainer: ops that keep the contract on this
        machine, or stock ops."""
        if self._given_ops is None:
            return prove(self.decoder).ops
        return pickle.loads(base64.b64decode(self._given_ops))


def check_runnable(vllm_config: Any) -> None:
    """Raises CapabilityError for a vLLM, or settings of one, that would give other numbers."""
    check_version(version("vllm"))
    for need in NEEDS:
        if (attrgetter(need["setting"])(vllm_config) or None) not in need.get("values", [None]):
            raise CapabilityError(f"Lockstep's decoder in vLLM {need['text']}.")
    model = vllm_config.model_config
    if not Path(model.model).is_dir():
        raise CapabilityError(
            f"Lockstep's decoder in vLLM reads a directory, and {model.model} is none: download "
            "the model first."
        )
    if vllm_config.cache_config.cache_dtype not in ("auto", str(model.dtype)[6:]):
        raise CapabilityError(
            "Lockstep's decoder in vLLM keeps keys and values as it computes them: give "
            "--kv-cache-dtype=auto."
        )


class LayerCache(AttentionLayerBase):
    """Keys and values of one layer, in memory that vLLM allocates."""

    def __init__(self, config: ModelConfig, vllm_config: Any, *, name: str) -> None:
        self.name, self._config = name, config
        self._dtype = vllm_config.model_config.dtype
        self.keys = self.values = torch.empty(0)
        """[G, B, N, K], once vLLM has bound them."""
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return LockstepBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> FullAttentionSpec:
        """Layers with a window keep the keys before it too: all share one table of blocks."""
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self._config.num_kv_heads,
            head_size=self._config.head_dim,
            dtype=self._dtype,
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Takes a layer's memory [B, G, N, 2 K], heads outermost. The keys get its first half:
        where they lay beside the values, every read would copy the whole cache first."""
        self.kv_cache, (num_blocks, heads, size, width) = kv_cache, kv_cache.shape
        halves = kv_cache.transpose(0, 1).view(-1).chunk(2)
        self.keys, self.values = (half.view(heads, num_blocks, size, width // 2) for half in halves)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Requests of one step; each feeds its positions [start, stop), one request after another."""

    tables: npt.NDArray[np.int64]
    """[requests, P]: blocks of each; unused places name any valid block."""
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        return int((self.stops - self.starts).sum())


class StepBuilder(AttentionMetadataBuilder[Any]):
    """Makes `Step` of what vLLM's scheduler has put together."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._init_reorder_batch_threshold(1)  # requests with one token first: one block of them

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Step:
        counts = np.diff(common.query_start_loc_cpu.numpy()[: common.num_reqs + 1]).astype(np.int64)
        stops = common.seq_lens[: common.num_reqs].cpu().numpy().astype(np.int64)
        tables = common.block_table_tensor[: common.num_reqs].cpu().numpy().astype(np.int64)
        is_fed = counts > 0
        return Step(tables[is_fed], (stops - counts)[is_fed], stops[is_fed])


class LockstepBackend(AttentionBackend):
    """The cache's layout, for vLLM; attention itself is the decoder's."""

    @staticmethod
    def get_name() -> str:
        return "LOCKSTEP"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        raise NotImplementedError("the decoder computes attention by its ops")

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # A head's keys lie one block after another, as attention reads them.
        return (KVCacheLayout.LHBNC,)
