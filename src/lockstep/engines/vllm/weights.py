"""Replaces the weights of a running vLLM model, exactly; runs inside vLLM's worker.

vLLM's own `reload_weights` is exact for dense models only (0.32, CPU): experts are not packed
again, tied heads and gpt-oss' sinks and experts keep their old values. Here every packed parameter
gets the checkpoint's layout back, the model's own loader fills it, and the same steps follow as
after a load at the start of an engine. Models that this does not cover are refused before anything
is written, so that the engine can be restarted instead.

Guard: tests/vllm/test_weights.py.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform

from lockstep.engines.vllm.model import LockstepForCausalLM
from lockstep.errors import CapabilityError, EngineError
from lockstep.models.hf_io import read_tensors

FAMILIES = ("deepseek_v3", "gemma3_text", "glm4_moe", "gpt_oss", "llama", "mistral", "olmo3")
FAMILIES += ("qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next")
"""Model types whose update was compared with a fresh engine of the new weights."""

DERIVED = (".W_UK_T", ".W_UV")
"""Parameters that vLLM makes after loading: the halves of latent attention's kv_b_proj."""

PLAIN_LAYERS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
"""Layers whose memory layout is known and that derive no scale from their weights."""

UNPACKED_BACKENDS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels that read experts in a checkpoint's layout, so that a GPU needs no unpacking."""


def why_not_in_place(model: nn.Module, vllm_config: Any) -> str:
    """Reason why this model's weights cannot be replaced while it runs; empty if they can."""
    if isinstance(model, LockstepForCausalLM):
        return ""
    kind = vllm_config.model_config.hf_config.model_type
    if kind not in FAMILIES:
        return f"a model of type {kind}; known are {', '.join(FAMILIES)}"
    if vllm_config.lora_config is not None:
        return "an engine with adapters wraps its layers: publish the adapter instead"
    if vllm_config.parallel_config.enable_eplb:
        return "experts that vLLM moves between devices (enable_eplb)"
    for name, module in model.named_modules():
        if (method := getattr(module, "quant_method", None)) is None:
            continue
        if not isinstance(method, PLAIN_LAYERS):
            return f"{name} is computed by {type(method).__name__}: quantised?"
        if current_platform.is_cpu() or not isinstance(method, UnquantizedFusedMoEMethod):
            continue
        if method.unquantized_backend not in UNPACKED_BACKENDS:
            return f"{name} packs its experts for {method.unquantized_backend.value}"
    return ""


def lacks_tied_head(vllm_config: Any) -> bool:
    """True if vLLM starts this model with a head that no checkpoint fills: its gpt-oss silently
    ignores tied embeddings. An update fills the head."""
    config = vllm_config.model_config.hf_config
    return config.model_type == "gpt_oss" and config.tie_word_embeddings


def _with_head(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        yield name, tensor
        if name == "model.embed_tokens.weight":
            yield "lm_head.weight", tensor


@torch.no_grad()
def update_weights(
    model: nn.Module,
    vllm_config: Any,
    source: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | str | Path,
) -> None:
    """Replaces the model's weights by all tensors of a checkpoint, by their Hugging Face names.
    source: they themselves, one by one or by name, or their directory.

    The caller drops cached prefixes, and runs no step meanwhile. Takes as much memory again as
    vLLM's own model on a CPU, and as Lockstep's decoder for tensors that come one by one, which it
    checks as a whole first.

    Raises CapabilityError or CheckpointError, before any change, if the result would differ from a
    fresh engine; EngineError if a weight is missing or misshapen for vLLM's own model: it is then
    half new, and its engine must be restarted.
    """
    if isinstance(model, LockstepForCausalLM):
        model.load_weights(source)
        return
    weights: Any = source.items() if isinstance(source, Mapping) else source
    if isinstance(source, (str, Path)):
        weights = ((name, stored.read()) for name, stored in read_tensors(source).items())
    if reason := why_not_in_place(model, vllm_config):
        raise CapabilityError(
            f"vLLM cannot take new weights while it runs: {reason}. The engine must be started "
            "again from a checkpoint of them."
        )
    if lacks_tied_head(vllm_config):
        weights = _with_head(weights)
    tied = _tied_parameters(model)
    wanted = {name for name, _ in model.named_parameters() if not name.endswith(DERIVED)}
    if current_platform.is_cpu():
        _unpack(model, vllm_config.model_config.dtype)
        _tie(tied)
    try:
        loaded = model.load_weights(weights)  # type: ignore[operator]
    except (KeyError, ValueError, RuntimeError, AssertionError) as error:
        raise EngineError(
            f"vLLM did not take the new weights ({type(error).__name__}: {error}): of another "
            "model? The engine's weights are half new, and it must be started again."
        ) from error
    if missing := sorted(wanted - set(loaded)):
        shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise EngineError(
            f"the new weights lack {len(missing)} of the {len(wanted)} parameters of vLLM's model "
            f"({shown}). The engine's weights are half new, and it must be started again."
        )
    config = vllm_config.model_config
    process_weights_after_loading(model, config, torch.device(vllm_config.device_config.device))
    # Points attention to the new sinks: its own reference may be a copy made by a cast.
    for module in model.modules():
        sinks = getattr(module, "sinks", None)
        attention = getattr(module, "attn", None)
        if isinstance(sinks, Tensor) and getattr(attention, "impl", None) is not None:
            attention.impl.sinks = sinks  # type: ignore[union-attr]


def _tied_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Groups of places that hold the same parameter."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.numel():
                places.setdefault(id(parameter), []).append((module, name))
    return [group for group in places.values() if len(group) > 1]


def _tie(tied: list[list[tuple[nn.Module, str]]]) -> None:
    for (first, name), *others in tied:
        for module, other in others:
            module._parameters[other] = first._parameters[name]


def _unpack(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives every parameter that CPU kernels packed the shape and dtype of a fresh model again, and
    drops expert kernels, which pack on their first load only.

    Biases are not in vLLM's record of shapes. On CPUs with AMX they have become float32, and would
    take values that a fresh bfloat16 engine rounds.
    """
    for module in model.modules():
        if (method := getattr(module, "quant_method", None)) is None:
            continue
        if (bias := module._parameters.get("bias")) is not None:
            bias.data = bias.data.to(dtype)
        shapes, _ = get_layerwise_info(module).restore_metadata
        for name, meta in shapes.items():
            parameter = materialize_meta_tensor(restore_layer_refs(meta, module))
            parameter.zero_()  # what a checkpoint leaves out is padding
            module.register_parameter(name, parameter)  # type: ignore[arg-type]
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None
