"""Any causal language model of transformers behind the decoder's interface, for the trainer.

The model's own code computes, so equal bits, cached pages, replayed routes and shared beginnings
are not available: rows run as padded batches, and an engine outside of this process samples.
Settings that need more are refused by name, before a model is loaded and here.

# T tokens  D model width  N trained tokens  V vocabulary  B rows of a block  L its length
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.errors import CapabilityError, CheckpointError, require_package
from lockstep.models.config import FallbackConfig
from lockstep.models.hf_io import (
    copy_companions,
    hf_tensors,
    load_into,
    refuse_misfits,
    replacing,
    save_checkpoint,
)
from lockstep.models.sharding import copy_whole
from lockstep.ops.base import Ops
from lockstep.ops.context import PackedContext, Support, take_rows

Tensor = torch.Tensor


class FallbackModel(nn.Module):
    """A `transformers` model for the trainer: ids, positions and a packed context in, hidden states
    and log-probs out. Made by `load_fallback`."""

    def __init__(self, inner: Any, config: FallbackConfig) -> None:
        """inner: a transformers model with a language-modelling head. It stays in evaluation mode,
        so that dropout never makes two forwards differ."""
        super().__init__()
        self.inner = inner.eval()
        self.config = config
        self.ops = Ops()
        self.lora = None
        self.recomputes_blocks = False
        parameters = inspect.signature(inner.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self.has_plain_head = self._is_plain_head()
        """True if logits are hidden states times a matrix, neither capped, scaled nor shifted. Then
        log-probs are computed in chunks; otherwise from all logits at once."""

    @property
    def embedding(self) -> Tensor:
        """[V, D]."""
        return self.inner.get_input_embeddings().weight

    @property
    def head(self) -> Tensor:
        """[V, D]: the output projection."""
        return self.inner.get_output_embeddings().weight

    def forward(
        self, ids_T: Tensor, positions_T: Tensor, context: Any, routing: Any = None
    ) -> Tensor:
        """ids, positions [T] int64 -> [T, D] hidden states, the input of a plain head.

        Raises CapabilityError for a context or routes that only the decoder understands.
        """
        self._check(context, routing)
        return self._run(
            self.inner.base_model, lambda out: out.last_hidden_state, ids_T, positions_T, context
        )

    def score(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        context: Any,
        *,
        predictors_N: Tensor,
        targets_N: Tensor,
        temperature: float = 1.0,
        support: Support | None = None,
        routing: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """(log-prob, entropy), each [N] float32: see `Decoder.score`."""
        if self.has_plain_head:
            hidden_TD = self(ids_T, positions_T, context, routing)
            return self.ops.log_probs(
                take_rows(hidden_TD, predictors_N),
                self.head,
                targets_N,
                temperature=temperature,
                support=support,
            )
        self._check(context, routing)
        logits_NV = self.logits(ids_T, positions_T, context, predictors_N)(slice(None))
        kept_NV = None if support is None else support.mask(slice(None), logits_NV.shape[1])
        logprobs_NV = self.ops.log_softmax(logits_NV, temperature=temperature, kept=kept_NV)
        terms_NV = logprobs_NV.exp() * logprobs_NV
        entropy_N = -terms_NV.masked_fill(logprobs_NV == float("-inf"), 0.0).sum(-1)
        return logprobs_NV.gather(1, targets_N[:, None])[:, 0], entropy_N

    def logits(
        self, ids_T: Tensor, positions_T: Tensor, context: PackedContext, predictors_N: Tensor
    ) -> Callable[[slice], Tensor]:
        """Gives the logits [n, V] at a slice of the predictors [N], in the compute dtype. All of
        them are in memory at once where the head is not plain."""
        if self.has_plain_head:
            hidden_ND = take_rows(self(ids_T, positions_T, context), predictors_N)
            return lambda part: self.ops.linear(hidden_ND[part], self.head)
        logits_TV = self._run(self.inner, lambda out: out.logits, ids_T, positions_T, context)
        logits_NV = take_rows(logits_TV, predictors_N)
        return lambda part: logits_NV[part]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, by the config; None is full attention, or none."""
        config = self.inner.config
        width, num_layers = getattr(config, "sliding_window", None), self.config.num_layers
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
        if not isinstance(getattr(self.inner.base_model, "layers", None), nn.ModuleList):
            return (None,) * num_layers  # layers that have another place cannot be given masks
        return tuple(width if kind == "sliding_attention" else None for kind in kinds)

    @contextmanager
    def with_windows(self, windows: Sequence[int | None]) -> Iterator[None]:
        """Inside of the block, each layer of attention is given the mask of this window."""
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        base, own = self.inner.base_model, self.windows
        padding: dict[str, Tensor] = {}

        def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            padding["mask"] = kwargs["attention_mask"]

        def give(window: int | None, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            config = copy(self.inner.config)
            config.sliding_window = window
            make: Any = create_causal_mask if window is None else create_sliding_window_causal_mask
            hidden = args[0] if args else kwargs["hidden_states"]
            # Releases of transformers have renamed the keyword of the cache.
            names = inspect.signature(make).parameters
            cache = {"cache" if "cache" in names else "past_key_values": None}
            mask = make(
                config=config, inputs_embeds=hidden, attention_mask=padding["mask"], **cache
            )
            return args, kwargs | {"attention_mask": mask}

        with ExitStack() as stack:
            stack.enter_context(base.register_forward_pre_hook(keep, with_kwargs=True))
            for layer, before, after in zip(base.layers, own, windows, strict=True):
                if before != after:
                    hook = layer.register_forward_pre_hook(partial(give, after), with_kwargs=True)
                    stack.enter_context(hook)
            yield

    def _check(self, context: Any, routing: Any) -> None:
        if not isinstance(context, PackedContext):
            raise CapabilityError(
                "a model that transformers runs (fallback) takes whole rows (PackedContext), found "
                f"{type(context).__name__}: no embedded engine, no sequence parallelism."
            )
        if routing is not None:
            raise CapabilityError(
                "a model that transformers runs (fallback) cannot replay or report routes."
            )

    def _run(
        self,
        module: Any,
        read: Callable[[Any], Tensor],
        ids_T: Tensor,
        positions_T: Tensor,
        context: PackedContext,
    ) -> Tensor:
        """[T, ...]: outputs of the rows of each block, run as a batch with right padding."""
        outs: list[Tensor] = []
        for index_BL in context.blocks:
            inputs = {"input_ids": ids_T[index_BL], "attention_mask": _mask(index_BL)}
            if self._takes_positions:
                inputs["position_ids"] = positions_T[index_BL]
            outs.append(read(module(**inputs, use_cache=False)).flatten(0, 1))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        # A token that several rows begin with is computed in each, and read in one of them.
        return out if context.place_index is None else take_rows(out, context.place_index)

    def _is_plain_head(self) -> bool:
        """Tries the head on a few ids, since only its forward shows its arithmetic."""
        head = self.inner.get_output_embeddings()
        if head is None:
            raise CapabilityError(
                f"{type(self.inner).__name__} has no output embeddings: not a language model."
            )
        if getattr(head, "bias", None) is not None or self.inner.base_model is self.inner:
            return False  # the second: its body has another name than its class says (Llama 4)
        ids = torch.arange(min(len(self.embedding), 8), device=self.embedding.device)[None]
        with torch.no_grad():
            hidden = self.inner.base_model(input_ids=ids, use_cache=False).last_hidden_state
            logits = self.inner(input_ids=ids, use_cache=False).logits
            if hidden.shape[-1] != head.weight.shape[1]:
                return False
            return torch.equal(F.linear(hidden, head.weight), logits.to(hidden.dtype))


def _mask(index_BL: Tensor) -> Tensor:
    """[B, L] int64, 1 at a row's own tokens. Places past its end repeat its last token, which
    occurs nowhere before."""
    lengths_B = (index_BL != index_BL[:, -1:]).sum(1) + 1
    steps_L = torch.arange(index_BL.shape[1], device=index_BL.device)
    return (steps_L < lengths_B[:, None]).long()


def load_fallback(
    directory: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> FallbackModel:
    """A checkpoint directory of any architecture that transformers has, as a model to train.

    Raises MissingExtraError without transformers; CheckpointError for an architecture unknown to
    transformers, and one listing every tensor that is missing, extra or misshapen, which
    transformers itself would fill with random numbers.
    """
    config = FallbackConfig.from_directory(directory)
    require_package("transformers", extra="transformers", needed_for="fallback=true")
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # of a dozen kinds: an unknown architecture, torn or absent files
        raise CheckpointError(
            f"{directory}: transformers cannot load {config.architecture} ({error})."
        ) from error
    inner, found = loaded
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    misfits = {k.removesuffix("_keys"): sorted(map(str, found.get(k) or ())) for k in kinds}
    refuse_misfits(misfits, what=f"{directory} does not fit {config.architecture}")
    return FallbackModel(inner.to(device), config)


# -- what hf_io does for a decoder ----------------------------------------------------------------


@hf_tensors.register
def _(model: FallbackModel) -> Mapping[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    inner = model.inner
    own = {n for n, _ in inner.named_parameters()} | {n for n, _ in inner.named_buffers()}
    state = {n: t.detach() for n, t in inner.state_dict().items() if n in own}
    return revert_weight_conversion(inner, state)


@save_checkpoint.register
def _(
    model: FallbackModel,
    directory: str | Path,
    *,
    like: str | Path,
    dtype: torch.dtype | None = None,
    is_writer: bool = True,
) -> None:
    """Saves as transformers does. is_writer: False on all ranks but one. Raises CapabilityError for
    a dtype other than the model's."""
    if dtype not in (None, model.embedding.dtype):
        raise CapabilityError(f"a model that transformers runs is not saved in {dtype}.")
    if not is_writer:
        return
    with replacing(directory) as beside:
        model.inner.save_pretrained(beside)
        copy_companions(like, beside)


@load_into.register
def _(model: FallbackModel, directory: str | Path) -> None:
    """Loads a second copy on the CPU first, since transformers loads into new models only."""
    copy_whole(load_fallback(directory, dtype=model.embedding.dtype), model)
