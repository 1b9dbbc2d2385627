"""Lockstep's decoder as a model of transformers, for trainers that take a `PreTrainedModel`.

    model = LockstepForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    outputs = model(input_ids, attention_mask=attention_mask, labels=labels)

Its log-probs come from the function that the embedded engine calls (`Ops.log_probs`). Under the
contract both sides have equal bits: with padding on either side, in any batch, with an adapter of
PEFT. The dtype of the weights is the dtype of the computation, also inside of autocast.

# B rows  L padded length  T tokens of all rows  N scored tokens  V vocabulary
"""

# The packages that it extends are not typed.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false, reportAssignmentType=false
from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

from lockstep.config import read_json
from lockstep.errors import CapabilityError, CheckpointError
from lockstep.models.adapters import decoder_over
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import load_checkpoint, load_weights, save_checkpoint
from lockstep.models.locate import locate_model
from lockstep.models.lora import LowRank, adapter_at, add_adapter, outputs_of, place_of
from lockstep.models.lora_config import AdapterSite, LoraShape, lora_sites
from lockstep.models.peft_format import unknown_settings
from lockstep.models.shapes import HFPiece, decoder_layout
from lockstep.models.sharding import is_sharded
from lockstep.ops.context import PackedContext, take_rows
from lockstep.ops.invariant import ask_for_reproducible_gemm
from lockstep.run.build import choose_numerics

Tensor = torch.Tensor

IGNORED = -100
"""Label of a token that is not scored: the number that transformers takes."""
IN_TRL = "For TRL: give `lockstep.integrations.trl.LockstepMixin` as its trainer's first base."
OF_TRANSFORMERS = re.compile(
    "(attn|experts)_implementation|trust_remote_code|local_files_only|low_cpu_mem_usage"
    "|use_(safetensors|cache)|return_dict|_from_auto|adapter_kwargs"
)
"""Arguments that choose among implementations of transformers: without effect here."""


class LockstepConfig(PreTrainedConfig):
    """Config of a checkpoint directory that the decoder reads."""

    model_type = "lockstep"

    checkpoint: str = ""
    """The directory. Its config.json describes the model; `save_pretrained` of the model writes
    that file again, so that transformers reads the weights as its own architecture."""
    contract: str = "auto"
    """As the setting `contract` of a run: auto, true-on-policy or none."""

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> LockstepConfig:
        """name: as for the setting `model`: a directory, a shipped model, a model of the hub."""
        root = locate_model(str(name))
        theirs = read_json(root / "config.json", CheckpointError)
        ours = ModelConfig.from_directory(root)
        ids = {key: theirs.get(key) for key in ("eos_token_id", "bos_token_id", "pad_token_id")}
        return cls(
            checkpoint=str(root),
            name_or_path=str(name),
            vocab_size=ours.vocab_size,
            hidden_size=ours.hidden_size,
            intermediate_size=ours.intermediate_size,
            num_hidden_layers=ours.num_layers,
            num_attention_heads=ours.num_heads,
            num_key_value_heads=ours.num_kv_heads,
            max_position_embeddings=ours.max_positions,
            tie_word_embeddings=ours.tie_embeddings,
            **ids | options,
        )


@dataclass
class ScoredOutput(CausalLMOutput):
    """Besides `loss` and `logits`: per token [B, L - 1] float32, 0 where the label is IGNORED."""

    log_probs: Tensor | None = None
    """Log-prob of each label, given the tokens before it, at the model's `temperature`."""
    entropy: Tensor | None = None

    @property
    def last_hidden_state(self) -> Tensor:
        """Read by TRL's own head, whose log-probs would not be the sampler's."""
        raise CapabilityError(f"LockstepForCausalLM gives log-probs, no hidden states. {IN_TRL}")


class HFWeight(nn.Module):
    """A module under Hugging Face's name. It has no parameters: its weight is a view of the
    decoder's, which may hold several such weights in one."""

    def __init__(self, decoder: Decoder, parameter: str, piece: HFPiece) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = piece.shape
        self.bias = None
        self._place = (decoder, parameter, piece)  # a tuple hides the decoder from modules()

    @property
    def weight(self) -> Tensor:
        decoder, parameter, piece = self._place
        return piece.view(decoder.get_parameter(parameter))

    def forward(self, *_: Any) -> Tensor:
        raise CapabilityError("LockstepForCausalLM: its decoder computes; call the whole model.")


class HFProjection(HFWeight, nn.Linear):
    """A projection, which PEFT may wrap."""


class PeftLowRank(LowRank):
    """An adapter of one of the decoder's projections, over the parameters of PEFT's layers."""

    def __init__(self, parts: list[tuple[int, Any]], sizes: list[int]) -> None:
        """parts: index among all parts of the projection, and PEFT's layer of each adapted part."""
        nn.Module.__init__(self)
        self.places, self.sizes = [place for place, _ in parts], sizes
        self.outputs = outputs_of(self.places, sizes)
        self._layers = tuple(layer for _, layer in parts)  # a tuple hides them from modules()

    def _factors(self, kind: str) -> list[Tensor]:
        """In the dtype of the weights: PEFT may keep the parameters in a wider one."""
        return [
            getattr(layer, kind)[self.active].weight.to(layer.base_layer.weight.dtype)
            for layer in self._layers
        ]

    @property
    def active(self) -> str:
        """Name of the adapter in use. PEFT has several for a reference policy."""
        first = self._layers[0]
        if len(first.active_adapters) != 1 or first.merged:
            raise CapabilityError(
                f"LockstepForCausalLM adds one adapter of PEFT, unmerged; active: "
                f"{first.active_adapters}, merged: {first.merged_adapters}. Activate one, unmerged."
            )
        return first.active_adapters[0]

    @property
    def is_on(self) -> bool:
        return not self._layers[0].disable_adapters

    @property
    def rank(self) -> int:
        return self._layers[0].r[self.active]

    @property
    def scale(self) -> float:
        return self._layers[0].scaling[self.active]

    @property
    def A(self) -> Tensor:
        return torch.cat(self._factors("lora_A"))

    @property
    def B(self) -> list[Tensor]:
        return self._factors("lora_B")


class LockstepForCausalLM(PreTrainedModel):
    """The decoder behind the interface that trainers call. `decoder` is the model itself.

    Rows are computed without their padding, at positions that count from 0. `temperature` divides
    the logits of `log_probs` and `entropy`.
    """

    config_class = LockstepConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ("Block",)
    _supports_sdpa = True

    def __init__(self, config: LockstepConfig, *, decoder: Decoder | None = None) -> None:
        """decoder: None draws random weights, in float32."""
        super().__init__(config)
        self.decoder = decoder or Decoder(ModelConfig.from_directory(config.checkpoint))
        self.gradient_checkpointing, self.temperature = False, 1.0
        self._sampled: Decoder | None = None
        self._add_names()
        place, ids = Path(config.checkpoint), ("eos_token_id", "bos_token_id", "pad_token_id")
        if (place / "generation_config.json").is_file():
            self.generation_config = GenerationConfig.from_pretrained(place)
        else:
            self.generation_config = GenerationConfig(**{key: getattr(config, key) for key in ids})
        ask_for_reproducible_gemm()
        self.numerics = choose_numerics(config.contract, self.decoder)
        """`is_kept`: True if the contract holds on this machine; `line` gives the reason."""
        self.post_init()

    def _add_names(self) -> None:
        """Gives projections and embeddings a module under Hugging Face's name."""
        config = self.decoder.config
        names = {site.hf_name for site in lora_sites(config) if not site.num_experts}
        for parameter, layout in decoder_layout(config).items():
            for piece in layout.pieces:
                name = piece.name.removesuffix(".weight")
                name = name.replace(config.prefix, config.module_prefix, 1)
                is_embedding = parameter in ("embedding", "untied_head")
                if name not in names and not is_embedding:
                    continue
                kind = HFWeight if is_embedding else HFProjection
                named = kind(self.decoder, parameter, piece)
                parent, _, last = name.rpartition(".")
                self._container(parent).add_module(last, named)
                if parameter == "embedding":
                    self._embeddings = self._head = (named,)
                elif is_embedding:
                    self._head = (named,)

    def _container(self, name: str) -> nn.Module:
        owner: nn.Module = self
        for part in filter(None, name.split(".")):
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        return owner

    # -- the forward --------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        fused_lm_head: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **options: Any,
    ) -> ScoredOutput:
        """input_ids, attention_mask, position_ids, labels: [B, L]. A row also ends where positions
        do not go on by 1. labels: IGNORED is not scored, nor is the first token of a row.
        fused_lm_head: no logits, only log-probs (TRL's keyword). logits_to_keep: the last columns
        alone, all for 0; padding has zeros.

        Raises CapabilityError for an option that the decoder does not have.
        """
        given = [name for name, value in options.items() if value is not None]
        refused = [n for n in given if options[n] is not False and not OF_TRANSFORMERS.fullmatch(n)]
        if refused:
            raise CapabilityError(
                f"LockstepForCausalLM computes text without a cache; it cannot take "
                f"{', '.join(refused)}. Leave it out."
            )
        self._take_adapter()
        decoder, device = self.decoder, input_ids.device
        decoder.recomputes_blocks = self.gradient_checkpointing and self.training
        is_token_BL = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        is_token_BL = is_token_BL.bool()
        places_BL = is_token_BL.flatten().cumsum(0).view_as(is_token_BL) - 1
        in_row_BL = is_token_BL.cumsum(1) - 1
        positions_T = in_row_BL if position_ids is None else position_ids.expand_as(input_ids)
        positions_T = positions_T[is_token_BL]
        begins_T = in_row_BL[is_token_BL] == 0
        begins_T[1:] |= positions_T[1:] != positions_T[:-1] + 1
        starts = begins_T.nonzero()[:, 0]
        sizes = starts.diff(append=starts.new_tensor([len(begins_T)])).tolist()
        context = PackedContext.of(sizes, device=device)
        with torch.autocast(device.type, enabled=False):
            hidden_TD = decoder(input_ids[is_token_BL], positions_T, context)
            out = ScoredOutput()
            if not fused_lm_head:
                kept = slice(-logits_to_keep, None) if logits_to_keep else slice(None)
                is_kept = is_token_BL[:, kept]
                logits = decoder.logits(take_rows(hidden_TD, places_BL[:, kept][is_kept]))
                out.logits = _spread(logits, is_kept)
            if labels is not None:
                is_scored = is_token_BL[:, 1:] & (labels[:, 1:] != IGNORED)
                is_scored &= ~begins_T[places_BL[:, 1:]]
                places_N = places_BL[:, 1:][is_scored] - 1
                logprobs_N, entropy_N = decoder.log_probs(
                    take_rows(hidden_TD, places_N),
                    labels[:, 1:][is_scored],
                    temperature=self.temperature,
                )
                out.log_probs = _spread(logprobs_N, is_scored)
                out.entropy = _spread(entropy_N, is_scored)
                out.loss = -logprobs_N.sum() / (num_items_in_batch or max(len(places_N), 1))
        return out

    @classmethod
    def can_generate(cls) -> bool:
        return False

    def generate(self, *_: Any, **__: Any) -> Any:
        raise CapabilityError(
            f"LockstepForCausalLM does not generate: Lockstep's engine samples from it. {IN_TRL}"
        )

    @property
    def prepare_inputs_for_generation(self) -> Any:
        """PEFT asks for it as soon as it has put its layers into the module tree."""
        self._take_adapter()
        return self.generate

    # -- adapters of PEFT ---------------------------------------------------------------------

    def _take_adapter(self) -> None:
        """Lets the decoder compute with the layers that PEFT has put into the module tree."""
        for name, module in list(self.decoder.named_modules()):
            if hasattr(module, "get_base_layer"):  # its own projection has the name of a target
                self.decoder.set_submodule(name, module.get_base_layer())
        config, sites = self.decoder.config, []
        for projection, group in groupby(lora_sites(config), lambda site: site.projection):
            parts = [site for site in group if not site.num_experts]
            layers = [(i, self.get_submodule(site.hf_name)) for i, site in enumerate(parts)]
            layers = [(i, layer) for i, layer in layers if not isinstance(layer, HFWeight)]
            if parts:
                owner, attribute, _ = place_of(self.decoder, projection)
                sizes = [site.outputs for site in parts]
                setattr(owner, attribute, PeftLowRank(layers, sizes) if layers else None)
            sites += [parts[i] for i, _ in layers]
        before, self.decoder.lora = self.decoder.lora, self._shape_of(tuple(sites))
        if self.decoder.lora != before:
            self.numerics = choose_numerics(self.config.contract, self.decoder)

    def _shape_of(self, sites: tuple[AdapterSite, ...]) -> LoraShape | None:
        if not sites:
            return None
        layer = self.get_submodule(sites[0].hf_name)
        settings = self.peft_config[layer.active_adapters[0]]
        problems = unknown_settings(settings.to_dict())
        if settings.lora_dropout:
            problems.append(f"lora_dropout={settings.lora_dropout} would make the sides differ")
        if problems:
            raise CapabilityError(f"LockstepForCausalLM: adapter of PEFT: {'; '.join(problems)}.")
        return LoraShape(
            rank=settings.r, alpha=settings.lora_alpha, rslora=settings.use_rslora, sites=sites
        )

    def for_engine(self) -> Decoder:
        """The decoder that an engine in this process samples from, with today's weights.

        Without an adapter it is the trained one; else one that shares its weights and has a copy
        of the adapter, which this call brings up to date. Raises CapabilityError for a model that
        is spread over processes.
        """
        if any(map(is_sharded, self.parameters())):
            raise CapabilityError(
                "LockstepForCausalLM is spread over processes (FSDP2), and the embedded engine "
                "samples from a whole model. Leave out sampler: the trainer's own engine samples."
            )
        self._take_adapter()
        shape = self.decoder.lora
        if shape is None:
            return self.decoder
        if self._sampled is None or self._sampled.lora != shape:
            self._sampled = decoder_over(self.decoder)
            add_adapter(self._sampled, shape, seed=0)
        with torch.no_grad():
            for projection in dict.fromkeys(site.projection for site in shape.sites):
                theirs, ours = (adapter_at(m, projection) for m in (self.decoder, self._sampled))
                ours.A.copy_(theirs.A)
                for mine, new in zip(ours.B, theirs.B, strict=True):
                    mine.copy_(new)
        return self._sampled

    # -- what transformers asks of a model ----------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        config: LockstepConfig | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        contract: str = "auto",
        **options: Any,
    ) -> LockstepForCausalLM:
        """A checkpoint that Lockstep reads. name: as for `LockstepConfig.from_pretrained`.

        Raises CapabilityError for options of transformers that would change the numbers.
        """
        refused = [k for k, v in options.items() if v and not OF_TRANSFORMERS.fullmatch(k)]
        if refused:
            raise CapabilityError(
                f"LockstepForCausalLM.from_pretrained cannot take {', '.join(refused)}; it takes "
                "config, dtype, device and contract."
            )
        config = config or LockstepConfig.from_pretrained(name, contract=contract)
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        decoder = load_checkpoint(config.checkpoint, dtype=dtype, device=device)
        return cls(config, decoder=decoder).eval()

    def save_pretrained(
        self, save_directory: str | Path, is_main_process: bool = True, **_: Any
    ) -> None:
        """Writes the checkpoint under its own architecture, an adapter merged in: transformers
        and Lockstep read it. Other files of the directory stay."""
        target = Path(save_directory)
        target.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target) as place:
            written = Path(place) / "checkpoint"
            save_checkpoint(
                self.decoder, written, like=self.config.checkpoint, is_writer=is_main_process
            )
            for file in written.iterdir() if is_main_process else ():
                os.replace(file, target / file.name)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Takes Hugging Face's names too: what `save_pretrained` wrote, when a trainer resumes."""
        if any(name.startswith("decoder.") for name in state_dict):
            return super().load_state_dict(state_dict, strict, assign)
        load_weights(self.decoder, state_dict, where="load_state_dict")
        return super().load_state_dict({}, strict=False)

    def get_input_embeddings(self) -> nn.Module:
        return self._embeddings[0]

    def get_output_embeddings(self) -> nn.Module:
        return self._head[0]

    def _init_weights(self, module: nn.Module) -> None:
        """The decoder has drawn or loaded its weights."""


def _spread(values_N: Tensor, is_there: Tensor) -> Tensor:
    """[*is_there.shape, ...]: the values where they belong, and zeros."""
    out = values_N.new_zeros(*is_there.shape, *values_N.shape[1:])
    out[is_there] = values_N
    return out


AutoConfig.register(LockstepConfig.model_type, LockstepConfig)
AutoModelForCausalLM.register(LockstepConfig, LockstepForCausalLM)
